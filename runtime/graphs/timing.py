"""Seconds of rounds on the device: of the draft phase alone, and of everything after it.

Each size is run warm and then timed one run at a time. All requests of a timed round are padding
that stands in the middle of the first context bucket and reads block 0: products and grids are
those of real requests, only their keys are all the same ones. Nothing real changes, and the padding
slot is back at length 0 when a size is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from runtime.config.round_sizes import RoundSize
from runtime.graphs.recorder import capture_graph
from runtime.graphs.round import DeviceRound
from runtime.graphs.state import RoundShape

NUM_WARM_RUNS = 3


class DeviceRoundTimer:
    """Times rounds as captured graphs on CUDA, else as they run eagerly."""

    def __init__(self, round_: DeviceRound, *, context: int, num_timings: int) -> None:
        """Time rounds of a device round whose state holds padding requests only.

        Args:
            round_: what is run.
            context: bound of positions that rounds are timed with.
            num_timings: timings of each size.
        """
        self._round = round_
        self._context = context
        self._num_timings = num_timings
        self._draft_s: dict[tuple[int, int], float] = {}

    def draft_s(self, size: RoundSize) -> float:
        """Return the median seconds of the draft phase.

        Sync: waits for the device.
        """
        key = (size.batch, size.num_drafts)
        if key not in self._draft_s:
            shape = self._shape(size)
            self._draft_s[key] = self._seconds(lambda: self._round.draft_phase(shape))
        return self._draft_s[key]

    def verify_s(self, size: RoundSize) -> float:
        """Return the median seconds of a round less those of its draft phase.

        Sync: waits for the device.
        """
        shape = self._shape(size)
        whole = self._seconds(lambda: self._round.run(shape))
        draft = self.draft_s(size) if size.num_drafts else 0.0
        return max(whole - draft, 1e-9)

    def _shape(self, size: RoundSize) -> RoundShape:
        return RoundShape(
            batch=size.batch,
            num_drafts=size.num_drafts,
            context=self._context,
            num_packed_rows=None if size.is_dense else size.num_rows,
        )

    @torch.inference_mode()
    def _seconds(self, run: Callable[[], object]) -> float:
        state = self._round.state
        place = max(0, min(self._context // 2, self._context - state.output_BX.shape[1]))

        def prepare() -> None:
            state.lengths_S[state.padding_slot] = place

        prepare()
        timings = (
            _cuda_seconds(run, prepare, state.device, self._num_timings)
            if state.device.type == "cuda"
            else _host_seconds(run, prepare, self._num_timings)
        )
        state.lengths_S[state.padding_slot] = 0
        return median(timings)


def median(timings: list[float]) -> float:
    """Return the middle one, the lower of two."""
    return sorted(timings)[(len(timings) - 1) // 2]


def _cuda_seconds(
    run: Callable[[], object],
    prepare: Callable[[], None],
    device: torch.device,
    num_timings: int,
) -> list[float]:
    graph = capture_graph(run, device)
    for _ in range(NUM_WARM_RUNS):
        prepare()
        graph.replay()
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    for _ in range(num_timings):
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        prepare()
        start.record()
        graph.replay()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _host_seconds(
    run: Callable[[], object], prepare: Callable[[], None], num_timings: int
) -> list[float]:
    timings: list[float] = []
    for index in range(NUM_WARM_RUNS + num_timings):
        prepare()
        start = time.perf_counter()
        run()
        if index >= NUM_WARM_RUNS:
            timings.append(time.perf_counter() - start)
    return timings
