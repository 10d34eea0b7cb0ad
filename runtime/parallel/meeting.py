"""Where processes that a launcher started look for each other, before anything connects them.

The library waits without looking at signals, for up to half an hour. Invariant: meanwhile signals
end the process at once, and the log says for whom it waits.
"""

from __future__ import annotations

import datetime
import logging
import os
import signal

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from runtime.parallel.launch import Launch, name_interface
from specctl.contract.signals import INTERRUPTS, handled

logger = logging.getLogger(__name__)


def launched_store(launch: Launch, timeout: datetime.timedelta) -> Store:
    """Return the store of the launcher, once every process has come to it.

    Raises:
        RuntimeError: one did not appear (the library's errors are of this class).
        OSError: the address cannot be used.
    """
    name_interface(os.environ)
    with handled(INTERRUPTS, signal.SIG_DFL):  # the system ends this process then
        logger.info(
            "rank %d of %d waits at %s:%s for the others, for up to %.0f s",
            *(launch.rank, launch.world_size),
            *(os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")),
            timeout.total_seconds(),
        )
        store: Store = next(iter(rendezvous("env://", timeout=timeout)))[0]
    return store
