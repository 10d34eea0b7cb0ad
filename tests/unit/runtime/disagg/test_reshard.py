"""Moves between two splits: every head of the decode side once, from a rank that has it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.disagg.reshard import HeadMove, Side, plan_moves
from specctl.contract.diagnostics import DiagnosticError


@st.composite
def sides(draw: st.DrawFn) -> tuple[Side, Side, tuple[int, ...]]:
    num_layers = draw(st.integers(1, 6))
    heads = draw(st.sampled_from([1, 2, 4, 6, 12]))
    draft_heads = draw(st.lists(st.sampled_from([heads, 2 * heads]), max_size=2))
    sizes = [size for size in (1, 2, 3, 4, 6) if heads % size == 0]

    def side(name: str) -> Side:
        inner = list(range(1, num_layers))
        cuts = sorted(draw(st.sets(st.sampled_from(inner)))) if inner else []
        bounds = [0, *cuts, num_layers]
        return Side(
            name=name,
            stage_layers=tuple(b - a for a, b in itertools.pairwise(bounds)),
            tensor_parallel=draw(st.sampled_from(sizes)),
        )

    return side("prefill"), side("decode"), (heads,) * num_layers + tuple(draft_heads)


def shards(side: Side, full: list[torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
    """Return (world rank, layer) -> that rank's heads of the layer, as the layers are split."""
    found = {}
    for layer, heads in enumerate(full):
        stage = side.stage_of(layer)
        for tp_rank, part in enumerate(heads.chunk(side.tensor_parallel)):
            found[side.rank(stage, tp_rank), layer] = part.clone()
    return found


@settings(deadline=None, max_examples=150)
@given(case=sides())
def test_moves_make_the_decode_side_whole(case: tuple[Side, Side, tuple[int, ...]]) -> None:
    prefill, decode, kv_heads = case
    full = [torch.arange(1, heads + 1) + 100 * layer for layer, heads in enumerate(kv_heads)]
    source = shards(prefill, full)
    expected = shards(decode, full)
    found = {place: torch.zeros_like(part) for place, part in expected.items()}
    for move in plan_moves(prefill, decode, kv_heads):
        heads = source[move.source, move.layer]
        part = found[move.destination, move.layer]
        taken = slice(move.destination_head, move.destination_head + move.num_heads)
        assert not part[taken].any(), "a head arrives twice"
        part[taken] = heads[move.source_head : move.source_head + move.num_heads]
    assert found.keys() == expected.keys()
    for place, part in expected.items():
        assert torch.equal(found[place], part)


def test_two_ranks_of_two_stages_to_four_ranks() -> None:
    """The source document's own run: TP 2 x PP 2 prefill, TP 4 decode, a draft layer at the end."""
    prefill = Side(name="prefill", stage_layers=(1, 1), tensor_parallel=2)
    decode = Side(name="decode", stage_layers=(2,), tensor_parallel=4)
    moves = plan_moves(prefill, decode, (4, 4, 4))
    assert len(moves) == 12
    assert moves[0] == HeadMove(
        layer=0, source=2, destination=0, source_head=0, destination_head=0, num_heads=1
    )
    assert moves[-1] == HeadMove(
        layer=2, source=1, destination=3, source_head=1, destination_head=0, num_heads=1
    )


def test_equal_sides_move_whole_ranks() -> None:
    side = Side(name="prefill", stage_layers=(2, 2), tensor_parallel=2)
    moves = plan_moves(side, side, (4,) * 4)
    assert all(move.source == move.destination and move.num_heads == 2 for move in moves)
    assert len(moves) == 8


def test_heads_that_do_not_divide_are_refused_with_numbers() -> None:
    prefill = Side(name="prefill", stage_layers=(2,), tensor_parallel=2)
    decode = Side(name="decode", stage_layers=(2,), tensor_parallel=3)
    with pytest.raises(DiagnosticError, match=r"SD862.*4 KV heads") as caught:
        plan_moves(prefill, decode, (4, 4))
    assert [problem.where for problem in caught.value.diagnostics] == [
        "handshake, decode, layer 0",
        "handshake, decode, layer 1",
    ]


def test_other_layers_are_refused() -> None:
    prefill = Side(name="prefill", stage_layers=(2,), tensor_parallel=1)
    decode = Side(name="decode", stage_layers=(1, 2), tensor_parallel=1)
    with pytest.raises(DiagnosticError, match="SD862"):
        plan_moves(prefill, decode, (4, 4))
