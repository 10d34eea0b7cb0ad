"""Compare each tensor that a manifest points to with the header of its file.

Invariants: only safetensors headers are read, and only those whose digest was found right; a tensor
of a PyTorch archive has no header to compare with and is checked when it is read. Nothing is
executed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.digests import is_hub_source, resolve_source
from specctl.contract.manifest import Manifest, TensorRef


def verify_places(manifest: Manifest, manifest_dir: Path) -> tuple[Diagnostic, ...]:
    """Return SD710 for each tensor whose name, shape, dtype or bytes are not those of its file.

    Args:
        manifest: has passed `check_manifest` and `verify_digests`.
        manifest_dir: directory that relative paths count from.
    """
    target, draft = manifest.target, manifest.draft
    refs = {"target/embedding": target.embedding, "target/head": target.head}
    findings: list[Diagnostic] = []
    if not is_hub_source(target.source):
        findings += _compare(resolve_source(target.source, manifest_dir), refs)
    if draft is not None and not is_hub_source(draft.source):
        refs = {f"draft/tensors/{role}": ref for role, ref in draft.tensors.items()}
        findings += _compare(resolve_source(draft.source, manifest_dir), refs)
    return tuple(findings)


def _compare(directory: Path, refs: Mapping[str, TensorRef]) -> Iterator[Diagnostic]:
    places: dict[str, dict[str, str]] = {}
    for pointer, ref in refs.items():
        if not ref.file.endswith(".safetensors"):
            continue
        if ref.file not in places:
            places[ref.file] = _read_places(directory / ref.file)
        stored = places[ref.file].get(ref.key, "no such tensor")
        stated = _place(ref.shape, ref.dtype, ref.begin, ref.end)
        if stored != stated:
            yield diagnose(
                "SD710",
                where=f"manifest#/{pointer}",
                message=f"`{ref.key}` is not stored in `{ref.file}` as the manifest says",
                expected=stored,
                found=stated,
            )


def _read_places(path: Path) -> dict[str, str]:
    """Return key -> shape, dtype and bytes; offsets in the header count from its own end."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header: dict[str, dict[str, Any]] = json.loads(stream.read(length))
    start = 8 + length
    return {
        key: _place(item["shape"], item["dtype"], *(start + at for at in item["data_offsets"]))
        for key, item in header.items()
        if key != "__metadata__"
    }


def _place(shape: Iterable[int], dtype: str, begin: int, end: int) -> str:
    return f"{list(shape)} {dtype}, bytes {begin} to {end}"
