"""From logits to one token: request options applied to one row, then argmax or Gumbel-argmax.

Order of the options (each sees the result of the one before):
1. `logit_bias` is added;
2. `repetition_penalty` over ids of prompt and output (positive logits divided, others multiplied);
3. `presence_penalty`, then `frequency_penalty` times the count, over ids of the output;
4. end ids are masked while fewer than `min_tokens` tokens are out, and ids that a grammar forbids;
greedy stops here and takes the highest value, the lowest id on a tie;
5. division by `temperature`;
6. `top_k`, 7. `min_p` (against the most likely id), 8. `top_p` over what is left, renormalised.
Filters rank ids by (value descending, id ascending), so ties at a border are always cut alike.

Invariants: elementwise operations round once each, sums whose order a device may choose are integer
sums, and sorting and maxima are exact. So a row's result never depends on the batch.

Legend: M rows, V ids of one vocabulary (the filters work in either vocabulary).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from runtime.batch import on_device
from runtime.kernels.law import (
    KEEPS_ALL,
    MASKED,
    FilterRows,
    comparable,
    filter_rows,
    scale_rows,
)
from runtime.spec.noise import NoiseKey
from runtime.spec.types import RequestView, SamplingParams

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
    logits_V: torch.Tensor,
    params: SamplingParams,
    counts: TokenCounts,
    allowed_V: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply a request's options to one row of target logits; the input is not changed.

    Args:
        logits_V: fp32 [V], target vocabulary.
        params: the request's options.
        counts: the tokens before the one being chosen.
        allowed_V: bool [V], ids that a grammar allows here; None allows all.

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
        values_V[on_device(params.end_ids_target, device=values_V.device)] = MASKED
    if allowed_V is not None:
        values_V = torch.where(allowed_V, values_V, MASKED)
    if params.is_greedy:
        return comparable(values_V)
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


def scale(values_V: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return (values - max) / temperature: 0 at the maximum, less elsewhere, never NaN."""
    temperature_M = on_device(
        [usable_temperature(temperature)], dtype=torch.float32, device=values_V.device
    )
    return scale_rows(values_V[None], temperature_M)[0]


def usable_temperature(temperature: float) -> float:
    """Return the temperature that counts."""
    return min(max(temperature, _LEAST_TEMPERATURE), _LARGEST_TEMPERATURE)


def filter_columns(params: SamplingParams) -> tuple[int, float, float]:
    """Return a request's (top_k, log min_p, top_p) as `FilterRows` holds them."""
    return (
        params.top_k if params.top_k > 0 else KEEPS_ALL,
        math.log(params.min_p) if params.min_p > 0.0 else MASKED,
        params.top_p,
    )


def filter_ids(scaled_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the log weights with ids that top-k, min-p and top-p drop set to -inf.

    Args:
        scaled_V: fp32 [V] log weights of which the highest is 0, in either vocabulary.
        params: the request's options.

    Invariants: the most likely id is always kept.
    """
    if not has_filters(params, num_ids=scaled_V.shape[0]):
        return scaled_V
    return filter_rows(scaled_V[None], filters_of([params], device=scaled_V.device))[0]


def law_rows(logits_MV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Return fp32 log weights [M, V] of rows without options that change single logits.

    Args:
        logits_MV: fp32, in either vocabulary.
        params: of each row; temperature and filters are read.

    Exactness: a row has the bits of `filter_ids(scale(row))`.
    Sync: none.
    """
    device = logits_MV.device
    temperature_M = on_device(
        [usable_temperature(item.temperature) for item in params],
        dtype=torch.float32,
        device=device,
    )
    scaled_MV = scale_rows(logits_MV, temperature_M)
    if not any(has_filters(item, num_ids=logits_MV.shape[1]) for item in params):
        return scaled_MV
    return filter_rows(scaled_MV, filters_of(params, device=device))


def filters_of(params: Sequence[SamplingParams], *, device: torch.device) -> FilterRows:
    """Return the filters of requests on the device.

    Sync: none.
    """
    top_k, log_min_p, top_p = zip(*(filter_columns(item) for item in params), strict=True)
    return FilterRows(
        top_k_M=on_device(top_k, device=device),
        log_min_p_M=on_device(log_min_p, dtype=torch.float32, device=device),
        top_p_M=on_device(top_p, dtype=torch.float64, device=device),
    )


def has_filters(params: SamplingParams, *, num_ids: int) -> bool:
    """Tell whether a filter may drop one of `num_ids` ids."""
    return 0 < params.top_k < num_ids or params.min_p > 0.0 or params.top_p < 1.0


def noise_key(params: SamplingParams, position: int) -> NoiseKey:
    """Return what names the noise of the token at an absolute position of a request."""
    return NoiseKey(seed=params.seed, choice_index=params.choice_index, position=position)
