"""Quantised EAGLE drafts keep their scales, and the config that says how to read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.checkpoint import open_checkpoint
from tests.unit.specctl.formats.conversions import config_of, refusals, run
from tests.unit.specctl.formats.edits import CHECKPOINTS


@pytest.mark.parametrize(
    ("to", "scale", "listed"),
    [
        ("speculators-eagle3", "layers.0.mlp.up_proj.weight_scale", "lm_head"),
        ("specforge-eagle3", "midlayer.mlp.up_proj.weight_scale", "lm_head"),
        ("nemo-eagle3", "model.layers.0.mlp.up_proj.weight_scale", "lm_head"),
    ],
)
def test_scales_and_their_config_travel_with_the_weights(
    to: str, scale: str, listed: str, tmp_path: Path
) -> None:
    """vLLM issue 28435: a scale that is dropped leaves raw integers behind."""
    out = tmp_path / "out"
    options = {"target": str(CHECKPOINTS / "hf-llama-tiny")}
    report = run("speculators-eagle3-fp8-modelopt", to, out, **options)
    assert report.state == "written", refusals(report)
    assert scale in open_checkpoint(out).tensors
    method = config_of(out)["quantization_config"]
    assert method["quant_method"] == "modelopt"
    expected = ["lm_head", "model.fc" if to.startswith("nemo") else "fc"]
    assert method["ignore"] == expected
    assert listed in expected
    assert (out / "hf_quant_config.json").exists() == (to == "speculators-eagle3")


def test_module_names_of_a_quantisation_list_are_renamed_or_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    fixture = CHECKPOINTS / "speculators-eagle3-fp8-fused-list"
    (source / "model.safetensors").write_bytes((fixture / "model.safetensors").read_bytes())
    config = config_of(fixture)
    for names, expected in (
        (["layers.0.self_attn.qkv_proj"], ["midlayer.self_attn.qkv_proj"]),
        (["layers.0.input_layernorm", "norm"], ["midlayer.input_layernorm", "norm"]),
        (["layers.0.self_attn.q_proj", "fc"], ["midlayer.self_attn.q_proj", "fc"]),
    ):
        config["quantization_config"]["ignored_layers"] = names
        (source / "config.json").write_text(json.dumps(config), "utf-8")
        out = tmp_path / names[0]
        assert run(str(source), "specforge-eagle3", out).state == "written"
        assert config_of(out)["quantization_config"]["ignored_layers"] == expected
    config["quantization_config"]["ignored_layers"] = ["re:.*layers\\.0\\.self_attn\\.[qkv]_proj"]
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    found = refusals(run(str(source), "specforge-eagle3", tmp_path / "pattern"))
    assert any("is a pattern over module names" in line for line in found)
    same = run(str(source), "modelopt-eagle3", tmp_path / "same")
    assert same.state == "written", refusals(same)
