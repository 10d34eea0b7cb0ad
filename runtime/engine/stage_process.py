"""A process that is not world rank 0: it loads its part, serves its stage and ends with the server.

    python -m runtime.engine.stage_process MANIFEST --device cpu

is what `specctl serve --pp` starts on its own host; under `torchrun` the command that the user gave
comes here on every rank but 0. It ignores Ctrl-C, which reaches the whole process group: the last
stage says when to stop, after the requests that run. SIGTERM gives it the same time. On another
host than rank 0's, where Ctrl-C reaches no such stage, it says so.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from runtime.config import DEFAULT_RANK_TIMEOUT_S, DTYPES
from runtime.config.devices import make_current
from runtime.engine.follower import Follower
from runtime.engine.peers import (
    BEATS_PER_TIMEOUT,
    BEGIN_KEY,
    PLAN_KEY,
    RankPlan,
    RankReport,
    ready_key,
)
from runtime.engine.role_stage import RoleStage
from runtime.engine.stages import StageWorker
from runtime.engine.text import load_tokenizer
from runtime.loading import load_models
from runtime.loading.weight_samples import weights_digest
from runtime.models import TargetModel
from runtime.parallel.groups import ProcessGroups
from runtime.parallel.launch import Launch, launch_of
from runtime.parallel.layout import ParallelLayout
from runtime.parallel.pulse import Pulse
from runtime.parallel.ranks import ONE_RANK
from specctl.contract.codec import load_manifest, resolve_source
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import Stage, split_stages

logger = logging.getLogger(__name__)

_TERM_GRACE_S = 60.0  # twice what a server gives its requests


def serve_launched(
    path: Path, layout: ParallelLayout, *, device: str | None, rank_timeout_s: float | None
) -> None:
    """Serve the part of a rank that `torchrun` started with the user's own command.

    Signals end it at once until the last stage says begin: what waits there hears no handler.

    Raises:
        DiagnosticError: see `serve_rank`.
    """
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    has_gpu = device is None or device == "auto" or device.startswith("cuda")
    serve_rank(
        path,
        pipeline_parallel=layout.pipeline_parallel,
        tensor_parallel=layout.tensor_parallel,
        device="cuda" if has_gpu else "cpu",
        rank_timeout_s=DEFAULT_RANK_TIMEOUT_S if rank_timeout_s is None else rank_timeout_s,
    )


def serve_rank(
    path: Path,
    *,
    pipeline_parallel: int,
    tensor_parallel: int,
    device: str,
    rank_timeout_s: float,
) -> None:
    """Serve this process's part of a manifest until the last stage says stop.

    Args:
        path: the manifest, on this host.
        pipeline_parallel: stages, as on every rank.
        tensor_parallel: ranks of a stage.
        device: `cpu` or `cuda`; the GPU is that of the local rank.
        rank_timeout_s: longest wait for the next word of another rank, as on every rank.

    Raises:
        DiagnosticError: what loading raises, SD853 (another manifest), SD855 (rank 0 is gone).
    """
    launch = launch_of()
    assert launch is not None, "a launcher started this process"
    layout = ParallelLayout(pipeline_parallel=pipeline_parallel, tensor_parallel=tensor_parallel)
    place = local_device(device, launch)
    with ProcessGroups(layout, launch, device=place, peer_timeout_s=rank_timeout_s) as groups:
        try:
            worker = _load(path, groups)
        except DiagnosticError as error:
            report = RankReport(problems=error.diagnostics)
            groups.publish(ready_key(launch.rank), msgspec.json.encode(report).decode())
            raise
        groups.publish(ready_key(launch.rank), msgspec.json.encode(RankReport()).decode())
        groups.read(BEGIN_KEY)  # others may load for longer than a rank may be silent
        prepare_signals(launch)
        if groups.gpu_groups.is_empty:
            worker.run()
            return
        with Pulse(
            groups,
            launch.rank,
            every_s=rank_timeout_s / BEATS_PER_TIMEOUT,
            on_lost=groups.gpu_groups.abort,
        ):
            worker.run()


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleWorker:
    """A stage whose pool other servers reach."""

    worker: StageWorker
    kv: RoleStage

    def run(self) -> None:
        """Serve the stage, then let go of the pool.

        Raises:
            DiagnosticError: as `StageWorker.run`.
        """
        try:
            self.worker.run()
        finally:
            self.kv.close()


def local_device(device: str, launch: Launch) -> torch.device:
    """Return where a rank's weights go: GPUs are shared out by local rank."""
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    found = torch.device("cuda", launch.local_rank % torch.cuda.device_count())
    make_current(found)
    return found


def _load(path: Path, groups: ProcessGroups) -> StageWorker | RoleWorker | Follower:
    plan = msgspec.json.decode(groups.read(PLAN_KEY), type=RankPlan)
    manifest = load_manifest(path)
    refuse_another_start(
        plan, manifest, groups.layout, weights=weights_digest(manifest, path.parent)
    )
    place = groups.place
    stage = split_stages(manifest, plan.pipeline_parallel, stage_layers=plan.stage_layers or None)[
        place.stage
    ]
    ranks = groups.ranks()
    control = groups.control_ranks() if place.is_last else ONE_RANK
    models = load_models(
        manifest,
        path.parent,
        device=groups.device,
        dtype=DTYPES[plan.dtype],
        with_draft=plan.has_draft and place.is_last,
        ranks=ranks,
        is_draft_split=plan.draft_tensor_parallel > 1,
        stage=stage,
        load_format="dummy" if plan.load_format == "dummy" else "auto",
    )
    rank = f", rank {place.tp_rank} of {ranks.size}" if ranks.size > 1 else ""
    logger.info("%s%s on %s is ready", describe(stage), rank, groups.device)
    if place.is_last:
        source = resolve_source(manifest.target.source, path.parent)
        tokenizer = load_tokenizer(source) if plan.has_tokenizer else None
        return Follower.join(
            models, control, groups, tokenizer=tokenizer, manifest=manifest, plan=plan
        )
    return _stage_worker(plan, manifest, models.target, groups)


def _stage_worker(
    plan: RankPlan, manifest: Manifest, model: TargetModel, groups: ProcessGroups
) -> StageWorker | RoleWorker:
    """Return what serves a stage before the last."""
    place = groups.place
    previous, following = place.previous_rank, place.next_rank
    assert following is not None, "the last stage serves requests elsewhere"
    last = groups.layout.rank(groups.layout.pipeline_parallel - 1, place.tp_rank)
    kv = None
    if plan.role is not None:
        kv = RoleStage.start(
            plan.role, manifest=manifest, layout=plan.layout(manifest), model=model, groups=groups
        )
    worker = StageWorker(
        model,
        control=groups.channel(last, is_states=False),
        upstream=None if previous is None else groups.channel(previous, is_states=True),
        downstream=groups.channel(following, is_states=True),
        kv=kv,
    )
    return worker if kv is None else RoleWorker(worker=worker, kv=kv)


def describe(stage: Stage) -> str:
    """Say what a stage holds."""
    parts = [f"layers {stage.first_layer} to {stage.end_layer - 1}"]
    parts += ["the embedding"] * stage.has_embedding + ["the head"] * stage.has_head
    return f"stage {stage.index}: " + ", ".join(parts)


def refuse_another_start(
    plan: RankPlan, manifest: Manifest, layout: ParallelLayout, *, weights: str
) -> None:
    """Refuse to serve beside a rank 0 with another layout, manifest or weights.

    Raises:
        DiagnosticError: SD853.
    """
    theirs = ParallelLayout(
        pipeline_parallel=plan.pipeline_parallel, tensor_parallel=plan.tensor_parallel
    )
    if theirs != layout:
        raise DiagnosticError(
            diagnose(
                "SD853",
                where="--pp",
                message="a rank was started for another layout than rank 0",
                expected=f"--pp {theirs.pipeline_parallel} --tp {theirs.tensor_parallel}",
                found=f"--pp {layout.pipeline_parallel} --tp {layout.tensor_parallel}",
            )
        )
    for where, message, expected, found in (
        (
            "manifest#/fingerprint",
            "a stage was started with another manifest than the last one",
            plan.fingerprint,
            manifest.fingerprint,
        ),
        (
            "manifest#/target/files",
            "the weights of a stage are other numbers than those of the last one",
            plan.weights,
            weights,
        ),
    ):
        if expected != found:
            raise DiagnosticError(
                diagnose("SD853", where=where, message=message, expected=expected, found=found)
            )


def _end_with_parent() -> None:
    """End this process when the one that started it has; its end of the pipe closes then."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def prepare_signals(launch: Launch) -> None:
    """Leave the end to the last stage: Ctrl-C is not ours, SIGTERM ends it after a grace.

    Args:
        launch: says whether rank 0 is on this host; the ranks of its host come first.
    """
    is_beside_rank_0 = launch.rank == launch.local_rank
    name = f"rank {launch.rank} of {launch.world_size}"

    def leave(_number: int, _frame: object) -> None:
        logger.warning("%s goes on until rank 0 stops: press Ctrl-C there", name)

    def terminate(_number: int, _frame: object) -> None:
        logger.warning("%s ends in %g s, or when rank 0 stops", name, _TERM_GRACE_S)
        timer = threading.Timer(_TERM_GRACE_S, os._exit, (128 + signal.SIGTERM,))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGINT, signal.SIG_IGN if is_beside_rank_0 else leave)
    signal.signal(signal.SIGTERM, terminate)


def main() -> int:
    """Serve as a child of the last stage's process; see the module."""
    parser = argparse.ArgumentParser(prog="runtime.engine.stage_process")
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--pp", type=int, required=True)
    parser.add_argument("--tp", type=int, required=True)
    parser.add_argument("--rank-timeout-s", type=float, required=True)
    given = parser.parse_args()
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("runtime.parallel.meeting").setLevel("WARNING")  # it is waited for as well
    launch = launch_of()
    assert launch is not None, "the last stage's process started this one"
    prepare_signals(launch)
    _end_with_parent()
    try:
        serve_rank(
            given.manifest,
            pipeline_parallel=given.pp,
            tensor_parallel=given.tp,
            device=given.device,
            rank_timeout_s=given.rank_timeout_s,
        )
    except DiagnosticError as error:
        logger.error("this stage ends: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
