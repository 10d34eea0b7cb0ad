"""Bytes and blocks: what the device has, what the weights take, how long requests may get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from runtime.config.ledger import Ledger, option_name
from runtime.config.values import DEFAULT_MEMORY_FRACTION
from runtime.kv import KVLayerSpec
from specctl.contract.diagnostics import diagnose
from specctl.contract.manifest import Decoder, Manifest
from specctl.contract.stage_split import Stage

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


def affordable_blocks(
    manifest: Manifest,
    dtype: torch.dtype,
    *,
    kv_block_size: int,
    with_draft: bool,
    budget_bytes: int,
    num_ranks: int = 1,
    shares_memory: bool = False,
    stages: Sequence[Stage] = (),
) -> int:
    """Return how many KV blocks fit beside the weights into a budget.

    Args:
        manifest: sizes.
        dtype: of weights and KV.
        kv_block_size: tokens of a KV block.
        with_draft: whether a draft is loaded.
        budget_bytes: of this process.
        num_ranks: each holds its part of weights and blocks. A draft that is whole on every rank
            is counted as if it were split: it is small beside the target.
        shares_memory: all ranks draw on the same budget.
        stages: of a pipeline whose stages have a budget each, as large as this one; the heaviest
            decides. Empty: everything is in this budget.
    """
    if stages:
        return min(
            _stage_blocks(
                manifest,
                dtype,
                stage,
                kv_block_size=kv_block_size,
                with_draft=with_draft,
                budget_bytes=budget_bytes,
                num_ranks=num_ranks,
            )
            for stage in stages
        )
    parts = 1 if shares_memory else num_ranks
    weights = -(-weight_bytes(manifest, dtype, with_draft=with_draft) // parts)
    block = kv_block_bytes(manifest, dtype, kv_block_size=kv_block_size, with_draft=with_draft)
    return max(0, (budget_bytes - weights) // -(-block // parts))


def _stage_blocks(
    manifest: Manifest,
    dtype: torch.dtype,
    stage: Stage,
    *,
    kv_block_size: int,
    with_draft: bool,
    budget_bytes: int,
    num_ranks: int,
) -> int:
    """Return how many blocks of a stage's layers fit beside its weights into its budget."""
    draft = manifest.draft if with_draft and stage.has_head else None
    weights = _in_dtype(stage.target_bytes, manifest.target.dtype, dtype)
    specs = [*_kv_specs(manifest.target.decoder)][: stage.num_layers]
    if draft is not None:
        weights += _in_dtype(stage.draft_bytes, draft.dtype, dtype)
        specs += _kv_specs(draft.decoder)
    block = sum(spec.block_bytes(kv_block_size, dtype) for spec in specs)
    return max(0, (budget_bytes - -(-weights // num_ranks)) // -(-block // num_ranks))


def memory_budget(ledger: Ledger, device: torch.device, free_bytes: int | None) -> int:
    """Return the bytes that weights and KV may take; None asks the device what is free.

    A given number of blocks may take all of it.
    """
    fraction = ledger.given.kv_memory_fraction or DEFAULT_MEMORY_FRACTION[device.type]
    if ledger.given.num_kv_blocks is not None:
        fraction = 1.0
    return int((available_bytes(device) if free_bytes is None else free_bytes) * fraction)


def settle_lengths(
    ledger: Ledger,
    manifest: Manifest,
    *,
    kv_block_size: int,
    max_num_requests: int,
    num_affordable_blocks: int,
) -> tuple[int, int]:
    """Return `max_model_len` and `num_kv_blocks` such that one request always fits.

    Findings: SD832 (longer than the target, more blocks than memory), SD804 (does not fit), SD833
    (lowered to fit), SD805.
    """
    known = manifest.target.decoder.max_position_embeddings
    wanted = ledger.pick("max_model_len", known, origin="manifest")
    if wanted > known:
        ledger.refuse(
            "SD832",
            "max_model_len",
            f"{wanted} positions are asked for, the target has {known}",
            expected=f"at most {known}",
            found=wanted,
        )
    blocks_per_request = -(-wanted // kv_block_size)
    full = 1 + blocks_per_request * max_num_requests  # one block only pads
    num_blocks = ledger.pick("num_kv_blocks", min(full, num_affordable_blocks), origin="derived")
    if ledger.given.num_kv_blocks is not None and ledger.given.kv_memory_fraction is not None:
        ledger.idle("kv_memory_fraction", "`num_kv_blocks` is given")
    _check_given_blocks(ledger, num_blocks, num_affordable_blocks, max_num_requests)
    held = max(0, num_blocks - 1) * kv_block_size
    if held >= wanted:
        return wanted, num_blocks
    if ledger.given.max_model_len is not None or held < 2:
        ledger.refuse(
            "SD804",
            "max_model_len",
            f"the KV pool holds {held} tokens, one request may need {wanted}",
            expected=f"{blocks_per_request + 1} blocks of {kv_block_size} tokens",
            found=f"{num_blocks} blocks, one of them for padding",
        )
        return wanted, num_blocks
    ledger.found.append(
        diagnose(
            "SD833",
            where=option_name("max_model_len"),
            message=f"`max_model_len` is {held}, the target has {known} positions",
            expected=known,
            found=held,
        )
    )
    return ledger.note("max_model_len", held, "derived"), num_blocks


def _check_given_blocks(
    ledger: Ledger, num_blocks: int, num_affordable_blocks: int, max_num_requests: int
) -> None:
    """Collect SD832 for more blocks than the memory holds and more requests than blocks."""
    if ledger.given.num_kv_blocks is not None and num_blocks > num_affordable_blocks:
        ledger.refuse(
            "SD832",
            "num_kv_blocks",
            f"`num_kv_blocks` is {num_blocks}",
            expected=f"at most {num_affordable_blocks}, which the free memory holds",
            found=num_blocks,
        )
    elif ledger.given.max_num_requests is not None and max_num_requests >= num_blocks > 1:
        ledger.refuse(
            "SD832",
            "max_num_requests",
            f"{max_num_requests} requests cannot run at once with {num_blocks} KV blocks",
            expected=f"at most {num_blocks - 1}, one block each and one for padding",
            found=max_num_requests,
        )


def _in_dtype(stored: int, stored_dtype: str, dtype: torch.dtype) -> int:
    return stored * dtype.itemsize // _STORED_BYTES.get(stored_dtype, dtype.itemsize)


def _kv_specs(decoder: Decoder) -> Iterator[KVLayerSpec]:
    for _ in range(decoder.num_layers):
        yield KVLayerSpec(num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim)
