"""The `inspect` report as text: aligned, 100 columns, no weights and no color but in findings."""

from __future__ import annotations

import textwrap

from specctl.cli import render
from specctl.contract.manifest import TensorRef
from specctl.ops.report import (
    AuxHidden,
    GeometryFacts,
    InspectReport,
    SharedTensor,
    Source,
    Tensors,
    VocabularyFacts,
    count_severities,
    diagnostic_of,
)

_LABEL = 12
_WIDTH = 100
_OPEN = "open"
_ORIGINS = {"own": "own", "target": "the target's", "tied": "tied to the embedding"}


def inspect_text(report: InspectReport, *, color: bool = False) -> str:
    """Return the whole report; the findings come last."""
    findings = [render.human(diagnostic_of(d), color=color) for d in report.diagnostics]
    if report.format is None and not report.tensors.list:
        return "\n".join(findings)
    sections = [
        _source_lines("source", report.roles.source),
        [] if report.roles.target is None else _source_lines("target", report.roles.target),
        [] if report.geometry is None else _geometry_lines(report.geometry),
        _vocabulary_lines(report.vocabulary),
        [] if report.aux_hidden is None else _aux_lines(report.aux_hidden),
        _shared_lines("embedding", report.sharing.embedding),
        _shared_lines("head", report.sharing.head),
        _tensor_lines(report.tensors),
    ]
    lines = [line for section in sections for line in section]
    return "\n".join([*lines, *_count_line(report), *findings])


def _row(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}".rstrip()


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(str, value)) + "]"
    return _OPEN if value is None else str(value)


def _by(text: str | None) -> list[str]:
    if text is None:
        return []
    indent = " " * _LABEL
    return textwrap.wrap(
        f"({text})",
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _source_lines(label: str, source: Source) -> list[str]:
    what = " ".join(filter(None, (source.role, source.format))) or "unknown"
    extra = f", {source.architecture}" if source.architecture else ""
    evidence = "; ".join(source.evidence)
    return [
        _row(label, source.path),
        _row("", f"{what}{extra}"),
        *_by(evidence or None),
    ]


def _geometry_lines(g: GeometryFacts) -> list[str]:
    widths = (
        f"num_speculative_tokens {_value(g.num_speculative_tokens)}, "
        f"draft_width {_value(g.draft_width)}, verify_width {_value(g.verify_width)}"
    )
    lines = [_row("geometry", widths)]
    if g.draft_block_size is not None or g.sample_from_anchor is not None:
        block = (
            f"draft_block_size {_value(g.draft_block_size)}, "
            f"sample_from_anchor {_value(g.sample_from_anchor)}"
        )
        lines.append(_row("", block))
    return lines + _by(g.decided_by)


def _vocabulary_lines(v: VocabularyFacts) -> list[str]:
    parts = [f"target {_value(v.target_vocab_size)}"]
    if v.map_kind is not None or v.draft_vocab_size is not None:
        parts.append(f"draft {_value(v.draft_vocab_size)}")
        parts.append(f"map {_value(v.map_kind)}")
    if v.tokenizer_size is not None:
        parts.append(f"tokenizer {v.tokenizer_size}")
    if v.eos_token_ids:
        parts.append(f"end ids {_value(v.eos_token_ids)}")
    lines = [_row("vocabulary", ", ".join(parts))]
    if v.map_tensor is not None:
        mask = "" if v.mask_tensor is None else f", mask {_tensor(v.mask_tensor)}"
        lines.append(_row("", f"map {_tensor(v.map_tensor)}{mask}"))
    return lines + _by(v.decided_by)


def _aux_lines(aux: AuxHidden) -> list[str]:
    read = "none in the file" if aux.read_ids is None else _value(aux.read_ids)
    head = f"{_value(aux.num_states)} states, read {read}, numbering {_value(aux.numbering)}"
    lines = [
        _row("aux hidden", head),
        _row("", f"output of layers {_value(aux.output_layer_ids)} (0-based, -1 = embedding)"),
    ]
    return lines + _by(aux.decided_by)


def _shared_lines(label: str, shared: SharedTensor | None) -> list[str]:
    if shared is None:
        return []
    place = "" if shared.tensor is None else f": {_tensor(shared.tensor)}"
    return [_row(label, f"{_ORIGINS[shared.origin]}{place}")]


def _tensor(ref: TensorRef) -> str:
    dims = ",".join(map(str, ref.shape))
    return f"{ref.key} [{dims} {ref.dtype}] in {ref.file}"


def _tensor_lines(tensors: Tensors) -> list[str]:
    total = (
        f"{tensors.num_tensors} in {tensors.num_files} "
        f"file{'' if tensors.num_files == 1 else 's'}, {tensors.num_bytes:,} bytes"
    )
    width = max((len(part.name) for part in tensors.parts), default=0)
    rows = [
        _row("", f"{part.name:<{width}}  {part.num_tensors:>4}  {part.num_bytes:>16,}")
        for part in tensors.parts
    ]
    return [_row("tensors", total), *rows]


def _count_line(report: InspectReport) -> list[str]:
    return [_row("findings", counts_text(*count_severities(report.diagnostics)))]


def counts_text(num_errors: int, num_warnings: int, num_infos: int) -> str:
    """Return `2 errors, 1 info`, or `none`."""
    named = ((num_errors, "error"), (num_warnings, "warning"), (num_infos, "info"))
    parts = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in named if n]
    return ", ".join(parts) or "none"
