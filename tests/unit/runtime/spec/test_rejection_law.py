"""Rejection mode: the law of committed tokens is the target's, by enumeration of every outcome.

Whether a draft stays and which token is drawn are the only two things left to chance. Both are
replaced by a chooser that goes through every outcome of a round and multiplies their chances: those
that the code under test computed. The sums over all drafts (drawn from their own law q), all
acceptances and all tokens must then be the target's law, computed apart with lists and floats.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

import runtime.kernels.rejection as rejection
import runtime.spec.verify as verify_module
from runtime.kernels.head import HeadRows
from runtime.kernels.noise import NoiseRows
from runtime.kernels.rejection import RowDrafts, RowLaws, accept_draws, probabilities, row_laws
from runtime.spec.draft_choice import DraftLaws, choose_drafts
from runtime.spec.noise import DrawKind, NoiseKey, draft_kind, noise_rows
from runtime.spec.sampling import TokenCounts, process_logits
from runtime.spec.types import DraftLaw, Proposal, SamplingParams
from runtime.spec.verify import VerifyRows, verify
from tests.unit.runtime.spec.stub_model import CPU, IdentityHead, Model, hash_model, law, make_view

PROMPT = (0, 1)
OPTIONS = [
    SamplingParams(temperature=1.0, verification="rejection"),
    SamplingParams(temperature=0.6, top_k=3, verification="rejection"),
    SamplingParams(temperature=1.3, top_p=0.8, verification="rejection"),
    SamplingParams(temperature=0.9, min_p=0.15, top_p=0.9, verification="rejection"),
    SamplingParams(temperature=1e-30, verification="rejection"),
    SamplingParams(temperature=1e30, verification="rejection"),
]
EMPTY = TokenCounts(num_output=0)
TOLERANCE = 1e-11  # masses have 40 bits, a sum of a few dozen of them is compared


@dataclass(frozen=True)
class Draft:
    """A draft model over draft ids and its map."""

    model: Model | None
    ids_target: tuple[int, ...]

    def log_q(self, params: SamplingParams, context: tuple[int, ...]) -> torch.Tensor:
        """Return fp32 log weights over draft ids; one id has it all when the draft is certain."""
        if self.model is None:
            only = torch.full((len(self.ids_target),), -math.inf)
            only[sum(context) % len(self.ids_target)] = 0.0
            return only
        return process_logits(self.model(context), params, EMPTY)

    def drawn(self, params: SamplingParams, context: tuple[int, ...]) -> list[float]:
        """Return the law that drafts are drawn from."""
        return exact_law(self.log_q(params, context))


def exact_law(log_weights_V: torch.Tensor) -> list[float]:
    """Return the law that log weights stand for."""
    values: list[float] = torch.softmax(log_weights_V.double(), dim=0).tolist()
    return values


def target_law(model: Model, params: SamplingParams, after: tuple[int, ...]) -> list[float]:
    """Return p after the prompt and some tokens; checked against one made of lists and floats.

    Temperatures and weights are rounded to float32 before they define p, hence the tolerance there.
    """
    logits = model((*PROMPT, *after))
    values = exact_law(process_logits(logits, params, EMPTY))
    torch.testing.assert_close(values, law(logits.tolist(), params), rtol=0, atol=1e-6)
    return values


class Chances:
    """Takes over every draw: follows one path of outcomes and multiplies their chances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.accepts: Sequence[bool] = ()
        self.tokens: Sequence[int] = ()
        self.accept_chances: list[float] = []
        self.residuals: list[list[float]] = []
        self.last: list[float] = []
        monkeypatch.setattr(rejection, "row_laws", self._row_laws)
        monkeypatch.setattr(rejection, "accept_draws", self._accept_draws)
        monkeypatch.setattr(rejection, "sample", self._sample_residual)
        monkeypatch.setattr(verify_module, "sample", self._sample)

    def _row_laws(self, log_p_MV: torch.Tensor, drafts: RowDrafts) -> RowLaws:
        laws = row_laws(log_p_MV, drafts)
        self.accept_chances = laws.accept_M.tolist()
        self.residuals = torch.softmax(laws.log_residual_MV, dim=1).tolist()
        return laws

    def _accept_draws(self, rows: NoiseRows) -> torch.Tensor:
        return torch.tensor([0.0 if stays else 1.0 for stays in self.accepts], dtype=torch.float64)

    def _sample_residual(self, weights: torch.Tensor, rows: NoiseRows, kind: int) -> torch.Tensor:
        assert kind == DrawKind.RESIDUAL
        return torch.tensor(self.tokens[: weights.shape[0]])

    def _sample(
        self, weights: torch.Tensor, rows: NoiseRows, kind: int, *, is_sampled_M: torch.Tensor
    ) -> torch.Tensor:
        assert kind == DrawKind.TOKEN
        assert bool(is_sampled_M.all())
        self.last = torch.softmax(weights[-1].double(), dim=0).tolist()
        return torch.tensor(self.tokens)

    def path(self) -> float:
        """Return the chance of the outcomes that the round just took."""
        accepted = next((j for j, stays in enumerate(self.accepts) if not stays), None)
        chance = 1.0
        for stays, accept in zip(self.accepts, self.accept_chances, strict=True):
            chance *= accept if stays else 1.0 - accept
            if not stays:
                break
        token = self.tokens[len(self.accepts) if accepted is None else accepted]
        weights = self.last if accepted is None else self.residuals[accepted]
        return chance * weights[token]


def outcomes(num_drafts: int, num_ids: int) -> Iterator[tuple[list[bool], list[int]]]:
    """Yield every outcome of a round once: what stays, and the token at the row that ends it."""
    for stop in range(num_drafts + 1):
        for token in range(num_ids):
            tokens = [0] * (num_drafts + 1)
            tokens[stop] = token
            yield [j < stop for j in range(num_drafts)], tokens


def committed_law(
    model: Model, draft: Draft, params: SamplingParams, num_drafts: int, chances: Chances
) -> dict[tuple[int, ...], float]:
    """Return the law of what one round commits, over all drafts and all outcomes."""
    num_ids = model((0,)).shape[0]
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for columns in itertools.product(range(len(draft.ids_target)), repeat=num_drafts):
        ids = [draft.ids_target[column] for column in columns]
        weight, log_q = 1.0, []
        for j in range(num_drafts):
            weight *= draft.drawn(params, (*PROMPT, *ids[:j]))[columns[j]]
            log_q.append(draft.log_q(params, (*PROMPT, *ids[:j])))
        if weight == 0.0:
            continue
        proposal = Proposal(
            ids_target_BG=torch.tensor([ids]).reshape(1, num_drafts),
            num_drafts=(num_drafts,),
            q=None
            if draft.model is None
            else DraftLaw(
                log_q_BGR=torch.stack(log_q)[None],
                ids_target_R=torch.tensor(draft.ids_target),
                is_known=(True,),
            ),
        )
        hidden = torch.stack([model((*PROMPT, *ids[:j])) for j in range(num_drafts + 1)])
        rows = VerifyRows(views=(make_view(PROMPT, params, num_prompt_tokens=2),), first_row=(0,))
        for accepts, tokens in outcomes(num_drafts, num_ids):
            chances.accepts, chances.tokens = accepts, tokens
            result = verify(IdentityHead(), hidden, rows, proposal)
            chance = chances.path()
            if chance:
                assert result.num_accepted_drafts == (sum(accepts),)
                found[result.committed[0]] += weight * chance
    return found


def assert_law_is_the_target_s(
    found: dict[tuple[int, ...], float], model: Model, params: SamplingParams, depth: int
) -> None:
    """Compare the law of the first `depth` tokens; shorter answers go on with the target alone."""
    num_ids = model((0,)).shape[0]
    for wanted in itertools.product(range(num_ids), repeat=depth):
        expected = math.prod(target_law(model, params, wanted[:j])[wanted[j]] for j in range(depth))
        total = 0.0
        for ids, chance in found.items():
            if ids[:depth] != wanted[: len(ids)]:
                continue
            for j in range(len(ids), depth):
                chance *= target_law(model, params, wanted[:j])[wanted[j]]
            total += chance
        assert abs(total - expected) < TOLERANCE, (wanted, total, expected)


DRAFTS = {
    "certain": Draft(model=None, ids_target=(0, 1, 2, 3)),
    "dense": Draft(model=hash_model(77, 4), ids_target=(0, 1, 2, 3)),
    "reduced": Draft(model=hash_model(78, 2), ids_target=(3, 1)),
    "certain and reduced": Draft(model=None, ids_target=(2, 0)),
}


@pytest.mark.parametrize("params", OPTIONS)
@pytest.mark.parametrize("kind", sorted(DRAFTS))
def test_one_draft(kind: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(3):
        model = hash_model(seed, 4)
        found = committed_law(model, DRAFTS[kind], params, 1, Chances(monkeypatch))
        assert abs(sum(found.values()) - 1.0) < TOLERANCE
        assert_law_is_the_target_s(found, model, params, 2)


@pytest.mark.parametrize("params", OPTIONS[:3])
@pytest.mark.parametrize("kind", sorted(DRAFTS))
def test_a_chain(kind: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several drafts of a chain: the joint law of three tokens."""
    draft = DRAFTS[kind]
    if kind == "dense":
        draft = Draft(model=hash_model(77, 3), ids_target=(0, 1, 2))
    if kind == "certain":
        draft = Draft(model=None, ids_target=(0, 1, 2))
    if kind == "reduced":
        draft = Draft(model=hash_model(78, 2), ids_target=(2, 0))
    model = hash_model(5, 3)
    found = committed_law(model, draft, params, 2, Chances(monkeypatch))
    assert_law_is_the_target_s(found, model, params, 3)


@dataclass(frozen=True)
class LyingDraft(Draft):
    """Draws its drafts alike and hands over another law."""

    def drawn(self, params: SamplingParams, context: tuple[int, ...]) -> list[float]:
        return [1 / len(self.ids_target)] * len(self.ids_target)


def test_a_wrong_law_bends_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: drafts drawn from another law than the one that is handed over."""
    params, model = OPTIONS[0], hash_model(1, 4)
    lying = LyingDraft(model=hash_model(77, 4), ids_target=(0, 1, 2, 3))
    found = committed_law(model, lying, params, 1, Chances(monkeypatch))
    with pytest.raises(AssertionError):
        assert_law_is_the_target_s(found, model, params, 1)


@pytest.mark.parametrize("num_ids", [2, 5, 8])
def test_a_draft_and_the_token_in_its_place_add_up_to_the_law(num_ids: int) -> None:
    """q(x) a(x) + (what is rejected) r(x) = p(x) for every id, on many pairs of laws."""
    generator = torch.Generator().manual_seed(num_ids)
    log_p = torch.randn(40, num_ids, generator=generator) * 3
    log_q = torch.randn(40, num_ids, generator=generator) * 3
    log_p[torch.rand(40, num_ids, generator=generator) < 0.2] = -math.inf
    log_p[:, 0] = 0.0
    log_q[:20] = log_p[:20]  # equal laws leave nothing
    p, q = probabilities(log_p), probabilities(log_q)
    kept, dropped = torch.zeros_like(p), torch.zeros(40, dtype=torch.float64)
    for column in range(num_ids):
        laws = row_laws(
            log_p,
            RowDrafts(
                ids_target_M=torch.full((40,), column),
                log_q_MR=log_q,
                ids_target_R=torch.arange(num_ids),
                is_known_M=torch.ones(40, dtype=torch.bool),
            ),
        )
        kept[:, column] = q[:, column] * laws.accept_M
        dropped += q[:, column] * (1 - laws.accept_M)
        residual = torch.softmax(laws.log_residual_MV, dim=1)
    torch.testing.assert_close(kept + dropped[:, None] * residual, p, rtol=0, atol=1e-12)
    assert bool((dropped[:20] == 0).all())


def test_acceptance_draws_split_the_unit_interval_evenly() -> None:
    """Each draw is (k + 1/2) / 2**32 of a word that is uniform (test_noise); here: in (0, 1)."""
    keys = [NoiseKey(seed=3, choice_index=0, position=p) for p in range(4000)]
    draws = accept_draws(noise_rows(keys, device=CPU))
    assert float(draws.min()) > 0
    assert float(draws.max()) < 1
    counts = torch.bincount((draws * 8).long(), minlength=8).tolist()
    assert max(abs(count - 500) for count in counts) < 100  # fixed seed; 500 +- 4.8 sigma


def test_each_decision_has_noise_of_its_own() -> None:
    kinds = [*DrawKind, draft_kind(1), draft_kind(2), draft_kind(40)]
    assert len({int(kind) for kind in kinds}) == len(kinds)


@dataclass(frozen=True)
class LostHead:
    """A draft whose states overflowed: every logit is NaN."""

    draft_to_target_R: torch.Tensor

    def logits(self, head_input_MH: HeadRows) -> torch.Tensor:
        assert isinstance(head_input_MH, torch.Tensor)
        return torch.full((head_input_MH.shape[0], len(self.draft_to_target_R)), math.nan)

    def propose_ids(
        self, head_input_MH: HeadRows, copy_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        raise AssertionError("every request here is sampled")


@pytest.mark.parametrize("params", OPTIONS[:4])
def test_a_draft_without_a_law_stays_as_often_as_the_target_draws_it(
    params: SamplingParams,
) -> None:
    """Its id comes for certain: a law without ids would let it stay whenever p is above 0."""
    map_R = torch.tensor([2, 0, 3])
    head, states = LostHead(map_R), torch.zeros(1, 4)
    view = make_view(PROMPT, params, num_prompt_tokens=2, num_drafts=1)
    laws = DraftLaws(head, [view], num_drafts=1)
    drafts = choose_drafts(head, states, [view], draft_index=0, laws=laws)
    kept = laws.law()
    assert kept is not None
    log_p_MV = process_logits(torch.tensor([0.3, 0.1, 0.2, -0.4]), params, EMPTY)[None]
    p_V = probabilities(log_p_MV)[0]
    found = row_laws(
        log_p_MV,
        RowDrafts(
            ids_target_M=drafts,
            log_q_MR=kept.log_q_BGR[:, 0],
            ids_target_R=kept.ids_target_R,
            is_known_M=torch.tensor(kept.is_known),
        ),
    )
    assert 0 < p_V[drafts[0]] < 1
    assert found.accept_M[0] == p_V[drafts[0]]
    assert found.log_residual_MV[0, drafts[0]] == -torch.inf
