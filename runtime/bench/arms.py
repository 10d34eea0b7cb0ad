"""The engines of a benchmark: weights once, an engine for each arm and point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from runtime.bench.raw import ArmName
from runtime.bench.settings import BenchSettings, draft_room
from runtime.bench.shape import random_models, shape_manifest
from runtime.bench.steps import STEP_ROOM
from runtime.config import (
    DRAFT_PROPOSERS,
    Overrides,
    RuntimeConfig,
    force_anchor,
    resolve_config,
)
from runtime.engine.build import build_engine
from runtime.engine.costs import CostPlace, cost_path
from runtime.engine.engine import Engine
from runtime.engine.llm import LLM
from runtime.engine.lockstep import EngineOrder
from runtime.engine.probe import invariance_problems
from runtime.engine.staged import StagedModels, load_staged, stages_text
from runtime.engine.text import load_tokenizer
from runtime.loading import LoadedModels
from runtime.spec.forced import ForcedLengths
from runtime.spec.oracle import OracleScript, ScriptKey
from specctl.contract.codec import load_manifest, resolve_source
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose, has_errors
from specctl.contract.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Weights and facts that all arms share.

    Args:
        directory: that relative sources of the manifest count from.
        config: as resolved before loading; arms have other lengths and batches.
        staged: the models, and other processes that hold parts of them.
        overrides: as given.
        tokenizer: None serves ids only.
        path: of the manifest; of the config with random weights.
    """

    path: Path
    manifest: Manifest
    directory: Path
    staged: StagedModels
    config: RuntimeConfig
    overrides: Overrides
    tokenizer: Tokenizer | None
    diagnostics: tuple[Diagnostic, ...]

    @property
    def models(self) -> LoadedModels:
        """Models of this process."""
        return self.staged.models

    @property
    def has_processes(self) -> bool:
        """Whether other processes hold parts of the models."""
        return self.staged.peers is not None

    @property
    def has_speculation(self) -> bool:
        """Whether there is a speculative arm."""
        return self.config.proposer != "none"


def idle_steps(settings: BenchSettings, *, has_processes: bool) -> tuple[Diagnostic, ...]:
    """Return SD805 where samples of steps are asked for that are taken in one process only."""
    if not (has_processes and settings.step_samples):
        return ()
    return (
        diagnose(
            "SD805",
            where="--step-samples",
            message="`step_samples` has no effect: steps are measured where all of a model is in "
            "one process",
            found=settings.step_samples,
        ),
    )


def load_for_bench(manifest: Path | None, overrides: Overrides, settings: BenchSettings) -> Loaded:
    """Load a manifest's models, or make random ones for a config.

    Raises:
        DiagnosticError: what `load_manifest`, `resolve_config`, `load_models` and
            `shape_manifest` raise; SD832 for settings; SD831 when rows are not invariant.
    """
    forced: tuple[Diagnostic, ...] = ()
    if settings.shape is not None:
        facts, directory = shape_manifest(settings.shape), settings.shape.parent
    else:
        assert manifest is not None, "a benchmark has a manifest or a shape"
        facts, forced = force_anchor(load_manifest(manifest), overrides)
        directory = manifest.parent
    config = resolve_config(facts, overrides)
    _check_stages(config, settings)
    _check_settings(config, settings)
    has_tokenizer = facts.target.tokenizer_digest is not None
    if settings.shape is not None:
        models = random_models(facts, device=config.device, dtype=config.dtype, seed=settings.seed)
        staged = StagedModels(models=models)
    else:
        assert manifest is not None, "a benchmark has a manifest or a shape"
        staged = load_staged(manifest, facts, config, has_tokenizer=has_tokenizer)
        models = staged.models
    with ExitStack() as guard:
        guard.callback(staged.close)  # what fails from here on leaves no process behind
        found = (
            forced + config.diagnostics + models.diagnostics + invariance_problems(models, config)
        )
        if has_errors(found):
            raise DiagnosticError(found)
        found += idle_steps(settings, has_processes=staged.peers is not None)
        loaded = Loaded(
            path=manifest or settings.shape or directory,
            manifest=facts,
            directory=directory,
            staged=staged,
            config=config,
            overrides=overrides,
            tokenizer=load_tokenizer(resolve_source(facts.target.source, directory))
            if has_tokenizer
            else None,
            diagnostics=found,
        )
        guard.pop_all()
    return loaded


def _check_stages(config: RuntimeConfig, settings: BenchSettings) -> None:
    """Refuse what is not measured over stages.

    Raises:
        DiagnosticError: SD832.
    """
    if config.stage_mode == "whole":
        return
    wrong = None
    if settings.shape is not None:
        wrong = "random weights of a shape are not split", "--shape"
    elif settings.contract == "off":
        wrong = "the arm without the contract runs in one piece", "--contract off"
    elif config.stage_mode == "processes" and settings.is_forced:
        wrong = "other processes do not know a schedule of lengths", "--force-accept-length"
    elif config.stage_mode == "processes" and settings.reference is not None:
        wrong = "margins to a reference need the whole target here", "--reference"
    if wrong is not None:
        message, option = wrong
        stages, ranks = config.pipeline_parallel, config.tensor_parallel
        raise DiagnosticError(
            diagnose(
                "SD832",
                where="--pp" if stages > 1 else "--tp",
                message=f"`{option}` does not go with `--pp {stages} --tp {ranks}`: {message}",
                expected=f"one stage of one rank, or no `{option}`",
                found=f"{stages} x {ranks} ({config.stage_mode})",
            )
        )


def layout_text(loaded: Loaded) -> str:
    """Say how the target is spread, for the record."""
    peers = loaded.staged.peers
    transport = None if peers is None else peers.groups.transport
    return stages_text(loaded.manifest, loaded.config, transport)


def arm_names(loaded: Loaded, settings: BenchSettings) -> tuple[ArmName, ...]:
    """Return the arms of a point, target-only first."""
    names: list[ArmName] = ["target-only"]
    if loaded.has_speculation:
        names.append("speculative")
    if settings.contract == "off":
        names.append("contract-off")
    return tuple(names)


def arm_order(arms: Sequence[ArmName], repeats: int) -> list[ArmName]:
    """Return the arms in running order: A B, B A, A B, ...; target-only runs twice at least.

    Its second run is what equality rests on: an engine that does not repeat itself proves nothing
    by an arm that differs, or does not.
    """
    order: list[ArmName] = []
    for repeat in range(repeats):
        order += arms if repeat % 2 == 0 else reversed(arms)
    if order.count("target-only") < 2:
        order.append("target-only")
    return order


def arm_config(loaded: Loaded, arm: ArmName, *, concurrency: int, num_tokens: int) -> RuntimeConfig:
    """Return the settings of an arm at a point.

    Args:
        loaded: what all arms share.
        arm: which one; all but `speculative` have no drafts.
        concurrency: requests at once.
        num_tokens: of the longest request, prompt and answer.

    Raises:
        DiagnosticError: as `resolve_config`.
    """
    known = loaded.manifest.target.decoder.max_position_embeddings
    room = max(STEP_ROOM, draft_room(loaded.manifest, loaded.overrides.num_speculative_tokens))
    sized = replace(
        loaded.overrides,
        max_num_requests=concurrency,
        max_model_len=min(num_tokens + room, known),
    )
    if arm != "speculative":
        sized = replace(
            sized,
            proposer="none",
            num_speculative_tokens=None,
            verification=None,
            length_mode=None,
            cost_table=None,
            dynamic_rows=None,
            dynamic_rank=None,
        )
    return resolve_config(loaded.manifest, sized)


def make_arm(
    loaded: Loaded,
    config: RuntimeConfig,
    models: LoadedModels,
    *,
    script: OracleScript | None = None,
    forced: ForcedLengths | None = None,
) -> LLM:
    """Return an engine over the shared weights, with a KV pool of its own.

    Args:
        loaded: what all arms share.
        config: of the arm.
        models: that it runs.
        script: of the oracle.
        forced: decides what rounds accept.
    """
    costs = CostPlace(
        path=cost_path(loaded.path, config.cost_table), fingerprint=loaded.manifest.fingerprint
    )

    def build(order: EngineOrder) -> Engine:
        return build_engine(
            models,
            order.config,
            tokenizer=loaded.tokenizer,
            script=order.script,
            costs=costs,
            forced=forced,
            line=loaded.staged.line,
        )

    return LLM(
        engine=loaded.staged.open(EngineOrder(config=config, script=script), build),
        models=models,
        manifest=loaded.manifest,
        tokenizer=loaded.tokenizer,
        diagnostics=loaded.diagnostics,
    )


def models_of(loaded: Loaded, config: RuntimeConfig) -> LoadedModels:
    """Return the models that an arm runs: target-only pays for no draft."""
    if config.proposer in DRAFT_PROPOSERS:
        return loaded.models
    return replace(loaded.models, draft=None)


def oracle_script(
    answers: Mapping[ScriptKey, tuple[int, ...]], config: RuntimeConfig, settings: BenchSettings
) -> OracleScript | None:
    """Return the script of an oracle: target-only's answers, wrong as often as was asked for.

    Args:
        answers: prompt ids -> answer ids.
        config: of the speculative arm.
        settings: with the accept length to aim at.
    """
    if config.proposer != "oracle":
        return None
    wanted = settings.accept_length
    gamma = config.num_speculative_tokens
    rate = 0.0 if wanted is None else 1.0 - acceptance_for(wanted, gamma)
    return OracleScript(
        continuations=answers, corruption_rates=(rate,) if rate else (), seed=settings.seed
    )


def forced_lengths(config: RuntimeConfig, settings: BenchSettings) -> ForcedLengths | None:
    """Return the schedule of a benchmark of forced lengths."""
    if not settings.is_forced or settings.accept_length is None or config.proposer == "none":
        return None
    gamma = config.num_speculative_tokens
    chance = acceptance_for(settings.accept_length, gamma)
    rates = tuple(chance**depth for depth in range(1, gamma + 1))
    return ForcedLengths(rates=rates, seed=settings.seed)


def acceptance_for(accept_length: float, num_drafts: int) -> float:
    """Return p such that 1 + p + p^2 + ... + p^num_drafts is `accept_length`.

    Each draft is right with probability p if all before it are.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(num_drafts + 1)) < accept_length:
            low = middle
        else:
            high = middle
    return high if high < 1.0 - 1e-9 else 1.0


def _check_settings(config: RuntimeConfig, settings: BenchSettings) -> None:
    wanted = settings.accept_length
    if wanted is None:
        return
    option = "--force-accept-length" if settings.is_forced else "--accept-length"
    if settings.is_forced and (settings.temperature > 0 or config.length_mode != "static"):
        raise DiagnosticError(
            diagnose(
                "SD832",
                where=option,
                message="forced lengths replace greedy verification of a fixed number of drafts",
                expected="temperature 0 and a fixed `--gamma`",
                found=f"temperature {settings.temperature:g}, lengths {config.length_mode}",
            )
        )
    if not settings.is_forced and config.proposer != "oracle":
        raise DiagnosticError(
            diagnose(
                "SD832",
                where=option,
                message=f"the proposer `{config.proposer}` takes no accept length to aim at",
                expected="`--proposer oracle`, or `--force-accept-length`",
                found=config.proposer,
            )
        )
    most = config.num_speculative_tokens + 1
    if not 1 <= wanted <= most:
        raise DiagnosticError(
            diagnose(
                "SD832",
                where=option,
                message=f"a round of {most - 1} drafts commits 1 to {most} tokens",
                expected=f"1 to {most}",
                found=wanted,
            )
        )
