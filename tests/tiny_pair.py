"""A tiny target with its draft, and a way to break their files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specctl.contract.manifest import Manifest
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import tiny_manifest

Edit = Callable[[dict[str, torch.Tensor]], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Directories of a target and a draft."""

    target: Path
    draft: Path

    def manifest(self) -> Manifest:
        return tiny_manifest(self.target, self.draft)


def write_pair(directory: Path) -> Pair:
    """Write a two-layer target and a one-layer draft."""
    target = write_tiny_target(directory / "target", num_layers=2)
    draft = write_tiny_eagle3(directory / "draft", target, boundary_ids=(0, 1, 2))
    return Pair(target=target, draft=draft)


def edit_tensors(directory: Path, edit: Edit) -> None:
    """Rewrite the single weight file after `edit` changed its tensors."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
