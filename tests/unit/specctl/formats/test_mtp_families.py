"""Prediction layers of every family: detected, split from their target, described, checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specctl import checks, formats
from specctl.checkpoint import TensorEntry
from specctl.formats.mtp.families import BY_NAME, FAMILIES
from specctl.formats.mtp.part import find_part
from specctl.formats.registry import BY_NAME as FORMATS
from specctl.ops.load import load
from tests.unit.specctl.formats.edits import CHECKPOINTS, DELETE, all_codes, codes, draft, opened

# fixture -> format, layers, attention, mlp, experts, own copies, tensors.
BUNDLED: dict[str, tuple[str, int, str, str, int, bool, int]] = {
    "hf-deepseek-v3-mtp": ("deepseek-mtp", 1, "latent", "experts", 3, True, 46),
    "hf-deepseek-v32-mtp": ("deepseek-mtp", 1, "latent", "experts", 3, True, 34),
    "hf-glm45-mtp": ("glm-mtp", 1, "grouped-query", "experts", 3, True, 31),
    "hf-glm46-mtp": ("glm-mtp", 1, "grouped-query", "experts", 3, False, 29),
    "hf-glm5-mtp": ("glm-mtp", 1, "latent", "experts", 3, False, 32),
    "hf-glm-ocr-mtp": ("glm-mtp", 1, "grouped-query", "fused dense", 0, False, 14),
    "hf-kimi-k3-mtp": ("kimi-k3-mtp", 1, "latent", "experts", 3, False, 27),
    "hf-step3p5-mtp": ("step3p5-mtp", 2, "grouped-query", "dense", 0, True, 34),
    "hf-hunyuan-mtp": ("hunyuan-mtp", 1, "grouped-query", "experts", 3, False, 26),
    "hf-bailing-mtp": ("bailing-mtp", 1, "fused", "experts", 3, False, 24),
    "hf-qwen3-next-mtp": ("qwen-mtp", 1, "grouped-query", "experts", 3, False, 26),
    "hf-qwen35-mtp": ("qwen-mtp", 1, "grouped-query", "dense", 0, False, 15),
    "hf-qwen35-moe-mtp": ("qwen-mtp", 1, "grouped-query", "fused experts", 3, False, 19),
    "hf-qwen4-mtp": ("qwen4-mtp", 1, "grouped-query", "fused experts", 3, False, 31),
    "hf-exaone-mtp": ("exaone-mtp", 1, "grouped-query", "dense", 0, False, 15),
    "hf-mimo-mtp": ("mimo-mtp", 1, "grouped-query", "dense", 0, False, 16),
    "hf-mimo-v2-mtp": ("mimo-v2-mtp", 3, "grouped-query", "dense", 0, False, 42),
    "hf-ernie-mtp": ("ernie-mtp", 1, "grouped-query", "dense", 0, False, 12),
    "hf-longcat-mtp": ("longcat-mtp", 1, "latent", "dense", 0, True, 17),
    "hf-nemotron-h-mtp": ("nemotron-h-mtp", 1, "other", "other", 0, False, 18),
    "hf-deepseek-v4-mtp": ("deepseek-v4-mtp", 1, "other", "other", 0, False, 26),
}


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_a_targets_layers_are_found_and_described(name: str) -> None:
    format, layers, attention, mlp, experts, is_own, tensors = BUNDLED[name]
    checkpoint = opened(name)
    detection = formats.detect(checkpoint)
    assert (detection.role, detection.format, detection.bundled) == (
        "target",
        "huggingface",
        format,
    )
    read = formats.read_draft(checkpoint, detection)
    details = read.details
    assert details["num_prediction_layers"] == layers
    assert (details["attention"], details["mlp"], details["num_experts"]) == (
        attention,
        mlp,
        experts,
    )
    copies = {details["embedding"], details["head"]}
    assert ("own copy" in copies) is is_own
    assert len(read.tensors) == tensors
    assert (read.unmapped, read.unknown_fields, read.decoder) == ((), (), None)
    assert all_codes(read) in (["SD301"], ["SD301", "SD508"])


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_every_tensor_is_the_targets_or_one_role(name: str) -> None:
    checkpoint = opened(name)
    read = formats.read_draft(checkpoint)
    keys = [ref.key for ref in read.tensors.values()]
    assert len(set(keys)) == len(keys)
    target = formats.read_target(checkpoint)
    rest = set(checkpoint.tensors) - set(keys)
    assert target.embedding is not None
    assert target.head is not None
    assert {target.embedding.key, target.head.key} <= rest
    assert target.num_layers == 1
    trunk = [key for key in rest if "layers.0." in key]
    assert trunk
    assert not [key for key in keys if key in trunk]


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_every_row_of_the_registry_has_a_fixture_and_its_slice_reads_the_same(name: str) -> None:
    checkpoint = opened(name)
    bundled = formats.read_draft(checkpoint)
    own = {ref.key: checkpoint.tensors[ref.key] for ref in bundled.tensors.values()}
    alone = replace(checkpoint, tensors=own)
    detection = formats.detect(alone)
    assert (detection.role, detection.format) == ("draft", bundled.format)
    read = formats.read_draft(alone)
    assert dict(read.tensors) == dict(bundled.tensors)
    assert read.details == {**bundled.details, "is_bundled": False}


def test_every_family_has_a_bundled_fixture() -> None:
    assert {row[0] for row in BUNDLED.values()} == set(BY_NAME)
    assert all(FORMATS[family.name].is_bundled for family in FAMILIES)
    assert len(load(str(CHECKPOINTS / "hf-qwen35-mtp")).diagnostics) == 2


def test_mimo_alone_has_the_state_first() -> None:
    orders = {family.name: family.concat_order for family in FAMILIES}
    assert [name for name, order in orders.items() if order == "hidden, embedding"] == ["mimo-mtp"]
    assert draft("hf-mimo-mtp").details["concat_order"] == "hidden, embedding"


def test_the_hidden_input_and_the_recycled_state_are_stated() -> None:
    """Vllm pull requests 45895 and 47448, ATOM issue 1764: no defect of a file, so it is said."""
    details = draft("hf-qwen35-mtp").details
    assert details["hidden_input"] == "target state after its final norm"
    assert details["recycled_hidden"] == "output of the layer's own last norm"
    assert details["norm_weight"] == "1 + weight"


def test_deepseeks_published_numbers() -> None:
    """DeepSeek-V3 README and index: layer 61, 256 experts, seven latent tensors, two copies."""
    family = BY_NAME["deepseek-mtp"]
    keys = ["model.embed_tokens.weight", "model.layers.60.mlp.gate.weight", "lm_head.weight"]
    own = ["enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"]
    latent = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm"]
    latent += ["kv_b_proj", "o_proj"]
    keys += [f"model.layers.61.{name}.weight" for name in own]
    keys += [f"model.layers.61.self_attn.{name}.weight" for name in latent]
    keys += [f"model.layers.61.{n}_layernorm.weight" for n in ("input", "post_attention")]
    keys += [f"model.layers.61.mlp.gate.{n}" for n in ("weight", "e_score_correction_bias")]
    for expert in [*(f"experts.{i}" for i in range(256)), "shared_experts"]:
        keys += [f"model.layers.61.mlp.{expert}.{n}_proj.weight" for n in ("gate", "up", "down")]
    part = find_part(family, keys)
    assert part is not None
    assert part.indexes == (61,)
    assert len(part.roles) == len(keys) - 3 == 6 + 7 + 2 + 2 + 257 * 3
    assert part.roles["model.layers.61.eh_proj.weight"] == "fc.weight"
    assert part.roles["model.layers.61.self_attn.o_proj.weight"] == "layers.0.o_proj.weight"
    assert all(part.key_of(role) == key for key, role in part.roles.items())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_role_gives_its_key_back(family: object) -> None:
    name = getattr(family, "name", "")
    fixture = next(key for key, row in BUNDLED.items() if row[0] == name)
    part = find_part(BY_NAME[name], opened(fixture).tensors)
    assert part is not None
    assert {part.key_of(role) for role in part.roles.values()} == set(part.roles)


@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"num_nextn_predict_layers": 0}, "SD326"),
        ({"num_nextn_predict_layers": DELETE}, "SD326"),
        ({"num_nextn_predict_layers": 3}, "SD310"),
        ({"num_hidden_layers": 4}, "SD310"),
        ({"hidden_size": 10}, "SD503"),
        ({"kv_lora_rank": 5}, "SD503"),
        ({"v_head_dim": 4}, "SD503"),
    ],
)
def test_config_and_tensors_are_held_against_each_other(
    config: dict[str, object], code: str
) -> None:
    assert code in all_codes(draft("hf-deepseek-v32-mtp", config))


def test_a_promise_without_tensors_is_a_warning_of_the_target() -> None:
    """MiniMax-M2 issue 47: acceptance 0, because the modules are not in the release."""
    loaded = load(str(CHECKPOINTS / "hf-minimax-mtp-absent"))
    assert loaded.bundled is None
    found = next(d for d in loaded.diagnostics if d.code == "SD327")
    assert found.severity == "warning"
    assert "num_mtp_modules" in found.message
    assert found.message.count("3") == 1


def test_a_file_that_the_index_forgot_is_named() -> None:
    """SGLang issue 17166: an export drops `mtp.safetensors` from the index."""
    checkpoint = opened("hf-minimax-mtp-absent")
    beside = replace(checkpoint, file_names=(*checkpoint.file_names, "mtp.safetensors"))
    found = next(d for d in formats.read_target(beside).diagnostics if d.code == "SD327")
    assert found.notes == ("`mtp.safetensors` lies in the directory and no index names it",)


def test_an_index_that_promises_a_fuse_tensor_is_not_trusted() -> None:
    """A hub report of `KeyError: mtp.fc.weight`: indexed, and in no shard."""
    read = draft("hf-qwen35-mtp", drop=("mtp.fc.weight",))
    found = [d for d in read.diagnostics if d.code == "SD501"]
    assert [d.expected for d in found] == ["`mtp.fc.weight`"]


def test_indexed_layers_in_a_file_of_another_name_are_read() -> None:
    """Omlx issue 2062: `mtp.safetensors` is indexed, and a glob of `model*` misses it."""
    loaded = load(str(CHECKPOINTS / "hf-qwen35-mtp-file-name"))
    assert loaded.bundled is not None
    assert len(loaded.bundled.tensors) == 15
    assert {ref.file for ref in loaded.bundled.tensors.values()} == {"mtp.safetensors"}


def test_a_multimodal_prefix_counts_from_the_text_models_layers() -> None:
    """Vllm pull requests 49869 and 57631: GLM-OCR's layer is below `model.language_model.`."""
    read = draft("hf-glm-ocr-mtp")
    assert read.target_num_layers == 1
    assert read.details["key_prefix"] == "model.language_model."


@pytest.mark.parametrize(
    "prefix", ["", "mtp.", "model.mtp.", "language_model.mtp.", "model.language_model.mtp."]
)
def test_a_sidecar_may_have_any_prefix(prefix: str) -> None:
    stored = opened("qwen4-mtp-no-prefix").tensors
    moved = {prefix + key: entry.shape for key, entry in stored.items()}
    renamed = opened("qwen4-mtp-no-prefix", drop=tuple(stored), add=moved)
    assert formats.detect(renamed).format == "qwen4-mtp"
    read = formats.read_draft(renamed)
    assert codes(read.diagnostics) == ["SD301"]
    assert len(read.tensors) == 31  # as the published sidecar has


def test_an_expert_that_is_missing_is_named() -> None:
    drop = tuple(f"mtp.layers.0.mlp.experts.0.{name}_proj.weight" for name in ("gate", "up"))
    found = [d for d in draft("hf-qwen3-next-mtp", drop=drop).diagnostics if d.code == "SD325"]
    assert [d.message for d in found] == [
        f"expert 0 of 3 has no `mtp.layers.0.mlp.experts.0.{name}_proj.weight`"
        for name in ("gate", "up")
    ]


def test_experts_of_another_width_are_counted() -> None:
    read = draft("hf-qwen3-next-mtp", {"moe_intermediate_size": 3})
    found = [d.message for d in read.diagnostics if d.code == "SD503"]
    assert len(found) == 3
    assert all("as 2 more are" in message for message in found)


def test_a_gate_that_the_config_denies_makes_the_rows_wrong() -> None:
    assert all_codes(draft("hf-qwen35-mtp", {"text_config.attn_output_gate": False})) == [
        "SD301",
        "SD503",
    ]


def test_a_tensor_that_no_layer_has_is_reported() -> None:
    read = draft("qwen-mtp-clean", add={"mtp.layers.0.surprise.weight": (2, 2)})
    assert read.unmapped == ("mtp.layers.0.surprise.weight",)
    assert "SD502" in codes(read.diagnostics)


def test_several_layers_have_their_own_fuse_tensors() -> None:
    read = draft("hf-mimo-v2-mtp")
    assert {"layers.0.fc.weight", "layers.2.fc.weight", "layers.1.norm"} <= set(read.tensors)
    lost = draft("hf-mimo-v2-mtp", drop=("model.mtp.layers.1.eh_proj.weight",))
    missing = [d.expected for d in lost.diagnostics if d.code == "SD501"]
    assert missing == ["`model.mtp.layers.1.eh_proj.weight`"]


def test_an_assistants_switches_and_ordering_are_checked() -> None:
    config = {"text_config.enable_moe_block": True}
    assert "SD207" in codes(draft("gemma4-assistant-clean", config).diagnostics)
    config = {"use_ordered_embeddings": False}
    assert "SD506" in codes(draft("gemma4-assistant-ordered", config).diagnostics)
    drop = ("masked_embedding.centroids.weight",)
    assert "SD501" in codes(draft("gemma4-assistant-ordered", drop=drop).diagnostics)
    read = draft("gemma4-assistant-clean")
    assert (read.hidden_size, read.target_hidden_size) == (6, 8)
    assert codes(checks.check_draft(read)) == []


def test_unknown_parts_named_mtp_are_counted_and_not_described() -> None:
    checkpoint = opened("hf-llama-clean")
    key = "mtp.blocks.first.norm.weight"
    entry = TensorEntry(
        key=key, file="model.safetensors", dtype="BF16", shape=(16,), begin=0, end=32
    )
    strange = replace(checkpoint, tensors={**checkpoint.tensors, key: entry})
    assert formats.detect(strange).bundled is None
    read = formats.read_target(strange)
    assert codes(read.diagnostics) == ["SD240", "SD507"]
    assert read.decoder is not None


def test_a_slice_that_was_numbered_again_says_nothing_of_its_target() -> None:
    """SGLang's NextN export stores layer 61 as `model.layers.0.` with one hidden layer."""
    stored = opened("deepseek-mtp-clean").tensors
    moved = {key.replace("layers.8.", "layers.0."): entry.shape for key, entry in stored.items()}
    read = draft("deepseek-mtp-clean", {"num_hidden_layers": 1}, drop=tuple(stored), add=moved)
    assert codes(read.diagnostics) == ["SD301"]
    assert (read.target_num_layers, read.details["stored_layer_indexes"]) == (None, [0])
    assert read.decoder is not None


def test_a_side_file_alone_is_a_slice(tmp_path: Path) -> None:
    """A directory with a config and `mtp.safetensors` only."""
    source = CHECKPOINTS / "qwen-mtp-clean"
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    (tmp_path / "mtp.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    loaded = load(str(tmp_path))
    assert loaded.detection.format == "qwen-mtp"
    assert codes(loaded.diagnostics) == ["SD123", "SD301"]


def test_an_untied_target_without_a_head_is_reported() -> None:
    checkpoint = opened("hf-qwen35-mtp", drop=("lm_head.weight",))
    found = [d for d in formats.read_target(checkpoint).diagnostics if d.code == "SD501"]
    assert [d.severity for d in found] == ["warning"]


def published(
    name: str, config: dict[str, object], shapes: dict[str, tuple[int, ...]]
) -> list[str]:
    """Return the codes of a slice with the given dimensions and tensors in place of a fixture's."""
    stored = tuple(opened(name).tensors)
    return all_codes(draft(name, config, drop=stored, add=shapes))


def test_qwens_published_shapes_fit_its_config() -> None:
    """Qwen3.5-27B: 24 heads of 256 with a gate, 4 key heads, width 5120, inner width 17408."""
    text = {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
    }
    layer = "mtp.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.fc.weight": (5120, 10240),
        f"{layer}self_attn.q_proj.weight": (12288, 5120),
        f"{layer}self_attn.k_proj.weight": (1024, 5120),
        f"{layer}self_attn.v_proj.weight": (1024, 5120),
        f"{layer}self_attn.o_proj.weight": (5120, 6144),
        f"{layer}mlp.gate_proj.weight": (17408, 5120),
        f"{layer}mlp.up_proj.weight": (17408, 5120),
        f"{layer}mlp.down_proj.weight": (5120, 17408),
        **{f"{layer}self_attn.{name}_norm.weight": (256,) for name in "qk"},
        **{f"{layer}{n}_layernorm.weight": (5120,) for n in ("input", "post_attention")},
        **{f"mtp.{n}.weight": (5120,) for n in ("norm", "pre_fc_norm_embedding")},
        "mtp.pre_fc_norm_hidden.weight": (5120,),
    }
    assert len(shapes) == 15
    config: dict[str, object] = {f"text_config.{key}": value for key, value in text.items()}
    assert published("qwen-mtp-clean", config, shapes) == ["SD301"]
    shapes[f"{layer}self_attn.q_proj.weight"] = (6144, 5120)
    assert published("qwen-mtp-clean", config, shapes) == ["SD301", "SD503"]


def test_deepseeks_published_shapes_fit_its_config() -> None:
    """DeepSeek-V3: 128 heads of 128 + 64 columns, latent ranks 1536 and 512, width 7168."""
    config: dict[str, object] = {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "vocab_size": 129280,
    }
    prefix = "model.layers.61."
    names = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{prefix}{name}.weight": (7168,) for name in names},
        f"{prefix}eh_proj.weight": (7168, 14336),
        f"{prefix}embed_tokens.weight": (129280, 7168),
        f"{prefix}shared_head.head.weight": (129280, 7168),
        f"{prefix}self_attn.q_a_proj.weight": (1536, 7168),
        f"{prefix}self_attn.q_a_layernorm.weight": (1536,),
        f"{prefix}self_attn.q_b_proj.weight": (24576, 1536),
        f"{prefix}self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        f"{prefix}self_attn.kv_a_layernorm.weight": (512,),
        f"{prefix}self_attn.kv_b_proj.weight": (32768, 512),
        f"{prefix}self_attn.o_proj.weight": (7168, 16384),
        f"{prefix}mlp.gate.weight": (256, 7168),
    }
    for expert in range(256):
        part = f"{prefix}mlp.experts.{expert}."
        shapes |= {f"{part}{name}_proj.weight": (2048, 7168) for name in ("gate", "up")}
        shapes[f"{part}down_proj.weight"] = (7168, 2048)
    assert published("hf-deepseek-v32-mtp", config, shapes) == ["SD301"]
