"""One small manifest with a draft, and the parts to change it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from specctl.contract.codec import fingerprint
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

_DIGEST = "sha256:" + "0" * 64
_FILE = WeightFile(file="model.safetensors", size_bytes=100_000, header_digest=_DIGEST)
SECTIONS = (
    "target", "draft", "geometry", "vocabulary", "sharing", "parallel", "graphs", "sampling"
)  # fmt: skip


def _tensor(key: str, shape: tuple[int, ...], dtype: str = "BF16") -> TensorRef:
    return TensorRef(
        key=key, file="model.safetensors", shape=shape, dtype=dtype, begin=100, end=164
    )


def _decoder(num_layers: int) -> Decoder:
    return Decoder(
        family="llama",
        hidden_size=16,
        intermediate_size=32,
        num_layers=num_layers,
        num_attention_heads=4,
        num_kv_heads=2,
        head_dim=4,
        hidden_act="silu",
        rms_norm_eps=1e-05,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        rope=Rope(theta=10000.0, kind="yarn", parameters={"factor": 8.0, "low": 1, "long": [1.0]}),
        max_position_embeddings=128,
        layer_types=("full_attention",) * num_layers,
        sliding_window=None,
    )


def _target() -> Target:
    return Target(
        source="target",
        revision=None,
        architecture="LlamaForCausalLM",
        config_digest=_DIGEST,
        dtype="BF16",
        decoder=_decoder(2),
        vocab_size=64,
        tokenizer_size=None,
        tokenizer_digest=None,
        bos_token_id=1,
        eos_token_ids=(2,),
        embedding=_tensor("model.embed_tokens.weight", (64, 16)),
        head=_tensor("lm_head.weight", (64, 16)),
        is_head_tied=False,
        files=(_FILE,),
    )


def _draft() -> Draft:
    return Draft(
        format="speculators-eagle3",
        algorithm="eagle3",
        source="draft",
        revision=None,
        architecture="Eagle3DraftModel",
        config_digest=_DIGEST,
        dtype="BF16",
        decoder=_decoder(1),
        target_hidden_size=16,
        aux_layer_ids=(-1, 0, 1),
        aux_numbering="boundary",
        has_fc_bias=False,
        has_norm_before_residual=False,
        has_norm_before_fc=False,
        has_fc_norm=False,
        has_norm_output=False,
        mask_token_id=None,
        markov=None,
        has_confidence_head=False,
        is_confidence_with_markov=False,
        tensors={
            "d2t": _tensor("d2t", (24,), "I64"),
            "fc": _tensor("fc.weight", (16, 48)),
            "head": _tensor("lm_head.weight", (24, 16)),
            "layers.0.q_proj.weight": _tensor("layers.0.self_attn.q_proj.weight", (16, 32)),
        },
        files=(_FILE,),
    )


def seal(manifest: Manifest) -> Manifest:
    """Return the manifest with the fingerprint of its facts."""
    return msgspec.structs.replace(
        manifest,
        fingerprint=fingerprint(
            target=manifest.target,
            draft=manifest.draft,
            geometry=manifest.geometry,
            vocabulary=manifest.vocabulary,
            sampling=manifest.sampling,
        ),
    )


def build_manifest() -> Manifest:
    """Return a complete manifest of a tiny target with a tiny EAGLE-3 draft."""
    return seal(
        Manifest(
            schema_version=SCHEMA_VERSION,
            specctl_version="0.1.0",
            target=_target(),
            draft=_draft(),
            geometry=Geometry(
                num_speculative_tokens=3,
                draft_width=1,
                verify_width=4,
                sample_from_anchor=None,
                draft_block_size=None,
            ),
            vocabulary=Vocabulary(
                target_vocab_size=64,
                draft_vocab_size=24,
                map_kind="reduced",
                map_tensor=_tensor("d2t", (24,), "I64"),
                map_digest=_DIGEST,
                token_map_file=None,
                token_map_digest=None,
                forced_ids=(2,),
            ),
            sharing=Sharing(
                embedding_single_stage="target", embedding_multi_stage="checkpoint", head="own"
            ),
            parallel=Parallel(
                embedding_bytes=2048,
                head_bytes=2048,
                layer_bytes=(100, 100),
                draft_bytes=300,
                tensor_parallel_sizes=(1, 2),
            ),
            graphs=Graphs(batch_buckets=(1, 2, 4)),
            sampling=Sampling(verification="seeded"),
            diagnostics=(),
            fingerprint="",
            origins={name: Origin(kind="read", where="config.json#") for name in SECTIONS},
        )
    )


@pytest.fixture
def manifest() -> Manifest:
    """A complete manifest of a tiny target with a tiny EAGLE-3 draft."""
    return build_manifest()


@pytest.fixture(scope="session")
def manifest_parts() -> Manifest:
    """The same value, shared by all examples of a property test."""
    return build_manifest()


@pytest.fixture(name="seal")
def seal_function() -> Callable[[Manifest], Manifest]:
    """The function that sets the fingerprint of a manifest."""
    return seal
