"""Quantised weights: what belongs to what, on tables of names and shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from specctl.checkpoint import TensorEntry
from specctl.checks.quantization import Stored, check_inheritance, check_quantization
from specctl.checks.quantization_facts import declared_beside, declared_in_config
from specctl.formats.eagle.eagle3 import SPECULATORS_NAMES
from tests.unit.specctl.formats.edits import codes, draft, opened

Q = "layers.0.self_attn.q_proj"
FP8 = {"quant_method": "fp8"}


def stored(
    shapes: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, object] | None = None,
    *,
    side: Mapping[str, object] | None = None,
    draft_keys: frozenset[str] = frozenset(),
) -> Stored:
    tensors = {
        key: TensorEntry(key=key, file="m", dtype=dtype, shape=shape, begin=0, end=math.prod(shape))
        for key, (dtype, shape) in shapes.items()
    }
    method = {"quantization_config": FP8} if config is None else config
    return Stored(config=method, side=side, tensors=tensors, draft_keys=draft_keys)


def found(table: Stored) -> list[str]:
    return codes(tuple(check_quantization(table)))


@pytest.mark.parametrize(
    ("suffix", "shape", "method"),
    [
        ("weight_scale", (), FP8),
        ("weight_scale", (1,), FP8),
        ("weight_scale", (256,), FP8),
        ("weight_scale", (256, 1), FP8),
        ("weight_scale_inv", (2, 4), {**FP8, "weight_block_size": [128, 128]}),
        ("weight_scale_inv", (2, 4), FP8),
        ("scale", (2, 4), FP8),
    ],
)
def test_scales_of_a_tensor_of_rows_and_of_blocks(
    suffix: str, shape: tuple[int, ...], method: Mapping[str, object]
) -> None:
    table = {f"{Q}.weight": ("F8_E4M3", (256, 512)), f"{Q}.{suffix}": ("F32", shape)}
    assert found(stored(table, {"quantization_config": method})) == []


@pytest.mark.parametrize("shape", [(3,), (512,), (3, 5), (2, 3), (2, 4, 1)])
def test_a_scale_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    method = {"quantization_config": {**FP8, "weight_block_size": [128, 128]}}
    table = {f"{Q}.weight": ("F8_E4M3", (256, 512)), f"{Q}.weight_scale_inv": ("F32", shape)}
    (finding,) = check_quantization(stored(table, method))
    assert (finding.code, finding.expected) == ("SD513", "[2, 4]")


def test_packed_weights_count_two_columns_a_byte() -> None:
    method = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    table = {
        f"{Q}.weight": ("U8", (256, 256)),
        f"{Q}.weight_scale": ("F8_E4M3", (256, 32)),
        f"{Q}.weight_scale_2": ("F32", ()),
        f"{Q}.input_scale": ("F32", ()),
    }
    assert found(stored(table, method)) == []
    assert found(stored({k: v for k, v in table.items() if k != f"{Q}.weight"}, method)) == [
        "SD512"
    ]


def test_groups_of_compressed_tensors() -> None:
    group = {"weights": {"num_bits": 4, "group_size": 16}, "targets": ["Linear"]}
    method = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    table = {f"{Q}.weight_packed": ("U8", (256, 256)), f"{Q}.weight_scale": ("F8_E4M3", (256, 32))}
    assert found(stored(table, {"quantization_config": method})) == []
    wrong = {**table, f"{Q}.weight_scale": ("F8_E4M3", (256, 16))}
    assert found(stored(wrong, {"quantization_config": method})) == ["SD513"]
    (declared,) = declared_in_config({"quantization_config": method})
    assert declared.block == (1, 16)


def test_layouts_whose_shapes_say_nothing_are_not_measured() -> None:
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    packed = {f"{Q}.weight_packed": ("I32", (256, 64)), f"{Q}.weight_scale": ("BF16", (256, 16))}
    assert found(stored(packed, {"quantization_config": method})) == []
    flat = {f"{Q}.weight": ("U8", (65536, 1)), f"{Q}.weight.absmax": ("F32", (2048,))}
    assert found(stored(flat, {"quantization_config": {"quant_method": "bitsandbytes"}})) == []


def test_named_targets_leave_other_modules_plain() -> None:
    group = {"targets": ["re:.*experts.*"], "weights": {"num_bits": 8}}
    method = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    plain = {f"{Q}.weight": ("BF16", (256, 512))}
    assert found(stored(plain, {"quantization_config": method})) == []
    assert found(stored(plain)) == ["SD514"]


def test_a_text_config_may_hold_the_statement() -> None:
    table = {f"{Q}.weight": ("F8_E4M3", (8, 8)), f"{Q}.weight_scale": ("F32", ())}
    assert found(stored(table, {"text_config": {"quantization_config": FP8}})) == []
    assert found(stored(table, {})) == ["SD515"]


def test_the_side_file_alone_declares_too() -> None:
    side = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    table = {f"{Q}.weight": ("F8_E4M3", (8, 8)), f"{Q}.weight_scale": ("F32", ())}
    assert found(stored(table, {}, side=side)) == []
    declared = declared_beside(side)
    assert declared is not None
    assert declared.ignore == ("lm_head",)
    both = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    assert "SD517" in found(stored(table, both, side=side))


def test_sglang_35797_a_fused_name_over_parts() -> None:
    parts = {f"layers.0.self_attn.{name}.weight": ("BF16", (8, 8)) for name in ("q_proj", "k_proj")}
    method = {**FP8, "ignored_layers": ["layers.0.self_attn.qkv_proj"]}
    table = stored(parts, {"quantization_config": method})
    assert found(table) == ["SD514", "SD516"]
    (entry,) = [d for d in check_quantization(table) if d.code == "SD516"]
    assert entry.where == "config.json#/quantization_config/ignored_layers/0"
    assert "layers.0.self_attn.q_proj" in str(entry.expected)
    fused = {"layers.0.self_attn.qkv_proj.weight": ("BF16", (8, 8))}
    method = {**FP8, "ignored_layers": ["layers.0.self_attn.q_proj"]}
    assert "SD516" in found(stored(fused, {"quantization_config": method}))


def test_vllm_26402_the_prediction_layer_is_judged_by_the_same_list() -> None:
    trunk = {
        "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", (8, 8)),
        "model.layers.0.mlp.up_proj.weight_scale": ("F32", ()),
    }
    own = "model.layers.1.mlp.up_proj.weight"
    table = {**trunk, own: ("BF16", (8, 8))}
    keys = frozenset({own})
    assert found(stored(table, draft_keys=keys)) == ["SD518"]
    listed = {"quantization_config": {**FP8, "modules_to_not_convert": ["model.layers.1"]}}
    assert found(stored(table, listed, draft_keys=keys)) == []


def test_sglang_28196_a_plain_draft_of_a_quantised_target_is_a_fact() -> None:
    (finding,) = check_inheritance({}, {"quantization_config": FP8})
    assert (finding.code, finding.severity) == ("SD519", "info")
    assert list(check_inheritance({"quantization_config": FP8}, {"quantization_config": FP8})) == []
    assert list(check_inheritance({}, {})) == []


def test_vllm_28435_scales_have_the_role_of_their_weight() -> None:
    read = draft("speculators-eagle3-fp8")
    assert read.tensors["layers.0.q_proj.weight_scale"].key == f"{Q}.weight_scale"
    assert read.unmapped == ()
    assert read.unknown_fields == ()
    for role, ref in read.tensors.items():
        assert SPECULATORS_NAMES.key_of(role) == ref.key
    plain = opened("speculators-eagle3-clean", add={"fc.weight_scale": ()})
    assert SPECULATORS_NAMES.roles_in(["fc.weight"]) == {"fc.weight": "fc.weight"}
    assert "fc.weight_scale" in plain.tensors
