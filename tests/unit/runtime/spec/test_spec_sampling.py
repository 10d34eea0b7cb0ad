"""Each request option does what its name says, in the documented order, whatever the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from runtime.spec.sampling import TokenCounts, filter_ids, process_logits
from runtime.spec.types import SamplingParams
from tests.unit.runtime.spec.stub_model import choose, choose_with, law, make_view

INF = math.inf
EMPTY = TokenCounts(num_output=0)


def process(
    logits: Sequence[float], params: SamplingParams, counts: TokenCounts = EMPTY
) -> list[float]:
    values: list[float] = process_logits(torch.tensor(logits), params, counts).tolist()
    return values


def kept(logits: Sequence[float], params: SamplingParams) -> list[int]:
    return [i for i, value in enumerate(process(logits, params)) if value > -INF]


def test_plain_greedy_changes_nothing() -> None:
    logits = [0.25, -1.0, 3.0]
    assert process(logits, SamplingParams()) == logits


def test_the_input_row_is_not_written() -> None:
    logits = torch.tensor([1.0, 2.0])
    params = SamplingParams(logit_bias=((0, 5.0),), temperature=0.5, top_k=1)
    process_logits(logits, params, EMPTY)
    assert logits.tolist() == [1.0, 2.0]


def test_logit_bias_is_added() -> None:
    params = SamplingParams(logit_bias=((2, -4.0), (0, 1.5)))
    assert process([1.0, 2.0, 3.0], params) == [2.5, 2.0, -1.0]


def test_penalties_count_prompt_and_output_as_documented() -> None:
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    counts = TokenCounts(
        num_output=3, prompt_ids_target=frozenset({0, 1}), output_counts={1: 2, 3: 1}
    )
    # id 0: prompt only; id 1: both, twice out; id 2: unseen; id 3: output only, negative logit.
    assert process([4.0, 4.0, 4.0, -1.0], params, counts) == [
        2.0,
        2.0 - 0.5 - 0.5,
        4.0,
        -2.0 - 0.5 - 0.25,
    ]


def test_bias_comes_before_penalties_and_temperature() -> None:
    params = SamplingParams(logit_bias=((0, 2.0),), repetition_penalty=2.0, temperature=0.5, seed=1)
    counts = TokenCounts(num_output=0, prompt_ids_target=frozenset({0}))
    # (2 + 2) / 2 = 2 against 1: at temperature 0.5 a distance of 2.
    assert process([2.0, 1.0], params, counts) == [0.0, -2.0]


def test_counts_split_at_the_prompt_and_take_drafts() -> None:
    view = make_view([4, 4, 5, 6], SamplingParams(), num_prompt_tokens=2)
    counts = TokenCounts.of(view).followed_by([6, 7])
    assert counts.num_output == 4
    assert counts.prompt_ids_target == {4}
    assert dict(counts.output_counts) == {5: 1, 6: 2, 7: 1}


@pytest.mark.parametrize(("num_output", "expected"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_end_ids_wait_for_min_tokens(num_output: int, expected: int) -> None:
    params = SamplingParams(min_tokens=2, end_ids_target=(1, 2))
    counts = TokenCounts(num_output=num_output)
    row = process_logits(torch.tensor([0.0, 5.0, 4.0]), params, counts)
    assert choose(row, params, 9) == expected


def test_bias_does_not_lift_the_end_mask() -> None:
    params = SamplingParams(min_tokens=1, end_ids_target=(0,), logit_bias=((0, 100.0),))
    assert process([0.0, 0.0], params) == [-INF, 0.0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_k": 2**63}, [0, 1, 2, 3, 4]),
        ({"top_k": 2**70}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.0}, [1]),
        ({"min_p": 1.0}, [1, 3, 4]),
        ({"min_p": math.exp(-1.5)}, [0, 1, 3, 4]),
        ({"top_k": 1, "top_p": 0.1, "min_p": 0.9}, [1]),
    ],
)
def test_filters_cut_ties_by_lowest_id(options: dict[str, float], expected: list[int]) -> None:
    params = SamplingParams(temperature=1.0, **options)  # type: ignore[arg-type]
    assert kept([1.0, 2.0, 0.0, 2.0, 2.0], params) == expected


def test_top_p_takes_the_smallest_set_that_reaches_it() -> None:
    logits = [math.log(0.1), math.log(0.5), math.log(0.15), math.log(0.25)]
    for top_p, expected in [(0.49, [1]), (0.51, [1, 3]), (0.76, [1, 2, 3]), (0.91, [0, 1, 2, 3])]:
        assert kept(logits, SamplingParams(temperature=1.0, top_p=top_p)) == expected


def test_top_p_is_taken_over_what_top_k_left() -> None:
    logits = [math.log(0.4), math.log(0.3), math.log(0.2), math.log(0.1)]
    # Of the first two alone, the first holds 0.571 of the mass.
    assert kept(logits, SamplingParams(temperature=1.0, top_p=0.55)) == [0, 1]
    assert kept(logits, SamplingParams(temperature=1.0, top_p=0.55, top_k=2)) == [0]


def test_log_weights_follow_the_reference_law() -> None:
    logits = [0.3, -1.2, 2.2, 0.9, 1.4, -0.7, 2.0, 0.1]
    for params in (
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=3),
        SamplingParams(temperature=0.3, top_p=0.5, top_k=2),
        SamplingParams(temperature=1.1, top_p=0.8, min_p=0.1),
    ):
        found = torch.softmax(torch.tensor(process(logits, params), dtype=torch.float64), 0)
        assert found.tolist() == pytest.approx(law(logits, params), abs=1e-6)


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-46, 1e-30, 1e-6, 1e6, 1e38, 1e300])
def test_extreme_temperatures_stay_defined(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    row = process_logits(torch.tensor([1.0, 4.0, 2.0, -INF]), params, EMPTY)
    assert not bool(row.isnan().any())
    assert row[3] == -INF
    if temperature < 1.0:
        assert choose(row, params, 0) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"logit_bias": ((0, 1e300),)},
        {"logit_bias": ((0, -1e300), (1, 1e300), (2, 1e300))},
        {"logit_bias": ((1, 3e38),), "presence_penalty": -3e38},
        {"repetition_penalty": 1e-300},
        {"repetition_penalty": 1e300},
        {"presence_penalty": -1e300},
        {"presence_penalty": -1e300, "frequency_penalty": 1e300},
        {"frequency_penalty": 1e300, "min_tokens": 9, "end_ids_target": (2, 3)},
    ],
)
def test_extreme_options_choose_an_id_of_the_vocabulary(
    options: dict[str, float], temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=3, **options)  # type: ignore[arg-type]
    counts = TokenCounts(num_output=2, prompt_ids_target=frozenset({0}), output_counts={1: 2})
    row = process_logits(torch.tensor([1.0, 4.0, -2.0, -INF]), params, counts)
    assert not bool(row.isnan().any())
    assert choose(row, params, 0) in (0, 1, 2)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    assert int(choose_with(torch.tensor([1.0, 3.0, 3.0, 3.0]), None)) == 1
    assert int(choose_with(torch.tensor([-INF, -INF, -INF]), None)) == 0


def test_undefined_logits_are_never_chosen() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=5, top_k=2)):
        row = process_logits(torch.tensor([math.nan, 1.0, math.nan, 0.0]), params, EMPTY)
        assert choose(row, params, 4) in (1, 3)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_row_without_a_defined_logit_yields_the_lowest_id(top_p: float) -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=5, top_p=top_p)
        row = process_logits(torch.full((3,), math.nan), params, EMPTY)
        assert choose(row, params, 4) == 0


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    params = SamplingParams(temperature=50.0, seed=11)
    row = process_logits(torch.tensor([0.0, 0.0, -INF, -INF]), params, EMPTY)
    assert {choose(row, params, position) for position in range(64)} == {0, 1}


def test_a_row_of_a_batch_gives_the_bits_of_the_row_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    logits_MV = torch.randn(9, 1031, generator=generator) * 3
    params = SamplingParams(temperature=0.8, top_k=200, top_p=0.9, min_p=0.001, seed=2)
    for m in range(9):
        alone = process_logits(logits_MV[m].clone(), params, EMPTY)
        assert torch.equal(process_logits(logits_MV[m], params, EMPTY), alone)


def test_filters_work_in_a_reduced_vocabulary() -> None:
    scaled = torch.tensor([0.0, -1.0, -2.0])
    out = filter_ids(scaled, SamplingParams(temperature=1.0, top_k=2))
    assert out.tolist() == [0.0, -1.0, -INF]
