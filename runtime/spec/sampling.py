"""From logits to one token: request options applied to one row, then argmax or Gumbel-argmax.

Order of the options (each sees the result of the one before):
1. `logit_bias` is added;
2. `repetition_penalty` over ids of prompt and output (positive logits divided, others multiplied);
3. `presence_penalty`, then `frequency_penalty` times the count, over ids of the output;
4. end ids are masked while fewer than `min_tokens` tokens are out;
greedy stops here and takes the highest value, the lowest id on a tie;
5. division by `temperature`;
6. `top_k`, 7. `min_p` (against the most likely id), 8. `top_p` over what is left, renormalised.
Filters rank ids by (value descending, id ascending), so ties at a border are always cut alike.

Invariants: one row at a time, shapes depend on the vocabulary only; sums whose order a device may
choose are integer sums. So a row's result never depends on the batch.

Legend: V ids of one vocabulary (the filters work in either vocabulary).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from runtime.spec.host import on_device
from runtime.spec.noise import NoiseKey
from runtime.spec.types import RequestView, SamplingParams

_MASKED = -math.inf
# Fixed point of the top-p sum: 40 bits for a weight in [0, 1] leave 23 bits for the vocabulary.
_FIXED_POINT = 2.0**40
# Temperatures beyond these count as these: they and their reciprocals are normal in float32.
_LEAST_TEMPERATURE, _LARGEST_TEMPERATURE = 2.0**-126, 2.0**126


def has_penalties(params: SamplingParams) -> bool:
    """Tell whether the choice depends on which tokens came before (beyond the model's context)."""
    return (
        params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """What the options of a row need to know about the tokens before it.

    Args:
        num_output: tokens of the output so far.
        prompt_ids_target: ids of the prompt; read by penalties only.
        output_counts: target id -> occurrences in the output; read by penalties only.
    """

    num_output: int
    prompt_ids_target: frozenset[int] = frozenset()
    output_counts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, view: RequestView) -> TokenCounts:
        """Count the request's tokens."""
        output = view.ids_target[view.num_prompt_tokens :]
        return cls(
            num_output=len(output),
            prompt_ids_target=frozenset(view.ids_target[: view.num_prompt_tokens]),
            output_counts=Counter(output),
        )

    def followed_by(self, drafts_target: Sequence[int]) -> TokenCounts:
        """Return the counts as if `drafts_target` were committed, too."""
        return replace(
            self,
            num_output=self.num_output + len(drafts_target),
            output_counts=Counter(self.output_counts) + Counter(drafts_target),
        )


def process_logits(
    logits_V: torch.Tensor, params: SamplingParams, counts: TokenCounts
) -> torch.Tensor:
    """Apply a request's options to one row of target logits; the input is not changed.

    Args:
        logits_V: fp32 [V], target vocabulary.
        params: the request's options.
        counts: the tokens before the one being chosen.

    Returns:
        fp32 [V]: for greedy the changed logits, else log weights (up to a constant) of the law
        that the token is drawn from, -inf where it cannot be drawn.
    """
    values_V = logits_V.to(torch.float32, copy=True)
    if params.logit_bias:
        bias = dict(params.logit_bias)
        values_V[on_device(list(bias), device=values_V.device)] += on_device(
            list(bias.values()), dtype=torch.float32, device=values_V.device
        )
    if has_penalties(params):
        _penalise(values_V, params, counts)
    if counts.num_output < params.min_tokens and params.end_ids_target:
        values_V[on_device(params.end_ids_target, device=values_V.device)] = _MASKED
    if params.is_greedy:
        return _comparable(values_V)
    return filter_ids(scale(values_V, params.temperature), params)


def _penalise(values_V: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> None:
    """Apply the penalties in place; touches the counted ids only."""
    device = values_V.device
    if params.repetition_penalty != 1.0:
        seen = sorted(counts.prompt_ids_target.union(counts.output_counts))
        index = on_device(seen, device=device)
        values = values_V[index]
        factor = params.repetition_penalty
        values_V[index] = torch.where(values > 0, values / factor, values * factor)
    output = sorted(counts.output_counts.items())
    index = on_device([i for i, _ in output], device=device)
    times = on_device([n for _, n in output], dtype=torch.float32, device=device)
    values_V[index] -= params.presence_penalty
    values_V[index] -= params.frequency_penalty * times


def _comparable(values_V: torch.Tensor) -> torch.Tensor:
    """Return values of which one is the highest: NaN is -inf and +inf the highest finite number.

    NaN is never chosen, as in the head's own argmax. Options beyond float32's range make infinities
    here, and NaN where two of them meet.
    """
    return torch.nan_to_num(values_V, nan=_MASKED, neginf=_MASKED)


def scale(values_V: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return (values - max) / temperature: 0 at the maximum, less elsewhere, never NaN."""
    values_V = _comparable(values_V)
    highest = values_V.max().clamp(min=torch.finfo(torch.float32).min)
    temperature = min(max(temperature, _LEAST_TEMPERATURE), _LARGEST_TEMPERATURE)
    return (values_V - highest) / temperature


def filter_ids(scaled_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the log weights with ids that top-k, min-p and top-p drop set to -inf.

    Args:
        scaled_V: fp32 [V] log weights, in either vocabulary.
        params: the request's options.

    Invariants: the most likely id is always kept.
    """
    has_top_k = 0 < params.top_k < scaled_V.shape[0]
    if not has_top_k and params.min_p <= 0.0 and params.top_p >= 1.0:
        return scaled_V
    ordered_V, order_V = torch.sort(scaled_V, descending=True, stable=True)
    rank_V = torch.arange(ordered_V.shape[0], device=ordered_V.device)
    keep_V = torch.ones_like(rank_V, dtype=torch.bool)
    if has_top_k:
        keep_V &= rank_V < params.top_k
    if params.min_p > 0.0:
        keep_V &= ordered_V >= ordered_V[0] + math.log(params.min_p)
    if params.top_p < 1.0:
        weights_V = torch.exp((ordered_V - ordered_V[0]).to(torch.float64)) * _FIXED_POINT
        # Integers: a float prefix sum may be added in another order from one call to the next.
        mass_V = weights_V.round().to(torch.int64) * keep_V
        before_V = mass_V.cumsum(dim=0) - mass_V
        keep_V &= before_V.to(torch.float64) < mass_V.sum().to(torch.float64) * params.top_p
    keep_V |= rank_V == 0
    kept_V = torch.where(keep_V, ordered_V, _MASKED)
    return torch.empty_like(scaled_V).scatter_(0, order_V, kept_V)


def noise_key(params: SamplingParams, position: int) -> NoiseKey:
    """Return what names the noise of the token at an absolute position of a request."""
    return NoiseKey(seed=params.seed, choice_index=params.choice_index, position=position)


def choose_with(processed_V: torch.Tensor, noise_V: torch.Tensor | None) -> torch.Tensor:
    """Return argmax(processed + noise), the lowest id on a tie; None is greedy.

    Exactness: argmax of log weights plus independent standard Gumbel values is a draw from the
    law with those weights (Gumbel-max), so the kept ids need no normalisation.
    """
    scores_V = processed_V if noise_V is None else processed_V + noise_V
    ids_V = torch.arange(scores_V.shape[0], device=scores_V.device)
    return torch.where(scores_V == scores_V.max(), ids_V, scores_V.shape[0]).min()
