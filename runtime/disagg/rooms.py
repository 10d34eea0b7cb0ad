"""Requests of a decode server that wait for a prefill: who has them, and what if that peer is lost.

A *room* is one request from `ask` until its KV is there or its end is certain. Pure: time and
connections come in as values, so every order of events can be tested without a thread.

Invariants: each room yields exactly one of `Prefilled`, `Failed` (nothing more is written for it)
and `Released` (after an abort, likewise), then it is forgotten; a room is asked of another peer
only when the one before cannot write any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from runtime.disagg.durations import Durations
from runtime.disagg.frames import Abort, Failed, Frame, Prefill, Prefilled, Released, unreachable
from runtime.disagg.limits import Limits
from specctl.contract.diagnostics import Diagnostic, diagnose

Send: TypeAlias = Callable[[Frame], None]
Stage: TypeAlias = Literal["waiting", "asked", "leaving", "fencing"]
"""No peer yet; a peer computes; a peer was told to stop; the peer is lost and may still write."""

_OF_THE_WAY = frozenset({"SD861", "SD863", "SD914", "SD915"})  # another peer may do better


@dataclass(kw_only=True, slots=True)
class _Room:
    prefill: Prefill
    stage: Stage
    until: float
    peer: str | None = None
    asked_at: float = 0.0
    num_lost: int = 0
    owed: Released | Failed | None = None  # what a room that is over tells the engine


@dataclass(kw_only=True, slots=True)
class _Peer:
    send: Send | None = None  # None while it is not connected
    problem: Diagnostic | None = None


@dataclass(kw_only=True, slots=True)
class RoomCounts:
    """What happened since the start; see docs/reference/server.md for the metrics made of it."""

    num_prefilled: int = 0
    num_retried: int = 0
    num_kv_bytes: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    durations: Durations = field(default_factory=Durations)


class Rooms:
    """Asks peers in turn and settles what they owe."""

    def __init__(self, peers: tuple[str, ...], limits: Limits) -> None:
        """Know peers by name; none is connected."""
        self._limits = limits
        self._peers = {name: _Peer() for name in peers}
        self._turn = 0
        self._rooms: dict[str, _Room] = {}
        self._results: list[Frame] = []
        self._unreleased: list[str] = []
        self.counts = RoomCounts()

    def __len__(self) -> int:
        """Count the rooms that are open."""
        return len(self._rooms)

    @property
    def num_fenced(self) -> int:
        """Rooms whose blocks wait until a peer has certainly stopped writing."""
        return sum(room.stage in ("leaving", "fencing") for room in self._rooms.values())

    def take(self) -> tuple[Frame, ...]:
        """Return what the engine is to know, once."""
        results, self._results = self._results, []
        return tuple(results)

    def take_unreleased(self) -> tuple[str, ...]:
        """Return peers that did not acknowledge an abort in time, once; their line must end."""
        peers, self._unreleased = self._unreleased, []
        return tuple(peers)

    def up(self, peer: str, send: Send, now: float) -> None:
        """Use a peer from now on."""
        self._peers[peer] = _Peer(send=send)
        for room in list(self._rooms.values()):
            if room.stage == "waiting":
                self._place(room, now)

    def down(self, peer: str, problem: Diagnostic, now: float, *, may_write: bool) -> None:
        """Stop using a peer; its rooms are fenced, then asked elsewhere."""
        self._peers[peer] = _Peer(problem=problem)
        until = now + self._limits.fence_after(may_write=may_write)
        for room in self._rooms.values():
            if room.peer == peer and room.stage in ("asked", "leaving"):
                room.stage, room.until = "fencing", until
                room.num_lost += 1
        if problem.code == "SD860":
            self.tick(now)

    def ask(self, prefill: Prefill, now: float) -> None:
        """Open a room."""
        room = _Room(prefill=prefill, stage="waiting", until=now + self._limits.peer_wait_s)
        self._rooms[prefill.request_id] = room
        self._place(room, now)

    def abort(self, request_id: str, now: float) -> None:
        """Close a room as soon as nothing is written for it any more."""
        room = self._rooms.get(request_id)
        if room is None:  # its outcome is on the way to the engine, which no longer knows it
            self._results.append(Released(request_id=request_id))
            return
        if room.stage == "waiting":
            self._settle(room, Released(request_id=request_id))
            return
        room.owed = Released(request_id=request_id)
        if room.stage == "asked":
            self._leave(room, now)

    def came(self, peer: str, frame: Frame, now: float) -> None:
        """Take what a peer says; about rooms that it does not hold it has nothing to say."""
        if not isinstance(frame, Prefilled | Failed | Released):
            return
        room = self._rooms.get(frame.request_id)
        if room is None or room.peer != peer or room.stage not in ("asked", "leaving"):
            return
        if room.stage == "leaving":
            assert room.owed is not None, "a room that leaves owes its end"
            self._settle(room, room.owed)
        elif isinstance(frame, Prefilled):
            self.counts.num_prefilled += 1
            self.counts.num_kv_bytes += frame.num_kv_bytes
            self.counts.durations.add(now - room.asked_at)
            self._settle(room, frame)
        elif isinstance(frame, Failed):
            self._retry_or_fail(room, frame.problem, now)

    def tick(self, now: float) -> None:
        """Act on what took too long."""
        for room in list(self._rooms.values()):
            if room.stage == "waiting" and self._refusal() is not None:
                self._fail(room, self._no_peer(room))
            elif now < room.until:
                continue
            elif room.stage == "waiting":
                self._fail(room, self._no_peer(room))
            elif room.stage == "asked":
                room.owed = Failed(request_id=room.prefill.request_id, problem=self._late(room))
                self._leave(room, now)
            elif room.stage == "leaving":
                assert room.peer is not None, "a room that leaves was asked of a peer"
                self._unreleased.append(room.peer)
                room.until = now + self._limits.release_s
            elif room.owed is not None:
                self._settle(room, room.owed)
            else:
                self._after_loss(room, now)

    def states(self) -> dict[str, str]:
        """Return `ready`, `connecting` or the last problem of each peer."""
        return {
            name: "ready"
            if peer.send is not None
            else ("connecting" if peer.problem is None else peer.problem.oneline())
            for name, peer in self._peers.items()
        }

    def _place(self, room: _Room, now: float) -> None:
        """Ask the next peer that is connected; without one the room waits."""
        names = list(self._peers)
        for step in range(len(names)):
            name = names[(self._turn + step) % len(names)]
            send = self._peers[name].send
            if send is None:
                continue
            self._turn = (self._turn + step + 1) % len(names)
            room.stage, room.peer = "asked", name
            room.asked_at, room.until = now, now + self._limits.prefill_s
            send(room.prefill)
            return
        room.stage, room.peer = "waiting", None
        room.until = now + self._limits.peer_wait_s
        if self._refusal() is not None:
            self._fail(room, self._no_peer(room))

    def _leave(self, room: _Room, now: float) -> None:
        room.stage, room.until = "leaving", now + self._limits.release_s
        send = None if room.peer is None else self._peers[room.peer].send
        if send is not None:
            send(Abort(request_id=room.prefill.request_id))

    def _retry_or_fail(self, room: _Room, problem: Diagnostic, now: float) -> None:
        if problem.code not in _OF_THE_WAY:
            self._fail(room, problem)
            return
        room.num_lost += 1
        if room.num_lost >= min(self._limits.max_tries, max(2, len(self._peers))):
            self._fail(room, problem)
            return
        self.counts.num_retried += 1
        self._place(room, now)

    def _after_loss(self, room: _Room, now: float) -> None:
        if room.num_lost >= self._limits.max_tries:
            self._fail(room, self._lost(room))
            return
        self.counts.num_retried += 1
        self._place(room, now)

    def _fail(self, room: _Room, problem: Diagnostic) -> None:
        self._settle(room, Failed(request_id=room.prefill.request_id, problem=problem))

    def _settle(self, room: _Room, frame: Prefilled | Failed | Released) -> None:
        if isinstance(frame, Failed):
            self.counts.failures[frame.problem.code] += 1
        del self._rooms[room.prefill.request_id]
        self._results.append(frame)

    def _refusal(self) -> Diagnostic | None:
        """Return why no peer will ever do as things stand: all of them refuse or are refused."""
        problems = [peer.problem for peer in self._peers.values()]
        refused = [found for found in problems if found is not None and found.code == "SD860"]
        return refused[0] if len(refused) == len(problems) else None

    def _no_peer(self, room: _Room) -> Diagnostic:
        refusal = self._refusal()
        if refusal is not None:
            return refusal
        return diagnose(
            "SD861",
            where=f"request={room.prefill.request_id}",
            message="no prefill server is connected",
            expected=f"one of {', '.join(self._peers)} within {self._limits.peer_wait_s:g} s",
            found="; ".join(f"{name}: {state}" for name, state in self.states().items()),
        )

    def _lost(self, room: _Room) -> Diagnostic:
        return diagnose(
            "SD861",
            where=f"request={room.prefill.request_id}",
            message=f"{room.num_lost} prefill servers were lost under this request",
            expected=f"fewer than {self._limits.max_tries}",
            found=unreachable(str(room.peer), "lost").oneline(),
        )

    def _late(self, room: _Room) -> Diagnostic:
        return diagnose(
            "SD864",
            where=f"request={room.prefill.request_id}",
            message=f"prefill server {room.peer} did not answer in time",
            expected=f"within {self._limits.prefill_s:g} s",
            found="no answer",
        )
