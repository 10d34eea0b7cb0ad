"""`specctl validate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated

import typer

from specctl.checkpoint import Access
from specctl.cli import output
from specctl.cli.output import Format
from specctl.cli.shared_options import AllowPickle, Deep, Offline, Strict
from specctl.cli.validate_answer import lines_of
from specctl.ops.severity import SeverityRules, WrongCodeError, severity_rules
from specctl.ops.validate import validate as run_validate


def validate(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Checkpoints, files of checkpoints, manifests, token maps, directories that hold "
            "some, or quoted patterns such as 'drafts/**/config.json'.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TARGET", help="Target that every draft is for."),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            "--expect",
            metavar="FILE",
            help="List of the codes that each fixture must give; exit 0 when all match.",
        ),
    ] = None,
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="human; concise: a line each; json: one document; jsonl: a finding a line; "
            "github: annotations; sarif: SARIF 2.1.0; junit: a test case for each source.",
        ),
    ] = Format.human,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="Engine that must run every draft as it was trained: vllm, sglang or "
            "tensorrt-llm; may be repeated.",
        ),
    ] = None,
    deep: Deep = False,
    strict: Strict = False,
    error: Annotated[
        list[str] | None,
        typer.Option("--error", metavar="CODE", help="Make a code an error; may be repeated."),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CODE", help="Drop a code's findings; may be repeated."),
    ] = None,
    offline: Offline = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Check checkpoints, manifests and token maps.

    Exit 0: no error and no warning. Exit 1: a finding, or with --expect a difference from the
    list. Exit 2: wrong usage or a fault of specctl.
    """
    rules = rules_of(strict=strict, error=error or (), ignore=ignore or ())
    with output.bar("reading weights") if deep else nullcontext() as step:
        report = run_validate(
            sources,
            target=target,
            expect=expect,
            engines=_known_engines(engine) if engine else (),
            rules=rules,
            access=Access(offline=offline, allow_pickle=allow_pickle),
            deep=step,
            progress=_no_progress if deep else _progress,
        )
    for line in lines_of(report, format):
        output.answer(line)
    if not report.is_clean:
        raise typer.Exit(1)


def _known_engines(names: list[str]) -> list[str]:
    from specctl.ops.engines import ENGINE_NAMES  # the table is read for --engine only

    unknown = next((name for name in names if name not in ENGINE_NAMES), None)
    if unknown is not None:
        text = f"`{unknown}` is none of {', '.join(ENGINE_NAMES)}"
        raise typer.BadParameter(text, param_hint="--engine")
    return names


def rules_of(*, strict: bool, error: Sequence[str], ignore: Sequence[str]) -> SeverityRules:
    """Return the severities that the options ask for; a name that is no code is wrong usage."""
    try:
        return severity_rules(is_strict=strict, error=error, ignore=ignore)
    except WrongCodeError as wrong:
        raise typer.BadParameter(str(wrong), param_hint=wrong.option) from wrong


def _no_progress(total: int) -> AbstractContextManager[Callable[[str], None]]:
    return nullcontext(lambda step: None)  # the bar over the weights has the terminal


def _progress(total: int) -> AbstractContextManager[Callable[[str], None]]:
    return output.progress("validating", total)
