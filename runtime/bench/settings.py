"""What a benchmark or a single answer was asked for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specctl.contract.manifest import Manifest

WARM_UP_TOKENS = 8
"""Tokens of an answer in the short untimed run before a timed one."""

WARM_UP = (
    "every request once before the first run of an arm at a point, "
    f"{WARM_UP_TOKENS} tokens of the first ones before each later run"
)
"""What a benchmark runs untimed; stands in its settings."""

DRAFT_ROOM = 32
"""Context beyond the longest answer at least; see `draft_room`."""

DEFAULT_REPEATS = 2
"""Runs of each arm: A B, B A."""

DEFAULT_STEP_SAMPLES = 20
"""Samples of every measured step."""

Turns = Literal["first", "both"]
Contract = Literal["on", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """A benchmark as its caller asks for it.

    Args:
        prompts: file; see `prompts.read_prompts` for its forms. None: random ids.
        prompt_set: key of a token-id JSON; None where the file has one set.
        prompt_tokens: lengths of random prompts, one point each; empty with a file.
        shape: config.json of a target that gets random weights; None: the manifest's.
        limit: first so many prompts, None: all.
        turns: `both` asks the second question of a conversation after the first answer.
        temperature: 0 is greedy.
        top_k: 0 keeps all ids; this, `top_p` and `min_p` count above temperature 0.
        concurrency: requests that run at once, one point each; as many random prompts are made.
        repeats: runs of each arm, in the order A B, B A, A B, ...
        reference: file of reference continuations (target ids), None: no comparison.
        reference_set: its key; None where the file has one set.
        ignore_eos: run every answer to `max_tokens`; always so with random prompts.
        accept_length: that the oracle's drafts or a forced schedule aim at; None: every draft of
            the oracle is right.
        is_forced: accepted drafts follow a seeded schedule instead of the target's choices.
        contract: `off` adds an arm whose kernels may follow the number of rows.
        step_samples: samples of every measured step; 0 measures no steps; None: 20 where steps can
            be measured.
        command: as typed, for the report.
    """

    prompts: Path | None = None
    prompt_set: str | None = None
    prompt_tokens: tuple[int, ...] = ()
    shape: Path | None = None
    limit: int | None = None
    turns: Turns = "first"
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    concurrency: tuple[int, ...] = (1,)
    repeats: int = DEFAULT_REPEATS
    reference: Path | None = None
    reference_set: str | None = None
    ignore_eos: bool = False
    accept_length: float | None = None
    is_forced: bool = False
    contract: Contract = "on"
    step_samples: int | None = None
    command: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions:
    """One prompt and how to answer it.

    Args:
        is_chat: render the prompt as a user message; None: when the target has a template.
        has_comparison: answer again without a draft.
    """

    prompt: str
    is_chat: bool | None
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    has_comparison: bool


def draft_room(manifest: Manifest, given: int | None) -> int:
    """Return context beyond the longest answer, so that its end shortens the drafts of no round.

    Args:
        manifest: whose number of drafts counts where none is given.
        given: drafts per round.
    """
    wanted = manifest.geometry.num_speculative_tokens if given is None else given
    return max(DRAFT_ROOM, wanted or 0)
