"""EAGLE drafts in every layout: their format, their facts, the number of their tensors.

Tensor counts are those of the published files (yuhuili/EAGLE-LLaMA3-Instruct-8B,
yuhuili/EAGLE3-LLaMA3.1-Instruct-8B, DeepSpec's and Speculators' classes), not of our recipes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from specctl import checks, formats
from specctl.contract.diagnostics import Diagnostic
from specctl.formats.eagle.roles import MLA_ROLES
from tests.unit.specctl.formats.edits import (
    DELETE,
    all_codes,
    codes,
    draft,
    opened,
    target,
)

AUX = "eagle_config.eagle_aux_hidden_state_layer_ids"


def only(diagnostics: tuple[Diagnostic, ...], code: str) -> Diagnostic:
    (found,) = [d for d in diagnostics if d.code == code]
    return found


@pytest.mark.parametrize(
    ("name", "algorithm", "count"),
    [
        ("eagle-clean", "eagle", 9),
        ("eagle-bias", "eagle", 10),
        ("eagle-qkv-bias", "eagle", 13),
        ("vllm-eagle-clean", "eagle", 12),
        ("speculators-eagle-clean", "eagle", 9),
        ("speculators-eagle-hass", "eagle", 13),
        ("safeailab-eagle3-clean", "eagle3", 15),
        ("safeailab-eagle3-two-layers", "eagle3", 24),
        ("specforge-eagle3-clean", "eagle3", 15),
        ("specforge-eagle3-norm-output", "eagle3", 18),
        ("modelopt-eagle3-clean", "eagle3", 14),
        ("nemo-eagle3-clean", "eagle3", 16),
        ("mla-eagle3-clean", "eagle3", 18),
        ("deepspec-eagle3-clean", "eagle3", 16),
        ("speculators-eagle3-own-embedding", "eagle3", 16),
        ("peagle-clean", "peagle", 25),
        ("speculators-peagle-clean", "peagle", 26),
    ],
)
def test_a_format_is_told_by_its_files_and_every_tensor_has_a_role(
    name: str, algorithm: str, count: int
) -> None:
    found = formats.detect(opened(name))
    read = draft(name)
    assert found.format is not None
    assert name.startswith(found.format)
    assert read.format == found.format
    assert read.algorithm == algorithm
    assert len(read.tensors) == count
    assert read.unmapped == ()
    assert read.unknown_fields == ()


# Names, exactly as they are published.


def test_eagle_1_of_llama_3_has_no_norm_before_its_layer() -> None:
    keys = set(opened("eagle-clean").tensors)
    linears = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert keys == {
        "fc.weight",
        *(f"layers.0.self_attn.{name}.weight" for name in linears),
        *(f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "layers.0.post_attention_layernorm.weight",
    }
    assert opened("eagle-clean").tensors["fc.weight"].shape == (16, 32)


def test_mla_has_seven_attention_tensors_and_no_dense_projection() -> None:
    names = [role.name for role in MLA_ROLES]
    assert len(names) == len(set(names))
    stored = {role for role in draft("mla-eagle3-clean").tensors if ".q" in role or ".kv" in role}
    assert stored == {
        "layers.0.q_a_proj.weight",
        "layers.0.q_a_norm",
        "layers.0.q_b_proj.weight",
        "layers.0.kv_a_proj.weight",
        "layers.0.kv_a_norm",
        "layers.0.kv_b_proj.weight",
    }


# Facts.


def test_eagle_1_uses_the_targets_head_and_reads_its_last_state() -> None:
    read = draft("eagle-clean")
    assert (read.num_aux_states, read.aux_layer_ids) == (None, None)
    assert (read.target_vocab_size, read.draft_vocab_size) == (64, 64)
    assert read.sharing().head == "target"
    served = read.to_draft(source=".", revision=None)
    assert served is not None
    assert (served.algorithm, served.aux_layer_ids) == ("eagle", None)
    assert checks.check_pair(read, target("hf-llama-clean")) == ()


def test_the_fc_bias_is_read_from_the_tensors_and_checked_against_the_config() -> None:
    """vLLM pull request 12831: some EAGLE projections have a bias, and some do not."""
    assert draft("eagle-bias").has_fc_bias
    assert not draft("eagle-clean").has_fc_bias
    assert "`fc.bias`" in only(draft("eagle-bias-missing").diagnostics, "SD501").message
    assert only(draft("eagle-bias-denied").diagnostics, "SD506").found == "False"
    unstated = only(draft("eagle-bias-unstated").diagnostics, "SD318")
    assert unstated.where == "config.json#/bias"
    assert draft("speculators-eagle-hass").has_fc_bias


def test_the_old_wrapper_is_unwrapped_and_said_to_be_old() -> None:
    """vLLM issues 11126 and 11417: a config nested under `model`, weights renamed."""
    read = draft("vllm-eagle-clean")
    assert read.decoder is not None
    assert (read.decoder.hidden_size, read.decoder.head_dim) == (10, 6)
    assert read.tensors["layers.0.q_proj.weight"].key == "model.layers.0.self_attn.q_proj.weight"
    assert read.declared_num_speculative_tokens == 4
    assert only(read.diagnostics, "SD220").severity == "warning"


def test_the_norms_of_old_speculators_drafts_follow_their_flag() -> None:
    assert draft("speculators-eagle-hass").details["layernorms"] is True
    missing = [d for d in draft("speculators-eagle-norms-missing").diagnostics if d.code == "SD501"]
    assert [d.expected for d in missing] == [
        "`embedding_layernorm.weight`",
        "`transformer.input_layernorm.weight`",
        "`pre_lm_head_layernorm.weight`",
    ]
    denied = draft("speculators-eagle-hass", {"layernorms": False, "fusion_bias": False})
    assert [d.code for d in denied.diagnostics if d.code == "SD506"] == ["SD506", "SD506"]


def test_a_map_in_rank_order_is_the_map_in_that_order() -> None:
    """Model-Optimizer keeps the most frequent id first; negative offsets are legal."""
    read = draft("modelopt-eagle3-clean")
    assert read.d2t is not None
    assert min(read.d2t) < 0
    ids = read.draft_to_target
    assert ids is not None
    assert list(ids) != sorted(ids)
    assert ids[:2] == (6, 8)
    assert checks.check_draft(read) == ()


@pytest.mark.parametrize("name", ["modelopt-eagle3-side-map", "nemo-eagle3-side-map"])
def test_a_map_in_a_side_file_is_found_and_reported(name: str) -> None:
    """NeMo Automodel issue 2447: the ids were saved beside the weights, and no engine saw them."""
    read = draft(name)
    assert "d2t" not in read.tensors
    assert sorted(read.draft_to_target or ()) == sorted(
        draft("safeailab-eagle3-clean").draft_to_target or ()
    )
    assert ".pt" in only(read.diagnostics, "SD221").where
    assert checks.check_draft(read) == ()


def test_a_side_file_of_another_head_is_no_map() -> None:
    read = draft("modelopt-eagle3-side-map-short")
    assert read.draft_to_target is None
    assert only(read.diagnostics, "SD221").found == "3 ids in `d2t.pt`"
    assert codes(checks.check_draft(read)) == ["SD401"]


def test_every_spelling_of_the_map_is_the_map() -> None:
    """vLLM pull request 18909: a map under another name was dropped, and zeros took its place."""
    base = opened("speculators-eagle3-clean")
    entry = base.tensors["d2t"]
    for key in ("model.d2t", "draft_id_to_target_id"):
        tensors = {k: e for k, e in base.tensors.items() if k != "d2t"}
        tensors[key] = entry  # the entry still names the stored bytes
        read = formats.read_draft(replace(base, tensors={**tensors, "d2t": entry}))
        assert "SD505" in codes(read.diagnostics)
    read = draft("speculators-eagle3-prefixed-map")
    assert read.draft_to_target == draft("speculators-eagle3-clean").draft_to_target


def test_parts_that_modelopt_leaves_out_are_not_required() -> None:
    """nvidia/gpt-oss-120b-Eagle3-v2: without captured states there is no `fc`."""
    read = draft("modelopt-eagle3-last-state-only")
    assert "fc.weight" not in read.tensors
    assert (read.num_aux_states, read.aux_layer_ids) == (None, None)
    assert codes(read.diagnostics) == ["SD301"]
    assert (
        "`fc.weight` is stored"
        in only(draft("modelopt-eagle3-fc-denied").diagnostics, "SD506").message
    )
    switches = {"eagle_config.use_last_layernorm": False}
    assert "SD501" not in all_codes(draft("modelopt-eagle3-clean", switches, drop=("norm.weight",)))
    assert "SD501" in all_codes(draft("modelopt-eagle3-clean", drop=("norm.weight",)))


def test_a_flag_inside_eagle_config_counts_and_may_not_differ() -> None:
    """vLLM pull request 42143: `norm_before_fc` inside `eagle_config` was ignored."""
    read = draft("modelopt-eagle3-nested-norm")
    assert read.has_norm_before_fc
    twice = draft("modelopt-eagle3-nested-norm", {"norm_before_fc": False})
    assert only(twice.diagnostics, "SD208").where == "config.json#/norm_before_fc"


def test_parallel_heads_are_tensors_of_the_draft() -> None:
    read = draft("modelopt-eagle3-parallel-heads")
    assert "parallel_draft_heads.1.medusa_layers.0.linear.weight" in read.tensors
    wrong = draft(
        "modelopt-eagle3-parallel-heads",
        drop=("parallel_draft_heads.1.medusa_layers.0.linear.weight",),
        add={"parallel_draft_heads.1.medusa_layers.0.linear.weight": (10, 9)},
    )
    assert codes(checks.check_draft(wrong)) == ["SD503"]


def test_the_state_norms_have_an_older_spelling() -> None:
    read = draft("specforge-eagle3-aux-norms")
    assert read.has_fc_norm
    assert read.tensors["fc_norm.2"].key == "aux_norm_high.weight"


def test_norm_output_of_specforge_needs_its_writers_date() -> None:
    """SpecForge pull request 879: the flag meant the raw state before 2026-09-15."""
    read = draft("specforge-eagle3-norm-output")
    assert read.has_norm_output
    assert only(read.diagnostics, "SD316").severity == "warning"
    own = draft("safeailab-eagle3-clean", {"norm_output": True})
    assert "SD316" not in codes(own.diagnostics)


def test_a_second_layer_is_read() -> None:
    """Speculators issue 812: a converter dropped `layers.1`."""
    read = draft("safeailab-eagle3-two-layers")
    assert read.decoder is not None
    assert read.decoder.num_layers == 2
    assert read.tensors["layers.0.q_proj.weight"].shape[1] == 20
    assert read.tensors["layers.1.q_proj.weight"].shape[1] == 10
    assert checks.check_draft(read) == ()


def test_head_dim_is_taken_from_the_rows_when_the_config_is_silent() -> None:
    """EAGLE issue 315: hidden / heads is not the head's size."""
    read = draft("safeailab-eagle3-head-dim-absent")
    assert read.decoder is not None
    assert read.decoder.head_dim == 6


def test_mla_ids_are_read_in_both_numberings_and_its_shapes_are_checked() -> None:
    """SGLang pull request 25454: a boundary list met a reader of outputs."""
    outputs, boundaries = draft("mla-eagle3-clean"), draft("mla-eagle3-boundary-ids")
    assert outputs.aux_layer_ids == boundaries.aux_layer_ids == (1, 3, 4)
    assert outputs.decoder is None
    assert "SD203" not in codes(outputs.diagnostics)
    wrong = only(checks.check_draft(draft("mla-eagle3-shape-wrong")), "SD503")
    assert (wrong.expected, wrong.found) == ("[12, 9]", "[8, 9]")
    missing = draft("mla-eagle3-clean", drop=("layers.0.self_attn.kv_b_proj.weight",))
    assert "SD501" in codes(missing.diagnostics)
    direct = draft(
        "mla-eagle3-clean",
        {"q_lora_rank": None},
        drop=tuple(f"layers.0.self_attn.q_{n}.weight" for n in ("a_proj", "a_layernorm", "b_proj")),
        add={"layers.0.self_attn.q_proj.weight": (12, 20)},
    )
    assert all_codes(direct) == ["SD301"]


def test_mla_without_a_head_takes_the_targets() -> None:
    """SGLang pull request 27908: nvidia/Kimi-K2.6-Eagle3 ships no head."""
    read = draft("mla-eagle3-no-head")
    assert read.sharing().head == "target"
    assert read.map_kind == "identity"
    small = draft("mla-eagle3-no-head", {"draft_vocab_size": 24})
    assert "SD401" in all_codes(small)


def test_deepspec_ids_count_outputs_and_all_its_layers_are_wide() -> None:
    read = draft("deepspec-eagle3-two-layers")
    assert (read.aux_layer_ids, read.aux_numbering) == ((1, 2, 4, 5, 6), "output")
    assert read.num_aux_states == 5
    assert read.tensors["layers.1.q_proj.weight"].shape[1] == 20
    assert checks.check_draft(read) == ()
    assert "SD501" in codes(
        draft("deepspec-eagle3-two-layers", drop=("layers.1.hidden_norm.weight",)).diagnostics
    )
    assert "SD206" in codes(
        draft("deepspec-eagle3-clean", {"target_layer_ids": DELETE}).diagnostics
    )
    embedding = draft("deepspec-eagle3-clean", {"target_layer_ids": [-1, 2, 4, 5, 6]})
    assert checks.check_draft(embedding) == ()


def test_p_eagle_drafts_all_tokens_in_one_forward() -> None:
    read = draft("speculators-peagle-clean")
    assert read.geometry is not None
    assert (read.geometry.draft_width, read.geometry.verify_width) == (6, 7)
    assert read.mask_token_id == 63
    native = draft("peagle-depths")
    assert native.geometry is not None
    assert native.geometry.draft_width == 5


def test_mask_hidden_is_as_wide_as_the_captured_states() -> None:
    """vLLM pull request 43132: its width is that of the target's states, not of the draft."""
    assert checks.check_draft(draft("peagle-wide-target")) == ()
    narrow = only(checks.check_draft(draft("peagle-mask-hidden-narrow")), "SD503")
    assert (narrow.expected, narrow.found) == ("[1, 60]", "[1, 30]")
    assert draft("peagle-clean").tensors["mask_hidden"].shape == (1, 30)
    assert draft("peagle-depths").tensors["mask_hidden"].shape == (1, 1, 30)


def test_the_mask_token_has_three_spellings_that_must_agree() -> None:
    base = {"ptd_token_id": DELETE}
    for key in ("pard_token", "mask_token_id"):
        assert draft("peagle-clean", {**base, key: 9}).mask_token_id == 9
    both = draft("peagle-clean", {"pard_token": 9})
    assert only(both.diagnostics, "SD208").where == "config.json#/pard_token"
    assert codes(draft("peagle-mask-unstated").diagnostics) == ["SD301", "SD314"]


def test_a_config_of_another_run_does_not_fit_the_weights() -> None:
    """Speculators issue 268: config.json was copied from a run with other flags."""
    normed = opened("speculators-eagle3-state-norms").config
    plain = opened("speculators-eagle3-clean")
    swapped = formats.read_draft(replace(plain, config=normed))
    assert "SD501" in codes(swapped.diagnostics)
    other = replace(opened("speculators-eagle3-state-norms"), config=plain.config)
    assert "SD506" in codes(formats.read_draft(other).diagnostics)


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 3, 4], [1, 4, 6]])
def test_listed_layers_win_over_the_default(ids: list[int]) -> None:
    """TokenSpeed pull request 526: the default formula was used whatever the config said."""
    read = formats.complete_draft(
        draft("specforge-eagle3-clean", {AUX: ids}), target("hf-llama-tiny")
    )
    assert list(read.aux_layer_ids or ()) == ids
    assert read.origins["draft.aux_layer_ids"].where.endswith("eagle_aux_hidden_state_layer_ids")


def test_norms_that_the_old_wrapper_skips_are_no_part_of_the_draft() -> None:
    """vLLM pull requests 11672 and 14990: converters wrote ones, and the engine skips them."""
    ones = {"model.layers.0.input_layernorm.weight": (10,), "model.norm.weight": (10,)}
    read = draft("vllm-eagle-clean", add=ones)
    assert {"layers.0.input_norm", "norm"} & read.tensors.keys() == set()
    assert [d.code for d in read.diagnostics if d.code == "SD507"] == ["SD507", "SD507"]
    kept = draft("vllm-eagle-clean", {"model.skip_output_norm": False}, add=ones)
    assert "norm" in kept.tensors


def test_theta_may_lie_in_rope_scaling_and_must_agree() -> None:
    """Model-Optimizer's template states theta inside `rope_scaling` and beside it."""
    name, inner = "specforge-eagle3-clean", {"rope_type": "default", "rope_theta": 50000.0}
    only_there = draft(name, {"rope_theta": DELETE, "rope_scaling": inner})
    assert only_there.decoder is not None
    assert only_there.decoder.rope.theta == 50000.0
    both = draft(name, {"rope_theta": 50000.0, "rope_scaling": inner})
    assert both.decoder == only_there.decoder
    conflict = draft(name, {"rope_scaling": inner})
    assert "50000" in only(conflict.diagnostics, "SD208").message


def test_the_template_of_modelopt_is_read_at_the_top_level_too() -> None:
    template = {
        "use_last_layernorm": False,
        "use_input_layernorm_in_first_layer": True,
        "parallel_draft_step": 1,
        "has_lm_head": False,
        "position_embedding_type": "rope",
        "eagle_aux_hidden_state_layer_ids": [],
    }
    read = draft("modelopt-eagle3-sorted", template, drop=("norm.weight",))
    assert codes(read.diagnostics) == ["SD301", "SD306"]
    assert read.unknown_fields == ()
