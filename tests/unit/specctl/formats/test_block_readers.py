"""Block drafts as every dialect stores them: names, geometry, captured layers, contradictions."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from specctl import checks, formats
from specctl.contract.diagnostics import Diagnostic
from specctl.formats.block.flat_aux import default_outputs
from tests.unit.specctl.formats.edits import (
    DELETE,
    all_codes,
    codes,
    draft,
    opened,
    target,
)

ZLAB, ZLAB2 = "zlab-dflash-clean", "zlab-dflash2-clean"
DEEPSPEC, MODELOPT, DOMINO = "deepspec-dspark-clean", "modelopt-dspark-clean", "domino-clean"
OUTPUTS = (0, 1, 3, 5, 6)


def only(diagnostics: tuple[Diagnostic, ...], code: str) -> Diagnostic:
    (found,) = [d for d in diagnostics if d.code == code]
    return found


@pytest.mark.parametrize(
    ("name", "per_layer", "beside", "at_five_layers"),
    [
        (ZLAB, 11, 3, 58),
        (ZLAB2, 15, 6, 81),
        (DEEPSPEC, 11, 9, 64),
        ("speculators-dspark-clean", 11, 10, 65),
    ],
)
def test_a_file_has_as_many_tensors_as_published_ones(
    name: str, per_layer: int, beside: int, at_five_layers: int
) -> None:
    """Numbers of z-lab/Qwen3-8B-DFlash, z-lab/Qwen3.8-27B-DFlash2, deepseek-ai/dspark_qwen3_8b.

    A Speculators file has one less than RedHatAI's, which store an embedding too.
    """
    keys = opened(name).tensors
    layers = [key for key in keys if re.match(r"layers\.\d+\.", key)]
    assert len(layers) == 2 * per_layer
    assert len(keys) - len(layers) == beside
    assert 5 * per_layer + beside == at_five_layers


@pytest.mark.parametrize(
    ("name", "anchor", "tokens", "width"),
    [
        ("speculators-dflash-clean", False, 4, 5),
        ("speculators-dflash2-clean", False, 4, 5),
        ("speculators-xpress-clean", False, 4, 5),
        (ZLAB, False, 4, 5),
        (ZLAB2, False, 4, 5),
        ("laguna-dflash-clean", False, 4, 5),
        (DEEPSPEC, True, 5, 5),
        ("deepspec-dspark-dflash", True, 5, 5),
        ("deepspec-dspark-bonus-anchor", False, 4, 5),
        (MODELOPT, True, 5, 5),
        (DOMINO, True, 5, 5),
        ("deepseek-v4-dspark-stages", True, 5, 5),
    ],
)
def test_slot_0_decides_what_a_block_of_five_offers(
    name: str, anchor: bool, tokens: int, width: int
) -> None:
    read = draft(name)
    assert read.geometry is not None
    assert (read.sample_from_anchor, read.draft_block_size) == (anchor, 5)
    assert read.geometry.num_speculative_tokens == tokens
    assert (read.geometry.draft_width, read.geometry.verify_width) == (width, tokens + 1)
    fewer = formats.with_given(read, num_speculative_tokens=2)
    assert fewer.geometry is not None
    assert fewer.geometry.draft_width == (2 if anchor else 3)
    assert "SD302" in codes(formats.with_given(read, num_speculative_tokens=6).diagnostics)


@pytest.mark.parametrize(
    "name",
    ["speculators-dflash-clean", ZLAB, ZLAB2, DEEPSPEC, MODELOPT, DOMINO, "laguna-dflash-clean"],
)
def test_both_numberings_give_the_same_captured_layers(name: str) -> None:
    read = draft(name)
    assert read.aux_layer_ids == OUTPUTS
    assert read.num_aux_states == 5
    assert read.aux_numbering == ("boundary" if name.startswith("speculators") else "output")


PLACES = {
    "block": ("block_size", 5, 6, ("dflash_config.block_size", "dspark_block_size")),
    "mask": (
        "mask_token_id",
        2,
        3,
        ("dflash_config.mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"),
    ),
    "layers": (
        "target_layer_ids",
        [0, 1, 3, 5, 6],
        [0, 1, 3, 5, 7],
        ("dflash_config.target_layer_ids", "dspark_target_layer_ids"),
    ),
    "rank": ("markov_rank", 3, 4, ("dflash_config.markov_rank", "dspark_markov_rank")),
    "kind": ("markov_head_type", "vanilla", "gated", ("dflash_config.markov_head_type",)),
    "confidence": (
        "enable_confidence_head",
        True,
        False,
        ("dflash_config.use_confidence_head", "use_confidence_head"),
    ),
}
ROWS = [(fact, place) for fact, row in PLACES.items() for place in row[3]]


@pytest.mark.parametrize(("fact", "place"), ROWS)
def test_a_fact_is_read_at_every_place_and_contradictions_are_named(fact: str, place: str) -> None:
    """vLLM issue 48932: written at one level, read at another (C009)."""
    key, value, other, _ = PLACES[fact]
    usual = draft(DEEPSPEC, {"dflash_config": {}})
    moved = draft(DEEPSPEC, {"dflash_config": {}, key: DELETE, place: value})
    assert all_codes(moved) == []
    for name in ("draft_block_size", "mask_token_id", "aux_layer_ids", "markov", "geometry"):
        assert getattr(moved, name) == getattr(usual, name)
    assert all_codes(draft(DEEPSPEC, {"dflash_config": {}, place: value})) == []
    found = draft(DEEPSPEC, {"dflash_config": {}, place: other}).diagnostics
    conflict = only(found, "SD208")
    assert f"`{key}`" in conflict.message
    assert f"`{place}`" in conflict.message


def test_an_anchor_said_twice_must_be_one_anchor() -> None:
    name = "deepspec-dspark-bonus-anchor"
    assert codes(draft(name).diagnostics) == []
    assert "SD208" in codes(draft(name, {"sample_from_anchor": True}).diagnostics)
    alone = draft(name, {"sample_from_anchor": DELETE})
    assert alone.sample_from_anchor is False
    unsaid = draft(MODELOPT, {"dflash_config.shift_label": DELETE})
    assert codes(unsaid.diagnostics) == ["SD307"]
    assert unsaid.geometry is None
    shifted = draft(MODELOPT, {"dflash_config.shift_label": False})
    assert shifted.geometry is not None
    assert shifted.geometry.num_speculative_tokens == 4


@pytest.mark.parametrize("kind", ["dflash", "xpress"])
def test_the_class_default_of_speculators_is_a_conditioning_anchor(kind: str) -> None:
    name = f"speculators-{kind}-clean"
    read = draft(name, {"sample_from_anchor": DELETE})
    assert codes(read.diagnostics) == []
    assert read.sample_from_anchor is False
    assert read.origins["geometry.sample_from_anchor"].kind == "derived"
    methods = [{"proposal_type": "greedy", "speculative_tokens": 5}]
    edits = {"sample_from_anchor": DELETE, "speculators_config.proposal_methods": methods}
    assert codes(draft(name, edits).diagnostics) == ["SD302"]


def test_zlabs_default_list_is_computed_and_not_trusted() -> None:
    """z-lab/dflash issue 156: every published file has the list."""
    assert default_outputs(36, 5) == (1, 9, 17, 25, 33)
    assert default_outputs(12, 1) == (6,)
    read = draft("zlab-dflash-default-layers")
    assert read.aux_layer_ids == (1, 5)
    assert only(read.diagnostics, "SD324").severity == "warning"
    wide = draft(ZLAB, {"dflash_config.target_layer_ids": DELETE})
    assert "SD503" in all_codes(wide)  # fc has columns for five states
    open_count = draft(
        ZLAB, {"dflash_config.target_layer_ids": DELETE, "num_target_layers": DELETE}
    )
    assert "SD206" in codes(open_count.diagnostics)
    assert "SD206" in codes(draft(DEEPSPEC, {"target_layer_ids": DELETE}).diagnostics)


def test_an_id_of_the_last_layer_is_legal_and_one_past_it_is_not() -> None:
    """SGLang issue 32204: output n - 1 is the state before the final norm."""
    last = draft(ZLAB, {"dflash_config.target_layer_ids": [0, 1, 3, 5, 7]})
    assert all_codes(last) == []
    assert only(checks.check_pair(last, target("hf-llama-tiny")), "SD312").severity == "info"
    past = draft(ZLAB, {"dflash_config.target_layer_ids": [0, 1, 3, 5, 8]})
    assert only(past.diagnostics, "SD304").found == "8"


def test_the_target_depth_that_a_draft_was_made_for_is_compared() -> None:
    other = draft(ZLAB, {"num_target_layers": 12})
    found = only(checks.check_pair(other, target("hf-llama-tiny")), "SD317")
    assert (found.expected, found.found) == ("8", "12")


def test_both_spellings_of_a_codebook_are_one_role() -> None:
    """exllamav3 issue 390: bare in newer files, `.weight` in older ones."""
    new, old = draft(ZLAB2), draft("zlab-dflash2-suffixed")
    assert set(new.tensors) == set(old.tensors)
    assert new.details == old.details
    both = draft(ZLAB2, add={"candidate_selector.successor_codebook.weight": (64, 3)})
    assert "SD505" in codes(both.diagnostics)


def test_a_mask_vector_in_a_file_replaces_the_row() -> None:
    """vLLM issue 46104: MiMo's mask token has no trained row of the embedding."""
    read = draft("zlab-dflash-mask-file", {"dflash_config.mask_token_id": 99})
    assert "SD314" not in all_codes(read)
    assert read.details["mask_file"] == "mask_embedding.pt"
    without = draft("zlab-dflash-mask-file", {"dflash_config.mask_token_id": DELETE})
    assert "SD314" not in all_codes(without)
    assert "SD314" in all_codes(draft(ZLAB, {"dflash_config.mask_token_id": DELETE}))


def test_a_state_norm_too_few_is_missed() -> None:
    """ROCmFPX issues 44 and 48: Laguna without its norms still writes fluent text."""
    cut = draft("laguna-dflash-clean", drop=("aux_hidden_norms.3.weight",))
    assert "aux_hidden_norms.3.weight" in only(cut.diagnostics, "SD501").where
    assert draft("laguna-dflash-clean").has_fc_norm


@pytest.mark.parametrize(
    ("name", "key", "shape"),
    [
        (ZLAB, "layers.1.self_attn.k_norm.weight", (10,)),
        (ZLAB, "layers.0.self_attn.k_proj.weight", (12, 10)),
        (ZLAB2, "layers.0.mlp_conv.base_kernel", (2, 10, 2)),
        (ZLAB2, "layers.1.attention_conv.kernel_projection.weight", (10, 8)),
        (ZLAB2, "candidate_selector.successor_codebook", (3, 64)),
        (DEEPSPEC, "confidence_head.proj.weight", (1, 10)),
        (MODELOPT, "markov_w1.weight", (3, 64)),
        (DOMINO, "logit_head.prefix_gru.weight_hh_l0", (18, 10)),
        (DOMINO, "logit_head.embed_proj.0.weight", (4, 10)),
        ("speculators-xpress-clean", "refiner_head.mix_l", (5, 5, 3)),
        ("speculators-xpress-clean", "refiner_head.readout.weight", (64, 3)),
        ("laguna-dflash-clean", "layers.0.self_attn.qkv_proj.weight", (18, 10)),
        ("laguna-dflash-clean", "layers.1.self_attn.g_proj.weight", (10, 2)),
        ("zlab-dflash-latent", "layers.0.self_attn.kv_b_proj.weight", (3, 22)),
        ("deepseek-v4-dspark-stages", "mtp.0.main_proj.weight", (30, 10)),
        ("deepseek-v4-dspark-stages", "mtp.1.confidence_head.proj.weight", (1, 10)),
    ],
)
def test_a_wrong_shape_is_found_in_every_dialect(
    name: str, key: str, shape: tuple[int, ...]
) -> None:
    assert key in opened(name).tensors
    found = only(checks.check_draft(draft(name, add={key: shape})), "SD503")
    assert key in found.where


@pytest.mark.parametrize(
    ("name", "edits", "code"),
    [
        (ZLAB2, {"dflash_config.conv_kernel_size": 6}, "SD323"),
        (ZLAB2, {"dflash_config.selector_rank": DELETE}, "SD206"),
        (ZLAB2, {"dflash_config.selector_rank": 4}, "SD503"),
        (ZLAB2, {"selector_rank": 4}, "SD208"),
        ("speculators-dflash2-clean", {"sample_from_anchor": True}, "SD321"),
        ("speculators-xpress-clean", {"xpress_mlp_ratio": 4}, "SD503"),
        (DOMINO, {"dflash_config.emb_dim": DELETE}, "SD206"),
        (DOMINO, {"dflash_config.shift_label": DELETE}, "SD307"),
        (ZLAB, {"block_size": DELETE}, "SD206"),
        (ZLAB, {"dflash_config": [1]}, "SD207"),
        (ZLAB, {"dflash_config.causal": True, "is_causal": False}, "SD208"),
        (DEEPSPEC, {"markov_head_type": "gated"}, "SD501"),
        (DEEPSPEC, {"markov_rank": 0}, "SD313"),
    ],
)
def test_config_defects(name: str, edits: dict[str, object], code: str) -> None:
    assert code in all_codes(draft(name, edits))


def test_stored_parts_of_another_markov_head_are_named() -> None:
    add = {"markov_head.joint_proj.weight": (9, 16), "markov_head.joint_proj.bias": (9,)}
    assert "SD506" in codes(draft(DEEPSPEC, add=add).diagnostics)


@pytest.mark.parametrize(
    ("name", "edit", "format"),
    [
        (ZLAB, lambda: opened(ZLAB, {"architectures": DELETE}), "zlab-dflash"),
        (ZLAB, lambda: opened(ZLAB, {"dflash_config": DELETE}), "zlab-dflash"),
        (ZLAB2, lambda: opened(ZLAB2, {"architectures": DELETE}), "zlab-dflash2"),
        (DEEPSPEC, lambda: opened(DEEPSPEC, {"architectures": DELETE}), "deepspec-dspark"),
        (MODELOPT, lambda: opened(MODELOPT, {"dflash_config": DELETE}), "modelopt-dspark"),
        (DOMINO, lambda: opened(DOMINO, {"architectures": DELETE}), "domino"),
        (
            "deepspec-dspark-dflash",
            lambda: opened("deepspec-dspark-dflash", {"architectures": ["Gemma4DSparkModel"]}),
            "deepspec-dspark",
        ),
        (
            ZLAB,
            lambda: opened(ZLAB, {"architectures": ["KimiK3DFlashDraftModel"]}),
            "zlab-dflash",
        ),
    ],
)
def test_detection_by_what_is_left(name: str, edit: Callable[[], object], format: str) -> None:
    assert formats.detect(edit()).format == format  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "config", "add"),
    [
        ("speculators-dflash-clean", {}, {"candidate_selector.successor_codebook": (64, 3)}),
        ("speculators-dspark-clean", {}, {"markov_w1.weight": (64, 3)}),
        (ZLAB, {}, {"refiner_head.mix_l": (3, 5, 5)}),
        (MODELOPT, {}, {"markov_head.markov_w1.weight": (64, 3)}),
        (DEEPSPEC, {"architectures": ["DFlash2DraftModel"]}, {}),
    ],
)
def test_two_layouts_in_one_file_are_a_conflict(
    name: str, config: dict[str, object], add: dict[str, tuple[int, ...]]
) -> None:
    found = formats.detect(opened(name, config, add=add))
    assert [d.code for d in found.diagnostics] == ["SD202"]


def test_a_manifest_describes_no_stages_and_no_causal_layers() -> None:
    fits = draft(DEEPSPEC)
    assert fits.to_draft(source=".", revision=None) is not None
    for name in ("deepspec-dspark-bonus-anchor", "deepseek-v4-dspark-stages"):
        assert draft(name).to_draft(source=".", revision=None) is None


def test_a_bundled_draft_is_read_out_of_its_target() -> None:
    checkpoint = opened("hf-deepseek-v4-dspark")
    found = formats.detect(checkpoint)
    assert (found.format, found.bundled) == ("huggingface", "deepseek-v4-dspark")
    inside = formats.read_draft(checkpoint)
    alone = draft("deepseek-v4-dspark-stages")
    assert inside.aux_layer_ids == alone.aux_layer_ids == (5, 6, 7)
    assert set(inside.tensors) == set(alone.tensors)
    assert (inside.target_num_layers, inside.mask_token_id) == (8, 2)
    assert inside.details["num_stages"] == 2
    newer = formats.read_draft(opened("hf-deepseek-v4-dspark", {"model_type": "deepseek_v41"}))
    assert newer.aux_layer_ids == (4, 5, 6)  # V4.1 lists the layers that read the state
