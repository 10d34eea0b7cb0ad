"""Runs the eager path before the first request: its kernels are compiled, its prefills timed.

A kernel is compiled once for each set of its compile-time numbers. Those of attention follow how
many row tiles and segments a launch has, those of choosing tokens the rows and drafts that requests
happen to have: they are launched by themselves, with every number. Those of other kernels follow
the rows of a forward and the options of requests: a load of made-up requests goes through all of
it, in an engine of its own over the served models and caches. What is written there is overwritten
by whoever gets the blocks and slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime.batch import ROW_TILE_ROWS, PreparedBatch
from runtime.config import RuntimeConfig
from runtime.engine.caches import Caches
from runtime.engine.engine import Engine
from runtime.engine.request import RequestInput
from runtime.kernels import accept, paged_attention
from runtime.kernels.rows import attention_segment
from runtime.kv import KVLayer
from runtime.loading import LoadedModels
from runtime.models import TargetModel
from runtime.spec.types import SamplingParams

_FIRST_ROWS = 16  # fewer run the tiles of so many
_MOST_ROWS_OF_LOGITS = 64  # more run the tiles of so many

_NUM_NEW_TOKENS = 3  # one by the prefill, then two rounds
_KINDS = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2),
    SamplingParams(num_logprobs=2),
    SamplingParams(repetition_penalty=1.1, presence_penalty=0.1),
)
"""Ways to choose tokens besides plain greedy; `verification` is settled at admission."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUp:
    """What a warm-up ran.

    Args:
        num_steps: eager steps.
        seconds: that these and the launches besides took, compilation included.
        prefill_s: (rows, seconds) of eager prefills that had been compiled, rows ascending.
    """

    num_steps: int
    seconds: float
    prefill_s: tuple[tuple[int, float], ...]


def row_counts(most: int) -> tuple[int, ...]:
    """Return rows from 16 to `most`; from 64 on each is at most 1.25 times the one before.

    Between two of them no kernel of a forward has a row tile of its own.
    """
    counts: list[int] = []
    size = _FIRST_ROWS
    while size < most:
        quarters = (4, 5, 6, 7) if size >= 64 else (4, 6) if size >= 32 else (4,)
        counts += [size * part // 4 for part in quarters if size * part // 4 < most]
        size *= 2
    return (*counts, most)


def warm_up(engine: Engine, models: LoadedModels, caches: Caches) -> WarmUp:
    """Run every kind of eager prefill and round once, prefills twice to time them.

    Args:
        engine: eager, without requests and without a prefix cache.
        models: that it runs.
        caches: that it runs them over.

    Sync: waits for the device.
    """
    config = engine.config
    start = time.perf_counter()
    most_rows = config.max_num_batched_tokens
    attend_everywhere(
        _attention_kinds(models, caches),
        most_tiles=min(most_rows, config.max_num_requests + most_rows // ROW_TILE_ROWS),
        max_length=config.max_model_len,
    )
    _choose_everywhere(models.target, config.num_speculative_tokens)
    segment = attention_segment(models.target.facts.decoder.head_dim)
    timings: list[tuple[int, float]] = []
    for num_rows in row_counts(config.max_num_batched_tokens):
        prompts = _prompts(config, num_rows, segment)
        if not prompts or _run(engine, prompts) is None:
            break  # larger ones fit into neither cache nor memory
        seconds = _run(engine, prompts)
        if seconds is None:
            break
        timings.append((num_rows, seconds))
    for load in _loads(config):
        _run(engine, load)
    return WarmUp(
        num_steps=engine.num_steps,
        seconds=time.perf_counter() - start,
        prefill_s=tuple(timings),
    )


def attend_everywhere(
    kinds: Iterable[tuple[int, KVLayer]], *, most_tiles: int, max_length: int
) -> None:
    """Launch attention with every number of row tiles and of segments.

    Of numbers that lie close together one is taken: a launch decides by whether there is more than
    one segment, and by whether tiles times key heads, alone or times segments, fill the device.

    Args:
        kinds: query heads and a layer of the pool.
        most_tiles: of a forward.
        max_length: positions of a request at most.

    Sync: none.
    """
    for heads, layer in kinds:
        segment = attention_segment(layer.k.shape[3])
        for num_tiles in _spaced(most_tiles):
            for num_segments in _spaced(-(-max_length // segment)):
                try:
                    _attend(heads, layer, num_tiles, num_segments * segment)
                except torch.OutOfMemoryError:  # nor would such a forward have room
                    torch.cuda.empty_cache()


def _attention_kinds(models: LoadedModels, caches: Caches) -> Iterable[tuple[int, KVLayer]]:
    """Return query heads and a layer of the pool for each shape of attention in the models."""
    pairs = [(models.target.facts.decoder.num_attention_heads, layer) for layer in caches.target_kv]
    if models.draft is not None:
        heads = models.draft.facts.decoder.num_attention_heads
        pairs += [(heads, layer) for layer in caches.draft_kv]
    return {(heads, layer.k.shape[1:]): (heads, layer) for heads, layer in pairs}.values()


def _attend(num_heads: int, layer: KVLayer, num_tiles: int, max_length: int) -> None:
    """Attend from tiles of one row to the first key of block 0, which nobody reads for real."""
    zeros_N = torch.zeros(num_tiles, dtype=torch.int64, device=layer.k.device)
    request_N = zeros_N.int()
    batch = PreparedBatch(
        ids_target_N=zeros_N,
        positions_N=zeros_N,
        slots_N=zeros_N,
        row_request_N=request_N,
        block_tables_BT=request_N[:1].view(1, 1),
        max_length=max_length,
        tiles_U2=torch.stack(
            (torch.arange(num_tiles, device=zeros_N.device), zeros_N + 1), 1
        ).int(),
    )
    q_NHP = layer.k.new_zeros((num_tiles, num_heads, layer.k.shape[3]))
    paged_attention(q_NHP, layer, batch, scale=1.0)


def _choose_everywhere(target: TargetModel, num_speculative_tokens: int) -> None:
    """Choose tokens in every number of rows, and accept every number of drafts.

    A step has as many drafts as the request with the most, and drafts that are found in the text
    are of any number: loads cannot name them.
    """
    for num_rows in row_counts(_MOST_ROWS_OF_LOGITS):
        hidden_ND = torch.zeros(
            (num_rows, target.facts.decoder.hidden_size), dtype=target.dtype, device=target.device
        )
        target.greedy_ids(hidden_ND)
        target.logits(hidden_ND)
    for num_drafts in range(num_speculative_tokens + 1):
        ids_BW = torch.zeros((1, num_drafts + 1), dtype=torch.int64, device=target.device)
        accept(ids_BW[:, :num_drafts].contiguous(), ids_BW, ids_BW[:, 0].contiguous())


def _spaced(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, ... and `most`."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted(
        {count for size in powers for count in (size, size * 3 // 2) if count < most} | {most}
    )


def _prompts(config: RuntimeConfig, num_rows: int, segment: int) -> list[RequestInput]:
    """Return requests whose prompts have so many tokens together; none where they do not fit.

    Prompts are of one attention `segment` where that suffices.
    """
    longest = min(config.prefill_chunk_size, config.max_model_len - 1)
    count = -(-num_rows // min(longest, segment))
    count = min(count, config.max_num_requests)
    lengths = [num_rows // count + (index < num_rows % count) for index in range(count)]
    if max(lengths) > longest or not _fits(config, lengths, 1):
        return []
    return [_request(index, length, config) for index, length in enumerate(lengths)]


def _loads(config: RuntimeConfig) -> Iterator[list[RequestInput]]:
    """Return requests that run together: greedy ones and drawing ones of all rows, each kind.

    A round has its drafts and one row more of each request; some drafts run as many rows as drafts.
    """
    width, most = config.num_speculative_tokens + 1, config.max_num_requests
    sizes = {max(1, width - 1), width}
    batches = {
        min(most, max(1, rows // size)) for rows in row_counts(most * width) for size in sizes
    }
    for count in sorted(batches):
        yield from _fitting(config, [None] * count)
        if count <= _MOST_ROWS_OF_LOGITS:
            yield from _fitting(config, [_KINDS[0]] * count)
    for params in _KINDS:
        yield from _fitting(config, [params])
    yield from _fitting(config, _KINDS)


def _fitting(
    config: RuntimeConfig, kinds: Sequence[SamplingParams | None]
) -> Iterator[list[RequestInput]]:
    """Return requests of one prompt token, so that all start in one step, where they fit."""
    if _fits(config, [1] * len(kinds), _NUM_NEW_TOKENS):
        yield [_request(i, 1, config, params, _NUM_NEW_TOKENS) for i, params in enumerate(kinds)]


def _request(
    index: int,
    length: int,
    config: RuntimeConfig,
    params: SamplingParams | None = None,
    max_tokens: int = 1,
) -> RequestInput:
    ids = [(7 + 3 * place + index) % config.target_vocab_size for place in range(length)]
    return RequestInput(
        request_id=f"warm-up-{index}",
        prompt_ids_target=ids,
        params=params or SamplingParams(),
        max_tokens=max_tokens,
        ignore_eos=True,
    )


def _fits(config: RuntimeConfig, lengths: Sequence[int], max_tokens: int) -> bool:
    """Return whether slots, blocks and context hold requests to their ends."""
    room = max_tokens + config.num_speculative_tokens
    blocks = sum(-(-(length + room) // config.kv_block_size) for length in lengths)
    return (
        len(lengths) <= config.max_num_requests
        and blocks < config.num_kv_blocks
        and max(lengths) + max_tokens <= config.max_model_len
    )


def _run(engine: Engine, requests: Sequence[RequestInput]) -> float | None:
    """Run requests to their ends; return the seconds, or None where device memory ran out."""
    device = engine.config.device
    start = time.perf_counter()
    try:
        for request in requests:
            engine.add_request(request)
        while engine.has_work:
            engine.step()
    except torch.OutOfMemoryError:
        for request in requests:
            engine.abort(request.request_id)
        torch.cuda.empty_cache()
        return None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
