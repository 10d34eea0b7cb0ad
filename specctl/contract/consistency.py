"""Facts of a manifest that must agree with each other; pure, no files are read.

Invariants: every fact has an origin and every origin a fact; widths, sizes and counts that are
written twice are equal; the fingerprint belongs to the facts.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.fingerprint import fingerprint
from specctl.contract.manifest import (
    BLOCK_DRAFTS,
    LAST_STATE_DRAFTS,
    PARALLEL_DRAFTS,
    Decoder,
    Manifest,
    TensorRef,
    WeightFile,
    find_origin,
)

_WITHOUT_ORIGIN = frozenset(
    {"schema_version", "specctl_version", "diagnostics", "fingerprint", "origins"}
)


def check_manifest(manifest: Manifest, *, name: str = "manifest") -> tuple[Diagnostic, ...]:
    """Return what contradicts itself: SD708, SD709 (origins), SD710 (facts), SD711 (fingerprint).

    Args:
        manifest: values of the right types.
        name: the file, for the places.
    """
    findings = [*_check_origins(manifest, name)]
    findings += [
        diagnose(
            "SD710",
            where=f"{name}#/{path.replace('.', '/')}",
            message=f"`{path}` does not fit the other facts: {rule}",
            expected=expected,
            found=found,
        )
        for path, rule, expected, found in _contradictions(manifest)
    ]
    if not findings:
        findings += _check_fingerprint(manifest, name)
    return tuple(findings)


def fact_paths(manifest: Manifest) -> tuple[str, ...]:
    """Return the dotted path of every fact that may have an origin, in schema order."""
    return tuple(path for path, _ in _facts(manifest))


def _facts(manifest: Manifest) -> Iterator[tuple[str, bool]]:
    """Yield (path, whether it needs an origin) of every fact, in schema order."""
    for section in manifest.__struct_fields__:
        if section not in _WITHOUT_ORIGIN:
            yield from _leaves(getattr(manifest, section), section)


def _leaves(value: object, path: str, *, may_be_absent: bool = False) -> Iterator[tuple[str, bool]]:
    """Walk a value; a fact that a file need not hold, and that is null, needs no origin.

    Such keys came after manifests without them were written.
    """
    if isinstance(value, msgspec.Struct) and not isinstance(value, TensorRef):
        for field in msgspec.structs.fields(value):
            is_added = field.default is None
            inner = getattr(value, field.name)
            yield from _leaves(inner, f"{path}.{field.name}", may_be_absent=is_added)
    else:
        yield path, not (may_be_absent and value is None)


def _check_origins(manifest: Manifest, name: str) -> Iterator[Diagnostic]:
    for path, needs_origin in _facts(manifest):
        if needs_origin and find_origin(manifest.origins, path) is None:
            yield diagnose(
                "SD708",
                where=f"{name}#/{path.replace('.', '/')}",
                message=f"`{path}` has no origin",
                expected=f"`{path}` or a section that contains it, in `origins`",
                found="neither",
            )
    known = origin_paths(manifest)
    for path in manifest.origins:
        if path not in known:
            yield diagnose(
                "SD709",
                where=f"{name}#/origins/{path}",
                message=f"origin `{path}` names no fact",
                expected="the dotted path of a fact or section",
                found=f"`{path}`",
            )


def origin_paths(manifest: Manifest) -> frozenset[str]:
    """Return every path that an origin may have: those of facts and of what contains them."""
    return frozenset(
        ".".join(parts[:depth])
        for parts in (path.split(".") for path in fact_paths(manifest))
        for depth in range(1, len(parts) + 1)
    )


_Rule = tuple[str, str, object, object]


def _yes(holds: bool) -> tuple[str, str]:
    return "yes", "yes" if holds else "no"


def _contradictions(m: Manifest) -> Iterator[_Rule]:
    """Yield (path, rule, expected, found) for each rule that is broken."""
    rules = (
        *_geometry_rules(m),
        *_vocabulary_rules(m),
        *_shape_rules(m),
        *_sharing_rules(m),
        *_size_rules(m),
    )
    for rule in rules:
        if rule[2] != rule[3]:
            yield rule


def _geometry_rules(m: Manifest) -> Iterator[_Rule]:
    g = m.geometry
    gamma = g.num_speculative_tokens
    yield "geometry.verify_width", "num_speculative_tokens + 1", gamma + 1, g.verify_width
    if m.draft is None:
        yield "geometry.num_speculative_tokens", "0 without a draft", 0, gamma
        yield "geometry.draft_width", "0 without a draft", 0, g.draft_width
        yield "sharing", "null without a draft", "null", "null" if m.sharing is None else "a value"
        return
    yield "sharing", "given with a draft", "a mapping", "null" if m.sharing is None else "a mapping"
    limit = m.target.decoder.max_position_embeddings - 1
    allowed = gamma if gamma <= limit else f"at most {limit}"
    yield "geometry.num_speculative_tokens", "below the target's positions", allowed, gamma
    yield "draft.block", "null for a chain", *_yes(m.draft.block is None or _is_block(m))
    if m.draft.algorithm in PARALLEL_DRAFTS:
        yield "geometry.draft_width", "a slot for each draft", gamma, g.draft_width
        yield "draft.mask_token_id", "set for P-EAGLE", *_yes(m.draft.mask_token_id is not None)
        return
    if not _is_block(m):
        yield "geometry.draft_width", "1 for a chain", 1, g.draft_width
        return
    is_known = g.sample_from_anchor is not None and g.draft_block_size is not None
    yield (
        "geometry",
        "`sample_from_anchor` and `draft_block_size` are set",
        *_yes(is_known),
    )
    width = gamma if g.sample_from_anchor else gamma + 1
    yield "geometry.draft_width", "from `sample_from_anchor`", width, g.draft_width
    fits = width <= (g.draft_block_size or 0)
    yield "geometry.draft_block_size", f"holds `draft_width` {width}", *_yes(fits)


def _is_block(m: Manifest) -> bool:
    return m.draft is not None and m.draft.algorithm in BLOCK_DRAFTS


def _vocabulary_rules(m: Manifest) -> Iterator[_Rule]:
    v = m.vocabulary
    rows = m.target.vocab_size
    yield "vocabulary.target_vocab_size", "target.vocab_size", rows, v.target_vocab_size
    if v.map_kind == "identity":
        yield "vocabulary.draft_vocab_size", "identity map", v.target_vocab_size, v.draft_vocab_size
        yield "vocabulary.map_digest", "null for an identity map", "null", v.map_digest or "null"
        return
    is_smaller = v.draft_vocab_size < v.target_vocab_size
    yield "vocabulary.draft_vocab_size", "below the target's for a reduced map", *_yes(is_smaller)
    has_source = v.map_tensor is not None or v.token_map_file is not None
    yield "vocabulary", "a reduced map has `map_tensor` or `token_map_file`", *_yes(has_source)
    yield "vocabulary.map_digest", "set for a reduced map", *_yes(v.map_digest is not None)
    is_paired = (v.token_map_file is None) == (v.token_map_digest is None)
    yield "vocabulary.token_map_digest", "set when `token_map_file` is", *_yes(is_paired)


def _sharing_rules(m: Manifest) -> Iterator[_Rule]:
    """Yield what `sharing` and `map_tensor` must be, given which tensors the draft stores."""
    if m.draft is None or m.sharing is None:
        return
    tensors = m.draft.tensors
    single, many, head = ("own",) * 3
    if "embedding" not in tensors:
        single, many = "target", "checkpoint"
    if "head" not in tensors:
        head = "target"
    where = "follows from `draft.tensors`"
    yield "sharing.embedding_single_stage", where, single, m.sharing.embedding_single_stage
    yield "sharing.embedding_multi_stage", where, many, m.sharing.embedding_multi_stage
    yield "sharing.head", where, head, m.sharing.head
    if (stored := tensors.get("head")) is not None:
        yield "draft.tensors.head", "is a matrix, dimensions", 2, len(stored.shape)
    if m.vocabulary.map_tensor is not None:
        is_same = m.vocabulary.map_tensor == tensors.get("d2t")
        yield "vocabulary.map_tensor", "equals `draft.tensors.d2t`", *_yes(is_same)


def _size_rules(m: Manifest) -> Iterator[_Rule]:
    rows = m.vocabulary.target_vocab_size
    for token in m.vocabulary.forced_ids:
        yield "vocabulary.forced_ids", f"id {token} is in 0..{rows - 1}", *_yes(0 <= token < rows)
    for path, sizes in (
        ("parallel.tensor_parallel_sizes", m.parallel.tensor_parallel_sizes),
        ("graphs.batch_buckets", m.graphs.batch_buckets),
    ):
        wanted = sorted({size for size in sizes if size > 0})
        yield path, "sizes above 0, each once, in ascending order", wanted, list(sizes)
    least = min(m.parallel.layer_bytes, default=0)
    yield "parallel.layer_bytes", f"{least} bytes is 0 or more", *_yes(least >= 0)


def _shape_rules(m: Manifest) -> Iterator[_Rule]:
    yield from _decoder_rules("target.decoder", m.target.decoder)
    yield from _file_rules("target.files", m.target.files, (m.target.embedding, m.target.head))
    num_layers = m.target.decoder.num_layers
    yield (
        "parallel.layer_bytes",
        "one entry per target layer",
        num_layers,
        len(m.parallel.layer_bytes),
    )
    if m.draft is None:
        return
    yield from _decoder_rules("draft.decoder", m.draft.decoder)
    yield from _file_rules("draft.files", m.draft.files, tuple(m.draft.tensors.values()))
    hidden = m.target.decoder.hidden_size
    width = m.draft.target_hidden_size
    yield "draft.target_hidden_size", "target.decoder.hidden_size", hidden, width
    reads_last = m.draft.algorithm in LAST_STATE_DRAFTS
    is_null = m.draft.aux_layer_ids is None
    yield (
        "draft.aux_layer_ids",
        "null for MTP and EAGLE-1, else a list",
        *_yes(reads_last == is_null),
    )
    for layer in m.draft.aux_layer_ids or ():
        is_layer = -1 <= layer < num_layers
        yield "draft.aux_layer_ids", f"id {layer} is in -1..{num_layers - 1}", *_yes(is_layer)


def _decoder_rules(path: str, decoder: Decoder) -> Iterator[_Rule]:
    num_layers = decoder.num_layers
    yield f"{path}.layer_types", "one entry per layer", num_layers, len(decoder.layer_types)
    rest = decoder.num_attention_heads % decoder.num_kv_heads
    yield f"{path}.num_kv_heads", "divides `num_attention_heads`, rest", 0, rest


def _file_rules(
    path: str, files: tuple[WeightFile, ...], tensors: tuple[TensorRef, ...]
) -> Iterator[_Rule]:
    sizes = {file.file: file.size_bytes for file in files}
    for tensor in tensors:
        inside = tensor.begin <= tensor.end <= sizes.get(tensor.file, -1)
        yield path, f"`{tensor.key}` lies inside a listed file, `{tensor.file}`", *_yes(inside)


def _check_fingerprint(manifest: Manifest, name: str) -> Iterator[Diagnostic]:
    expected = fingerprint(
        target=manifest.target,
        draft=manifest.draft,
        geometry=manifest.geometry,
        vocabulary=manifest.vocabulary,
        sampling=manifest.sampling,
    )
    if expected != manifest.fingerprint:
        yield diagnose(
            "SD711",
            where=f"{name}#/fingerprint",
            message="`fingerprint` does not belong to the facts of this manifest",
            expected=expected,
            found=manifest.fingerprint,
        )
