"""What a load format asks of the files, and what a dummy yields in place of their numbers."""

from __future__ import annotations

import zlib

import torch

from runtime.config import LoadFormat
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import Draft, Manifest, Target

_STD = 0.02  # of dummy matrices: states stay finite over any number of layers


def file_problems(manifest: Manifest, load_format: LoadFormat) -> list[Diagnostic]:
    """Return SD857 for every file that `safetensors` does not cover."""
    if load_format != "safetensors":
        return []
    sources: list[Target | Draft] = [manifest.target]
    if manifest.draft is not None:
        sources.append(manifest.draft)
    return [
        diagnose(
            "SD857",
            where=f"{source.source}/{file.file}",
            message="load format `safetensors` is asked for, and this file is none",
            expected="files that end in .safetensors",
            found=file.file,
        )
        for source in sources
        for file in source.files
        if not file.file.endswith(".safetensors")
    ]


def dummy_weight(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return float32 numbers that the key alone decides: every stage and rank makes the same.

    Vectors are ones, as norms are before training.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.empty(shape).normal_(0.0, _STD, generator=generator)
