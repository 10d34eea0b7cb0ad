"""A cable between a decode server and its prefill servers is pulled out: nobody is told.

Decode and prefill servers live in network namespaces of their own. A request whose prefill server
is cut off ends with a code, or another one takes it over; both sides free what they held while the
cable is still out, and use each other again when it is back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from tests.dist.cluster import LIMIT_S, Server, hold, release, wait_held
from tests.dist.namespaces import Star, why_not
from tests.dist.star_servers import LISTEN, Work, ask, star_servers

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Two prefill servers around a decode server."""

    star: Star
    prefill: list[Server]
    decode: Server
    work: Work

    def ask(self, number: int) -> tuple[list[int], str | None]:
        """Return the ids that the decode server answers, and the code of its error."""
        return ask(self.decode, self.work[number])

    def wait_ready(self) -> None:
        """Wait until the decode server reaches both prefill servers."""
        limit = time.monotonic() + LIMIT_S
        while (states := self.states()) != ["ready", "ready"]:
            assert time.monotonic() < limit, states
            time.sleep(0.1)

    def states(self) -> list[str]:
        return list(self.decode.get("/health").json()["peers"].values())

    def restore(self) -> None:
        """Let go of whom a test holds and plug in what it pulled out."""
        for server in (*self.prefill, self.decode):
            release(server)
        for number in range(2):
            self.star.join(number)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with star_servers(tmp_path_factory.mktemp("cut")) as servers:
        made = servers.star
        listens = [f"{made.address(number)}:{LISTEN}" for number in range(2)]
        prefill = [
            servers.start(f"prefill{n}", made.others[n], "--role", "prefill", "--listen", listen)
            for n, listen in enumerate(listens)
        ]
        asks = ("--role", "decode", "--peer", ",".join(listens), "--peer-wait-s", "1")
        decode = servers.start("decode", made.middle, *asks)
        servers.wait_answering()
        yield Site(star=made, prefill=prefill, decode=decode, work=servers.work)


@pytest.fixture
def site(started: Site) -> Iterator[Site]:
    started.wait_ready()
    yield started
    started.restore()


def assert_recovered(site: Site) -> None:
    """Nothing is held while cables are out; with them in, both prefill servers are used again."""
    for server in (*site.prefill, site.decode):
        release(server)
        server.wait_idle()
    site.restore()
    site.wait_ready()
    for number in range(4):
        assert site.ask(number) == (site.work[number][1], None)
    for server in (*site.prefill, site.decode):
        server.wait_idle()
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("moment", "has_spare"),
    [
        ("before", False),
        ("during", True),
        *(
            pytest.param(moment, has_spare, marks=pytest.mark.slow)  # waits, no work
            for moment, has_spare in (
                *(("before", True), ("during", False), ("asked", True), ("asked", False)),
                *(("after", True), ("after", False)),
            )
        ),
    ],
)
def test_cable_between_roles(site: Site, moment: str, has_spare: bool) -> None:
    """Before the request, after it was asked, amid the KV, before the first token is told."""
    point = {"asked": "before"}.get(moment, moment)
    with ThreadPoolExecutor(2) as pool:
        if moment == "before":
            site.star.cut(0)
            if not has_spare:
                site.star.cut(1)
            asked = [pool.submit(site.ask, number) for number in range(2)]  # they take turns
        else:
            for server in site.prefill:
                hold(server, f"prefill {point}")
            asked = [pool.submit(site.ask, 4)]
            cut_off = wait_held(site.prefill)
            site.star.cut(cut_off)
            if has_spare:
                release(site.prefill[1 - cut_off])
            else:
                site.star.cut(1 - cut_off)
        answers = [item.result(LIMIT_S) for item in asked]
    numbers = range(2) if moment == "before" else (4,)
    for number, answer in zip(numbers, answers, strict=True):
        assert answer == ((site.work[number][1], None) if has_spare else ([], "SD861"))
    assert_recovered(site)


def test_a_request_that_decodes_needs_no_cable(site: Site) -> None:
    hold(site.decode, "decode after")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(site.ask, 4)
        wait_held([site.decode])
        for number in range(2):
            site.star.cut(number)
        release(site.decode)
        assert asked.result(LIMIT_S) == (site.work[4][1], None)
    assert_recovered(site)
