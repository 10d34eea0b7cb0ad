"""One-way hand-off of tensors between two stages.

A message is a header, then its tensors. The header states how there are to come, how many there
are, and of which type and shape, so a receiver never guesses a width. A peer that is gone or silent
is SD855 within the channel's time limit, never a wait without end.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from runtime.parallel.hand_off import HandOff, unreachable_memory
from runtime.parallel.lost import lost_as_diagnostic
from runtime.parallel.packing import Described
from runtime.parallel.sends import Sends
from specctl.contract.diagnostics import DiagnosticError, diagnose

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_MAX_TENSORS = 16
_MAX_DIMS = 4
_MAX_UNDER_WAY = 64  # parts that a peer has not taken
_HEADER = 1 + _MAX_TENSORS * (2 + _MAX_DIMS)


class _Way(enum.IntEnum):
    """How the tensors of a message travel."""

    HOST = 0
    DIRECT = 1


class Channel(Protocol):
    """One direction between two stages; one sender, one receiver, messages in order."""

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand tensors over; they may be written again when it returns.

        Raises:
            DiagnosticError: SD855, the peer is gone.
        """

    def flush(self) -> None:
        """Wait until the peer has taken everything.

        Raises:
            DiagnosticError: SD855, the peer is gone or takes nothing within the time limit.
        """

    def receive(self) -> tuple[torch.Tensor, ...]:
        """Wait for the next message.

        Raises:
            DiagnosticError: SD855, the peer is gone or silent beyond the time limit.
        """


class DistributedChannel:
    """Between processes of one torch.distributed group that carries tensors of the CPU.

    Headers, numbers and whatever lies in host memory travel through the group; tensors of the
    model's device through `hand_off` where there is one, through host memory otherwise. A send
    copies and does not wait: a peer that is busy takes the message later, and two stages that send
    to each other never wait for each other.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        *,
        device: torch.device,
        hand_off: HandOff | None = None,
    ) -> None:
        """Exchange with world rank `peer`.

        Args:
            group: holds both; its time limit holds for every transfer.
            peer: the other end.
            device: where tensors arrive.
            hand_off: a way between the devices of both; the peer's channel has its other end.
        """
        self._group = group
        self._peer = peer
        self._device = device
        self._hand_off = hand_off
        self._sends = Sends(group, peer)

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send a header and each tensor; see `Channel.send`."""
        is_there = all(tensor.device.type == self._device.type for tensor in tensors)
        if self._hand_off is not None and is_there:
            note = self._hand_off.prepare(tensors)
            self._send_parts(_Way.DIRECT, tensors, note)
            if self._hand_off.complete():
                return
            logger.warning("%s", unreachable_memory().oneline())
            self._hand_off = None
        self._send_parts(_Way.HOST, tensors, b"")

    def flush(self) -> None:
        """Wait until the peer has taken everything; see `Channel.flush`."""
        if self._hand_off is not None:
            self._hand_off.flush()
        self._sends.settle(0)

    def receive(self) -> tuple[torch.Tensor, ...]:
        """Return the next message; see `Channel.receive`."""
        while True:
            head = torch.empty(2 + _HEADER, dtype=torch.int64)
            with lost_as_diagnostic():
                dist.recv(head, self._peer, group=self._group)
            way, num_note_bytes, *header = head.tolist()
            described = parse_header(header)
            if way == _Way.HOST:
                return tuple(item.to(self._device) for item in self._receive_all(described))
            (note,) = self._receive_all([(torch.uint8, (num_note_bytes,))])
            assert self._hand_off is not None, "both ends have a way of their own, or neither has"
            taken = self._hand_off.take(described, note.numpy().tobytes())
            if taken is not None:
                return taken
            self._hand_off = None  # the peer knows, and sends it again through host memory

    def _send_parts(self, way: _Way, tensors: Sequence[torch.Tensor], note: bytes) -> None:
        """Send a header and what goes with it through the group."""
        parts = [torch.tensor([way, len(note), *header_of(tensors)])]
        if way == _Way.HOST:
            parts += [_copy(tensor) for tensor in tensors if tensor.numel()]
        elif note:
            parts.append(torch.frombuffer(bytearray(note), dtype=torch.uint8))
        for part in parts:
            self._sends.start(part)
        self._sends.settle(_MAX_UNDER_WAY)

    def _receive_all(self, described: Sequence[Described]) -> list[torch.Tensor]:
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in described]
        with lost_as_diagnostic():
            for tensor in tensors:
                if tensor.numel():
                    dist.recv(tensor, self._peer, group=self._group)
        return tensors


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().to("cpu", copy=True)
    return copy.contiguous()


def header_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the numbers that describe a message."""
    assert len(tensors) <= _MAX_TENSORS, f"{len(tensors)} tensors in one message"
    header = [len(tensors)]
    for tensor in tensors:
        assert tensor.dim() <= _MAX_DIMS, f"a tensor of {tensor.dim()} dimensions"
        dims = [*tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())]
        header += [_DTYPES.index(tensor.dtype), tensor.dim(), *dims]
    return header + [0] * (_HEADER - len(header))


def parse_header(header: Sequence[int]) -> list[Described]:
    """Return (dtype, shape) of each tensor of a message.

    Raises:
        DiagnosticError: SD853, the numbers describe no message.
    """
    count = header[0]
    described = [header[1 + i * 6 : 7 + i * 6] for i in range(max(0, count))]
    is_sound = 0 <= count <= _MAX_TENSORS and all(
        0 <= kind < len(_DTYPES) and 0 <= dim <= _MAX_DIMS and min(sizes) >= 0
        for kind, dim, *sizes in described
    )
    if not is_sound:
        raise DiagnosticError(
            diagnose(
                "SD853",
                where="pipeline",
                message="a stage received something else than the header of a message",
                expected=f"a count up to {_MAX_TENSORS}, then types and shapes",
                found=" ".join(map(str, header[:8])),
            )
        )
    return [(_DTYPES[kind], tuple(sizes[:dim])) for kind, dim, *sizes in described]
