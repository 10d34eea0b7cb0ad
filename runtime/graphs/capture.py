"""CUDA graphs of whole rounds: capture at start-up, replay, and outcomes read a round late.

Lifecycle: graphs, their memory pool and every tensor that they read or write live as long as the
engine; `flush_cache` clears names only and never reaches them. Captures and warm-up runs have
padding requests only, so they alter nothing real. Graphs share one pool: they run one after the
other on one stream, and nothing in the pool outlives a replay.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

import torch

from runtime.batch import RoundKind
from runtime.config.round_sizes import packed_row_counts
from runtime.graphs.round import DeviceRound
from runtime.graphs.state import RoundShape
from specctl.contract.diagnostics import Diagnostic, diagnose

KINDS: tuple[RoundKind, ...] = get_args(RoundKind)
NUM_BUFFERS = 2
"""Rounds in flight at most: one runs while the one before it is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """What captured graphs cost.

    Args:
        num_graphs: captured shapes.
        capture_s: seconds that capturing took, warm-up and kernel compilation included.
        memory_bytes: device memory that it took.
        skipped_batches: batch sizes whose graphs did not fit into device memory.
    """

    num_graphs: int = 0
    capture_s: float = 0.0
    memory_bytes: int = 0
    skipped_batches: tuple[int, ...] = ()

    def problems(self) -> tuple[Diagnostic, ...]:
        """Return SD841 when not all sizes were captured."""
        if not self.skipped_batches:
            return ()
        sizes = ", ".join(map(str, self.skipped_batches))
        return (
            diagnose(
                "SD841",
                where="--graphs",
                message=f"graphs for batches of {sizes} do not fit into device memory",
                expected="memory for all sizes",
                found=f"memory for {self.num_graphs} graphs",
            ),
        )


class GraphSet:
    """The captured rounds of one engine; a `RoundRunner`."""

    def __init__(
        self,
        round_: DeviceRound,
        *,
        batches: Sequence[int],
        draft_counts: Sequence[int],
        contexts: Sequence[int],
        is_ragged: bool = False,
        kinds: Sequence[RoundKind] = KINDS,
    ) -> None:
        """Capture every combination of sizes; batch sizes that do not fit are left out.

        Args:
            round_: what to capture; its state holds padding requests only.
            batches: requests, ascending.
            draft_counts: drafts of each request, ascending.
            contexts: bounds of positions, ascending.
            is_ragged: whether rounds with packed rows are captured beside the dense ones.
            kinds: ways to choose tokens; rounds of rejection mode are dense.
        """
        device = round_.state.device
        assert device.type == "cuda", "only CUDA captures graphs"
        self.draft_counts = tuple(draft_counts)
        self.contexts = tuple(contexts)
        self._is_ragged = is_ragged
        self._output_BX = round_.state.output_BX
        self._pinned: tuple[torch.Tensor, ...] = tuple(
            torch.zeros(self._output_BX.shape, dtype=torch.int64, pin_memory=True)
            for _ in range(NUM_BUFFERS)
        )
        self._events = tuple(_event() for _ in range(NUM_BUFFERS))
        self._widths = [0] * NUM_BUFFERS
        self._confidence_BG = round_.state.confidence_BG if round_.has_confidence else None
        self._chances = tuple(
            torch.zeros(round_.state.confidence_BG.shape, pin_memory=True)
            for _ in range(NUM_BUFFERS if round_.has_confidence else 0)
        )
        shapes = [
            RoundShape(
                batch=batch,
                num_drafts=num_drafts,
                context=context,
                num_packed_rows=num_rows,
                kind=kind,
            )
            for batch in reversed(batches)  # the largest first: smaller ones reuse its memory
            for kind in kinds
            for num_drafts in reversed(self.draft_counts)
            for num_rows in (None, *reversed(self.packed_row_counts(batch, num_drafts)))
            if kind != "rejection" or num_rows is None
            for context in reversed(self.contexts if kind == "greedy" else self.contexts[-1:])
        ]
        free_before, _ = torch.cuda.mem_get_info(device)
        start = time.perf_counter()
        self._graphs = _capture(round_, shapes)
        captured = {shape.batch for shape in self._graphs}
        self.batches = tuple(batch for batch in batches if batch in captured)
        free_after, _ = torch.cuda.mem_get_info(device)
        self.report = GraphReport(
            num_graphs=len(self._graphs),
            capture_s=time.perf_counter() - start,
            memory_bytes=max(0, free_before - free_after),
            skipped_batches=tuple(batch for batch in batches if batch not in captured),
        )

    def packed_row_counts(self, batch: int, num_drafts: int) -> tuple[int, ...]:
        """Return the row counts of its ragged rounds; see `RoundRunner`."""
        return packed_row_counts(batch, num_drafts) if self._is_ragged else ()

    def launch(self, shape: RoundShape, buffer: int) -> None:
        """Replay a round and copy its outcome to the host; see `RoundRunner`."""
        self._graphs[shape].replay()
        num_rows, width = shape.batch, shape.width + 1
        self._pinned[buffer][:num_rows].copy_(self._output_BX[:num_rows], non_blocking=True)
        if self._confidence_BG is not None:
            self._chances[buffer][:num_rows].copy_(
                self._confidence_BG[:num_rows], non_blocking=True
            )
        self._events[buffer].record(torch.cuda.current_stream(self._output_BX.device))
        self._widths[buffer] = width

    def read(self, buffer: int, num_requests: int) -> list[list[int]]:
        """Wait for a buffer's round and return its outcome; see `RoundRunner`."""
        self._events[buffer].synchronize()
        rows: list[list[int]] = self._pinned[buffer][:num_requests, : self._widths[buffer]].tolist()
        return rows

    def confidence(self, buffer: int, num_requests: int) -> list[list[float]]:
        """Return the draft's chances in a buffer that was read; see `RoundRunner`."""
        if self._confidence_BG is None:
            return [[]] * num_requests
        rows: list[list[float]] = self._chances[buffer][:num_requests].tolist()
        return rows


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


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


@torch.inference_mode()
def _capture(
    round_: DeviceRound, shapes: Sequence[RoundShape]
) -> dict[RoundShape, torch.cuda.CUDAGraph]:
    """Return a graph for each shape.

    Each shape runs once before its capture: kernels are compiled and modules loaded outside of it.
    """
    device = round_.state.device
    pool = torch.cuda.graph_pool_handle()
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    gc.collect()
    torch.cuda.synchronize(device)

    def capture_one(shape: RoundShape) -> torch.cuda.CUDAGraph:
        round_.run(shape)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            round_.run(shape)
        except torch.OutOfMemoryError:
            with contextlib.suppress(RuntimeError):  # the capture itself may be spoilt by then
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    with torch.cuda.stream(stream):
        graphs = capture_what_fits(shapes, capture_one, on_full=torch.cuda.empty_cache)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return graphs


_Graph = TypeVar("_Graph")


def capture_what_fits(
    shapes: Sequence[RoundShape],
    capture_one: Callable[[RoundShape], _Graph],
    *,
    on_full: Callable[[], None],
) -> dict[RoundShape, _Graph]:
    """Capture shapes, without the batch sizes for which memory runs out.

    A batch size has all of its graphs or none: rounds of a size that is left out run with a larger
    one that was captured, or eagerly. Smaller sizes are tried, they need less.

    Args:
        shapes: what to capture, in this order.
        capture_one: captures one, or raises `torch.OutOfMemoryError`.
        on_full: gives memory back after that.
    """
    graphs: dict[RoundShape, _Graph] = {}
    full: set[int] = set()
    for shape in shapes:
        if shape.batch in full:
            continue
        try:
            graphs[shape] = capture_one(shape)
        except torch.OutOfMemoryError:
            full.add(shape.batch)
            graphs = {key: graph for key, graph in graphs.items() if key.batch not in full}
            gc.collect()
            on_full()
    return graphs
