"""The text that coverage is measured on: held-out domains and languages, and the target's outputs.

Rule: the target's own outputs are measured when they are given, since a draft proposes what the
target writes; else the held-out text; else the counted text, which SD427 warns about.
A ranked list has no text.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from specctl.ops.token_map_ranks import RANKS
from specctl.tokenmap.bench_outputs import MeasuredDrafts
from specctl.tokenmap.counting import LoadedTokenizer
from specctl.tokenmap.counts import CountArtefact, DomainCounts
from specctl.tokenmap.coverage import Slice
from specctl.tokenmap.outputs import Outputs, read_outputs
from specctl.tokenmap.selection import weighted_counts
from specctl.tokenmap.sizes import integer_weights

OUTPUTS, HELD_OUT, COUNTED = "the target's own outputs", "held-out text", "the counted text itself"
OUTPUTS_SLICE = "outputs"
NOTHING = "nothing: a list has ranks and no counts"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What coverage is measured on.

    Args:
        name: in words.
        whole: the text that decides sizes.
        slices: everything that gets a curve, the whole held-out text first.
        drafts: acceptance that a bench report among the outputs measured.
        num_outside: output tokens whose id the tokenizer does not have.
    """

    name: str
    whole: Slice
    slices: tuple[Slice, ...]
    drafts: MeasuredDrafts | None
    num_outside: int


def measured_slices(
    artefact: CountArtefact,
    tokenizer: LoadedTokenizer,
    weights: Mapping[str, Decimal],
    outputs: Sequence[str],
) -> Measured:
    """Return the slices.

    Args:
        artefact: counts of both sides.
        tokenizer: encodes outputs that are texts.
        weights: of domains, for the whole text.
        outputs: files of what the target wrote.

    Raises:
        DiagnosticError: SD422, SD423 of outputs that cannot be read.
    """
    has_held_out = artefact.held_out.num_tokens > 0
    is_ranked = artefact.facts.method_reason == RANKS
    table = artefact.held_out if has_held_out or is_ranked else artefact.counted
    whole = _whole(table.domains, weights, tokenizer.size)
    slices = [whole, *_parts("domain", table.domains), *_parts("language", table.languages)]
    name = NOTHING if is_ranked else HELD_OUT if has_held_out else COUNTED
    if not outputs:
        return Measured(name=name, whole=whole, slices=tuple(slices), drafts=None, num_outside=0)
    read = _read(outputs, tokenizer)
    own = _outputs_slice(read, tokenizer.size)
    slices.append(own)
    if len(read.parts) > 1:
        slices += [
            Slice(
                kind="outputs",
                name=f"outputs: {part.name}",
                per_id=part.per_id,
                total=part.num_tokens,
                num_tokens=part.num_tokens,
            )
            for part in read.parts
        ]
    return Measured(
        name=OUTPUTS,
        whole=own,
        slices=tuple(slices),
        drafts=read.measured,
        num_outside=sum(part.num_outside for part in read.parts),
    )


def _whole(
    domains: Sequence[DomainCounts], weights: Mapping[str, Decimal], tokenizer_size: int
) -> Slice:
    factors = integer_weights((domain.name for domain in domains), weights)
    per_id = weighted_counts([domain.per_id for domain in domains], factors, tokenizer_size)
    num_tokens = sum(domain.num_tokens for domain in domains)
    return Slice(kind="all", name="all", per_id=per_id, total=sum(per_id), num_tokens=num_tokens)


def _parts(kind: str, rows: Sequence[DomainCounts]) -> Iterable[Slice]:
    """Return a slice for each row; none for a single one, which is the whole."""
    if len(rows) < 2:
        return
    for row in rows:
        if row.num_tokens:
            yield Slice(
                kind="domain" if kind == "domain" else "language",
                name=row.name,
                per_id=row.per_id,
                total=row.num_tokens,
                num_tokens=row.num_tokens,
            )


def _read(outputs: Sequence[str], tokenizer: LoadedTokenizer) -> Outputs:
    def encode(texts: Sequence[str]) -> Iterable[Sequence[int]]:
        encodings = tokenizer.handle.encode_batch(list(texts), add_special_tokens=False)
        return (encoding.ids for encoding in encodings)

    return read_outputs(outputs, tokenizer_size=tokenizer.size, encode=encode)


def _outputs_slice(read: Outputs, tokenizer_size: int) -> Slice:
    total = array("Q", bytes(8 * tokenizer_size))
    for part in read.parts:
        for target_id, count in enumerate(part.per_id):
            if count:
                total[target_id] += count
    num_tokens = sum(part.num_tokens for part in read.parts)
    return Slice(
        kind="outputs", name=OUTPUTS_SLICE, per_id=total, total=num_tokens, num_tokens=num_tokens
    )
