"""Slots in POSIX shared memory: what CUDA IPC does between two processes, on the CPU.

A CPU's copies are done when their call returns, so the marks order nothing; they are counted.
"""

from __future__ import annotations

from collections import Counter
from multiprocessing import shared_memory

import torch

from runtime.disagg.memory import attach


class HostSlot:
    """A segment of shared memory, and what was marked on it here."""

    def __init__(self, memory: shared_memory.SharedMemory) -> None:
        self._memory = memory  # the view lives as long as this
        self.bytes_N = torch.frombuffer(memory.buf, dtype=torch.uint8)
        self.marks: Counter[str] = Counter()

    def mark_written(self) -> None:
        self.marks["written"] += 1

    def wait_written(self) -> None:
        self.marks["wait_written"] += 1

    def mark_read(self) -> None:
        self.marks["read"] += 1

    def wait_read(self) -> None:
        self.marks["wait_read"] += 1


class HostSlots:
    """Makes and opens segments; `close` removes those made here."""

    def __init__(self, *, is_refused: bool = False) -> None:
        """Open slots, or refuse to, as a container without a shared namespace does."""
        self._is_refused = is_refused
        self._made: list[shared_memory.SharedMemory] = []
        self.slots: list[HostSlot] = []

    def offer(self, num_bytes: int) -> tuple[HostSlot, bytes]:
        self._made.append(shared_memory.SharedMemory(create=True, size=num_bytes))
        self.slots.append(HostSlot(self._made[-1]))
        return self.slots[-1], self._made[-1].name.encode()

    def open(self, note: bytes) -> HostSlot:
        if self._is_refused:
            raise RuntimeError("CUDA error: invalid device context")
        self.slots.append(HostSlot(attach(note.decode())))
        return self.slots[-1]

    def close(self) -> None:
        for memory in self._made:
            memory.unlink()
