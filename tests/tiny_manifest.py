"""Manifests of the tiny checkpoints, written field by field, and the models they load to.

Independent of `specctl.formats` on purpose: runtime tests state the facts themselves.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from runtime.loading import LoadedModels, load_models
from specctl.contract.codec import dump_manifest, fingerprint
from specctl.contract.digests import header_digest
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import (
    SCHEMA_VERSION,
    Decoder,
    Draft,
    Geometry,
    Graphs,
    Manifest,
    Origin,
    Parallel,
    Rope,
    Sampling,
    Sharing,
    Target,
    TensorRef,
    Vocabulary,
    WeightFile,
)
from specctl.contract.vocabulary_map import map_digest, offsets_to_absolute
from tests.tiny import BOS_ID, EOS_ID, TOKENIZER_SIZE

CPU = torch.device("cpu")
_SECTIONS = (
    "target", "draft", "geometry", "vocabulary", "sharing", "parallel", "graphs", "sampling"
)  # fmt: skip
_LAYER_ROLES = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_attention_norm",
    "hidden_norm.weight": "hidden_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}
_DRAFT_ROLES = {
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "norm.weight": "norm",
    "input_norm.weight": "input_norm",
}


def load_tiny(
    manifest: Manifest,
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    with_draft: bool = True,
) -> LoadedModels:
    """Load a manifest of `tiny_manifest`, whose sources are absolute paths."""
    return load_models(manifest, Path("/"), device=device, dtype=dtype, with_draft=with_draft)


def write_manifest(directory: Path, manifest: Manifest) -> Path:
    """Write `manifest.yaml` into the directory and return its path."""
    path = directory / "manifest.yaml"
    path.write_text(dump_manifest(manifest), encoding="utf-8")
    return path


def tiny_manifest(
    target_dir: Path, draft_dir: Path | None = None, *, num_speculative_tokens: int = 4
) -> Manifest:
    """Return the manifest of a tiny target and its EAGLE-3 draft (None: target only)."""
    target = _target(target_dir)
    draft = None if draft_dir is None else _draft(draft_dir)
    gamma = 0 if draft is None else num_speculative_tokens
    geometry = Geometry(
        num_speculative_tokens=gamma,
        draft_width=0 if draft is None else 1,
        verify_width=gamma + 1,
        sample_from_anchor=None,
        draft_block_size=None,
    )
    vocabulary = _vocabulary(target, draft, draft_dir)
    sampling = Sampling(verification="seeded")
    return Manifest(
        schema_version=SCHEMA_VERSION,
        specctl_version="0.1.0",
        target=target,
        draft=draft,
        geometry=geometry,
        vocabulary=vocabulary,
        sharing=None if draft is None else _sharing(draft),
        parallel=Parallel(
            embedding_bytes=_num_bytes(target.embedding),
            head_bytes=_num_bytes(target.head),
            layer_bytes=(1,) * target.decoder.num_layers,
            draft_bytes=0 if draft is None else sum(map(_num_bytes, draft.tensors.values())),
            tensor_parallel_sizes=(1,),
        ),
        graphs=Graphs(batch_buckets=(1, 2, 4, 8)),
        sampling=sampling,
        diagnostics=(),
        fingerprint=fingerprint(
            target=target,
            draft=draft,
            geometry=geometry,
            vocabulary=vocabulary,
            sampling=sampling,
        ),
        origins={name: Origin(kind="given", where="tests/tiny.py") for name in _SECTIONS},
    )


def _target(directory: Path) -> Target:
    config = _read_json(directory / "config.json")
    tensors = tensor_refs(directory)
    embedding = tensors["model.embed_tokens.weight"]
    is_tied = bool(config["tie_word_embeddings"])
    return Target(
        source=str(directory),
        revision=None,
        architecture=config["architectures"][0],
        config_digest=digest_bytes((directory / "config.json").read_bytes()),
        dtype=embedding.dtype,
        decoder=_decoder(config, tensors, "model.layers.", config["num_hidden_layers"]),
        vocab_size=embedding.shape[0],
        tokenizer_size=TOKENIZER_SIZE,
        tokenizer_digest=digest_bytes((directory / "tokenizer.json").read_bytes()),
        bos_token_id=BOS_ID,
        eos_token_ids=(EOS_ID,),
        embedding=embedding,
        head=embedding if is_tied else tensors["lm_head.weight"],
        is_head_tied=is_tied,
        files=_files(directory),
    )


def _draft(directory: Path) -> Draft:
    config = _read_json(directory / "config.json")
    layer_config = config["transformer_layer_config"]
    tensors = tensor_refs(directory)
    return Draft(
        format="speculators-eagle3",
        algorithm="eagle3",
        source=str(directory),
        revision=None,
        architecture=config["architectures"][0],
        config_digest=digest_bytes((directory / "config.json").read_bytes()),
        dtype=tensors["norm.weight"].dtype,
        decoder=_decoder(layer_config, tensors, "layers.", layer_config["num_hidden_layers"]),
        target_hidden_size=config["target_hidden_size"],
        aux_layer_ids=tuple(k - 1 for k in config["eagle_aux_hidden_state_layer_ids"]),
        aux_numbering="boundary",
        has_fc_bias="fc.bias" in tensors,
        has_norm_before_residual=config["norm_before_residual"],
        has_norm_before_fc=config["norm_before_fc"],
        has_fc_norm=config["fc_norm"],
        has_norm_output=config["norm_output"],
        mask_token_id=None,
        markov=None,
        has_confidence_head=False,
        is_confidence_with_markov=False,
        tensors={_draft_role(key): ref for key, ref in tensors.items()},
        files=_files(directory),
    )


def _decoder(
    config: Mapping[str, Any], tensors: Mapping[str, TensorRef], prefix: str, num_layers: int
) -> Decoder:
    rope = dict(config["rope_parameters"])
    family = config["model_type"]
    window = config.get("sliding_window")
    first_sliding = config.get("max_window_layers", 0 if family == "mistral" else num_layers)
    slides = [window is not None and index >= first_sliding for index in range(num_layers)]
    return Decoder(
        family=family,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=num_layers,
        num_attention_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        hidden_act=config["hidden_act"],
        rms_norm_eps=config["rms_norm_eps"],
        has_qkv_bias=f"{prefix}0.self_attn.q_proj.bias" in tensors,
        has_o_bias=f"{prefix}0.self_attn.o_proj.bias" in tensors,
        has_mlp_bias=f"{prefix}0.mlp.up_proj.bias" in tensors,
        has_qk_norm=f"{prefix}0.self_attn.q_norm.weight" in tensors,
        rope=Rope(kind=rope.pop("rope_type"), theta=rope.pop("rope_theta"), parameters=rope),
        max_position_embeddings=config["max_position_embeddings"],
        layer_types=tuple("sliding_attention" if s else "full_attention" for s in slides),
        sliding_window=window if any(slides) else None,
    )


def _vocabulary(target: Target, draft: Draft | None, draft_dir: Path | None) -> Vocabulary:
    d2t = None if draft is None else draft.tensors.get("d2t")
    digest = None
    if d2t is not None and draft_dir is not None:
        offsets = load_file(draft_dir / d2t.file)[d2t.key].tolist()
        digest = map_digest(offsets_to_absolute(offsets))
    return Vocabulary(
        target_vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size if d2t is None else d2t.shape[0],
        map_kind="identity" if d2t is None else "reduced",
        map_tensor=d2t,
        map_digest=digest,
        token_map_file=None,
        token_map_digest=None,
        forced_ids=() if d2t is None else (EOS_ID,),
    )


def _sharing(draft: Draft) -> Sharing:
    has_own = "embedding" in draft.tensors
    return Sharing(
        embedding_single_stage="own" if has_own else "target",
        embedding_multi_stage="own" if has_own else "checkpoint",
        head="own" if "head" in draft.tensors else "target",
    )


def _draft_role(key: str) -> str:
    if key in _DRAFT_ROLES:
        return _DRAFT_ROLES[key]
    if key.startswith("fc_norm."):
        return key.removesuffix(".weight")
    if not key.startswith("layers."):
        return key
    _, index, name = key.split(".", 2)
    return f"layers.{index}." + _LAYER_ROLES.get(name, name.split(".", 1)[1])


def tensor_refs(directory: Path) -> dict[str, TensorRef]:
    """Return what the directory's safetensors headers say, by key."""
    found: dict[str, TensorRef] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        for key, entry in header.items():
            begin, end = (offset + 8 + length for offset in entry["data_offsets"])
            found[key] = TensorRef(
                key=key,
                file=path.name,
                shape=tuple(entry["shape"]),
                dtype=entry["dtype"],
                begin=begin,
                end=end,
            )
    return found


def _files(directory: Path) -> tuple[WeightFile, ...]:
    return tuple(
        WeightFile(
            file=path.name,
            size_bytes=path.stat().st_size,
            header_digest=header_digest(path) or "",
        )
        for path in sorted(directory.glob("*.safetensors"))
    )


def _num_bytes(ref: TensorRef) -> int:
    return ref.end - ref.begin


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value
