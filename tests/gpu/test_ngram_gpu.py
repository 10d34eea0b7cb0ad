"""Prompt lookup on CUDA: kernels equal their twins, captured rounds equal eager ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from runtime.engine.request import RequestInput
from runtime.kernels.ngram import append_history, append_history_twin, find_drafts, find_drafts_twin
from runtime.spec.types import SamplingParams
from tests.engine_harness import World, make_world
from tests.fake_graph import ids_of, make_llm
from tests.tiny_grammar import Grammar, tens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("ngram-gpu"), device=CUDA, dtype=torch.bfloat16)


@pytest.mark.parametrize("num_positions", [48, 2048, 9008])
@pytest.mark.parametrize("num_ids", [2, 40])
def test_kernels_equal_twins(num_ids: int, num_positions: int) -> None:
    generator = torch.Generator().manual_seed(num_ids)
    shape = (9, num_positions)
    rows = torch.randint(0, num_ids, shape, generator=generator).to(torch.int32).to(CUDA)
    slots = torch.tensor([7, 0, 3, 5, 8, 8], device=CUDA)
    lengths = torch.tensor([num_positions - 12, 31, 0, num_positions // 2, 0, 0], device=CUDA)
    for num_drafts, max_ngram in ((1, 1), (4, 4), (8, 9)):
        outcomes = []
        for find in (find_drafts, find_drafts_twin):
            found = torch.full((9,), -5, device=CUDA)
            drafts = find(
                rows, slots, lengths, found_S=found, num_drafts=num_drafts, max_ngram=max_ngram
            )
            outcomes.append(torch.cat((drafts.flatten(), found)))
        assert torch.equal(*outcomes)
    wide = torch.randint(0, 99, (6, 9), generator=generator).to(CUDA)
    wide[5] = wide[4]
    copies = [rows.clone(), rows.clone()]
    append_history(copies[0], slots, lengths, wide)
    append_history_twin(copies[1], slots, lengths, wide)
    assert torch.equal(*copies)


@pytest.mark.parametrize("length_mode", ["static", "compact"])
def test_captured_lookup_equals_eager(world: World, length_mode: str) -> None:
    kinds = (SamplingParams(), SamplingParams(temperature=0.4, seed=4))
    asked = [
        RequestInput(
            request_id=f"r{index}",
            prompt_ids_target=tuple(20 + step % (2 + index % 4) for step in range(6 + index)),
            params=kinds[index % 3 % 2],
            max_tokens=10 + 5 * (index % 3),
            ignore_eos=True,
            num_speculative_tokens=4 - index % 3,
        )
        for index in range(9)
    ]
    asked.append(replace(asked[0], request_id="restricted", masks=Grammar(tens)))
    settings = {"proposer": "ngram", "num_speculative_tokens": 4, "length_mode": length_mode}
    eager, _ = make_llm(world, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(world, is_eager=True, graphs="auto", **settings)
    expected, found = eager.generate(asked), captured.generate(asked)
    assert ids_of(found) == ids_of(expected)
    if length_mode == "static":
        assert [answer.usage for answer in found] == [answer.usage for answer in expected]
    stats = captured.engine.stats()
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    assert 0 < stats.num_accepted_drafts < stats.num_drafts
    captured.engine.check()
