"""Runs the eager path before the first request: its kernels are compiled, its prefills timed.

A kernel is compiled once for each set of its compile-time numbers. These follow the rows of a
forward, whether a request is longer than one attention segment, whether programs are few or many,
and how tokens are chosen; a load of made-up requests goes through all of it. It runs in an engine
of its own over the served models and caches: what it writes there is overwritten by whoever gets
the blocks and slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from runtime.config import RuntimeConfig
from runtime.engine.engine import Engine
from runtime.engine.request import RequestInput
from runtime.kernels.rows import SEGMENT
from runtime.spec.types import SamplingParams

_FIRST_ROWS = 16
_ROWS_OF_TILES = (16, 32, 64)  # a head's programs have so many rows at most
_LONG = 4 * SEGMENT
TAIL_CHUNK = SEGMENT
"""Tokens of a chunk whose rest is then a forward of few rows behind several segments."""

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
        seconds: that they took, compilation included.
        prefill_s: (rows, seconds) of eager prefills that had been compiled, rows ascending.
    """

    num_steps: int
    seconds: float
    prefill_s: tuple[tuple[int, float], ...]


def row_counts(most: int) -> tuple[int, ...]:
    """Return rows from 16 to `most`, each at most 1.5 times the one before from 32 on.

    Row tiles change at numbers of rows that are further apart.
    """
    counts: list[int] = []
    size = _FIRST_ROWS
    while size < most:
        counts.append(size)
        if size > _FIRST_ROWS and size * 3 // 2 < most:
            counts.append(size * 3 // 2)
        size *= 2
    return (*counts, most)


def warm_up(engine: Engine, chunked: Engine) -> WarmUp:
    """Run every kind of eager prefill and round once, prefills twice to time them.

    Args:
        engine: eager, without requests and without a prefix cache.
        chunked: such a one with chunks of TAIL_CHUNK tokens at most.

    Sync: waits for the device.
    """
    config = engine.config
    start = time.perf_counter()
    timings: list[tuple[int, float]] = []
    for num_rows in row_counts(config.max_num_batched_tokens):
        prompts = _prompts(config, num_rows)
        if not prompts or _run(engine, prompts) is None:
            break  # larger ones fit into neither cache nor memory
        seconds = _run(engine, prompts)
        if seconds is None:
            break
        timings.append((num_rows, seconds))
    for load in _loads(config):
        _run(engine, load)
    for load in _tails(chunked.config):
        _run(chunked, load)
    return WarmUp(
        num_steps=engine.num_steps + chunked.num_steps,
        seconds=time.perf_counter() - start,
        prefill_s=tuple(timings),
    )


def _prompts(config: RuntimeConfig, num_rows: int) -> list[RequestInput]:
    """Return requests whose prompts have so many tokens together; none where they do not fit.

    Prompts are of one attention segment where that suffices.
    """
    longest = min(config.prefill_chunk_size, config.max_model_len - 1)
    count = -(-num_rows // min(longest, SEGMENT))
    count = min(count, config.max_num_requests)
    lengths = [num_rows // count + (index < num_rows % count) for index in range(count)]
    if max(lengths) > longest or not _fits(config, lengths, 1):
        return []
    return [_request(index, length, config) for index, length in enumerate(lengths)]


def _loads(config: RuntimeConfig) -> Iterator[list[RequestInput]]:
    """Return requests that run together: greedy ones of few and many rows, long ones, each kind."""
    width = config.num_speculative_tokens + 1
    most = config.max_num_requests
    batches = sorted({1, *(min(most, rows // width + 1) for rows in _ROWS_OF_TILES), most})
    for count in batches:
        for params in (None, _KINDS[0]):
            if _fits(config, [4] * count, _NUM_NEW_TOKENS):
                yield [_request(i, 4, config, params, _NUM_NEW_TOKENS) for i in range(count)]
    # Attention of several segments: few programs, many by their segments, many by their rows.
    doubling = {1 << power for power in range(most.bit_length())}
    longer = [(count, SEGMENT + _FIRST_ROWS) for count in sorted({*doubling, most})]
    for count, length in (*longer, (1, _LONG)):
        if _fits(config, [length] * count, _NUM_NEW_TOKENS):
            yield [_request(i, length, config, None, _NUM_NEW_TOKENS) for i in range(count)]
    if _fits(config, [4] * len(_KINDS), _NUM_NEW_TOKENS):
        requests = [
            _request(i, 4, config, params, _NUM_NEW_TOKENS) for i, params in enumerate(_KINDS)
        ]
        yield from ([request] for request in requests)
        yield requests


def _tails(config: RuntimeConfig) -> Iterator[list[RequestInput]]:
    """Return prompts whose last chunk is a forward of few rows behind several segments.

    As few rows follow a cached prefix. Some of them make many attention programs by their segments
    alone, whatever the number of key heads.
    """
    size = 2 * _FIRST_ROWS
    while size <= config.prefill_chunk_size:
        length = config.prefill_chunk_size + size
        if length > SEGMENT and _fits(config, [length], 1):
            yield [_request(0, length, config)]
        size *= 2


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
