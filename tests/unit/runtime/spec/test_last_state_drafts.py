"""MTP and EAGLE-1 chains against dense references written from their publications.

The references know the published names of the files, no cache and no manifest: DeepSeek-V3 report,
section 2.2 (one layer, run again on its own output), and "EAGLE" (arXiv 2401.15077), figure 6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from runtime.batch import RoundRequests
from runtime.kv import KVPool
from runtime.models import Eagle1Model, MtpModel
from runtime.spec import factory
from runtime.spec.factory import DraftParts
from runtime.spec.packing import pack_rows
from runtime.spec.types import DeviceProposer, Observation, Proposer, SamplingParams
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import kv_rows
from tests.tiny import TOKENIZER_SIZE, write_tiny_target
from tests.tiny_last_state import write_eagle1, write_mtp, write_normed_eagle1
from tests.tiny_manifest import load_tiny
from tests.unit.runtime.spec.stub_model import CPU, make_view

Tensors = dict[str, torch.Tensor]
EPS, HEADS, GROUPS, SIZE = 1e-5, 4, 2, 8
BLOCK = 4
GREEDY = SamplingParams()


def norm(x_NH: torch.Tensor, weight_H: torch.Tensor) -> torch.Tensor:
    return x_NH * (x_NH.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * weight_H


def rotate(x_NHP: torch.Tensor) -> torch.Tensor:
    angle = torch.arange(len(x_NHP))[:, None] * 1e4 ** -(torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angle.cos(), angle.sin()))
    left, right = x_NHP.chunk(2, -1)
    return x_NHP * cos + torch.cat([-right, left], -1) * sin


def llama_layer(w: Tensors, prefix: str, x_NH: torch.Tensor) -> torch.Tensor:
    """Return the stream after one Llama layer; without a stored input norm it reads x itself."""
    w = {key.removeprefix(prefix): value for key, value in w.items() if key.startswith(prefix)}
    input_norm = w.get("input_layernorm.weight")
    read = x_NH if input_norm is None else norm(x_NH, input_norm)
    q, k, v = (
        (read @ w[f"self_attn.{name}_proj.weight"].T).view(len(x_NH), -1, SIZE) for name in "qkv"
    )
    q, k = rotate(q), rotate(k)
    k, v = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (k, v))
    scores = torch.einsum("nhp,mhp->hnm", q, k) * SIZE**-0.5
    hidden = torch.ones(len(x_NH), len(x_NH)).triu(1).bool()
    mixed = torch.einsum("hnm,mhp->nhp", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    x_NH = x_NH + mixed.flatten(1) @ w["self_attn.o_proj.weight"].T
    normed = norm(x_NH, w["post_attention_layernorm.weight"])
    gate, up = (normed @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x_NH + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj.weight"].T


def mtp_step(
    draft: Tensors, target: Tensors, ids: list[int], h_NH: torch.Tensor, layer: int = 0
) -> torch.Tensor:
    """Return [N, H]: the normed output for tokens `ids` beside states `h`; it is fed back, too."""
    p = f"model.layers.{4 + layer}."
    embedding = draft.get(f"{p}embed_tokens.weight", target["model.embed_tokens.weight"])
    embedded = embedding[ids]
    both = [norm(embedded, draft[f"{p}enorm.weight"]), norm(h_NH, draft[f"{p}hnorm.weight"])]
    out = llama_layer(draft, p, torch.cat(both, -1) @ draft[f"{p}eh_proj.weight"].T)
    return norm(out, draft[f"{p}shared_head.norm.weight"])


def eagle1_step(
    draft: Tensors, target: Tensors, ids: list[int], h_NH: torch.Tensor
) -> torch.Tensor:
    """Return [N, H]: the predicted states, which the target's head reads as they are."""
    embedded = target["model.embed_tokens.weight"][ids]
    if "embedding_layernorm.weight" in draft:
        embedded = norm(embedded, draft["embedding_layernorm.weight"])
    stream = torch.cat([embedded, h_NH], -1) @ draft["fc.weight"].T
    stream = stream + draft.get("fc.bias", torch.zeros(()))
    for index in range(2):
        if f"layers.{index}.mlp.up_proj.weight" in draft:
            stream = llama_layer(draft, f"layers.{index}.", stream)
    return stream


Step = Callable[[Tensors, Tensors, list[int], torch.Tensor], torch.Tensor]


class Case:
    """A draft, loaded and as stored."""

    def __init__(self, directory: Path, kind: str) -> None:
        target_dir = write_tiny_target(directory / "target")
        self.step: Step = mtp_step if kind.startswith("mtp") else eagle1_step
        self.num_layers = 3 if kind == "mtp-layers" else 1
        if kind.startswith("mtp"):
            draft_dir = write_mtp(
                directory / "draft",
                target_dir,
                num_layers=self.num_layers,
                has_own_vocabulary="own" in kind,
            )
        elif kind == "eagle-norms":
            draft_dir = write_normed_eagle1(directory / "draft", target_dir)
        else:
            draft_dir = write_eagle1(
                directory / "draft",
                target_dir,
                has_bias="bias" in kind,
                num_layers=2 if "two" in kind else 1,
            )
        manifest = emit_manifest(str(target_dir), str(draft_dir), num_speculative_tokens=3)
        model = load_tiny(manifest).draft
        assert isinstance(model, (MtpModel, Eagle1Model))
        self.model = model
        self.target = {k: v.float() for k, v in load_file(target_dir / "model.safetensors").items()}
        # Rows above the tokenizer are padding: no token that could be proposed.
        self.head = self.target["lm_head.weight"][:TOKENIZER_SIZE]
        stored = load_file(draft_dir / "model.safetensors")
        self.draft = {
            key.replace("fusion_fc.", "fc.").replace("transformer.", "layers.0."): value.float()
            for key, value in stored.items()
        }
        own = self.draft.get("model.layers.4.shared_head.head.weight")
        if own is not None:
            self.head = own[: len(model.draft_to_target_R)]
        self.head_norm = self.draft.get("pre_lm_head_layernorm.weight")

    def logits(self, out_NH: torch.Tensor) -> torch.Tensor:
        """Return the logits of the last row."""
        last = out_NH[-1] if self.head_norm is None else norm(out_NH[-1], self.head_norm)
        return last @ self.head.T

    def states(self, count: int) -> torch.Tensor:
        return torch.randn(count, 32, generator=torch.Generator().manual_seed(6)) * 2

    def chain(self, ids: Sequence[int], num_drafts: int) -> tuple[list[int], torch.Tensor]:
        """Return the drafts after `ids` and the logits of the first one."""
        if self.num_layers > 1:
            return self.layer_by_layer(ids, num_drafts)
        tokens, rows = list(ids[1:]), self.states(len(ids) - 1)
        first = torch.empty(0)
        for index in range(num_drafts):
            out = self.step(self.draft, self.target, tokens, rows)[-1:]
            logits = self.logits(out)
            first = logits if index == 0 else first
            tokens.append(int(logits.argmax()))
            rows = torch.cat([rows, out])
        return tokens[len(ids) - 1 :], first

    def layer_by_layer(self, ids: Sequence[int], num_drafts: int) -> tuple[list[int], torch.Tensor]:
        """Return the same of several layers: layer k pairs its states with tokens k further on."""
        count, tokens, rows = len(ids) - 1, list(ids), self.states(len(ids) - 1)
        first = torch.empty(0)
        for layer in range(min(num_drafts, self.num_layers)):
            read = tokens[1 + layer : 1 + layer + count]
            rows = mtp_step(self.draft, self.target, read, rows, layer)
            logits = self.logits(rows)
            first = logits if layer == 0 else first
            tokens.append(int(logits.argmax()))
        return tokens[len(ids) :], first


@pytest.fixture(
    scope="module",
    params=[
        "mtp",
        "mtp-own",
        "mtp-layers",
        "eagle",
        "eagle-bias",
        "eagle-norms",
        "eagle-two-layers",
    ],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("draft"), request.param)


def make_proposer(case: Case) -> tuple[Proposer, KVPool]:
    pool = KVPool(
        case.model.kv_specs, num_blocks=16, kv_block_size=BLOCK, dtype=torch.float32, device=CPU
    )
    parts = DraftParts(model=case.model, kv=pool.layers, kv_block_size=BLOCK, num_slots=2)
    return factory.make_proposer(case.model.facts.algorithm, device=CPU, draft=parts), pool


def show(proposer: Proposer, case: Case, ids: list[int], start: int, stop: int) -> None:
    """Let the proposer see the target's states of positions start..stop - 1."""
    view = make_view(ids, GREEDY, num_prompt_tokens=3, slot=1, block_table=[5, 2, 9, 4])
    rows = [(0, p, ids[p]) for p in range(start, stop)]
    proposer.observe(
        Observation(
            batch=pack_rows(rows, [view], kv_block_size=BLOCK, device=CPU),
            next_ids_target_N=torch.tensor(ids[start + 1 : stop + 1]),
            aux_hidden_N=None,
            views=(view,),
            last_row=(stop - start - 1 if stop == len(ids) - 1 else -1,),
            final_hidden_NH=case.states(len(ids) - 1)[start:stop],
        )
    )


def drafts_of(proposer: Proposer, ids: list[int], count: int) -> list[int]:
    view = make_view(
        ids, GREEDY, num_prompt_tokens=3, slot=1, block_table=[5, 2, 9, 4], num_drafts=count
    )
    return proposer.propose([view]).ids_target_BG[0].tolist()


def test_a_chain_equals_the_reference(case: Case) -> None:
    ids = [5, 9, 40, 7, 7, 61, 12]
    proposer, _ = make_proposer(case)
    show(proposer, case, ids, 0, 2)
    show(proposer, case, ids, 2, 6)
    expected, _ = case.chain(ids, 4)
    assert drafts_of(proposer, ids, 4) == expected
    assert drafts_of(proposer, ids, 2) == expected[:2]
    assert len(set(expected)) > 1


def test_first_logits_equal_the_reference(case: Case) -> None:
    ids = [5, 9, 40, 7, 7, 61, 12]
    view = make_view(ids, GREEDY, num_prompt_tokens=3, block_table=[1, 2, 3, 4])
    batch = pack_rows(
        [(0, p, ids[p + 1]) for p in range(6)], [view], kv_block_size=BLOCK, device=CPU
    )
    _, pool = make_proposer(case)
    with torch.inference_mode():
        hidden = case.model.forward(batch, case.model.fuse(case.states(6)), pool.layers)
        found = case.model.logits(hidden.head_input_NH)[-1]
    _, expected = case.chain(ids, 1)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def test_committed_tokens_replace_the_chains_own_guess(case: Case) -> None:
    ids = [8, 30, 2, 19]
    proposer, pool = make_proposer(case)
    show(proposer, case, ids, 0, 3)
    for num_accepted in (0, 2, 1):
        drafts = drafts_of(proposer, ids, 3)
        assert drafts == case.chain(ids, 3)[0]
        newest = len(ids) - 1
        ids = [*ids, *drafts[:num_accepted], (drafts[-1] + 11) % 90 + 3]
        show(proposer, case, ids, newest, len(ids) - 1)
    again, rebuilt = make_proposer(case)
    show(again, case, ids, 0, len(ids) - 1)
    for layer, (kept, made) in enumerate(zip(pool.layers, rebuilt.layers, strict=True)):
        num_final = len(ids) - 1 - (layer if case.num_layers > 1 else 0)
        rows = (kv_rows(each, [5, 2, 9, 4], num_final) for each in (kept, made))
        assert torch.equal(*rows)


def test_what_the_engine_reads(case: Case) -> None:
    proposer, _ = make_proposer(case)
    assert proposer.name == case.model.facts.algorithm
    assert (proposer.aux_layer_ids, proposer.needs_final_hidden) == ((), True)
    assert proposer.num_lookahead_tokens == case.num_layers


def test_several_layers_make_one_draft_each(case: Case) -> None:
    proposer, _ = make_proposer(case)
    view = make_view([1, 2, 3], GREEDY, num_prompt_tokens=2, num_drafts=9)
    assert proposer.max_drafts(view) == (case.num_layers if case.num_layers > 1 else 9)


def test_short_requests_and_mixed_depths_equal_the_reference(case: Case) -> None:
    """Entries before the request's first position do not exist; views leave at their own depth."""
    for ids in ([5, 9], [5, 9, 40]):
        proposer, _ = make_proposer(case)
        show(proposer, case, ids, 0, len(ids) - 1)
        assert drafts_of(proposer, ids, 3) == case.chain(ids, 3)[0]
        one, two = (
            make_view(
                ids, GREEDY, num_prompt_tokens=1, slot=1, block_table=[5, 2], num_drafts=count
            )
            for count in (1, 2)
        )
        proposal = proposer.propose([one, two])
        assert proposal.num_drafts == (1, 2)
        expected = case.chain(ids, 2)[0]
        assert proposal.ids_target_BG.tolist() == [[expected[0], 0], expected]


def test_a_round_on_the_device_drafts_the_same(case: Case) -> None:
    ids = [5, 9, 40, 7, 7, 61, 12]
    proposer, _ = make_proposer(case)
    show(proposer, case, ids, 0, 6)
    assert isinstance(proposer, DeviceProposer)
    requests = RoundRequests(
        slots_B=torch.tensor([1]),
        lengths_B=torch.tensor([6]),
        newest_ids_target_B=torch.tensor([12]),
        num_drafts_B=torch.tensor([3]),
        block_tables_BT=torch.tensor([[5, 2, 9, 4]], dtype=torch.int32),
        positions_BW=torch.tensor([[6, 7, 8, 9]]),
        kv_slots_BW=torch.tensor([[10, 11, 36, 37]]),
        positions_WB=torch.tensor([[6], [7], [8], [9]]),
        kv_slots_WB=torch.tensor([[10], [11], [36], [37]]),
        ids_target_BW=torch.tensor([[12, -1, -1, -1]]),
        row_request_BW=torch.zeros((1, 4), dtype=torch.int32),
        row_request_B=torch.zeros(1, dtype=torch.int32),
        max_length=16,
    )
    with torch.inference_mode():
        proposer.draft_round(requests)
    drafts = requests.drafts_BG[0].tolist()
    assert drafts == drafts_of(proposer, ids, 3) == case.chain(ids, 3)[0]
