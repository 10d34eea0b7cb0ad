"""A target with random weights from nothing but its config.json: speed without a download.

The weights are made on the device. Matrices are drawn so that rows keep their size (deviation
1 / sqrt(inputs)), norms are near 1: activations stay finite and every product works on full-sized
numbers, never on zeros. What such a target writes means nothing; that two ways of decoding it agree
does.

*Source:* Hugging Face config.json of the families llama, mistral, qwen2 and qwen3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.loading import LoadedModels
from runtime.models import TargetModel, target_problems, target_shapes
from specctl.contract.codec import fingerprint
from specctl.contract.diagnostics import DiagnosticError, diagnose
from specctl.contract.fingerprint import digest_bytes
from specctl.contract.manifest import (
    SCHEMA_VERSION,
    Decoder,
    Geometry,
    Graphs,
    Manifest,
    Origin,
    Parallel,
    Rope,
    Sampling,
    Target,
    TensorRef,
    Vocabulary,
)

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STORED_BYTES = 2  # as published: BF16
_REPORTED = ("target", "geometry", "vocabulary", "parallel", "graphs", "sampling")


def shape_manifest(path: Path) -> Manifest:
    """Return the manifest of a target that exists as a config.json only.

    Raises:
        DiagnosticError: SD117 (not JSON), SD203 (family), SD206 and SD207 (fields), and what
            `target_problems` finds.
    """
    config = _read(path)
    target = _target(config, path)
    problems = target_problems(target)
    if problems:
        raise DiagnosticError(problems)
    sizes = _role_bytes(target)
    geometry = Geometry(
        num_speculative_tokens=0,
        draft_width=0,
        verify_width=1,
        sample_from_anchor=None,
        draft_block_size=None,
    )
    vocabulary = Vocabulary(
        target_vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        map_kind="identity",
        map_tensor=None,
        map_digest=None,
        token_map_file=None,
        token_map_digest=None,
        forced_ids=(),
    )
    sampling = Sampling(verification="seeded")
    return Manifest(
        schema_version=SCHEMA_VERSION,
        specctl_version="0",
        target=target,
        draft=None,
        geometry=geometry,
        vocabulary=vocabulary,
        sharing=None,
        parallel=Parallel(
            embedding_bytes=sizes["embedding"],
            head_bytes=sizes["embedding"],
            layer_bytes=tuple(
                sum(size for role, size in sizes.items() if role.startswith(f"layers.{index}."))
                for index in range(target.decoder.num_layers)
            ),
            draft_bytes=0,
            tensor_parallel_sizes=(1,),
        ),
        graphs=Graphs(batch_buckets=_BATCH_BUCKETS),
        sampling=sampling,
        diagnostics=(),
        fingerprint=fingerprint(
            target=target, draft=None, geometry=geometry, vocabulary=vocabulary, sampling=sampling
        ),
        origins={name: Origin(kind="given", where=path.name) for name in _REPORTED},
    )


def random_models(
    manifest: Manifest, *, device: torch.device, dtype: torch.dtype, seed: int
) -> LoadedModels:
    """Return the target with random weights made on `device`, the same for the same arguments."""
    facts = manifest.target
    shapes = target_shapes(facts)
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(role: str) -> torch.Tensor:
        shape = shapes[role]
        noise = torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator)
        if len(shape) == 1:
            return noise.mul_(0.1) if role.endswith("bias") else noise.mul_(0.1).add_(1.0)
        return noise if role == "embedding" else noise.mul_(shape[-1] ** -0.5)

    return LoadedModels(target=TargetModel.build(facts, draw), draft=None, diagnostics=())


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _refused("SD117", path.name, f"the config cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise _refused("SD117", path.name, "the config is not a JSON object")
    return config


class _Fields:
    """Fields of a config, each of a known type."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        self._config = config
        self._name = name

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self._config.get(key)
        if value is None:
            value = default
        if value is None:
            raise _refused("SD206", f"{self._name}#/{key}", f"`{key}` is not in the config")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            where = f"{self._name}#/{key}"
            raise _refused("SD207", where, f"`{key}` is not a number above 0", found=value)
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0."""
        value = self.number(key, default)
        if value != int(value):
            where = f"{self._name}#/{key}"
            raise _refused("SD207", where, f"`{key}` is not a whole number", found=value)
        return int(value)


def _target(config: Mapping[str, Any], path: Path) -> Target:
    decoder = _decoder(config, path)
    target_vocab_size = _Fields(config, path.name).count("vocab_size")
    is_tied = bool(config.get("tie_word_embeddings", False))
    shape = (target_vocab_size, decoder.hidden_size)
    size = target_vocab_size * decoder.hidden_size * _STORED_BYTES
    embedding = TensorRef(
        key="model.embed_tokens.weight", file="none", shape=shape, dtype="BF16", begin=0, end=size
    )
    head = TensorRef(
        key="lm_head.weight", file="none", shape=shape, dtype="BF16", begin=0, end=size
    )
    return Target(
        source=path.name,
        revision=None,
        architecture=f"random weights, {decoder.family}",
        config_digest=digest_bytes(path.read_bytes()),
        dtype="BF16",
        decoder=decoder,
        vocab_size=target_vocab_size,
        tokenizer_size=None,
        tokenizer_digest=None,
        bos_token_id=None,
        eos_token_ids=(),
        embedding=embedding,
        head=embedding if is_tied else head,
        is_head_tied=is_tied,
        files=(),
    )


def _decoder(config: Mapping[str, Any], path: Path) -> Decoder:
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise _refused(
            "SD203",
            f"{path.name}#/model_type",
            f"there is no arithmetic for `{family}`",
            expected=", ".join(_FAMILIES),
            found=family,
        )
    fields = _Fields(config, path.name)
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    num_layers = fields.count("num_hidden_layers")
    has_bias = bool(config.get("attention_bias", False))
    return Decoder(
        family=family,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads),
        head_dim=fields.count("head_dim", hidden // heads),
        hidden_act=str(config.get("hidden_act", "silu")),
        rms_norm_eps=fields.number("rms_norm_eps"),
        has_qkv_bias=has_bias or family == "qwen2",
        has_o_bias=has_bias,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_qk_norm=family == "qwen3",
        rope=_rope(config, fields),
        max_position_embeddings=fields.count("max_position_embeddings"),
        layer_types=("full_attention",) * num_layers,
        sliding_window=None,
    )


def _rope(config: Mapping[str, Any], fields: _Fields) -> Rope:
    """Return the rotary numbers; newer configs hold all of them in `rope_parameters`."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = str(scaling.pop("rope_type", scaling.pop("type", "default")))
    theta = scaling.pop("rope_theta", None)
    return Rope(
        theta=fields.number("rope_theta") if theta is None else float(theta),
        kind=kind,
        parameters=scaling,
    )


def _role_bytes(target: Target) -> dict[str, int]:
    shapes = target_shapes(target)
    return {role: math.prod(shape) * _STORED_BYTES for role, shape in shapes.items()}


def _refused(
    code: str, where: str, message: str, *, expected: object = None, found: object = None
) -> DiagnosticError:
    return DiagnosticError(
        diagnose(code, where=where, message=message, expected=expected, found=found)
    )
