"""Messages to stages: what is sent is what arrives, and lengths that do not follow are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.batch import PreparedBatch
from runtime.parallel.messages import (
    Kind,
    SlotLengths,
    SlotNews,
    StageInput,
    decode,
    encode,
)
from specctl.contract.diagnostics import DiagnosticError

CPU = torch.device("cpu")
numbers = st.integers(0, 2**40)


@st.composite
def messages(draw: st.DrawFn) -> StageInput:
    num_requests = draw(st.integers(1, 4))
    num_rows = draw(st.integers(num_requests, 9))
    width = draw(st.integers(1, 5))
    rows = st.lists(numbers, min_size=num_rows, max_size=num_rows)
    tables = st.lists(st.integers(0, 99), min_size=width, max_size=width)
    return StageInput(
        kind=Kind.RUN,
        round_number=draw(numbers),
        engine=draw(numbers),
        num_kv_blocks=draw(numbers),
        kv_block_size=draw(numbers),
        batch=PreparedBatch(
            ids_target_N=torch.tensor(draw(rows)),
            positions_N=torch.tensor(draw(rows)),
            slots_N=torch.tensor(draw(rows)),
            row_request_N=torch.arange(num_rows, dtype=torch.int32) % num_requests,
            block_tables_BT=torch.tensor(
                [draw(tables) for _ in range(num_requests)], dtype=torch.int32
            ),
            max_length=draw(numbers),
            rows_per_request=draw(st.sampled_from([None, 1, 3])),
            tiles_U2=draw(st.sampled_from([None, torch.tensor([[0, 1], [1, 8]]).int()])),
        ),
        news=tuple(
            SlotNews(slot=slot, start=draw(numbers), num_rows=1, num_final_rows=-1)
            for slot in range(num_requests)
        ),
        aux_layer_ids=tuple(draw(st.lists(st.integers(-1, 60), max_size=4))),
    )


@settings(deadline=None, max_examples=60)
@given(message=messages())
def test_what_is_sent_arrives(message: StageInput) -> None:
    sent = encode(message)
    found = decode(sent, device=CPU)
    assert torch.equal(encode(found), sent)
    assert (found.kind, found.engine, found.round_number, found.news) == (
        Kind.RUN,
        message.engine,
        message.round_number,
        message.news,
    )
    assert found.aux_layer_ids == message.aux_layer_ids
    assert found.batch is not None
    assert message.batch is not None
    for name in ("ids_target_N", "positions_N", "slots_N", "row_request_N", "block_tables_BT"):
        ours, theirs = getattr(found.batch, name), getattr(message.batch, name)
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert found.batch.rows_per_request == message.batch.rows_per_request
    ours, theirs = found.batch.tiles_U2, message.batch.tiles_U2
    assert (ours is None) == (theirs is None)
    assert ours is None or theirs is None or torch.equal(ours, theirs)


def test_a_message_without_rows() -> None:
    found = decode(encode(StageInput(kind=Kind.STOP, round_number=7)), device=CPU)
    assert found == StageInput(kind=Kind.STOP, round_number=7)


@settings(deadline=None, max_examples=60)
@given(message=messages(), data=st.data())
def test_a_cut_message_is_refused(message: StageInput, data: st.DataObject) -> None:
    sent = encode(message)
    length = data.draw(st.integers(0, sent.numel() - 1))
    with pytest.raises(DiagnosticError, match="SD853"):
        decode(sent[:length], device=CPU)


@settings(deadline=None, max_examples=40)
@given(message=messages(), place=st.sampled_from([0, 1, 2, 8, 9, 10, 11, 12]), by=st.integers(1, 5))
def test_a_header_with_another_width_is_refused(message: StageInput, place: int, by: int) -> None:
    sent = encode(message)
    sent[place] += by
    with pytest.raises(DiagnosticError, match="SD853"):
        decode(sent, device=CPU)


def test_a_kind_that_nobody_knows_is_refused() -> None:
    sent = encode(StageInput(kind=Kind.STOP, round_number=0))
    sent[3] = 9
    with pytest.raises(DiagnosticError, match="SD853"):
        decode(sent, device=CPU)


def news(start: int, num_rows: int, num_final_rows: int, slot: int = 0) -> SlotNews:
    return SlotNews(slot=slot, start=start, num_rows=num_rows, num_final_rows=num_final_rows)


def test_lengths_follow_accepted_counts() -> None:
    lengths = SlotLengths()
    lengths.apply((news(0, 7, -1), news(0, 3, -1, slot=1)))
    lengths.apply((news(7, 5, 7), news(3, 5, 3, slot=1)))
    lengths.apply((news(8, 5, 1), news(8, 5, 5, slot=1)))  # no draft accepted; all accepted
    assert lengths.ends() == {0: 13, 1: 13}
    lengths.apply((news(0, 4, -1),))  # another request in the slot
    assert lengths.ends()[0] == 4


@pytest.mark.parametrize(
    "wrong", [news(12, 5, 1), news(7, 5, 1), news(8, 5, 2), news(13, 5, 6)], ids=str
)
def test_a_length_that_does_not_follow_is_refused(wrong: SlotNews) -> None:
    lengths = SlotLengths()
    lengths.apply((news(0, 7, -1),))
    lengths.apply((news(7, 5, 7),))
    with pytest.raises(DiagnosticError, match="SD854"):
        lengths.apply((wrong,))


def test_a_request_that_no_message_started_is_refused() -> None:
    with pytest.raises(DiagnosticError, match="SD854"):
        SlotLengths().apply((news(4, 1, 1),))
