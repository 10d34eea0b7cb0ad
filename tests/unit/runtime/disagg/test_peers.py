"""Both ends of control connections over loopback: refusals, ends, silence, several peers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import pytest

from runtime.disagg.dialer import parse_address
from runtime.disagg.frames import Abort, Failed, Frame, Offer, Prefill, Prefilled, Released
from runtime.disagg.handshake import PROTOCOL_VERSION, Hello, Layout, Role
from runtime.disagg.limits import Limits
from runtime.disagg.lines import greet
from runtime.disagg.listen import Arrived, DecodePeers, Left, PeerEvent, Said, listen_at
from runtime.disagg.peers import PrefillPeers
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import Diagnostic, DiagnosticError

LIMITS = Limits(connect_s=2, retry_s=0.05, silence_s=20, peer_wait_s=0.5, release_s=2, fence_s=0.05)
QUIET = replace(LIMITS, silence_s=2)  # beats come in time on a busy machine too
WAIT_S = 60.0


def hello(role: Role, **facts: str) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        role=role,
        facts={"proposer": "eagle3", "num_speculative_tokens": "4"} | facts,
        layout=Layout(stage_layers=(2,), tensor_parallel=1),
        transport="memory",
    )


def prefill(request_id: str) -> Prefill:
    return Prefill(
        request_id=request_id,
        prompt_ids_target=(1, 2, 3),
        params=SamplingParams(),
        first_position=0,
        blocks=(1,),
    )


def prefilled(request_id: str) -> Prefilled:
    return Prefilled(
        request_id=request_id,
        committed_target=(9,),
        state=[],
        draft_ids_target=(),
        draft_probs=None,
        num_kv_bytes=8,
    )


def until(check: Callable[[], object]) -> None:
    limit = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < limit, "not within the limit"
        time.sleep(0.005)


@dataclass
class Side:
    """One side and what was said about its peers."""

    peers: PrefillPeers | DecodePeers
    problems: list[Diagnostic | None] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    events: list[PeerEvent] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def look(self) -> bool:
        if isinstance(self.peers, PrefillPeers):
            self.frames += self.peers.poll()
        else:
            self.events += self.peers.poll()
        return True

    def has_event(self, kind: type[PeerEvent], count: int = 1) -> bool:
        self.look()
        return sum(isinstance(event, kind) for event in self.events) >= count


@contextmanager
def prefill_side(
    port: int = 0, *, facts: dict[str, str] | None = None, limits: Limits = LIMITS
) -> Iterator[Side]:
    problems: list[Diagnostic | None] = []
    left: list[str] = []
    peers = DecodePeers(
        listen_at("127.0.0.1", port),
        hello=hello("prefill", **(facts or {})),
        limits=limits,
        on_state=lambda peer, problem: problems.append(problem),
        on_left=left.append,
    )
    peers.start(lambda: None)
    try:
        yield Side(peers, problems, left=left)
    finally:
        peers.close()


@contextmanager
def decode_side(*addresses: str, limits: Limits = LIMITS, **facts: str) -> Iterator[Side]:
    problems: list[Diagnostic | None] = []
    peers = PrefillPeers(
        addresses,
        hello=hello("decode", **facts),
        offer=Offer(addresses=[b"pool"]),
        limits=limits,
        on_state=lambda peer, problem: problems.append(problem),
    )
    peers.start(lambda: None)
    try:
        yield Side(peers, problems)
    finally:
        peers.close()


def address(side: Side) -> str:
    assert isinstance(side.peers, DecodePeers)
    return side.peers.address


def ready(side: Side, count: int = 1) -> bool:
    side.look()
    return list(side.peers.states().values()).count("ready") == count


def test_frames_go_both_ways_and_silence_is_filled_with_beats() -> None:
    with ExitStack() as stack:
        ours = stack.enter_context(prefill_side(limits=QUIET))
        theirs = stack.enter_context(decode_side(address(ours), limits=QUIET))
        assert isinstance(ours.peers, DecodePeers)
        assert isinstance(theirs.peers, PrefillPeers)
        until(lambda: ready(theirs) and ours.has_event(Arrived))
        (arrived,) = ours.events
        assert isinstance(arrived, Arrived)
        assert arrived.offer == Offer(addresses=[b"pool"])
        time.sleep(1.2 * QUIET.silence_s)
        assert ours.peers.may_write(arrived.peer)
        theirs.peers.send(prefill("r"))
        until(lambda: ours.has_event(Said))
        assert ours.events[-1] == Said(peer=arrived.peer, frame=prefill("r"))
        ours.peers.send(arrived.peer, prefilled("r"))
        until(lambda: theirs.look() and theirs.frames)
        assert theirs.frames == [prefilled("r")]


@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    [
        ({"proposer": "none", "num_speculative_tokens": "0"}, {}, "proposer"),
        ({}, {"proposer": "none", "num_speculative_tokens": "0"}, "proposer"),
        ({"num_speculative_tokens": "2"}, {}, "num_speculative_tokens"),
    ],
)
def test_sides_that_differ_refuse_each_other_with_both_configurations(
    ours: dict[str, str], theirs: dict[str, str], name: str
) -> None:
    with prefill_side(facts=ours) as here, decode_side(address(here), **theirs) as there:
        assert isinstance(there.peers, PrefillPeers)
        until(lambda: here.problems and there.problems)
        there.peers.send(prefill("r"))
        until(lambda: there.look() and there.frames)
        (failed,) = there.frames
        assert isinstance(failed, Failed)
        for problem in (failed.problem, here.problems[0]):
            assert problem is not None
            assert (problem.code, problem.where) == ("SD860", f"handshake, {name}")
            assert len(problem.notes) == 2
            assert all("num_speculative_tokens=" in note for note in problem.notes)


def test_a_decode_server_that_goes_is_noticed_at_once() -> None:
    with prefill_side() as ours:
        with decode_side(address(ours)) as theirs:
            until(lambda: ready(theirs) and ours.has_event(Arrived))
        until(lambda: ours.has_event(Left))
        assert ours.peers.states() == {}


def test_a_prefill_server_that_ends_has_no_problem_with_those_it_leaves() -> None:
    with prefill_side() as ours, decode_side(address(ours)) as theirs:
        until(lambda: ready(theirs) and ready(ours))
        ours.peers.close()
        until(lambda: ours.has_event(Left) and len(theirs.problems) == 2)
    until(lambda: not any(thread.name.startswith("peer-") for thread in threading.enumerate()))
    assert ours.problems == [None]
    assert [problem is None for problem in theirs.problems] == [True, False]


def test_a_prefill_server_that_goes_has_its_requests_taken_over() -> None:
    with ExitStack() as stack:
        second = stack.enter_context(prefill_side())
        with prefill_side() as first:
            theirs = stack.enter_context(decode_side(address(first), address(second)))
            assert isinstance(theirs.peers, PrefillPeers)
            until(lambda: ready(theirs, 2))
            theirs.peers.send(prefill("r"))
            theirs.peers.send(prefill("s"))
            until(lambda: first.has_event(Said) and second.has_event(Said))
        until(lambda: theirs.look() and second.has_event(Said, 2))
        assert theirs.peers.counts.num_retried == 1


def test_a_prefill_server_that_comes_back_is_used_again() -> None:
    with prefill_side() as ours:
        where = address(ours)
        port = int(where.rpartition(":")[2])
    with decode_side(where) as theirs:
        until(lambda: theirs.problems)
        assert theirs.problems[0] is not None
        assert theirs.problems[0].code == "SD861"
        with prefill_side(port):
            until(lambda: ready(theirs))


@contextmanager
def half_open_peer() -> Iterator[tuple[str, threading.Event]]:
    """A prefill server that greets and then neither speaks nor closes."""
    listener = listen_at("127.0.0.1", 0)
    done = threading.Event()
    held = []

    def serve() -> None:
        peer, _ = listener.accept()
        line = greet(peer, hello("prefill"), LIMITS, name="half-open")
        held.append(line)  # nobody serves it: no beats
        done.wait(WAIT_S)

    thread = threading.Thread(target=serve)
    thread.start()
    host, port = listener.getsockname()
    try:
        yield f"{host}:{port}", done
    finally:
        done.set()
        thread.join()
        listener.close()
        for line in held:
            line.close()


def test_a_half_open_connection_is_noticed_by_its_silence() -> None:
    limits = replace(LIMITS, silence_s=0.8)
    with half_open_peer() as (where, _), decode_side(where, limits=limits) as theirs:
        assert isinstance(theirs.peers, PrefillPeers)
        until(lambda: ready(theirs))
        theirs.peers.send(prefill("r"))
        start = time.monotonic()
        until(lambda: len(theirs.problems) > 1)
        assert theirs.problems[1] is not None
        assert theirs.problems[1].code == "SD861"
        theirs.look()
        assert theirs.peers.num_fenced == 1  # it may live and write: its blocks wait
        until(lambda: theirs.look() and theirs.frames)
        assert time.monotonic() - start >= 2 * limits.silence_s


def test_a_client_that_does_not_greet_holds_up_nobody() -> None:
    with prefill_side() as ours:
        where = parse_address(address(ours), "--peer")
        with socket.create_connection(where), decode_side(address(ours)) as theirs:
            until(lambda: ready(theirs))
        until(lambda: any(found is not None for found in ours.problems))


def test_an_abort_is_acknowledged_through_both_ends() -> None:
    with prefill_side() as ours, decode_side(address(ours)) as theirs:
        assert isinstance(ours.peers, DecodePeers)
        assert isinstance(theirs.peers, PrefillPeers)
        until(lambda: ready(theirs))
        theirs.peers.send(prefill("r"))
        theirs.peers.send(Abort(request_id="r"))
        until(lambda: ours.has_event(Said, 2))
        ours.peers.send(ours.events[-1].peer, Released(request_id="r"))
        until(lambda: theirs.look() and theirs.frames)
        assert theirs.frames == [Released(request_id="r")]


@pytest.mark.parametrize("text", ["", "host", "host:", ":9000", "host:port", "host:70000"])
def test_an_address_without_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(DiagnosticError, match="SD865"):
        parse_address(text, "--peer")


def test_an_address_in_brackets_is_ipv6() -> None:
    assert parse_address("[::1]:9000", "--peer") == ("::1", 9000)
