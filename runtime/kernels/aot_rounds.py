"""What `runtime.kernels.aot` compiles of rounds beside their models.

Those are its ends, copies, prompt lookup and what it exchanges with the host. They read integers or
copy rows, so a model and a dtype stand for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.batch import ROW_TILE_ROWS
from runtime.config.values import DEFAULT_MAX_NGRAM
from runtime.kernels.aot_cases import KernelCase
from runtime.kernels.cuda import (
    accept,
    head,
    ngram,
    outcomes,
    own_ids,
    prefill_rows,
    round_inputs,
    row_copies,
)
from runtime.kernels.cuda import round as round_ends
from runtime.kernels.prefill_rows import PromptRoom

_NUM_DRAFTS = 8
_WIDTH = _NUM_DRAFTS + 1
_HIDDEN = 576
_NUM_STATES = 3
_NUM_IDS = 8192
_PROMPTS = PromptRoom(num_rows=4096, num_places=32, num_blocks=512, kv_block_size=16)
_ENTRY_CELLS = 128
_OWN_PLACES = (64, 2048)


def round_cases(arch: int) -> tuple[KernelCase, ...]:
    """Return the cases for an architecture, in a fixed order."""
    overlap = {"OVERLAP": arch >= 90}
    copied = {**row_copies.copy_constants(_HIDDEN), **overlap}
    return (
        _case(accept.accept_kernel, {**accept.accept_constants(_WIDTH), **overlap}),
        _case(
            round_ends.prepare_round_kernel,
            {**round_ends.prepare_constants(_WIDTH, 16), **overlap},
        ),
        _case(round_ends.finish_round_kernel, {**round_ends.finish_constants(_WIDTH), **overlap}),
        _case(
            prefill_rows.place_prompts_kernel,
            {**prefill_rows.place_constants(_PROMPTS, ROW_TILE_ROWS), **overlap},
            num_warps=4,
        ),
        *(
            _case(row_copies.copy_row_kernel, {"SCATTERED": flag, **copied}, num_warps=4)
            for flag in (False, True)
        ),
        _case(row_copies.side_by_side_kernel, {"COUNT": _NUM_STATES, **copied}, num_warps=4),
        _case(
            head.logits_argmax_kernel,
            {**head.argmax_constants(_NUM_IDS, is_named=True, is_copied=True), **overlap},
            num_warps=8,
        ),
        _case(
            ngram.find_drafts_kernel,
            ngram.find_constants(_NUM_DRAFTS, DEFAULT_MAX_NGRAM),
            num_warps=ngram.FIND_WARPS,
            is_hot=True,
        ),
        _case(ngram.append_history_kernel, ngram.append_constants(_WIDTH), is_hot=True),
        *(
            _case(
                own_ids.keep_own_ids_kernel,
                {**own_ids.keep_constants(_WIDTH, places, is_ragged=is_ragged), **overlap},
                num_warps=own_ids.keep_warps(places),
                is_hot=True,
            )
            for places in _OWN_PLACES
            for is_ragged in (False, True)
        ),
        *(
            _case(
                outcomes.store_outcomes_kernel,
                outcomes.store_constants(
                    _WIDTH + 1, num_drafts=num_drafts, has_counts=num_drafts > 0
                ),
                num_warps=outcomes.STORE_WARPS,
                is_hot=True,
            )
            for num_drafts in (0, _NUM_DRAFTS)
        ),
        *(
            _case(
                kernel,
                round_inputs.entry_constants(_ENTRY_CELLS),
                num_warps=round_inputs.PUT_WARPS,
                is_hot=True,
            )
            for kernel in (round_inputs.put_blocks_kernel, round_inputs.put_batch_kernel)
        ),
    )


def _case(
    kernel: Any, constants: Mapping[str, int | bool], *, num_warps: int = 1, is_hot: bool = False
) -> KernelCase:
    return KernelCase(
        kernel=kernel,
        dtype="bf16",
        out_dtype="bf16",
        constants=tuple(constants.items()),
        num_warps=num_warps,
        num_stages=3,
        is_hot=is_hot,
    )
