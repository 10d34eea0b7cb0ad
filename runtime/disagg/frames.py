"""What travels on the control connection between a decode and a prefill process.

The decode side asks, the prefill side answers; KV itself goes through a transport. Frames are
msgpack with a length before each, and a tag that names their kind. A connection begins with the
`Hello` of the decode side and the one that answers it, then an `Offer` of the decode side's pools.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

import msgspec
import torch

from runtime.config import DTYPES, dtype_name
from runtime.disagg.handshake import Hello
from runtime.spec.types import SamplingParams, TokenLogprobs
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

MAX_FRAME_BYTES = 256 << 20
_HTTP = b"HTTP"
_LENGTH = struct.Struct("!I")
_DTYPES = {**DTYPES, "int64": torch.int64}


class Greeting(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first frame of each side."""

    hello: Hello


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """Where the decode side's pools are: address of each of its world ranks."""

    addresses: list[bytes]


class Prefill(msgspec.Struct, frozen=True, kw_only=True, tag="prefill"):
    """Compute a prompt and write its KV.

    Args:
        prompt_ids_target: the whole prompt.
        params: how the first token is chosen; the seed is set.
        first_position: KV before it is on the decode side already (its prefix cache); a multiple
            of the block size.
        blocks: of the decode side's pool, the same numbers on all of its ranks, from the block of
            `first_position` on.
        num_drafts: drafts of the first round that are wanted, 0 where the decode side drafts from
            the state that it gets.
    """

    request_id: str
    prompt_ids_target: tuple[int, ...]
    params: SamplingParams
    first_position: int
    blocks: tuple[int, ...]
    num_drafts: int = 0


class TensorBytes(msgspec.Struct, frozen=True, kw_only=True):
    """A small tensor.

    Args:
        name: meaning, one of the proposer's own names.
        dtype: torch's name without its prefix.
        data: little endian, row major.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class TensorHere(TensorBytes, frozen=True, kw_only=True):
    """A tensor that never leaves its process; no connection takes it.

    Args:
        value: on the device where it was made, of which `data` says nothing.
    """

    value: torch.Tensor


class Prefilled(msgspec.Struct, frozen=True, kw_only=True, tag="prefilled"):
    """All KV of a prompt is in the decode side's memory.

    Args:
        committed_target: the tokens that the prefill yielded: the first one.
        state: per-slot state of the proposer after the prompt.
        draft_ids_target: drafts of the first round, in the target vocabulary; empty: the decode
            side drafts itself from `state`.
        draft_probs: float32 [drafts, target vocabulary], the law of each draft; None: they count as
            certain (`first_proposal` is `one_hot`).
        num_kv_bytes: what the transport carried.
        num_cached_tokens: prompt tokens whose KV was in the prefill side's prefix cache.
        logprobs: of the committed tokens, where the request wants them.
    """

    request_id: str
    committed_target: tuple[int, ...]
    state: list[TensorBytes]
    draft_ids_target: tuple[int, ...]
    draft_probs: TensorBytes | None
    num_kv_bytes: int
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A request ended on the prefill side; nothing more is written for it."""

    request_id: str
    problem: Diagnostic


class Abort(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """The decode side has no use for a request any more; its blocks wait for `Released`."""

    request_id: str


class Released(msgspec.Struct, frozen=True, kw_only=True, tag="released"):
    """Nothing more is written for a request that was aborted."""

    request_id: str


class Beat(msgspec.Struct, frozen=True, kw_only=True, tag="beat"):
    """Nothing new: the sender is alive."""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag="leaving"):
    """The last frame of a sender that ends in order: it is not lost, and writes nothing more."""


Frame: TypeAlias = (
    Greeting | Offer | Prefill | Prefilled | Failed | Abort | Released | Beat | Leaving
)


def pack_tensor(name: str, value: torch.Tensor) -> TensorBytes:
    """Return the bytes of a tensor."""
    flat = value.detach().contiguous().cpu().flatten()
    return TensorBytes(
        name=name,
        dtype=dtype_name(value.dtype),
        shape=tuple(value.shape),
        data=flat.view(torch.uint8).numpy().tobytes(),
    )


PackTensor: TypeAlias = Callable[[str, torch.Tensor], TensorBytes]
"""How a prefill engine puts a tensor into a frame: as bytes, or as it is."""


def keep_tensor(name: str, value: torch.Tensor) -> TensorBytes:
    """Return a tensor for an engine of this process that launches on the same stream.

    Sync: none, unlike bytes, which the host has to read from the device and write there again.
    """
    return TensorHere(
        name=name,
        dtype=dtype_name(value.dtype),
        shape=tuple(value.shape),
        data=b"",
        value=value,
    )


def unpack_tensor(packed: TensorBytes, device: torch.device) -> torch.Tensor:
    """Return the tensor of some bytes on a device."""
    if isinstance(packed, TensorHere):
        return packed.value.to(device)
    values = torch.frombuffer(bytearray(packed.data), dtype=_DTYPES[packed.dtype])
    return values.view(packed.shape).to(device)


class Connection:
    """Frames over one socket; one thread reads, any thread under one lock writes."""

    def __init__(self, peer: socket.socket, *, name: str) -> None:
        """Speak with a peer.

        Args:
            peer: connected; owned from now on.
            name: for messages, `host:port`.
        """
        self._peer = peer
        self.name = name
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._lock = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Send one frame.

        Raises:
            DiagnosticError: SD861, the connection ended.
        """
        body = self._encoder.encode(frame)
        try:
            with self._lock:
                self._peer.sendall(_LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise DiagnosticError(unreachable(self.name, str(error))) from error

    def receive(self) -> Frame:
        """Wait for the next frame.

        Raises:
            DiagnosticError: SD861, the connection ended, or what came is no frame.
        """
        head = self._read(_LENGTH.size)
        if head == _HTTP:
            found = "an HTTP server answers; name the port of `--listen`"
            raise DiagnosticError(unreachable(self.name, found))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_FRAME_BYTES:
            raise DiagnosticError(unreachable(self.name, f"a frame of {length} bytes"))
        try:
            return self._decoder.decode(self._read(length))
        except msgspec.MsgspecError as error:
            raise DiagnosticError(unreachable(self.name, f"no frame: {error}")) from error

    def limit(self, timeout_s: float) -> None:
        """Let no read wait, and no frame take to be sent, for longer than this from now on."""
        self._peer.settimeout(timeout_s)

    def close(self) -> None:
        """End the connection; a reader that waits gets SD861."""
        with suppress(OSError):  # the peer was first
            self._peer.shutdown(socket.SHUT_RDWR)
        self._peer.close()

    def _read(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._peer.recv(min(count - len(parts), 1 << 20))
            except OSError as error:
                raise DiagnosticError(unreachable(self.name, str(error))) from error
            if not part:
                raise DiagnosticError(unreachable(self.name, "the connection ended"))
            parts += part
        return bytes(parts)


def unreachable(name: str, found: str) -> Diagnostic:
    """Return SD861 for a peer; the cause stands in the line that logs and `/health` show."""
    return diagnose(
        "SD861",
        where=f"peer {name}",
        message=f"the peer cannot be reached, or its connection ended: {found}",
    )
