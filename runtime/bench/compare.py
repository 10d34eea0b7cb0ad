"""Are the answers equal: between arms and runs, and against reference continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.bench.margin import TopTwo
from runtime.bench.prompts import BenchPrompt
from runtime.bench.report import Divergence, Identical, Reference, ReferenceDifference
from specctl.contract.diagnostics import DiagnosticError, diagnose

Answers = Sequence[tuple[int, ...]]


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first position at which two sequences differ, None when they are equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def compare_arms(target_only: Sequence[Answers], speculative: Sequence[Answers]) -> Identical:
    """Compare every run of both arms with the first target-only run, prompt by prompt."""
    base = target_only[0]
    others = (*target_only[1:], *speculative)
    equal = 0
    first: Divergence | None = None
    for prompt, answer in enumerate(base):
        position = other = None
        for run in others:
            position = first_difference(answer, run[prompt])
            if position is not None:
                other = run[prompt]
                break
        if position is None or other is None:
            equal += 1
        elif first is None:
            first = Divergence(
                prompt=prompt,
                position=position,
                target_only_id=_at(answer, position),
                speculative_id=_at(other, position),
            )
    return Identical(equal=equal, total=len(base), first_divergence=first)


def compare_reference(
    file: Path,
    references: Answers,
    answers: Answers,
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    top_two: Callable[[tuple[int, ...]], TopTwo],
) -> Reference:
    """Compare answers with the references, both up to `max_tokens`.

    `top_two` gives the target's two likeliest tokens after the ids it is called with.

    Raises:
        DiagnosticError: SD922, fewer references than prompts.
    """
    if len(references) < len(prompts):
        raise DiagnosticError(
            diagnose(
                "SD922",
                where=file.name,
                message=f"{len(references)} references for {len(prompts)} prompts",
                expected=f"at least {len(prompts)}",
                found=len(references),
            )
        )
    differences: list[ReferenceDifference] = []
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        reference = references[index][:max_tokens]
        position = first_difference(reference, answer)
        if position is None:
            continue
        near = top_two((*prompt.ids_target, *reference[:position]))
        differences.append(
            ReferenceDifference(
                prompt=index,
                position=position,
                reference_id=_at(reference, position),
                found_id=_at(answer, position),
                top1_id=near.top1_id,
                top2_id=near.top2_id,
                margin=near.margin,
            )
        )
    return Reference(
        file=file.name,
        equal=len(prompts) - len(differences),
        total=len(prompts),
        differences=differences,
    )


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None
