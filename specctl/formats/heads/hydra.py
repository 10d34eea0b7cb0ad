"""Hydra heads: Medusa's, where head i also reads the embeddings of the i + 1 tokens before its own.

The first block of a grounded head reads (state, i + 1 embeddings) side by side and has a second
linear for the residual path; further blocks are plain. The `prefix-mlp` variant runs one decoder
layer over the target's states first. Foreign convention undone: dropout layers take places in the
`Sequential`, so a block's number in the file is not its place. The embeddings are the target's.
*Source:* zankner/Hydra `hydra/model/hydra_heads/`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from specctl.checkpoint import Checkpoint, TensorEntry
from specctl.contract.roles import OPTIONAL, generic_role
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
from specctl.formats.names import ROTARY_BUFFER, Ignored, layer_names
from specctl.formats.vocabulary import VocabularyFacts

BLOCK = r"hydra_mlp\.(\d+)\.(\d+)\.linear\.weight"
HEAD = r"hydra_lm_head\.(\d+)\.(?:\d+\.)?weight"
PREFIX = "prefix_embeding_layer."  # spelled so by the writer
READ_VARIANTS = ("mlp", "prefix-mlp")

_IGNORED = (
    ROTARY_BUFFER,
    Ignored(
        pattern=re.escape(PREFIX) + r"embed_tokens\.weight",
        reason="the prefix layer reads states, never tokens",
    ),
)


def read(checkpoint: Checkpoint) -> DraftCheckpoint:
    """Return the draft of a `hydra_lm_head.pt`; every defect is in its diagnostics."""
    root = root_fields(checkpoint.config, ReaderFindings())
    stored = checkpoint.tensors
    heads = count_heads(
        root, "hydra_num_heads", len({*numbers(stored, BLOCK), *numbers(stored, HEAD)})
    )
    blocks = numbers(stored, BLOCK.replace(r"(\d+)", "0", 1))
    report_blocks(root, "hydra_num_layers", len(blocks))
    variant = _variant(root, has_prefix=any(key.startswith(PREFIX) for key in stored))
    is_grounded = _is_grounded(root, stored)
    tables = table(
        [
            *head_rows(stored, heads, is_grounded=is_grounded),
            *(_prefix_rows() if variant == "prefix-mlp" else ()),
        ],
        ignored=_IGNORED,
    )
    has_head_bias = any(key.startswith("hydra_lm_head") and key.endswith("bias") for key in stored)
    words = {"prefix": variant == "prefix-mlp", "head_bias": has_head_bias}
    conditions = frozenset(word for word, holds in words.items() if holds)
    matched = match(checkpoint, tables, root, conditions=conditions)
    sizes = with_sizes(
        root,
        {
            "hidden_size": rows_of(matched.tensors.get("heads.0.blocks.0.weight")),
            "vocab_size": rows_of(matched.tensors.get("heads.0.head")),
        },
        "rows of the first block and head",
    )
    hidden = sizes.integer("hidden_size", "draft.target_hidden_size")
    vocab = sizes.integer("vocab_size", "vocabulary.target_vocab_size")
    sizes.integer("vocab_size", "vocabulary.draft_vocab_size")
    return assemble(
        checkpoint,
        format="hydra",
        algorithm="hydra",
        roles=tables.roles,
        root=root,
        layers=sizes,
        matched=matched,
        decoder=None,
        target_hidden_size=hidden,
        target_num_layers=None,
        aux=NO_AUX,
        vocabulary=VocabularyFacts(
            target_vocab_size=vocab,
            draft_vocab_size=vocab,
            d2t=None,
            t2d=None,
            draft_to_target=None,
        ),
        num_speculative_tokens=heads or None,
        geometry=None,
        sizes={} if hidden is None else {"H": hidden},
        details={
            "num_heads": heads,
            "head_arch": variant,
            "grounded_heads": is_grounded,
            "hidden_state_offset": root.integer("hidden_state_offset", minimum=0) or 0,
            "dropout_rate": root.raw("dropout_rate"),
        },
    )


def _variant(root: Fields, *, has_prefix: bool) -> str:
    """Return the kind of head; SD205 for one that is not read, SD208 when the tensors disagree."""
    seen = "prefix-mlp" if has_prefix else "mlp"
    stated = root.text("hydra_head_arch")
    if stated is not None and stated not in READ_VARIANTS:
        root.findings.add(
            "SD205",
            where=root.where("hydra_head_arch"),
            message=f"heads of kind `{stated}` are not read",
            expected=" or ".join(READ_VARIANTS),
            found=stated,
        )
        return seen
    if stated is not None and stated != seen:
        root.findings.add(
            "SD208",
            where=root.where("hydra_head_arch"),
            message=f"`hydra_head_arch` is `{stated}` and the tensors are those of `{seen}`",
            expected=seen,
            found=stated,
        )
    return seen


def _is_grounded(root: Fields, stored: Mapping[str, TensorEntry]) -> bool:
    """Tell whether heads read embeddings; only such heads have a residual linear."""
    seen = any(".res_connection." in key for key in stored)
    stated = root.flag("grounded_heads")
    if stated is not None and stored and stated != seen:
        root.findings.add(
            "SD208",
            where=root.where("grounded_heads"),
            message=f"`grounded_heads` is {str(stated).lower()} and the file has "
            + ("" if seen else "no ")
            + "linears of the residual path",
            expected=str(seen).lower(),
            found=str(stated).lower(),
        )
    return seen or (bool(stated) and not stored)


def head_rows(stored: Iterable[str], heads: int, *, is_grounded: bool) -> Iterator[Row]:
    """Yield names and shapes of as many heads, with the blocks that the stored keys number."""
    stored = tuple(stored)
    for h in range(heads):
        places = numbers(stored, BLOCK.replace(r"(\d+)", str(h), 1)) or (0,)
        for block, place in enumerate(places):
            is_wide = is_grounded and block == 0
            columns = f"{h + 2}*H" if is_wide else "H"
            stem, role = f"hydra_mlp.{h}.{place}.", f"heads.{h}.blocks.{block}"
            yield Row(role=f"{role}.weight", keys=(f"{stem}linear.weight",), shape=("H", columns))
            yield Row(role=f"{role}.bias", keys=(f"{stem}linear.bias",), shape=("H",))
            if is_wide:
                name = f"{stem}res_connection."
                yield Row(
                    role=f"{role}.residual.weight", keys=(f"{name}weight",), shape=("H", columns)
                )
                yield Row(role=f"{role}.residual.bias", keys=(f"{name}bias",), shape=("H",))
        for kind, shape, when in (("", ("V", "H"), "always"), (".bias", ("V",), "head_bias")):
            name = kind or ".weight"
            yield Row(
                role=f"heads.{h}.head{kind}",
                keys=(f"hydra_lm_head.{h}.1{name}", f"hydra_lm_head.{h}{name}"),
                shape=shape,
                when=when,
            )


def _prefix_rows() -> Iterator[Row]:
    """Yield the prefix layer's rows; its sizes are the target's, which the file does not state."""
    shapes = {"input_norm": ("H",), "post_attention_norm": ("H",), "o_proj.weight": ("H", "Q")}
    for row in layer_names(PREFIX + "layers.0."):
        name = generic_role(row.role)[0].removeprefix("layers.{i}.")
        is_optional = name.endswith(".bias") or name in ("q_norm", "k_norm")
        yield Row(
            role=row.role.replace("{i}", "0"),
            keys=row.keys,
            shape=shapes.get(name, ("?",) if is_optional else ("?", "?")),
            when=OPTIONAL if is_optional else "prefix",
        )
    yield Row(role="norm", keys=(PREFIX + "norm.weight",), shape=("H",), when="prefix")
