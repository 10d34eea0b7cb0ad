"""Answers against reference continuations, with the target's own margin where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.bench.compare import first_difference, id_at
from runtime.bench.margin import TopTwo
from runtime.bench.prompts import BenchPrompt
from runtime.bench.raw import ReferenceRecord
from specctl.contract.diagnostics import DiagnosticError, diagnose


def compare_reference(
    file: Path,
    references: Sequence[tuple[int, ...]],
    answers: Sequence[Sequence[int]],
    prompts: Sequence[BenchPrompt],
    *,
    max_tokens: int,
    top_two: Callable[[tuple[int, ...]], TopTwo],
) -> list[ReferenceRecord]:
    """Compare answers with the references, both up to `max_tokens`.

    `top_two` gives the target's two likeliest tokens after the ids it is called with.

    Returns:
        One record that says what was compared, then one for each answer that differs.

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
    records = [ReferenceRecord(file=file.name, total=len(prompts), prompt=None)]
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        reference = references[index][:max_tokens]
        position = first_difference(reference, answer)
        if position is None:
            continue
        near = top_two((*prompt.ids_target, *reference[:position]))
        records.append(
            ReferenceRecord(
                file=file.name,
                total=len(prompts),
                prompt=index,
                position=position,
                reference_id=id_at(reference, position),
                found_id=id_at(answer, position),
                top1_id=near.top1_id,
                top2_id=near.top2_id,
                margin=near.margin,
            )
        )
    return records
