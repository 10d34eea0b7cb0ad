"""Dynamic rows: which ids join a map, how they compete, and that both forms hold the same ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.batch import PackedLayout, PreparedBatch, RoundRequests, RoundStates
from runtime.kernels import RowNorm, head_argmax, head_logits
from runtime.spec.dynamic_rows import (
    NUM_SCORED,
    DynamicRows,
    DynamicRowSettings,
    RankScorer,
)
from runtime.spec.types import RequestView, SamplingParams
from tests.unit.runtime.spec import stub_model

VOCAB, HIDDEN, SLOTS = 60, 16, 4
MAP = tuple(range(0, VOCAB, 3))
GENERATOR = torch.Generator().manual_seed(0)
HEAD = torch.randn(VOCAB, HIDDEN, generator=GENERATOR)
X = torch.randn(64, HIDDEN, generator=GENERATOR)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduced:
    head_RH: torch.Tensor
    draft_to_target_R: torch.Tensor
    head_norm: RowNorm | None = None

    def logits(self, head_input_MH: torch.Tensor) -> torch.Tensor:
        return head_logits(head_input_MH, self.head_RH, self.head_norm)

    def propose_ids(self, head_input_MH: torch.Tensor) -> torch.Tensor:
        best, _ = head_argmax(head_input_MH, self.head_RH, self.head_norm)
        return self.draft_to_target_R[best]


def make_rows(num_rows: int, *, rank: int = 0, ids: tuple[int, ...] = MAP) -> DynamicRows:
    reduced = Reduced(head_RH=HEAD[list(ids)], draft_to_target_R=torch.tensor(ids))
    return DynamicRows(
        reduced,
        DynamicRowSettings(full_head_VH=HEAD, num_rows=num_rows, rank=rank),
        num_slots=SLOTS,
    )


def make_view(tokens: list[int], *, slot: int) -> RequestView:
    return stub_model.make_view(tokens, SamplingParams(), num_prompt_tokens=1, slot=slot)


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def newest_outside(tokens: list[int], num_rows: int) -> set[int]:
    """Return the ids outside the map that a slot keeps: distinct ones, the oldest leaves first."""
    kept: list[int] = []
    for token in tokens:
        if token not in MAP and token not in kept:
            kept = [*kept, token][-num_rows:]
    return set(kept)


@settings(deadline=None, max_examples=30)
@given(
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    num_rows=st.integers(1, 9),
)
def test_own_ids_compete_with_the_map_by_their_exact_logits(
    tokens: list[int], num_rows: int
) -> None:
    rows = make_rows(num_rows)
    rows.follow([make_view(tokens, slot=2)])
    allowed = sorted({*MAP, *newest_outside(tokens, num_rows)})
    expected = head_logits(X, HEAD)[:, allowed].argmax(dim=1)
    found = rows.propose_ids(X, slots(*[2] * len(X)))
    assert found.tolist() == [allowed[i] for i in expected.tolist()]
    assert torch.equal(
        rows.head(slots(1)).propose_ids(X[:1]), make_rows(3).propose_ids(X[:1], slots(0))
    )


def test_all_ids_of_a_text_give_the_full_heads_choice() -> None:
    rows = make_rows(VOCAB)
    rows.follow([make_view(list(range(VOCAB)), slot=0)])
    full, _ = head_argmax(X, HEAD)
    assert torch.equal(rows.propose_ids(X, slots(*[0] * len(X))), full)


def test_a_tie_goes_to_the_lowest_target_id() -> None:
    head = torch.zeros(9, HIDDEN)
    reduced = Reduced(head_RH=head[[4, 6]], draft_to_target_R=torch.tensor([4, 6]))
    settings_ = DynamicRowSettings(full_head_VH=head, num_rows=4, rank=0)
    rows = DynamicRows(reduced, settings_, num_slots=2)
    x = torch.ones(1, HIDDEN)
    for tokens, expected in (([5, 8], 4), ([5, 8, 3, 2], 2)):
        rows.follow([make_view(tokens, slot=0)])
        assert rows.propose_ids(x, slots(0)).tolist() == [expected]
    assert rows.propose_ids(x, slots(1)).tolist() == [4]
    # Nothing but NaN: the map's own answer, never an id that is not there.
    assert rows.propose_ids(x * float("nan"), slots(0)).tolist() == [4]


def test_a_released_slot_forgets() -> None:
    rows = make_rows(4)
    rows.follow([make_view([1, 2, 4, 5], slot=1)])
    rows.release(1)
    rows.follow([make_view([3, 7], slot=1)])
    assert set(rows._ids_target_SE[1].tolist()) == {7, -1}


def round_of(
    slots_B: torch.Tensor,
    next_ids_BW: torch.Tensor,
    accepted_B: torch.Tensor,
    *,
    is_packed: bool = False,
) -> tuple[RoundRequests, RoundStates]:
    """Return what a round tells; tensors that dynamic rows do not read are empty.

    Args:
        is_packed: requests have no rows beyond the accepted ones.
    """
    empty = torch.zeros(0, dtype=torch.int64)
    batch = PreparedBatch(
        ids_target_N=empty, positions_N=empty, slots_N=empty, row_request_N=empty,
        block_tables_BT=empty, max_length=1,
    )  # fmt: skip
    requests = RoundRequests(
        slots_B=slots_B, lengths_B=empty, newest_ids_target_B=empty, num_drafts_B=empty,
        block_tables_BT=empty, positions_BW=torch.zeros_like(next_ids_BW), kv_slots_BW=empty,
        positions_WB=empty, kv_slots_WB=empty, ids_target_BW=next_ids_BW,
        row_request_BW=empty, row_request_B=empty, max_length=1,
    )  # fmt: skip
    width = next_ids_BW.shape[1]
    first_B, ids_N = torch.arange(slots_B.shape[0]) * width, next_ids_BW.flatten()
    if is_packed:
        is_own_BW = torch.arange(width) <= accepted_B[:, None]
        ids_N = next_ids_BW[is_own_BW]
        first_B = is_own_BW.sum(dim=1).cumsum(0) - is_own_BW.sum(dim=1)
        rows_BW = (first_B[:, None] + torch.arange(width)).clamp(max=len(ids_N) - 1)
        layout = PackedLayout(
            first_rows_B=first_B,
            cells_N=empty,
            request_N=empty,
            is_padding_N=empty,
            rows_BW=rows_BW,
        )
        requests = replace(requests, layout=layout)
    states = RoundStates(
        batch=batch,
        next_ids_target_N=ids_N,
        aux_hidden_NA=None,
        final_hidden_ND=torch.zeros(0),
        last_rows_B=first_B + accepted_B,
    )
    return requests, states


@settings(deadline=None, max_examples=30)
@given(data=st.data(), num_rows=st.integers(1, 6), width=st.integers(1, 4))
def test_rounds_on_the_device_hold_what_the_host_would(
    data: st.DataObject, num_rows: int, width: int
) -> None:
    tokens = st.integers(0, VOCAB - 1)
    texts = [data.draw(st.lists(tokens, min_size=1, max_size=9)) for _ in range(2)]
    ahead, behind = make_rows(num_rows), make_rows(num_rows)
    used = (2, 0)
    for rows in (ahead, behind):
        rows.follow([make_view(text, slot=slot) for text, slot in zip(texts, used, strict=True)])
    for _ in range(data.draw(st.integers(1, 4))):
        next_ids = torch.tensor(
            data.draw(
                st.lists(st.lists(tokens, min_size=width, max_size=width), min_size=3, max_size=3)
            )
        )
        accepted = torch.tensor([data.draw(st.integers(0, width - 1)) for _ in range(3)])
        is_packed = data.draw(st.booleans())
        told = round_of(slots(*used, SLOTS - 1), next_ids, accepted, is_packed=is_packed)
        ahead.follow_round(*told)
        for text, ids, count in zip(texts, next_ids.tolist(), accepted.tolist(), strict=False):
            text.extend(ids[: count + 1])
    views = [make_view(text, slot=slot) for text, slot in zip(texts, used, strict=True)]
    behind.follow(views)
    for slot in used:
        assert torch.equal(ahead._ids_target_SE[slot], behind._ids_target_SE[slot])
        assert ahead._counts_S[slot] == behind._counts_S[slot]
    ahead.follow(views)  # the eager path goes on from here
    assert torch.equal(ahead._ids_target_SE[list(used)], behind._ids_target_SE[list(used)])


def test_a_projection_of_full_rank_finds_the_best_ids() -> None:
    outside = torch.tensor([i for i in range(VOCAB) if i not in MAP])
    scorer = RankScorer.build(HEAD, outside, rank=HIDDEN)
    best = head_logits(X, HEAD)[:, outside].argmax(dim=1)
    found = scorer.best(X)
    assert found.shape == (len(X), min(NUM_SCORED, len(outside)))
    assert torch.equal(found[:, 0], outside[best])
    full, _ = head_argmax(X, HEAD)
    assert torch.equal(make_rows(0, rank=HIDDEN).propose_ids(X, slots(*[0] * len(X))), full)


def test_a_projection_is_the_leading_subspace_and_always_the_same() -> None:
    spectrum = torch.tensor([8.0, 4.0, 2.0, *[0.05] * (HIDDEN - 3)])
    left, _ = torch.linalg.qr(torch.randn(VOCAB, HIDDEN, generator=GENERATOR))
    right, _ = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=GENERATOR))
    head = left * spectrum @ right.t()
    ids = torch.arange(VOCAB)
    first, second = (RankScorer.build(head, ids, rank=3) for _ in range(2))
    assert torch.equal(first.basis_rH, second.basis_rH)
    assert torch.equal(first.rows_Cr, second.rows_Cr)
    projector = first.basis_rH.t() @ first.basis_rH
    # Four iterations damp the rest by (0.05 / 2) ** 8; what remains is float32.
    assert torch.allclose(projector, right[:, :3] @ right[:, :3].t(), atol=1e-4)


@pytest.mark.parametrize("num_rows", [0, 3])
def test_a_map_of_everything_leaves_nothing_to_add(num_rows: int) -> None:
    rows = make_rows(num_rows, rank=4, ids=tuple(range(VOCAB)))
    rows.follow([make_view(list(range(9)), slot=0)])
    full, _ = head_argmax(X, HEAD)
    assert torch.equal(rows.propose_ids(X, slots(*[0] * len(X))), full)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_map_may_hold_rows_that_the_target_cannot_choose(rank: int) -> None:
    """A map with rows above the tokenizer is a warning (SD438), and they are never outside it."""
    ids = torch.tensor([*MAP, VOCAB + 4])
    reduced = Reduced(
        head_RH=torch.cat((HEAD[list(MAP)], torch.full((1, HIDDEN), -9.0))), draft_to_target_R=ids
    )
    sizes = DynamicRowSettings(full_head_VH=HEAD, num_rows=4, rank=rank)
    rows = DynamicRows(reduced, sizes, num_slots=SLOTS)
    rows.follow([make_view([1, VOCAB + 4, 2], slot=0)])
    found = rows.propose_ids(X[:8], torch.zeros(8, dtype=torch.int64))
    assert set(found.tolist()) <= {*ids.tolist(), *range(VOCAB)}
