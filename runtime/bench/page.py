"""The report as one HTML page that needs nothing else. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from runtime.bench.report import Arm, BenchReport, Identical, Point, Spread, Step
from runtime.bench.svg import Bar, Stack, bars, stacks

_COLOR = {"target-only": 0, "speculative": 1, "contract-off": 2}
_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;
color:#111;background:#fff}
svg text{font:12px system-ui,sans-serif}svg{max-width:100%;height:auto}
figure{margin:1.2rem 0}figcaption{font-weight:600}
table{border-collapse:collapse;display:block;overflow-x:auto}
td,th{padding:.15rem .6rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
.unfit{background:#8f1d1d;color:#fff;padding:.7rem 1rem;font-weight:600}
code{overflow-wrap:anywhere;white-space:normal}
"""


def report_page(report: BenchReport) -> str:
    """Return the page: tables, plots, environment. The same report gives the same page."""
    title = _title(report)
    parts = [
        f"<h1>{escape(title)}</h1>",
        _banner(report),
        f"<p>{escape(_conditions(report))}</p>",
        _speed_plot(report.points),
        *(_point(point) for point in report.points),
        _environment(report),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(filter(None, parts)) + "\n"
        "</body></html>\n"
    )


def equality_text(name: str, found: Identical | None) -> str:
    """Return a line about equality; empty where none was looked for."""
    if found is None:
        return ""
    line = f"{name}: {found.equal}/{found.total}"
    first = found.first_divergence
    if first is None:
        return line
    turn = "" if first.turn == 1 else f", turn {first.turn}"
    return (
        f"{line}; first difference: prompt {first.prompt}{turn}, token {first.position}, "
        f"{first.target_only_id} against {first.speculative_id}"
    )


def _title(report: BenchReport) -> str:
    settings = report.settings
    subject = settings.manifest or f"{settings.shape}, random weights"
    return f"{subject}: {settings.proposer} on {report.environment.device_name}"


def _banner(report: BenchReport) -> str:
    if report.unfit_for_quality is None:
        return ""
    return (
        '<p class="unfit">The answers of this run are unfit for judging quality: '
        f"{escape(report.unfit_for_quality)}.</p>"
    )


def _conditions(report: BenchReport) -> str:
    settings = report.settings
    prompts = f"prompts of {settings.prompts}" if settings.prompts else "random prompts"
    return (
        f"{prompts}, at most {settings.max_tokens} new tokens, "
        f"{settings.law}, {settings.device} {settings.dtype}; order of the runs of a "
        f"point: {', '.join(settings.points[0].order)}; medians, ranges over the runs; "
        f"untimed: {settings.warm_up}."
    )


def _name(point: Point) -> str:
    length = "" if point.prompt_tokens is None else f", {point.prompt_tokens}-token prompts"
    return f"{point.concurrency} at once{length}"


def _speed(arm: Arm) -> Spread:
    return arm.decode_tokens_per_s or arm.tokens_per_s_range


def _speed_plot(points: Sequence[Point]) -> str:
    items = [
        Bar(
            label=f"{_name(point)}, {arm.name}",
            value=_speed(arm).median,
            low=_speed(arm).min,
            high=_speed(arm).max,
            color=_COLOR[arm.name],
            text=f"{_speed(arm).median:,.1f}",
        )
        for point in points
        for arm in point.arms
    ]
    return bars("Tokens per second (decoding alone where it can be told apart)", items)


def _point(point: Point) -> str:
    lines = [
        equality_text("target-only equals itself", point.repeat),
        equality_text("speculative equals target-only", point.identical),
        equality_text("contract-off equals target-only", point.contract_off),
    ]
    if point.speedup is not None and point.speedup_range is not None:
        low, high = point.speedup_range.min, point.speedup_range.max
        lines.append(f"speedup {point.speedup:.2f} ({low:.2f} to {high:.2f} over pairs)")
    lines += [
        f"{arm.name}: {arm.graphs} graphs captured in {arm.capture_s:.2f} s, "
        f"{arm.graph_bytes / 2**20:,.0f} MiB"
        for arm in point.arms
        if arm.graphs
    ]
    if point.exactness_tax is not None:
        lines.append(f"exactness tax {point.exactness_tax:.1%}")
    notes = "".join(f"<li>{escape(line)}</li>" for line in lines if line)
    return "\n".join(
        [
            f"<h2>{escape(_name(point))}</h2>",
            _arm_table(point.arms),
            f"<ul>{notes}</ul>",
            _choices(point),
            _step_plot(point),
            _step_table(point.steps),
            _acceptance(point),
        ]
    )


def _choices(point: Point) -> str:
    if not point.contract_off_choices:
        return ""
    found = "; ".join(f"{what}: {how}" for what, how in point.contract_off_choices.items())
    return f"<p>Without the contract, fastest for this number of rows: {escape(found)}.</p>"


def _arm_table(arms: Sequence[Arm]) -> str:
    head = ["arm", "tokens", "seconds", "tokens/s", "range", "decode tokens/s", "TTFT, ms"]
    head += ["inter-token, ms", "rounds", "accept length", "without bonus", "cached tokens"]
    rows = [
        (
            arm.name,
            f"{arm.tokens:,}",
            f"{arm.seconds:.2f}",
            f"{arm.tokens_per_s:,.1f}",
            f"{arm.tokens_per_s_range.min:,.1f} to {arm.tokens_per_s_range.max:,.1f}",
            "-" if arm.decode_tokens_per_s is None else f"{arm.decode_tokens_per_s.median:,.1f}",
            f"{arm.ttft_s.median * 1e3:.2f}",
            "-" if arm.itl_s is None else f"{arm.itl_s.median * 1e3:.3f}",
            f"{arm.rounds:,}",
            "-" if arm.accept_length is None else f"{arm.accept_length:.3f}",
            "-" if arm.accepted_per_round is None else f"{arm.accepted_per_round:.3f}",
            f"{arm.cached_tokens:,}",
        )
        for arm in arms
    ]
    return _table(head, rows)


def _step_plot(point: Point) -> str:
    if not point.steps:
        return ""
    found = {step.step: step.seconds.median * 1e6 for step in point.steps}
    items = [
        Stack(label=name, parts=((name, found[name]),), text=f"{found[name]:,.1f} us")
        for name in ("decode", "contract-off")
        if name in found
    ]
    if point.other_s is not None:
        parts = [("draft", found["draft"]), ("verify", found["verify"])]
        parts.append(("other", point.other_s * 1e6))
        items.append(Stack(label="round", parts=tuple(parts), text=f"{found['round']:,.1f} us"))
    return stacks("Time of a step", items)


def _step_table(steps: Sequence[Step]) -> str:
    if not steps:
        return ""
    head = ("step", "width", "us", "range", "MB at least", "GB/s", "of the copy")
    rows = [
        (
            step.step,
            str(step.width),
            f"{step.seconds.median * 1e6:,.1f}",
            f"{step.seconds.min * 1e6:,.1f} to {step.seconds.max * 1e6:,.1f}",
            "-" if step.bytes is None else f"{step.bytes / 1e6:,.1f}",
            "-" if step.gb_per_s is None else f"{step.gb_per_s:,.1f}",
            "-" if step.share_of_copy is None else f"{step.share_of_copy:.1%}",
        )
        for step in steps
    ]
    return _table(head, rows)


def _acceptance(point: Point) -> str:
    arm = point.arm("speculative")
    if arm is None or not arm.rounds:
        return ""
    rates = [
        Bar(label=f"draft {index + 1}", value=rate, text=f"{rate:.3f}", color=1)
        for index, rate in enumerate(arm.acceptance_per_position)
    ]
    counts = [
        Bar(label=f"{index} accepted", value=count, text=f"{count:,}", color=1)
        for index, count in enumerate(arm.rounds_by_accepted)
    ]
    return bars("Share of rounds that accept the draft at a position", rates) + bars(
        "Rounds by accepted drafts", counts
    )


def _environment(report: BenchReport) -> str:
    facts = report.environment
    rows = [
        ("command", facts.command),
        ("started", facts.started),
        ("device", facts.device_name),
        ("specctl, Python", f"{facts.specctl}, {facts.python}"),
        ("torch, triton, CUDA", f"{facts.torch}, {facts.triton}, {facts.cuda}"),
        ("CPUs, torch threads", f"{facts.cpus}, {facts.torch_threads}"),
        ("product tiles", facts.gemm_table),
        ("sources of the runtime", facts.sources_digest),
        *((f"sources of {name}", digest) for name, digest in facts.sources.items()),
    ]
    if report.copy is not None:
        rows.append(("copy on this device", f"{report.copy.gb_per_s:,.1f} GB/s, read + written"))
    lines = "".join(
        f"<tr><td>{escape(name)}</td><td style='text-align:left'><code>{escape(value)}</code>"
        "</td></tr>"
        for name, value in rows
    )
    return f"<h2>Environment</h2><table>{lines}</table>"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"
