"""The sections of a manifest that follow from others: vocabulary, parallel, origins, paths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from specctl.checkpoint import is_hub_source
from specctl.contract.consistency import origin_paths
from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import (
    Geometry,
    Manifest,
    Origin,
    Parallel,
    Target,
    TensorRef,
    Vocabulary,
)
from specctl.contract.padding_rows import has_token_rows, misses_row
from specctl.contract.vocabulary_map import map_digest
from specctl.draft import DraftCheckpoint, TargetCheckpoint
from specctl.ops.token_map_file import TokenMap

NO_DRAFT_GEOMETRY = Geometry(
    num_speculative_tokens=0,
    draft_width=0,
    verify_width=1,
    sample_from_anchor=None,
    draft_block_size=None,
)
_TARGET_ONLY = Origin(kind="derived", where="no draft", rule="target-only decoding is gamma = 0")
NO_DRAFT_ORIGINS: Mapping[str, Origin] = dict.fromkeys(
    ("draft", "geometry", "vocabulary", "sharing"), _TARGET_ONLY
)


def _rule(where: str, rule: str) -> Origin:
    return Origin(kind="derived", where=where, rule=rule)


TARGET_ROWS = _rule("target.vocab_size", "rows of the target's embedding")
RULE_ORIGINS: Mapping[str, Origin] = {
    "geometry": _rule("geometry.num_speculative_tokens", "widths follow from the token count"),
    "vocabulary": _rule("draft", "the draft's vocabularies and map"),
    "vocabulary.forced_ids": _rule("target.eos_token_ids", "end ids that the map contains"),
    "sharing": _rule("draft.tensors", "a tensor the draft does not have is the target's"),
    "parallel": _rule("tensor headers", "stored bytes; divisors common to all split dimensions"),
    "graphs": _rule("specctl", "default buckets: powers of two up to 32"),
    "sampling": _rule("specctl", "seeded unless given"),
}


def portable_path(source: str, directory: Path) -> str:
    """Return a source as the manifest writes it: relative inside its directory, else absolute.

    A hub source stays as it is.
    """
    if is_hub_source(source):
        return source
    path = Path(source).expanduser().resolve()
    if path.is_relative_to(directory):
        return path.relative_to(directory).as_posix()
    return str(path)


def vocabulary_section(
    target: Target,
    draft: DraftCheckpoint | None,
    *,
    draft_source: str,
    token_map: TokenMap | None,
    directory: Path,
) -> tuple[Vocabulary, tuple[Diagnostic, ...]]:
    """Return the section, and SD411 or SD402 for a head that lacks rows of its ids.

    Args:
        target: the finished section.
        draft: facts without errors, None for a target-only manifest.
        draft_source: the draft as the user wrote it, for places.
        token_map: map given by the user.
        directory: where the manifest will stand.
    """
    size = target.vocab_size
    ids: tuple[int, ...] | None = None
    map_tensor: TensorRef | None = None
    if token_map is not None:
        ids = token_map.ids_target
    elif draft is not None and draft.map_kind == "reduced":
        ids = draft.draft_to_target
        map_tensor = draft.tensors.get("d2t")
    problems: tuple[Diagnostic, ...] = ()
    if draft is not None:
        problems = _lacking_rows(draft, draft_source, target, ids)
    section = Vocabulary(
        target_vocab_size=size,
        draft_vocab_size=size if ids is None else len(ids),
        map_kind="identity" if ids is None else "reduced",
        map_tensor=map_tensor,
        map_digest=None if ids is None else map_digest(ids),
        token_map_file=None if token_map is None else portable_path(token_map.path, directory),
        token_map_digest=None if token_map is None else token_map.digest,
        forced_ids=()
        if ids is None
        else tuple(sorted(frozenset(target.eos_token_ids) & frozenset(ids))),
    )
    return section, problems


def _lacking_rows(
    draft: DraftCheckpoint, source: str, target: Target, ids: tuple[int, ...] | None
) -> tuple[Diagnostic, ...]:
    """Return SD411 or SD402 for a head of its own without a row for each id that it stands for."""
    head = draft.tensors.get("head")
    if head is None:
        return ()
    rows, where = head.shape[0], f"{source}/{head.file}::{head.key}"
    if ids is None:
        if has_token_rows(rows, target.vocab_size, target.tokenizer_size):
            return ()
        return (
            diagnose(
                "SD411",
                where=where,
                message=f"the draft's head has {rows} rows and no map, the target's "
                f"{target.vocab_size}",
                expected=target.vocab_size,
                found=rows,
            ),
        )
    highest = max(ids, default=-1)
    if not misses_row(rows, len(ids), highest):
        return ()
    return (
        diagnose(
            "SD402",
            where=where,
            message=f"the map reaches target id {highest}, and the draft's head has {rows} rows",
            expected=f"ids below {rows}",
            found=highest,
        ),
    )


def parallel_section(
    target: TargetCheckpoint, draft: DraftCheckpoint | None, vocabulary: Vocabulary
) -> Parallel:
    """Return stored bytes for a stage split, and the tensor-parallel sizes that divide everything.

    A tied head is counted as well: the last stage holds its own copy.
    """
    embedding, head = target.embedding, target.head
    return Parallel(
        embedding_bytes=0 if embedding is None else embedding.end - embedding.begin,
        head_bytes=0 if head is None else head.end - head.begin,
        layer_bytes=_layer_bytes(target),
        draft_bytes=0 if draft is None else sum(r.end - r.begin for r in draft.tensors.values()),
        tensor_parallel_sizes=tensor_parallel_sizes(target, draft, vocabulary),
    )


def _layer_bytes(target: TargetCheckpoint) -> tuple[int, ...]:
    sizes = [0] * (0 if target.decoder is None else target.decoder.num_layers)
    for role, ref in target.tensors.items():
        parts = role.split(".")
        if parts[0] == "layers":
            sizes[int(parts[1])] += ref.end - ref.begin
    return tuple(sizes)


def tensor_parallel_sizes(
    target: TargetCheckpoint, draft: DraftCheckpoint | None, vocabulary: Vocabulary
) -> tuple[int, ...]:
    """Return every size that divides the heads, KV heads, intermediate sizes and head rows."""
    dimensions = [vocabulary.target_vocab_size, vocabulary.draft_vocab_size]
    for decoder in (target.decoder, None if draft is None else draft.decoder):
        if decoder is not None:
            dimensions += [
                decoder.num_attention_heads,
                decoder.num_kv_heads,
                decoder.intermediate_size,
            ]
    common = math.gcd(*dimensions)
    return tuple(size for size in range(1, common + 1) if common % size == 0)


def kept_origins(manifest: Manifest) -> Manifest:
    """Return the manifest without origins of facts that it does not carry (an open fact's, say)."""
    known = origin_paths(manifest)
    origins = {path: origin for path, origin in manifest.origins.items() if path in known}
    return msgspec.structs.replace(manifest, origins=origins)
