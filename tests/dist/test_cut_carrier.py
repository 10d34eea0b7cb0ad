"""KV travels over the cable that is pulled out: real libraries between network namespaces.

A prefill server writes to two decode servers. The cable to one of them is pulled out amid a
transfer; the other one is served on meanwhile. Once a carrier's `linger_s` is over, nothing of a
write that stood on a dead cable arrives, though the cable is back.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from runtime.disagg.mooncake import MooncakeTransport
from runtime.disagg.nixl import NixlTransport
from runtime.disagg.transport import BlockMove, Link, Transport
from runtime.kv import KVLayer
from specctl.contract.diagnostics import DiagnosticError
from tests.dist.cluster import LIMIT_S, Server, hold, release, wait_held
from tests.dist.namespaces import Star, enter_with_devices, star, why_not
from tests.dist.star_servers import LISTEN, Work, ask, star_servers
from tests.dist.test_library_transports import is_installed

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


@pytest.fixture(params=["shared", "nixl", "mooncake"])
def carrier(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name != "shared" and not is_installed(name):
        pytest.skip(f"extra `{name}` is not installed here")
    return name


@pytest.fixture
def site(carrier: str, tmp_path: Path) -> Iterator[tuple[Star, Server, list[Server], Work]]:
    has_host = carrier == "mooncake"
    with star_servers(tmp_path, "--transport", carrier) as servers:
        made = servers.star
        listen = ("--role", "prefill", "--listen", f"0.0.0.0:{LISTEN}")
        prefill = servers.start("prefill", made.middle, *listen, "--transfer-timeout-s", "5")
        decode = [
            servers.start(
                *(f"decode{number}", made.others[number], "--role", "decode"),
                *("--peer", f"{made.address(number, of_middle=True)}:{LISTEN}"),
                *(("--transport-host", made.address(number)) if has_host else ()),
            )
            for number in range(2)
        ]
        servers.wait_answering()
        yield made, prefill, decode, servers.work


def test_other_decode_servers_are_served_while_one_is_cut_off(
    site: tuple[Star, Server, list[Server], Work],
) -> None:
    made, prefill, decode, work = site
    for number, server in enumerate(decode):
        assert ask(server, work[number]) == (work[number][1], None)
    hold(prefill, "prefill during")
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(ask, decode[0], work[4])
        wait_held([prefill])
        made.cut(0)
        release(prefill)
        for number in (2, 3, 5):
            assert pool.submit(ask, decode[1], work[number]).result(LIMIT_S) == (
                work[number][1],
                None,
            )
        assert asked.result(LIMIT_S) == ([], "SD861")
    for server in (prefill, *decode):
        server.wait_idle()
        assert "Traceback" not in server.log.read_text()


SHAPE = (512, 8, 16, 64)  # more than sockets hold
WHOLE = BlockMove(
    source_layer=0,
    destination_layer=0,
    source_head=0,
    destination_head=0,
    num_heads=SHAPE[1],
    source_blocks=tuple(range(SHAPE[0])),
    destination_blocks=tuple(range(SHAPE[0])),
)


def transport_in(namespace: str, name: str, host: str) -> Transport:
    enter_with_devices(namespace)
    os.environ["UCX_TLS"] = "tcp"  # else it finds that both are processes of one machine
    return MooncakeTransport(host) if name == "mooncake" else NixlTransport()


def layer_of(transport: Transport) -> KVLayer:
    made = [transport.allocate(SHAPE, torch.float32, torch.device("cpu")) for _ in range(2)]
    return KVLayer(k=made[0], v=made[1])


def receive(namespace: str, name: str, host: str, pipe: Connection) -> None:
    """Offer a layer; answer every question with its sum."""
    transport = transport_in(namespace, name, host)
    layer = layer_of(transport)
    receiver = transport.receive_into([layer])
    pipe.send(receiver.address)
    while pipe.recv():
        pipe.send(float(layer.k.sum() + layer.v.sum()))


def send(namespace: str, name: str, host: str, pipe: Connection) -> None:
    """Write a layer of ones, then for every question one of a higher number; answer with a code."""
    transport = transport_in(namespace, name, host)
    layer = layer_of(transport)
    address = pipe.recv()
    link: Link | None = transport.connect(address, [layer])
    while pipe.recv():
        link = link or transport.connect(address, [layer])
        layer.k.add_(1)
        layer.v.add_(1)
        try:
            link.write(WHOLE)
            link.finish(60)
        except DiagnosticError as error:
            link.close()
            link = None
            pipe.send(error.diagnostics[0].code)
        else:
            pipe.send(None)


def answer_of(pipe: Connection) -> object:
    assert pipe.poll(90), "no answer"
    return pipe.recv()


@pytest.mark.parametrize("carrier", ["nixl", "mooncake"], indirect=True)
def test_nothing_arrives_late_of_a_write_that_stood_on_a_dead_cable(carrier: str) -> None:
    context = get_context("spawn")
    linger_s = {"nixl": NixlTransport, "mooncake": MooncakeTransport}[carrier].linger_s
    with star(1) as made, ExitStack() as stack:
        pipes = []
        for work, space, host in (
            (receive, made.others[0], made.address(0)),
            (send, made.middle, made.address(0, of_middle=True)),
        ):
            mine, theirs = context.Pipe()
            child = context.Process(target=work, args=(space, carrier, host, theirs), daemon=True)
            child.start()
            stack.callback(child.kill)
            pipes.append(mine)
        there, here = pipes
        here.send(there.recv())
        here.send(True)
        assert answer_of(here) is None
        made.cut(0)
        here.send(True)
        assert not here.poll(3), "the write stands"
        time.sleep(linger_s)
        made.join(0)
        time.sleep(3)
        there.send(True)
        whole = 2 * math.prod(SHAPE)
        assert there.recv() < 2 * whole, "all of the second write arrived"
        assert answer_of(here) == "SD863"
        here.send(True)  # over a link of its own
        assert answer_of(here) is None
        there.send(True)
        assert there.recv() == 3 * whole
