"""What a benchmark or a single answer was asked for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

WARM_UP_TOKENS = 8
"""Tokens of the untimed run before a timed one."""

DRAFT_ROOM = 32
"""Context beyond the longest answer, so that its end never shortens the drafts of a round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSettings:
    """A benchmark as its caller asks for it.

    Args:
        prompts: file; see `prompts.read_prompts` for its forms.
        prompt_set: key of a token-id JSON; None where the file has one set.
        limit: first so many prompts, None: all.
        temperature: 0 is greedy.
        concurrency: requests that run at once.
        repeats: runs of each arm, in the order A B, B A, A B, ...
        reference: file of reference continuations (target ids), None: no comparison.
        reference_set: its key; None where the file has one set.
        ignore_eos: run every answer to `max_tokens`.
    """

    prompts: Path
    prompt_set: str | None = None
    limit: int | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    concurrency: int = 1
    repeats: int = 1
    reference: Path | None = None
    reference_set: str | None = None
    ignore_eos: bool = False


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
    seed: int
    has_comparison: bool
