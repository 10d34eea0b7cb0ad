"""The report of token maps as terminal text, and the words that the page shares with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from specctl.cli.words import count_text
from specctl.ops.token_map_report import BuiltMap, CorpusFacts, TokenMapReport
from specctl.ops.token_map_slices import NOTHING, OUTPUTS, OUTPUTS_SLICE
from specctl.tokenmap.cost import CostFacts, SizeEstimate
from specctl.tokenmap.coverage import SliceCoverage

_MAX_LISTED = 6
_MAX_SLICES = 4
_ORDER = {"all": 0, "domain": 1, "outputs": 2, "language": 3}
_SMALLEST = 1024
_BREAK = "\n" + " " * 14


def report_text(report: TokenMapReport, *, width: int, color: bool) -> str:
    """Return the whole report.

    Args:
        report: of maps that were written.
        width: columns of tables.
        color: whether the terminal shows color.
    """
    lines = [*_maps(report), "", *_corpus(report), ""]
    if report.measured_on != NOTHING:
        lines += [_curve_table(report, width=width, color=color), ""]
        lines += [*_recommended(report), *_assumptions(report.cost), ""]
    lines += [*_forced(report), ""]
    for built in report.maps:
        lines.append(f"files in {Path(built.directory)}/")
        lines.append("  " + "  ".join(built.files))
    return "\n".join(lines)


def _maps(report: TokenMapReport) -> Iterator[str]:
    for built in report.maps:
        share = built.size / report.target_vocab_size
        yield (
            f"token map     {built.size:,} of {report.target_vocab_size:,} ids ({share:.1%}), "
            f"{_origin(built, report)}"
        )
        if report.measured_on == NOTHING:
            yield "  coverage    not measured: a list has no text; `--outputs` gives some"
        else:
            yield (
                f"  coverage    {built.coverage:.2%} of {report.measured_on}; estimated speed "
                f"{built.estimate.speedup:.3f} of the full head's"
            )
        if built.displaced:
            yield f"  displaced   {ids_text(built.displaced)}"


def _origin(built: BuiltMap, report: TokenMapReport) -> str:
    if built.size_origin == "given":
        return "as asked"
    return f"by the {report.recommended.rule}"


def _corpus(report: TokenMapReport) -> Iterator[str]:
    corpus = report.corpus
    if report.measured_on == NOTHING:
        names = ", ".join(corpus.domains)
        yield f"ranks         the order of {names}"
        yield f"tokenizer     {report.tokenizer}, {report.tokenizer_size:,} ids"
        return
    yield (
        f"counted       {corpus.num_tokens:,} tokens in "
        f"{count_text(corpus.num_documents, 'document')} ({bytes_text(corpus.num_text_bytes)})"
    )
    yield f"method        {corpus.method}: {_method(corpus)}"
    yield (
        f"held out      {corpus.num_held_out_tokens:,} tokens in "
        f"{count_text(corpus.num_held_out_documents, 'document')}: {corpus.held_out}"
    )
    for part in report.slices:
        if part.kind == "outputs":
            yield f"outputs       {part.num_tokens:,} tokens that the target wrote"
    weights = ", ".join(f"{name} x {weight}" for name, weight in corpus.weights.items())
    if weights:
        yield f"weights       {weights}"
    yield f"tokenizer     {report.tokenizer}, {report.tokenizer_size:,} ids"
    yield (
        f"ids seen      {report.num_seen:,}, which cover {report.coverage_of_seen:.2%} of "
        f"{report.measured_on}"
    )


def _method(corpus: CorpusFacts) -> str:
    if not corpus.num_unit_occurrences:
        return corpus.method_reason
    share = corpus.num_units / corpus.num_unit_occurrences
    return (
        f"{corpus.method_reason};{_BREAK}{corpus.num_units:,} distinct of "
        f"{corpus.num_unit_occurrences:,} pieces ({share:.2%}) were encoded"
    )


def _curve_table(report: TokenMapReport, *, width: int, color: bool) -> str:
    from io import StringIO

    from rich import box
    from rich.console import Console
    from rich.table import Table

    chosen = {built.size for built in report.maps}
    shown = shown_points(report)
    is_own = report.measured_on == OUTPUTS  # the first column is this slice then
    parts = [
        part
        for part in report.slices
        if (part.kind != "all" if not is_own else part.name != OUTPUTS_SLICE)
    ]
    parts = sorted(parts, key=lambda part: (_ORDER[part.kind], -part.num_tokens))[:_MAX_SLICES]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1))
    table.add_column("size", justify="right")
    table.add_column("", justify="left")
    for name in ("outputs" if is_own else "coverage", *map(_column, parts)):
        table.add_column(name, justify="right")
    for name in ("drafts", "head MB", "speed"):
        table.add_column(name, justify="right", no_wrap=True)
    for point in shown:
        mark = "map" if point.size in chosen else ""
        mark = f"{mark} best".strip() if point.size == report.recommended.size else mark
        own = [f"{part.at(point.size):.2%}" for part in parts]
        table.add_row(
            f"{point.size:,}",
            mark,
            f"{point.coverage:.2%}",
            *own,
            f"{point.accepted_drafts:.3f}",
            f"{point.head_bytes / 1e6:,.1f}",
            f"{point.speedup:.3f}",
            style="bold" if point.size in chosen else None,
        )
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
    )
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip())


def _column(part: SliceCoverage) -> str:
    return "held out" if part.kind == "all" else part.name


def shown_points(report: TokenMapReport) -> tuple[SizeEstimate, ...]:
    """Return the curve's powers of two from `_SMALLEST`, the maps, the best and the whole."""
    kept = {built.size for built in report.maps}
    kept |= {report.recommended.size, report.curve[-1].size}
    small = report.curve[-1].size < 4 * _SMALLEST
    return tuple(
        point
        for point in report.curve
        if point.size in kept
        or (point.size & (point.size - 1) == 0 and (small or point.size >= _SMALLEST))
    )


def _recommended(report: TokenMapReport) -> Iterator[str]:
    best = report.recommended
    yield f"recommended   {best.size:,} ids: {best.text.replace('; ', ';' + _BREAK)}"
    if best.rule == "cost model" and best.size == report.curve[-1].size:
        yield "              no smaller head is estimated to be faster"


def _assumptions(cost: CostFacts) -> Iterator[str]:
    yield "              speed = tokens/s against the full head, from:"
    for name, value, origin in cost_rows(cost):
        yield f"                {name:<22}{value:>12}  {origin}"


def cost_rows(cost: CostFacts) -> Sequence[tuple[str, str, str]]:
    """Return name, value and origin of every number of the cost model."""
    origins = cost.origins
    kind = "block, 1 pass" if cost.is_block else "chain"
    return (
        ("drafts in a round", str(cost.num_speculative_tokens), origins["num_speculative_tokens"]),
        ("draft", kind, origins["is_block"]),
        ("acceptance, full head", f"{cost.acceptance:.3f}", origins["acceptance"]),
        ("lost ratio", f"{cost.lost_ratio:g}", origins["lost_ratio"]),
        ("head row", bytes_text(cost.head_row_bytes), origins["head_row_bytes"]),
        ("rest of a draft pass", bytes_text(cost.draft_bytes), origins["draft_bytes"]),
        ("target, a verification", bytes_text(cost.target_bytes), origins["target_bytes"]),
        ("bandwidth", f"{cost.bandwidth / 1e9:,.0f} GB/s", origins["bandwidth"]),
        (
            "fixed time of a layer",
            f"{cost.layer_overhead_s * 1e6:g} us",
            f"{origins['layer_overhead_s']}; {cost.draft_layers} + {cost.target_layers} layers",
        ),
    )


def bytes_text(count: float) -> str:
    """Return a number of bytes in decimal units, as bandwidths are given."""
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} bytes"


def _forced(report: TokenMapReport) -> Iterator[str]:
    yield f"forced ids    {len(report.forced)}, in the map whatever their frequency"
    for item in report.forced[:_MAX_LISTED]:
        more = f" and {len(item.reasons) - 2} more" if item.reasons[2:] else ""
        yield f"  {item.target_id:<8}  {item.token!a}  ({', '.join(item.reasons[:2])}{more})"
    if len(report.forced) > _MAX_LISTED:
        yield f"  and {len(report.forced) - _MAX_LISTED} more; --json lists all"
    if report.num_reserved:
        yield f"  {report.num_reserved} reserved special tokens were left out"


def ids_text(ids: Sequence[int]) -> str:
    """Return what frequency alone would have chosen, shortened."""
    listed = ", ".join(map(str, ids[:_MAX_LISTED]))
    more = f" and {len(ids) - _MAX_LISTED} more" if len(ids) > _MAX_LISTED else ""
    return f"{len(ids)} ids that frequency alone would have chosen: {listed}{more}"
