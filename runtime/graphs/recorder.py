"""Records rounds and prefills as CUDA graphs that share one pool of memory.

What is recorded runs once before: kernels are compiled and modules loaded outside of the capture.
Captures and these runs have padding requests only, so they alter nothing real. What a half of a
split round leaves for the next one is in tensors of its own: graphs share their memory.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from runtime.graphs.prefill import PrefillShape, PrefillState
from runtime.graphs.round import DeviceRound
from runtime.graphs.state import RoundShape

_Shape = TypeVar("_Shape", RoundShape, PrefillShape)
_Graph = TypeVar("_Graph")


class Recorder:
    """Records what one device round runs."""

    def __init__(self, round_: DeviceRound) -> None:
        """Start with an empty pool."""
        self._round = round_
        self._device = round_.state.device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            self._device
        )

    @torch.inference_mode()
    def record(
        self, shapes: Sequence[RoundShape], prefill_shapes: Sequence[PrefillShape] = ()
    ) -> tuple[
        dict[RoundShape, tuple[torch.cuda.CUDAGraph, ...]],
        dict[PrefillShape, torch.cuda.CUDAGraph],
    ]:
        """Return the graph of each shape, both halves' where it is split, and those of prefills.

        Shapes for which memory runs out have none. Sync: waits for the device.
        """
        gc.collect()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graphs = capture_what_fits(
                shapes,
                self._record_round,
                size=lambda shape: shape.batch,
                on_full=torch.cuda.empty_cache,
            )
            prefills = capture_what_fits(
                prefill_shapes,
                self._record_prefill,
                size=lambda shape: shape.num_rows,
                on_full=torch.cuda.empty_cache,
            )
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return graphs, prefills

    @torch.inference_mode()
    def run(self, shape: RoundShape, half: int) -> None:
        """Run a half of a split round without a graph, kernel by kernel.

        Args:
            shape: split.
            half: 0 for its drafts, -1 for the rest.
        """
        self._halves(shape)[half](shape)

    def _record_round(self, shape: RoundShape) -> tuple[torch.cuda.CUDAGraph, ...]:
        return tuple(self._record(half, shape) for half in self._halves(shape))

    def _record_prefill(self, shape: PrefillShape) -> torch.cuda.CUDAGraph:
        assert self._round.prefill is not None, "a prefill has a state of its own"
        self._round.prefill.write_padding(shape)
        return self._record(self._round.run_prefill, shape)

    def _halves(self, shape: RoundShape) -> tuple[Callable[[RoundShape], None], ...]:
        has_first_half = shape.is_split and shape.num_drafts > 0
        whole = (self._round.run,)
        return (self._round.run_drafts, *whole) if has_first_half else whole

    def _record(self, run: Callable[[_Shape], None], shape: _Shape) -> torch.cuda.CUDAGraph:
        run(shape)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run(shape)
        except torch.OutOfMemoryError:
            with contextlib.suppress(RuntimeError):  # the capture itself may be spoilt by then
                graph.capture_end()
            raise
        graph.capture_end()
        return graph


@torch.inference_mode()
def capture_graph(run: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """Return what `run` launches as a graph with a pool of its own; it ran once before."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize(device)
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.synchronize(device)
    return graph


def prefill_seconds(
    prefill: PrefillState | None,
    graphs: Mapping[PrefillShape, torch.cuda.CUDAGraph],
    device: torch.device,
) -> dict[PrefillShape, float]:
    """Return the seconds of each prefill, its rows real ones of the padding slot."""
    seconds: dict[PrefillShape, float] = {}
    for shape, graph in graphs.items():
        assert prefill is not None, "a prefill has a state of its own"
        prefill.write_padding(shape)
        graph.replay()
        start, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        seconds[shape] = start.elapsed_time(end) / 1e3
    return seconds


def capture_what_fits(
    shapes: Sequence[_Shape],
    capture_one: Callable[[_Shape], _Graph],
    *,
    size: Callable[[_Shape], int],
    on_full: Callable[[], None],
) -> dict[_Shape, _Graph]:
    """Capture shapes, without the sizes for which memory runs out.

    A size has all of its graphs or none: rounds of a batch size and prefills of a number of rows
    that is left out run with a larger one that was captured, or eagerly. Smaller sizes are tried,
    they need less.

    Args:
        shapes: what to capture, in this order.
        capture_one: captures one, or raises `torch.OutOfMemoryError`.
        size: of a shape.
        on_full: gives memory back after that.
    """
    graphs: dict[_Shape, _Graph] = {}
    full: set[int] = set()
    for shape in shapes:
        if size(shape) in full:
            continue
        try:
            graphs[shape] = capture_one(shape)
        except torch.OutOfMemoryError:
            full.add(size(shape))
            graphs = {key: graph for key, graph in graphs.items() if size(key) not in full}
            gc.collect()
            on_full()
    return graphs
