"""Bytes: what the device has, what the weights take, what a KV block costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from runtime.kv import KVLayerSpec
from specctl.contract.manifest import Decoder, Manifest

_STORED_BYTES = {"F32": 4, "BF16": 2, "F16": 2}


def available_bytes(device: torch.device) -> int:
    """Return the memory that a new allocation on the device could get."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def weight_bytes(manifest: Manifest, dtype: torch.dtype, *, with_draft: bool) -> int:
    """Return the bytes that target and draft weights take in `dtype`."""
    parts = manifest.parallel
    total = _in_dtype(
        parts.head_bytes * (not manifest.target.is_head_tied)
        + parts.embedding_bytes
        + sum(parts.layer_bytes),
        manifest.target.dtype,
        dtype,
    )
    if with_draft and manifest.draft is not None:
        total += _in_dtype(parts.draft_bytes, manifest.draft.dtype, dtype)
    return total


def kv_block_bytes(
    manifest: Manifest, dtype: torch.dtype, *, kv_block_size: int, with_draft: bool
) -> int:
    """Return the bytes of one KV block over all layers of target and draft."""
    specs = [*_kv_specs(manifest.target.decoder)]
    if with_draft and manifest.draft is not None:
        specs += _kv_specs(manifest.draft.decoder)
    return sum(spec.block_bytes(kv_block_size, dtype) for spec in specs)


def _in_dtype(stored: int, stored_dtype: str, dtype: torch.dtype) -> int:
    return stored * dtype.itemsize // _STORED_BYTES.get(stored_dtype, dtype.itemsize)


def _kv_specs(decoder: Decoder) -> Iterator[KVLayerSpec]:
    for _ in range(decoder.num_layers):
        yield KVLayerSpec(num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim)
