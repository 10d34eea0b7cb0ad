"""Request options as rounds on the device hold them, and which rounds may run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from runtime.batch import RoundKind
from runtime.engine.request import Request
from runtime.graphs.slot_sampling import GREEDY, SlotSampling
from runtime.graphs.state import SlotRow
from runtime.spec.sampling import filter_columns, usable_temperature
from runtime.spec.types import SamplingParams

_KINDS: tuple[RoundKind, ...] = get_args(RoundKind)


def round_kind(params: Sequence[SamplingParams]) -> RoundKind | None:
    """Return the least kind of round that runs all of them; None: one needs the eager path."""
    kinds = {item.device_kind for item in params}
    if not kinds or None in kinds:
        return None
    return next(kind for kind in reversed(_KINDS) if kind in kinds)


def prefill_kind(kind: RoundKind) -> RoundKind:
    """Return how the prompts of requests whose rounds are of a kind get their next tokens.

    Nothing was drafted for them, so there is nothing to reject.
    """
    return "filtered" if kind == "rejection" else kind


def slot_sampling(params: SamplingParams) -> SlotSampling:
    """Return a request's way to choose tokens; its `device_kind` is not None."""
    if params.is_greedy:
        return GREEDY
    top_k, log_min_p, top_p = filter_columns(params)
    return SlotSampling(
        is_sampled=True,
        seed=params.seed,
        choice_index=params.choice_index,
        temperature=usable_temperature(params.temperature),
        top_k=top_k,
        log_min_p=log_min_p,
        top_p=top_p,
    )


def standing(request: Request) -> tuple[int, int, int]:
    """Return its slot, its positions whose KV is final, and the token after them."""
    return request.placed.slot, len(request.ids_target) - 1, request.ids_target[-1]


def slot_row(request: Request) -> SlotRow:
    """Return a request as the host knows it; its `device_kind` is not None."""
    slot, length, newest = standing(request)
    return SlotRow(
        slot=slot,
        length=length,
        newest_id_target=newest,
        blocks=request.placed.table.blocks,
        sampling=slot_sampling(request.params),
    )
