"""Entries of host memory that kernels read at their turn, each filled again once its kernel ran.

A tensor made for every launch would be copied to the device by way of a staging buffer, and the
host would wait for that copy. Kernels that read pinned memory themselves need neither, but what
they read must stand until they have run: behind each one an event is recorded, and whoever comes
round to its entry again waits for that. With more entries than launches in flight nobody does.

Legend: C numbers of a row that an entry has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from runtime.graphs.marks import Mark, new_mark
from runtime.kernels.round_inputs import Put

if TYPE_CHECKING:
    import numpy as np

NUM_ENTRIES = 16
"""A round has few writes before it, and few rounds are in flight."""
_ALIGNED_INTS = 4  # of 4 bytes: kernels take every entry to begin at a multiple of 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Entry:
    """Two rows of numbers.

    Args:
        numbers_2C: int32, what kernels read.
        host_2C: the same memory.
        mark: behind the kernel that read them last.
    """

    numbers_2C: torch.Tensor
    host_2C: np.ndarray[Any, np.dtype[np.int32]]
    mark: Mark


class InputRing:
    """Pinned entries, or plain ones of a CPU.

    Attributes:
        capacity: C.
    """

    def __init__(
        self,
        *,
        capacity: int,
        device: torch.device,
        make_mark: Callable[[torch.device], Mark] = new_mark,
        num_entries: int = NUM_ENTRIES,
    ) -> None:
        """Allocate everything.

        Args:
            capacity: numbers of a row at least.
            device: of the kernels; one without pinned memory reads plain entries.
            make_mark: returns what is put behind a launch.
            num_entries: launches that may be in flight before the host waits for the oldest.
        """
        self.capacity = -(-capacity // _ALIGNED_INTS) * _ALIGNED_INTS
        shape = (num_entries, 2, self.capacity)
        numbers_E2C = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._entries = tuple(
            _Entry(numbers_2C=numbers_2C, host_2C=numbers_2C.numpy(), mark=make_mark(device))
            for numbers_2C in numbers_E2C.unbind()
        )
        self._next = 0

    @property
    def example(self) -> torch.Tensor:
        """An entry to compile kernels with."""
        return self._entries[0].numbers_2C

    def launch(self, put: Put, first: Sequence[int], second: Sequence[int]) -> None:
        """Fill the next entry and launch what reads it.

        Args:
            put: what reads the entry, on the current stream.
            first: numbers of its first row, at most `capacity`.
            second: as many of the second row.

        Sync: none, unless as many launches as there are entries are in flight.
        """
        count = len(first)
        entry = self._entries[self._next]
        self._next = (self._next + 1) % len(self._entries)
        entry.mark.synchronize()
        entry.host_2C[0, :count] = first
        entry.host_2C[1, :count] = second
        put(entry.numbers_2C, count)
        entry.mark.record()
