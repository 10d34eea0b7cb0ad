"""Checks that need the whole tensor table, the config and the file names, whatever the format."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from specctl.checkpoint import Checkpoint
from specctl.checkpoint.config_sections import TEXT_SECTIONS, model_sections
from specctl.checks.quantization import Stored, check_quantization
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.file_names import MASK_EMBEDDING, PICKLE_INDEX, PICKLE_SINGLE
from specctl.contract.findings import capped

_COMMON_NAMES = ("model*.safetensors", "pytorch_model*.bin", "consolidated*.safetensors")
_PICKLES = (PICKLE_SINGLE, PICKLE_INDEX)
_TIE = "tie_word_embeddings"


def check_files(
    checkpoint: Checkpoint,
    *,
    side: Mapping[str, object] | None,
    draft_keys: frozenset[str] = frozenset(),
) -> tuple[Diagnostic, ...]:
    """Return SD124, SD417, SD418, SD511 to SD518 and SD531.

    Args:
        checkpoint: the opened files.
        side: object of `hf_quant_config.json`, None without one.
        draft_keys: keys of prediction layers inside a target.
    """
    config = checkpoint.config or {}
    stored = Stored(config=config, side=side, tensors=checkpoint.tensors, draft_keys=draft_keys)
    return capped(
        chain(
            check_quantization(stored),
            _check_names(checkpoint),
            _check_other_container(checkpoint),
            _check_mask_file(checkpoint),
            _check_tie(config),
        )
    )


def _check_names(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield SD531 for a file that only the index leads to."""
    if not any(name.endswith(".index.json") for name in checkpoint.file_names):
        return
    strange = [
        record.file
        for record in checkpoint.files
        if not any(fnmatch.fnmatchcase(record.file, pattern) for pattern in _COMMON_NAMES)
    ]
    counts = Counter(entry.file for entry in checkpoint.tensors.values()) if strange else {}
    for file in strange:
        yield diagnose(
            "SD531",
            where=file,
            message=f"`{file}` holds {counts[file]} tensors, and `{_COMMON_NAMES[0]}` does not "
            "match its name",
        )


def _check_other_container(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield SD124 for pickles beside safetensors: which of the two is read differs by engine."""
    if checkpoint.container != "safetensors":
        return
    for name in _PICKLES:
        if name in checkpoint.file_names:
            yield diagnose(
                "SD124",
                where=name,
                message=f"`{name}` was not read: the safetensors files decide; SafeAILab's EAGLE "
                "reads the pickle first",
                help="Remove it when it holds the same weights, or other ones",
                severity="info",
            )


def _check_mask_file(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    if MASK_EMBEDDING in checkpoint.file_names:
        yield diagnose(
            "SD417",
            where=MASK_EMBEDDING,
            message=f"`{MASK_EMBEDDING}` holds the mask token's vector; it is part of the draft",
        )


def _check_tie(config: Mapping[str, object]) -> Iterator[Diagnostic]:
    outer = config.get(_TIE)
    for key, section in model_sections(config):
        inner = section.get(_TIE) if key in TEXT_SECTIONS else None
        if isinstance(outer, bool) and isinstance(inner, bool) and outer != inner:
            yield diagnose(
                "SD418",
                where=f"config.json#/{key}/{_TIE}",
                message=f"`{_TIE}` is {str(inner).lower()} here and {str(outer).lower()} at the "
                "root",
                expected="one value",
                found=f"{str(outer).lower()} and {str(inner).lower()}",
            )
