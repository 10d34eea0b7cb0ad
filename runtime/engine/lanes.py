"""Requests that run rounds on the device, and what such a round yields for each."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from runtime.batch import RoundKind
from runtime.engine.request import Placement, Request
from runtime.graphs.round import RoundRunner
from specctl.contract.diagnostics import Diagnostic


@dataclass(kw_only=True, slots=True)
class Lane:
    """A request that runs rounds on the device.

    Args:
        placement: what it held when it joined; another one means that it left in between.
        limit: drafts that count in a round at most.
        last_length: tokens with which a round may still start at most.
        num_written_blocks: blocks of its table that the device knows, with how it chooses tokens; 0
            where it knows nothing of the request.
        is_current: whether the device knows where the request stands.
    """

    request: Request
    placement: Placement
    limit: int
    last_length: int
    num_written_blocks: int
    is_current: bool = False

    @property
    def is_running(self) -> bool:
        """Whether the request still is what the device took it for."""
        return self.request.placement is self.placement


class LaneResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a round yielded for a request, before any stop or length cut.

    A struct, because every round makes one for each request.

    Args:
        kind: how the requests of the round chose tokens.
        num_drafts: drafts that counted.
        committed: target ids, accepted drafts then the bonus token; nothing after a problem.
        confidence: the draft's chances for its drafts; empty without such a head.
        problem: why no token could be chosen; it ends the request.
    """

    request: Request
    kind: RoundKind
    num_drafts: int
    committed: list[int]
    confidence: tuple[float, ...]
    problem: Diagnostic | None = None


def counted_drafts(
    runner: RoundRunner, buffer: int, num_drafts: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the drafts that counted in a round that was read.

    Args:
        runner: of the round.
        buffer: that was read.
        num_drafts: what the draft was asked for, per lane.
    """
    counts = runner.counted(buffer, len(num_drafts))
    return num_drafts if counts is None else tuple(map(min, num_drafts, counts))
