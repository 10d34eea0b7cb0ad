"""Rooms: one outcome each whatever happens, and never two writers for the same blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.disagg.frames import Abort, Failed, Frame, Prefill, Prefilled, Released, unreachable
from runtime.disagg.limits import Limits
from runtime.disagg.rooms import Rooms
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import diagnose

LIMITS = Limits(
    silence_s=8,
    peer_wait_s=4,
    prefill_s=100,
    release_s=20,
    fence_s=1,
    linger_s=2,
    max_tries=3,
    retry_s=1,
)
LOST = unreachable("a", "the connection ended")
REFUSED = diagnose("SD860", where="handshake, draft", message="other drafts")
CARRIER = diagnose("SD863", where="transport `shared`", message="gone")
TOO_LONG = diagnose("SD908", where="request=r", message="too long")


def prefill(request_id: str = "r") -> Prefill:
    return Prefill(
        request_id=request_id,
        prompt_ids_target=(1, 2),
        params=SamplingParams(),
        first_position=0,
        blocks=(3,),
    )


def prefilled(request_id: str = "r") -> Prefilled:
    return Prefilled(
        request_id=request_id,
        committed_target=(7,),
        state=[],
        draft_ids_target=(),
        draft_probs=None,
        num_kv_bytes=64,
    )


@dataclass
class Bench:
    """Rooms of some peers, and what each peer was sent."""

    names: tuple[str, ...] = ("a", "b")
    rooms: Rooms = field(init=False)
    sent: list[tuple[str, str, str]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.rooms = Rooms(self.names, LIMITS)

    def up(self, name: str) -> None:
        def send(frame: Frame) -> None:
            assert isinstance(frame, Prefill | Abort)
            self.sent.append((name, type(frame).__name__, frame.request_id))

        self.rooms.up(name, send, self.now)

    def after(self, seconds: float) -> tuple[Frame, ...]:
        self.now += seconds
        self.rooms.tick(self.now)
        return self.rooms.take()

    def down(self, name: str, *, may_write: bool = False) -> None:
        self.rooms.down(name, LOST, self.now, may_write=may_write)


def code(frames: tuple[Frame, ...]) -> str:
    (failed,) = frames
    assert isinstance(failed, Failed)
    return failed.problem.code


def test_peers_take_turns_and_their_answers_reach_the_engine() -> None:
    bench = Bench()
    bench.up("a")
    bench.up("b")
    for name in ("r", "s", "t"):
        bench.rooms.ask(prefill(name), 0)
    assert [peer for peer, _, _ in bench.sent] == ["a", "b", "a"]
    bench.rooms.came("b", prefilled("s"), 2.5)
    assert bench.rooms.take() == (prefilled("s"),)
    assert bench.rooms.counts.num_kv_bytes == 64
    assert bench.rooms.counts.durations.total_s == 2.5
    assert dict(bench.rooms.counts.durations.cumulative) == dict.fromkeys(
        ("0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1.0"), 0
    ) | dict.fromkeys(("3.0", "10.0", "30.0", "100.0", "+Inf"), 1)
    assert len(bench.rooms) == 2


def test_a_request_waits_for_the_first_peer_and_no_longer_than_the_limit() -> None:
    bench = Bench()
    bench.rooms.ask(prefill(), 0)
    assert bench.after(3.9) == ()
    bench.up("b")
    assert bench.sent == [("b", "Prefill", "r")]
    bench.down("b")
    bench.rooms.ask(prefill("s"), bench.now)
    assert code(bench.after(4)) == "SD861"


def test_where_every_peer_refuses_a_request_ends_at_once_with_the_reason() -> None:
    bench = Bench(names=("a",))
    bench.rooms.down("a", REFUSED, 0, may_write=False)
    bench.rooms.ask(prefill(), 0)
    assert code(bench.rooms.take()) == "SD860"


def test_a_refusal_ends_what_waits() -> None:
    bench = Bench(names=("a",))
    bench.rooms.ask(prefill(), 0)
    bench.rooms.down("a", REFUSED, 0.1, may_write=False)
    assert code(bench.rooms.take()) == "SD860"


@pytest.mark.parametrize(("may_write", "fence_s"), [(False, 1.0), (True, 11.0)])
def test_a_lost_peer_is_fenced_before_another_is_asked(may_write: bool, fence_s: float) -> None:
    bench = Bench()
    bench.up("a")
    bench.up("b")
    bench.rooms.ask(prefill(), 0)
    bench.down("a", may_write=may_write)
    bench.after(fence_s - 0.1)
    assert bench.sent == [("a", "Prefill", "r")]
    assert bench.rooms.num_fenced == 1
    bench.after(0.2)
    assert bench.sent[1:] == [("b", "Prefill", "r")]
    assert bench.rooms.counts.num_retried == 1


def test_late_words_of_a_lost_peer_are_not_taken() -> None:
    bench = Bench()
    bench.up("a")
    bench.up("b")
    bench.rooms.ask(prefill(), 0)
    bench.down("a")
    bench.rooms.came("a", prefilled(), 0)
    assert bench.rooms.take() == ()


def test_a_request_does_not_take_down_server_after_server() -> None:
    bench = Bench(names=("a", "b", "c", "d"))
    for name in bench.names:
        bench.up(name)
    bench.rooms.ask(prefill(), 0)
    found: tuple[Frame, ...] = ()
    for name in ("a", "b", "c"):
        assert found == ()
        bench.down(name)
        found = bench.after(2)
    assert code(found) == "SD861"
    assert [peer for peer, _, _ in bench.sent] == ["a", "b", "c"]


def test_a_carrier_that_fails_is_tried_once_more_and_a_bad_request_is_not() -> None:
    bench = Bench()
    bench.up("a")
    bench.up("b")
    bench.rooms.ask(prefill(), 0)
    bench.rooms.came("a", Failed(request_id="r", problem=CARRIER), 0)
    assert [peer for peer, _, _ in bench.sent] == ["a", "b"]
    bench.rooms.came("b", Failed(request_id="r", problem=CARRIER), 0)
    assert code(bench.rooms.take()) == "SD863"
    bench.rooms.ask(prefill(), 0)
    bench.rooms.came("a", Failed(request_id="r", problem=TOO_LONG), 0)
    assert code(bench.rooms.take()) == "SD908"
    assert bench.rooms.counts.failures == {"SD863": 1, "SD908": 1}


def test_an_abort_is_over_when_the_peer_says_so() -> None:
    bench = Bench()
    bench.up("a")
    bench.rooms.ask(prefill(), 0)
    bench.rooms.abort("r", 1)
    assert bench.sent[-1] == ("a", "Abort", "r")
    assert bench.after(1) == ()
    bench.rooms.came("a", Released(request_id="r"), 2)
    assert bench.rooms.take() == (Released(request_id="r"),)
    assert len(bench.rooms) == 0


def test_an_abort_that_is_not_acknowledged_ends_the_line_and_waits_for_the_fence() -> None:
    bench = Bench()
    bench.up("a")
    bench.rooms.ask(prefill(), 0)
    bench.rooms.abort("r", 0)
    assert bench.after(20) == ()
    assert bench.rooms.take_unreleased() == ("a",)
    bench.down("a", may_write=True)
    assert bench.after(10.9) == ()
    assert bench.after(0.2) == (Released(request_id="r"),)


def test_an_abort_before_any_peer_was_asked_is_over_at_once() -> None:
    bench = Bench()
    bench.rooms.ask(prefill(), 0)
    bench.rooms.abort("r", 0)
    assert bench.rooms.take() == (Released(request_id="r"),)


def test_a_prefill_that_takes_too_long_is_stopped_before_its_request_fails() -> None:
    bench = Bench()
    bench.up("a")
    bench.up("b")
    bench.rooms.ask(prefill(), 0)
    assert bench.after(101) == ()
    assert bench.sent[-1] == ("a", "Abort", "r")
    bench.rooms.came("a", Released(request_id="r"), bench.now)
    assert code(bench.rooms.take()) == "SD864"


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(("ask", "abort", "up", "down", "cut", "done", "fail", "release", "wait")),
        st.sampled_from(("a", "b", "c")),
        st.integers(0, 3),
    ),
    max_size=60,
)


A_SECOND_LOSS = [("ask", "a", 0), ("up", "b", 0), ("down", "b", 0), ("up", "b", 0), ("cut", "b", 0)]


@settings(max_examples=150, deadline=None)
@given(actions=ACTIONS)
@example(actions=[*A_SECOND_LOSS, ("up", "a", 0), ("wait", "a", 0)])
@example(actions=[*A_SECOND_LOSS[:3], ("abort", "b", 0), *A_SECOND_LOSS[3:], ("wait", "a", 0)])
def test_any_order_of_events_gives_each_request_one_outcome_and_one_writer(
    actions: list[tuple[str, str, int]],
) -> None:
    world = World()
    for action, peer, number in actions:
        getattr(world, action)(peer, f"r{number}")
        world.look()
    for peer in ("a", "b", "c"):
        world.down(peer, "")
    for _ in range(60):
        world.wait("", "r3")
        world.look()
    assert not world.open
    assert len(world.bench.rooms) == 0


class World:
    """Peers with a mind of their own: what each may still write, and until when."""

    def __init__(self) -> None:
        self.bench = Bench(names=("a", "b", "c"))
        self.open: set[str] = set()
        self.writers: dict[str, dict[str, float]] = {}
        self.num_seen = 0

    def ask(self, peer: str, request_id: str) -> None:
        if request_id not in self.open:
            self.open.add(request_id)
            self.bench.rooms.ask(prefill(request_id), self.bench.now)

    def abort(self, peer: str, request_id: str) -> None:
        if request_id in self.open:
            self.bench.rooms.abort(request_id, self.bench.now)

    def up(self, peer: str, request_id: str) -> None:
        if self.bench.rooms.states()[peer] != "ready":
            self.bench.up(peer)

    def down(self, peer: str, request_id: str, *, may_write: bool = False) -> None:
        if self.bench.rooms.states()[peer] == "ready":
            self.bench.down(peer, may_write=may_write)
            end = self.bench.now + LIMITS.fence_after(may_write=may_write)
            for writers in self.writers.values():
                if writers.get(peer) == float("inf"):  # asked over this connection, no earlier one
                    writers[peer] = end

    def cut(self, peer: str, request_id: str) -> None:
        self.down(peer, request_id, may_write=True)

    def done(self, peer: str, request_id: str) -> None:
        self._say(peer, request_id, prefilled(request_id))

    def fail(self, peer: str, request_id: str) -> None:
        self._say(peer, request_id, Failed(request_id=request_id, problem=CARRIER))

    def release(self, peer: str, request_id: str) -> None:
        if (peer, "Abort", request_id) in self.bench.sent:
            self._say(peer, request_id, Released(request_id=request_id))

    def wait(self, peer: str, request_id: str) -> None:
        self.bench.now += 2.0 ** int(request_id[1:])
        self.bench.rooms.tick(self.bench.now)
        for name in self.bench.rooms.take_unreleased():
            self.cut(name, "")

    def look(self) -> None:
        """Check what was sent and what came out since the last look."""
        for peer, kind, request_id in self.bench.sent[self.num_seen :]:
            if kind == "Prefill":
                assert not self._busy(request_id), "another peer may still write"
                self.writers.setdefault(request_id, {})[peer] = float("inf")
        self.num_seen = len(self.bench.sent)
        for frame in self.bench.rooms.take():
            assert isinstance(frame, Prefilled | Failed | Released)
            assert frame.request_id in self.open, "a second outcome"
            self.open.remove(frame.request_id)
            assert not self._busy(frame.request_id), "blocks are free while a peer may write"

    def _busy(self, request_id: str) -> bool:
        ends = self.writers.get(request_id, {}).values()
        return any(end > self.bench.now for end in ends)

    def _say(self, peer: str, request_id: str, frame: Frame) -> None:
        if self.writers.get(request_id, {}).get(peer) == float("inf"):
            del self.writers[request_id][peer]  # all three mean that it writes nothing more
            self.bench.rooms.came(peer, frame, self.bench.now)
