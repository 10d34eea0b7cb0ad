"""Parsed bodies to engine requests: encode, check against the served model, fix the seed.

Invariants: choice j of prompt i has index i * n + j, and that index is the choice index of its
noise, so equal prompts in one body differ and a body repeated with its seed does not. Nothing is
cut to fit.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from runtime.engine.request import RequestInput
from runtime.engine.text import ChatRenderer
from runtime.server.fields import Prompt
from runtime.server.parse import ChatRequest, CompletionRequest, RequestOptions
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

SEED_BITS = 53
"""Drawn seeds survive JSON readers that hold numbers as doubles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What requests are checked against.

    Args:
        name: id under /v1/models.
        target_vocab_size: rows of the target's embedding.
        max_model_len: prompt and new tokens of one request at most.
        num_speculative_tokens: drafts of a round at most.
        fingerprint: the manifest's handshake fingerprint.
        created: Unix time of the start.
        tokenizer: None when the target has none; then prompts are ids.
    """

    name: str
    target_vocab_size: int
    max_model_len: int
    num_speculative_tokens: int
    fingerprint: str
    created: int
    tokenizer: Tokenizer | None
    chat: ChatRenderer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Engine requests of one body.

    Args:
        inputs: in choice order.
        num_choices: choices of each prompt.
        seed: given or drawn.
    """

    inputs: tuple[RequestInput, ...]
    num_choices: int
    seed: int


def check_model(name: str | None, served: ServedModel) -> None:
    """Refuse another model than the served one.

    Raises:
        DiagnosticError: SD907.
    """
    if name is not None and name != served.name:
        raise DiagnosticError(
            diagnose(
                "SD907",
                where="body#/model",
                message=f"the model `{name}` is not served here",
                expected=f"`{served.name}`",
                found=f"`{name}`",
            )
        )


def prepare_completion(
    request: CompletionRequest, served: ServedModel, response_id: str
) -> Prepared:
    """Encode the prompts of a completion body.

    Raises:
        DiagnosticError: SD904, SD907-SD911, SD919.
    """
    check_model(request.options.model, served)
    prompts = [
        _Encoded(pointer=pointer, ids_target=_encode(prompt, served, pointer))
        for pointer, prompt in _pointers(request.prompts)
    ]
    return _prepare(prompts, request.options, served, response_id)


def prepare_chat(request: ChatRequest, served: ServedModel, response_id: str) -> Prepared:
    """Render and encode a chat body; the template writes its own begin token.

    Raises:
        DiagnosticError: SD904, SD907-SD913, SD919.
    """
    check_model(request.options.model, served)
    text = served.chat(request.messages)
    ids = _ids(_tokenizer(served, "messages"), text, with_special_tokens=False)
    prompt = _Encoded(pointer="messages", ids_target=ids)
    return _prepare([prompt], request.options, served, response_id)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoded:
    pointer: str
    ids_target: tuple[int, ...]


def _pointers(prompts: Sequence[Prompt]) -> list[tuple[str, Prompt]]:
    if len(prompts) == 1:
        return [("prompt", prompts[0])]
    return [(f"prompt/{index}", prompt) for index, prompt in enumerate(prompts)]


def _tokenizer(served: ServedModel, pointer: str) -> Tokenizer:
    if served.tokenizer is None:
        raise DiagnosticError(
            diagnose(
                "SD911",
                where=f"body#/{pointer}",
                message="text was sent, but the served target has no tokenizer.json",
                expected="`prompt` as token ids",
                found="text",
            )
        )
    return served.tokenizer


def _encode(prompt: Prompt, served: ServedModel, pointer: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return _ids(_tokenizer(served, pointer), prompt, with_special_tokens=True)
    return prompt


def _ids(tokenizer: Tokenizer, text: str, *, with_special_tokens: bool) -> tuple[int, ...]:
    """Encode with the interpreter released, which `encode` of one text does not do."""
    (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=with_special_tokens)
    return tuple(encoded.ids)


def _prepare(
    prompts: Sequence[_Encoded], options: RequestOptions, served: ServedModel, response_id: str
) -> Prepared:
    problems = [
        *(problem for prompt in prompts for problem in _prompt_problems(prompt, options, served)),
        *_option_problems(options, served),
    ]
    if problems:
        raise DiagnosticError(problems)
    seed = secrets.randbits(SEED_BITS) if options.seed is None else options.seed
    inputs = tuple(
        _input(prompt, options, request_id=f"{response_id}-{index}", seed=seed, index=index)
        for index, prompt in enumerate(prompt for prompt in prompts for _ in range(options.n))
    )
    return Prepared(inputs=inputs, num_choices=options.n, seed=seed)


def _input(
    prompt: _Encoded, options: RequestOptions, *, request_id: str, seed: int, index: int
) -> RequestInput:
    params = SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        min_tokens=options.min_tokens,
        seed=seed,
        choice_index=index,
        num_logprobs=options.num_logprobs,
    )
    return RequestInput(
        request_id=request_id,
        prompt_ids_target=prompt.ids_target,
        params=params,
        max_tokens=options.max_tokens,
        stop=options.stop,
        stop_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        num_speculative_tokens=options.num_speculative_tokens,
    )


def _prompt_problems(
    prompt: _Encoded, options: RequestOptions, served: ServedModel
) -> list[Diagnostic]:
    where, length, context = f"body#/{prompt.pointer}", len(prompt.ids_target), served.max_model_len
    if not length:
        return [
            diagnose(
                "SD908",
                where=where,
                message="the prompt has no tokens",
                expected="at least 1 token",
                found=0,
            )
        ]
    out_of_range = _ids_problems(prompt.pointer, prompt.ids_target, served)
    if length >= context:
        return [
            *out_of_range,
            diagnose(
                "SD909",
                where=where,
                message=f"the prompt has {length} tokens and the context holds {context}",
                expected=f"at most {context - 1} tokens",
                found=f"{length} tokens",
            ),
        ]
    if options.max_tokens is not None and length + options.max_tokens > context:
        return [
            *out_of_range,
            diagnose(
                "SD909",
                where="body#/max_tokens",
                message=f"{length} prompt tokens and {options.max_tokens} new ones do not fit into "
                f"the context of {context}",
                expected=f"`max_tokens` at most {context - length}",
                found=options.max_tokens,
            ),
        ]
    return out_of_range


def _option_problems(options: RequestOptions, served: ServedModel) -> list[Diagnostic]:
    problems = [
        *_ids_problems("stop_token_ids", options.stop_token_ids, served),
        *_ids_problems("logit_bias", tuple(item for item, _ in options.logit_bias), served),
    ]
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        problems.append(
            diagnose(
                "SD919",
                where="body#/min_tokens",
                message="`min_tokens` is above `max_tokens`",
                expected=f"at most {options.max_tokens}",
                found=options.min_tokens,
            )
        )
    wanted = options.num_speculative_tokens
    if wanted is not None and wanted > served.num_speculative_tokens:
        problems.append(
            diagnose(
                "SD904",
                where="body#/num_speculative_tokens",
                message="`num_speculative_tokens` is above the served number",
                expected=f"0 to {served.num_speculative_tokens}",
                found=wanted,
            )
        )
    if options.stop and served.tokenizer is None:
        problems.append(
            diagnose(
                "SD911",
                where="body#/stop",
                message="stop strings need text, but the served target has no tokenizer.json",
                expected="`stop_token_ids`",
                found="`stop`",
            )
        )
    return problems


def _ids_problems(pointer: str, ids_target: Sequence[int], served: ServedModel) -> list[Diagnostic]:
    worst = next((item for item in ids_target if not 0 <= item < served.target_vocab_size), None)
    if worst is None:
        return []
    return [
        diagnose(
            "SD910",
            where=f"body#/{pointer}",
            message=f"the token id {worst} is outside the target's vocabulary",
            expected=f"0 to {served.target_vocab_size - 1}",
            found=worst,
            help="Use ids of the target's own tokenizer",
        )
    ]
