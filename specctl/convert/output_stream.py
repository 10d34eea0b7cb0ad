"""A weight file being written, whose bytes go to the disk while more are copied.

Invariants: `finish` returns only when every byte is on the disk. Large files are flushed by a
second thread as they grow: otherwise the disk idles while bytes are copied, and the copy waits for
the disk at its end.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType

FLUSH_BYTES = 256 << 20  # smaller steps make the copy wait for the file system


class OutputStream:
    """A new file, open for appending and for writing behind its end."""

    def __init__(self, path: Path) -> None:
        """Create the file; OSError when it exists or cannot be made."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o666)
        self._unflushed = 0
        self._wake = threading.Event()
        self._is_done = False
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Append all of `data`."""
        view = memoryview(data)
        while view:
            count = os.write(self.descriptor, view)
            self.advance(count)
            view = view[count:]

    def advance(self, count: int) -> None:
        """Take note of bytes that were written, here or by the kernel."""
        self._unflushed += count
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            if self._thread is None:
                self._thread = threading.Thread(target=self._flush, daemon=True)
                self._thread.start()
            self._wake.set()

    def finish(self) -> None:
        """Wait until everything is on the disk; OSError when it could not be written."""
        self._stop()
        if self._error is not None:
            raise self._error
        os.fsync(self.descriptor)

    def __enter__(self) -> OutputStream:
        """Return itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file; what was not finished may not be on the disk."""
        self._stop()
        os.close(self.descriptor)

    def _stop(self) -> None:
        if self._thread is not None:
            self._is_done = True
            self._wake.set()
            self._thread.join()
            self._thread = None

    def _flush(self) -> None:
        while True:
            self._wake.wait()
            if self._is_done:
                return
            self._wake.clear()
            try:
                os.fdatasync(self.descriptor)
            except OSError as error:  # told by `finish`, in the thread that writes
                self._error = error
                return
