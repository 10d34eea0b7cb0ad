"""Sampling on CUDA: kernel and laws have the CPU's bits, captured rounds the eager tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime.engine.request import RequestInput
from runtime.engine.slot_params import slot_sampling
from runtime.graphs.slot_sampling import SamplingState
from runtime.kernels.cuda.sample import launch_sample
from runtime.kernels.draw import draw_tokens, draw_tokens_twin, of_rows, row_laws
from runtime.kernels.exact import exact_exp, exact_log
from runtime.kernels.noise import TOKEN_DRAW, NoiseRows
from runtime.kernels.rejection import RowDrafts, decide_rows
from runtime.kernels.sample import sample_twin
from runtime.spec.logprobs import log_probabilities
from runtime.spec.types import SamplingParams
from tests.draw_rows import FILTERS, kept_by_borders, logits_of, sampling_of, slot_of
from tests.engine_harness import World, prompt_of
from tests.fake_graph import ids_of, make_agreeing_world, make_llm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1e-300, seed=6),
    SamplingParams(temperature=1e300, seed=2**62 + 3, choice_index=4),
    SamplingParams(temperature=1.1, top_k=7, seed=-1),
    SamplingParams(temperature=1.3, top_p=0.7, seed=8),
    SamplingParams(temperature=0.9, min_p=0.05, seed=9),
    SamplingParams(temperature=0.7, top_k=200, top_p=0.9, min_p=0.001, seed=10),
)
NUM_IDS = 49_152


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("sampling-gpu")
    return make_agreeing_world(folder, device=CUDA, dtype=torch.bfloat16)


def noise_rows(count: int, device: torch.device) -> NoiseRows:
    generator = torch.Generator().manual_seed(count)
    words = torch.randint(0, 2**32, (3, count), generator=generator)
    return NoiseRows(
        seed_low_M=words[0].to(device),
        seed_high_M=words[1].to(device),
        choice_index_M=words[2].to(device),
        position_M=torch.arange(count).to(device) * 977,
    )


def test_exponential_and_logarithm_have_the_cpu_s_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    x = -torch.rand(200_001, generator=generator, dtype=torch.float64) * 720
    assert torch.equal(exact_exp(x.to(CUDA)).cpu(), exact_exp(x))
    y = torch.exp(torch.randn(200_001, generator=generator, dtype=torch.float64) * 20)
    assert torch.equal(exact_log(y.to(CUDA)).cpu(), exact_log(y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_ids", [7, 1024, NUM_IDS, 151_936])
@pytest.mark.parametrize("has_ids", [False, True])
def test_the_kernel_equals_the_twin(num_ids: int, dtype: torch.dtype, has_ids: bool) -> None:
    generator = torch.Generator().manual_seed(num_ids)
    weights = (torch.randn(6, num_ids, generator=generator) * 3).to(dtype)
    weights[1] = -torch.inf
    weights[2] = weights[2].round()
    flags = torch.tensor([True, True, False, True, True, True])
    ids = torch.randperm(2 * num_ids, generator=generator)[:num_ids] if has_ids else None
    found = launch_sample(
        weights.to(CUDA),
        noise_rows(6, CUDA),
        17,
        flags.to(CUDA),
        None if ids is None else ids.to(CUDA),
    )
    expected = sample_twin(weights, noise_rows(6, CPU), 17, is_sampled_M=flags, noise_ids_V=ids)
    assert torch.equal(found.cpu(), expected)


def test_noise_is_never_fused() -> None:
    """Many rows over one id more than a tile: each noise value decides between near ties."""
    weights = torch.zeros(512, 1025)
    found = launch_sample(weights.to(CUDA), noise_rows(512, CUDA), TOKEN_DRAW, None, None)
    assert torch.equal(found.cpu(), sample_twin(weights, noise_rows(512, CPU), TOKEN_DRAW))


@pytest.mark.parametrize("has_filters", [False, True])
@pytest.mark.parametrize(("num_rows", "num_ids"), [(1, NUM_IDS), (40, NUM_IDS), (9, 151_936)])
def test_draws_of_a_round_have_the_cpu_s_bits(
    num_rows: int, num_ids: int, has_filters: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(num_rows, num_ids, generator=generator) * 4
    logits[1::2] = (logits[1::2] * 4).round() / 4
    logits[0, 5:40:7] = torch.nan
    kinds = KINDS if has_filters else KINDS[:4]
    request = torch.randint(0, len(kinds), (num_rows,), generator=generator, dtype=torch.int32)
    position = torch.arange(num_rows) + 1000
    names = torch.randperm(num_ids, generator=generator)
    found = {}
    for device in (CPU, CUDA):
        state = SamplingState(len(kinds) + 1, device)
        state.write(range(len(kinds)), [slot_sampling(item) for item in kinds])
        slots = torch.arange(len(kinds), device=device).flip(0)
        sampling = state.select(slots, has_filters=has_filters)
        rows = (logits.to(device), sampling, request.to(device), position.to(device), TOKEN_DRAW)
        found[device.type] = draw_tokens(*rows).cpu()
        named = draw_tokens(*rows, names_V=names.to(device)).cpu()
        found[device.type] = torch.stack((found[device.type], named))
        twin = draw_tokens_twin(*rows, names_V=names.to(device)).cpu()
        assert torch.equal(named, twin)
    assert torch.equal(found["cpu"], found["cuda"])


@pytest.mark.parametrize("num_ids", [7, 1024, NUM_IDS, 151_936])
def test_borders_of_filters_are_the_sorted_ones(num_ids: int) -> None:
    """Every filter over every kind of row: what is kept, bit for bit."""
    sampling = sampling_of([slot_of(*item) for item in enumerate(FILTERS)], CUDA)
    rows = logits_of(8, num_ids).to(CUDA)
    few = (torch.arange(num_ids) % 5 * -0.25).expand(1, -1).to(CUDA)
    for row in (*rows.split(1), few):
        request = torch.arange(len(FILTERS), dtype=torch.int32, device=CUDA)
        logits = row.expand(len(FILTERS), -1).contiguous()
        law = row_laws(logits, of_rows(sampling, request))
        assert torch.equal(kept_by_borders(logits, sampling, request), law)


def test_rejection_and_logprobs_have_the_cpu_s_bits() -> None:
    generator = torch.Generator().manual_seed(4)
    log_p = torch.randn(20, NUM_IDS, generator=generator) * 3
    log_q = torch.randn(20, 8192, generator=generator) * 3
    ids = torch.randint(0, NUM_IDS, (20,), generator=generator)
    map_R = torch.randperm(NUM_IDS, generator=generator)[:8192]
    ids[:10] = map_R[:10]
    decided = [
        decide_rows(
            log_p.to(device),
            RowDrafts(
                ids_target_M=ids.to(device),
                log_q_MR=log_q.to(device),
                ids_target_R=map_R.to(device),
                is_known_M=(torch.arange(20) % 3 > 0).to(device),
            ),
            noise_rows(20, device),
        )
        for device in (CPU, CUDA)
    ]
    assert torch.equal(decided[0].is_accepted_M, decided[1].is_accepted_M.cpu())
    assert torch.equal(decided[0].tokens_target_M, decided[1].tokens_target_M.cpu())
    assert torch.equal(log_probabilities(log_p.to(CUDA)).cpu(), log_probabilities(log_p))


def requests(num_requests: int, max_tokens: int = 24) -> list[RequestInput]:
    return [
        RequestInput(
            request_id=f"r{index}",
            prompt_ids_target=prompt_of(40 + index, 3 + 4 * index),
            params=KINDS[index % len(KINDS)],
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        for index in range(num_requests)
    ]


@pytest.mark.parametrize("verification", ["seeded", "rejection"])
@pytest.mark.parametrize("num_requests", [1, 2, 4, 9])
def test_captured_rounds_draw_the_eager_tokens(
    agreeing: World, num_requests: int, verification: str
) -> None:
    """Real graphs: sampled, filtered and greedy requests together, with a draft and without."""
    settings: dict[str, Any] = {
        "proposer": "eagle3",
        "num_speculative_tokens": 3,
        "verification": verification,
    }
    asked = requests(num_requests)[::-1]
    plain, _ = make_llm(agreeing, is_eager=True, graphs="off", proposer="none")
    eager, _ = make_llm(agreeing, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(agreeing, is_eager=True, graphs="auto", **settings)
    found, expected = captured.generate(asked), eager.generate(asked)
    assert ids_of(found) == ids_of(expected)
    if verification == "seeded":
        assert ids_of(found) == ids_of(plain.generate(asked))
    assert [item.usage for item in found] == [item.usage for item in expected]
    stats = captured.engine.stats()
    assert stats.num_device_rounds > 0.5 * stats.num_steps
    assert stats.graphs.num_graphs > 0


@pytest.mark.parametrize("verification", ["seeded", "rejection"])
def test_modes_and_logprobs_beside_captured_rounds(agreeing: World, verification: str) -> None:
    settings: dict[str, Any] = {
        "proposer": "eagle3",
        "num_speculative_tokens": 3,
        "verification": verification,
    }
    asked = requests(8)
    asked[3] = replace(asked[3], params=replace(asked[3].params, num_logprobs=3))
    eager, _ = make_llm(agreeing, is_eager=True, graphs="off", **settings)
    captured, _ = make_llm(agreeing, is_eager=True, graphs="auto", **settings)
    found, expected = captured.generate(asked), eager.generate(asked)
    assert ids_of(found) == ids_of(expected)
    assert found[3].logprobs == expected[3].logprobs
