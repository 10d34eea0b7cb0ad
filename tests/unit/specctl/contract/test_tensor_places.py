"""Tensors that the manifest describes otherwise than their file stores them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specctl.contract.manifest import Manifest, TensorRef
from specctl.contract.tensor_places import verify_places

replace = msgspec.structs.replace


def write_weights(path: Path, refs: dict[str, TensorRef]) -> dict[str, TensorRef]:
    """Write bfloat16 zeros of the refs' shapes; return the refs with their true bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for ref in refs.values():
        size = (ref.shape[0] * (ref.shape[1] if len(ref.shape) == 2 else 1)) * 2
        header[ref.key] = {"dtype": "BF16", "shape": ref.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
    start = 8 + len(text)
    return {
        role: replace(
            ref,
            dtype="BF16",
            begin=start + header[ref.key]["data_offsets"][0],
            end=start + header[ref.key]["data_offsets"][1],
        )
        for role, ref in refs.items()
    }


@pytest.fixture
def stored(manifest: Manifest, tmp_path: Path) -> Manifest:
    """The manifest with its tensors in files below tmp_path."""
    assert manifest.draft is not None
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    target = write_weights(
        tmp_path / "target" / "model.safetensors",
        {"embedding": manifest.target.embedding, "head": manifest.target.head},
    )
    tensors = write_weights(tmp_path / "draft" / "model.safetensors", dict(manifest.draft.tensors))
    return replace(
        manifest,
        target=replace(manifest.target, **target),
        draft=replace(manifest.draft, tensors=tensors),
    )


def test_tensors_where_the_manifest_says(stored: Manifest, tmp_path: Path) -> None:
    assert verify_places(stored, tmp_path) == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": (48, 16)},
        {"shape": ()},
        {"dtype": "F16"},
        {"begin": 0},
        {"end": 1},
        {"key": "other"},
    ],
)
@pytest.mark.parametrize("part", ["embedding", "head", "fc"])
def test_each_difference_is_named(
    stored: Manifest, tmp_path: Path, part: str, wrong: dict[str, Any]
) -> None:
    assert stored.draft is not None
    if part == "fc":
        tensors = {**stored.draft.tensors, "fc": replace(stored.draft.tensors["fc"], **wrong)}
        edited = replace(stored, draft=replace(stored.draft, tensors=tensors))
        place = "manifest#/draft/tensors/fc"
    else:
        ref = replace(getattr(stored.target, part), **wrong)
        edited = replace(stored, target=replace(stored.target, **{part: ref}))
        place = f"manifest#/target/{part}"
    (found,) = verify_places(edited, tmp_path)
    assert (found.code, found.where) == ("SD710", place)
    assert found.expected != found.found


def test_archives_have_no_header(stored: Manifest, tmp_path: Path) -> None:
    target = stored.target
    head = replace(target.head, file="pytorch_model.bin", shape=())
    assert verify_places(replace(stored, target=replace(target, head=head)), tmp_path) == ()
