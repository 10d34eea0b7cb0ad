"""From what a caller asks for to a request the engine can run, or to every reason why not."""

from __future__ import annotations

import math
import secrets
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import NoReturn

from tokenizers import Tokenizer

from runtime.config import RuntimeConfig
from runtime.engine.request import Request, RequestInput
from runtime.engine.text import TextStream
from runtime.spec.types import MAX_LOGPROBS, SamplingParams
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

_MAX_COUNT = 2**63 - 1  # device tensors and messages between ranks hold 64 bits


def admit(wish: RequestInput, config: RuntimeConfig, tokenizer: Tokenizer | None) -> Request:
    """Return the request with everything settled: seed, end ids, lengths, verification.

    Raises:
        DiagnosticError: SD904 (ranges), SD908 to SD910 (prompt), SD911 (stop strings without a
            tokenizer), SD843 (grammar of another vocabulary), all problems together.
    """
    problems = list(_problems(wish, config, tokenizer))
    if problems:
        raise DiagnosticError(problems)
    prompt = list(wish.prompt_ids_target)
    length = config.max_model_len
    if wish.max_tokens is not None:
        length = min(length, len(prompt) + wish.max_tokens)
    gamma = wish.num_speculative_tokens
    return Request(
        request_id=wish.request_id,
        params=_settled_params(wish, config),
        ids_target=prompt,
        num_prompt_tokens=len(prompt),
        max_length=length,
        num_speculative_tokens=config.num_speculative_tokens if gamma is None else gamma,
        text=None if tokenizer is None else TextStream(tokenizer, stop=wish.stop),
        is_parked_at_end=wish.is_parked_at_end,
        masks=wish.masks,
    )


def refuse_known(request: RequestInput, in_flight: Container[str]) -> None:
    """Refuse an id that is in flight.

    Raises:
        DiagnosticError: SD904.
    """
    if request.request_id in in_flight:
        raise DiagnosticError(
            diagnose(
                "SD904",
                where=f"request={request.request_id}",
                message="this request id is in flight already",
            )
        )


def refuse_full(request: RequestInput, config: RuntimeConfig, num_waiting: int) -> NoReturn:
    """Refuse a request for which the queue has no place.

    Raises:
        DiagnosticError: SD914.
    """
    raise DiagnosticError(
        diagnose(
            "SD914",
            where=f"request={request.request_id}",
            message="the queue is full",
            expected=f"fewer than {config.max_num_waiting} waiting requests",
            found=num_waiting,
        )
    )


def refuse_masks(request: RequestInput) -> None:
    """Refuse a grammar where several processes choose a request's tokens.

    Raises:
        DiagnosticError: SD842.
    """
    if request.masks is not None:
        raise DiagnosticError(
            diagnose(
                "SD842",
                where=f"request={request.request_id}",
                message="a grammar cannot follow this request to other processes",
            )
        )


def _settled_params(wish: RequestInput, config: RuntimeConfig) -> SamplingParams:
    eos = () if wish.ignore_eos else config.eos_ids_target
    return replace(
        wish.params,
        seed=wish.params.seed if wish.has_seed else secrets.randbits(63),
        end_ids_target=tuple(sorted({*eos, *wish.stop_ids})),
        verification=config.verification,
    )


def _problems(
    wish: RequestInput, config: RuntimeConfig, tokenizer: Tokenizer | None
) -> Iterator[Diagnostic]:
    yield from _prompt_problems(wish, config)
    yield from _range_problems(wish, config)
    if wish.stop and tokenizer is None:
        yield diagnose(
            "SD911",
            where=f"request={wish.request_id}",
            message="stop strings need a tokenizer, and this engine has none",
        )
    if wish.masks is not None and wish.masks.num_ids != config.target_vocab_size:
        yield diagnose(
            "SD843",
            where=f"request={wish.request_id}",
            message=f"the grammar knows {wish.masks.num_ids} ids, the target has others",
            expected=config.target_vocab_size,
            found=wish.masks.num_ids,
        )


def _prompt_problems(wish: RequestInput, config: RuntimeConfig) -> Iterator[Diagnostic]:
    where = f"request={wish.request_id}"
    num_tokens = len(wish.prompt_ids_target)
    if not num_tokens:
        yield diagnose("SD908", where=where, message="the prompt has no tokens")
    if num_tokens >= config.max_model_len:
        yield diagnose(
            "SD909",
            where=where,
            message=f"a prompt of {num_tokens} tokens leaves no room for an answer",
            expected=f"at most {config.max_model_len - 1}",
            found=num_tokens,
        )
    biased = (token for token, _ in wish.params.logit_bias)
    for token in sorted({*wish.prompt_ids_target, *wish.stop_ids, *biased}):
        if not 0 <= token < config.target_vocab_size:
            yield diagnose(
                "SD910",
                where=where,
                message=f"there is no target id {token}",
                expected=f"0 to {config.target_vocab_size - 1}",
                found=token,
            )
            return


def _range_problems(wish: RequestInput, config: RuntimeConfig) -> Iterator[Diagnostic]:
    params, gamma = wish.params, config.num_speculative_tokens
    biases = tuple(bias for _, bias in params.logit_bias)
    rules = (
        (
            "max_tokens",
            wish.max_tokens,
            f"1 to {_MAX_COUNT}",
            wish.max_tokens is None or 1 <= wish.max_tokens <= _MAX_COUNT,
        ),
        ("stop", wish.stop, "strings of one character or more", all(wish.stop)),
        (
            "num_speculative_tokens",
            wish.num_speculative_tokens,
            f"0 to {gamma}",
            0 <= (wish.num_speculative_tokens or 0) <= gamma,
        ),
        ("temperature", params.temperature, "finite, at least 0", _is_at_least(params.temperature)),
        (
            "seed",
            params.seed,
            f"{-(2**63)} to {2**63 - 1}",
            -(2**63) <= params.seed < 2**63,
        ),
        ("top_k", params.top_k, f"0 to {_MAX_COUNT}", 0 <= params.top_k <= _MAX_COUNT),
        ("top_p", params.top_p, "above 0, at most 1", 0 < params.top_p <= 1),
        ("min_p", params.min_p, "0 to 1", 0 <= params.min_p <= 1),
        (
            "min_tokens",
            params.min_tokens,
            f"0 to {_MAX_COUNT}",
            0 <= params.min_tokens <= _MAX_COUNT,
        ),
        (
            "repetition_penalty",
            params.repetition_penalty,
            "finite, above 0",
            _is_at_least(params.repetition_penalty) and params.repetition_penalty > 0,
        ),
        (
            "presence_penalty",
            params.presence_penalty,
            "finite",
            _is_finite(params.presence_penalty),
        ),
        (
            "frequency_penalty",
            params.frequency_penalty,
            "finite",
            _is_finite(params.frequency_penalty),
        ),
        (
            "num_logprobs",
            params.num_logprobs,
            f"0 to {MAX_LOGPROBS}",
            0 <= (params.num_logprobs or 0) <= MAX_LOGPROBS,
        ),
        ("logit_bias", biases, "finite numbers", all(map(_is_finite, biases))),
    )
    for name, found, expected, holds in rules:
        if not holds:
            yield diagnose(
                "SD904",
                where=f"request={wish.request_id}",
                message=f"`{name}` is outside its range",
                expected=expected,
                found=found,
            )


def _is_finite(value: float) -> bool:
    return math.isfinite(value)


def _is_at_least(value: float) -> bool:
    return math.isfinite(value) and value >= 0
