"""The EAGLE-3 proposer against a dense draft without cache, paging, batching or chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.kv import KVPool
from runtime.models import Eagle3Model
from runtime.spec.chain import ChainProposer
from runtime.spec.packing import pack_rows
from runtime.spec.sampling import TokenCounts, process_logits
from runtime.spec.types import Observation, RequestView, SamplingParams
from tests.tiny import VOCAB_SIZE, write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import load_tiny, tiny_manifest
from tests.unit.runtime.spec.stub_model import CPU, choose, make_view

KV_BLOCK_SIZE = 4
NUM_BLOCKS = 64
GREEDY = SamplingParams()


def make_model(directory: Path, **options: Any) -> Eagle3Model:
    target_dir = write_tiny_target(directory / "target")
    draft_dir = write_tiny_eagle3(directory / "draft", target_dir, **options)
    draft = load_tiny(tiny_manifest(target_dir, draft_dir)).draft
    assert isinstance(draft, Eagle3Model)
    return draft


VARIANTS: dict[str, dict[str, Any]] = {
    "reduced": {},
    "identity-norm-before-residual": {"draft_vocab_size": None, "has_norm_before_residual": True},
    "two-layers-norm-output": {"num_layers": 2, "has_norm_output": True},
}


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Eagle3Model:
    return make_model(tmp_path_factory.mktemp("draft"), **VARIANTS[request.param])


@dataclass
class Scenario:
    """A request of a test: all its tokens, and the target's states, a function of the prefix."""

    ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    slot: int
    block_table: list[int]
    width: int

    def aux(self, start: int, stop: int) -> torch.Tensor:
        rows = []
        for position in range(start, stop):
            seed = hash(tuple(self.ids[: position + 1])) % 2**31
            rows.append(torch.randn(self.width, generator=torch.Generator().manual_seed(seed)))
        return torch.stack(rows) if rows else torch.zeros(0, self.width)

    def view(self, num_drafts: int = 0) -> RequestView:
        return make_view(
            self.ids,
            self.params,
            num_prompt_tokens=self.num_prompt_tokens,
            num_drafts=num_drafts,
            slot=self.slot,
            request_id=f"slot-{self.slot}",
            block_table=self.block_table,
        )


class Bench:
    """A proposer over its own pool, and the requests it drafts for."""

    def __init__(self, model: Eagle3Model, *, num_slots: int = 8) -> None:
        self.model = model
        self.pool = KVPool(
            model.kv_specs,
            num_blocks=NUM_BLOCKS,
            kv_block_size=KV_BLOCK_SIZE,
            dtype=torch.float32,
            device=CPU,
        )
        self.proposer = ChainProposer(
            model, self.pool.layers, kv_block_size=KV_BLOCK_SIZE, num_slots=num_slots
        )
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
        self._blocks: Iterator[int] = iter(order.tolist())

    def request(
        self, ids: Sequence[int], slot: int, params: SamplingParams = GREEDY, *, num_blocks: int = 8
    ) -> Scenario:
        facts = self.model.facts
        assert facts.aux_layer_ids is not None
        return Scenario(
            ids=list(ids),
            num_prompt_tokens=len(ids) - 1,
            params=params,
            slot=slot,
            block_table=[next(self._blocks) for _ in range(num_blocks)],
            width=len(facts.aux_layer_ids) * facts.target_hidden_size,
        )

    def observe(self, spans: Sequence[tuple[Scenario, int, int]]) -> None:
        """Hand over rows start..stop - 1 of each request."""
        views = tuple(request.view() for request, _, _ in spans)
        rows = [
            (index, position, request.ids[position])
            for index, (request, start, stop) in enumerate(spans)
            for position in range(start, stop)
        ]
        ends, last_row = 0, []
        for request, start, stop in spans:
            ends += stop - start
            last_row.append(ends - 1 if stop == len(request.ids) - 1 else -1)
        next_ids = [
            request.ids[p + 1] for request, start, stop in spans for p in range(start, stop)
        ]
        self.proposer.observe(
            Observation(
                batch=pack_rows(rows, views, kv_block_size=KV_BLOCK_SIZE, device=CPU),
                next_ids_target_N=torch.tensor(next_ids),
                aux_hidden_N=torch.cat([r.aux(start, stop) for r, start, stop in spans]),
                views=views,
                last_row=tuple(last_row),
            )
        )

    def drafts(self, wishes: Sequence[tuple[Scenario, int]]) -> list[list[int]]:
        proposal = self.proposer.propose([request.view(count) for request, count in wishes])
        rows = proposal.ids_target_BG.tolist()
        assert all(not any(row[n:]) for row, n in zip(rows, proposal.num_drafts, strict=True))
        return [row[:n] for row, n in zip(rows, proposal.num_drafts, strict=True)]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x_NHP: torch.Tensor, theta: float) -> torch.Tensor:
    length, _, size = x_NHP.shape
    frequency = theta ** -(torch.arange(0, size, 2) / size)
    angle = torch.arange(length)[:, None] * frequency
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    left, right = x_NHP.chunk(2, -1)
    return x_NHP * cos[:, None] + torch.cat([-right, left], -1) * sin[:, None]


def dense_layer(
    model: Eagle3Model, index: int, x_NX: torch.Tensor, r_NH: torch.Tensor
) -> torch.Tensor:
    """Return the stream after a layer whose attention reads `x` and whose residual is `r`."""
    layer = model.first_layer if index == 0 else model.layers[index - 1]
    attention, decoder = layer.attention, model.facts.decoder
    heads, groups, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    qkv = x_NX @ attention.qkv_weight.T
    q, k, v = (
        part.view(len(x_NX), -1, size)
        for part in qkv.split([heads * size, groups * size, groups * size], dim=-1)
    )
    q, k = rotate(q, decoder.rope.theta), rotate(k, decoder.rope.theta)
    k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
    scores = torch.einsum("nhp,mhp->hnm", q, k) * size**-0.5
    mask = torch.ones(len(x_NX), len(x_NX)).triu(1).bool()
    weights = scores.masked_fill(mask, -torch.inf).softmax(-1)
    mixed = torch.einsum("hnm,mhp->nhp", weights, v).reshape(len(x_NX), -1)
    r_NH = r_NH + mixed @ attention.o_weight.T
    normed = rms(r_NH, layer.post_attention_norm, decoder.rms_norm_eps)
    gate, up = (normed @ layer.mlp.gate_up_weight.T).unflatten(-1, (-1, 2)).unbind(-1)
    return r_NH + (torch.nn.functional.silu(gate) * up) @ layer.mlp.down_weight.T


def dense_chain(model: Eagle3Model, request: Scenario, num_drafts: int) -> list[int]:
    """Draft by recomputing every entry of the sequence for every draft."""
    facts = model.facts
    eps = facts.decoder.rms_norm_eps
    newest = len(request.ids) - 1
    states = list(request.aux(0, newest) @ model.fusion.weight.T)
    tokens = list(request.ids[1:])
    for draft_index in range(num_drafts):
        g_NH = torch.stack(states)
        u_NH = rms(g_NH, model.first_layer.hidden_norm, eps)
        e_NH = rms(model.embedding_VH[torch.tensor(tokens)], model.first_layer.input_norm, eps)
        residual = u_NH if facts.has_norm_before_residual else g_NH
        stream = dense_layer(model, 0, torch.cat([e_NH, u_NH], -1), residual)
        for index in range(1, facts.decoder.num_layers):
            normed = rms(stream, model.layers[index - 1].input_norm, eps)
            stream = dense_layer(model, index, normed, stream)
        normed = rms(stream, model.norm_H, eps)[-1]
        tokens.append(dense_choice(model, request, normed, newest + 1 + draft_index))
        states.append(normed if facts.has_norm_output else stream[-1])
    return tokens[newest:]


def dense_choice(
    model: Eagle3Model, request: Scenario, normed_H: torch.Tensor, position: int
) -> int:
    """Choose in the target's vocabulary, ids outside the map at -inf."""
    logits_V = torch.full((VOCAB_SIZE,), -torch.inf)
    logits_V[model.draft_to_target_R] = model.head_RH @ normed_H
    params = request.params
    processed = process_logits(logits_V, params, TokenCounts(num_output=9))
    return choose(processed, params, position)


def test_a_chain_equals_the_dense_draft(model: Eagle3Model) -> None:
    bench = Bench(model)
    request = bench.request([5, 9, 40, 7, 7, 61, 12], slot=3)
    bench.observe([(request, 0, 6)])
    expected = dense_chain(model, request, 5)
    assert bench.drafts([(request, 5)]) == [expected]
    # Proposing has no effect on what the next proposal of the same state is.
    assert bench.drafts([(request, 5)]) == [expected]
    assert len(set(expected)) > 1


def test_rounds_with_rejections_equal_the_dense_draft(model: Eagle3Model) -> None:
    """C027: entries of committed tokens are made of the target's states, whatever was drafted."""
    bench = Bench(model)
    request = bench.request([8, 30, 2, 19], slot=0)
    bench.observe([(request, 0, 3)])
    for num_accepted in (0, 3, 1, 2, 0, 3):
        drafts = bench.drafts([(request, 3)])[0]
        assert drafts == dense_chain(model, request, 3)
        newest = len(request.ids) - 1
        request.ids += [*drafts[:num_accepted], (drafts[-1] + 11) % 99]
        bench.observe([(request, newest, len(request.ids) - 1)])
    rebuilt = Bench(model)
    rebuilt.observe([(request, 0, len(request.ids) - 1)])
    blocks = request.block_table[: (len(request.ids) - 1) // KV_BLOCK_SIZE]
    for kept, made in zip(bench.pool.layers, rebuilt.pool.layers, strict=True):
        assert torch.equal(kept.k[blocks], made.k[blocks])
        assert torch.equal(kept.v[blocks], made.v[blocks])


def test_batch_chunks_and_widths_do_not_matter(model: Eagle3Model) -> None:
    bench = Bench(model)
    a = bench.request([4, 5, 6, 7, 8, 9, 10], slot=6)
    b = bench.request([50, 51, 52], slot=1)
    c = bench.request([90, 3, 33, 44, 55], slot=2)
    bench.observe([(a, 0, 2), (b, 0, 2)])
    bench.observe([(a, 2, 6), (c, 0, 4)])
    found = bench.drafts([(c, 2), (a, 4), (b, 0)])
    assert found == [dense_chain(model, c, 2), dense_chain(model, a, 4), []]
    assert bench.drafts([(b, 3), (c, 3)]) == [dense_chain(model, b, 3), dense_chain(model, c, 3)]


def test_drafts_are_target_ids(model: Eagle3Model) -> None:
    bench = Bench(model)
    request = bench.request([5, 9, 40], slot=0)
    bench.observe([(request, 0, 2)])
    assert set(bench.drafts([(request, 6)])[0]) <= set(model.draft_to_target_R.tolist())


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.6, "min_p": 0.01}])
def test_sampled_drafts_use_the_noise_of_the_target(
    model: Eagle3Model, filters: dict[str, Any]
) -> None:
    bench = Bench(model)
    sampled = SamplingParams(temperature=0.8, seed=77, choice_index=1, **filters)
    a = bench.request([5, 9, 40, 7], slot=0, params=sampled)
    b = bench.request([5, 9, 40, 7], slot=1)
    bench.observe([(a, 0, 3), (b, 0, 3)])
    assert bench.drafts([(b, 3), (a, 5)]) == [dense_chain(model, b, 3), dense_chain(model, a, 5)]


def test_a_reused_slot_starts_from_its_new_request(model: Eagle3Model) -> None:
    bench = Bench(model)
    old = bench.request([5, 9, 40, 7], slot=0)
    bench.observe([(old, 0, 3)])
    bench.proposer.release(0)
    new = bench.request([6, 60], slot=0)
    with pytest.raises(AssertionError, match="slot-0"):
        bench.drafts([(new, 2)])
    bench.observe([(new, 0, 1)])
    assert bench.drafts([(new, 2)]) == [dense_chain(model, new, 2)]


def test_drafting_stops_at_the_drafts_context(tmp_path: Path) -> None:
    """C025, C107: a draft of 16 positions beside a target of 512."""
    model = make_model(tmp_path, max_position_embeddings=16)
    bench = Bench(model)
    long = bench.request(range(10, 24), slot=0)
    short = bench.request([1, 2, 3], slot=1)
    bench.observe([(long, 0, 13), (short, 0, 2)])
    assert [bench.proposer.max_drafts(r.view(3)) for r in (long, short)] == [2, 3]
    assert [len(d) for d in bench.drafts([(long, 3), (short, 3)])] == [2, 3]
    for length, expected in ((15, 1), (16, 0), (17, 0), (40, 0)):
        view = make_view(range(length), GREEDY, num_prompt_tokens=1, num_drafts=3)
        assert bench.proposer.max_drafts(view) == expected
    long.ids += [7, 7, 7, 7]
    bench.observe([(long, 13, 17)])
    assert bench.drafts([(long, 3), (short, 3)]) == [[], dense_chain(model, short, 3)]


def test_nothing_to_observe_and_nothing_to_propose(model: Eagle3Model) -> None:
    bench = Bench(model)
    request = bench.request([5, 9], slot=0)
    bench.observe([(request, 0, 0)])
    assert bench.drafts([(request, 0)]) == [[]]
    assert bench.drafts([]) == []


def test_facts_that_the_engine_reads(model: Eagle3Model) -> None:
    proposer = Bench(model).proposer
    assert proposer.name == "eagle3"
    assert proposer.aux_layer_ids == model.facts.aux_layer_ids
    assert proposer.num_lookahead_tokens == 1
