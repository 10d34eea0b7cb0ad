"""Runs the arms of a benchmark and assembles its report.

Both arms share one process, the same weights and settings; each has an engine and a KV pool of its
own, so the target-only arm pays for no draft. Every run starts with an empty prefix cache, after a
warm-up that is not timed; arms alternate (A B, B A, ...).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.bench.compare import compare_arms, compare_reference
from runtime.bench.environment import environment_of
from runtime.bench.margin import top_two_after
from runtime.bench.prompts import BenchPrompt, PromptEncoder, read_prompts, read_references
from runtime.bench.report import (
    REPORT_VERSION,
    Arm,
    ArmName,
    BenchReport,
    Reference,
    RequestRecord,
    Run,
    Settings,
)
from runtime.bench.settings import DRAFT_ROOM, WARM_UP_TOKENS, BenchSettings
from runtime.config import Overrides
from runtime.engine.llm import LLM, Completion
from runtime.engine.request import RequestDelta, RequestInput
from runtime.engine.stats import EngineStats
from runtime.engine.text import TemplateRenderer, load_tokenizer
from runtime.spec.types import SamplingParams
from specctl.contract.codec import load_manifest, resolve_source
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """One run of one arm."""

    arm: ArmName
    order: int
    seconds: float
    answers: tuple[Completion, ...]
    stats: EngineStats

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.ids_target) for answer in self.answers)

    @property
    def ids(self) -> list[tuple[int, ...]]:
        return [answer.ids_target for answer in self.answers]


def run_bench(
    manifest: Path,
    overrides: Overrides,
    settings: BenchSettings,
    *,
    on_progress: Progress,
    on_diagnostic: Callable[[Diagnostic], None],
) -> BenchReport:
    """Run a benchmark; see `runtime.main.bench`."""
    facts = load_manifest(manifest)
    prompts = _read(facts, manifest.parent, settings)
    references = None
    if settings.reference is not None:
        references = read_references(settings.reference, settings.reference_set)
    llms = _make_arms(manifest, facts, overrides, settings, prompts)
    for diagnostic in llms["target-only"].diagnostics:
        on_diagnostic(diagnostic)
    order = _order(tuple(llms), settings.repeats)
    outcomes = [
        _run(llms[arm], arm, index, settings, prompts, on_progress)
        for index, arm in enumerate(order)
    ]
    target_only = [outcome for outcome in outcomes if outcome.arm == "target-only"]
    speculative = [outcome for outcome in outcomes if outcome.arm == "speculative"]
    base = llms["target-only"]
    arms = [_arm(llms[runs[0].arm], runs) for runs in (target_only, speculative) if runs]
    return BenchReport(
        report_version=REPORT_VERSION,
        settings=_settings(manifest, base, settings, prompts, order),
        arms=arms,
        accept_length=arms[-1].accept_length,
        acceptance_per_position=_per_position(speculative),
        speedup=arms[1].tokens_per_s / arms[0].tokens_per_s if len(arms) == 2 else None,
        identical=(
            compare_arms([run.ids for run in target_only], [run.ids for run in speculative])
            if speculative
            else None
        ),
        reference=_reference(base, settings, references, prompts, target_only[0].ids),
        environment=environment_of(base.config.device),
        requests=[record for outcome in outcomes for record in _records(outcome, prompts)],
    )


def _read(manifest: Manifest, directory: Path, settings: BenchSettings) -> list[BenchPrompt]:
    target = manifest.target
    source = resolve_source(target.source, directory)
    encoder = PromptEncoder(
        tokenizer=load_tokenizer(source) if target.tokenizer_digest is not None else None,
        chat=TemplateRenderer(source),
    )
    prompts = read_prompts(settings.prompts, settings.prompt_set, encoder)[: settings.limit]
    known = target.decoder.max_position_embeddings
    longest = max(prompts, key=lambda prompt: len(prompt.ids_target))
    needed = len(longest.ids_target) + settings.max_tokens
    if needed > known:
        raise DiagnosticError(
            diagnose(
                "SD909",
                where=f"{settings.prompts.name}: {longest.name}",
                message=f"{len(longest.ids_target)} prompt tokens and {settings.max_tokens} new "
                f"ones do not fit into the context of {known}",
                expected=f"at most {known} tokens",
                found=f"{needed} tokens",
            )
        )
    return prompts


def _make_arms(
    path: Path,
    manifest: Manifest,
    overrides: Overrides,
    settings: BenchSettings,
    prompts: Sequence[BenchPrompt],
) -> dict[ArmName, LLM]:
    """Load the weights once and make an engine for each arm; one arm when nothing drafts."""
    longest = max(len(prompt.ids_target) for prompt in prompts)
    length = longest + settings.max_tokens + DRAFT_ROOM
    sized = replace(
        overrides,
        max_num_requests=settings.concurrency,
        max_model_len=min(length, manifest.target.decoder.max_position_embeddings),
    )
    has_tokenizer = manifest.target.tokenizer_digest is not None
    llm = LLM.from_manifest(path, sized, needs_tokenizer=has_tokenizer)
    if llm.config.proposer == "none":
        return {"target-only": llm}
    return {
        "target-only": llm.sibling(proposer="none", num_speculative_tokens=0),
        "speculative": llm,
    }


def _order(arms: Sequence[ArmName], repeats: int) -> list[ArmName]:
    """Return the arms in running order: A B, B A, A B, ..."""
    order: list[ArmName] = []
    for repeat in range(repeats):
        order += arms if repeat % 2 == 0 else reversed(arms)
    return order


def _run(
    llm: LLM,
    arm: ArmName,
    order: int,
    settings: BenchSettings,
    prompts: Sequence[BenchPrompt],
    on_progress: Progress,
) -> _Outcome:
    """Warm the arm up, empty its prefix cache, and time one pass over all prompts."""
    requests = [_request(arm, index, p, settings) for index, p in enumerate(prompts)]
    warm = min(WARM_UP_TOKENS, settings.max_tokens)
    llm.generate(
        [replace(request, max_tokens=warm) for request in requests[: settings.concurrency]]
    )
    llm.engine.flush_cache()
    num_done = 0
    on_progress(arm, 0, len(prompts))

    def count(delta: RequestDelta) -> None:
        nonlocal num_done
        if delta.finish_reason is not None:
            num_done += 1
            on_progress(arm, num_done, len(prompts))

    start = time.perf_counter()
    answers = llm.generate(requests, on_delta=count)
    seconds = time.perf_counter() - start
    errors = [answer.error for answer in answers if answer.error is not None]
    if errors:
        raise DiagnosticError(errors)
    return _Outcome(
        arm=arm, order=order, seconds=seconds, answers=answers, stats=llm.engine.stats()
    )


def _request(
    arm: ArmName, index: int, prompt: BenchPrompt, settings: BenchSettings
) -> RequestInput:
    return RequestInput(
        request_id=f"{arm}-{index}",
        prompt_ids_target=prompt.ids_target,
        params=SamplingParams(temperature=settings.temperature, seed=settings.seed),
        max_tokens=settings.max_tokens,
        ignore_eos=settings.ignore_eos,
    )


def _reference(
    llm: LLM,
    settings: BenchSettings,
    references: Sequence[tuple[int, ...]] | None,
    prompts: Sequence[BenchPrompt],
    answers: Sequence[tuple[int, ...]],
) -> Reference | None:
    if settings.reference is None or references is None:
        return None
    return compare_reference(
        settings.reference,
        references,
        answers,
        prompts,
        max_tokens=settings.max_tokens,
        top_two=lambda ids: top_two_after(llm.models.target, ids, llm.config.kv_block_size),
    )


def _arm(llm: LLM, outcomes: Sequence[_Outcome]) -> Arm:
    """Sum the runs of one arm; round counts are those of the first, all runs have the same."""
    stats = outcomes[0].stats
    tokens = sum(outcome.num_tokens for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    has_draft = llm.config.proposer != "none"
    return Arm(
        name=outcomes[0].arm,
        proposer=llm.config.proposer,
        num_speculative_tokens=llm.config.num_speculative_tokens,
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        rounds=stats.num_rounds,
        proposed_drafts=stats.num_drafts,
        accepted_drafts=stats.num_accepted_drafts,
        accept_length=stats.accept_length if has_draft else None,
        runs=[
            Run(
                order=outcome.order,
                tokens=outcome.num_tokens,
                seconds=outcome.seconds,
                tokens_per_s=outcome.num_tokens / outcome.seconds,
            )
            for outcome in outcomes
        ],
    )


def _per_position(speculative: Sequence[_Outcome]) -> list[float]:
    return list(speculative[0].stats.acceptance_per_position) if speculative else []


def _settings(
    path: Path,
    llm: LLM,
    settings: BenchSettings,
    prompts: Sequence[BenchPrompt],
    order: list[ArmName],
) -> Settings:
    return Settings(
        manifest=path.name,
        fingerprint=llm.manifest.fingerprint,
        prompts=settings.prompts.name,
        prompt_set=settings.prompt_set,
        num_prompts=len(prompts),
        prompt_tokens=sum(len(prompt.ids_target) for prompt in prompts),
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        seed=settings.seed,
        concurrency=settings.concurrency,
        repeats=settings.repeats,
        ignore_eos=settings.ignore_eos,
        device=str(llm.config.device),
        dtype=str(llm.config.dtype).removeprefix("torch."),
        order=order,
    )


def _records(outcome: _Outcome, prompts: Sequence[BenchPrompt]) -> list[RequestRecord]:
    return [
        RequestRecord(
            arm=outcome.arm,
            run=outcome.order,
            prompt=index,
            name=prompt.name,
            prompt_tokens=answer.usage.num_prompt_tokens,
            cached_tokens=answer.usage.num_cached_tokens,
            ids=list(answer.ids_target),
            finish_reason=answer.finish_reason,
            rounds=answer.usage.num_rounds,
            proposed_drafts=answer.usage.num_drafts,
            accepted_drafts=answer.usage.num_accepted_drafts,
        )
        for index, (prompt, answer) in enumerate(zip(prompts, outcome.answers, strict=True))
    ]
