"""One fact of a right draft changed at a time, as happens in the field: none passes unseen."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from specctl import checks, formats
from specctl.checkpoint import open_checkpoint
from specctl.contract.diagnostics import Diagnostic
from specctl.draft import DraftCheckpoint
from tests.unit.specctl.formats.edits import CHECKPOINTS, DELETE, codes, draft, target

EAGLE3 = "speculators-eagle3-clean"
SPECFORGE = "specforge-eagle3-clean"
MLA = "mla-eagle3-clean"
QWEN_MTP = "qwen-mtp-clean"


def only(read: DraftCheckpoint, code: str) -> Diagnostic:
    (found,) = [d for d in read.diagnostics if d.code == code]
    return found


@pytest.mark.parametrize(
    ("name", "flag", "tensors"),
    [
        (EAGLE3, "norm_before_fc", {"input_norm.weight": (48,)}),
        (EAGLE3, "fc_norm", {f"fc_norm.{i}.weight": (16,) for i in range(3)}),
        (SPECFORGE, "fc_norm", {f"fc_norm.{i}.weight": (10,) for i in range(3)}),
        (SPECFORGE, "fc_norm", {f"aux_norm_{i}.weight": (10,) for i in ("low", "mid", "high")}),
        (MLA, "norm_before_fc", {"input_norm.weight": (30,)}),
    ],
)
def test_a_stored_norm_is_applied_or_the_draft_is_refused(
    name: str, flag: str, tensors: dict[str, tuple[int, ...]]
) -> None:
    """vLLM pull request 38111: gpt-oss drafts hold `input_norm`, and their configs said nothing."""
    is_stated = flag in draft(name).config
    absent = draft(name, {flag: DELETE} if is_stated else None, add=tensors)
    assert getattr(absent, f"has_{flag}") is True
    assert only(absent, "SD506").severity == "warning"
    assert absent.origins[f"draft.has_{flag}"].rule == "the norm is stored"
    assert "SD501" not in codes(absent.diagnostics)
    denied = draft(name, {flag: False}, add=tensors)
    assert getattr(denied, f"has_{flag}") is False
    assert only(denied, "SD506").severity == "error"
    assert only(denied, "SD506").found == "false"


def test_one_of_three_stored_norms_asks_for_the_others() -> None:
    read = draft(EAGLE3, {"fc_norm": DELETE}, add={"fc_norm.0.weight": (16,)})
    assert {d.expected for d in read.diagnostics if d.code == "SD501"} == {
        "`fc_norm.1.weight`",
        "`fc_norm.2.weight`",
    }


def test_the_norms_of_an_eagle_1_draft_come_together() -> None:
    alone = draft("eagle-clean", add={"lm_head_layernorm.weight": (16,)})
    assert {d.expected for d in alone.diagnostics if d.code == "SD501"} == {
        "`embed_layernorm.weight`",
        "`hidden_layernorm.weight`",
    }


@pytest.mark.parametrize(
    ("name", "change", "severity", "kind"),
    [
        ("speculators-dspark-clean", {"markov_rank": 0}, "error", None),
        ("speculators-dspark-gated", {"markov_head_type": "vanilla"}, "error", "vanilla"),
        ("speculators-dspark-gated", {"markov_head_type": DELETE}, "warning", "gated"),
        ("speculators-dspark-rnn", {"markov_head_type": "gated"}, "error", "gated"),
        ("speculators-dspark-rnn", {"markov_head_type": DELETE}, "warning", "rnn"),
    ],
)
def test_a_stored_markov_head_is_used_or_the_draft_is_refused(
    name: str, change: dict[str, object], severity: str, kind: str | None
) -> None:
    read = draft(name, change)
    assert (None if read.markov is None else read.markov.kind) == kind
    found = [d for d in read.diagnostics if d.code == "SD506"]
    assert severity in {d.severity for d in found}


@pytest.mark.parametrize(("key", "shape"), [("d2t", (24, 1)), ("t2d", (1, 64))])
def test_a_map_has_one_dimension(key: str, shape: tuple[int, ...]) -> None:
    found = only(draft(EAGLE3, drop=(key,), add={key: shape}), "SD133")
    assert found.found == str(list(shape))


@pytest.mark.parametrize("value", ["2", 2.0, True, [1, "2"], {"id": 2}])
def test_an_end_id_that_is_no_number_is_refused(value: object) -> None:
    assert "SD207" in codes(draft(SPECFORGE, {"eos_token_id": value}).diagnostics)
    assert "SD207" in codes(target("hf-llama-clean", {"eos_token_id": value}).diagnostics)


@pytest.mark.parametrize("lost", ["q_proj", "k_proj", "v_proj", "o_proj"])
def test_a_prediction_layer_that_lost_a_projection_says_which(lost: str) -> None:
    key = f"mtp.layers.0.self_attn.{lost}.weight"
    read = draft(QWEN_MTP, drop=(key,))
    assert f"`{key}`" in {d.expected for d in read.diagnostics if d.code == "SD501"}


@pytest.mark.parametrize("lost", ["q_norm", "k_norm"])
def test_norms_of_queries_and_keys_come_in_pairs(lost: str) -> None:
    key = f"mtp.layers.0.self_attn.{lost}.weight"
    found = only(draft(QWEN_MTP, drop=(key,)), "SD501")
    assert found.expected == f"`{key}`"


def test_the_norm_of_a_head_has_the_heads_width() -> None:
    key = "mtp.layers.0.self_attn.q_norm.weight"
    read = draft(QWEN_MTP, drop=(key,), add={key: (7,)})
    assert "SD503" in codes(checks.check_draft(read))


@pytest.mark.parametrize(
    ("ids", "is_shifted"),
    [
        ([1, 3, 4], True),  # SpecForge's outputs, copied
        ([3, 5, 6], True),  # boundaries converted once too often
        ([2, 4, 5], False),
        ([1, 3, 5], False),
    ],
)
def test_a_list_that_is_one_off_the_usual_one_is_told(ids: list[int], is_shifted: bool) -> None:
    read = draft(EAGLE3, {"eagle_aux_hidden_state_layer_ids": ids})
    assert "SD331" not in codes(read.diagnostics)  # the target's depth decides
    owner = target("hf-llama-clean")
    completed = formats.complete_draft(read, owner)
    assert ("SD331" in codes(completed.diagnostics)) == is_shifted
    assert formats.complete_draft(completed, owner) == completed
    said = formats.with_given(completed, aux_numbering="output")
    assert "SD331" not in codes(formats.complete_draft(said, owner).diagnostics)


@pytest.mark.parametrize(
    ("ids", "is_shifted"),
    [([1, 2, 3, 4, 5], True), ([3, 4, 5, 6, 7], True), ([1, 2, 4, 6, 7], False)],
)
def test_a_list_of_a_block_draft_that_is_one_off_is_told(ids: list[int], is_shifted: bool) -> None:
    """vLLM pull request 40727: DFlash drafts lost a little of their accept length by it."""
    read = draft("speculators-dspark-clean", {"aux_hidden_state_layer_ids": ids})
    completed = formats.complete_draft(read, target("hf-llama-clean"))
    assert ("SD331" in codes(completed.diagnostics)) == is_shifted


@pytest.mark.parametrize(
    ("name", "value", "severity"),
    [
        (EAGLE3, 1e-6, "info"),
        (EAGLE3, 1.0, "warning"),
        ("deepseek-mtp-clean", 1e-6, "warning"),
    ],
)
def test_an_epsilon_other_than_the_targets_is_told(name: str, value: float, severity: str) -> None:
    key = "transformer_layer_config.rms_norm_eps" if name == EAGLE3 else "rms_norm_eps"
    found = checks.check_pair(draft(name, {key: value}), target("hf-llama-clean"))
    assert [(d.code, d.severity) for d in found if d.code == "SD332"] == [("SD332", severity)]


def test_a_prediction_layer_turns_as_its_target_does() -> None:
    found = checks.check_pair(
        draft("deepseek-mtp-clean", {"rope_theta": 1e6}), target("hf-llama-clean")
    )
    assert [d.severity for d in found if d.code == "SD329"] == ["warning"]


@pytest.mark.parametrize(
    "field", ["rope_theta", "rms_norm_eps", "head_dim", "attention_bias", "layer_types"]
)
def test_a_fact_of_the_layers_beside_their_section_is_not_passed_over(field: str) -> None:
    """A Speculators config states them inside `transformer_layer_config`; nobody reads the root."""
    read = draft(EAGLE3, {field: 8})
    assert read.unknown_fields == (f"/{field}",)
    assert "SD211" in codes(read.diagnostics)


def test_a_misspelt_number_of_the_rotary_section_is_not_passed_over() -> None:
    section = {"rope_type": "default", "theta": 500000.0}
    read = draft(EAGLE3, {"transformer_layer_config.rope_parameters": section})
    assert read.unknown_fields == ("/transformer_layer_config/rope_parameters/theta",)


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (7, 6)),  # two heads of 4
        ("model.layers.0.self_attn.q_norm.weight", (6,)),  # a width of the other kind of layer
        ("model.layers.1.self_attn.q_norm.weight", (4,)),
        ("model.layers.1.self_attn.o_proj.weight", (6, 8)),
    ],
)
def test_an_assistants_queries_have_the_width_of_their_layers_kind(
    key: str, shape: tuple[int, ...]
) -> None:
    found = only(draft("gemma4-assistant-clean", drop=(key,), add={key: shape}), "SD503")
    assert key in found.where
    assert found.found == str(list(shape))


@pytest.mark.parametrize(
    ("name", "field"),
    [("gemma4-assistant-clean", "hidden_size"), (QWEN_MTP, "hidden_size")],
)
def test_a_width_that_no_field_states_is_missed(name: str, field: str) -> None:
    assert "SD206" in codes(draft(name, {f"text_config.{field}": DELETE}).diagnostics)


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("safeailab-eagle3-clean", True),
        (SPECFORGE, True),
        ("nemo-eagle3-clean", True),
        ("peagle-clean", True),
        (MLA, True),
        ("speculators-dspark-clean", True),
        ("speculators-dflash-clean", True),
        ("modelopt-eagle3-clean", False),  # its maps are in the order of frequency
    ],
)
def test_a_map_out_of_order_is_told(name: str, is_told: bool, tmp_path: Path) -> None:
    for path in (CHECKPOINTS / name).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    ids = [1, 0, *range(2, 24)]
    stored = struct.pack("<24q", *(token - place for place, token in enumerate(ids)))
    ref = draft(name).tensors["d2t"]
    weights = tmp_path / ref.file
    data = weights.read_bytes()
    weights.write_bytes(data[: ref.begin] + stored + data[ref.end :])
    read = formats.read_draft(open_checkpoint(tmp_path))
    assert ("SD222" in codes(read.diagnostics)) == is_told
