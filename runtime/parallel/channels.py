"""One-way hand-off of tensors between two stages.

A message is a header, then its tensors. The header states how many there are, of which type and
shape, so a receiver never guesses a width. A peer that is gone or silent is SD855 within the
channel's time limit, never a wait without end.
"""

from __future__ import annotations

import queue
import re
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

_SOURCE_LINE = re.compile(r"^\[[^\]]*\] ")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_MAX_TENSORS = 16
_MAX_DIMS = 4
_MAX_UNDER_WAY = 64  # parts that a peer has not taken
_HEADER = 1 + _MAX_TENSORS * (2 + _MAX_DIMS)


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


class QueueChannel:
    """Between threads of one process: the readable twin of the others."""

    def __init__(self, *, timeout_s: float = 60.0) -> None:
        """Wait at most `timeout_s` for a message."""
        self._messages: queue.Queue[tuple[torch.Tensor, ...]] = queue.Queue()
        self._timeout_s = timeout_s

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hand copies over: the sender may write its buffers again."""
        self._messages.put(tuple(tensor.detach().clone() for tensor in tensors))

    def flush(self) -> None:
        """Return at once: what was sent is in memory."""

    def receive(self) -> tuple[torch.Tensor, ...]:
        """Return the oldest message; see `Channel.receive`."""
        try:
            return self._messages.get(timeout=self._timeout_s)
        except queue.Empty as error:
            raise DiagnosticError(lost_peer(f"no message in {self._timeout_s:g} s")) from error


class DistributedChannel:
    """Between processes of one torch.distributed group (gloo on CPUs, NCCL between GPUs).

    A send copies and does not wait: a peer that is busy takes the message later, and two stages
    that send to each other never wait for each other. The group's own time limit holds for every
    transfer. Header and numbers always travel through host memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        *,
        device: torch.device,
        wire: torch.device | None = None,
    ) -> None:
        """Exchange with world rank `peer`.

        Args:
            group: holds both.
            peer: the other end.
            device: where tensors arrive.
            wire: where they travel from and to; None: the host's memory.
        """
        self._group = group
        self._peer = peer
        self._device = device
        self._wire = wire or torch.device("cpu")
        self._under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send a header and each tensor; see `Channel.send`."""
        header = torch.tensor(header_of(tensors), dtype=torch.int64)
        parts = [header]
        parts += [_copy(tensor, self._wire) for tensor in tensors if tensor.numel()]
        try:
            for part in parts:
                work = dist.isend(part, self._peer, group=self._group)
                assert work is not None, "a sender is in its group"
                self._under_way.append((work, part))  # the copy lives until it has left
            self._settle(_MAX_UNDER_WAY)
        except RuntimeError as error:
            raise DiagnosticError(lost_peer(_first_line(error))) from error

    def flush(self) -> None:
        """Wait until the peer has taken everything; see `Channel.flush`."""
        try:
            self._settle(0)
        except RuntimeError as error:
            raise DiagnosticError(lost_peer(_first_line(error))) from error

    def receive(self) -> tuple[torch.Tensor, ...]:
        """Return the next message; see `Channel.receive`."""
        header = torch.empty(_HEADER, dtype=torch.int64)
        try:
            dist.recv(header, self._peer, group=self._group)
            tensors = tuple(
                torch.empty(shape, dtype=dtype, device=self._wire)
                for dtype, shape in parse_header(header.tolist())
            )
            for tensor in tensors:
                if tensor.numel():
                    dist.recv(tensor, self._peer, group=self._group)
        except RuntimeError as error:
            raise DiagnosticError(lost_peer(_first_line(error))) from error
        return tuple(tensor.to(self._device) for tensor in tensors)

    def _settle(self, num_left: int) -> None:
        """Forget what has left, and wait while more than `num_left` parts have not."""
        while self._under_way:
            work, _ = self._under_way[0]
            if len(self._under_way) <= num_left and not work.is_completed():
                return
            work.wait()
            self._under_way.popleft()


def _copy(tensor: torch.Tensor, wire: torch.device) -> torch.Tensor:
    copy = tensor.detach().to(wire, copy=True)
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


def parse_header(header: Sequence[int]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
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


def lost_peer(found: str) -> Diagnostic:
    """Return SD855 for a stage that does not answer."""
    return diagnose(
        "SD855",
        where="pipeline",
        message="a neighbouring stage is gone or silent",
        expected="a message within the time limit",
        found=found,
    )


def _first_line(error: Exception) -> str:
    """Return what a library says without its source lines and its advice."""
    line = str(error).partition("\n")[0].partition(". ")[0]
    return _SOURCE_LINE.sub("", line) or type(error).__name__
