"""A prefill server of several ranks: a decode server greets each of them, or uses none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from runtime.disagg.frames import Connection, Failed, Frame, Greeting, Leaving, Offer, Prefill
from runtime.disagg.handshake import PROTOCOL_VERSION, Hello, Layout, Role, of_rank, rank_facts
from runtime.disagg.limits import Limits
from runtime.disagg.listen import Arrived, DecodePeers, PeerEvent, listen_at
from runtime.disagg.peers import PrefillPeers
from runtime.disagg.role_plan import RankCard, compare_cards
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

LIMITS = Limits(
    connect_s=2, retry_s=0.05, silence_s=5, peer_wait_s=0.3, release_s=2, fence_s=0.05, max_tries=1
)
FACTS = {"target": "t", "proposer": "eagle3", "kernels.torch": "2", "fingerprint": "f"}
LAYOUT = Layout(stage_layers=(1, 1), tensor_parallel=2)


def hello(role: Role, **changes: object) -> Hello:
    made = Hello(
        protocol=PROTOCOL_VERSION, role=role, facts=FACTS, layout=LAYOUT, transport="shared"
    )
    return msgspec.structs.replace(made, **changes)


def until(check: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not check():
        assert time.monotonic() < limit, "not within the limit"
        time.sleep(0.005)


@contextmanager
def listening(said: Hello, states: list[str]) -> Iterator[DecodePeers]:
    peers = DecodePeers(
        listen_at("127.0.0.1", 0),
        hello=said,
        limits=LIMITS,
        on_state=lambda _, problem: states.append("came" if problem is None else problem.code),
        on_left=lambda _: states.append("left"),
    )
    peers.start(lambda: None)
    try:
        yield peers
    finally:
        peers.close()


@contextmanager
def prefill_ranks(
    *, states: Sequence[list[str]] = ([], [], []), **changes: object
) -> Iterator[list[DecodePeers]]:
    """Three ranks of one server, rank 0 first; `changes` are of the last one's greeting."""
    with ExitStack() as stack:
        others = []
        for rank in (1, 2):
            said = of_rank(hello("prefill", server="s"), rank)
            if rank == 2:
                said = msgspec.structs.replace(said, **changes)
            others.append(stack.enter_context(listening(said, states[rank])))
        where = tuple(":" + peers.address.rpartition(":")[2] for peers in others)
        greeting = hello("prefill", server="s", ranks=where)
        first = stack.enter_context(listening(greeting, states[0]))
        yield [first, *others]


@contextmanager
def decoding(address: str) -> Iterator[tuple[PrefillPeers, list[Diagnostic | None]]]:
    states: list[Diagnostic | None] = []
    peers = PrefillPeers(
        [address],
        hello=hello("decode"),
        offer=Offer(addresses=[b"pool"]),
        limits=LIMITS,
        on_state=lambda _, problem: states.append(problem),
    )
    peers.start(lambda: None)
    try:
        yield peers, states
    finally:
        peers.close()


def arrived(first: DecodePeers) -> str:
    found: list[PeerEvent] = []
    until(lambda: found.extend(first.poll()) or found)
    assert isinstance(found[0], Arrived)
    return found[0].peer


def test_every_rank_is_greeted_and_hears_of_the_decode_server_itself() -> None:
    with prefill_ranks() as ranks, decoding(ranks[0].address) as (_, states):
        peer = arrived(ranks[0])
        assert all(rank.wait_for(peer) for rank in ranks)
        assert all(rank.may_write(peer) for rank in ranks)
        assert states == [None]
        assert not ranks[1].wait_for("another connection")


def test_every_rank_knows_the_line_when_pools_are_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a rank is held up after it was greeted: its answer waits until it knows the line."""
    receive = Connection.receive

    def held_up(self: Connection) -> Frame:
        frame = receive(self)
        if isinstance(frame, Greeting) and frame.hello.role == "decode" and frame.hello.rank == 1:
            time.sleep(0.3)
        return frame

    monkeypatch.setattr(Connection, "receive", held_up)
    with prefill_ranks() as ranks, decoding(ranks[0].address):
        peer = arrived(ranks[0])
        assert [rank.may_write(peer) for rank in ranks] == [True, True, True]


def test_a_rank_that_ends_ends_the_server_for_its_peer() -> None:
    """Nobody writes any more, the request ends with a code, and its blocks were fenced first."""
    with prefill_ranks() as ranks, decoding(ranks[0].address) as (peers, states):
        peer = arrived(ranks[0])
        lost = ranks[2].address
        asked = Prefill(
            request_id="r",
            prompt_ids_target=(1, 2),
            params=SamplingParams(),
            first_position=0,
            blocks=(1,),
        )
        peers.poll()
        peers.send(asked)
        ranks[2].close()
        until(lambda: not any(rank.may_write(peer) for rank in ranks))
        until(lambda: len(states) > 1)
        assert states[1] is not None
        assert (states[1].code, states[1].where) == ("SD861", f"peer {lost}")
        frames: list[Frame] = []
        until(lambda: frames.extend(peers.poll()) or frames or peers.num_fenced)
        until(lambda: frames.extend(peers.poll()) or frames)
        (failed,) = frames
        assert isinstance(failed, Failed)
        assert failed.problem.code == "SD861"
        assert peers.num_rooms == 0


@pytest.mark.parametrize("late", range(3))
def test_every_rank_hears_that_a_decode_server_ends_in_order(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Though the line to one of them is slower than the others."""
    states: list[list[str]] = [[], [], []]
    send = Connection.send

    def held_up(self: Connection, frame: Frame) -> None:
        if isinstance(frame, Leaving) and self.name == slow:
            time.sleep(0.3)
        send(self, frame)

    monkeypatch.setattr(Connection, "send", held_up)
    with prefill_ranks(states=states) as ranks:
        slow = ranks[late].address
        with decoding(ranks[0].address):
            peer = arrived(ranks[0])
            assert all(rank.wait_for(peer) for rank in ranks)
        until(lambda: all(len(found) == 2 for found in states))
    assert states == [["came", "left"]] * 3


@pytest.mark.parametrize(
    ("changes", "code", "place"),
    [
        ({"server": "of an earlier start"}, "SD870", "handshake, rank 2, server"),
        ({"rank": 1}, "SD870", "handshake, rank 2, rank"),
        (
            {"layout": Layout(stage_layers=(2,), tensor_parallel=2)},
            "SD870",
            "handshake, rank 2, layout",
        ),
        (
            {"facts": rank_facts(FACTS) | {"kernels.torch": "3"}},
            "SD860",
            "handshake, kernels.torch",
        ),
    ],
)
def test_another_process_at_a_rank_is_refused(
    changes: dict[str, object], code: str, place: str
) -> None:
    with prefill_ranks(**changes) as ranks, decoding(ranks[0].address) as (_, states):
        until(lambda: states)
        assert states[0] is not None
        assert (states[0].code, states[0].where) == (code, place)
        assert not any(isinstance(event, Arrived) for event in ranks[0].poll())


def test_ranks_of_a_server_must_have_the_same_facts() -> None:
    same = RankCard(facts=rank_facts(FACTS))
    compare_cards(FACTS, [same, same])
    other = RankCard(facts=rank_facts(FACTS) | {"kernels.torch": "3"})
    with pytest.raises(DiagnosticError) as caught:
        compare_cards(FACTS, [same, other])
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.where) == ("SD871", "rank 2, kernels.torch")
    assert (problem.expected, problem.found) == ("2", "3")


def test_what_a_rank_has_met_ends_the_start() -> None:
    met = diagnose("SD835", where="--listen", message="taken")
    with pytest.raises(DiagnosticError, match="SD835"):
        compare_cards(FACTS, [RankCard(problems=(met,))])
