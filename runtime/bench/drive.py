"""One run of one arm: requests in, at most so many at once, and when every token came back."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from runtime.bench.prompts import BenchPrompt, PromptEncoder
from runtime.bench.raw import ArmName, RequestRecord, RunRecord
from runtime.bench.settings import WARM_UP_TOKENS, BenchSettings
from runtime.engine.llm import LLM
from runtime.engine.request import RequestDelta, RequestInput, Usage
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What every arm of a point answers.

    Args:
        concurrency: requests in flight at most.
        encoder: makes the second turn's prompt; None where there is none.
    """

    prompts: Sequence[BenchPrompt]
    concurrency: int
    encoder: PromptEncoder | None

    @property
    def num_requests(self) -> int:
        """Requests of one run."""
        return len(self.prompts) * (1 if self.encoder is None else 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlace:
    """Which run of a benchmark this is."""

    point: int
    arm: ArmName
    order: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A run as records, and the prompts of its requests."""

    run: RunRecord
    requests: list[RequestRecord]
    prompts: list[tuple[int, ...]]


@dataclass(kw_only=True, slots=True)
class _Asked:
    """A request in flight; changes until it ends."""

    prompt: int
    turn: int
    ids_target: tuple[int, ...]
    submitted_s: float = 0.0
    answer: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    finish_reason: str = ""
    usage: Usage | None = None


def run_arm(
    llm: LLM,
    place: RunPlace,
    workload: Workload,
    settings: BenchSettings,
    on_progress: Progress,
    *,
    is_first: bool,
) -> Outcome:
    """Warm the arm up, empty its prefix cache, and time one pass over all requests.

    Args:
        llm: of the arm at this point.
        place: names the run.
        workload: what is answered.
        settings: how.
        on_progress: told of the requests that ended.
        is_first: the engine has run nothing yet. It answers every request once before it is timed:
            the first replay of a graph uploads it, and which graphs a run needs (rows of prompts,
            contexts, batches that shrink at the end) shows only in the whole.

    Raises:
        DiagnosticError: a request failed.
    """
    device, engine = llm.config.device, llm.engine
    if is_first:
        label = f"{place.arm}, warm-up"
        _, warm_up_s = _answer_all(llm, label, workload, settings, on_progress)
    else:
        warm_up_s = _warm_up(llm, workload, settings)
    engine.flush_cache()
    gc.collect()  # else what loading and capture left is walked through within the first run
    done, seconds = _answer_all(llm, place.arm, workload, settings, on_progress)
    done.sort(key=lambda asked: (asked.prompt, asked.turn))
    stats = engine.stats()
    run = RunRecord(
        point=place.point,
        arm=place.arm,
        order=place.order,
        seconds=seconds,
        steps=stats.num_steps,
        rounds=stats.num_rounds,
        proposed_drafts=stats.num_drafts,
        accepted_at=list(stats.num_accepted_at),
        device_rounds=stats.num_device_rounds,
        graphs=stats.graphs.num_graphs,
        capture_s=stats.graphs.capture_s,
        graph_bytes=stats.graphs.memory_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        warm_up_s=warm_up_s,
    )
    return Outcome(
        run=run,
        requests=[_record(asked, place, workload) for asked in done],
        prompts=[asked.ids_target for asked in done],
    )


def _answer_all(
    llm: LLM, label: str, workload: Workload, settings: BenchSettings, on_progress: Progress
) -> tuple[list[_Asked], float]:
    """Answer all requests; return them as they ended, and the seconds that it took."""
    device = llm.config.device
    done: list[_Asked] = []
    on_progress(label, 0, workload.num_requests)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for asked in _Session(llm, workload, settings, start).run():
        done.append(asked)
        on_progress(label, len(done), workload.num_requests)
    return done, time.perf_counter() - start


def _warm_up(llm: LLM, workload: Workload, settings: BenchSettings) -> float:
    """Answer the beginnings of the first requests, and return the seconds that it took."""
    start = time.perf_counter()
    warm = min(WARM_UP_TOKENS, settings.max_tokens)
    llm.generate(
        [
            _input(f"warm-{index}", prompt.ids_target, settings, max_tokens=warm)
            for index, prompt in enumerate(workload.prompts[: workload.concurrency])
        ]
    )
    return time.perf_counter() - start


class _Session:
    """Keeps requests in flight until all turns are answered."""

    def __init__(self, llm: LLM, workload: Workload, settings: BenchSettings, start: float) -> None:
        self._engine = llm.engine
        self._workload = workload
        self._settings = settings
        self._start = start
        self._active: dict[str, _Asked] = {}
        self._waiting = deque(
            _Asked(prompt=index, turn=1, ids_target=prompt.ids_target)
            for index, prompt in enumerate(workload.prompts)
        )

    def run(self) -> Iterator[_Asked]:
        """Yield every request as it ends."""
        while self._waiting or self._active:
            while self._waiting and len(self._active) < self._workload.concurrency:
                self._ask(self._waiting.popleft())
            deltas = self._engine.step()
            now = time.perf_counter() - self._start
            for delta in deltas:
                asked = self._take(delta, now)
                if asked is not None:
                    yield asked

    def _ask(self, asked: _Asked) -> None:
        name = f"{asked.prompt}-{asked.turn}"
        asked.submitted_s = round(time.perf_counter() - self._start, 6)
        self._active[name] = asked
        self._engine.add_request(
            _input(name, asked.ids_target, self._settings, max_tokens=self._settings.max_tokens)
        )

    def _take(self, delta: RequestDelta, now: float) -> _Asked | None:
        """Add a delta; return the request if it was its last."""
        asked = self._active[delta.request_id]
        if delta.error is not None:
            raise DiagnosticError([delta.error])
        if delta.ids_target:
            asked.answer.extend(delta.ids_target)
            asked.arrivals.append((round(now, 6), len(delta.ids_target)))
        asked.texts.append(delta.text)
        if delta.finish_reason is None:
            return None
        asked.finish_reason, asked.usage = delta.finish_reason, delta.usage
        del self._active[delta.request_id]
        self._follow_up(asked)
        return asked

    def _follow_up(self, asked: _Asked) -> None:
        """Put the second question first in line: its prefix is still in the cache."""
        encoder = self._workload.encoder
        if encoder is None or asked.turn == 2:
            return
        prompt = self._workload.prompts[asked.prompt]
        ids = encoder.second_turn(prompt, "".join(asked.texts))
        self._waiting.appendleft(_Asked(prompt=asked.prompt, turn=2, ids_target=ids))


def _input(
    name: str, ids_target: Sequence[int], settings: BenchSettings, *, max_tokens: int
) -> RequestInput:
    return RequestInput(
        request_id=name,
        prompt_ids_target=ids_target,
        params=SamplingParams(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            seed=settings.seed,
        ),
        max_tokens=max_tokens,
        ignore_eos=settings.ignore_eos,
    )


def _record(asked: _Asked, place: RunPlace, workload: Workload) -> RequestRecord:
    usage = asked.usage
    assert usage is not None, "a request ended without its counts"
    return RequestRecord(
        point=place.point,
        arm=place.arm,
        run=place.order,
        prompt=asked.prompt,
        turn=asked.turn,
        name=workload.prompts[asked.prompt].name,
        prompt_tokens=usage.num_prompt_tokens,
        cached_tokens=usage.num_cached_tokens,
        ids=asked.answer,
        finish_reason=asked.finish_reason,
        rounds=usage.num_rounds,
        proposed_drafts=usage.num_drafts,
        accepted_drafts=usage.num_accepted_drafts,
        submitted_s=asked.submitted_s,
        arrivals=asked.arrivals,
    )
