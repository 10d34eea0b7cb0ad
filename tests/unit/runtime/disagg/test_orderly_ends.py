"""Sides that end in order, at once, or with a rank that is lost: what the other one makes of it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from runtime.disagg.early import EarlySender
from runtime.disagg.frames import Connection, Frame, Leaving
from runtime.disagg.listen import Arrived, DecodePeers, Left, Said
from runtime.disagg.peers import PrefillPeers
from runtime.disagg.transport import BlockMove
from runtime.graphs.marks import NoMark
from runtime.server.roles import PrefillRole
from tests.unit.runtime.disagg.test_peers import (
    LIMITS,
    WAIT_S,
    address,
    decode_side,
    prefill,
    prefill_side,
    prefilled,
    ready,
    until,
)


@pytest.fixture
def slow_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word that a side ends takes its time to get on its way."""
    send = Connection.send

    def late(self: Connection, frame: Frame) -> None:
        if isinstance(frame, Leaving):
            time.sleep(0.3)
        send(self, frame)

    monkeypatch.setattr(Connection, "send", late)


@pytest.mark.usefixtures("slow_leave")
def test_a_decode_server_that_ends_in_order_is_not_lost() -> None:
    """The prefill server lets go of what it has for it, and has no problem to report."""
    with prefill_side() as ours:
        with decode_side(address(ours)) as theirs:
            until(lambda: ready(theirs) and ours.has_event(Arrived))
            theirs.peers.send(prefill("r"))  # type: ignore[call-arg, arg-type]
        until(lambda: ours.has_event(Left) and ours.left)
        assert ours.problems == [None]
        assert ours.has_event(Said), "what was queued went before"
        (name,) = ours.left
        assert ours.events[-1].problem.where == f"peer {name}"  # type: ignore[union-attr]


def test_a_decode_server_that_ends_at_once_is_lost() -> None:
    with prefill_side() as ours, decode_side(address(ours)) as theirs:
        assert isinstance(theirs.peers, PrefillPeers)
        until(lambda: ready(theirs) and ours.has_event(Arrived))
        theirs.peers.stop()
        until(lambda: ours.has_event(Left) and len(ours.problems) == 2)
        assert ours.problems[1] is not None
        assert ours.problems[1].code == "SD861"
        assert ours.left == []


@pytest.mark.usefixtures("slow_leave")
def test_answers_that_are_queued_go_before_a_prefill_server_ends() -> None:
    with prefill_side() as ours, decode_side(address(ours)) as theirs:
        assert isinstance(ours.peers, DecodePeers)
        assert isinstance(theirs.peers, PrefillPeers)
        until(lambda: ready(theirs) and ours.has_event(Arrived))
        theirs.peers.send(prefill("r"))
        until(lambda: ours.has_event(Said))
        ours.peers.send(ours.events[0].peer, prefilled("r"))
        ours.peers.close()
        until(lambda: theirs.look() and theirs.frames)
        assert theirs.frames == [prefilled("r")]


class HeldLink:
    """A way whose write stands still until it may end."""

    is_ordered = False

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def write(self, move: BlockMove) -> None:
        del move
        self.has_begun.set()
        assert self.may_end.wait(WAIT_S)

    def finish(self, timeout_s: float) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Keep nothing open."""


def test_a_prefill_server_that_lost_a_rank_ends_its_writes_before_its_lines() -> None:
    """The end of a line frees the blocks of the other side after `fence_s`."""
    move = BlockMove(
        source_layer=0,
        destination_layer=0,
        source_head=0,
        destination_head=0,
        num_heads=1,
        source_blocks=(0,),
        destination_blocks=(0,),
    )
    with prefill_side() as ours, decode_side(address(ours)) as theirs:
        until(lambda: ready(theirs) and ready(ours))
        link, sender = HeldLink(), EarlySender()
        sender.send(link, (move,), ready=NoMark())
        assert link.has_begun.wait(WAIT_S)
        role = cast("PrefillRole", SimpleNamespace(_sender=sender, peers=ours.peers))
        ending = threading.Thread(target=PrefillRole._end, args=(role,))
        ending.start()
        time.sleep(4 * LIMITS.fence_s)
        assert ready(theirs), "the write may go on"
        link.may_end.set()
        ending.join(WAIT_S)
        until(lambda: len(theirs.problems) == 2)
