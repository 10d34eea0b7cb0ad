"""The ids of its own that a slot keeps, on CUDA: one program per request.

The padding slot is only read, so requests that share it cannot disturb each other. The twin is in
`runtime.kernels.own_ids`.

Legend: S slots, E places of a slot's ring, B requests, N verified rows, W rows of a request at
most, V target vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from runtime.kernels.cuda.device import overlap_options, power_of_two

_PLACES_OF_A_WARP = 256
_MOST_WARPS = 8


@triton.jit(do_not_specialize=["padding_slot"])
def keep_own_ids_kernel(
    own_ptr, own_counts_ptr, slots_ptr, next_ids_ptr, first_rows_ptr, last_rows_ptr,
    is_outside_ptr, padding_slot,
    RAGGED: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, PLACES: tl.constexpr,
    BLOCK_E: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Put a request's committed ids into its slot's ring, in order, unless it holds them."""
    request = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK_W)
    places = tl.arange(0, BLOCK_E)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + request)
    is_real = slot != padding_slot
    first = tl.load(first_rows_ptr + request) if RAGGED else request * WIDTH
    num_committed = tl.load(last_rows_ptr + request) - first + 1
    is_taken = (offsets < num_committed) & (offsets < WIDTH) & is_real
    ids = tl.load(next_ids_ptr + first + offsets, mask=is_taken, other=0)
    is_taken = is_taken & (tl.load(is_outside_ptr + ids, mask=is_taken, other=0) != 0)
    taken_ids = tl.where(is_taken, ids, -1).to(tl.int32)
    is_place = (places < PLACES) & is_real
    own = tl.load(own_ptr + slot * PLACES + places, mask=is_place, other=-1).to(tl.int32)
    count = tl.load(own_counts_ptr + slot)
    for w in tl.static_range(WIDTH):
        token = tl.max(tl.where(offsets == w, taken_ids, -1), axis=0)
        is_held = tl.max((own == token).to(tl.int32), axis=0)
        is_new = (token >= 0) & (is_held == 0)
        own = tl.where(is_new & (places == count % PLACES), token, own)
        count += is_new.to(tl.int64)
    tl.store(own_ptr + slot * PLACES + places, own.to(tl.int64), mask=is_place)
    tl.store(own_counts_ptr + slot, count, mask=is_real)


def launch_keep_own_ids(
    ids_target_SE: torch.Tensor,
    counts_S: torch.Tensor,
    slots_B: torch.Tensor,
    next_ids_target_N: torch.Tensor,
    *,
    first_rows_B: torch.Tensor | None,
    last_rows_B: torch.Tensor,
    is_outside_V: torch.Tensor,
    width: int,
) -> None:
    """Launch `keep_own_ids`."""
    num_requests, (num_slots, num_places) = slots_B.shape[0], ids_target_SE.shape
    assert ids_target_SE.is_contiguous(), "rings lie one after the other"
    assert slots_B.is_contiguous(), "slots are read one by one"
    assert next_ids_target_N.is_contiguous(), "choices are read one by one"
    if num_requests == 0:
        return
    overlapped, options = overlap_options(slots_B.device, None)
    keep_own_ids_kernel[(num_requests,)](
        ids_target_SE,
        counts_S,
        slots_B,
        next_ids_target_N,
        slots_B if first_rows_B is None else first_rows_B.contiguous(),
        last_rows_B.contiguous(),
        is_outside_V,
        num_slots - 1,
        **keep_constants(width, num_places, is_ragged=first_rows_B is not None),
        OVERLAP=overlapped,
        num_warps=keep_warps(num_places),
        **options,
    )


def keep_constants(width: int, num_places: int, *, is_ragged: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments of `keep_own_ids_kernel`."""
    return {
        "RAGGED": is_ragged,
        "WIDTH": width,
        "BLOCK_W": power_of_two(width),
        "PLACES": num_places,
        "BLOCK_E": power_of_two(num_places),
    }


def keep_warps(num_places: int) -> int:
    """Return the warps of a program: one for as many places as are common."""
    return max(1, min(_MOST_WARPS, power_of_two(num_places) // _PLACES_OF_A_WARP))
