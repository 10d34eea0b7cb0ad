"""Block drafts on CUDA: no token changes, drafts with Markov heads are sometimes right, and rounds
draft what the eager path reads slot by slot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from runtime import kernels
from runtime.config import Overrides
from runtime.engine.request import RequestInput
from runtime.kernels import block_rows, context_kv
from runtime.kv import KVLayer
from runtime.spec.types import SamplingParams
from tests.block_rounds import assert_drafted_alike, model_of, views_of
from tests.engine_harness import drive, make_rig, prompt_of, reference_ids
from tests.kernels.ladder import plain
from tests.tiny_block import BlockCase, make_block_world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CASES = {
    "vanilla": BlockCase(),
    "gated": BlockCase(markov="gated", sample_from_anchor=False),
    "rnn": BlockCase(markov="rnn", sample_from_anchor=False),
    "window": BlockCase(sliding_window=6),
    "dflash": BlockCase(markov=None, sample_from_anchor=False),
    "dflash2": BlockCase(
        markov=None, has_selector=True, sample_from_anchor=False, draft_vocab_size=None
    ),
}
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 1 + 9 * index),
        params=SamplingParams() if index % 2 else SamplingParams(temperature=0.8, seed=index),
        max_tokens=24,
        ignore_eos=True,
    )
    for index in range(4)
)


@pytest.mark.parametrize("name", CASES)
def test_a_block_draft_changes_no_token(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    world = make_block_world(tmp_path, case, device=torch.device("cuda", 0), dtype=torch.bfloat16)
    rig = make_rig(world, Overrides(dtype="bfloat16"))
    answers = drive(rig, REQUESTS, arrivals={1: 1, 2: 3, 3: 4})
    for request in REQUESTS:
        assert answers[request.request_id].ids_target == reference_ids(world, request)
    stats = rig.engine.stats()
    assert stats.num_drafts > 0
    # The heads are the target's own bigrams: without any hit the draft is read wrongly.
    assert case.markov is None or stats.num_accepted_drafts > 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_round_drafts_what_the_eager_path_does(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    world = make_block_world(tmp_path, CASES[name], device=torch.device("cuda", 0), dtype=dtype)
    greedy, drawn = SamplingParams(), SamplingParams(temperature=0.6, top_k=9, seed=3)
    rejection = SamplingParams(temperature=0.6, seed=3, verification="rejection")
    for confidence in ("own", "none", "states"):
        model = model_of(world, confidence)
        for params in ((greedy,) * 4, (greedy, drawn) * 2, (greedy, rejection) * 2):
            for counts in ((4, 4, 4, 4), (1, 4, 0, 2)):
                assert_drafted_alike(model, views_of(params, counts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_ids", "rank"), [(8192, 64), (49_152, 256), (501, 24)])
def test_a_corrected_choice_has_the_bits_of_its_parts(
    num_ids: int, rank: int, dtype: torch.dtype
) -> None:
    weight = plain(num_ids, rank, seed=1, dtype=dtype, device="cuda")
    table = plain(333, rank, seed=2, dtype=dtype, device="cuda")
    wide = plain(80, 3, num_ids, seed=3, dtype=torch.float32, device="cuda") * rank**0.5
    wide[:, :, 499] = wide[:, :, 7]
    weight[499] = weight[7]
    ids = torch.arange(80, device="cuda") * 4
    names = torch.arange(num_ids, device="cuda") * 2 + 1
    for count in (1, 5, 16, 17, 40, 80):
        for slot in range(3):
            logits, few = wide[:count, slot], ids[:count]
            sums = logits + kernels.head_logits(table[few], weight)
            expected = kernels.logits_argmax(sums, names_V=names)
            for rows, index in ((table, few), (table[few], None)):
                room = torch.zeros((count, 3), dtype=torch.int64, device="cuda")
                found, best = kernels.corrected_argmax(
                    logits, rows, weight, ids_M=index, names_V=names, copy_M=room[:, slot]
                )
                assert torch.equal(found, expected)
                assert torch.equal(best, sums.amax(dim=1))
                assert torch.equal(room[:, slot], found)


@pytest.mark.parametrize(("width", "first_slot"), [(1, 0), (5, 0), (6, 1), (9, 1)])
def test_the_ends_of_a_block_equal_their_twins(width: int, first_slot: int) -> None:
    lengths, newest = (torch.arange(5, device="cuda") * factor for factor in (17, 31))
    counts = (torch.arange(5, device="cuda") * 2).clamp(max=width - first_slot)
    kv_slots = torch.arange(5 * (width + 1), device="cuda").view(5, -1) * 3
    sizes = {"width": width, "first_slot": first_slot, "mask_id_target": 77}
    got = block_rows.place_blocks(lengths, newest, counts, kv_slots, **sizes)
    expected = block_rows.place_blocks_twin(lengths, newest, counts, kv_slots, **sizes)
    for name in expected.__slots__:
        assert torch.equal(getattr(got, name), getattr(expected, name)), name
    chances = plain(5, width + 1, seed=1, dtype=torch.float32, device="cuda")[:, 1:]
    kept = [torch.ones(9, width + 2, device="cuda") for _ in range(2)]
    slots = torch.tensor([3, 0, 7, 2, 8], device="cuda")
    block_rows.keep_chances(chances, counts, slots, kept[0])
    block_rows.keep_chances_twin(chances, counts, slots, kept[1])
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("is_normed", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 64), (8, 128), (20, 80)])
def test_context_keys_have_the_bits_of_one_operation_after_the_other(
    heads: int, head_dim: int, is_normed: bool, dtype: torch.dtype
) -> None:
    kv = plain(70, 2 * heads, head_dim, seed=1, dtype=dtype, device="cuda")
    weight = plain(head_dim, seed=2, dtype=dtype, device="cuda")
    table = plain(90, head_dim, seed=3, dtype=torch.float32, device="cuda")
    positions, slots = (torch.arange(70, device="cuda") + first for first in (20, 5))
    found, apart = (
        KVLayer(
            k=torch.zeros((5, heads, 16, head_dim), dtype=dtype, device="cuda"),
            v=torch.zeros((5, heads, 16, head_dim), dtype=dtype, device="cuda"),
        )
        for _ in range(2)
    )
    norm = kernels.RowNorm(weight_D=weight, eps=1e-5) if is_normed else None
    context_kv.write_context_kv(kv, norm, positions, table, found, slots)
    context_kv.write_context_kv_twin(kv, norm, positions, table, apart, slots)
    assert torch.equal(found.k, apart.k)
    assert torch.equal(found.v, apart.v)
