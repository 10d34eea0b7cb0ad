"""Load a manifest's models where its settings put them: here whole, here in stages, over processes.

The last stage is always here: it drafts, verifies and commits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.config import DRAFT_PROPOSERS, RuntimeConfig
from runtime.disagg.role_plan import RolePlan
from runtime.engine.engine import Engine
from runtime.engine.lockstep import EngineOrder, Lockstep, LockstepLeader
from runtime.engine.peers import Peers, plan_of
from runtime.engine.stages import StageLine
from runtime.loading import LoadedModels, load_models
from runtime.loading.weight_samples import weights_digest
from runtime.models import StagedTarget
from runtime.parallel.groups import ProcessGroups
from runtime.parallel.ranks import ONE_RANK, Ranks
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import Stage, split_stages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedModels:
    """Models of this process, and the stages that other processes hold.

    Args:
        models: the target, or its last stage; the draft.
        peers: the other processes; None without any.
        line: the stages before this one; None without any.
        lockstep: leads the other ranks of this stage; None without any.
    """

    models: LoadedModels
    peers: Peers | None = None
    line: StageLine | None = None
    lockstep: Lockstep | None = None

    @property
    def groups(self) -> ProcessGroups | None:
        """All processes; None: there is one."""
        return None if self.peers is None else self.peers.groups

    @property
    def control(self) -> Ranks:
        """The ranks of this stage, for what they agree on."""
        return ONE_RANK if self.lockstep is None else self.lockstep.ranks

    def open(
        self, order: EngineOrder, build: Callable[[EngineOrder], Engine]
    ) -> Engine | LockstepLeader:
        """Build an engine of an order, here and on every other rank of this stage."""
        return build(order) if self.lockstep is None else self.lockstep.open(order, build)

    def close(self) -> None:
        """Stop the other processes."""
        if self.peers is None:
            return
        self.peers.end_watch()  # a rank that ends as it is told is not lost
        if self.lockstep is not None and self.peers.problem is None:
            try:
                self.lockstep.close()
            except DiagnosticError as error:
                logger.warning("a rank could not be told to stop: %s", error)
        self.peers.close()


def stages_of(manifest: Manifest, config: RuntimeConfig) -> tuple[Stage, ...]:
    """Return what each stage holds."""
    return split_stages(
        manifest, config.pipeline_parallel, stage_layers=config.stage_layers or None
    )


def load_staged(
    path: Path,
    manifest: Manifest,
    config: RuntimeConfig,
    *,
    has_tokenizer: bool = False,
    role: RolePlan | None = None,
) -> StagedModels:
    """Load what this process runs, and have the other processes load theirs.

    Args:
        path: the manifest file.
        manifest: its facts.
        config: settings; `stage_mode` says where stages run.
        has_tokenizer: whether ranks of this stage see texts and stop strings.
        role: of a prefill or decode server.

    Raises:
        DiagnosticError: what `load_models` raises, here or in another process; SD853, SD855 (a
            process that is not there or has another manifest).
    """
    stages = stages_of(manifest, config)
    if config.stage_mode == "whole":
        return StagedModels(models=_load(path, manifest, config, None))
    if config.stage_mode == "in-process":
        return StagedModels(
            models=_joined([_load(path, manifest, config, stage) for stage in stages])
        )
    plan = plan_of(
        manifest,
        config,
        weights=weights_digest(manifest, path.parent),
        has_tokenizer=has_tokenizer,
        role=role,
    )
    peers = Peers.meet(path, config, plan)
    try:
        ranks, control = peers.groups.ranks(), peers.groups.control_ranks()
        models = _load(path, manifest, config, stages[-1], ranks)
        peers.wait_until_ready()
        lockstep = Lockstep(control) if ranks.size > 1 else None
        return StagedModels(
            models=models,
            peers=peers,
            line=peers.join(models.target, lockstep),
            lockstep=lockstep,
        )
    except BaseException:
        peers.close()
        raise


def stages_text(manifest: Manifest, config: RuntimeConfig, transport: str | None) -> str:
    """Say in one line how a target is spread, how states travel and where its draft is."""
    ranks = ""
    if config.tensor_parallel > 1:
        ranks = f" of {config.tensor_parallel} ranks"
        if config.proposer in DRAFT_PROPOSERS:
            ranks += f" (draft over {config.draft_tensor_parallel})"
    if config.pipeline_parallel == 1:
        return f"one stage{ranks}"
    stages = stages_of(manifest, config)
    layers = "+".join(str(stage.num_layers) for stage in stages)
    where = (
        "in one process" if config.stage_mode == "in-process" else f"in processes over {transport}"
    )
    text = f"{len(stages)} stages{ranks} ({layers} layers) {where}"
    if config.proposer in DRAFT_PROPOSERS:
        text += f", draft on stage {stages[-1].index} (embedding: {stages[-1].draft_embedding})"
    return text


def _load(
    path: Path,
    manifest: Manifest,
    config: RuntimeConfig,
    stage: Stage | None,
    ranks: Ranks = ONE_RANK,
) -> LoadedModels:
    return load_models(
        manifest,
        path.parent,
        device=config.device,
        dtype=config.dtype,
        with_draft=config.proposer in DRAFT_PROPOSERS,
        ranks=ranks,
        is_draft_split=config.draft_tensor_parallel > 1,
        stage=stage,
        load_format=config.load_format,
    )


def _joined(loaded: Sequence[LoadedModels]) -> LoadedModels:
    found: dict[Diagnostic, None] = {}
    for models in loaded:
        found |= dict.fromkeys(models.diagnostics)
    return LoadedModels(
        target=StagedTarget.join([models.target for models in loaded]),
        draft=loaded[-1].draft,
        diagnostics=tuple(found),
    )
