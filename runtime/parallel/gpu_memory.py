"""Memory of one GPU that two processes see: what one hands over, the other opens.

*Source:* CUDA IPC as torch's own `multiprocessing` uses it for tensors (storage handles, reference
counters, interprocess events).
"""

from __future__ import annotations

import msgspec
import torch


class _Storage(msgspec.Struct, frozen=True, array_like=True):
    """What torch says of a shared storage, in the order in which it takes it back."""

    device_index: int
    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    has_event: bool


class _SlotNote(msgspec.Struct, frozen=True, kw_only=True):
    storage: _Storage
    written: bytes
    read: bytes


def gpu_name(device: torch.device) -> str:
    """Return what names a device's GPU in every process and on every host; empty for a CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def share_memory(tensor: torch.Tensor) -> bytes:
    """Return what another process on the same GPU opens a tensor's memory by.

    Args:
        tensor: the whole of its storage, which lives until the other process lets go of it.
    """
    return msgspec.msgpack.encode(_shared(tensor))


def open_memory(note: bytes, device: torch.device) -> torch.Tensor:
    """Return the memory of another process's tensor, uint8.

    Args:
        note: from `share_memory`.
        device: the same GPU, as this process counts it.

    Raises:
        RuntimeError: the driver does not open it.
    """
    return _opened(msgspec.msgpack.decode(note, type=_Storage), device)


class GpuSlot:
    """A buffer and the two events that say whose turn it is.

    Either process may record and wait for either event; the channel's messages order the calls.
    """

    def __init__(
        self, bytes_N: torch.Tensor, written: torch.cuda.Event, read: torch.cuda.Event
    ) -> None:
        """Hold them."""
        self.bytes_N = bytes_N
        self._written = written
        self._read = read

    def mark_written(self) -> None:
        """Record on the current stream; see `Slot`."""
        self._written.record()

    def wait_written(self) -> None:
        """Let the current stream wait; see `Slot`."""
        self._written.wait()

    def mark_read(self) -> None:
        """Record on the current stream; see `Slot`."""
        self._read.record()

    def wait_read(self) -> None:
        """Let the current stream wait; see `Slot`."""
        self._read.wait()


class GpuSlots:
    """Slots in the memory of one GPU; see `SlotMemory`."""

    def __init__(self, device: torch.device) -> None:
        """Make and open slots of a device."""
        self._device = device

    def offer(self, num_bytes: int) -> tuple[GpuSlot, bytes]:
        """Return a slot and its note."""
        bytes_N = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        with torch.cuda.device(self._device):  # an event that was never recorded is made on it
            events = [torch.cuda.Event(interprocess=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            handles = [event.ipc_handle() for event in events]  # type: ignore[no-untyped-call]
        note = _SlotNote(storage=_shared(bytes_N), written=handles[0], read=handles[1])
        return GpuSlot(bytes_N, *events), msgspec.msgpack.encode(note)

    def open(self, note: bytes) -> GpuSlot:
        """Return the slot that another process offered."""
        found = msgspec.msgpack.decode(note, type=_SlotNote)
        events = [
            torch.cuda.Event.from_ipc_handle(self._device, handle)  # type: ignore[no-untyped-call]
            for handle in (found.written, found.read)
        ]
        return GpuSlot(_opened(found.storage, self._device), *events)


def _shared(tensor: torch.Tensor) -> _Storage:
    storage = tensor.untyped_storage()
    num_bytes = tensor.numel() * tensor.element_size()
    assert storage.nbytes() == num_bytes, "a tensor is the whole of its storage"
    return _Storage(*storage._share_cuda_())  # type: ignore[no-untyped-call]


def _opened(found: _Storage, device: torch.device) -> torch.Tensor:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        found.handle,
        found.num_bytes,
        found.offset_bytes,
        found.counter_handle,
        found.counter_offset,
        found.event_handle,
        found.has_event,
    )
    whole_N = torch.empty(0, dtype=torch.uint8, device=device)
    return whole_N.set_(storage, 0, (found.num_bytes,), (1,))
