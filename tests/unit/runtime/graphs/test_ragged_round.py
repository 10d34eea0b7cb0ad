"""Packed rows of a ragged round: the bits of dense rows, whatever is beside or behind them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.batch import RoundRequests, RoundStates
from runtime.config.round_sizes import packed_row_counts
from runtime.engine.request import RequestInput
from runtime.graphs.round import DeviceRound
from runtime.graphs.state import RoundShape, RoundState, SlotRow
from runtime.kernels import attention
from runtime.kv import KVPool
from runtime.spec.oracle import other_id
from tests.engine_harness import KV_BLOCK_SIZE, World, make_world, prompt_of, reference_ids
from tests.fake_graph import contiguous_batches, poison_padding

GAMMA = 4
NUM_SLOTS = 6
MAX_LENGTH = 64
MAX_PROMPT = 9
NAN = float("nan")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("ragged"))


@pytest.fixture(scope="module")
def answers(world: World) -> tuple[tuple[int, ...], ...]:
    return tuple(
        reference_ids(
            world,
            RequestInput(
                request_id="r",
                prompt_ids_target=prompt_of(slot, 4 + slot),
                max_tokens=30,
                ignore_eos=True,
            ),
        )
        for slot in range(NUM_SLOTS)
    )


class Scripted:
    """Drafts that a test wrote down; notes what it is shown."""

    aux_layer_ids = (0, 1)
    needs_final_hidden = True

    def __init__(self) -> None:
        self.drafts_BG = torch.zeros((0, 0), dtype=torch.int64)
        self.seen: list[tuple[torch.Tensor, ...]] = []

    def draft_round(self, requests: RoundRequests) -> None:
        requests.drafts_BG.copy_(self.drafts_BG[:, : requests.drafts_BG.shape[1]])

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        assert states.aux_hidden_NA is not None
        assert states.final_hidden_ND is not None
        last_B = states.last_rows_B
        self.seen.append(
            (
                states.aux_hidden_NA[last_B],
                states.final_hidden_ND[last_B],
                states.next_ids_target_N[last_B],
                states.batch.positions_N[last_B],
            )
        )


class Bench:
    """A device round over made requests, whose prompts are computed."""

    def __init__(self, world: World, answers: Sequence[Sequence[int]]) -> None:
        target = world.models.target
        blocks_each = MAX_LENGTH // KV_BLOCK_SIZE
        pool = KVPool(
            target.kv_specs,
            num_blocks=1 + NUM_SLOTS * blocks_each,
            kv_block_size=KV_BLOCK_SIZE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.draft = Scripted()
        self.state = RoundState(
            num_slots=NUM_SLOTS,
            max_batch=8,
            max_drafts=MAX_PROMPT,
            max_length=MAX_LENGTH,
            kv_block_size=KV_BLOCK_SIZE,
            device=torch.device("cpu"),
        )
        self.round = DeviceRound(
            target=target, target_kv=pool.layers, draft=self.draft, state=self.state
        )
        self.answers = answers
        self.known = [1] * NUM_SLOTS
        for slot in range(NUM_SLOTS):
            self._prefill(slot, range(1 + slot * blocks_each, 1 + (slot + 1) * blocks_each))
        self.draft.seen.clear()

    def _prefill(self, slot: int, blocks: Sequence[int]) -> None:
        prompt = prompt_of(slot, 4 + slot)
        row = SlotRow(slot=slot, length=0, newest_id_target=prompt[0], blocks=blocks)
        self.state.write_requests([row])
        self.state.write_batch([slot], [0])
        self.draft.drafts_BG = torch.tensor([prompt[1:]])
        self.round.run(RoundShape(batch=1, num_drafts=len(prompt) - 1, context=MAX_LENGTH))
        newest = int(self.state.output_BX[0, len(prompt)])
        self.state.write_requests([replace(row, length=len(prompt), newest_id_target=newest)])

    def run(
        self,
        slots: Sequence[int],
        num_drafts: Sequence[int],
        wrong: Sequence[int],
        *,
        batch: int,
        num_rows: int | None,
    ) -> list[tuple[int, ...]]:
        """Run a round; draft `wrong[i]` of request i is changed. Returns the committed ids."""
        count = max((GAMMA, *num_drafts))
        drafts = torch.full((batch, count), 3, dtype=torch.int64)
        for index, slot in enumerate(slots):
            row = list(self.answers[slot][self.known[slot] : self.known[slot] + count])
            if wrong[index] < count:
                row[wrong[index]] = other_id(row[wrong[index]])
            drafts[index] = torch.tensor(row)
        self.draft.drafts_BG = drafts
        self.state.write_batch(slots, num_drafts)
        poison_padding(self.round)
        self.state.output_BX.fill_(-7)
        with contiguous_batches():
            self.round.run(
                RoundShape(
                    batch=batch, num_drafts=count, context=MAX_LENGTH, num_packed_rows=num_rows
                )
            )
        committed = []
        for index, slot in enumerate(slots):
            accepted, *chosen = self.state.output_BX[index].tolist()
            assert accepted == min(wrong[index], num_drafts[index])
            ids = tuple(chosen[: accepted + 1])
            start = self.known[slot]
            assert ids == tuple(self.answers[slot][start : start + accepted + 1])
            self.known[slot] += accepted + 1
            committed.append(ids)
        assert self.state.lengths_S[-1] == self.state.newest_ids_target_S[-1] == 0
        return committed


@pytest.fixture(params=["packed", "dense"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run attention on packed rows, and on rows that are spread out."""
    monkeypatch.setattr(attention, "ROUND_LAYOUTS", {"cpu": request.param})
    return str(request.param)


@pytest.mark.parametrize("excess", [0, 1, 2, 9])
@torch.inference_mode()
def test_packed_rows_have_the_bits_of_dense_ones(
    world: World, answers: tuple[tuple[int, ...], ...], layout: str, excess: int
) -> None:
    """Also with padding rows behind them, of which block 0 is full of NaN."""
    dense, ragged = Bench(world, answers), Bench(world, answers)
    turns = (
        ((0, 1, 2, 3), (4, 0, 2, 1), (4, 0, 1, 4), 4),
        ((3, 0, 5), (1, 3, 0), (0, 2, 0), 4),
        ((1,), (2,), (9,), 2),
        ((4, 2, 0, 1, 3), (4, 4, 4, 4, 4), (0, 1, 2, 3, 4), 6),
    )
    for slots, num_drafts, wrong, batch in turns:
        num_rows = sum(num_drafts) + len(slots) + excess
        expected = dense.run(slots, num_drafts, wrong, batch=batch, num_rows=None)
        found = ragged.run(slots, num_drafts, wrong, batch=batch, num_rows=num_rows)
        assert found == expected
        for one, other in zip(ragged.draft.seen[-1], dense.draft.seen[-1], strict=True):
            assert torch.equal(one[: len(slots)], other[: len(slots)])
        for slot in slots:
            assert ragged.state.lengths_S[slot] == dense.state.lengths_S[slot]


@settings(max_examples=12, deadline=None)
@given(data=st.data())
@torch.inference_mode()
def test_any_lengths_pack(
    world: World, answers: tuple[tuple[int, ...], ...], data: st.DataObject
) -> None:
    bench = Bench(world, answers)
    for _ in range(2):
        slots = data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, unique=True))
        counts = st.integers(0, GAMMA)
        num_drafts = data.draw(st.lists(counts, min_size=len(slots), max_size=len(slots)))
        wrong = data.draw(st.lists(counts, min_size=len(slots), max_size=len(slots)))
        excess = data.draw(st.integers(0, 5))
        num_rows = sum(num_drafts) + len(slots) + excess
        bench.run(slots, num_drafts, wrong, batch=data.draw(st.integers(6, 8)), num_rows=num_rows)


@torch.inference_mode()
def test_every_row_bucket_edge(world: World, answers: tuple[tuple[int, ...], ...]) -> None:
    """One row fewer than a bucket holds, as many, and one more, which takes the next."""
    batch = 6
    buckets = (*packed_row_counts(batch, GAMMA), batch * (GAMMA + 1))
    for bucket, step in itertools.product(buckets, (-1, 0, 1)):
        bench = Bench(world, answers)
        wanted = min(max(bucket + step, batch), batch * (GAMMA + 1)) - batch
        num_drafts = [min(GAMMA, max(0, wanted - GAMMA * index)) for index in range(batch)]
        total = sum(num_drafts) + batch
        assert total == wanted + batch
        fit = next(size for size in buckets if size >= total)
        num_rows = None if fit == buckets[-1] else fit
        for turn in range(2):
            wrong = [(index + turn) % (GAMMA + 1) for index in range(batch)]
            bench.run(range(batch), num_drafts, wrong, batch=batch, num_rows=num_rows)


@torch.inference_mode()
def test_the_batch_shrinks_and_stale_buffers_are_poisoned(
    world: World, answers: tuple[tuple[int, ...], ...]
) -> None:
    """What the round before left in inputs that this one must not read is out of every range."""
    bench = Bench(world, answers)
    for count in (6, 5, 3, 2, 1):
        slots = list(range(count))[::-1]
        num_drafts = [index % (GAMMA + 1) for index in range(count)]
        wrong = [1 + index % 3 for index in range(count)]
        num_rows = sum(num_drafts) + count + 3
        bench.run(slots, num_drafts, wrong, batch=count + 1, num_rows=num_rows)
        bench.state.slots_B.fill_(10**6)
        bench.state.num_drafts_B.fill_(10**6)


@torch.inference_mode()
def test_nan_of_one_request_stays_there(world: World, answers: tuple[tuple[int, ...], ...]) -> None:
    """Keys of a request that is not in the round are NaN, and so are a neighbour's own."""
    bench = Bench(world, answers)
    blocks_each = MAX_LENGTH // KV_BLOCK_SIZE
    for layer in bench.round.target_kv:
        layer.k[1 + 5 * blocks_each :].fill_(NAN)
        layer.v[1 + 5 * blocks_each :].fill_(NAN)
    bench.state.write_batch([], [])
    bench.run((0, 1, 2), (3, 1, 2), (3, 0, 1), batch=3, num_rows=11)


def test_a_shape_tells_its_rows() -> None:
    dense = RoundShape(batch=4, num_drafts=3, context=64)
    packed = replace(dense, num_packed_rows=8)
    assert (dense.num_rows, packed.num_rows, packed.width) == (16, 8, 4)
    assert dense != packed


@torch.inference_mode()
def test_nan_of_a_request_in_the_round_reaches_no_other(
    world: World, answers: tuple[tuple[int, ...], ...], layout: str
) -> None:
    """Also where rows are spread out and its values stand in for those of ghosts."""
    bench = Bench(world, answers)
    blocks_each = MAX_LENGTH // KV_BLOCK_SIZE
    for layer in bench.round.target_kv:
        for pool in (layer.k, layer.v):
            pool[1 : 1 + blocks_each].fill_(NAN)
            pool[1 + 5 * blocks_each :].fill_(NAN)
    slots, num_drafts = (0, 1, 2, 5), (2, 3, 1, 2)
    drafts = [list(answers[slot][1 : 1 + GAMMA]) for slot in slots]
    for _ in range(2):
        bench.draft.drafts_BG = torch.tensor(drafts)
        bench.state.write_batch(slots, num_drafts)
        before = bench.state.lengths_S.tolist()
        bench.round.run(
            RoundShape(batch=4, num_drafts=GAMMA, context=MAX_LENGTH, num_packed_rows=14)
        )
        for index in (1, 2):
            slot = slots[index]
            start = before[slot] - (4 + slot) + 1
            accepted, *chosen = bench.state.output_BX[index].tolist()
            wanted = answers[slot][start : start + accepted + 1]
            assert tuple(chosen[: accepted + 1]) == wanted
            assert start > 1 or accepted == num_drafts[index]
