"""Runs the arms of a benchmark at every point and hands over raw records.

All arms share the same weights, processes and settings; each has an engine and a KV pool of its
own, so the target-only arm pays for no draft. Every run starts with an empty prefix cache, after a
warm-up that is not timed; arms alternate (A B, B A, ...). Steps are measured once the engines of a
point are gone, and what was measured so far is handed over then. `runtime.bench.summary` makes the
report of what comes out.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch

from runtime.bench.arms import (
    Loaded,
    arm_config,
    arm_names,
    arm_order,
    forced_lengths,
    layout_text,
    load_for_bench,
    make_arm,
    models_of,
    oracle_script,
)
from runtime.bench.bandwidth import kv_bytes_per_token, weight_bytes_per_step
from runtime.bench.contract_off import choose_kernels, described, free_models
from runtime.bench.drive import Outcome, Progress, RunPlace, run_arm
from runtime.bench.environment import environment_of
from runtime.bench.margin import top_two_after
from runtime.bench.points import Point, points_of
from runtime.bench.prompts import BenchPrompt, read_references, read_text
from runtime.bench.raw import (
    ArmName,
    ChoiceRecord,
    PointSettings,
    RawBench,
    Record,
    ReferenceRecord,
    Settings,
    StepRecord,
)
from runtime.bench.reference import compare_reference
from runtime.bench.settings import DEFAULT_STEP_SAMPLES, WARM_UP, BenchSettings
from runtime.bench.steps import STEP_ROOM, StepPlace, measure_copy, measure_steps
from runtime.config import DRAFT_PROPOSERS, Overrides, RuntimeConfig, dtype_name
from runtime.engine.llm import LLM
from runtime.loading import LoadedModels
from runtime.spec.oracle import OracleScript, ScriptKey
from specctl.contract.diagnostics import Diagnostic


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """What the first run of target-only made of its prompts."""

    prompts: Sequence[BenchPrompt]
    ids_target: Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Measured:
    """What a point yielded."""

    settings: PointSettings
    records: list[Record]
    first_answers: list[list[int]]


def run_bench(
    manifest: Path | None,
    overrides: Overrides,
    settings: BenchSettings,
    *,
    on_progress: Progress,
    on_diagnostic: Callable[[Diagnostic], None],
    on_point: Callable[[RawBench], None],
) -> RawBench:
    """Run a benchmark; see `runtime.main.bench`."""
    settings = replace(settings, ignore_eos=settings.ignore_eos or settings.prompts is None)
    if settings.prompts is not None:
        read_text(settings.prompts)  # a wrong name is told before a model is loaded
    references = None
    if settings.reference is not None:
        references = read_references(settings.reference, settings.reference_set)
    loaded = load_for_bench(manifest, overrides, settings)
    with closing(loaded.staged):
        for diagnostic in loaded.diagnostics:
            on_diagnostic(diagnostic)
        if loaded.has_processes:
            settings = replace(settings, step_samples=0)
        elif settings.step_samples is None:
            settings = replace(settings, step_samples=DEFAULT_STEP_SAMPLES)
        raw, first = _run(manifest, loaded, settings, on_progress, on_point)
        if references is None:
            return raw
        found = _reference(loaded, settings, references, first)
        return msgspec.structs.replace(raw, records=[*raw.records, *found])


def _run(
    manifest: Path | None,
    loaded: Loaded,
    settings: BenchSettings,
    on_progress: Progress,
    on_point: Callable[[RawBench], None],
) -> tuple[RawBench, _Answers]:
    """Measure all points; return what was recorded, and what the first run answered."""
    environment = environment_of(loaded.config.device, settings.command)
    points = points_of(loaded, settings)
    records: list[Record] = []
    if settings.step_samples:
        records.append(measure_copy(loaded.config.device, settings.step_samples))
    measured: list[_Measured] = []
    for point in points:
        measured.append(_measure(loaded, point, settings, on_progress))
        records += measured[-1].records
        raw = RawBench(
            settings=_settings(manifest, loaded, settings, points, measured),
            environment=environment,
            records=[*records],
        )
        on_point(raw)
    return raw, _Answers(prompts=points[0].workload.prompts, ids_target=measured[0].first_answers)


def _measure(
    loaded: Loaded, point: Point, settings: BenchSettings, on_progress: Progress
) -> _Measured:
    """Run all arms of a point, then its steps."""
    order = arm_order(arm_names(loaded, settings), settings.repeats)
    configs = {
        arm: arm_config(
            loaded, arm, concurrency=point.workload.concurrency, num_tokens=point.num_tokens
        )
        for arm in order
    }
    models, choices = _arm_models(loaded, point, settings, configs)
    outcomes, script = _run_arms(loaded, point, settings, order, configs, models, on_progress)
    gc.collect()  # engines hold device memory in cycles
    if loaded.config.device.type == "cuda":
        torch.cuda.empty_cache()
    records: list[Record] = [*choices]
    for outcome in outcomes:
        records += [outcome.run, *outcome.requests]
    records += _steps(point, settings, configs, models, script)
    base = configs["target-only"]
    return _Measured(
        settings=PointSettings(
            concurrency=point.workload.concurrency,
            prompt_tokens=point.prompt_tokens,
            num_requests=point.workload.num_requests,
            context=point.context,
            order=order,
            weight_bytes=weight_bytes_per_step(loaded.manifest, base.dtype),
            kv_bytes_per_token=kv_bytes_per_token(loaded.manifest, base),
        ),
        records=records,
        first_answers=[record.ids for record in outcomes[0].requests if record.turn == 1],
    )


def _arm_models(
    loaded: Loaded,
    point: Point,
    settings: BenchSettings,
    configs: dict[ArmName, RuntimeConfig],
) -> tuple[dict[ArmName, LoadedModels], list[ChoiceRecord]]:
    """Return what each arm runs; without the contract, after timing what is fastest."""
    models = {arm: models_of(loaded, config) for arm, config in configs.items()}
    if "contract-off" not in configs:
        return models, []
    config = configs["contract-off"]
    place = _step_place(point, config, settings.step_samples or DEFAULT_STEP_SAMPLES)
    choices = choose_kernels(loaded.models, config, place)
    models["contract-off"] = free_models(loaded.models, choices)
    return models, [
        ChoiceRecord(point=point.index, what=what, chosen=chosen)
        for what, chosen in described(choices).items()
    ]


def _run_arms(
    loaded: Loaded,
    point: Point,
    settings: BenchSettings,
    order: Sequence[ArmName],
    configs: dict[ArmName, RuntimeConfig],
    models: dict[ArmName, LoadedModels],
    on_progress: Progress,
) -> tuple[list[Outcome], OracleScript | None]:
    """Run the arms in order; the oracle's script is what target-only, the first, answered."""
    outcomes: list[Outcome] = []
    llms: dict[ArmName, LLM] = {}
    script: OracleScript | None = None
    for number, arm in enumerate(order):
        if arm == "speculative" and script is None:
            script = oracle_script(_answers(outcomes[0]), configs[arm], settings)
        is_first = arm not in llms
        if is_first:
            llms[arm] = make_arm(
                loaded,
                configs[arm],
                models[arm],
                script=script,
                forced=forced_lengths(configs[arm], settings),
            )
        place = RunPlace(point=point.index, arm=arm, order=number)
        outcomes.append(
            run_arm(llms[arm], place, point.workload, settings, on_progress, is_first=is_first)
        )
    for llm in llms.values():
        llm.engine.close()
    return outcomes, script


def _answers(outcome: Outcome) -> dict[ScriptKey, tuple[int, ...]]:
    return {
        prompt: tuple(record.ids)
        for prompt, record in zip(outcome.prompts, outcome.requests, strict=True)
    }


def _step_place(point: Point, config: RuntimeConfig, samples: int) -> StepPlace:
    return StepPlace(
        point=point.index,
        concurrency=point.workload.concurrency,
        context=min(point.context, config.max_model_len - STEP_ROOM),
        samples=samples,
    )


def _steps(
    point: Point,
    settings: BenchSettings,
    configs: dict[ArmName, RuntimeConfig],
    models: dict[ArmName, LoadedModels],
    script: OracleScript | None,
) -> list[StepRecord]:
    """Measure each arm's steps; none where the pool does not hold all requests at once."""
    if not settings.step_samples:
        return []
    records: list[StepRecord] = []
    for arm, config in configs.items():
        each = -(-config.max_model_len // config.kv_block_size)
        if 1 + each * point.workload.concurrency > config.num_kv_blocks:
            continue
        records += measure_steps(
            models[arm],
            config,
            _step_place(point, config, settings.step_samples),
            script=script if arm == "speculative" else None,
            name="contract-off" if arm == "contract-off" else None,
        )
    return records


def _reference(
    loaded: Loaded,
    settings: BenchSettings,
    references: Sequence[tuple[int, ...]],
    first: _Answers,
) -> list[ReferenceRecord]:
    assert settings.reference is not None, "references come from a file"
    size = loaded.config.kv_block_size
    return compare_reference(
        settings.reference,
        references,
        first.ids_target,
        first.prompts,
        max_tokens=settings.max_tokens,
        top_two=lambda ids: top_two_after(loaded.models.target, ids, size),
    )


def _filters(settings: BenchSettings) -> dict[str, float]:
    """Return the filters that may drop an id, none for greedy answers."""
    if settings.temperature == 0:
        return {}
    given = {"top_k": settings.top_k, "top_p": settings.top_p, "min_p": settings.min_p}
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return {name: value for name, value in given.items() if value != neutral[name]}


def _reduced_rows(loaded: Loaded) -> int | None:
    """Return the rows of the head that the speculative arm drafts with, None: all, or no head."""
    vocabulary = loaded.manifest.vocabulary
    is_drafted = loaded.config.proposer in DRAFT_PROPOSERS
    is_reduced = is_drafted and vocabulary.map_kind == "reduced"
    return vocabulary.draft_vocab_size if is_reduced else None


def _settings(
    manifest: Path | None,
    loaded: Loaded,
    settings: BenchSettings,
    points: Sequence[Point],
    measured: Sequence[_Measured],
) -> Settings:
    config = loaded.config
    is_oracle = config.proposer == "oracle" and not settings.is_forced
    gamma = config.num_speculative_tokens
    return Settings(
        manifest=None if manifest is None else manifest.name,
        shape=None if settings.shape is None else settings.shape.name,
        fingerprint=loaded.manifest.fingerprint,
        prompts=None if settings.prompts is None else settings.prompts.name,
        prompt_set=settings.prompt_set,
        turns=settings.turns,
        num_prompts=max(len(point.workload.prompts) for point in points),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        filters=_filters(settings) or msgspec.UNSET,
        draft_vocab_size=_reduced_rows(loaded) or msgspec.UNSET,
        seed=settings.seed,
        repeats=settings.repeats,
        ignore_eos=settings.ignore_eos,
        device=str(config.device),
        dtype=dtype_name(config.dtype),
        proposer=config.proposer,
        num_speculative_tokens=gamma,
        verification=config.verification,
        forced_accept_length=settings.accept_length if settings.is_forced else None,
        oracle_accept_length=(settings.accept_length or gamma + 1) if is_oracle else None,
        points=[item.settings for item in measured],
        layout=layout_text(loaded),
        warm_up=WARM_UP,
    )
