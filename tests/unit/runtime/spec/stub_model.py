"""A language model made of a hash, and the slow target-only decoding that verification must equal.

Hidden states are the logits themselves, so a test controls every row. Logits lie on a coarse grid,
so that exact ties are common.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from runtime.kernels.noise import gumbel_noise
from runtime.spec.noise import DrawKind, NoiseKey, noise_rows
from runtime.spec.sampling import noise_key
from runtime.spec.types import Proposal, RequestView, RoundResult, SamplingParams
from runtime.spec.verify import VerifyRows, verify

CPU = torch.device("cpu")
Model = Callable[[tuple[int, ...]], torch.Tensor]


def choose_with(processed_V: torch.Tensor, noise_V: torch.Tensor | None) -> torch.Tensor:
    """Return argmax(processed + noise), the lowest id on a tie; None is greedy.

    Exactness: argmax of log weights plus independent standard Gumbel values is a draw from the
    law with those weights (Gumbel-max), so the kept ids need no normalisation.
    """
    scores_V = processed_V if noise_V is None else processed_V + noise_V
    ids_V = torch.arange(scores_V.shape[0], device=scores_V.device)
    return torch.where(scores_V == scores_V.max(), ids_V, scores_V.shape[0]).min()


def hash_model(seed: int, num_ids: int, *, step: float = 0.5) -> Model:
    """Return a model whose logits after a context are a function of the context, on a grid."""

    def logits(ids: tuple[int, ...]) -> torch.Tensor:
        draw = random.Random(repr((seed, ids)))
        return torch.tensor([round(draw.gauss(0, 1.5) / step) * step for _ in range(num_ids)])

    return logits


class IdentityHead:
    """A head whose hidden states are logits already."""

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return hidden_MD

    def greedy_ids(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        best = hidden_MD == hidden_MD.amax(dim=1, keepdim=True)
        return best.to(torch.int64).argmax(dim=1)


def make_view(
    ids: Sequence[int],
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    num_drafts: int = 0,
    slot: int = 0,
    request_id: str = "r",
    block_table: Sequence[int] = (),
) -> RequestView:
    return RequestView(
        request_id=request_id,
        slot=slot,
        ids_target=tuple(ids),
        num_prompt_tokens=num_prompt_tokens,
        params=params,
        block_table=tuple(block_table),
        num_drafts=num_drafts,
    )


def gumbel_rows(
    keys: Sequence[NoiseKey],
    *,
    num_ids: int,
    device: torch.device = CPU,
    kind: DrawKind = DrawKind.TOKEN,
) -> torch.Tensor:
    """Return the noise of one choice in each row, fp32 [M, V]."""
    return gumbel_noise(noise_rows(keys, device=device), num_ids, kind)


def gumbel(key: NoiseKey, *, num_ids: int, kind: DrawKind = DrawKind.TOKEN) -> torch.Tensor:
    """Return the noise of one token choice, fp32 [V], made alone."""
    return gumbel_rows([key], num_ids=num_ids, kind=kind)[0]


def choose(processed_V: torch.Tensor, params: SamplingParams, position: int) -> int:
    """Return the token of one processed row, chosen alone."""
    key = noise_key(params, position)
    noise_V = None if params.is_greedy else gumbel(key, num_ids=processed_V.shape[0])
    return int(choose_with(processed_V, noise_V))


def run_round(
    model: Model,
    views: Sequence[RequestView],
    drafts: Sequence[Sequence[int]],
    *,
    num_rows_before: int = 0,
    width: int = 0,
) -> RoundResult:
    """Verify `drafts` for `views` in one batch; rows before the first are poisoned padding."""
    num_ids = model((0,)).shape[0]
    rows = [torch.full((num_ids,), float(n)) for n in range(num_rows_before)]
    first_row = []
    for view, row_drafts in zip(views, drafts, strict=True):
        first_row.append(len(rows))
        rows += [model((*view.ids_target, *row_drafts[:j])) for j in range(len(row_drafts) + 1)]
    width = max([width, *(len(d) for d in drafts)])
    ids = [[*d, *[0] * (width - len(d))] for d in drafts]
    proposal = Proposal(
        ids_target_BG=torch.tensor(ids, dtype=torch.int64).reshape(len(drafts), width),
        num_drafts=tuple(len(d) for d in drafts),
    )
    return verify(
        IdentityHead(),
        torch.stack(rows),
        VerifyRows(views=tuple(views), first_row=tuple(first_row)),
        proposal,
    )


def target_only(
    model: Model, prompt: Sequence[int], params: SamplingParams, num_tokens: int
) -> tuple[int, ...]:
    """Decode one token a round without drafts."""
    ids = list(prompt)
    for _ in range(num_tokens):
        view = make_view(ids, params, num_prompt_tokens=len(prompt))
        ids += run_round(model, [view], [()]).committed[0]
    return tuple(ids[len(prompt) :])


def advance(view: RequestView, committed: Sequence[int]) -> RequestView:
    return replace(view, ids_target=(*view.ids_target, *committed))


def law(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Return the law of a sampled token without penalties, written with lists and floats."""
    scaled = [value / params.temperature for value in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    if params.top_k:
        order = order[: params.top_k]
    weight = {i: math.exp(scaled[i] - scaled[order[0]]) for i in order}
    order = [i for i in order if weight[i] >= params.min_p]
    total = sum(weight[i] for i in order)
    kept, before = [], 0.0
    for i in order:
        if kept and before >= params.top_p * total:
            break
        kept.append(i)
        before += weight[i]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(scaled))]
