"""The report of `specctl bench` as text."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from runtime.main import BenchReport, Identical, Point


def report_text(report: BenchReport) -> str:
    """Return the report as tables and the lines that qualify them."""
    lines = [_title(report)]
    if report.unfit_for_quality is not None:
        lines.append(f"unfit for judging quality: {report.unfit_for_quality}")
    for point in report.points:
        lines += ["", *_point_lines(report, point)]
    return "\n".join([*lines, *_reference_lines(report)])


def _title(report: BenchReport) -> str:
    settings = report.settings
    prompts = "random prompts"
    if settings.prompts is not None:
        prompts = f"{settings.num_prompts} prompts of {settings.prompts}"
    layout = "" if settings.layout == "one stage" else f", {settings.layout}"
    return (
        f"{prompts}, at most {settings.max_tokens} new tokens, "
        f"{settings.law}, {settings.device} {settings.dtype}{layout}; untimed: "
        f"{settings.warm_up}"
    )


def _point_lines(report: BenchReport, point: Point) -> list[str]:
    length = "" if point.prompt_tokens is None else f", {point.prompt_tokens} prompt tokens"
    lines = [f"concurrency {point.concurrency}{length}", *_arm_table(point)]
    if point.accept_length is not None:
        rates = " ".join(f"{rate:.3f}" for rate in point.acceptance_per_position)
        lines.append(
            f"accept length {point.accept_length:.3f} ({point.accept_length - 1:.3f} without the "
            f"bonus token); accepted at position: {rates}"
        )
    lines += _equality_lines(report, point)
    if point.speedup is not None and point.speedup_range is not None:
        low, high = point.speedup_range.min, point.speedup_range.max
        lines.append(f"speedup {point.speedup:.2f} ({low:.2f} to {high:.2f} over pairs of runs)")
    if point.exactness_tax is not None:
        lines.append(f"exactness tax: {point.exactness_tax:.1%}")
    if point.steps:
        lines += _step_lines(report, point)
    return lines


def _arm_table(point: Point) -> list[str]:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("arm")
    names = ("tokens", "seconds", "tokens/s", "range", "decode", "TTFT ms", "ITL ms", "rounds")
    for name in names:
        table.add_column(name, justify="right")
    for arm in point.arms:
        speeds, decode = arm.tokens_per_s_range, arm.decode_tokens_per_s
        table.add_row(
            f"{arm.name} ({arm.proposer})" if arm.proposer != "none" else arm.name,
            str(arm.tokens),
            f"{arm.seconds:.2f}",
            f"{arm.tokens_per_s:.1f}",
            f"{speeds.min:.1f}-{speeds.max:.1f}" if len(arm.runs) > 1 else "one run",
            "-" if decode is None else f"{decode.median:.1f}",
            f"{arm.ttft_s.median * 1e3:.2f}",
            "-" if arm.itl_s is None else f"{arm.itl_s.median * 1e3:.3f}",
            str(arm.rounds),
        )
    return _lines(table)


def _step_lines(report: BenchReport, point: Point) -> list[str]:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("step")
    for name in ("width", "us", "range", "MB at least", "GB/s", "of copy"):
        table.add_column(name, justify="right")
    for step in point.steps:
        seconds = step.seconds
        table.add_row(
            step.step,
            str(step.width),
            f"{seconds.median * 1e6:.1f}",
            f"{seconds.min * 1e6:.1f}-{seconds.max * 1e6:.1f}",
            "-" if step.bytes is None else f"{step.bytes / 1e6:.1f}",
            "-" if step.gb_per_s is None else f"{step.gb_per_s:.1f}",
            "-" if step.share_of_copy is None else f"{step.share_of_copy:.1%}",
        )
    lines = _lines(table)
    if point.verify_ratio is not None:
        lines.append(f"verify / decode: {point.verify_ratio:.3f}")
    if point.other_s is not None:
        lines.append(f"other (round - verify - draft): {point.other_s * 1e6:.1f} us")
    if report.copy is not None:
        lines.append(f"copy on this device: {report.copy.gb_per_s:.1f} GB/s, read and written")
    return lines


def _equality_lines(report: BenchReport, point: Point) -> list[str]:
    settings, lines = report.settings, []
    is_law_only = settings.verification == "rejection" and settings.temperature > 0
    if is_law_only and point.accept_length is not None:
        lines.append("identical: not claimed, rejection mode keeps the distribution of answers")
    if point.repeat is not None and point.repeat.equal != point.repeat.total:
        lines.append(_equality("target-only does not repeat itself: equal", point.repeat))
    if point.identical is not None:
        lines.append(_equality("identical to target-only:", point.identical))
    if point.contract_off is not None:
        lines.append(_equality("contract off, equal to target-only:", point.contract_off))
    return lines


def _equality(label: str, found: Identical) -> str:
    line = f"{label} {found.equal}/{found.total}"
    first = found.first_divergence
    if first is None:
        return line
    turn = "" if first.turn == 1 else f", turn {first.turn}"
    return (
        f"{line}; first difference: prompt {first.prompt}{turn}, token {first.position}, "
        f"{first.target_only_id} against {first.speculative_id}"
    )


def _reference_lines(report: BenchReport) -> list[str]:
    reference = report.reference
    if reference is None:
        return []
    return [
        f"equal to {reference.file}: {reference.equal}/{reference.total}",
        *(
            f"  prompt {item.prompt}, token {item.position}: {item.found_id}, reference "
            f"{item.reference_id}; the target's two likeliest there are {item.top1_id} and "
            f"{item.top2_id}, {item.margin:.3g} apart"
            for item in reference.differences
        ),
    ]


def _lines(table: Table) -> list[str]:
    from rich.console import Console

    console = Console(file=StringIO(), width=120)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines() if line.strip()]
