"""The points of a benchmark: what is answered at each, and how much room that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.bench.arms import Loaded
from runtime.bench.drive import Workload
from runtime.bench.prompts import BenchPrompt, PromptEncoder, random_prompts, read_prompts
from runtime.bench.settings import BenchSettings
from runtime.engine.text import TemplateRenderer
from specctl.contract.codec import resolve_source
from specctl.contract.diagnostics import DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One point before it runs.

    Args:
        num_tokens: of the longest request, prompt and answer.
        context: at which steps are measured.
    """

    index: int
    workload: Workload
    prompt_tokens: int | None
    num_tokens: int
    context: int


def points_of(loaded: Loaded, settings: BenchSettings) -> list[Point]:
    """Return every combination of sizes, contexts first.

    Raises:
        DiagnosticError: what `read_prompts` raises; SD909, a request does not fit into the target's
            context.
    """
    target = loaded.manifest.target
    points: list[Point] = []
    lengths: Sequence[int | None] = settings.prompt_tokens or (None,)
    from_file, encoder = _read(loaded, settings) if settings.prompts is not None else ([], None)
    num_ids = loaded.models.target.num_reachable_ids
    for length in lengths:
        for concurrency in settings.concurrency:
            prompts = from_file
            if length is not None:
                prompts = random_prompts(
                    concurrency, num_tokens=length, num_ids=num_ids, seed=settings.seed
                )
            workload = Workload(prompts=prompts, concurrency=concurrency, encoder=encoder)
            num_tokens = _longest(workload, settings, target.decoder.max_position_embeddings)
            mean = sum(len(prompt.ids_target) for prompt in prompts) // len(prompts)
            points.append(
                Point(
                    index=len(points),
                    workload=workload,
                    prompt_tokens=length,
                    num_tokens=num_tokens,
                    context=min(mean + settings.max_tokens // 2, num_tokens),
                )
            )
    return points


def _read(
    loaded: Loaded, settings: BenchSettings
) -> tuple[list[BenchPrompt], PromptEncoder | None]:
    """Return the prompts of the file, and the encoder if second turns follow."""
    assert settings.prompts is not None, "random prompts are not read"
    source = resolve_source(loaded.manifest.target.source, loaded.directory)
    encoder = PromptEncoder(tokenizer=loaded.tokenizer, chat=TemplateRenderer(source))
    prompts = read_prompts(settings.prompts, settings.prompt_set, encoder, turns=settings.turns)
    return prompts[: settings.limit], encoder if settings.turns == "both" else None


def _longest(workload: Workload, settings: BenchSettings, known: int) -> int:
    """Return the tokens of the longest request, a second turn's among them.

    Raises:
        DiagnosticError: SD909, it does not fit into the target's context.
    """
    longest, name = 0, ""
    for prompt in workload.prompts:
        needed = len(prompt.ids_target) + settings.max_tokens
        if workload.encoder is not None:
            # An answer that is encoded again may take a few tokens more than it had.
            again = settings.max_tokens + settings.max_tokens // 4
            needed = len(workload.encoder.second_turn(prompt, "")) + again + settings.max_tokens
        if needed > longest:
            longest, name = needed, prompt.name
    if longest > known:
        place = name if settings.prompts is None else f"{settings.prompts.name}: {name}"
        raise DiagnosticError(
            diagnose(
                "SD909",
                where=place,
                message=f"the prompt and {settings.max_tokens} new tokens do not fit into the "
                f"context of {known}",
                expected=f"at most {known} tokens",
                found=f"{longest} tokens",
            )
        )
    return longest
