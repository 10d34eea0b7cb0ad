"""Block, mask, anchor and heads of a block draft, from whichever places its dialect states them in.

Foreign conventions undone: `block_size` is our `draft_block_size`; a block whose slot 0 is a
trained prediction offers as many tokens as slots, one whose slot 0 only conditions offers one less.
*Source:* Speculators 0.7 to 0.9 (`sample_from_anchor`, default true in dspark and false in dflash,
dflash2 and xpress); DeepSpec (always true); z-lab (always false); `dspark_bonus_anchor` of vLLM's
flat configs is the opposite of `sample_from_anchor`.
"""

from __future__ import annotations

import json
from typing import Literal

from specctl.checkpoint import tensor_place
from specctl.contract.diagnostics import Severity
from specctl.contract.file_names import MASK_EMBEDDING
from specctl.contract.findings import Findings
from specctl.contract.manifest import Geometry, MarkovHead
from specctl.draft import block_geometry
from specctl.formats.block.places import Place, settle
from specctl.formats.fields import Fields, ReaderFindings
from specctl.formats.names import Matched
from specctl.formats.speculators import GAMMA_PATH

ANCHOR_PATH = "geometry.sample_from_anchor"


def settle_block(places: tuple[Place, ...]) -> tuple[Place, int | None]:
    """Return the place of the trained block and its size; SD206 when no place states it."""
    place = settle(places) or places[0]
    path = "geometry.draft_block_size"
    return place, place.fields.integer(place.key, path, is_required=True)


def read_mask_token(places: tuple[Place, ...], file_names: tuple[str, ...]) -> int | None:
    """Return the id that the slots after the anchor are fed; SD314 when no place states it.

    A file with the vector itself (`MASK_EMBEDDING`) stands in for the embedding's row.
    """
    place = settle(places)
    findings = places[0].fields.findings
    has_file = MASK_EMBEDDING in file_names
    if place is not None:
        return place.fields.integer(place.key, "draft.mask_token_id", minimum=0)
    if not has_file:
        findings.add(
            "SD314",
            where=places[0].where,
            message=f"`{places[0].key}` is absent; the slots after the anchor have no input",
            expected="a target id",
            found="nothing",
        )
    return None


def read_anchor(places: tuple[Place, ...], *, default: bool | None, rule: str) -> bool | None:
    """Return whether slot 0 is a prediction.

    Args:
        places: of the flag; the value of `dspark_bonus_anchor` is turned round.
        default: of the dialect, None when it has none (then SD307).
        rule: name of the default.
    """
    place = settle(places)
    findings, where = places[0].fields.findings, places[0].where
    if place is not None:
        stated = place.fields.flag(place.key, ANCHOR_PATH)
        return None if stated is None else bool(place.meaning(stated))
    if default is None:
        findings.add(
            "SD307",
            where=where,
            message=f"`{places[0].key}` is absent, and nothing else tells what slot 0 is",
            expected="true or false",
            found="nothing",
            severity="error",
        )
    else:
        findings.derived(ANCHOR_PATH, where, rule)
    return default


def infer_anchor(root: Fields, size: int | None, tokens: int | None) -> bool | None:
    """Return the flag of a Speculators dspark config, whose early files lack it (SD307).

    An absent flag is settled by the token count and never by the class default alone.
    """
    key = "sample_from_anchor"
    stated = root.flag(key, ANCHOR_PATH)
    if stated is not None or root.has(key) or size is None:
        return stated
    if tokens == size:
        rule = "class default true, and the token count equals the block"
        root.findings.derived(ANCHOR_PATH, root.where(key), rule)
        return True
    inferred = False if tokens == size - 1 else None
    root.findings.add(
        "SD307",
        where=root.where(key),
        message=f"`sample_from_anchor` is absent; {tokens} tokens from a block of {size} "
        + ("mean a conditioning anchor" if inferred is False else "decide nothing"),
        expected="true or false",
        found="nothing" if inferred is None else "nothing, read as false",
        severity="error" if inferred is None else "warning",
    )
    if inferred is False:
        root.findings.derived(ANCHOR_PATH, root.where(key), "token count is block_size - 1")
    return inferred


def read_geometry(
    findings: ReaderFindings,
    *,
    size: int | None,
    anchor: bool | None,
    tokens: int | None,
    size_where: str,
    tokens_where: str,
) -> Geometry | None:
    """Return the widths of a round; SD302 when block, anchor and token count do not agree.

    Args:
        findings: of the reader.
        size: trained block.
        anchor: whether slot 0 is a prediction.
        tokens: as the file declares it, None where the dialect has no such field.
        size_where: place of the block.
        tokens_where: place of the token count, or of the block where there is none.
    """
    if size is None or anchor is None:
        return None
    available = size if anchor else size - 1
    if available < 1:
        _report_width(findings, tokens_where, size, anchor, tokens, is_error=True)
        return None
    if tokens is None:
        rule = "block_size with a sampled anchor, else block_size - 1"
        findings.derived(GAMMA_PATH, size_where, rule)
    elif tokens != available:
        # One token off is the other anchor convention; fewer are a shorter chain, which is legal.
        is_error = tokens > available or tokens == size - 1
        _report_width(findings, tokens_where, size, anchor, tokens, is_error=is_error)
    return block_geometry(
        draft_block_size=size, sample_from_anchor=anchor, num_speculative_tokens=tokens
    )


def _report_width(
    findings: Findings, where: str, size: int, anchor: bool, tokens: int | None, *, is_error: bool
) -> None:
    available = size if anchor else size - 1
    promised = "offers none" if tokens is None else f"promises {tokens} tokens"
    findings.add(
        "SD302",
        where=where,
        message=f"`sample_from_anchor` is {'true' if anchor else 'false'} but the config "
        f"{promised} from a block of {size}",
        expected=f"{available} ({'block_size' if anchor else 'block_size - 1'})",
        found=tokens,
        severity="error" if is_error else "warning",
    )


def read_markov(
    matched: Matched, *, rank: tuple[Place, ...], kind: tuple[Place, ...]
) -> MarkovHead | None:
    """Return DSpark's sequential head; SD207 for an unknown kind, SD506 for stored and unsaid."""
    path = "draft.markov"
    first = matched.tensors.get("markov_w1")
    place = settle(rank)
    findings = rank[0].fields.findings
    size: int | None
    if place is None:
        if first is None or len(first.shape) != 2:
            return None
        size = first.shape[1]
        findings.derived(path, tensor_place(first), "columns of markov_w1")
    else:
        size = place.fields.integer(place.key, path, minimum=0)
        if size == 0 and first is not None:
            report_unflagged(place, matched, "markov_w1", "above 0", severity="error")
    word = _markov_kind(kind, matched)
    return None if size is None or word is None or size < 1 else MarkovHead(rank=size, kind=word)


def _markov_kind(
    places: tuple[Place, ...], matched: Matched
) -> Literal["vanilla", "gated", "rnn"] | None:
    place = settle(places) or places[0]
    stated = place.fields.text(place.key)
    kind = stated or "vanilla"
    for role, expected in (("markov_gate.weight", "gated"), ("markov_joint.weight", "rnn")):
        if role in matched.tensors and kind != expected:
            is_absent = place.fields.raw(place.key) is None
            report_unflagged(
                place, matched, role, expected, severity="warning" if is_absent else "error"
            )
            kind = expected if is_absent else kind
    if kind == "vanilla":
        return "vanilla"
    if kind == "gated":
        return "gated"
    if kind == "rnn":
        return "rnn"
    place.fields.findings.add(
        "SD207",
        where=place.where,
        message=f"`{place.name}` is `{kind}`",
        expected="vanilla, gated or rnn",
        found=kind,
    )
    return None


def read_confidence(
    matched: Matched,
    markov: MarkovHead | None,
    *,
    enabled: tuple[Place, ...],
    with_markov: tuple[Place, ...],
) -> tuple[bool, bool]:
    """Return whether there is a confidence head, and whether it also reads the Markov embedding.

    Diagnostics: SD506 (stored and switched off), SD313 (reads an embedding that is not there).
    """
    has_head = _has_confidence(matched, enabled)
    place = settle(with_markov)
    path = "draft.is_confidence_with_markov"
    if place is None:
        rule = "true when there is a Markov head"
        with_markov[0].fields.findings.derived(path, with_markov[0].where, rule)
        return has_head, has_head and markov is not None
    stated = bool(place.fields.flag(place.key, path))
    if has_head and stated and markov is None:
        place.fields.findings.add(
            "SD313",
            where=place.where,
            message=f"`{place.name}` is true and `markov_rank` is 0",
            expected="false, or a Markov head",
            found="true",
        )
    return has_head, stated


def _has_confidence(matched: Matched, places: tuple[Place, ...]) -> bool:
    path = "draft.has_confidence_head"
    place = settle(places) or places[0]
    stated = place.fields.flag(place.key, path)
    is_stored = "confidence.weight" in matched.tensors
    if stated is None:
        place.fields.findings.derived(path, place.where, "the tensors are stored")
        return is_stored
    if is_stored and not stated:
        report_unflagged(place, matched, "confidence.weight", "true")
    return stated


def report_unflagged(
    place: Place,
    matched: Matched,
    role: str,
    expected: str,
    *,
    severity: Severity = "warning",
) -> None:
    """Report SD506: a tensor is stored and the flag at the place denies it.

    An error where the draft would compute something else than it was trained to.
    """
    ref = matched.tensors[role]
    value = place.fields.raw(place.key)
    shown = "absent" if value is None else json.dumps(value)
    place.fields.findings.add(
        "SD506",
        where=tensor_place(ref),
        message=f"`{ref.key}` is stored and `{place.name}` is {shown}",
        expected=f"`{place.key}`: {expected}",
        found="nothing" if value is None else value,
        severity=severity,
    )


def head_conditions(markov: MarkovHead | None, has_confidence: bool) -> frozenset[str]:
    """Return the `when` words of DSpark's role table that hold."""
    words: set[str] = set()
    if markov is not None:
        words |= {"markov", f"markov_{markov.kind}"}
    if has_confidence:
        words.add("confidence")
    return frozenset(words)


def causal_override(
    stated: bool | None, layer_types: tuple[str, ...] | None, findings: ReaderFindings, where: str
) -> dict[str, bool]:
    """Return the detail `causal` when it changes a layer, else nothing.

    Without it, sliding layers mask causally inside the block and full layers do not; the flag sets
    all layers alike. With unknown layer types the flag is kept as stated.
    """
    if stated is None:
        return {}
    if layer_types is not None:
        usual = {kind == "sliding_attention" for kind in layer_types}
        if usual == {stated}:
            return {}
    findings.read("draft.details.causal", where)
    return {"causal": stated}
