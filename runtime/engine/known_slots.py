"""What the device knows of the requests in its slots, which is told it before their rounds.

Invariants: a slot's blocks and sampling are written once for each placement, blocks that come later
as they come, and where a request stands when it joins.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engine.lanes import Lane
from runtime.engine.request import Placement, Request
from runtime.engine.slot_params import round_kind, slot_row, standing
from runtime.graphs.state import RoundState


class KnownSlots:
    """Writes requests into the device's state of their slots."""

    def __init__(self, state: RoundState) -> None:
        """Know of nobody.

        Args:
            state: of all slots.
        """
        self._state = state
        self._rows: dict[int, tuple[Placement, int]] = {}  # slot -> whose row, blocks in it

    def num_blocks(self, request: Request) -> int:
        """Return how many blocks of a request's table the device has; 0 where it knows nothing."""
        placed, count = self._rows.get(request.placed.slot, (None, 0))
        return count if placed is request.placed else 0

    def expect(self, requests: Sequence[Request]) -> None:
        """Write what is known of requests that wait for KV: all but their first tokens.

        Sync: none.
        """
        known = [request for request in requests if round_kind([request.params]) is not None]
        if known:
            self._state.write_requests([slot_row(request) for request in known])
        for request in known:
            self._note(request.placed)

    def write(self, lanes: Sequence[Lane]) -> None:
        """Tell the device of lanes that it does not know, and bring block tables up to date.

        Sync: none.
        """
        joined = [lane for lane in lanes if not lane.is_current]
        known = [lane for lane in joined if lane.num_written_blocks]
        news = [lane for lane in joined if not lane.num_written_blocks]
        if known:
            self._state.write_newest([standing(lane.request) for lane in known])
        if news:
            self._state.write_requests([slot_row(lane.request) for lane in news])
            self._note_lanes(news)
        for lane in joined:
            lane.is_current = True
        cells = [
            (lane.placement.slot, index, lane.placement.table.blocks[index])
            for lane in lanes
            for index in range(lane.num_written_blocks, len(lane.placement.table.blocks))
        ]
        if cells:
            self._state.write_blocks(cells)
            self._note_lanes(lanes)

    def _note_lanes(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            lane.num_written_blocks = self._note(lane.placement)

    def _note(self, placed: Placement) -> int:
        """Note that the device has a table as it is; returns its blocks."""
        count = len(placed.table.blocks)
        self._rows[placed.slot] = (placed, count)
        return count
