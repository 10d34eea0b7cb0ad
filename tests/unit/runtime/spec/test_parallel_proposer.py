"""P-EAGLE drafts against a dense forward written from the description of its training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.engine.request import RequestInput
from runtime.kv import KVPool
from runtime.models import PEagleModel
from runtime.spec.packing import pack_rows
from runtime.spec.parallel import ParallelProposer
from runtime.spec.types import Observation, SamplingParams
from tests.engine_harness import Overrides, World, drive, make_rig, prompt_of, reference_ids
from tests.tiny_parallel import MASK_ID, parallel_world
from tests.unit.runtime.spec.stub_model import CPU, make_view

Tensors = dict[str, torch.Tensor]
EPS, HEADS, GROUPS, SIZE, BLOCK = 1e-5, 4, 2, 8, 4
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return parallel_world(tmp_path_factory.mktemp("parallel"), is_agreeing=False)


def stored(world: World, part: str) -> Tensors:
    source = world.manifest.target.source
    directory = Path(source).parent / part
    return {
        k: v.float()
        for k, v in load_file(directory / "model.safetensors").items()
        if v.is_floating_point()
    }


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight


def attend(w: Tensors, place: str, x_NX: torch.Tensor) -> torch.Tensor:
    """Causal attention over all rows, one position each."""
    q, k, v = ((x_NX @ w[f"{place}{n}_proj.weight"].T).view(len(x_NX), -1, SIZE) for n in "qkv")
    angle = torch.arange(len(x_NX))[:, None] * 1e4 ** -(torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angle.cos(), angle.sin()))
    q, k = (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k))
    k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
    scores = torch.einsum("nhp,mhp->hnm", q, k) * SIZE**-0.5
    later = torch.ones(len(x_NX), len(x_NX)).triu(1).bool()
    mixed = torch.einsum("hnm,mhp->nhp", scores.masked_fill(later, -torch.inf).softmax(-1), v)
    return mixed.flatten(1) @ w[f"{place}o_proj.weight"].T


def dense_logits(draft: Tensors, target: Tensors, ids: list[int], aux_NA: torch.Tensor, depth: int):  # type: ignore[no-untyped-def]
    """Return logits [depth, R]: entries (ids[p + 1], aux[p]), then depth - 1 mask rows."""
    embedded = target["model.embed_tokens.weight"][[*ids[1:], *[MASK_ID] * (depth - 1)]]
    mask = draft["mask_hidden"].view(1, -1).expand(depth - 1, -1)
    wide = norm(torch.cat([aux_NA, mask]), draft["input_norm.weight"])
    stream = wide @ draft["fc.weight"].T
    for index in range(2):
        p = f"layers.{index}."
        read = norm(stream, draft[f"{p}hidden_norm.weight"]) if index == 0 else stream
        own = norm(embedded if index == 0 else stream, draft[f"{p}input_layernorm.weight"])
        wide = torch.cat([own, read], -1) if index == 0 else own
        stream = stream + attend(draft, f"{p}self_attn.", wide)
        normed = norm(stream, draft[f"{p}post_attention_layernorm.weight"])
        gate, up = (normed @ draft[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        stream = (
            stream + (torch.nn.functional.silu(gate) * up) @ draft[f"{p}mlp.down_proj.weight"].T
        )
    return (norm(stream, draft["norm.weight"]) @ draft["lm_head.weight"].T)[-depth:]


@pytest.mark.parametrize("counts", [(4, 1), (2, 5)])
def test_all_drafts_of_a_round_come_from_one_dense_forward(
    world: World, counts: tuple[int, int]
) -> None:
    model = world.models.draft
    assert isinstance(model, PEagleModel)
    pool = KVPool(
        model.kv_specs, num_blocks=16, kv_block_size=BLOCK, dtype=torch.float32, device=CPU
    )
    for layer in pool.layers:  # what nobody wrote is never read
        layer.k.fill_(3.0)
        layer.v.fill_(-5.0)
    proposer = ParallelProposer(model, pool.layers, kv_block_size=BLOCK, num_slots=3)
    prompts = [list(prompt_of(1, 9)), list(prompt_of(2, 6))]
    views = [
        make_view(
            prompt,
            params=GREEDY,
            num_prompt_tokens=len(prompt),
            num_drafts=count,
            slot=slot,
            block_table=tuple(range(1 + 7 * slot, 8 + 7 * slot)),
        )
        for slot, (prompt, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    wide = model.fusion.weight.shape[1]
    aux = [
        torch.randn(len(p) - 1, wide, generator=torch.Generator().manual_seed(3)) for p in prompts
    ]
    rows = [(b, p, prompt[p]) for b, prompt in enumerate(prompts) for p in range(len(prompt) - 1)]
    batch = pack_rows(rows, views, kv_block_size=BLOCK, device=CPU)
    ends = (len(prompts[0]) - 2, len(rows) - 1)
    proposer.observe(
        Observation(
            batch=batch,
            next_ids_target_N=torch.tensor([t for prompt in prompts for t in prompt[1:]]),
            aux_hidden_N=torch.cat(aux),
            views=tuple(views),
            last_row=ends,
        )
    )
    proposal = proposer.propose(views)
    assert proposal.num_drafts == counts
    draft, target = stored(world, "draft"), stored(world, "target")
    for b, count in enumerate(counts):
        logits = dense_logits(draft, target, prompts[b], aux[b], count)
        expected = model.draft_to_target_R[logits.argmax(-1)]
        assert proposal.ids_target_BG[b, :count].tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sequences_are_those_of_the_target_alone(tmp_path: Path, temperature: float) -> None:
    world = parallel_world(tmp_path)
    assert world.manifest.geometry.draft_width == 4
    assert world.manifest.geometry.verify_width == 5
    rig = make_rig(world, Overrides(proposer="peagle", num_speculative_tokens=4))
    assert rig.config.draft_width == 4
    requests = [
        RequestInput(
            request_id=f"r{index}",
            prompt_ids_target=prompt_of(index, 2 + 5 * index),
            params=SamplingParams(temperature=temperature, seed=index),
            max_tokens=18,
            num_speculative_tokens=1 + index,
            ignore_eos=True,
        )
        for index in range(4)
    ]
    answers = drive(rig, requests)
    for request in requests:
        assert answers[request.request_id].ids_target == reference_ids(world, request)
    stats = rig.engine.stats()
    assert stats.num_accepted_at[0] > 0
