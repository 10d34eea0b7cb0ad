"""Field reports on acceptance (T2), CUDA graphs (T6) and sampling (T7): which tests show each case.

A case that only a GPU or a live server can show names that test beside those that need neither.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# case -> what goes wrong, then (file, test) of each test that shows it; file names are unique.
CASES: Mapping[str, tuple[str | tuple[str, str], ...]] = {
    "C021": (
        "two numberings of the states a draft reads",
        ("test_field_reports", "test_c021_two_numberings_of_the_same_states"),
        ("test_emit_manifest", "test_boundary_numbering_is_converted"),
        ("test_target_against_transformers", "test_aux_states_keep_the_order_asked_for"),
    ),
    "C023": (
        "the last state and the norm before fc are ignored",
        (
            "test_field_reports",
            "test_c023_the_last_boundary_is_legal_and_the_norm_belongs_to_its_flag",
        ),
        ("test_eagle3", "test_norm_before_fc_changes_the_result"),
    ),
    "C025": (
        "the draft's context is shorter than the target's",
        ("test_eagle3_proposer", "test_drafting_stops_at_the_drafts_context"),
        ("test_engine_draft_state", "test_drafting_stops_at_the_drafts_context_and_only_there"),
        ("test_engine_pipeline", "test_the_end_of_the_draft_s_context"),
    ),
    "C027": (
        "states of rejected drafts stay in the draft's cache",
        ("test_engine_draft_state", "test_draft_kv_is_corrected_after_every_round"),
        ("test_engine_block", "test_no_block_leaves_its_keys_behind"),
    ),
    "C029": (
        "blocks see each other, a tied head is random",
        ("test_engine_block", "test_a_block_is_the_same_alone_and_among_others"),
        ("test_file_reports", "test_specforge_473_a_tied_target_gives_its_embedding_as_head"),
    ),
    "C031": (
        "the served target has another precision than the one the draft was trained for",
        (
            "test_other_precision",
            "test_a_rounded_target_has_its_own_text_and_acceptance",
        ),
        ("test_quantization", "test_sglang_28196_a_plain_draft_of_a_quantised_target_is_a_fact"),
    ),
    "C033": (
        "accept length is counted in different ways",
        ("test_verify_round", "test_counts_for_the_accept_length"),
        ("test_engine_exact", "test_every_acceptance_count_is_forced_and_counted"),
        ("test_bench_run", "test_accept_length_and_positions_agree"),
    ),
    "C075": (
        "padded slots keep old positions",
        (
            "test_captured_round_reports",
            "test_leftovers_of_requests_and_dry_runs_reach_no_answer",
        ),
        ("test_gpu_graphs", "test_poisoned_leftovers_shrinking_batches_and_context_edges"),
    ),
    "C077": (
        "a batch that fills the row budget, and its drafts",
        ("test_captured_round_reports", "test_a_batch_that_fills_the_row_budget_with_its_drafts"),
    ),
    "C079": (
        "memory runs out while graphs are captured",
        ("test_captured_round_reports", "test_sizes_for_which_memory_runs_out_are_left_out"),
        ("test_captured_round_reports", "test_left_out_sizes_are_told_and_run_eagerly"),
    ),
    "C081": (
        "what a dry run left is captured",
        (
            "test_captured_round_reports",
            "test_leftovers_of_requests_and_dry_runs_reach_no_answer",
        ),
        ("test_gpu_graphs", "test_what_warm_up_left_reaches_no_answer"),
    ),
    "C083": (
        "faults that come with many requests only",
        ("test_captured_round_reports", "test_a_crowd_comes_and_leaves_in_disorder"),
    ),
    "C085": (
        "an end token in the middle of a block",
        ("test_engine_stops", "test_end_id_inside_an_accepted_block_cuts_there"),
    ),
    "C087": (
        "a stop string that ends inside a block",
        ("test_engine_stops", "test_stop_string_keeps_its_last_token_and_nothing_after"),
    ),
    "C089": (
        "penalties are ignored",
        ("test_verify_round", "test_penalties_apply_inside_a_block"),
        ("test_engine_stops", "test_presence_penalty_breaks_a_repetition_with_speculation_on"),
    ),
    "C091": (
        "greedy text differs with speculation on",
        ("test_engine_exact", "test_speculation_equals_target_only_decoding"),
        ("test_ladder_tiny", "test_mixed_draft_counts_change_no_token"),
        ("test_engine_block", "test_bfloat16_changes_no_token"),
        ("test_ladder_gpu", "test_own_drafts_in_mixed_counts"),
    ),
    "C093": (
        "temperature or filters reach one side only",
        ("test_seeded_law", "test_counters_have_the_law"),
        ("test_rejection_law", "test_one_draft"),
        ("test_rejection_law", "test_a_chain"),
    ),
    "C095": (
        "seeds are ignored or shared",
        ("test_verify_round", "test_seeds_decide_alone"),
        ("test_engine_seeds", "test_a_seed_fixes_the_answer"),
        ("test_engine_seeds", "test_different_seeds_in_one_batch_equal_their_solo_runs"),
    ),
    "C097": (
        "grammars and drafts",
        ("test_verify_masks", "test_drafts_under_a_grammar_equal_constrained_decoding"),
    ),
    "C099": (
        "an option that is not supported says nothing",
        ("test_server_parse", "test_every_refused_option_has_a_fixture_or_the_same_reason_as_one"),
        ("test_server_parse", "test_values_reach_the_engine_request"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_its_tests(case: str) -> None:
    what, *tests = CASES[case]
    assert what
    places = set()
    for file, name in tests:
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        tree = ast.parse(path.read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        places.add(path.parent.name)
    assert places - {"gpu", "e2e"}, "a test that every machine runs"


def test_no_case_is_left_out() -> None:
    numbers = [*range(21, 34, 2), *range(75, 100, 2)]
    assert sorted(CASES) == [f"C{number:03}" for number in numbers]
