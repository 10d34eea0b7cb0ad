"""Processes of one torch.distributed group that a test starts; none of them outlives it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, not listed

from runtime.parallel.groups import new_store

LIMIT_S = 240.0
"""For processes to start, which take their time on a busy machine; a hang ends with it."""


def join_group(rank: int, port: int, *, size: int = 2) -> dist.ProcessGroup:
    """Return the group of all processes, in one of them."""
    limit = datetime.timedelta(seconds=LIMIT_S)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    group = dist.group.WORLD
    assert group is not None
    return group


@contextmanager
def two_processes(work: Callable[..., None], *arguments: object) -> Iterator[Queue[Any]]:
    """Run `work(rank, port, *arguments, out)` on two ranks; yield the queue that they fill.

    The store at `port` is this process's: nobody else can have the port when they come.
    """
    store, port = new_store(timeout_s=LIMIT_S)
    context = get_context("spawn")
    out: Queue[Any] = context.Queue()
    processes = [
        context.Process(target=work, args=(rank, port, *arguments, out)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        yield out
        for process in processes:
            process.join(LIMIT_S)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
