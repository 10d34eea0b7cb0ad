"""Step 4 of the test ladder: sequences with drafts equal those without, at any scale.

The same functions run on tiny models on the CPU and on the real target on a GPU. Every request
decodes the same number of tokens beyond any end token; its draft count is drawn once per request
and depends on nothing else. What is compared are ids; what is counted are rounds by how many drafts
they accepted, so that a pass that never met a pattern is seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from runtime.engine.request import RequestInput
from runtime.engine.stats import EngineStats
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from tests.engine_harness import World
from tests.fake_graph import ids_of, make_llm

Answers = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ladder:
    """Prompts of a run and how they are decoded.

    Args:
        requests: without draft counts.
        max_gamma: drafts of a request at most; 1 to so many are drawn.
        settings: of every engine.
        is_eager: see `make_llm`.
    """

    requests: tuple[RequestInput, ...]
    max_gamma: int
    settings: Mapping[str, Any]
    is_eager: bool

    def mixed(self, *, max_gamma: int | None = None) -> tuple[RequestInput, ...]:
        """Return the requests, each with a draft count drawn from 1 to the highest."""
        generator = torch.Generator().manual_seed(2)
        draws = torch.randint(
            1, (max_gamma or self.max_gamma) + 1, (len(self.requests),), generator=generator
        ).tolist()
        return tuple(
            replace(request, num_speculative_tokens=count)
            for request, count in zip(self.requests, draws, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run with drafts gave beside the answers without.

    Args:
        num_requests: answers compared.
        first_divergences: request -> first output token that differs.
        rounds_by_accepted: rounds that accepted 0, 1, ... drafts.
        accept_length: of all rounds.
        num_device_rounds: steps whose round ran without host reads.
    """

    num_requests: int
    first_divergences: Mapping[str, int]
    rounds_by_accepted: tuple[int, ...]
    accept_length: float | None
    num_device_rounds: int

    def figures(self) -> dict[str, Any]:
        """Return what a report states."""
        return {
            "equal": self.num_requests - len(self.first_divergences),
            "total": self.num_requests,
            "first_divergences": dict(self.first_divergences),
            "rounds_by_accepted": list(self.rounds_by_accepted),
            "accept_length": self.accept_length,
            "device_rounds": self.num_device_rounds,
        }


def requests_for(
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    kinds: Sequence[SamplingParams] = (SamplingParams(),),
) -> tuple[RequestInput, ...]:
    """Return one request for each prompt; the ways to choose tokens take turns."""
    return tuple(
        RequestInput(
            request_id=f"{index:04}",
            prompt_ids_target=tuple(ids),
            params=replace(kinds[index % len(kinds)], seed=index),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for index, ids in enumerate(prompts)
    )


def synthetic_prompts(
    count: int, *, ids: tuple[int, int], max_length: int, seed: int = 0
) -> list[list[int]]:
    """Return prompts of random ids from a range, of 1 to `max_length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, max_length + 1, (count,), generator=generator).tolist()
    return [torch.randint(*ids, (length,), generator=generator).tolist() for length in lengths]


def target_only(ladder: Ladder, world: World) -> Answers:
    """Decode without drafts, a round longer than is compared: scripts need tokens beyond an end."""
    llm, _ = make_llm(world, is_eager=ladder.is_eager, proposer="none", **ladder.settings)
    longer = [
        replace(request, max_tokens=(request.max_tokens or 0) + ladder.max_gamma + 1)
        for request in ladder.requests
    ]
    return ids_of(llm.generate(longer))


def shared_answers(folder: Path, make: Callable[[], Answers]) -> Answers:
    """Return answers that the first of several test processes makes and the others read.

    Args:
        folder: that these processes share and no other run has.
        make: makes the answers.
    """
    path = folder / "target_only.json"
    with FileLock(folder / "target_only.lock"):  # one that dies lets go of it
        if not path.is_file():
            path.write_text(json.dumps(make()), encoding="utf-8")
    found = json.loads(path.read_text(encoding="utf-8"))
    return {name: tuple(ids) for name, ids in found.items()}


def climb(
    ladder: Ladder,
    world: World,
    answers: Answers,
    *,
    proposer: str,
    requests: Sequence[RequestInput],
    rules: Mapping[str, Any] | None = None,
) -> Outcome:
    """Decode with drafts and compare.

    Args:
        answers: of `target_only`.
        requests: of the ladder, with draft counts.
        rules: how a script replaces drafts (see `OracleScript`); None: they are the draft's own.
    """
    script = None
    if rules is not None:
        script = OracleScript(continuations=dict(answers.items()), **rules)
    llm, _ = make_llm(
        world,
        is_eager=ladder.is_eager,
        script=script,
        proposer=proposer,
        num_speculative_tokens=max(request.num_speculative_tokens or 0 for request in requests),
        **ladder.settings,
    )
    found = ids_of(llm.generate(requests))
    llm.engine.check()
    stats = llm.engine.stats()
    return Outcome(
        num_requests=len(requests),
        first_divergences=divergences(answers, found),
        rounds_by_accepted=rounds_by_accepted(stats),
        accept_length=stats.accept_length,
        num_device_rounds=stats.num_device_rounds,
    )


def climb_in_more_rows(ladder: Ladder, world: World, *, num_drafts: int) -> Outcome:
    """Decode without drafts and with so many for each request of an EAGLE-3 draft, and compare.

    The same requests run at once, so that a step has `num_drafts` + 1 times as many rows: what
    follows the number of rows shows in the answers.
    """
    answers = target_only(ladder, world)
    requests = [replace(item, num_speculative_tokens=num_drafts) for item in ladder.requests]
    return climb(ladder, world, answers, proposer="eagle3", requests=requests)


def divergences(expected: Answers, found: Answers) -> dict[str, int]:
    """Return the first token at which an answer leaves its (longer) expected one."""
    first: dict[str, int] = {}
    for name, ids in found.items():
        wanted = expected[name][: len(ids)]
        if ids != wanted or not ids:
            pairs = zip(ids, wanted, strict=False)
            places = [place for place, (one, other) in enumerate(pairs) if one != other]
            first[name] = min(places, default=len(wanted))
    return first


def rounds_by_accepted(stats: EngineStats) -> tuple[int, ...]:
    """Return how many rounds accepted exactly 0, 1, ... drafts."""
    at_least = (stats.num_rounds, *stats.num_accepted_at, 0)
    return tuple(at_least[n] - at_least[n + 1] for n in range(len(at_least) - 1))
