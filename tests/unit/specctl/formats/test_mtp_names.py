"""Names and shapes of the prediction-layer fixtures against transformers' own layer classes.

A prediction layer is a decoder layer of its target, so the class that reads the target's layers
names its tensors. Experts are stacked in the classes and single in most files; what is around the
layer (fuse tensor, norms, copies) is of no class and named by the sources in the family table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.checkpoint import Checkpoint, open_checkpoint
from specctl.formats.mtp.families import BY_NAME
from specctl.formats.mtp.part import find_part

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
AROUND = re.compile(r"(eh_proj|enorm|hnorm|final_layernorm|embed_tokens|.*shared_head\..*)(\.\w+)?")
SPARSE: dict[str, Any] = {"mlp_layer_types": ["sparse"]}
# fixture -> family, module, config class, layer class, fields to reach the right kind of layer.
LAYERS: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    "hf-deepseek-v3-mtp": (
        "deepseek-mtp",
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3DecoderLayer",
        {},
    ),
    "hf-deepseek-v32-mtp": (
        "deepseek-mtp",
        "deepseek_v32",
        "DeepseekV32Config",
        "DeepseekV32DecoderLayer",
        SPARSE,
    ),
    "hf-glm45-mtp": ("glm-mtp", "glm4_moe", "Glm4MoeConfig", "Glm4MoeDecoderLayer", {}),
    "hf-glm46-mtp": ("glm-mtp", "glm4_moe", "Glm4MoeConfig", "Glm4MoeDecoderLayer", {}),
    "hf-glm5-mtp": (
        "glm-mtp",
        "glm_moe_dsa",
        "GlmMoeDsaConfig",
        "GlmMoeDsaDecoderLayer",
        SPARSE,
    ),
    "hf-glm-ocr-mtp": ("glm-mtp", "glm_ocr", "GlmOcrTextConfig", "GlmOcrTextDecoderLayer", {}),
    "hf-hunyuan-mtp": ("hunyuan-mtp", "hy_v3", "HYV3Config", "HYV3DecoderLayer", SPARSE),
    "hf-qwen3-next-mtp": (
        "qwen-mtp",
        "qwen3_next",
        "Qwen3NextConfig",
        "Qwen3NextDecoderLayer",
        {},
    ),
    "hf-qwen35-mtp": ("qwen-mtp", "qwen3_5", "Qwen3_5TextConfig", "Qwen3_5DecoderLayer", {}),
    "hf-qwen35-moe-mtp": (
        "qwen-mtp",
        "qwen3_5_moe",
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeDecoderLayer",
        {},
    ),
    "hf-qwen4-mtp": (
        "qwen4-mtp",
        "qwen4_exp",
        "Qwen4ExpTextConfig",
        "Qwen4ExpTextDecoderLayer",
        {"ple_layer_ids": []},
    ),
    "hf-exaone-mtp": ("exaone-mtp", "exaone_moe", "ExaoneMoeConfig", "ExaoneMoeDecoderLayer", {}),
    "hf-ernie-mtp": (
        "ernie-mtp",
        "ernie4_5_moe",
        "Ernie4_5_MoeConfig",
        "Ernie4_5_MoeDecoderLayer",
        {},
    ),
    "hf-mimo-v2-mtp": (
        "mimo-v2-mtp",
        "mimo_v2_flash",
        "MiMoV2FlashConfig",
        "MiMoV2FlashDecoderLayer",
        {"v_head_dim": 4, "num_attention_heads": 2},
    ),
}
# On disk as the class's own conversion table renames it (transformers 5.24 conversion_mapping), or
# as the family table's aliases say.
RENAMED = {
    "mlp.router.gate.weight": "mlp.gate.weight",
    "mlp.expert_bias": "mlp.e_score_correction_bias",
    "mlp.shared_mlp.": "mlp.shared_experts.",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
}
# Patterns by which the target's class ignores the layers; both files and classes agree on them.
IGNORED = {
    "hf-deepseek-v4-mtp": ("deepseek_v4", "DeepseekV4PreTrainedModel"),
    "hf-ernie-mtp": ("ernie4_5_moe", "Ernie4_5_MoePreTrainedModel"),
    "hf-exaone-mtp": ("exaone_moe", "ExaoneMoePreTrainedModel"),
    "hf-longcat-mtp": ("longcat_flash", "LongcatFlashPreTrainedModel"),
    "hf-mimo-v2-mtp": ("mimo_v2_flash", "MiMoV2FlashPreTrainedModel"),
    "hf-nemotron-h-mtp": ("nemotron_h", "NemotronHPreTrainedModel"),
    "hf-qwen3-next-mtp": ("qwen3_next", "Qwen3NextPreTrainedModel"),
    "hf-qwen35-mtp": ("qwen3_5", "Qwen3_5PreTrainedModel"),
    "hf-qwen35-moe-mtp": ("qwen3_5_moe", "Qwen3_5MoePreTrainedModel"),
    "hf-qwen4-mtp": ("qwen4_exp", "Qwen4ExpPreTrainedModel"),
}


def opened(name: str) -> Checkpoint:
    return open_checkpoint(CHECKPOINTS / name)


def classes_of(module: str, kind: str = "modeling") -> Any:
    """Return a module of transformers; older versions do not have every family."""
    return pytest.importorskip(
        f"transformers.models.{module}.{kind}_{module}",
        reason=f"this version of transformers has no {module}",
    )


def text_config(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CHECKPOINTS / name / "config.json").read_text())
    text = config.get("text_config", config)
    dropped = ("architectures", "model_type", "quantization_config")
    return {key: value for key, value in text.items() if key not in dropped}


def layer_of_class(
    module: str, config: str, layer: str, fields: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    settings = getattr(classes_of(module, "configuration"), config)(**fields)
    settings._attn_implementation = "eager"
    with torch.device("meta"):
        made = getattr(classes_of(module), layer)(settings, 0)
    return {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()}


def layer_of_file(family: str, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    part = find_part(BY_NAME[family], checkpoint.tensors)
    assert part is not None
    prefix = part.root + part.family.block.replace("{i}", str(part.indexes[0]))
    found: dict[str, tuple[int, ...]] = {}
    for key, entry in checkpoint.tensors.items():
        name = key.removeprefix(prefix)
        if name == key or AROUND.fullmatch(name) or "scale" in name or "sink" in name:
            continue
        for native, canonical in RENAMED.items():
            name = name.replace(native, canonical)
        found[name] = entry.shape
    return stacked(found)


def stacked(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes with single experts as the two stacks of the classes."""
    one = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
    single = {name: one.fullmatch(name) for name in shapes}
    result = {name: shape for name, shape in shapes.items() if single[name] is None}
    count = len({found[1] for found in single.values() if found})
    if count:
        rows, columns = shapes["mlp.experts.0.gate_proj.weight"]
        result["mlp.experts.gate_up_proj"] = (count, 2 * rows, columns)
        result["mlp.experts.down_proj"] = (count, *shapes["mlp.experts.0.down_proj.weight"])
    return result


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_the_layer_has_the_names_and_shapes_of_its_class(name: str) -> None:
    family, module, config, layer, fields = LAYERS[name]
    expected = layer_of_class(module, config, layer, text_config(name) | fields)
    assert layer_of_file(family, opened(name)) == expected


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_the_targets_class_ignores_exactly_the_prediction_layers(name: str) -> None:
    module, base = IGNORED[name]
    classes = vars(classes_of(module))
    lists = [
        getattr(entry, "_keys_to_ignore_on_load_unexpected", None)
        for entry in classes.values()
        if isinstance(entry, type) and issubclass(entry, classes[base])
    ]
    patterns = next(found for found in lists if found)
    checkpoint = opened(name)
    ignored = {key for key in checkpoint.tensors if any(re.search(p, key) for p in patterns)}
    from specctl import formats

    assert {ref.key for ref in formats.read_draft(checkpoint).tensors.values()} == ignored


@pytest.mark.parametrize("name", ["gemma4-assistant-clean", "gemma4-assistant-ordered"])
def test_the_assistant_has_the_names_and_shapes_of_its_class(name: str) -> None:
    config_class = classes_of("gemma4_assistant", "configuration").Gemma4AssistantConfig
    model_class = classes_of("gemma4_assistant").Gemma4AssistantForCausalLM
    checkpoint = opened(name)
    config = dict(checkpoint.config or {})
    fields = {key: value for key, value in config.items() if key != "architectures"}
    with torch.device("meta"):
        model = model_class(config_class(**fields))
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    del expected["lm_head.weight"]  # tied to the embedding
    found = {key: entry.shape for key, entry in checkpoint.tensors.items()}
    assert found == expected
    assert len([key for key in found if key.startswith("model.layers.0.")]) == 11
