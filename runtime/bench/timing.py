"""Times of device work: captured and timed by events on CUDA, called and timed on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

from runtime.bench.raw import Clock
from runtime.graphs.recorder import capture_graph

_FILLER_BYTES = 1 << 28  # copied before a sample, so that the queue is full when it starts

_Name = TypeVar("_Name", bound=Hashable)
Step = Callable[[], object]


def clock_of(device: torch.device) -> Clock:
    return "cuda-events" if device.type == "cuda" else "wall"


def sample(
    steps: Mapping[_Name, Step],
    reset: Callable[[], None],
    samples: int,
    device: torch.device,
) -> dict[_Name, list[float]]:
    """Return seconds of every step, in turn, `reset` before each turn.

    On CUDA each is a graph, and events around its replay give the time; the queue is kept full, so
    that no launch from the host is in it. On a CPU each is a call, timed by the wall clock.
    """
    if device.type == "cuda":
        return _sample_graphs(steps, reset, samples, device)
    times: dict[_Name, list[float]] = {name: [] for name in steps}
    for count in range(samples + 1):
        reset()
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if count:  # the first pass warms caches up
                times[name].append(time.perf_counter() - start)
    return times


def _sample_graphs(
    steps: Mapping[_Name, Step],
    reset: Callable[[], None],
    samples: int,
    device: torch.device,
) -> dict[_Name, list[float]]:
    """Capture every step and time its replays with events, without a wait between them."""
    graphs = {name: _captured(step, reset, device) for name, step in steps.items()}
    filler = torch.empty(_FILLER_BYTES, dtype=torch.uint8, device=device)
    marks: list[list[torch.cuda.Event]] = []
    for _ in range(samples + 1):
        reset()
        for _ in range(4):
            filler.copy_(filler.flip(0))
        row = [_event() for _ in range(len(graphs) + 1)]
        row[0].record()
        for graph, mark in zip(graphs.values(), row[1:], strict=True):
            graph.replay()
            mark.record()
        marks.append(row)
        torch.cuda.synchronize(device)
    return {
        name: [row[index].elapsed_time(row[index + 1]) / 1e3 for row in marks[1:]]
        for index, name in enumerate(graphs)
    }


def _captured(step: Step, reset: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    reset()
    return capture_graph(step, device)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
