"""What the readers of targets and drafts make of a config, fact by fact."""

from __future__ import annotations

import pytest

from specctl import checks, formats
from specctl.contract.manifest import BlockDraft
from specctl.formats import aux_layers
from tests.unit.specctl.formats.edits import DELETE, all_codes, codes, draft, target

EAGLE3 = "speculators-eagle3-clean"
DSPARK = "speculators-dspark-clean"
LAYER = "transformer_layer_config"


@pytest.mark.parametrize(
    ("name", "family", "bias", "qk_norm", "types"),
    [
        ("hf-llama-clean", "llama", False, False, {"full_attention"}),
        ("hf-mistral-clean", "mistral", False, False, {"sliding_attention"}),
        ("hf-qwen2-clean", "qwen2", True, False, {"full_attention"}),
        ("hf-qwen3-clean", "qwen3", False, True, {"full_attention"}),
    ],
)
def test_a_target_family(
    name: str, family: str, bias: bool, qk_norm: bool, types: set[str]
) -> None:
    read = target(name)
    assert read.decoder is not None
    assert read.decoder.family == family
    assert (read.decoder.has_qkv_bias, read.decoder.has_qk_norm) == (bias, qk_norm)
    assert set(read.decoder.layer_types) == types
    assert (read.decoder.sliding_window is not None) == (family == "mistral")
    assert read.to_target(source=".", revision=None) is not None
    assert read.unmapped == ()


@pytest.mark.parametrize(
    ("name", "config", "window", "types"),
    [
        ("hf-mistral-clean", {"sliding_window": DELETE}, 4096, {"sliding_attention"}),
        ("hf-mistral-clean", {"sliding_window": None}, None, {"full_attention"}),
        ("hf-qwen3-clean", {}, None, {"full_attention"}),
        (
            "hf-qwen3-clean",
            {"use_sliding_window": True, "max_window_layers": 0},
            4096,
            {"sliding_attention"},
        ),
        (
            "hf-qwen2-clean",
            {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None},
            None,
            {"full_attention"},
        ),
    ],
)
def test_an_absent_window_is_the_class_default_and_null_is_none(
    name: str, config: dict[str, object], window: int | None, types: set[str]
) -> None:
    read = target(name, config=config)
    assert read.decoder is not None
    assert read.decoder.sliding_window == window
    assert set(read.decoder.layer_types) == types


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta", "num_hidden_layers"])
def test_a_number_beyond_reason_is_refused_and_costs_nothing(key: str) -> None:
    read = target("hf-llama-clean", {key: 10**400})
    assert "SD207" in codes(read.diagnostics)
    assert len(read.diagnostics) < 200


def test_a_layer_index_beyond_reason_makes_a_bounded_list() -> None:
    far = f"layers.{10**9}.self_attn.q_proj.weight"
    read = draft(EAGLE3, add={far: (24, 32)})
    assert codes(read.diagnostics) == ["SD502"]


def test_a_scaling_list_with_a_number_beyond_floats_is_kept_as_text() -> None:
    scaling = {"rope_type": "longrope", "long_factor": [10**400]}
    read = target("hf-llama-clean", {"rope_scaling": scaling})
    assert read.decoder is not None
    assert isinstance(read.decoder.rope.parameters["long_factor"], str)


@pytest.mark.parametrize("name", ["hf-llama-sharded", "hf-llama-bin"])
def test_a_container_does_not_change_the_facts(name: str) -> None:
    read = target(name)
    assert len(read.tensors) == 21
    assert read.num_layers == 2
    assert read.embedding is not None
    assert read.embedding.file in {file.file for file in read.files}


def test_a_tied_head_is_the_embedding() -> None:
    read = target("hf-llama-tied")
    assert read.is_head_tied
    assert read.head == read.embedding
    copied = target("hf-llama-tied-copy")
    assert copied.head == copied.embedding
    assert "head" not in copied.tensors


def test_a_missing_untied_head_is_refused() -> None:
    read = target("hf-llama-clean", drop=("lm_head.weight",))
    assert codes(read.diagnostics) == ["SD501"]
    assert read.to_target(source=".", revision=None) is None


def test_an_unsupported_target_still_lists_its_embedding() -> None:
    read = target("hf-gpt2-unsupported")
    assert read.embedding is not None
    assert read.embedding.key == "transformer.wte.weight"
    assert (read.decoder, read.vocab_size, read.num_layers) == (None, 64, 1)


def test_end_ids_come_from_config_generation_config_and_tokenizer() -> None:
    assert target("hf-llama-clean").eos_token_ids == (1,)
    assert target("hf-llama-clean", {"eos_token_id": [3, 2]}).eos_token_ids == (1, 2, 3)
    assert target("hf-llama-clean").tokenizer_size == 64


def test_a_bundled_prediction_layer_is_not_part_of_the_target() -> None:
    read = target("hf-llama-bundled-mtp")
    assert read.num_layers == 1
    assert all("layers.1" not in ref.key for ref in read.tensors.values())


def test_a_target_with_more_layers_than_its_config_says() -> None:
    read = target("hf-llama-clean", {"num_hidden_layers": 6})
    assert read.decoder is not None
    assert read.decoder.num_layers == 6
    assert codes(read.diagnostics) == ["SD310"]
    assert len(read.unmapped) == 18


def test_absent_keys_of_a_nested_config_are_class_defaults_and_say_so() -> None:
    read = draft(EAGLE3, {f"{LAYER}.rms_norm_eps": DELETE, f"{LAYER}.hidden_act": DELETE})
    assert read.decoder is not None
    assert read.decoder.rms_norm_eps == 1e-6
    origin = read.origins["draft.decoder.rms_norm_eps"]
    assert origin.kind == "derived"
    assert "LlamaConfig" in (origin.rule or "")


def test_a_flat_config_never_takes_a_dimension_from_a_class() -> None:
    read = draft("safeailab-eagle3-clean", {"hidden_size": DELETE})
    assert read.decoder is None
    assert "SD206" in codes(read.diagnostics)


@pytest.mark.parametrize("n", [8, 30, 32, 36, 61])
def test_the_default_layers_are_the_same_states_in_both_numberings(n: int) -> None:
    outputs = (1, n // 2 - 1, n - 4)
    assert aux_layers.to_canonical(aux_layers.default_boundaries(n), "boundary") == outputs


def test_the_default_layers_wait_for_the_target_and_name_their_rule() -> None:
    read = draft("safeailab-eagle3-clean")
    assert read.aux_layer_ids is None
    assert "SD306" in codes(read.diagnostics)
    completed = formats.complete_draft(read, target("hf-llama-clean"))
    assert completed.aux_layer_ids == (1, 3, 4)
    assert "SD306" not in codes(completed.diagnostics)
    origin = completed.origins["draft.aux_layer_ids"]
    assert origin.kind == "derived"
    assert "n = 8" in (origin.rule or "")


def test_an_id_equal_to_the_layer_count_proves_boundaries() -> None:
    read = draft("specforge-eagle3-last-boundary")
    assert read.aux_layer_ids is None
    completed = formats.complete_draft(read, target("hf-llama-tiny"))
    assert (completed.aux_layer_ids, completed.aux_numbering) == ((2, 5, 7), "boundary")
    assert "SD303" not in codes(completed.diagnostics)


def test_given_ids_win_and_settle_the_question() -> None:
    read = draft("specforge-eagle3-undecided-ids")
    said = formats.with_given(read, aux_numbering="boundary")
    assert said.aux_layer_ids == (2, 3, 5)
    assert said.origins["draft.aux_layer_ids"].kind == "given"
    assert "SD303" not in codes(said.diagnostics)
    listed = formats.with_given(read, aux_layer_ids=(1, 2, 3))
    assert (listed.aux_layer_ids, listed.aux_numbering) == ((1, 2, 3), "output")


@pytest.mark.parametrize(
    ("anchor", "tokens", "width", "codes_found"),
    [
        (True, 5, 5, []),
        (False, 4, 5, []),
        (True, 4, 4, ["SD302"]),
        (False, 5, 5, ["SD302"]),
        (True, 3, 3, ["SD302"]),
        (True, 9, 5, ["SD302"]),
    ],
)
def test_dspark_widths(anchor: bool, tokens: int, width: int, codes_found: list[str]) -> None:
    methods = [{"proposal_type": "greedy", "speculative_tokens": tokens}]
    read = draft(
        DSPARK,
        {"sample_from_anchor": anchor, "speculators_config.proposal_methods": methods},
    )
    assert codes(read.diagnostics) == codes_found
    assert read.geometry is not None
    assert read.geometry.draft_width == width
    assert read.geometry.verify_width == read.geometry.num_speculative_tokens + 1
    # Fewer tokens than the block offers is legal unless it is the other convention's number.
    severities = {d.severity for d in read.diagnostics}
    assert severities <= ({"warning"} if tokens == 3 else {"error"})


def test_a_block_offers_at_most_its_slots() -> None:
    read = draft(DSPARK)
    fewer = formats.with_given(read, num_speculative_tokens=2)
    assert fewer.geometry is not None
    assert (fewer.geometry.num_speculative_tokens, fewer.geometry.draft_width) == (2, 2)
    more = formats.with_given(read, num_speculative_tokens=6)
    assert codes(more.diagnostics) == ["SD302"]
    assert more.geometry == read.geometry


def test_a_given_token_count_is_a_chains_geometry() -> None:
    read = formats.with_given(draft("deepseek-mtp-clean"), num_speculative_tokens=3)
    assert read.geometry is not None
    assert (read.geometry.draft_width, read.geometry.verify_width) == (1, 4)
    assert read.geometry.sample_from_anchor is None
    assert read.origins["geometry.num_speculative_tokens"].kind == "given"
    assert codes(read.diagnostics) == []


def test_an_mtp_layer_is_numbered_after_its_target() -> None:
    read = draft("deepseek-mtp-clean")
    assert read.target_num_layers == 8
    assert "layers.0.q_proj.weight" in read.tensors
    assert codes(checks.check_pair(read, target("hf-llama-wide"))) == ["SD305", "SD317", "SD509"]


def test_several_prediction_layers_are_described() -> None:
    read = draft("deepseek-mtp-clean", add={"model.layers.9.eh_proj.weight": (10, 20)})
    assert codes(read.diagnostics) == ["SD301", "SD310", "SD501"]
    assert read.details["num_prediction_layers"] == 2
    assert read.decoder is not None
    assert read.decoder.num_layers == 2


@pytest.mark.parametrize(
    ("edits", "code"),
    [
        ({"markov_head_type": "tree"}, "SD207"),
        ({"enable_confidence_head": False}, "SD506"),
        ({"markov_rank": 0, "confidence_head_with_markov": False}, "SD506"),
        ({"block_size": DELETE}, "SD206"),
        ({f"{LAYER}.layer_types": ["linear_attention", "full_attention"]}, "SD203"),
    ],
)
def test_dspark_config_defects(edits: dict[str, object], code: str) -> None:
    assert code in all_codes(draft(DSPARK, edits))


def test_dspark_non_causal_sliding_layers_are_stated() -> None:
    edits: dict[str, object] = {
        "sliding_window_non_causal": True,
        f"{LAYER}.layer_types": ["sliding_attention", "full_attention"],
        f"{LAYER}.use_sliding_window": True,
        f"{LAYER}.sliding_window": 16,
    }
    found = draft(DSPARK, edits)
    assert codes(found.diagnostics) == []
    section = found.to_draft(source="draft", revision=None)
    assert section is not None
    assert section.block == BlockDraft(is_causal=False)


def test_absent_dspark_heads_are_what_the_file_stores() -> None:
    stored = draft(DSPARK, {"markov_rank": DELETE, "enable_confidence_head": DELETE})
    assert stored.markov is not None
    assert stored.markov.rank == 3
    assert stored.has_confidence_head
    assert codes(stored.diagnostics) == []


def test_an_int8_or_missing_bias_is_judged_by_what_is_stored() -> None:
    denied = draft(
        EAGLE3,
        {f"{LAYER}.attention_bias": False},
        add={f"layers.0.self_attn.{n}_proj.bias": (24 if n == "q" else 12,) for n in "qkv"},
    )
    assert denied.decoder is not None
    assert denied.decoder.has_qkv_bias
    assert codes(denied.diagnostics) == ["SD506"]
    promised = draft(EAGLE3, {f"{LAYER}.attention_bias": True})
    assert codes(promised.diagnostics) == ["SD501"]


def test_two_norms_before_fc_exclude_each_other() -> None:
    read = draft(EAGLE3, {"norm_before_fc": True, "fc_norm": True})
    assert "SD208" in codes(read.diagnostics)


def test_a_damaged_container_is_not_blamed_on_missing_tensors() -> None:
    for name in ("container-shard-missing", "container-truncated", "container-lfs-pointer"):
        assert codes(draft(name).diagnostics) == []


def test_every_leaf_of_a_complete_draft_has_an_origin() -> None:
    read = formats.complete_draft(draft("safeailab-eagle3-clean"), target("hf-llama-clean"))
    assert {"draft", "draft.tensors", "draft.aux_layer_ids", "vocabulary.map_kind"} <= set(
        read.origins
    )
    assert all(origin.rule for origin in read.origins.values() if origin.kind == "derived")
    assert all(origin.where for origin in read.origins.values())
