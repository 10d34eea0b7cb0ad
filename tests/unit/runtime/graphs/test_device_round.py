"""The round without host reads equals the eager round: tokens, draft state and KV, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from runtime.batch import RoundRequests, RoundStates
from runtime.engine.engine import Engine
from runtime.engine.request import Request, RequestInput
from runtime.graphs.round import DeviceRound, batch_sizes, context_buckets
from runtime.graphs.state import RoundShape, RoundState, SlotRow
from runtime.kv import KVLayer, KVPool
from runtime.spec.chain import ChainProposer
from runtime.spec.oracle import other_id
from tests.engine_harness import KV_BLOCK_SIZE, World, kv_rows, make_world, prompt_of, reference_ids
from tests.fake_graph import make_llm, poison_padding

GAMMA = 4
MAX_LENGTH = 128


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("round"))


def _copied(layers: Sequence[KVLayer]) -> tuple[KVLayer, ...]:
    return tuple(KVLayer(k=layer.k.clone(), v=layer.v.clone()) for layer in layers)


def _twin_of(engine: Engine, world: World, *, max_batch: int) -> tuple[DeviceRound, ChainProposer]:
    """Return a device round over copies of everything that the engine's next round reads."""
    proposer, draft = engine._proposer, world.models.draft
    assert isinstance(proposer, ChainProposer)
    assert draft is not None
    num_slots = engine.config.max_num_requests
    twin = ChainProposer(
        draft, _copied(proposer._kv), kv_block_size=KV_BLOCK_SIZE, num_slots=num_slots + 1
    )
    twin._entries._feedback_SH.copy_(proposer._entries._feedback_SH)
    twin._entries._head_input_SH.copy_(proposer._entries._head_input_SH)
    state = RoundState(
        num_slots=num_slots,
        max_batch=max_batch,
        max_drafts=GAMMA,
        max_length=MAX_LENGTH,
        kv_block_size=KV_BLOCK_SIZE,
        device=torch.device("cpu"),
    )
    round_ = DeviceRound(
        target=world.models.target,
        target_kv=_copied(engine._rounds._target_kv),
        draft=twin,
        state=state,
    )
    return round_, twin


def _load(round_: DeviceRound, requests: Sequence[Request], num_drafts: Sequence[int]) -> None:
    round_.state.write_requests(
        [
            SlotRow(
                slot=request.placed.slot,
                length=len(request.ids_target) - 1,
                newest_id_target=request.ids_target[-1],
                blocks=request.placed.table.blocks,
            )
            for request in requests
        ]
    )
    round_.state.write_batch([request.placed.slot for request in requests], num_drafts)


@pytest.mark.parametrize("batch", [1, 2, 5, 8])
@torch.inference_mode()
def test_each_round_equals_the_eager_one(agreeing: World, batch: int) -> None:
    llm, _ = make_llm(
        agreeing,
        is_eager=True,
        proposer="eagle3",
        num_speculative_tokens=GAMMA,
        max_num_requests=batch,
        enable_prefix_cache=False,
    )
    engine = llm.engine
    wanted = [GAMMA - index % (GAMMA + 1) for index in range(batch)]
    for index in range(batch):
        engine.add_request(
            RequestInput(
                request_id=str(index),
                prompt_ids_target=prompt_of(index, 5 + 3 * index),
                ignore_eos=True,
                max_tokens=90,
                num_speculative_tokens=wanted[index],
            )
        )
    engine.step()  # all prefills
    accepted: set[int] = set()
    for size, context in itertools.islice(
        itertools.cycle(itertools.product((batch, batch + 2), (96, MAX_LENGTH))), 12
    ):
        running = engine._scheduler.running
        round_, twin = _twin_of(engine, agreeing, max_batch=batch + 2)
        for request in running:  # as the scheduler will, and as far as rows of the device reach
            slots = len(request.ids_target) + GAMMA
            assert engine._blocks.extend(request.placed.table, num_slots=slots)
        _load(round_, running, wanted)
        poison_padding(round_)
        before = [len(request.ids_target) for request in running]
        round_.run(RoundShape(batch=size, num_drafts=GAMMA, context=context))
        rows = round_.state.output_BX[: len(running)].tolist()
        engine.step()
        slots = [request.placed.slot for request in running]
        for request, row, start in zip(running, rows, before, strict=True):
            accepted.add(row[0])
            assert request.ids_target[start:] == row[1 : row[0] + 2]
            slot, known = request.placed.slot, len(request.ids_target) - 1
            assert round_.state.lengths_S[slot] == known
            assert round_.state.newest_ids_target_S[slot] == request.ids_target[-1]
            blocks = request.placed.table.blocks
            pairs = zip(
                (*engine._rounds._target_kv, *engine._proposer._kv),
                (*round_.target_kv, *twin._kv),
                strict=True,
            )
            for eager, made in pairs:
                assert torch.equal(kv_rows(eager, blocks, known), kv_rows(made, blocks, known))
        assert torch.equal(
            engine._proposer._entries._feedback_SH[slots], twin._entries._feedback_SH[slots]
        )
        assert torch.equal(
            engine._proposer._entries._head_input_SH[slots], twin._entries._head_input_SH[slots]
        )
        assert round_.state.lengths_S[-1] == round_.state.newest_ids_target_S[-1] == 0
    if batch == 8:
        assert accepted == set(range(GAMMA + 1)), accepted


class ScriptedDraft:
    """Drafts that a test wrote down."""

    aux_layer_ids: tuple[int, ...] = ()
    needs_final_hidden = False

    def __init__(self) -> None:
        self.drafts_BG = torch.zeros((0, 0), dtype=torch.int64)

    def draft_round(self, requests: RoundRequests) -> None:
        assert self.drafts_BG.shape == requests.drafts_BG.shape
        requests.drafts_BG.copy_(self.drafts_BG)

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        assert states.last_rows_B.shape == requests.slots_B.shape


@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
@torch.inference_mode()
def test_every_pattern_in_every_batch_commits_the_target_s_tokens(world: World, gamma: int) -> None:
    """Rows of eight requests, cut at different counts and with fewer drafts for some."""
    target = world.models.target
    prompts = [prompt_of(index, 3 + index) for index in range(8)]
    answers = [
        reference_ids(
            world,
            RequestInput(
                request_id="r", prompt_ids_target=prompt, max_tokens=3 * gamma + 5, ignore_eos=True
            ),
        )
        for prompt in prompts
    ]
    blocks_each = MAX_LENGTH // KV_BLOCK_SIZE
    for shift, size in zip(range(0, gamma + 1, 2), itertools.cycle((8, 9, 16)), strict=False):
        pool = KVPool(
            target.kv_specs,
            num_blocks=1 + 8 * blocks_each,
            kv_block_size=KV_BLOCK_SIZE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        draft = ScriptedDraft()
        state = RoundState(
            num_slots=8, max_batch=16, max_drafts=max(gamma, MAX_PREFILL), max_length=MAX_LENGTH,
            kv_block_size=KV_BLOCK_SIZE, device=torch.device("cpu"),
        )  # fmt: skip
        round_ = DeviceRound(target=target, target_kv=pool.layers, draft=draft, state=state)
        _prefill(round_, draft, prompts, blocks_each)
        known = [1] * 8
        num_drafts = [max(0, gamma - index % 3) for index in range(8)]
        state.write_batch(range(8), num_drafts)
        for turn in range(3):
            wanted = [(shift + turn + index) % (gamma + 1) for index in range(8)]
            draft.drafts_BG = torch.zeros((size, gamma), dtype=torch.int64)
            for index, answer in enumerate(answers):
                row = list(answer[known[index] : known[index] + gamma])
                if wanted[index] < gamma:
                    row[wanted[index]] = other_id(row[wanted[index]])
                draft.drafts_BG[index] = torch.tensor(row, dtype=torch.int64)
            poison_padding(round_)
            round_.run(RoundShape(batch=size, num_drafts=gamma, context=MAX_LENGTH))
            for index, answer in enumerate(answers):
                count, *chosen = state.output_BX[index].tolist()
                assert count == min(wanted[index], num_drafts[index])
                end = known[index] + count + 1
                assert tuple(chosen[: count + 1]) == answer[known[index] : end]
                known[index] = end


MAX_PREFILL = 12


def _prefill(
    round_: DeviceRound, draft: ScriptedDraft, prompts: Sequence[Sequence[int]], blocks_each: int
) -> None:
    """Compute prompts with a round whose drafts are the prompts: all rows but one are right."""
    state = round_.state
    for slot, prompt in enumerate(prompts):
        blocks = range(1 + slot * blocks_each, 1 + (slot + 1) * blocks_each)
        row = SlotRow(slot=slot, length=0, newest_id_target=prompt[0], blocks=blocks)
        state.write_requests([row])
        state.write_batch([slot], [0])
        draft.drafts_BG = torch.tensor([prompt[1:]], dtype=torch.int64)
        shape = RoundShape(batch=1, num_drafts=len(prompt) - 1, context=MAX_LENGTH)
        round_.run(shape)
        newest = int(state.output_BX[0, len(prompt)])
        state.write_requests([replace(row, length=len(prompt), newest_id_target=newest)])


def test_sizes() -> None:
    assert context_buckets(200) == (200,)
    assert context_buckets(256) == (256,)
    assert context_buckets(2000) == (256, 512, 1024, 2000)
    assert batch_sizes((1, 2, 4, 8), 6) == (1, 2, 4, 6)
    assert batch_sizes((1, 2, 4), 4) == (1, 2, 4)
    assert batch_sizes((4, 2), 40) == (2, 4, 40)


def test_blocks_that_come_later_join_the_table() -> None:
    state = RoundState(
        num_slots=2, max_batch=2, max_drafts=1, max_length=40, kv_block_size=8,
        device=torch.device("cpu"),
    )  # fmt: skip
    state.write_requests([SlotRow(slot=1, length=3, newest_id_target=5, blocks=[7])])
    state.write_blocks([(1, 1, 9), (0, 4, 3)])
    assert state.block_tables_ST.tolist() == [[0, 0, 0, 0, 3], [7, 9, 0, 0, 0], [0] * 5]
    state.write_requests([SlotRow(slot=1, length=3, newest_id_target=5, blocks=[2])])
    assert state.block_tables_ST[1].tolist() == [2, 0, 0, 0, 0], "a new tenant's table is whole"
    assert state.slots_B.tolist() == [2, 2, 2]


def test_a_batch_that_stays_costs_no_copy_and_another_one_is_written() -> None:
    state = RoundState(
        num_slots=2, max_batch=2, max_drafts=3, max_length=40, kv_block_size=8,
        device=torch.device("cpu"),
    )  # fmt: skip
    state.write_batch([1], [3])
    state.slots_B.fill_(-1)
    state.write_batch([1], [3])
    assert state.slots_B.tolist() == [-1] * 3
    for slots, counts in (([1], [2]), ([0], [2]), ([1, 0], [2, 3])):
        state.write_batch(slots, counts)
        num_padding = 3 - len(slots)
        assert state.slots_B.tolist() == [*slots, *[2] * num_padding]
        assert state.num_drafts_B.tolist() == [*counts, *[0] * num_padding]


def test_where_a_request_stands_changes_alone() -> None:
    state = RoundState(
        num_slots=2, max_batch=2, max_drafts=1, max_length=40, kv_block_size=8,
        device=torch.device("cpu"),
    )  # fmt: skip
    state.write_requests([SlotRow(slot=1, length=3, newest_id_target=5, blocks=[7, 4])])
    state.write_newest([(1, 9, 6), (0, 2, 8)])
    assert state.lengths_S.tolist() == [2, 9, 0]
    assert state.newest_ids_target_S.tolist() == [8, 6, 0]
    assert state.block_tables_ST.tolist() == [[0] * 5, [7, 4, 0, 0, 0], [0] * 5]
