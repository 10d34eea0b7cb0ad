"""The facts of a report as a table: what it is, its widths, vocabulary and shared tensors."""

from __future__ import annotations

from collections.abc import Iterator

from specctl.cli.html.markup import code, escaped, prose, section
from specctl.cli.words import ORIGINS, kind_text
from specctl.contract.manifest import TensorRef
from specctl.ops.report import (
    AuxHidden,
    BundledDraft,
    GeometryFacts,
    InspectReport,
    SharedTensor,
    Source,
    VocabularyFacts,
)


def facts_section(report: InspectReport) -> str:
    """Return the section of facts, empty when nothing could be opened."""
    if report.format is None and not report.tensors.list:
        return ""
    rows = "\n".join(
        f'<tr><th scope="row">{escaped(label)}</th><td>{markup}</td></tr>'
        for label, markup in _rows(report)
    )
    caption = "<caption>Facts of the source</caption>"
    return section("Facts", f'<table class="facts">\n{caption}\n<tbody>\n{rows}\n</tbody></table>')


def _rows(report: InspectReport) -> Iterator[tuple[str, str]]:
    yield "Source", _source(report.roles.source)
    if report.roles.target is not None:
        yield "Target", _source(report.roles.target)
    if report.geometry is not None:
        yield "Geometry", _geometry(report.geometry)
    yield "Vocabulary", _vocabulary(report.vocabulary)
    if report.aux_hidden is not None:
        yield "Captured states", _aux_hidden(report.aux_hidden)
    sharing = report.sharing
    if sharing.embedding is not None:
        yield "Embedding", _shared(sharing.embedding)
    if sharing.head is not None:
        yield "Head", _shared(sharing.head) + _by(sharing.head_decided_by)
    if sharing.decoys:
        yield "Passed over", "".join(f"<p>{_tensor(ref)}</p>" for ref in sharing.decoys)
    if report.details:
        yield "Details", _values(*report.details.items())
    if report.bundled is not None:
        yield "Bundled draft", _bundled(report.bundled)


def _bundled(draft: BundledDraft) -> str:
    return _values(
        ("format", draft.format),
        ("prediction layers", draft.num_layers),
        ("tensors", draft.num_tensors),
        ("bytes", f"{draft.num_bytes:,}"),
    )


def _value(value: object) -> str:
    if value is None:
        return '<span class="open">open</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{escaped(k)}: {_value(v)}' for k, v in value.items())}}}"
    return escaped(value)


def _values(*pairs: tuple[str, object]) -> str:
    items = "".join(f"<div><dt>{escaped(k)}</dt><dd>{_value(v)}</dd></div>" for k, v in pairs)
    return f"<dl>{items}</dl>"


def _by(text: str | None) -> str:
    return "" if not text else f'<p class="reason">{prose(text)}</p>'


def _source(source: Source) -> str:
    what = kind_text(source.role, source.format)
    extra = f", {escaped(source.architecture)}" if source.architecture else ""
    made = "" if source.target_name is None else f"<p>made for {code(source.target_name)}</p>"
    at = "" if source.revision is None else f" at revision {code(source.revision)}"
    head = f"<p>{code(source.path)}{at}</p><p>{escaped(what)}{extra}</p>"
    return head + made + _by("; ".join(source.evidence))


def _geometry(g: GeometryFacts) -> str:
    pairs: list[tuple[str, object]] = [
        ("tokens in a round", g.num_speculative_tokens),
        ("draft width", g.draft_width),
        ("verify width", g.verify_width),
    ]
    if g.draft_block_size is not None or g.sample_from_anchor is not None:
        pairs.append(("trained block", g.draft_block_size))
        pairs.append(("sample from anchor", g.sample_from_anchor))
    return _values(*pairs) + _by(g.decided_by)


def _vocabulary(v: VocabularyFacts) -> str:
    pairs: list[tuple[str, object]] = [("target", v.target_vocab_size)]
    if v.map_kind is not None or v.draft_vocab_size is not None:
        pairs += [("draft", v.draft_vocab_size), ("map", v.map_kind)]
    if v.tokenizer_size is not None:
        pairs.append(("tokenizer", v.tokenizer_size))
    if v.eos_token_ids:
        pairs.append(("end ids", v.eos_token_ids))
    tensors = [f"<p>{_tensor(ref)}</p>" for ref in (v.map_tensor, v.mask_tensor) if ref is not None]
    return _values(*pairs) + "".join(tensors) + _by(v.decided_by)


def _aux_hidden(aux: AuxHidden) -> str:
    pairs = (
        ("states", aux.num_states),
        ("as written", aux.read_ids),
        ("numbering", aux.numbering),
        ("output of layers", aux.output_layer_ids),
    )
    return _values(*pairs) + _by(aux.decided_by)


def _shared(shared: SharedTensor) -> str:
    place = "" if shared.tensor is None else f": {_tensor(shared.tensor)}"
    return f"<p>{ORIGINS[shared.origin]}{place}</p>"


def _tensor(ref: TensorRef) -> str:
    dims = ",".join(map(str, ref.shape))
    return f"{code(ref.key)} [{escaped(dims)} {escaped(ref.dtype)}] in {code(ref.file)}"
