"""Where processes that a launcher started look for each other, before anything connects them.

The library waits without looking at signals, for up to half an hour. Invariant: meanwhile signals
end the process at once, and the log says for whom it waits.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from runtime.parallel.launch import Launch, name_interface

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def launched_store(launch: Launch, timeout: datetime.timedelta) -> Store:
    """Return the store of the launcher, once every process has come to it.

    Raises:
        RuntimeError: one did not appear (the library's errors are of this class).
        OSError: the address cannot be used.
    """
    name_interface(os.environ)
    with signals_end_at_once():
        logger.info(
            "rank %d of %d waits at %s:%s for the others, for up to %.0f s",
            *(launch.rank, launch.world_size),
            *(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")),
            timeout.total_seconds(),
        )
        store: Store = next(iter(rendezvous("env://", timeout=timeout)))[0]
    return store


@contextmanager
def signals_end_at_once() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end this process as the system does, whatever a library waits for.

    Without effect in another thread than the main one, where handlers cannot be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
