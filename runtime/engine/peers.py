"""The other processes of a served manifest: started or met, told what to load, watched, stopped.

World rank 0 is this process. What the others need is published once, as a value; each reports that
it is ready, or its diagnostics, so a start that fails anywhere fails here, with that code. A thread
then watches the processes that were started here and lets the stages know that this one lives.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from torch.distributed.distributed_c10d import Store

from runtime.config import DRAFT_PROPOSERS, RuntimeConfig, dtype_name
from runtime.disagg.handshake import Layout
from runtime.disagg.role_plan import RolePlan
from runtime.engine.lockstep import Lockstep
from runtime.engine.stages import StageLine
from runtime.models import TargetModel
from runtime.parallel.groups import ProcessGroups, new_store
from runtime.parallel.launch import Launch, launch_environment, launch_of
from runtime.parallel.layout import ParallelLayout
from runtime.parallel.lost import lost_peer
from runtime.parallel.pulse import Progress, PulseWatch, StepWatch
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import split_stages

logger = logging.getLogger(__name__)

PLAN_KEY = "plan"
BEGIN_KEY = "begin"
BEATS_PER_TIMEOUT = 8
_WATCH_S = 0.25
_END_TIMEOUT_S = 15.0


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of a layout loads; the same for all.

    Args:
        specctl_version: of the manifest's writer.
        fingerprint: of the manifest.
        weights: digest of samples of the weights.
        pipeline_parallel: stages.
        tensor_parallel: ranks of a stage.
        draft_tensor_parallel: ranks of the draft.
        stage_layers: layers of each stage.
        dtype: of the weights, a key of `DTYPES`.
        load_format: how files are read.
        has_draft: whether the last stage loads a draft.
        has_tokenizer: whether the last stage has texts and stop strings.
        rank_timeout_s: that each waits for the next word of another.
        role: of a prefill or decode server; None: a server that does all of the work.
    """

    specctl_version: str
    fingerprint: str
    weights: str
    pipeline_parallel: int
    tensor_parallel: int
    draft_tensor_parallel: int
    stage_layers: tuple[int, ...]
    dtype: str
    load_format: str
    has_draft: bool
    has_tokenizer: bool
    rank_timeout_s: float
    role: RolePlan | None = None

    def layout(self, manifest: Manifest) -> Layout:
        """Return how this server holds KV."""
        stages = split_stages(
            manifest, self.pipeline_parallel, stage_layers=self.stage_layers or None
        )
        return Layout(
            stage_layers=tuple(stage.num_layers for stage in stages),
            tensor_parallel=self.tensor_parallel,
            is_draft_split=self.draft_tensor_parallel > 1,
        )


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a process says once it has loaded: nothing, or why it could not."""

    problems: tuple[Diagnostic, ...] = ()


def ready_key(rank: int) -> str:
    """Return the key under which a rank reports."""
    return f"ready/{rank}"


def plan_of(
    manifest: Manifest,
    config: RuntimeConfig,
    *,
    weights: str,
    has_tokenizer: bool,
    role: RolePlan | None = None,
) -> RankPlan:
    """Return what the other processes load."""
    return RankPlan(
        specctl_version=manifest.specctl_version,
        fingerprint=manifest.fingerprint,
        weights=weights,
        pipeline_parallel=config.pipeline_parallel,
        tensor_parallel=config.tensor_parallel,
        draft_tensor_parallel=config.draft_tensor_parallel,
        stage_layers=config.stage_layers,
        dtype=dtype_name(config.dtype),
        load_format=config.load_format,
        has_draft=config.proposer in DRAFT_PROPOSERS,
        has_tokenizer=has_tokenizer,
        rank_timeout_s=config.rank_timeout_s,
        role=role,
    )


def line_of(groups: ProcessGroups, last: TargetModel) -> StageLine:
    """Return the stages before the last, as this rank of the last one speaks to them."""
    place, layout = groups.place, groups.layout
    previous = place.previous_rank
    assert previous is not None, "there is a stage before the last"
    return StageLine(
        last,
        controls=[
            groups.channel(layout.rank(stage, place.tp_rank), is_states=False)
            for stage in range(layout.pipeline_parallel - 1)
        ],
        upstream=groups.channel(previous, is_states=True),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Processes that were started here.

    Args:
        children: by rank, from 1.
        store: where they meet; None under a launcher.
    """

    children: tuple[subprocess.Popen[bytes], ...]
    store: Store | None

    def ended(self) -> int | None:
        """Return the rank of a process that has ended; None while all run."""
        for rank, child in enumerate(self.children, start=1):
            if child.poll() is not None:
                return rank
        return None


class Spoken(Protocol):
    """A way to other processes that they must hear something on: `StageLine`, `Lockstep`."""

    @property
    def problem(self) -> Diagnostic | None:
        """What ended it; None while it lasts."""

    def lose(self, problem: Diagnostic) -> None:
        """Let a call that is under way, and every later one, raise what happened; any thread."""

    def beat(self, quiet_s: float) -> None:
        """Say something, unless something was said in the last seconds.

        Raises:
            DiagnosticError: SD855, a process at the other end is gone or silent.
        """


class Peers:
    """The other processes, as world rank 0 sees them."""

    def __init__(self, groups: ProcessGroups, started: Started, *, rank_timeout_s: float) -> None:
        """Take both over; `meet` makes them."""
        self.groups = groups
        self.lines: list[StageLine] = []
        self._spoken: list[Spoken] = []
        self._lockstep: Lockstep | None = None
        self._rank_timeout_s = rank_timeout_s
        self._beat_s = rank_timeout_s / BEATS_PER_TIMEOUT
        self._started = started
        self._lost: Diagnostic | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)

    @classmethod
    def meet(cls, path: Path, config: RuntimeConfig, plan: RankPlan) -> Peers:
        """Start the other processes, unless a launcher has, and tell them what to load.

        Raises:
            DiagnosticError: SD855, one did not appear; SD832, a launcher started another number.
        """
        layout = ParallelLayout(
            pipeline_parallel=config.pipeline_parallel, tensor_parallel=config.tensor_parallel
        )
        launch = launch_of()
        started = Started(children=(), store=None)
        if launch is None:
            launch = _alone(layout.world_size, 0)
            started = _start(
                path, layout, device=config.device, rank_timeout_s=config.rank_timeout_s
            )
        try:
            groups = ProcessGroups(
                layout,
                launch,
                store=started.store,
                device=config.device,
                peer_timeout_s=config.rank_timeout_s,
                are_others_alive=lambda: started.ended() is None,
            )
        except DiagnosticError:
            _end(started.children, 0.0)
            raise
        groups.publish(PLAN_KEY, msgspec.json.encode(plan).decode())
        return cls(groups, started, rank_timeout_s=config.rank_timeout_s)

    @property
    def problem(self) -> Diagnostic | None:
        """What ended the pipeline; None while it runs."""
        problems = [self._lost, *(item.problem for item in self._spoken)]
        return next((problem for problem in problems if problem is not None), None)

    def wait_until_ready(self) -> None:
        """Wait until every other process has loaded.

        Raises:
            DiagnosticError: what one of them met, or SD855.
        """
        for rank in range(1, self.groups.layout.world_size):
            text = self.groups.read(
                ready_key(rank), is_peer_alive=lambda: self._started.ended() is None
            )
            report = msgspec.json.decode(text, type=RankReport)
            if report.problems:
                raise DiagnosticError(report.problems)

    def join(self, last: TargetModel, lockstep: Lockstep | None) -> StageLine | None:
        """Return the stages before this one, if any; all processes are watched from now on.

        Args:
            last: the stage of this process.
            lockstep: leads the other ranks of this stage; None without any.
        """
        line = None
        if lockstep is not None:
            self._lockstep = lockstep
            self._spoken.append(lockstep)
        if self.groups.layout.pipeline_parallel > 1:
            line = line_of(self.groups, last)
            self.lines.append(line)
            self._spoken.append(line)
        self.groups.publish(BEGIN_KEY, "yes")
        self._thread.start()
        return line

    def end_watch(self) -> None:
        """Look no more after the other processes: from now on they are told to end, and may."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(_END_TIMEOUT_S)

    def close(self) -> None:
        """Stop the stages and wait for the processes that were started here."""
        self.end_watch()
        for line in self.lines:
            try:
                line.stop()
            except DiagnosticError as error:
                logger.warning("a stage could not be told to stop: %s", error)
        _end(self._started.children, _END_TIMEOUT_S if self.problem is None else 1.0)
        self.groups.close()

    def _watch(self) -> None:
        pulses, steps = None, None
        if not self.groups.gpu_groups.is_empty:
            limit_s = self._rank_timeout_s
            ranks = range(1, self.groups.layout.world_size)
            pulses = PulseWatch(self.groups, ranks, limit_s=limit_s)
            steps = StepWatch(self._progress, limit_s=limit_s)
        while not self._is_closing.wait(min(_WATCH_S, self._beat_s)):
            problem = self._look(pulses, steps)
            if problem is not None:
                logger.error("the pipeline has ended: %s", problem.oneline())
                self._end_waits(problem)
                return

    def _look(self, pulses: PulseWatch | None, steps: StepWatch | None) -> Diagnostic | None:
        """Return what has ended the pipeline, if anything; let the others know of this process."""
        if (ended := self._started.ended()) is not None:
            return lost_peer(f"process of rank {ended} has ended")
        try:
            if pulses is not None and (silent := pulses.silent_rank()) is not None:
                return lost_peer(f"no sign of rank {silent} in {self._rank_timeout_s:g} s")
            if steps is not None and steps.is_standing():
                return lost_peer(f"a step stands still for {self._rank_timeout_s:g} s")
            for item in self._spoken:
                item.beat(self._beat_s)
        except DiagnosticError as error:
            return error.diagnostics[0]
        return self.problem

    def _progress(self) -> Progress | None:
        """Return what changes while a step waits for other ranks on the device, and gets on."""
        number = None if self._lockstep is None else self._lockstep.step_number
        return None if number is None else (number, self.groups.gpu_groups.num_exchanges)

    def _end_waits(self, problem: Diagnostic) -> None:
        """Let this process go on without the others.

        Ways through the host end by themselves. A wait on the device ends for ranks that are
        aborted only; the others are killed: nothing ends their waits, and nothing needs them.
        """
        self._lost = problem
        for item in self._spoken:
            item.lose(problem)
        if not self.groups.gpu_groups.is_empty:
            self.groups.gpu_groups.abort(problem)
            for child in self._started.children:
                child.kill()


def _alone(world_size: int, rank: int) -> Launch:
    return Launch(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)


def _start(
    path: Path, layout: ParallelLayout, *, device: torch.device, rank_timeout_s: float
) -> Started:
    """Start every other rank on this host; each ends when this process does."""
    world_size = layout.world_size
    store, port = new_store()
    children = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "runtime.engine.stage_process"),
                *(str(path.resolve()), "--device", device.type),
                *("--pp", str(layout.pipeline_parallel), "--tp", str(layout.tensor_parallel)),
                *("--rank-timeout-s", str(rank_timeout_s)),
            ],
            stdin=subprocess.PIPE,  # closed by the system when this process ends, however it ends
            stdout=subprocess.DEVNULL,
            env=os.environ
            | launch_environment(_alone(world_size, rank), address="127.0.0.1", port=port),
        )
        for rank in range(1, world_size)
    ]
    return Started(children=tuple(children), store=store)


def _end(children: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> None:
    """Wait for processes that were told to stop; end what does not."""
    for child in children:
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin is not None:
            child.stdin.close()
