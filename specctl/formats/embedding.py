"""Find a target's input embedding and output head among all spellings, and never a copy.

Invariants: a key inside a layer, or of an MTP, NextN, EAGLE or other draft part, is never picked
and listed by `find_decoys` for SD504; two genuine spellings at once are SD505.
*Source:* the exclusion rule is SGLang pull request 39643.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from specctl.checkpoint import TensorEntry
from specctl.contract.manifest import TensorRef
from specctl.formats.fields import Findings
from specctl.formats.names import as_ref

EMBEDDING_KEYS: tuple[str, ...] = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.word_embeddings.weight",
    "tok_embeddings.weight",
    "embed.weight",
    "backbone.embeddings.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
    "gpt_neox.embed_in.weight",
    "llm.embed.weight",
)
HEAD_KEYS: tuple[str, ...] = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "output.weight",
    "head.weight",
    "gpt_neox.embed_out.weight",
    "llm.unembed.weight",
)

_STEMS = ("embed_tokens", "word_embeddings", "tok_embeddings", "embeddings", "wte", "embed_in")
_DECOY_PART = re.compile(r"mtp|nextn|eagle|draft|speculator")
_IN_LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")


def is_decoy(key: str) -> bool:
    """Tell whether a key lies inside a layer or a draft part of a checkpoint."""
    return bool(_IN_LAYER.search(key)) or any(
        _DECOY_PART.search(part.lower()) for part in key.split(".")
    )


def find_decoys(tensors: Mapping[str, TensorEntry]) -> tuple[TensorEntry, ...]:
    """Return the tensors that a match by suffix would take for the embedding, sorted by key."""
    return tuple(
        tensors[key]
        for key in sorted(tensors)
        if key.endswith(".weight")
        and key.removesuffix(".weight").rpartition(".")[2] in _STEMS
        and is_decoy(key)
    )


def find_embedding(
    tensors: Mapping[str, TensorEntry], findings: Findings | None
) -> TensorRef | None:
    """Return the target's input embedding; two spellings are SD505.

    Args:
        tensors: key -> entry of a checkpoint.
        findings: receives the diagnostics; None for a silent look-up.
    """
    return _first(tensors, EMBEDDING_KEYS, "embedding", findings)


def find_head(tensors: Mapping[str, TensorEntry], findings: Findings | None) -> TensorRef | None:
    """Return the target's output head, None when none is stored (a tied head, or a loss)."""
    return _first(tensors, HEAD_KEYS, "head", findings)


def _first(
    tensors: Mapping[str, TensorEntry],
    keys: tuple[str, ...],
    what: str,
    findings: Findings | None,
) -> TensorRef | None:
    present = [key for key in keys if key in tensors]
    if not present:
        return None
    if present[1:] and findings is not None:
        findings.add(
            "SD505",
            where=tensors[present[1]].describe(),
            message=f"`{present[0]}` and `{present[1]}` both name the {what}",
            expected="one spelling",
            found="two",
        )
    return as_ref(tensors[present[0]])
