"""How the processes of a layout find each other: one store, one set of connections, scoped groups.

A launcher says who is who (`launch`). Every wait has a limit. Facts are published in
the store and waited for by those who need them, so nothing at start-up is a collective over ranks
that have no part in it; the only groups are those that sum, the ranks of one stage. How tensors
travel follows from where ranks are: NCCL between two GPUs, CUDA IPC where two ranks share one,
gloo through host memory for the rest, for all numbers, and for sums of ranks that share a GPU.
"""

from __future__ import annotations

import datetime
import logging
import socket
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, not listed
from torch.distributed.distributed_c10d import PrefixStore, Store

from runtime.config import DEFAULT_RANK_TIMEOUT_S
from runtime.parallel.channels import DistributedChannel
from runtime.parallel.gpu_groups import GpuGroups, leave_aborts_to_us
from runtime.parallel.gpu_memory import GpuSlots, gpu_name
from runtime.parallel.hand_off import HandOff, NcclHandOff, RingHandOff
from runtime.parallel.launch import Launch, refuse_another_size
from runtime.parallel.layout import ParallelLayout, Place
from runtime.parallel.lost import lost_as_diagnostic, lost_peer
from runtime.parallel.meeting import launched_store
from runtime.parallel.ranks import ONE_RANK, DistributedRanks, Ranks
from specctl.contract.diagnostics import DiagnosticError, diagnose

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 1800.0
"""How long a process waits for the others to start and to load."""
_POLL_S = 0.05
_ABORT_S = 2.0
_IDLE = datetime.timedelta(days=365)
_PREFIX = "specctl"
Way: TypeAlias = Literal["nccl", "cuda-ipc", "gloo"]
"""How tensors of two ranks travel."""


def new_store(*, timeout_s: float = START_TIMEOUT_S) -> tuple[Store, int]:
    """Return a store on a free port of this host, and the port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = int(listener.getsockname()[1])
        # The store takes the socket over, so nobody else can get the port in between.
        store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            master_listen_fd=listener.detach(),
        )
    return store, port


class ProcessGroups:
    """This process among those of a layout.

    Use as a context manager: leaving it closes every connection.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        launch: Launch,
        *,
        store: Store | None = None,
        device: torch.device,
        peer_timeout_s: float = DEFAULT_RANK_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        are_others_alive: Callable[[], bool] | None = None,
    ) -> None:
        """Meet the other processes.

        Args:
            layout: of all of them.
            launch: which one this is.
            store: where they meet; None: where the environment variables say.
            device: of this process's weights.
            peer_timeout_s: longest wait for a message.
            start_timeout_s: longest wait for the others to appear.
            are_others_alive: False ends that wait.

        Raises:
            DiagnosticError: SD855, another process did not appear; SD832, a launcher started
                another number of processes than the layout has, or this rank twice.
        """
        refuse_another_size(layout, launch)
        self.layout = layout
        self.launch = launch
        self.place: Place = layout.place(launch.rank)
        self.device = _indexed(device)
        self._peer_timeout_s = peer_timeout_s
        self._start_timeout_s = start_timeout_s
        start = datetime.timedelta(seconds=start_timeout_s)
        try:
            if store is None:
                store = launched_store(launch, start)
            store.set_timeout(start)
            self._store = PrefixStore(_PREFIX, store)
            self._claim()
            self._gpus = self._meet(are_others_alive)
            dist.init_process_group(
                "gloo",
                store=store,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=datetime.timedelta(seconds=peer_timeout_s),
            )
        except (RuntimeError, OSError) as error:
            raise DiagnosticError(lost_peer(str(error).partition("\n")[0])) from error
        self.transport = transport_of(layout, self._gpus)
        # Made by all or by none; pairs of ranks connect when they first exchange something.
        self._gpu_group = None
        self.gpu_groups = GpuGroups()
        if "nccl" in self.transport:
            if launch.rank == 0:  # it lives on to say what happened; the others may end
                leave_aborts_to_us()
            self._gpu_group = dist.new_group(backend="nccl", timeout=_IDLE)
            self.gpu_groups.add(self._gpu_group)

    def __enter__(self) -> ProcessGroups:
        """Return the connected process."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close every connection."""
        self.close()

    def close(self) -> None:
        """Close every connection; nobody is waited for.

        One that is still being aborted stays: a graph holds it, and closing would wait for that.
        """
        if not self.gpu_groups.wait(_ABORT_S):
            logger.warning("connections between GPUs stay open until their graphs are gone")
        elif dist.is_initialized():
            dist.destroy_process_group()

    def ranks(self) -> Ranks:
        """Return the ranks of this process's stage; only they take part in making the group."""
        if self.layout.tensor_parallel == 1:
            return ONE_RANK
        ranks = list(self.layout.stage_ranks(self.place.stage))
        is_nccl = _all_apart([self._gpus[rank] for rank in ranks])
        with lost_as_diagnostic():
            group = dist.new_group(
                ranks,
                timeout=datetime.timedelta(seconds=self._peer_timeout_s),
                backend="nccl" if is_nccl else "gloo",
                use_local_synchronization=True,
            )
        if not is_nccl:
            return DistributedRanks(group, wire=torch.device("cpu"))
        self.gpu_groups.add(group)
        return DistributedRanks(group, gpu_groups=self.gpu_groups)

    def control_ranks(self) -> Ranks:
        """Return the ranks of this process's stage for what the first of them is told.

        They carry tensors of the CPU. The first rank speaks also when it has nothing to tell, so
        that a wait with the peers' limit ends for a rank that is lost only.
        """
        if self.layout.tensor_parallel == 1:
            return ONE_RANK
        with lost_as_diagnostic():
            group = dist.new_group(
                list(self.layout.stage_ranks(self.place.stage)),
                timeout=datetime.timedelta(seconds=self._peer_timeout_s),
                backend="gloo",
                use_local_synchronization=True,
            )
        return DistributedRanks(group)

    def _claim(self) -> None:
        """Refuse to be a rank that another process is: both would wait, or answer in turn."""
        rank = self.launch.rank
        if self._store.add(f"claim/{rank}", 1) > 1:
            raise DiagnosticError(
                diagnose(
                    "SD832",
                    where="RANK",
                    message=f"another process was started as rank {rank}",
                    expected="each rank once",
                    found=rank,
                )
            )

    def _meet(self, are_others_alive: Callable[[], bool] | None) -> list[str]:
        """Return the GPU of every rank, once all are there.

        Connections are made afterwards: they have the peers' limit, which is shorter.
        """
        self.publish(_gpu_key(self.launch.rank), gpu_name(self.device))
        return [
            self.read(_gpu_key(rank), is_peer_alive=are_others_alive)
            for rank in range(self.launch.world_size)
        ]

    def channel(self, peer: int, *, is_states: bool) -> DistributedChannel:
        """Return a channel from or to world rank `peer`.

        Args:
            peer: the other end.
            is_states: tensors of the model's device; else numbers for the CPU.
        """
        group = dist.group.WORLD
        assert group is not None, "the processes have met"
        if not is_states:
            return DistributedChannel(group, peer, device=torch.device("cpu"))
        return DistributedChannel(
            group, peer, device=self.device, hand_off=self._hand_off(group, peer)
        )

    def _hand_off(self, group: dist.ProcessGroup, peer: int) -> HandOff | None:
        way = way_between(self._gpus[self.launch.rank], self._gpus[peer])
        if way == "cuda-ipc":
            return RingHandOff(group, peer, GpuSlots(self.device))
        if way == "gloo":
            return None
        assert self._gpu_group is not None, "two GPUs have a group"
        return NcclHandOff(
            self._gpu_group, peer, device=self.device, timeout_s=self._peer_timeout_s
        )

    def publish(self, key: str, value: str) -> None:
        """Let every process `read` a value, or one `take` it; in any thread.

        Raises:
            DiagnosticError: SD855, the store is gone.
        """
        with lost_as_diagnostic():
            self._store.set(key, value)

    def peek(self, key: str) -> str | None:
        """Return a value that another process published; None while it is not there.

        Raises:
            DiagnosticError: SD855, the store is gone.
        """
        with lost_as_diagnostic():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def take(self, key: str) -> str | None:
        """Return a value that another process published, once; None while it is not there.

        Raises:
            DiagnosticError: SD855, the store is gone.
        """
        with lost_as_diagnostic():
            if not self._store.check([key]):
                return None
            value = self._store.get(key).decode()
            self._store.delete_key(key)
            return value

    def read(self, key: str, *, is_peer_alive: Callable[[], bool] | None = None) -> str:
        """Wait for a value that another process publishes.

        Args:
            key: its name.
            is_peer_alive: False ends the wait.

        Raises:
            DiagnosticError: SD855, it did not come within the time limit, or never will.
        """
        end = time.monotonic() + self._start_timeout_s
        with lost_as_diagnostic():
            while not self._store.check([key]):
                if is_peer_alive is not None and not is_peer_alive():
                    raise DiagnosticError(lost_peer(f"it ended before `{key}`"))
                if time.monotonic() > end:
                    raise DiagnosticError(lost_peer(f"no `{key}` in {self._start_timeout_s:g} s"))
                time.sleep(_POLL_S)
            return self._store.get(key).decode()


def way_between(one: str, other: str) -> Way:
    """Return how tensors travel between ranks on these GPUs; an empty name is a CPU."""
    if not one or not other:
        return "gloo"
    return "cuda-ipc" if one == other else "nccl"


def transport_of(layout: ParallelLayout, gpus: Sequence[str]) -> str:
    """Return the ways of a layout's states and sums, joined with `+`.

    Args:
        layout: of all ranks.
        gpus: names by rank; see `way_between`.
    """
    ways: set[str] = set()
    for rank, gpu in enumerate(gpus):
        following = layout.place(rank).next_rank
        if following is not None:
            ways.add(way_between(gpu, gpus[following]))
    if layout.tensor_parallel > 1:
        for stage in range(layout.pipeline_parallel):
            is_apart = _all_apart([gpus[rank] for rank in layout.stage_ranks(stage)])
            ways.add("nccl" if is_apart else "gloo")
    return "+".join(sorted(ways))


def _all_apart(gpus: Sequence[str]) -> bool:
    """Whether every rank has a GPU of its own."""
    return all(gpus) and len(set(gpus)) == len(gpus)


def _gpu_key(rank: int) -> str:
    return f"gpu/{rank}"


def _indexed(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
