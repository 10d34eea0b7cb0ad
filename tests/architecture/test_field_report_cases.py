"""Which tests show each case of the field reports, and each case of the source documents.

The reports: acceptance (T2), stages and ranks (T4), prefill and decode (T5), CUDA graphs (T6),
sampling (T7). The documents: a draft's embedding under stages, the first proposal at decode. A case
that only a GPU or a live server can show names that test beside those that need neither.
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
    "C049": (
        "the draft is asked to be split over stages itself",
        ("test_pipeline", "test_c049_the_draft_is_whole_on_the_last_stage"),
        ("test_plan", "test_the_command_prints_a_line_for_each_stage"),
        ("test_stage_split", "test_the_draft_has_an_embedding_on_the_last_stage"),
    ),
    "C051": (
        "sender and receiver of a stage's message differ in width",
        ("test_pipeline", "test_c051_prefill_beside_verify_then_a_step_without_drafts"),
        ("test_messages", "test_a_header_with_another_width_is_refused"),
    ),
    "C053": (  # hybrid targets, whose states would roll back too, are not served
        "stages before the last count rejected drafts",
        ("test_pipeline", "test_c053_every_stage_stands_where_the_last_one_does_after_each_round"),
        ("test_messages", "test_a_length_that_does_not_follow_is_refused"),
    ),
    "C055": (
        "a load that only one stage makes waits for all",
        ("test_pipeline", "test_c055_a_stage_that_cannot_load_is_named_in_seconds"),
    ),
    "C057": (
        "the draft's number of ranks is ignored",
        ("test_rank_config", "test_a_draft_has_the_ranks_of_the_target_or_one"),
        ("test_ranked_drafts", "test_a_draft_over_two_ranks_changes_no_token"),
    ),
    "C059": (
        "ranks accept other tokens at a temperature",
        ("test_ranked_drafts", "test_ranks_choose_the_same_tokens_in_fifty_sampled_rounds"),
        ("test_tensor_parallel", "test_two_processes_have_the_bits_of_two_threads"),
    ),
    "C061": (
        "the states that a draft was fed are sent in place of its own",
        ("test_role_state", "test_c061_widths_are_the_draft_s"),
        ("test_roles", "test_answers_usage_and_accepted_counts_are_those_of_one_engine"),
    ),
    "C063": (
        "the first decode step has no proposal law, or another request's",
        ("test_first_proposal", "test_c063_the_first_committed_token_has_the_target_s_law"),
        ("test_first_proposal", "test_a_stale_law_would_show"),
    ),
    "C065": (
        "one side drafts and the other does not, or another number",
        ("test_role_state", "test_c065_a_prefill_without_the_draft_is_noticed"),
        ("test_peers", "test_sides_that_differ_refuse_each_other_with_both_configurations"),
        ("test_split_tiny", "test_sides_with_other_drafts_say_so"),
    ),
    "C067": (  # index buffers and recurrent states belong to families that are not served
        "a state of the draft is forgotten",
        ("test_role_state", "test_c067_a_state_that_does_not_come_is_noticed"),
        ("test_role_state", "test_c067_what_is_sent_is_all_that_a_slot_keeps"),
    ),
    "C069": (
        "one request beside an idle decode server",
        ("test_role_peers", "test_c069_one_request_beside_an_idle_server"),
    ),
    "C071": (
        "blocks are used again while the other side still writes",
        ("test_role_cases", "test_c071_blocks_wait_for_the_writer_after_an_abort"),
        ("test_role_cases", "test_c071_without_the_hold_blocks_are_used_while_they_are_written"),
    ),
    "C073": (
        "prefill and decode with other numbers of ranks",
        ("test_prefill_decode", "test_c073_two_heads_on_other_ranks"),
        ("test_prefill_decode", "test_c073_heads_that_do_not_divide_are_refused"),
        (
            "test_prefill_decode",
            "test_kv_is_spread_over_other_ranks_and_a_draft_changes_no_token",
        ),
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


EMBEDDING = "test_draft_embedding"
FIRST = "test_first_proposal"
NAMED: Mapping[str, tuple[tuple[str, str], ...]] = {
    "an unrelated AttributeError": (
        (EMBEDDING, "test_an_unrelated_attribute_error_is_let_through"),
    ),
    "a decoy inside a layer, with an index and without": (
        (EMBEDDING, "test_index_and_no_index_over_a_decoy_inside_a_layer"),
        (EMBEDDING, "test_shards_whose_index_is_gone_are_looked_through_and_not_served"),
    ),
    "files of pickles only": ((EMBEDDING, "test_a_checkpoint_of_bin_files_only"),),
    "the full vocabulary": ((EMBEDDING, "test_the_full_vocabulary_reaches_the_sharded_load"),),
    "load formats": (
        (EMBEDDING, "test_a_dummy_skips_the_read_and_every_stage_makes_the_same"),
        (EMBEDDING, "test_streaming_and_unknown_load_formats_are_refused_by_name"),
    ),
    "no embedding, two, or only a head": (
        (EMBEDDING, "test_a_draft_without_an_embedding_or_with_only_a_head_is_refused"),
        (EMBEDDING, "test_a_draft_with_two_candidates_is_refused"),
    ),
    "what a stage logs and reads once": (
        (EMBEDDING, "test_the_last_stage_logs_what_it_loaded"),
        (EMBEDDING, "test_each_embedding_byte_is_read_once_on_a_stage"),
    ),
    "a one-hot law at each received id, as wide as the vocabulary": (
        (FIRST, "test_c063_the_first_committed_token_has_the_target_s_law"),
        (FIRST, "test_received_chains_of_a_batch_are_one_proposal"),
    ),
    "none outside rejection mode": (
        (FIRST, "test_outside_rejection_mode_there_are_no_received_drafts"),
    ),
    "the chain of several layers": ((FIRST, "test_received_chains_of_a_batch_are_one_proposal"),),
    "the committed-token law": (
        (FIRST, "test_c063_the_first_committed_token_has_the_target_s_law"),
        (FIRST, "test_a_stale_law_would_show"),
    ),
    "the document's own layout, TP2 x PP2 to TP4": (
        (
            "test_prefill_decode",
            "test_kv_is_spread_over_other_ranks_and_a_draft_changes_no_token",
        ),
    ),
    "no list of architectures": (("test_no_allow_list", "test_no_gate_reads_an_architecture"),),
    "no torn block, and torn ones without the wait": (
        ("test_role_early", "test_no_block_is_torn_on_the_engine_s_path"),
        ("test_role_early", "test_without_the_wait_blocks_are_torn"),
    ),
    "peers that die, are cut off or stand still": (
        ("test_kills", "test_sixty_requests_and_six_kills"),
        ("test_cut_link", "test_cable_between_roles"),
        ("test_silent_ranks", "test_a_rank_that_hangs_while_there_is_no_work_is_noticed"),
    ),
}
"""What issue and source documents ask for by name."""


@pytest.mark.parametrize("case", [*CASES, *NAMED])
def test_a_case_has_its_tests(case: str) -> None:
    tests = NAMED[case] if case in NAMED else CASES[case][1:]
    assert tests
    places = set()
    for file, name in tests:
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        tree = ast.parse(path.read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        places.add(path.parent.name)
    assert places - {"gpu", "e2e"}, "a test that every machine runs"


def test_no_case_is_left_out() -> None:
    numbers = [*range(21, 34, 2), *range(49, 100, 2)]
    assert sorted(CASES) == [f"C{number:03}" for number in numbers]
