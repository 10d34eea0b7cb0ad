"""Two checkpoints of one shape are told apart by their numbers, wherever they lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from runtime.loading.weight_samples import weights_digest
from tests.tiny_manifest import tiny_manifest
from tests.tiny_pair import Pair, edit_tensors, write_pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(tmp_path / "one")


def digest(pair: Pair) -> str:
    return weights_digest(tiny_manifest(pair.target, pair.draft), Path())


def copied(pair: Pair, directory: Path) -> Pair:
    shutil.copytree(pair.target, directory / "target")
    shutil.copytree(pair.draft, directory / "draft")
    return Pair(target=directory / "target", draft=directory / "draft")


def test_a_copy_has_the_same_digest(pair: Pair, tmp_path: Path) -> None:
    assert digest(copied(pair, tmp_path / "two")) == digest(pair)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_one_tensor_of_other_numbers_changes_the_digest_and_nothing_else(
    pair: Pair, tmp_path: Path, part: str
) -> None:
    other = copied(pair, tmp_path / "two")

    def train(tensors: dict[str, torch.Tensor]) -> None:
        key = max(key for key in tensors if key.endswith("proj.weight"))
        tensors[key] = tensors[key] + 0.25

    edit_tensors(getattr(other, part), train)
    edit_tensors(getattr(pair, part), lambda tensors: None)  # both written by the same library
    assert other.manifest().fingerprint == pair.manifest().fingerprint
    assert digest(other) != digest(pair)


def test_what_cannot_be_read_is_left_to_the_loader(pair: Pair) -> None:
    manifest, before = tiny_manifest(pair.target, pair.draft), digest(pair)
    path = pair.target / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert weights_digest(manifest, Path()) != before
    path.unlink()
    assert weights_digest(manifest, Path()) != before
