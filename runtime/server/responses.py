"""OpenAI response objects: whole answers and stream chunks of both endpoints.

Invariants: one chunk for each round that made final text (or ids, where they are told), so
chunks are at most tokens and are not token latencies; `usage` counts kept tokens, a prompt once for
all its choices. `seed` is an added key: it repeats a request that sent none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from runtime.engine.request import FinishReason, RequestDelta, Usage
from runtime.server.logprobs import chat_logprobs, completion_logprobs, token_text
from runtime.server.options import Endpoint
from runtime.spec.types import TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Envelope:
    """What every object of one response repeats."""

    endpoint: Endpoint
    response_id: str
    created: int
    model: str
    fingerprint: str
    seed: int
    has_token_ids: bool
    has_logprobs: bool
    tokenizer: Tokenizer | None


@dataclass(kw_only=True, slots=True)
class Choice:
    """One choice as it grows."""

    index: int
    texts: list[str] = field(default_factory=list)
    ids_target: list[int] = field(default_factory=list)
    usage: Usage | None = None
    finish_reason: FinishReason | None = None
    has_sent_role: bool = False
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logprobs_offset: int = 0

    def add(self, delta: RequestDelta) -> None:
        """Append what a step added."""
        self.texts.append(delta.text)
        self.ids_target.extend(delta.ids_target)
        self.logprobs.extend(delta.logprobs)
        self.usage = delta.usage
        self.finish_reason = delta.finish_reason


def whole_response(
    envelope: Envelope, choices: Sequence[Choice], num_choices: int
) -> dict[str, object]:
    """Build the answer of a request that does not stream."""
    is_chat = envelope.endpoint == "chat"
    return {
        **_head(envelope, "chat.completion" if is_chat else "text_completion"),
        "choices": [_whole_choice(envelope, choice) for choice in choices],
        "usage": usage_object(choices, num_choices),
    }


def chunk(
    envelope: Envelope, choice: Choice, delta: RequestDelta, *, has_usage_key: bool
) -> dict[str, object] | None:
    """Build the stream chunk of a delta; None when there is nothing to tell yet."""
    has_ids = (envelope.has_token_ids or envelope.has_logprobs) and bool(delta.ids_target)
    if not delta.text and not has_ids and delta.finish_reason is None:
        return None
    body: dict[str, object] = {"index": choice.index}
    if envelope.endpoint == "chat":
        role = {} if choice.has_sent_role else {"role": "assistant"}
        choice.has_sent_role = True
        body["delta"] = {**role, "content": delta.text} if delta.text or role else {}
    else:
        body["text"] = delta.text
    body["logprobs"] = _logprobs(envelope, choice, delta.ids_target, delta.logprobs)
    body["finish_reason"] = delta.finish_reason
    if envelope.has_token_ids:
        body["token_ids"] = list(delta.ids_target)
    return {
        **_head(envelope, _chunk_kind(envelope)),
        "choices": [body],
        **({"usage": None} if has_usage_key else {}),
    }


def usage_chunk(
    envelope: Envelope, choices: Sequence[Choice], num_choices: int
) -> dict[str, object]:
    """Build the last chunk of a stream with `include_usage`."""
    return {
        **_head(envelope, _chunk_kind(envelope)),
        "choices": [],
        "usage": usage_object(choices, num_choices),
    }


def usage_object(choices: Sequence[Choice], num_choices: int) -> dict[str, object]:
    """Sum the usage of all choices; the first choice of a prompt stands for the prompt."""
    usages = [choice.usage for choice in choices if choice.usage is not None]
    prompts = usages[::num_choices]
    num_prompt_tokens = sum(usage.num_prompt_tokens for usage in prompts)
    num_output_tokens = sum(usage.num_output_tokens for usage in usages)
    num_accepted = sum(usage.num_accepted_drafts for usage in usages)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(usage.num_cached_tokens for usage in prompts)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": sum(usage.num_drafts for usage in usages) - num_accepted,
        },
    }


def sse_event(payload: bytes) -> bytes:
    """Frame one JSON document (no raw newline in it) as a server-sent event."""
    return b"data: " + payload + b"\n\n"


SSE_DONE = sse_event(b"[DONE]")


def _logprobs(
    envelope: Envelope,
    choice: Choice,
    ids_target: Sequence[int],
    entries: Sequence[TokenLogprobs],
) -> dict[str, object] | None:
    """Return `logprobs` of tokens that follow those told before; None where none are wanted."""
    if not envelope.has_logprobs:
        return None
    if envelope.endpoint == "chat":
        return chat_logprobs(envelope.tokenizer, ids_target, entries)
    offset = choice.logprobs_offset
    choice.logprobs_offset += sum(len(token_text(envelope.tokenizer, i)) for i in ids_target)
    return completion_logprobs(envelope.tokenizer, ids_target, entries, offset=offset)


def _head(envelope: Envelope, kind: str) -> dict[str, object]:
    return {
        "id": envelope.response_id,
        "object": kind,
        "created": envelope.created,
        "model": envelope.model,
        "system_fingerprint": envelope.fingerprint,
        "seed": envelope.seed,
    }


def _chunk_kind(envelope: Envelope) -> str:
    return "chat.completion.chunk" if envelope.endpoint == "chat" else "text_completion"


def _whole_choice(envelope: Envelope, choice: Choice) -> dict[str, object]:
    text = "".join(choice.texts)
    body: dict[str, object] = {"index": choice.index}
    if envelope.endpoint == "chat":
        body["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        body["text"] = text
    body["logprobs"] = _logprobs(envelope, choice, choice.ids_target, choice.logprobs)
    body["finish_reason"] = choice.finish_reason
    if envelope.has_token_ids:
        body["token_ids"] = list(choice.ids_target)
    return body
