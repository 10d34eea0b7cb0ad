"""Settings: precedence with origins, ranges, contradictions, and the KV budget."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch

from runtime.config import (
    DTYPES,
    Overrides,
    ProposerName,
    RuntimeConfig,
    dtype_name,
    resolve_config,
)
from runtime.config.memory import kv_block_bytes, weight_bytes
from runtime.config.values import DEFAULT_PREFILL_BUCKETS
from runtime.spec import factory
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import load_tiny, tiny_manifest

PLENTY = 1 << 34


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    directory = tmp_path_factory.mktemp("config")
    target = write_tiny_target(directory / "target", num_layers=2)
    draft = write_tiny_eagle3(directory / "draft", target, boundary_ids=(0, 1, 2))
    return tiny_manifest(target, draft)


@pytest.fixture(scope="session")
def target_only(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return tiny_manifest(write_tiny_target(tmp_path_factory.mktemp("plain"), num_layers=2))


def resolve(manifest: Manifest, **given: object) -> RuntimeConfig:
    overrides = Overrides(**{"device": "cpu", **given})  # type: ignore[arg-type]
    return resolve_config(manifest, overrides, free_bytes=PLENTY)


def codes(manifest: Manifest, **given: object) -> list[tuple[str, str]]:
    with pytest.raises(DiagnosticError) as refused:
        resolve(manifest, **given)
    return [(found.code, found.where) for found in refused.value.diagnostics]


def test_every_value_has_an_origin_and_given_wins(manifest: Manifest) -> None:
    config = resolve(manifest, num_speculative_tokens=2, batch_buckets=(3,))
    assert config.num_speculative_tokens == 2
    assert config.batch_buckets == (3,)
    assert config.proposer == "eagle3"
    assert config.max_model_len == 512
    assert config.origins["num_speculative_tokens"] == "given"
    assert config.origins["batch_buckets"] == "given"
    assert config.origins["proposer"] == "manifest"
    assert config.origins["max_model_len"] == "manifest"
    assert config.origins["kv_block_size"] == "default"
    assert config.origins["num_kv_blocks"] == "derived"
    settings = set(RuntimeConfig.__dataclass_fields__) - {"origins", "diagnostics"}
    assert set(config.origins) == settings
    assert resolve(manifest).origins["num_speculative_tokens"] == "manifest"


def test_proposer_names_are_those_of_the_factory() -> None:
    assert get_args(ProposerName) == get_args(factory.ProposerName)


def test_without_a_draft_the_default_is_target_only(target_only: Manifest) -> None:
    config = resolve(target_only)
    assert (config.proposer, config.num_speculative_tokens, config.draft_width) == ("none", 0, 0)
    drafts = resolve(target_only, proposer="ngram")
    assert (drafts.num_speculative_tokens, drafts.origins["num_speculative_tokens"]) == (
        4,
        "default",
    )


def test_zero_drafts_means_no_proposer(manifest: Manifest) -> None:
    config = resolve(manifest, num_speculative_tokens=0)
    assert (config.proposer, config.draft_width, config.diagnostics) == ("none", 0, ())
    given = resolve(manifest, num_speculative_tokens=0, proposer="eagle3")
    assert [found.code for found in given.diagnostics] == ["SD805"]


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"proposer": "none", "num_speculative_tokens": 3}, "num-speculative-tokens"),
        ({"max_ngram": 2}, "max-ngram"),
        ({"num_kv_blocks": 600, "kv_memory_fraction": 0.5}, "kv-memory-fraction"),
        ({"max_num_batched_tokens": 64, "prefill_chunk_size": 65}, "prefill-chunk-size"),
        ({"graphs": "rounds", "prefill_buckets": (8,)}, "prefill-buckets"),
        ({"max_num_requests": 4, "batch_buckets": (4, 8)}, "batch-buckets"),
    ],
)
def test_a_setting_without_effect_is_a_warning(
    manifest: Manifest, given: dict[str, object], setting: str
) -> None:
    found = resolve(manifest, **given).diagnostics
    assert [(item.code, item.severity, item.where) for item in found] == [
        ("SD805", "warning", f"--{setting}")
    ]


@pytest.mark.parametrize(
    ("given", "code", "setting"),
    [
        ({"device": "tpu"}, "SD830", "device"),
        ({"device": "cuda:99"}, "SD830", "device"),
        ({"dtype": "float16"}, "SD809", "dtype"),
        ({"dtype": "int8"}, "SD809", "dtype"),
        ({"proposer": "medusa"}, "SD807", "proposer"),
        ({"kv_block_size": 0}, "SD832", "kv-block-size"),
        ({"proposer": "ngram", "max_ngram": 33}, "SD832", "max-ngram"),
        ({"kv_memory_fraction": 1.5}, "SD832", "kv-memory-fraction"),
        ({"batch_buckets": (0,)}, "SD832", "batch-buckets"),
        ({"prefill_buckets": (16, 0)}, "SD832", "prefill-buckets"),
        ({"num_speculative_tokens": -1}, "SD832", "num-speculative-tokens"),
        ({"max_num_requests": 9, "max_num_batched_tokens": 8}, "SD832", "max-num-batched-tokens"),
        ({"max_model_len": 513}, "SD832", "max-model-len"),
        ({"max_model_len": 100, "num_kv_blocks": 7}, "SD804", "max-model-len"),
        ({"num_speculative_tokens": 512}, "SD832", "num-speculative-tokens"),
        ({"num_speculative_tokens": 512, "proposer": "ngram"}, "SD832", "num-speculative-tokens"),
        ({"num_speculative_tokens": 8, "max_model_len": 8}, "SD832", "num-speculative-tokens"),
        ({"num_speculative_tokens": 10**23}, "SD832", "num-speculative-tokens"),
        ({"num_kv_blocks": 10**23}, "SD832", "num-kv-blocks"),
        ({"num_kv_blocks": 40, "max_num_requests": 40}, "SD832", "max-num-requests"),
        ({"max_num_requests": 10**12}, "SD832", "max-num-requests"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    manifest: Manifest, given: dict[str, object], code: str, setting: str
) -> None:
    assert codes(manifest, **given) == [(code, f"--{setting}")]


def test_a_pool_beyond_the_free_memory_names_what_fits(manifest: Manifest) -> None:
    """The default share of the memory does not bind a number of blocks that was given."""
    block = kv_block_bytes(manifest, torch.float32, kv_block_size=16, with_draft=True)
    free = weight_bytes(manifest, torch.float32, with_draft=True) + 100 * block
    settled = resolve_config(manifest, Overrides(device="cpu", num_kv_blocks=100), free_bytes=free)
    assert settled.num_kv_blocks == 100
    with pytest.raises(DiagnosticError) as refused:
        resolve_config(manifest, Overrides(device="cpu", num_kv_blocks=101), free_bytes=free)
    (found,) = refused.value.diagnostics
    assert (found.code, found.where, found.found) == ("SD832", "--num-kv-blocks", "101")
    assert found.expected == "at most 100, which the free memory holds"


def test_all_wrong_settings_of_a_stage_are_reported_together(manifest: Manifest) -> None:
    found = codes(manifest, device="tpu", proposer="medusa", max_ngram=0)
    assert {code for code, _ in found} == {"SD830", "SD807", "SD832"}


def test_eagle3_needs_its_draft(target_only: Manifest) -> None:
    assert codes(target_only, proposer="eagle3") == [("SD807", "--proposer")]


def test_a_block_draft_limits_the_tokens(manifest: Manifest) -> None:
    """A block of 6 whose anchor is not sampled yields 5."""
    geometry = msgspec.structs.replace(
        manifest.geometry,
        num_speculative_tokens=5,
        draft_block_size=6,
        sample_from_anchor=False,
        draft_width=6,
        verify_width=6,
    )
    block = msgspec.structs.replace(manifest, geometry=geometry)
    assert resolve(block).draft_width == 6
    assert codes(block, num_speculative_tokens=6) == [("SD806", "--num-speculative-tokens")]
    assert resolve(block, num_speculative_tokens=6, proposer="ngram").num_speculative_tokens == 6
    sampled = msgspec.structs.replace(
        block, geometry=msgspec.structs.replace(geometry, sample_from_anchor=True)
    )
    assert resolve(sampled, num_speculative_tokens=6).draft_width == 6


def test_a_draft_with_a_shorter_context_is_reported(manifest: Manifest) -> None:
    assert manifest.draft is not None
    decoder = msgspec.structs.replace(manifest.draft.decoder, max_position_embeddings=100)
    short = msgspec.structs.replace(
        manifest, draft=msgspec.structs.replace(manifest.draft, decoder=decoder)
    )
    assert [found.code for found in resolve(short).diagnostics] == ["SD808"]
    assert resolve(short, max_model_len=100).diagnostics == ()
    assert resolve(short, proposer="none").diagnostics == ()


def test_the_pool_holds_what_the_budget_allows(manifest: Manifest) -> None:
    weights = weight_bytes(manifest, torch.float32, with_draft=True)
    block = kv_block_bytes(manifest, torch.float32, kv_block_size=16, with_draft=True)
    assert block == (2 + 1) * 2 * 2 * 16 * 8 * 4  # layers, k and v, heads, tokens, head_dim, bytes
    overrides = Overrides(device="cpu", kv_memory_fraction=1.0)
    config = resolve_config(manifest, overrides, free_bytes=weights + 9 * block)
    assert config.num_kv_blocks == 9
    assert (config.max_model_len, config.origins["max_model_len"]) == (128, "derived")
    assert [found.code for found in config.diagnostics] == ["SD833"]
    with pytest.raises(DiagnosticError, match="SD804"):
        resolve_config(
            manifest,
            Overrides(device="cpu", kv_memory_fraction=1.0, max_model_len=129),
            free_bytes=weights + 9 * block,
        )
    with pytest.raises(DiagnosticError, match="SD804"):
        resolve_config(manifest, overrides, free_bytes=weights)
    assert resolve(manifest, max_num_requests=3).num_kv_blocks == 1 + 3 * 512 // 16


def test_weight_bytes_follow_the_running_type(manifest: Manifest) -> None:
    stored = weight_bytes(manifest, torch.bfloat16, with_draft=True)
    assert weight_bytes(manifest, torch.float32, with_draft=True) == 2 * stored
    assert weight_bytes(manifest, torch.bfloat16, with_draft=False) < stored


def test_kv_block_bytes_match_the_loaded_models(manifest: Manifest) -> None:
    models = load_tiny(manifest)
    assert models.draft is not None
    specs = (*models.target.kv_specs, *models.draft.kv_specs)
    assert kv_block_bytes(manifest, torch.float32, kv_block_size=16, with_draft=True) == sum(
        spec.block_bytes(16, torch.float32) for spec in specs
    )


def test_one_full_round_of_every_request_fits_by_default(manifest: Manifest) -> None:
    config = resolve(manifest, max_num_requests=200)
    assert config.max_num_batched_tokens == 200 * 5
    assert config.prefill_chunk_size == config.max_num_batched_tokens


def test_memory_is_asked_for_when_not_given(manifest: Manifest, tmp_path: Path) -> None:
    config = resolve_config(manifest, Overrides(device="cpu", max_num_requests=1))
    assert config.num_kv_blocks == 1 + 512 // 16


@pytest.mark.parametrize(
    ("given", "buckets"),
    [
        ({}, DEFAULT_PREFILL_BUCKETS),
        ({"prefill_buckets": (16,)}, (16,)),
        ({"prefill_buckets": ()}, ()),
        ({"graphs": "rounds"}, ()),
        ({"graphs": "off"}, ()),
    ],
)
def test_prefills_that_are_captured(
    manifest: Manifest, given: dict[str, object], buckets: tuple[int, ...]
) -> None:
    config = resolve(manifest, **given)
    assert config.prefill_buckets == buckets
    assert config.diagnostics == ()


@pytest.mark.parametrize(("name", "dtype"), DTYPES.items(), ids=DTYPES)
def test_dtypes_are_told_by_the_names_that_settings_have(name: str, dtype: torch.dtype) -> None:
    assert dtype_name(dtype) == name
