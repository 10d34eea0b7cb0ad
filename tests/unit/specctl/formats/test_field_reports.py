"""Defects that people met in the field: each is found, and the finding says what they needed.

The codes of these fixtures are in fixtures/expected.yaml; here is what the findings say and what is
read in spite of them. `C...` are reports on loading, plain numbers reports on formats.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specctl import checks, formats
from specctl.checkpoint import open_checkpoint
from specctl.contract.diagnostics import Diagnostic
from tests.unit.specctl.formats.edits import (
    CHECKPOINTS,
    DELETE,
    all_codes,
    codes,
    draft,
    opened,
    target,
)

EAGLE3 = "speculators-eagle3-clean"
AUX = "eagle_aux_hidden_state_layer_ids"


def only(diagnostics: tuple[Diagnostic, ...], code: str) -> Diagnostic:
    (found,) = [d for d in diagnostics if d.code == code]
    return found


def test_c001_a_draft_of_another_width_keeps_its_embedding() -> None:
    read, wide = draft("speculators-eagle3-wide-target"), target("hf-llama-wide")
    assert (read.hidden_size, read.target_hidden_size) == (10, 20)
    assert read.sharing().embedding_single_stage == "own"
    assert checks.check_draft(read) == ()
    assert checks.check_pair(read, wide) == ()
    narrow = only(checks.check_draft(draft("speculators-eagle3-narrow-fc")), "SD503")
    assert "fc.weight" in narrow.where
    assert (narrow.expected, narrow.found) == ("[10, 60]", "[10, 30]")


def test_c003_a_missing_draft_vocab_size_is_taken_from_the_head() -> None:
    read = draft("speculators-eagle3-size-inferred")
    assert read.draft_vocab_size == 24
    assert "`draft_vocab_size`: 24" in str(only(read.diagnostics, "SD413").expected)
    without_map = draft(EAGLE3, {"draft_vocab_size": DELETE}, drop=("d2t", "t2d"))
    assert "SD401" in all_codes(without_map)


def test_c009_fc_for_three_states_does_not_fit_five_ids() -> None:
    found = only(checks.check_draft(draft("speculators-dspark-fc-narrow")), "SD503")
    assert (found.expected, found.found) == ("[10, 50]", "[10, 30]")


def test_c009_a_second_list_of_layers_must_mean_the_same_ones() -> None:
    name = "speculators-dspark-clean"
    for same in ([1, 2, 4, 6, 7], [0, 1, 3, 5, 6]):
        assert all_codes(draft(name, {"target_layer_ids": same})) == []
    found = only(draft(name, {"target_layer_ids": [1, 3]}).diagnostics, "SD208")
    assert found.where == "config.json#/target_layer_ids"
    assert (found.expected, found.found) == (
        "[1, 2, 4, 6, 7] (boundaries) or [0, 1, 3, 5, 6] (outputs)",
        "[1, 3]",
    )
    assert "SD208" in all_codes(draft(EAGLE3, {"target_layer_ids": [0, 1, 2]}))
    for section in ("dflash_config", "dspark_config", "eagle_config"):
        same = draft(name, {section: {"target_layer_ids": [0, 1, 3, 5, 6]}})
        assert "SD208" not in all_codes(same)
        found = only(draft(name, {section: {"target_layer_ids": [1, 3]}}).diagnostics, "SD208")
        assert found.where == f"config.json#/{section}/target_layer_ids"
    inner = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    assert "SD208" in all_codes(draft(EAGLE3, inner))


def test_c013_the_index_decides_and_the_stray_file_is_named() -> None:
    checkpoint = open_checkpoint(CHECKPOINTS / "container-stray-file")
    assert only(checkpoint.diagnostics, "SD124").where == "consolidated.safetensors"
    assert "fc.weight" not in checkpoint.tensors


def test_c017_code_beside_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    place = CHECKPOINTS / "speculators-eagle3-auto-map"
    search = os.pathsep.join([str(place), str(CHECKPOINTS.parents[1])])
    for command in ("inspect", "validate"):
        done = subprocess.run(
            [sys.executable, "-c", "from specctl.cli.app import main; main()", command, str(place)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": search},  # the code could be imported by its name
            capture_output=True,
            text=True,
            check=False,
        )
        assert "SD204" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
    assert not (place / "marker-was-run").exists()


def test_c019_both_spellings_name_one_tensor_and_both_at_once_are_refused() -> None:
    native, flat = opened("specforge-eagle3-undecided-ids"), opened("modelopt-eagle3-sorted")
    bytes_by_role = [
        {role: checkpoint.read_bytes(ref.key) for role, ref in read.tensors.items()}
        for checkpoint in (native, flat)
        for read in [formats.read_draft(checkpoint)]
    ]
    assert bytes_by_role[0] == bytes_by_role[1]
    both = only(draft("speculators-eagle3-both-spellings").diagnostics, "SD505")
    assert "midlayer." in both.message
    assert "layers.0." in both.message


def test_c021_two_numberings_of_the_same_states() -> None:
    target_8 = target("hf-llama-tiny")
    outputs = formats.complete_draft(draft("specforge-eagle3-clean"), target_8)
    boundaries = formats.complete_draft(draft("specforge-eagle3-boundary-ids"), target_8)
    assert outputs.declared_aux_ids == (1, 3, 4)
    assert boundaries.declared_aux_ids == (2, 4, 5)
    assert outputs.aux_layer_ids == boundaries.aux_layer_ids == (1, 3, 4)
    assert (outputs.aux_numbering, boundaries.aux_numbering) == ("output", "boundary")
    guess = only(boundaries.diagnostics, "SD303")
    assert guess.severity == "warning"
    assert any("as outputs" in note for note in guess.notes)
    undecided = draft("specforge-eagle3-undecided-ids")
    assert undecided.aux_layer_ids is None
    assert only(undecided.diagnostics, "SD303").severity == "error"


def test_c023_the_last_boundary_is_legal_and_the_norm_belongs_to_its_flag() -> None:
    read, target_8 = draft("speculators-eagle3-last-state"), target("hf-llama-tiny")
    assert read.aux_layer_ids == (3, 5, 7)
    assert read.has_norm_before_fc
    assert codes(checks.check_pair(read, target_8)) == ["SD312"]
    assert all_codes(draft("speculators-eagle3-last-state", {"norm_before_fc": False})) == ["SD506"]
    missing = draft("speculators-eagle3-norm-missing")
    assert "input_norm.weight" in only(missing.diagnostics, "SD501").where


def test_c035_no_map_is_never_the_first_ids() -> None:
    read = draft("speculators-eagle3-map-missing")
    found = only(checks.check_draft(read), "SD401")
    assert "d2t" in str(found.expected)
    assert "t2d" in str(found.expected)
    assert "--token-map" in str(found.help)
    assert read.draft_to_target is None
    mapped = formats.with_given(read, draft_to_target=tuple(range(24)))
    assert checks.check_draft(mapped) == ()


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("map-negative", "SD402", "d2t[3] gives target id -1"),
        ("map-too-large", "SD402", "d2t[3] gives target id 80"),
        ("map-duplicate", "SD404", "draft ids 3 and 4 both stand for target id 3"),
        ("mask-short", "SD405", "marks 23 target ids"),
        ("mask-length", "SD405", "63 entries for 64"),
    ],
)
def test_c037_a_faulty_map_names_the_index(name: str, code: str, word: str) -> None:
    found = checks.check_draft(draft(f"speculators-eagle3-{name}"))
    assert codes(found) == [code]
    assert word in found[0].message


def test_c043_target_and_draft_ids_of_the_markov_head() -> None:
    found = checks.check_draft(draft("speculators-dspark-markov-swapped"))
    assert [d.where.partition("[")[0] for d in found] == [
        "model.safetensors::markov_head.markov_w1.weight",
        "model.safetensors::markov_head.markov_w2.weight",
    ]
    assert [d.expected for d in found] == ["[64, 3]", "[24, 3]"]


def test_c045_padding_rows_are_a_note_and_a_real_difference_is_an_error() -> None:
    read = draft("speculators-eagle3-padded-vocab")
    assert codes(checks.check_pair(read, target("hf-llama-padded"))) == ["SD412"]
    other = draft("speculators-eagle3-other-vocab")
    found = only(checks.check_pair(other, target("hf-llama-tiny")), "SD411")
    assert (found.expected, found.found) == ("64", "60")


def test_1_a_prefixed_map_is_the_map() -> None:
    read = draft("speculators-eagle3-prefixed-map")
    assert read.draft_to_target == draft(EAGLE3).draft_to_target
    assert read.tensors["d2t"].key == "model.d2t"


def test_3_three_disagreeing_sizes_are_all_named() -> None:
    found = only(checks.check_draft(draft("speculators-eagle3-map-length")), "SD410")
    assert "config 24, d2t 10, lm_head rows 24" in found.message


def test_5_an_all_zero_map_is_right_for_a_full_vocabulary_only() -> None:
    full = draft("speculators-eagle3-identity")
    assert full.map_kind == "identity"
    assert full.draft_to_target == tuple(range(64))
    assert checks.check_draft(full) == ()
    assert codes(checks.check_draft(draft("speculators-eagle3-map-zero"))) == ["SD409"]


def test_9_the_input_vocabulary_is_compared_not_the_head() -> None:
    assert checks.check_pair(draft(EAGLE3), target("hf-llama-clean")) == ()


def test_11_an_unstated_anchor_is_inferred_from_the_tokens_and_said() -> None:
    read = draft("speculators-dspark-anchor-unstated")
    assert read.sample_from_anchor is False
    assert read.geometry is not None
    assert (read.geometry.num_speculative_tokens, read.geometry.draft_width) == (4, 5)
    assert only(read.diagnostics, "SD307").severity == "warning"
    agreed = draft("speculators-dspark-clean", {"sample_from_anchor": DELETE})
    assert agreed.sample_from_anchor is True
    assert agreed.origins["geometry.sample_from_anchor"].kind == "derived"
    assert "SD307" not in codes(agreed.diagnostics)


def test_22_a_missing_head_is_shared_or_refused() -> None:
    shared = draft("speculators-eagle3-no-head")
    assert shared.sharing().head == "target"
    assert codes(checks.check_pair(shared, target("hf-llama-tiny"))) == ["SD510"]
    assert "SD401" in all_codes(draft("speculators-eagle3-head-and-map-missing"))
    gathered = draft(EAGLE3, drop=("lm_head.weight",))
    found = only(checks.check_pair(gathered, target("hf-llama-clean")), "SD510")
    assert found.severity == "warning"


def test_28_a_copy_in_a_layer_is_not_the_embedding() -> None:
    read = target("hf-multimodal-decoy")
    assert read.embedding is not None
    assert read.embedding.key == "model.language_model.embed_tokens.weight"
    assert "model.layers.8.embed_tokens.weight" in only(read.diagnostics, "SD504").where


def test_32_an_unstated_norm_before_residual_is_read_as_the_library_does() -> None:
    read = draft("speculators-eagle3-norm-unstated")
    assert read.has_norm_before_residual is False
    assert read.origins["draft.has_norm_before_residual"].kind == "derived"
    assert "vLLM" in only(read.diagnostics, "SD311").message


def test_34_the_layer_count_is_that_of_the_tensors() -> None:
    read = draft("safeailab-eagle3-layers-40")
    assert read.decoder is not None
    assert read.decoder.num_layers == 1
    found = only(read.diagnostics, "SD310")
    assert (found.expected, found.found) == ("1", "40")


def test_36_theta_is_read_from_either_place_and_must_agree() -> None:
    new, old = draft(EAGLE3).decoder, draft("speculators-eagle3-old-rope").decoder
    assert new is not None
    assert old is not None
    assert new.rope == old.rope
    conflict = draft("speculators-eagle3-rope-conflict")
    assert conflict.decoder is None
    assert "10000" in only(conflict.diagnostics, "SD208").message


def test_66_head_dim_follows_from_the_query_rows() -> None:
    inferred = draft("speculators-eagle3-head-dim-absent")
    assert inferred.decoder is not None
    assert inferred.decoder.head_dim == 6
    assert inferred.origins["draft.decoder.head_dim"].kind == "derived"
    wrong = checks.check_draft(draft("speculators-eagle3-head-dim-wrong"))
    assert codes(wrong) == ["SD503"]
    assert any("q_proj" in d.where for d in wrong)


def test_82_a_confidence_head_cannot_use_a_markov_head_of_rank_zero() -> None:
    read = draft("speculators-dspark-confidence-alone")
    assert read.markov is None
    assert only(read.diagnostics, "SD313").severity == "error"


def test_proposal_methods_that_are_no_list() -> None:
    pointer = "speculators_config.proposal_methods"
    for value, code in ((None, "SD301"), ([], "SD301"), ({}, "SD207"), (3, "SD207"), ("", "SD207")):
        assert code in all_codes(draft(EAGLE3, {pointer: value}))
