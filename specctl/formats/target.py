"""The target's row of the registry: an embedding and a trunk, whatever else is bundled."""

from __future__ import annotations

import re

from specctl.formats import block, mtp
from specctl.formats.embedding import EMBEDDING_KEYS, only_embedding_like, trunk_prefix
from specctl.formats.format import Evidence, Format
from specctl.formats.model_types import ARCHITECTURES

BUNDLED_LAYOUTS: tuple[str, ...] = tuple(
    dict.fromkeys(
        layout
        for entry in (*mtp.FORMATS, *block.FORMATS)
        if entry.is_bundled
        for layout in entry.layouts
    )
)


def claim(evidence: Evidence) -> str | None:
    """Return the embedding's key of a checkpoint that has trunk layers, or no draft's layout."""
    if not evidence.generic:
        is_draft = evidence.is_speculators or "draft_vocab_size" in evidence.config
        return None if is_draft else evidence.architecture_mark(*ARCHITECTURES)
    embedding = next((key for key in EMBEDDING_KEYS if key in evidence.generic), None)
    if evidence.is_speculators:
        return None
    if embedding is None:  # another spelling, taken only with layers beside it
        other = only_embedding_like(evidence.generic)
        is_target = other is not None and _has_trunk(evidence, trunk_prefix(other))
        return f"tensor {other}" if is_target and not evidence.layouts else None
    # A draft may carry an embedding spelled like a target's; it has no trunk layers beside it.
    if evidence.layouts and not _has_trunk(evidence, trunk_prefix(embedding)):
        return None
    return f"tensor {embedding}"


def _has_trunk(evidence: Evidence, prefix: str) -> bool:
    """Tell whether layers other than bundled draft layers lie beside the embedding."""
    trunk = re.compile(re.escape(prefix) + r"(?:layers|h|blocks)\.(\d+)\..*")
    bundled = {found[1] for key in evidence.layouts.values() if (found := trunk.fullmatch(key))}
    return any(
        (found := trunk.fullmatch(key)) and found[1] not in bundled
        for key in evidence.generic.values()
    )


TARGET = Format(
    name="huggingface",
    title="Hugging Face target",
    role="target",
    algorithm=None,
    layouts=BUNDLED_LAYOUTS,
    claim=claim,
    read=None,
    source="transformers 5.24 model classes",
)
