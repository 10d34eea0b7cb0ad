"""EAGLE drafts written in other dialects: the same bytes, the same facts, or a reason why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specctl import formats
from specctl.checkpoint import open_checkpoint
from tests.unit.specctl.formats.conversions import (
    bytes_by_role,
    config_of,
    read,
    refusals,
    run,
    target_of,
)
from tests.unit.specctl.formats.edits import CHECKPOINTS

AUX = "eagle_aux_hidden_state_layer_ids"
FLAT = ("safeailab-eagle3", "specforge-eagle3", "modelopt-eagle3", "nemo-eagle3")
FACTS = (
    "algorithm",
    "decoder",
    "target_hidden_size",
    "target_vocab_size",
    "draft_vocab_size",
    "draft_to_target",
    "has_fc_bias",
    "has_norm_before_residual",
    "has_norm_before_fc",
    "has_fc_norm",
    "has_norm_output",
    "mask_token_id",
    "aux_layer_ids",
)

# Source, and every dialect that holds it without loss.
LOSSLESS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("safeailab-eagle3-clean", (*FLAT, "speculators-eagle3")),
    ("safeailab-eagle3-two-layers", (*FLAT, "speculators-eagle3")),
    ("safeailab-eagle3-qkv-bias", FLAT),
    ("safeailab-eagle3-head-dim-absent", (*FLAT, "speculators-eagle3")),
    ("specforge-eagle3-clean", (*FLAT, "speculators-eagle3")),
    ("specforge-eagle3-boundary-ids", (*FLAT, "speculators-eagle3")),
    ("specforge-eagle3-norm-output", (*FLAT[1:], "speculators-eagle3")),
    ("specforge-eagle3-aux-norms", (*FLAT[1:], "speculators-eagle3")),
    ("modelopt-eagle3-clean", (*FLAT, "speculators-eagle3")),
    ("modelopt-eagle3-side-map", (*FLAT, "speculators-eagle3")),
    ("modelopt-eagle3-nested-norm", (*FLAT[1:], "speculators-eagle3")),
    ("modelopt-eagle3-parallel-heads", ("modelopt-eagle3",)),
    ("modelopt-eagle3-last-state-only", ("modelopt-eagle3",)),
    ("nemo-eagle3-clean", (*FLAT, "speculators-eagle3")),
    ("nemo-eagle3-side-map", (*FLAT, "speculators-eagle3")),
    ("deepspec-eagle3-clean", ("deepspec-eagle3", *FLAT[2:], "speculators-eagle3")),
    ("deepspec-eagle3-two-layers", ("deepspec-eagle3",)),
    ("mla-eagle3-clean", ("mla-eagle3",)),
    ("speculators-eagle3-clean", (*FLAT, "speculators-eagle3")),
    ("speculators-eagle3-identity", (*FLAT, "speculators-eagle3")),
    ("speculators-eagle3-last-state", ("speculators-eagle3",)),
    ("peagle-clean", ("peagle", "speculators-peagle")),
    ("peagle-depths", ("peagle", "speculators-peagle")),
    ("peagle-wide-target", ("peagle",)),
    ("speculators-peagle-clean", ("peagle", "speculators-peagle")),
    ("eagle-clean", ("eagle", "speculators-eagle")),
    ("eagle-bias", ("eagle", "speculators-eagle")),
    ("eagle-qkv-bias", ("eagle",)),
    ("speculators-eagle-clean", ("eagle", "speculators-eagle")),
    ("speculators-eagle-hass", ("eagle", "speculators-eagle")),
)


@pytest.mark.parametrize(
    ("name", "to"), [(name, to) for name, dialects in LOSSLESS for to in dialects]
)
def test_a_dialect_keeps_every_fact_and_every_byte(name: str, to: str, tmp_path: Path) -> None:
    report = run(name, to, tmp_path / "out")
    assert report.state == "written", refusals(report)
    assert report.losses_allowed == ()
    target = target_of(name)
    before, source = read(CHECKPOINTS / name, target)
    after, written = read(tmp_path / "out", target)
    assert written.format == to
    says_nothing = {"draft_to_target"} if source.map_kind == "identity" else set()
    for fact in (name for name in FACTS if name not in says_nothing):
        assert getattr(written, fact) == getattr(source, fact), fact
    old, new = bytes_by_role(before, source), bytes_by_role(after, written)
    derived = {"d2t", "t2d"} - old.keys()
    assert {role: data for role, data in new.items() if role in old} == {
        role: data for role, data in old.items() if role in new
    }
    left_out = old.keys() - new.keys()
    assert left_out <= {"t2d"} | ({"d2t", "t2d"} if source.map_kind == "identity" else set())
    assert new.keys() - old.keys() <= derived | {"embedding", "head"}
    assert written.unmapped == ()
    assert written.unknown_fields == ()


ROUND_TRIPS = [
    ("safeailab-eagle3-clean", "speculators-eagle3", "safeailab-eagle3"),
    ("specforge-eagle3-clean", "speculators-eagle3", "specforge-eagle3"),
    ("specforge-eagle3-clean", "modelopt-eagle3", "specforge-eagle3"),
    ("modelopt-eagle3-clean", "speculators-eagle3", "modelopt-eagle3"),
    ("modelopt-eagle3-clean", "specforge-eagle3", "modelopt-eagle3"),
    ("speculators-eagle3-own-embedding", "safeailab-eagle3", "speculators-eagle3"),
    ("speculators-eagle3-own-embedding", "nemo-eagle3", "speculators-eagle3"),
    ("deepspec-eagle3-clean", "deepspec-eagle3", "deepspec-eagle3"),
    ("speculators-peagle-clean", "peagle", "speculators-peagle"),
    ("peagle-clean", "speculators-peagle", "peagle"),
    ("eagle-clean", "speculators-eagle", "eagle"),
    ("speculators-eagle-hass", "eagle", "speculators-eagle"),
]


@pytest.mark.parametrize(("name", "there", "back"), ROUND_TRIPS)
def test_there_and_back_is_the_same_file(name: str, there: str, back: str, tmp_path: Path) -> None:
    """The way back of a canonical file gives its bytes and its config again."""
    target = target_of(name)
    first, second, third = (tmp_path / part for part in ("canonical", "there", "back"))
    steps = [(CHECKPOINTS / name, back, first), (first, there, second), (second, back, third)]
    for source, to, out in steps:
        report = run(str(source), to, out, target=target)
        assert report.state == "written", refusals(report)
    assert config_of(third) == config_of(first)
    one, other = open_checkpoint(first), open_checkpoint(third)
    source_keys = set(open_checkpoint(CHECKPOINTS / name).tensors)
    added = other.tensors.keys() - one.tensors.keys()
    # The library's dialects store the target's embedding; it stays on the way back.
    assert added <= {"embed_tokens.weight", "t2d"}
    for key in one.tensors:
        assert other.read_bytes(key) == one.read_bytes(key)
    assert source_keys <= {*other.tensors, "t2d"}


def test_speculators_files_count_boundaries_and_state_what_readers_disagree_on(
    tmp_path: Path,
) -> None:
    """Speculators issue 812 and its converter: ids and layers were lost without a word."""
    report = run("specforge-eagle3-clean", "speculators-eagle3", tmp_path / "out")
    assert report.state == "written"
    config = config_of(tmp_path / "out")
    assert config[AUX] == [2, 4, 5]
    assert config["norm_before_residual"] is False
    assert config["target_hidden_size"] is None
    assert config["transformer_layer_config"]["vocab_size"] == 64
    two = run("safeailab-eagle3-two-layers", "speculators-eagle3", tmp_path / "two")
    assert two.state == "written"
    assert "layers.1.self_attn.q_proj.weight" in open_checkpoint(tmp_path / "two").tensors
    assert config_of(tmp_path / "two")["transformer_layer_config"]["num_hidden_layers"] == 2


def test_flat_files_count_outputs(tmp_path: Path) -> None:
    run("speculators-eagle3-clean", "specforge-eagle3", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["eagle_config"][AUX] == [1, 3, 4]
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert set(open_checkpoint(tmp_path / "out").tensors) == set(
        open_checkpoint(CHECKPOINTS / "specforge-eagle3-clean").tensors
    )


def test_a_missing_embedding_comes_from_the_target_or_is_refused(tmp_path: Path) -> None:
    """Speculators 0.9 loads a file without an embedding with zeros, and says nothing."""
    run("specforge-eagle3-clean", "speculators-eagle3", tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    target = open_checkpoint(CHECKPOINTS / "hf-llama-tiny")
    assert written.read_bytes("embed_tokens.weight") == target.read_bytes(
        "model.embed_tokens.weight"
    )
    alone = run("specforge-eagle3-clean", "speculators-eagle3", tmp_path / "alone", target=None)
    assert any("--target" in str(d.expected) for d in alone.diagnostics)
    assert refusals(alone)


def test_a_missing_head_is_gathered_from_the_target(tmp_path: Path) -> None:
    report = run("speculators-eagle3-no-head", "specforge-eagle3", tmp_path / "out")
    assert report.state == "written", refusals(report)
    head = open_checkpoint(tmp_path / "out").read_bytes("lm_head.weight")
    assert head == open_checkpoint(CHECKPOINTS / "hf-llama-tiny").read_bytes("lm_head.weight")


def test_mask_hidden_changes_its_rank_and_not_its_bytes(tmp_path: Path) -> None:
    run("peagle-clean", "speculators-peagle", tmp_path / "out")
    written = open_checkpoint(tmp_path / "out")
    assert written.tensors["mask_hidden"].shape == (1, 1, 30)
    assert config_of(tmp_path / "out")["mask_token_id"] == 63
    run(str(tmp_path / "out"), "peagle", tmp_path / "back")
    assert open_checkpoint(tmp_path / "back").tensors["mask_hidden"].shape == (1, 30)


def test_a_second_layer_enters_a_dialect_of_one_only_from_such_a_file(tmp_path: Path) -> None:
    """Speculators issue 812: refuse or carry over; files with `midlayer.` and `layers.1.` exist."""
    options = {"target": str(CHECKPOINTS / "hf-llama-tiny")}
    run("safeailab-eagle3-two-layers", "modelopt-eagle3", tmp_path / "flat", **options)
    found = refusals(run(str(tmp_path / "flat"), "specforge-eagle3", tmp_path / "out", **options))
    assert any(line.startswith("SD602 the dialect has one layer") for line in found)


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("specforge-eagle3-boundary-ids", [1, 3, 4]),
        ("specforge-eagle3-last-boundary", [3, 6, 8]),
        ("specforge-eagle3-undecided-ids", [3, 4, 6]),
    ],
)
def test_a_dialect_counts_outputs_or_keeps_a_list_that_outputs_cannot_say(
    name: str, ids: list[int], tmp_path: Path
) -> None:
    report = run(name, "specforge-eagle3", tmp_path / "out")
    assert report.state == "written", refusals(report)
    assert config_of(tmp_path / "out")["eagle_config"][AUX] == ids


def test_a_map_in_rank_order_keeps_its_order(tmp_path: Path) -> None:
    run("modelopt-eagle3-clean", "speculators-eagle3", tmp_path / "out")
    source = open_checkpoint(CHECKPOINTS / "modelopt-eagle3-clean")
    written = open_checkpoint(tmp_path / "out")
    for key in ("d2t", "lm_head.weight"):
        assert written.read_bytes(key) == source.read_bytes(key)
    assert sum(written.read_mask("t2d")) == 24
    assert "SD222" in [d.code for d in formats.read_draft(written).diagnostics]


@pytest.mark.parametrize(
    ("name", "to", "words"),
    [
        ("safeailab-eagle3-qkv-bias", "speculators-eagle3", "SD602 Speculators' layers have bias"),
        ("specforge-eagle3-norm-output", "safeailab-eagle3", "SD602 the reference of this"),
        ("specforge-eagle3-undecided-ids", "modelopt-eagle3", "SD602 ids [3, 4, 6] do not say"),
        ("modelopt-eagle3-parallel-heads", "specforge-eagle3", "SD602 the dialect's writer has no"),
        ("modelopt-eagle3-last-state-only", "nemo-eagle3", "SD602 the dialect always has"),
        ("deepspec-eagle3-clean", "specforge-eagle3", "SD602 SpecForge's drafts capture three"),
        ("deepspec-eagle3-clean", "safeailab-eagle3", "SD601 outputs [1, 2, 4, 5, 6] are captured"),
        ("deepspec-eagle3-two-layers", "modelopt-eagle3", "SD602 the layers after the first read"),
        (
            "specforge-eagle3-clean",
            "deepspec-eagle3",
            "SD602 DeepSpec's class demands `ttt_length`",
        ),
        ("specforge-eagle3-clean", "mla-eagle3", "SD602 the draft's attention is not"),
        ("mla-eagle3-clean", "speculators-eagle3", "SD602 the layers are of a kind"),
        ("speculators-eagle3-last-state", "specforge-eagle3", "SD602 the list [3, 5, 7] counts"),
        ("speculators-eagle3-wide-target", "speculators-eagle3", "SD601 the draft is 10 wide"),
        ("peagle-mask-unstated", "speculators-peagle", "SD314"),
    ],
)
def test_what_a_dialect_cannot_hold_is_refused_with_the_reason(
    name: str, to: str, words: str, tmp_path: Path
) -> None:
    found = refusals(run(name, to, tmp_path / "out"))
    assert any(line.startswith(words) for line in found), found
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "to", "words"),
    [
        ("vllm-eagle-clean", "eagle", "SD601 `lm_head.weight` has no place"),
        ("eagle-qkv-bias", "speculators-eagle", "SD601 `embed_tokens.weight` has no place"),
    ],
)
def test_a_copy_is_left_out_when_the_target_shows_that_it_is_one(
    name: str, to: str, words: str, tmp_path: Path
) -> None:
    alone = refusals(run(name, to, tmp_path / "alone", target=None))
    assert any(line.startswith(words) for line in alone), alone
    assert run(name, to, tmp_path / "out").state == "written"


def test_a_loss_is_accepted_by_its_name(tmp_path: Path) -> None:
    report = run("vllm-eagle-clean", "eagle", tmp_path / "out", allow=("head",), target=None)
    assert report.state == "written", refusals(report)
    assert report.losses_allowed == ("head",)
    assert "lm_head.weight" not in open_checkpoint(tmp_path / "out").tensors
    wide = run(
        "speculators-eagle3-wide-target",
        "speculators-eagle3",
        tmp_path / "wide",
        allow=("library-load",),
    )
    assert wide.state == "written", refusals(wide)
    assert config_of(tmp_path / "wide")["target_hidden_size"] == 20


def test_a_normed_residual_leaves_its_library_only_where_it_is_computed(tmp_path: Path) -> None:
    """SGLang has no `norm_before_residual`; such a draft would run another residual there."""
    source = tmp_path / "source"
    source.mkdir()
    for file in ("config.json", "model.safetensors"):
        (source / file).write_bytes((CHECKPOINTS / "speculators-eagle3-clean" / file).read_bytes())
    config = config_of(source) | {"norm_before_residual": True}
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    for to in FLAT:
        found = refusals(run(str(source), to, tmp_path / "out", target=target_of("eagle-clean")))
        assert any("norm_before_residual" in line or "residual" in line for line in found)


def test_a_map_that_leaves_the_vocabulary_stops_a_conversion(tmp_path: Path) -> None:
    found = refusals(run("speculators-eagle3-map-too-large", "specforge-eagle3", tmp_path / "out"))
    assert any(line.startswith("SD402") for line in found)


def test_the_reference_accepts_two_keys_of_rope_scaling(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(CHECKPOINTS / "specforge-eagle3-clean", source)
    config = config_of(source)
    for scaling, state in (
        ({"rope_type": "linear", "factor": 4.0}, "written"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "refused"),
    ):
        (source / "config.json").write_text(json.dumps(config | {"rope_scaling": scaling}), "utf-8")
        target = str(CHECKPOINTS / "hf-llama-tiny")
        assert run(str(source), "safeailab-eagle3", out, target=target).state == state
    assert config_of(out)["rope_scaling"] == {"type": "linear", "factor": 4.0}


def test_both_spellings_of_the_rotary_numbers_are_written(tmp_path: Path) -> None:
    """NeMo Automodel issue 2920 and vLLM issue 51092: each reader knows one of them."""
    run("specforge-eagle3-new-rope", "specforge-eagle3", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000
