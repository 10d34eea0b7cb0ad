"""Ways of a message between the memories of two GPUs, or of two processes on one GPU.

The channel's header goes first through the host; it says what is to come. `NcclHandOff` then sends
one buffer to the other GPU. `RingHandOff` leaves the buffer in a ring that the other process has
mapped: the sender's events say when a slot is written, the receiver's when it is read, and a small
answer tells the sender's host that the receiver has seen the slot, so both streams wait and no host
does. The readable twin of both is a channel without a hand-off: copies through host memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from runtime.parallel.lost import first_line, lost_as_diagnostic, lost_peer
from runtime.parallel.packing import Described, described, packed_bytes, views_of
from runtime.parallel.sends import Sends
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

RING_SIZE = 4
"""Messages that a receiver may be behind before a sender waits for it."""
_ANSWER_TAG = 1  # headers and numbers have 0
_TAKEN, _REFUSED = 1, 0
_MIN_SLOT_BYTES = 1 << 16
_MAX_UNDER_WAY = 8
_POLL_S = 20e-6


class HandOff(Protocol):
    """One end of a way; a sender calls `prepare`, then `complete`, a receiver `take`."""

    def prepare(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Copy tensors of this device and return what the receiver must know.

        Raises:
            DiagnosticError: SD855, the receiver is gone or silent beyond the time limit.
        """

    def complete(self) -> bool:
        """Go on after the header was sent; False: the receiver cannot be reached this way.

        Raises:
            DiagnosticError: SD855.
        """

    def take(self, parts: Sequence[Described], note: bytes) -> tuple[torch.Tensor, ...] | None:
        """Return the tensors of the next message; None: they cannot be had this way.

        Raises:
            DiagnosticError: SD855.
        """

    def flush(self) -> None:
        """Wait until the receiver has taken everything.

        Raises:
            DiagnosticError: SD855.
        """


class NcclHandOff:
    """Between two GPUs.

    A transfer waits on the device for its other end, which no time limit of the library should
    end together with the process: both ends look whether it is through, and give up by themselves.
    """

    def __init__(
        self, group: dist.ProcessGroup, peer: int, *, device: torch.device, timeout_s: float
    ) -> None:
        """Exchange with world rank `peer`.

        Args:
            group: of the library, holds both.
            peer: the other end; its GPU is another one.
            device: of this end.
            timeout_s: longest wait for the other end.
        """
        self._group = group
        self._peer = peer
        self._device = device
        self._timeout_s = timeout_s
        self._next: torch.Tensor | None = None
        self._under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()

    @torch.inference_mode()
    def prepare(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Pack the tensors; nothing more is to be known."""
        parts = described(tensors)
        buffer_N = torch.empty(packed_bytes(parts), dtype=torch.uint8, device=self._device)
        for view, tensor in zip(views_of(buffer_N, parts), tensors, strict=True):
            view.copy_(tensor)
        self._next = buffer_N
        return b""

    def complete(self) -> bool:
        """Send what was packed; the first transfer of a pair of ranks connects them."""
        buffer_N, self._next = self._next, None
        assert buffer_N is not None, "`prepare` comes first"
        if buffer_N.numel():
            with lost_as_diagnostic():
                work = dist.isend(buffer_N, self._peer, group=self._group)
            assert work is not None, "a sender is in its group"
            self._under_way.append((work, buffer_N))
        self._settle(_MAX_UNDER_WAY)
        return True

    def take(self, parts: Sequence[Described], note: bytes) -> tuple[torch.Tensor, ...] | None:
        """Receive one buffer. Sync: returns when it is there."""
        del note
        buffer_N = torch.empty(packed_bytes(parts), dtype=torch.uint8, device=self._device)
        if buffer_N.numel():
            with lost_as_diagnostic():
                work = dist.irecv(buffer_N, self._peer, group=self._group)
            assert work is not None, "a receiver is in its group"
            self._wait(work)
        return views_of(buffer_N, parts)

    def flush(self) -> None:
        """Wait until everything has left."""
        self._settle(0)

    def _settle(self, num_left: int) -> None:
        while self._under_way and (
            len(self._under_way) > num_left or self._under_way[0][0].is_completed()
        ):
            work, _ = self._under_way[0]
            self._wait(work)
            self._under_way.popleft()

    def _wait(self, work: dist.Work) -> None:
        end = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if time.monotonic() > end:
                raise DiagnosticError(lost_peer(f"no transfer in {self._timeout_s:g} s"))
            time.sleep(_POLL_S)
        with lost_as_diagnostic():
            work.wait()  # what the device does next comes after it


class Slot(Protocol):
    """A buffer that two processes see, and whose turn it is.

    Args:
        bytes_N: its memory, uint8.
    """

    bytes_N: torch.Tensor

    def mark_written(self) -> None:
        """Say, on the sender's stream, that it may be read."""

    def wait_written(self) -> None:
        """Let the receiver's stream wait for that."""

    def mark_read(self) -> None:
        """Say, on the receiver's stream, that it may be written again."""

    def wait_read(self) -> None:
        """Let the sender's stream wait for that."""


class SlotMemory(Protocol):
    """Makes slots, and opens those of another process."""

    def offer(self, num_bytes: int) -> tuple[Slot, bytes]:
        """Return a slot of this process, and what the other one opens it by."""

    def open(self, note: bytes) -> Slot:
        """Return a slot of the other process.

        Raises:
            RuntimeError: the system or the driver does not allow it.
            OSError: likewise.
        """


class RingHandOff:
    """Between two processes that can map each other's memory."""

    def __init__(self, group: dist.ProcessGroup, peer: int, memory: SlotMemory) -> None:
        """Exchange with world rank `peer`.

        Args:
            group: carries answers through the host; its time limit holds for them.
            peer: the other end.
            memory: of this process.
        """
        self._group = group
        self._peer = peer
        self._memory = memory
        self._slots: dict[int, Slot] = {}
        self._num_messages = 0
        self._num_answers = 0
        self._answers = Sends(group, peer, tag=_ANSWER_TAG)

    @torch.inference_mode()
    def prepare(self, tensors: Sequence[torch.Tensor]) -> bytes:
        """Write the next slot; a new or larger one is offered with the message."""
        parts = described(tensors)
        size = packed_bytes(parts)
        index = self._num_messages % RING_SIZE
        if self._num_messages - self._num_answers == RING_SIZE:
            self._await_answer()
        slot, note = self._slots.get(index), b""
        if slot is None or slot.bytes_N.numel() < size:
            slot, note = self._memory.offer(max(_MIN_SLOT_BYTES, 1 << (size - 1).bit_length()))
            self._slots[index] = slot
        else:
            slot.wait_read()
        for view, tensor in zip(views_of(slot.bytes_N, parts), tensors, strict=True):
            view.copy_(tensor)
        slot.mark_written()
        self._num_messages += 1
        return note

    def complete(self) -> bool:
        """Wait for the answer to the first message: whether the receiver could open its slot."""
        return self._num_messages > 1 or self._await_answer()

    @torch.inference_mode()
    def take(self, parts: Sequence[Described], note: bytes) -> tuple[torch.Tensor, ...] | None:
        """Copy the next slot out."""
        index = self._num_messages % RING_SIZE
        if note:
            try:
                self._slots[index] = self._memory.open(note)
            except (RuntimeError, OSError) as error:
                if self._num_messages:
                    raise DiagnosticError(lost_peer(first_line(error))) from error
                self._answer(_REFUSED)
                self._answers.settle(0)  # both ends now let go of this way
                return None
        slot = self._slots[index]
        slot.wait_written()
        whole_N = slot.bytes_N[: packed_bytes(parts)].clone()
        slot.mark_read()
        self._num_messages += 1
        self._answer(_TAKEN)
        return views_of(whole_N, parts)

    def flush(self) -> None:
        """Wait until the receiver has answered every message."""
        while self._num_answers < self._num_messages:
            self._await_answer()

    def _await_answer(self) -> bool:
        answer = torch.empty(1, dtype=torch.int64)
        with lost_as_diagnostic():
            dist.recv(answer, self._peer, group=self._group, tag=_ANSWER_TAG)
        self._num_answers += 1
        return answer.item() == _TAKEN

    def _answer(self, value: int) -> None:
        self._answers.start(torch.tensor([value]))
        self._answers.settle(RING_SIZE)


def unreachable_memory() -> Diagnostic:
    """Return SD875: two processes share a GPU and cannot share its memory."""
    return diagnose(
        "SD875",
        where="pipeline",
        message="a neighbouring stage on the same GPU cannot map this one's memory: states go "
        "through host memory",
        expected="CUDA IPC between the two processes",
        found="refused by the driver or the system",
    )
