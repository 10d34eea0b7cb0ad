"""The handshake fingerprint: one digest over everything two processes must agree on.

Invariants: it depends on facts alone, never on paths, versions or the order of keys; any change of
a hashed fact changes it. Facts that only a running process knows (kernel table, Triton version, GPU
architecture, tensor-parallel size) are joined to it by the process.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from specctl.contract.manifest import (
    Decoder,
    Draft,
    Geometry,
    Sampling,
    Target,
    Vocabulary,
    WeightFile,
)

_LAYOUT = 1


def fingerprint(
    *,
    target: Target,
    draft: Draft | None,
    geometry: Geometry,
    vocabulary: Vocabulary,
    sampling: Sampling,
) -> str:
    """Return `sha256:<hex>` over algorithm, geometry, maps, aux ids, dtypes, KV layout and digests.

    Args:
        target: its config digest, dtype, decoder and weight headers count.
        draft: the same and the aux layer ids; None for target-only manifests.
        geometry: the widths of a round.
        vocabulary: sizes and map digest; the file a map came from does not count.
        sampling: verification mode.
    """
    facts = {
        "layout": _LAYOUT,
        "target": {
            "config": target.config_digest,
            "dtype": target.dtype,
            "decoder": target.decoder,
            "kv": _kv_layout(target.decoder),
            "eos": target.eos_token_ids,
            "files": _headers(target.files),
        },
        "draft": None if draft is None else _draft_facts(draft),
        "geometry": geometry,
        "vocabulary": {
            "target": vocabulary.target_vocab_size,
            "draft": vocabulary.draft_vocab_size,
            "kind": vocabulary.map_kind,
            "map": vocabulary.map_digest,
        },
        "sampling": sampling,
    }
    return digest_bytes(msgspec.json.encode(facts, order="deterministic"))


def _draft_facts(draft: Draft) -> dict[str, Any]:
    later = {"block": draft.block, "prediction": draft.prediction}  # older digests lack the keys
    return {
        **{name: _stated(facts) for name, facts in later.items() if facts is not None},
        "algorithm": draft.algorithm,
        "config": draft.config_digest,
        "dtype": draft.dtype,
        "decoder": draft.decoder,
        "kv": _kv_layout(draft.decoder),
        "aux": draft.aux_layer_ids,
        "switches": [
            draft.has_fc_bias,
            draft.has_norm_before_residual,
            draft.has_norm_before_fc,
            draft.has_fc_norm,
            draft.has_norm_output,
            draft.has_confidence_head,
            draft.is_confidence_with_markov,
        ],
        "markov": draft.markov,
        "mask": draft.mask_token_id,
        "files": _headers(draft.files),
    }


def _stated(facts: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that are not None: a field that a later version adds changes no digest."""
    fields = msgspec.structs.asdict(facts)
    return {name: value for name, value in fields.items() if value is not None}


def _kv_layout(decoder: Decoder) -> list[int]:
    return [decoder.num_layers, decoder.num_kv_heads, decoder.head_dim]


def _headers(files: tuple[WeightFile, ...]) -> list[list[str | int]]:
    return sorted([file.file, file.size_bytes, file.header_digest] for file in files)


def digest_bytes(data: bytes) -> str:
    """Return `sha256:<hex>` of the bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
