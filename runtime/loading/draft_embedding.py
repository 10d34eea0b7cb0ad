"""Where the draft's input embedding comes from on this stage, decided by what the stage holds.

On one stage the draft shares the target's embedding. Beyond the first stage there is none to share:
the rows are a tensor of the draft, the target's head when that is tied, or the target's own tensor
read from its files once more, whole, and cut to the rank like every other vocabulary. Which tensor
that is was settled when the manifest was written (the index first; without one every shard; never a
copy inside a layer or a prediction part), so nothing is searched for here and no missing attribute
is taken as an answer.
*Source:* sgl-project/sglang#39643 (the cases), and the look-up of `specctl.embedding`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from runtime.loading.files import StoredTensor
from runtime.models import TargetModel
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import Manifest, TensorRef
from specctl.contract.stage_split import DraftEmbedding

logger = logging.getLogger(__name__)

_STEMS = ("embed_tokens", "word_embeddings", "tok_embeddings", "embed")
_LAYERS = "layers"


def embedding_origin(manifest: Manifest, target: TargetModel | None) -> DraftEmbedding:
    """Return where the draft's input embedding comes from on this stage.

    Args:
        manifest: has a draft.
        target: what the stage holds of the target; None: nothing.
    """
    sharing = manifest.sharing
    assert sharing is not None, "a manifest with a draft says what it shares"
    if target is not None and target.embedding is not None:
        return sharing.embedding_single_stage
    if sharing.embedding_multi_stage == "own":
        return "own"
    is_head = manifest.target.is_head_tied and target is not None and target.head is not None
    return "head" if is_head else "checkpoint"


def embedding_ref(manifest: Manifest, origin: DraftEmbedding) -> TensorRef | None:
    """Return the tensor in the files; None: a draft that has none of its own is asked for it."""
    assert manifest.draft is not None, "there is a draft"
    return manifest.draft.tensors.get("embedding") if origin == "own" else manifest.target.embedding


def embedding_problems(
    manifest: Manifest, draft_tensors: Mapping[str, StoredTensor], origin: DraftEmbedding
) -> list[Diagnostic]:
    """Return SD801 (there is no embedding) and SD858 (two tensors could be it).

    Args:
        manifest: has a draft.
        draft_tensors: what the draft's files store.
        origin: see `embedding_origin`.
    """
    draft, target = manifest.draft, manifest.target
    assert draft is not None, "there is a draft"
    ref = embedding_ref(manifest, origin)
    width = draft.decoder.hidden_size
    if ref is None or (origin == "own" and ref.key not in draft_tensors):
        has_head = "head" in draft.tensors
        return [
            diagnose(
                "SD801",
                where=f"{draft.source}::embedding",
                message="the draft is to use an embedding of its own, and its files hold none",
                expected=f"a matrix [{target.vocab_size}, {width}] under one of {_names()}",
                found="a head, which is no embedding" if has_head else "no such tensor",
            )
        ]
    if origin != "own":
        return _target_problems(manifest, ref)
    others = [
        tensor
        for key, tensor in draft_tensors.items()
        if key != ref.key and _is_candidate(key) and tensor.shape == ref.shape
    ]
    return [
        diagnose(
            "SD858",
            where=tensor.place,
            message=f"`{tensor.key}` could be the draft's input embedding as well as `{ref.key}`",
            expected="one tensor",
            found=f"`{ref.key}` and `{tensor.key}`",
        )
        for tensor in others
    ]


def log_embedding(ref: TensorRef | None, origin: DraftEmbedding, *, parameter: str) -> None:
    """Say which rows became the draft's embedding."""
    if ref is None:
        return
    words = {"target": "shared with the target", "head": "the target's tied head"}
    logger.info(
        "draft embedding %s: %s, tensor %s %s of %s",
        parameter,
        words.get(origin, "read from the draft" if origin == "own" else "read from the target"),
        ref.key,
        list(ref.shape),
        ref.file,
    )


def _target_problems(manifest: Manifest, ref: TensorRef) -> list[Diagnostic]:
    """Return SD801 for a manifest whose target embedding is a copy inside a layer."""
    if _LAYERS not in ref.key.split("."):
        return []
    return [
        diagnose(
            "SD801",
            where="manifest#/target/embedding/key",
            message=f"`{ref.key}` lies inside a layer: it is no input embedding of the target",
            expected=f"a matrix outside the layers, such as one of {_names()}",
            found=ref.key,
        )
    ]


def _is_candidate(key: str) -> bool:
    parts = key.removesuffix(".weight").split(".")
    return parts[-1] in _STEMS and _LAYERS not in parts


def _names() -> str:
    return ", ".join(f"`{stem}.weight`" for stem in _STEMS)
