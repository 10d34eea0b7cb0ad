"""Signal handlers that are set for a while and put back; the one place that does both."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

Handler: TypeAlias = Callable[[int, FrameType | None], object] | signal.Handlers

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
"""What asks a process to end: Ctrl-C, and what `kill` and service managers send."""


@contextmanager
def handled(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Have signals handled so while the body runs; afterwards as before.

    Without effect in another thread than the main one, where handlers cannot be set.

    Args:
        numbers: of the signals.
        handler: called in the main thread, or `signal.SIG_DFL` or `signal.SIG_IGN`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
