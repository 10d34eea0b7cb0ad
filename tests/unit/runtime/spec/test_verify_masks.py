"""Masks of a grammar, rows that leave nothing to choose, and the extremes of request options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from runtime.spec.types import DraftLaw, Proposal, RequestView, RoundResult, SamplingParams
from runtime.spec.verify import VerifyRows, verify
from specctl.contract.diagnostics import DiagnosticError
from tests.unit.runtime.spec.stub_model import (
    IdentityHead,
    Model,
    advance,
    hash_model,
    make_view,
    run_round,
    target_only,
)

PROMPT = (3, 1, 4)
NUM_IDS = 6
MODES = [
    SamplingParams(),
    SamplingParams(temperature=1.3, top_p=0.9, seed=11),
    SamplingParams(temperature=1.3, top_p=0.9, seed=11, verification="rejection"),
]


def masked_round(
    model: Model,
    view: RequestView,
    drafts: Sequence[int],
    allowed: torch.Tensor | None,
    q: DraftLaw | None = None,
) -> RoundResult:
    """Verify drafts of one request under a mask for each row."""
    rows = [model((*view.ids_target, *drafts[:j])) for j in range(len(drafts) + 1)]
    return verify(
        IdentityHead(),
        torch.stack(rows),
        VerifyRows(views=(view,), first_row=(0,), allowed=(allowed,)),
        Proposal(
            ids_target_BG=torch.tensor([list(drafts)], dtype=torch.int64).reshape(1, len(drafts)),
            num_drafts=(len(drafts),),
            q=q,
        ),
    )


def grammar(ids: Sequence[int]) -> torch.Tensor:
    """Return what may follow: an even id after an odd one and the other way round."""
    return torch.arange(NUM_IDS) % 2 != ids[-1] % 2


def constrained(model: Model, params: SamplingParams, num_tokens: int) -> list[int]:
    """Decode without drafts under the grammar."""
    ids = list(PROMPT)
    for _ in range(num_tokens):
        view = make_view(ids, params, num_prompt_tokens=3)
        ids += masked_round(model, view, (), grammar(ids)[None]).committed[0]
    return ids[3:]


@pytest.mark.parametrize("params", MODES[:2])
def test_drafts_under_a_grammar_equal_constrained_decoding(params: SamplingParams) -> None:
    """C097: legal and illegal drafts; rows after an illegal draft may have nothing left."""
    model = hash_model(21, NUM_IDS, step=0.01)
    expected = constrained(model, params, 12)
    for wrong in range(4):
        ids = list(PROMPT)
        while len(ids) < 15:
            done = len(ids) - 3
            drafts = expected[done : done + 3]
            if wrong < len(drafts):
                drafts[wrong] = (drafts[wrong] + 1) % NUM_IDS  # always illegal: other parity
            masks = []
            for j in range(len(drafts) + 1):
                is_legal = j <= wrong
                masks.append(
                    grammar([*ids, *drafts[:j]]) if is_legal else torch.zeros(NUM_IDS).bool()
                )
            view = make_view(ids, params, num_prompt_tokens=3)
            result = masked_round(model, view, drafts, torch.stack(masks))
            assert result.num_accepted_drafts[0] == min(wrong, len(drafts))
            ids += result.committed[0]
        assert ids[3:15] == expected


def test_an_illegal_draft_never_stays_in_rejection_mode() -> None:
    model = hash_model(22, NUM_IDS)
    ids_target = torch.arange(NUM_IDS)
    for seed in range(30):
        params = SamplingParams(temperature=2.0, seed=seed, verification="rejection")
        view = make_view(PROMPT, params, num_prompt_tokens=3)
        q = DraftLaw(
            log_q_BGR=torch.zeros(1, 1, NUM_IDS), ids_target_R=ids_target, is_known=(seed % 2 == 0,)
        )
        masks = torch.stack([grammar(PROMPT), grammar((2,))])
        result = masked_round(model, view, (2,), masks, q)
        assert result.num_accepted_drafts == (0,)
        assert result.committed[0][0] % 2 == 1


@pytest.mark.parametrize("params", MODES)
def test_a_row_without_any_token_is_the_request_s_error(params: SamplingParams) -> None:
    model = hash_model(1, NUM_IDS)
    view = make_view(PROMPT, params, num_prompt_tokens=3, request_id="bad")
    with pytest.raises(DiagnosticError) as caught:
        masked_round(model, view, (), torch.zeros(1, NUM_IDS).bool())
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.where) == ("SD924", "request=bad")
    assert "position 3" in problem.message


def test_end_ids_and_bias_that_leave_nothing() -> None:
    params = SamplingParams(
        min_tokens=1, end_ids_target=(0, 1), logit_bias=((2, -math.inf),), temperature=1.0
    )
    view = make_view(PROMPT, params, num_prompt_tokens=3)
    with pytest.raises(DiagnosticError) as caught:
        run_round(lambda ids: torch.zeros(3), [view], [()])
    assert [item.code for item in caught.value.diagnostics] == ["SD924"]


@pytest.mark.parametrize("params", MODES[1:])
def test_logits_that_are_not_numbers_name_their_request_only(params: SamplingParams) -> None:
    model = hash_model(1, NUM_IDS)

    def sick(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.full((NUM_IDS,), math.nan) if ids[0] == 9 else model(ids)

    views = [
        make_view(PROMPT, params, num_prompt_tokens=3, request_id="well"),
        make_view((9, 1, 4), params, num_prompt_tokens=3, request_id="ill"),
    ]
    with pytest.raises(DiagnosticError) as caught:
        run_round(sick, views, [(), ()])
    found = [(item.code, item.where) for item in caught.value.diagnostics]
    assert found == [("SD923", "request=ill")]


def test_a_fault_after_the_accepted_rows_is_nobody_s() -> None:
    """The row after a rejected draft is computed from a context that never was."""
    params = SamplingParams(temperature=1.0, seed=3)
    model = hash_model(2, NUM_IDS)
    right = target_only(model, PROMPT, params, 1)[0]
    wrong = (right + 1) % NUM_IDS

    def sick(ids: tuple[int, ...]) -> torch.Tensor:
        return torch.full((NUM_IDS,), math.nan) if ids[3:4] == (wrong,) else model(ids)

    view = make_view(PROMPT, params, num_prompt_tokens=3)
    assert run_round(sick, [view], [(wrong,)]).committed == ((right,),)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-44, seed=5),
        SamplingParams(temperature=1e-300, seed=5),
        SamplingParams(temperature=1.0, top_k=1, seed=5),
        SamplingParams(temperature=1.7, top_p=1e-12, seed=5),
        SamplingParams(temperature=1.7, top_p=0.0, seed=5),
        SamplingParams(temperature=1.7, min_p=1.0, top_k=1, seed=5),
    ],
)
@pytest.mark.parametrize("mode", ["seeded", "rejection"])
def test_options_that_leave_one_token_are_greedy(params: SamplingParams, mode: str) -> None:
    """Ties included: the lowest id among the likeliest is the one that is left.

    A temperature near 0 leaves all of the likeliest, so its model has no ties.
    """
    params = replace(params, verification="rejection" if mode == "rejection" else "seeded")
    step = 1e-6 if params.temperature < 1 else 0.5
    model = hash_model(4, NUM_IDS, step=step)
    expected = target_only(model, PROMPT, SamplingParams(), 9)
    assert target_only(model, PROMPT, params, 9) == expected
    view = make_view(PROMPT, params, num_prompt_tokens=3)
    while len(view.ids_target) < 12:
        done = len(view.ids_target) - 3
        result = run_round(model, [view], [expected[done : done + 2]])
        view = advance(view, result.committed[0])
    assert tuple(view.ids_target[3:12]) == expected


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_a_huge_temperature_makes_all_tokens_alike(temperature: float) -> None:
    tokens = set()
    for seed in range(60):
        params = SamplingParams(temperature=temperature, seed=seed)
        view = make_view(PROMPT, params, num_prompt_tokens=3)
        tokens.add(run_round(hash_model(1, NUM_IDS), [view], [()]).committed[0])
    assert len(tokens) == NUM_IDS


def test_rejection_without_drafts_is_seeded_decoding() -> None:
    model = hash_model(6, NUM_IDS, step=0.01)
    seeded = target_only(model, PROMPT, SamplingParams(temperature=1.1, seed=8), 10)
    params = SamplingParams(temperature=1.1, seed=8, verification="rejection")
    assert target_only(model, PROMPT, params, 10) == seeded


def test_a_round_in_rejection_mode_does_not_feel_its_batch() -> None:
    """Same seed, same drafts and laws: the same outcome alone and among requests of all kinds."""
    model = hash_model(7, NUM_IDS, step=0.01)
    drafts = [(1, 2), (3, 0), (5, 4), (2, 2)]
    laws = torch.randn(4, 2, NUM_IDS, generator=torch.Generator().manual_seed(0))
    kinds = [SamplingParams(temperature=1.5, seed=s, verification="rejection") for s in (1, 2, 3)]
    kinds.insert(1, SamplingParams(temperature=0.8, seed=9))

    def outcome(chosen: Sequence[int]) -> RoundResult:
        views = tuple(
            make_view((*PROMPT, b), kinds[b], num_prompt_tokens=3, slot=b) for b in chosen
        )
        rows: list[torch.Tensor] = []
        first: list[int] = []
        for b, view in zip(chosen, views, strict=True):
            first.append(len(rows))
            rows += [model((*view.ids_target, *drafts[b][:j])) for j in range(3)]
        q = DraftLaw(
            log_q_BGR=laws[list(chosen)],
            ids_target_R=torch.arange(NUM_IDS),
            is_known=tuple(b != 3 for b in chosen),
        )
        proposal = Proposal(
            ids_target_BG=torch.tensor([drafts[b] for b in chosen]),
            num_drafts=(2,) * len(chosen),
            q=q,
        )
        return verify(
            IdentityHead(),
            torch.stack(rows),
            VerifyRows(views=views, first_row=tuple(first)),
            proposal,
        )

    alone = [outcome([b]).committed[0] for b in range(4)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0], [1, 3]):
        assert outcome(order).committed == tuple(alone[b] for b in order)
