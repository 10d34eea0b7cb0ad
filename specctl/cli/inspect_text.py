"""The `inspect` report as text: aligned, wrapped to the terminal, color in the findings only."""

from __future__ import annotations

from collections.abc import Mapping

from specctl.cli import render
from specctl.cli.words import ORIGINS, OUTCOMES, count_text, counts_text, kind_text
from specctl.cli.wrapping import USUAL_WIDTH, wrapped
from specctl.contract.manifest import TensorRef
from specctl.contract.text import printable
from specctl.ops.report import (
    AuxHidden,
    BundledDraft,
    EngineReport,
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
_INDENT = " " * _LABEL
_OPEN = "open"


def inspect_text(report: InspectReport, *, color: bool = False, width: int | None = None) -> str:
    """Return the whole report; the findings come last.

    Args:
        report: what was found.
        color: mark the severities.
        width: columns to wrap at; None for a file or pipe: only the reasons are wrapped.
    """
    findings = [
        render.human(diagnostic_of(d), color=color, width=width) for d in report.diagnostics
    ]
    if report.format is None and not report.tensors.num_tensors:
        return "\n".join(findings)
    page = _Page(width)
    page.source("source", report.roles.source)
    if report.roles.target is not None:
        page.source("target", report.roles.target)
    if report.geometry is not None:
        page.geometry(report.geometry)
    page.vocabulary(report.vocabulary)
    if report.aux_hidden is not None:
        page.aux_hidden(report.aux_hidden)
    page.shared("embedding", report.sharing.embedding)
    page.shared("head", report.sharing.head)
    page.by(report.sharing.head_decided_by)
    for decoy in report.sharing.decoys:
        page.row("", f"passed over: {_tensor(decoy)}")
    page.details(report.details)
    if report.bundled is not None:
        page.bundled(report.bundled)
    for engine in report.engines:
        page.engine(engine)
    page.tensors(report.tensors)
    page.row("findings", counts_text(*count_severities(report.diagnostics)))
    return "\n".join([*page.lines, *findings])


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) + "}"
    return _OPEN if value is None else str(value)


class _Page:
    """The lines so far; each method adds one fact's rows."""

    def __init__(self, width: int | None) -> None:
        self.lines: list[str] = []
        self._width = width

    def row(self, label: str, text: str) -> None:
        """Add a labelled row."""
        first = f"{label:<{_LABEL}}"
        self.lines += wrapped(text, self._width, first=first, rest=f"{_INDENT}  ")

    def by(self, text: str | None) -> None:
        """Add why a fact is what it is, in brackets."""
        if text:
            width = self._width or USUAL_WIDTH
            self.lines += wrapped(f"({text})", width, first=_INDENT, rest=f"{_INDENT} ")

    def source(self, label: str, source: Source) -> None:
        """Add a directory, what it is and why."""
        what = kind_text(source.role, source.format)
        extra = f", {source.architecture}" if source.architecture else ""
        self.lines.append(f"{label:<{_LABEL}}{printable(source.path)}")
        if source.revision is not None:
            self.row("", f"revision {printable(source.revision)}")
        self.row("", f"{what}{extra}")
        if source.target_name is not None:
            self.row("", f"made for {printable(source.target_name)}")
        self.by("; ".join(source.evidence))

    def engine(self, engine: EngineReport) -> None:
        """Add what an engine does with the draft, and why."""
        outcome = OUTCOMES[engine.outcome]
        self.row("engine", f"{engine.engine} {engine.version}: {outcome}")
        for row in engine.rows:
            if row.is_current:
                self.by(f"{row.reason}: {row.source}")

    def geometry(self, g: GeometryFacts) -> None:
        """Add the widths of a round."""
        self.row(
            "geometry",
            f"num_speculative_tokens {_value(g.num_speculative_tokens)}, "
            f"draft_width {_value(g.draft_width)}, verify_width {_value(g.verify_width)}",
        )
        if g.draft_block_size is not None or g.sample_from_anchor is not None:
            self.row(
                "",
                f"draft_block_size {_value(g.draft_block_size)}, "
                f"sample_from_anchor {_value(g.sample_from_anchor)}",
            )
        self.by(g.decided_by)

    def vocabulary(self, v: VocabularyFacts) -> None:
        """Add the sizes and the map."""
        parts = [f"target {_value(v.target_vocab_size)}"]
        if v.map_kind is not None or v.draft_vocab_size is not None:
            parts.append(f"draft {_value(v.draft_vocab_size)}")
            parts.append(f"map {_value(v.map_kind)}")
        if v.tokenizer_size is not None:
            parts.append(f"tokenizer {v.tokenizer_size}")
        if v.eos_token_ids:
            parts.append(f"end ids {_value(v.eos_token_ids)}")
        self.row("vocabulary", ", ".join(parts))
        if v.map_tensor is not None:
            mask = "" if v.mask_tensor is None else f", mask {_tensor(v.mask_tensor)}"
            self.row("", f"map {_tensor(v.map_tensor)}{mask}")
        self.by(v.decided_by)

    def aux_hidden(self, aux: AuxHidden) -> None:
        """Add the captured states."""
        read = "none in the file" if aux.read_ids is None else _value(aux.read_ids)
        self.row(
            "aux hidden",
            f"{_value(aux.num_states)} states, read {read}, numbering {_value(aux.numbering)}",
        )
        ids = _value(aux.output_layer_ids)
        self.row("", f"output of layers {ids} (0-based, -1 = embedding)")
        self.by(aux.decided_by)

    def shared(self, label: str, shared: SharedTensor | None) -> None:
        """Add where the embedding or head is."""
        if shared is not None:
            place = "" if shared.tensor is None else f": {_tensor(shared.tensor)}"
            self.row(label, f"{ORIGINS[shared.origin]}{place}")

    def details(self, details: Mapping[str, object]) -> None:
        """Add what only this kind of draft has, under the names of its config."""
        if details:
            text = "; ".join(f"{printable(k)}: {printable(_value(v))}" for k, v in details.items())
            width = self._width or USUAL_WIDTH
            self.lines += wrapped(text, width, first=f"{'details':<{_LABEL}}", rest=f"{_INDENT}  ")

    def bundled(self, draft: BundledDraft) -> None:
        """Add the draft inside a target."""
        layers = "" if draft.num_layers is None else f"{count_text(draft.num_layers, 'layer')}, "
        self.row(
            "bundled",
            f"{draft.format}: {layers}{count_text(draft.num_tensors, 'tensor')}, "
            f"{draft.num_bytes:,} bytes",
        )
        self.prediction(draft.details)

    def prediction(self, details: Mapping[str, object]) -> None:
        """Add what a prediction layer is and reads; nothing for another draft."""
        if "concat_order" not in details or "attention" not in details:
            return
        experts = details.get("num_experts")
        kind = [
            f"{details['attention']} attention",
            *(["output gate"] if details.get("has_output_gate") else []),
            *(["indexer"] if details.get("has_indexer") else []),
            f"{experts} experts" if experts else f"{details['mlp']} MLP",
        ]
        self.row("layer", ", ".join(kind))
        self.row("reads", f"({details['concat_order']}), {details['hidden_input']}")

    def tensors(self, tensors: Tensors) -> None:
        """Add the totals, and counts and bytes of each part."""
        files = count_text(tensors.num_files, "file")
        self.row("tensors", f"{tensors.num_tensors} in {files}, {tensors.num_bytes:,} bytes")
        name = max((len(part.name) for part in tensors.parts), default=0)
        is_wide = self._width is None or self._width >= _LABEL + name + 24
        indent, room = (_INDENT, 16) if is_wide else ("  ", 0)
        room = max([room, *(len(f"{part.num_bytes:,}") for part in tensors.parts)])
        self.lines += [
            f"{indent}{part.name:<{name}}  {part.num_tensors:>4}  {part.num_bytes:>{room},}"
            for part in tensors.parts
        ]


def _tensor(ref: TensorRef) -> str:
    dims = ",".join(map(str, ref.shape))
    return f"{ref.key} [{dims} {ref.dtype}] in {ref.file}"
