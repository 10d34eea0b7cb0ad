"""Request bodies to frozen values: every field checked, every problem reported at once.

Invariants: nothing is converted silently (no string to number, no float to integer) and nothing is
clamped; a null field means its default. Ranges that depend on the served model (context,
vocabulary) are checked in `prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from runtime.server.fields import (
    Prompt,
    read_chat_logprobs,
    read_include_usage,
    read_logit_bias,
    read_messages,
    read_prompts,
    read_stop,
    read_token_ids,
)
from runtime.server.options import DEFAULT_COMPLETION_TOKENS
from runtime.server.reader import Body, BodyReader, type_name
from specctl.contract.diagnostics import DiagnosticError, diagnose


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOptions:
    """The options of one HTTP request, all set; see `options.OPTIONS` for meaning and ranges.

    Args:
        max_tokens: None takes the rest of the context.
        seed: None draws one.
        num_speculative_tokens: None takes the served number.
        num_logprobs: likeliest tokens to report with each log probability; None reports none.
    """

    model: str | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    n: int
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    num_speculative_tokens: int | None
    num_logprobs: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """Body of /v1/completions; prompts are text or target ids."""

    prompts: tuple[Prompt, ...]
    options: RequestOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """Body of /v1/chat/completions; each message has `role` and text `content`."""

    messages: tuple[Mapping[str, str], ...]
    options: RequestOptions


def decode_body(raw: bytes) -> Body:
    """Read a JSON object.

    Raises:
        DiagnosticError: SD901.
    """
    try:
        body = msgspec.json.decode(raw)
    except RecursionError as error:
        raise DiagnosticError(
            diagnose("SD901", where="body#", message="the body is nested too deeply")
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DiagnosticError(
            diagnose("SD901", where="body#", message=f"the body is not JSON: {error}")
        ) from error
    if not isinstance(body, dict):
        raise DiagnosticError(
            diagnose(
                "SD901",
                where="body#",
                message="the body is not a JSON object",
                expected="an object",
                found=type_name(body),
            )
        )
    return body


def parse_completion(body: Body) -> CompletionRequest:
    """Parse a completion body.

    Raises:
        DiagnosticError: SD902-SD908, SD919, all problems of the body together.
    """
    reader = BodyReader(body, "completions")
    prompts = read_prompts(reader)
    max_tokens = reader.integer("max_tokens")
    options = _options(
        reader,
        DEFAULT_COMPLETION_TOKENS if max_tokens is None else max_tokens,
        num_logprobs=reader.integer("logprobs"),
    )
    reader.raise_problems()
    return CompletionRequest(prompts=prompts, options=options)


def parse_chat(body: Body) -> ChatRequest:
    """Parse a chat body.

    Raises:
        DiagnosticError: SD902-SD908, SD919, all problems of the body together.
    """
    reader = BodyReader(body, "chat")
    messages = read_messages(reader)
    limits = {
        name: value
        for name in ("max_tokens", "max_completion_tokens")
        if (value := reader.integer(name)) is not None
    }
    if len(set(limits.values())) > 1:
        reader.problem(
            "SD919",
            "max_tokens",
            "`max_tokens` and `max_completion_tokens` differ",
            expected="one of the two",
            found=f"{limits['max_tokens']} and {limits['max_completion_tokens']}",
        )
    options = _options(
        reader, next(iter(limits.values()), None), num_logprobs=read_chat_logprobs(reader)
    )
    reader.raise_problems()
    return ChatRequest(messages=messages, options=options)


def _options(
    reader: BodyReader, max_tokens: int | None, *, num_logprobs: int | None
) -> RequestOptions:
    stream = reader.boolean("stream")
    reader.string("user")
    return RequestOptions(
        model=reader.string("model"),
        max_tokens=max_tokens,
        temperature=reader.number_or_default("temperature"),
        top_p=reader.number_or_default("top_p"),
        top_k=max(reader.integer_or_default("top_k"), 0),
        min_p=reader.number_or_default("min_p"),
        n=reader.integer_or_default("n"),
        seed=reader.integer("seed"),
        presence_penalty=reader.number_or_default("presence_penalty"),
        frequency_penalty=reader.number_or_default("frequency_penalty"),
        repetition_penalty=reader.number_or_default("repetition_penalty"),
        logit_bias=read_logit_bias(reader),
        min_tokens=reader.integer_or_default("min_tokens"),
        ignore_eos=reader.boolean("ignore_eos"),
        stop=read_stop(reader),
        stop_token_ids=read_token_ids(reader, "stop_token_ids", reader.raw("stop_token_ids") or []),
        stream=stream,
        include_usage=read_include_usage(reader, is_stream=stream),
        return_token_ids=reader.boolean("return_token_ids"),
        num_speculative_tokens=reader.integer("num_speculative_tokens"),
        num_logprobs=num_logprobs,
    )
