"""Frames: what is sent arrives, and a connection that ends or lies is a code."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch

from runtime.disagg.frames import (
    MAX_FRAME_BYTES,
    Abort,
    Connection,
    Failed,
    Frame,
    Greeting,
    Offer,
    Prefill,
    Prefilled,
    Released,
    pack_tensor,
    unpack_tensor,
    unreachable,
)
from runtime.disagg.handshake import Hello, Layout
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError

CPU = torch.device("cpu")
STATE = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
FRAMES: tuple[Frame, ...] = (
    Greeting(
        hello=Hello(
            protocol=1,
            role="decode",
            facts={"dtype": "bfloat16"},
            layout=Layout(stage_layers=(2, 2), tensor_parallel=2),
            transport="shared",
        )
    ),
    Offer(addresses=[b"\x00a", b""]),
    Prefill(
        request_id="a",
        prompt_ids_target=(1, 2, 3),
        params=SamplingParams(temperature=0.5, seed=2**63, logit_bias=((3, -1.5),)),
        first_position=16,
        blocks=(4, 9),
    ),
    Prefilled(
        request_id="a",
        committed_target=(7,),
        state=[pack_tensor("feedback", STATE)],
        draft_ids_target=(1, 2),
        draft_probs=None,
        num_kv_bytes=123,
    ),
    Failed(request_id="a", problem=unreachable("x", "y")),
    Abort(request_id="a"),
    Released(request_id="a"),
)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Connection]]:
    ours, theirs = socket.socketpair()
    connection = Connection(theirs, name="peer:1")
    yield ours, connection
    ours.close()
    connection.close()


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_what_is_sent_arrives(ends: tuple[socket.socket, Connection], frame: Frame) -> None:
    ours, connection = ends
    Connection(ours, name="us").send(frame)
    assert connection.receive() == frame


def test_frames_of_several_threads_do_not_mix(ends: tuple[socket.socket, Connection]) -> None:
    ours, connection = ends
    sender = Connection(ours, name="us")
    names = [f"{index}" * 3000 for index in range(8)]

    def send(name: str) -> None:
        for _ in range(5):
            sender.send(Abort(request_id=name))

    threads = [threading.Thread(target=send, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    found = [connection.receive() for _ in range(40)]
    for thread in threads:
        thread.join()
    ids = sorted(frame.request_id for frame in found if isinstance(frame, Abort))
    assert ids == sorted(names * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tensor_keeps_its_bits(dtype: torch.dtype) -> None:
    value = STATE.to(dtype)
    packed = pack_tensor("state", value.t())
    found = unpack_tensor(packed, CPU)
    assert found.dtype == dtype
    assert torch.equal(found, value.t())
    assert len(packed.data) == value.numel() * dtype.itemsize


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"", "the connection ended"),
        (b"\x00\x00", "the connection ended"),
        (struct.pack("!I", 9) + b"abc", "the connection ended"),
        (struct.pack("!I", MAX_FRAME_BYTES + 1), "bytes"),
        (b"HTTP/1.1 400 Bad Request", "an HTTP server answers; name the port of `--listen`"),
        (struct.pack("!I", 2) + b"\xc1\xc1", "no frame"),
        (struct.pack("!I", 13) + b"\x81\xa4type\xa6strange", "no frame"),
    ],
)
def test_a_connection_that_ends_or_lies(
    ends: tuple[socket.socket, Connection], raw: bytes, text: str
) -> None:
    ours, connection = ends
    ours.sendall(raw)
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(DiagnosticError) as caught:
        connection.receive()
    (problem,) = caught.value.diagnostics
    assert problem.code == "SD861"
    assert text in problem.oneline(), "logs and /health show this line alone"


def test_sending_to_a_peer_that_is_gone(ends: tuple[socket.socket, Connection]) -> None:
    ours, connection = ends
    ours.close()
    with pytest.raises(DiagnosticError, match="SD861"):
        connection.send(Abort(request_id="x" * 1_000_000))
