"""Medusa heads: residual blocks and an output head each, over the target's last state.

Head k proposes the token k + 2 places after the state's own; there is no embedding and no
attention. Two layouts: the original `medusa_lm_head.pt` names by position in a `Sequential`, whose
config knows heads and blocks only (older files not even those), and vLLM's, whose config states the
sizes and may shorten the vocabulary by `token_map`, which holds absolute target ids.
*Source:* FasterDecoding/Medusa `medusa_model.py`; vLLM `medusa.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from specctl.checkpoint import Checkpoint
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.roles import ALWAYS, OPTIONAL
from specctl.draft import DraftCheckpoint
from specctl.formats.assemble import assemble
from specctl.formats.aux_layers import NO_AUX
from specctl.formats.fields import Fields, ReaderFindings, root_fields
from specctl.formats.heads.indexed import (
    Row,
    count_heads,
    match,
    numbers,
    report_blocks,
    rows_of,
    table,
    with_sizes,
)
from specctl.formats.names import FileTables, Matched
from specctl.formats.vocabulary import VocabularyFacts

ORIGINAL_BLOCK = r"(\d+)\.(\d+)\.linear\.(?:weight|bias)"
ORIGINAL_HEAD = r"(\d+)\.(\d+)\.weight"
VLLM_BLOCK = r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(?:weight|bias)"


def read_original(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft of a `medusa_lm_head.pt`; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    keys = checkpoint.tensors
    found = set(numbers(keys, ORIGINAL_BLOCK)) | set(numbers(keys, ORIGINAL_HEAD))
    heads = count_heads(root, "medusa_num_heads", len(found))
    blocks = len(numbers(keys, ORIGINAL_BLOCK, 2)) or root.integer("medusa_num_layers") or 0
    report_blocks(root, "medusa_num_layers", blocks)
    tables = table(original_rows(heads, blocks))
    matched = _match(checkpoint, tables, root)
    head = matched.tensors.get("heads.0.head")
    block = matched.tensors.get("heads.0.blocks.0.weight")
    rule = "rows of the first head and block"
    sizes = with_sizes(root, {"hidden_size": rows_of(block), "vocab_size": rows_of(head)}, rule)
    return _assemble(
        checkpoint, "medusa", root, sizes, matched, tables, vocabulary=_identity(sizes), heads=heads
    )


def read_vllm(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft in vLLM's layout; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    keys = checkpoint.tensors
    heads = count_heads(root, "num_heads", len(numbers(keys, VLLM_BLOCK)))
    blocks = len(numbers(keys, VLLM_BLOCK, 2)) or root.integer("num_hidden_layers") or 0
    report_blocks(root, "num_hidden_layers", blocks)
    is_shared = bool(root.flag("original_lm_head"))
    tables = table(vllm_rows(heads, blocks, is_shared=is_shared))
    matched = _match(checkpoint, tables, root)
    has_bias = root.flag("medusa_fc_bias")
    stored = [ref for role, ref in matched.tensors.items() if role.endswith(".bias")]
    if stored and not has_bias:
        root.findings.add(
            "SD506",
            where=f"{stored[0].file}::{stored[0].key}",
            message=f"`{stored[0].key}` is stored and `medusa_fc_bias` is not true",
            expected="`medusa_fc_bias`: true",
            found=root.raw("medusa_fc_bias") or "nothing",
        )
    vocabulary = _vllm_vocabulary(checkpoint, root, matched)
    return _assemble(
        checkpoint, "vllm-medusa", root, root, matched, tables, vocabulary=vocabulary, heads=heads
    )


def original_rows(heads: int, blocks: int) -> Iterator[Row]:
    """Yield names and shapes of a `medusa_lm_head.pt` with as many heads of as many blocks."""
    for h in range(heads):
        for b in range(blocks):
            yield Row(
                role=f"heads.{h}.blocks.{b}.weight",
                keys=(f"{h}.{b}.linear.weight",),
                shape=("H", "H"),
            )
            yield Row(
                role=f"heads.{h}.blocks.{b}.bias",
                keys=(f"{h}.{b}.linear.bias",),
                shape=("H",),
                when="block_bias",
            )
        yield Row(role=f"heads.{h}.head", keys=(f"{h}.{blocks}.weight",), shape=("V", "H"))


def vllm_rows(heads: int, blocks: int, *, is_shared: bool) -> Iterator[Row]:
    """Yield names and shapes of vLLM's layout; `is_shared`: one output matrix for all heads."""
    for h in range(heads):
        for b in range(blocks):
            stem = f"blocks.{h}.layers.{b}."
            for kind, shape, when in (
                ("weight", ("H", "H"), ALWAYS),
                ("bias", ("H",), "block_bias"),
            ):
                yield Row(
                    role=f"heads.{h}.blocks.{b}.{kind}",
                    keys=(f"{stem}{kind}", f"medusa_heads.{stem}{kind}"),
                    shape=shape,
                    when=when,
                )
        if not is_shared:
            name = f"lm_heads.{h}.weight"
            yield Row(role=f"heads.{h}.head", keys=(name, f"medusa_heads.{name}"), shape=("S", "H"))
    if is_shared:
        yield Row(role="head", keys=("lm_head.weight",), shape=("S", "H"))
    yield Row(role="token_map", keys=("token_map",), shape=("R",), when=OPTIONAL)


def _match(checkpoint: Checkpoint, tables: FileTables, root: Fields) -> Matched:
    has_bias = any(key.endswith(".bias") for key in checkpoint.tensors)
    conditions = frozenset({"block_bias"} if has_bias else ())
    return match(checkpoint, tables, root, conditions=conditions)


def _identity(sizes: Fields) -> VocabularyFacts:
    size = sizes.integer("vocab_size", "vocabulary.target_vocab_size")
    sizes.integer("vocab_size", "vocabulary.draft_vocab_size")
    return VocabularyFacts(
        target_vocab_size=size, draft_vocab_size=size, d2t=None, t2d=None, draft_to_target=None
    )


def _vllm_vocabulary(checkpoint: Checkpoint, root: Fields, matched: Matched) -> VocabularyFacts:
    size = root.integer("vocab_size", "vocabulary.target_vocab_size", is_required=True)
    reduced = root.integer("truncated_vocab_size", "vocabulary.draft_vocab_size")
    ref, ids = matched.tensors.get("token_map"), None
    if ref is not None:
        try:
            ids = tuple(checkpoint.read_ints(ref.key))
        except DiagnosticError as error:
            root.findings.extend(error.diagnostics)
        where = f"{ref.file}::{ref.key}"
        root.findings.derived("vocabulary.map_digest", where, "token_map holds absolute ids")
    return VocabularyFacts(
        target_vocab_size=size,
        draft_vocab_size=size if reduced is None else reduced,
        d2t=None,
        t2d=None,
        draft_to_target=ids,
    )


def _assemble(
    checkpoint: Checkpoint,
    name: str,
    root: Fields,
    sizes: Fields,
    matched: Matched,
    tables: FileTables,
    *,
    vocabulary: VocabularyFacts,
    heads: int,
) -> DraftCheckpoint:
    hidden = sizes.integer("hidden_size", "draft.target_hidden_size")
    known = {"H": hidden, "S": _stored_rows(matched, vocabulary)}
    return assemble(
        checkpoint,
        format=name,
        algorithm="medusa",
        roles=tables.roles,
        root=root,
        layers=sizes,
        matched=matched,
        decoder=None,
        target_hidden_size=hidden,
        target_num_layers=None,
        aux=NO_AUX,
        vocabulary=vocabulary,
        num_speculative_tokens=heads or None,
        geometry=None,
        sizes={symbol: size for symbol, size in known.items() if size is not None},
        details={"num_heads": heads},
    )


def _stored_rows(matched: Matched, vocabulary: VocabularyFacts) -> int | None:
    """Return the head rows that a file must have: all target ids, or those of the map.

    vLLM takes a full head's rows by the map while it loads, so both are right.
    """
    head = matched.tensors.get("heads.0.head") or matched.tensors.get("head")
    whole = vocabulary.target_vocab_size
    return whole if rows_of(head) == whole else vocabulary.draft_vocab_size
