"""Log probabilities over HTTP: both spellings, streams that add up, tokens that are no text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from runtime.engine.request import RequestDelta, Usage
from runtime.server.logprobs import token_bytes, token_text
from runtime.server.options import Endpoint
from runtime.server.parse import parse_chat, parse_completion
from runtime.server.prepare import prepare_chat, prepare_completion
from runtime.server.responses import Choice, Envelope, chunk, whole_response
from runtime.spec.types import TokenLogprobs
from tests.unit.runtime.server.scripted_engine import TOKENIZER, served_model

USAGE = Usage(
    num_prompt_tokens=1,
    num_cached_tokens=0,
    num_output_tokens=3,
    num_rounds=1,
    num_drafts=0,
    num_accepted_drafts=0,
)
IDS = (36, 37, 38)
ENTRIES = tuple(
    TokenLogprobs(logprob=-0.5 - i, top=((36 + i, -0.5 - i), (40, -2.5))) for i in range(3)
)


def envelope(endpoint: Endpoint, *, has_logprobs: bool = True) -> Envelope:
    return Envelope(
        endpoint=endpoint,
        response_id="x",
        created=1,
        model="tiny",
        fingerprint="f",
        seed=3,
        has_token_ids=False,
        has_logprobs=has_logprobs,
        tokenizer=TOKENIZER,
    )


def deltas() -> list[RequestDelta]:
    """Three tokens in two rounds; the first round's text is held back."""
    return [
        RequestDelta(
            request_id="r",
            ids_target=IDS[:2],
            text="",
            finish_reason=None,
            usage=USAGE,
            logprobs=ENTRIES[:2],
        ),
        RequestDelta(
            request_id="r",
            ids_target=IDS[2:],
            text="ABC",
            finish_reason="length",
            usage=USAGE,
            logprobs=ENTRIES[2:],
        ),
    ]


def answers(endpoint: Endpoint) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return `logprobs` of the whole answer and of the chunks of a stream."""
    head, whole, streamed = envelope(endpoint), Choice(index=0), Choice(index=0)
    chunks = []
    for delta in deltas():
        whole.add(delta)
        streamed.add(delta)
        chunks.append(chunk(head, streamed, delta, has_usage_key=False))
    documents = json.loads(json.dumps([whole_response(head, [whole], 1), *chunks]))
    first, *rest = [item["choices"][0]["logprobs"] for item in documents]
    return first, rest


def test_completions() -> None:
    whole, chunks = answers("completions")
    assert whole["tokens"] == [TOKENIZER.decode([i]) for i in IDS]
    assert whole["token_logprobs"] == [-0.5, -1.5, -2.5]
    assert whole["text_offset"] == [0, 1, 2]
    assert whole["top_logprobs"][1] == {whole["tokens"][1]: -1.5, TOKENIZER.decode([40]): -2.5}
    for name, values in whole.items():
        assert [item for part in chunks for item in part[name]] == values


def test_chat() -> None:
    whole, chunks = answers("chat")
    assert whole["refusal"] is None
    first = whole["content"][0]
    assert first["token"] == TOKENIZER.decode([36])
    assert bytes(first["bytes"]).decode() == first["token"]
    assert first["logprob"] == -0.5
    assert [item["logprob"] for item in first["top_logprobs"]] == [-0.5, -2.5]
    assert [item for part in chunks for item in part["content"]] == whole["content"]


def test_nothing_is_told_unless_asked_for() -> None:
    choice = Choice(index=0)
    choice.add(deltas()[1])
    document: Any = whole_response(envelope("chat", has_logprobs=False), [choice], 1)
    assert document["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, None), ({"logprobs": None}, None), ({"logprobs": 0}, 0), ({"logprobs": 5}, 5)],
)
def test_completion_field(fields: dict[str, Any], expected: int | None) -> None:
    prepared = prepare_completion(parse_completion({"prompt": [5], **fields}), served_model(), "id")
    assert prepared.inputs[0].params.num_logprobs == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_fields(fields: dict[str, Any], expected: int | None) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    prepared = prepare_chat(parse_chat(body), served_model(), "id")
    assert prepared.inputs[0].params.num_logprobs == expected


def test_tokens_that_are_parts_of_characters_have_their_bytes() -> None:
    vocab = {"\u00e2": 0, "\u0124": 1, "<0xE2>": 2, "<unk>": 3, "\u2581hi": 4, "\u00c3\u00a9": 5}
    byte_level = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    byte_level.decoder = decoders.ByteLevel()
    assert token_bytes(byte_level, 0) == [0xE2]
    assert token_bytes(byte_level, 1) == [0x82]
    assert token_bytes(byte_level, 5) == list("\u00e9".encode())
    fallback = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    fallback.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    assert token_bytes(fallback, 2) == [0xE2]
    assert token_text(fallback, 4) == " hi"
    assert token_text(None, 7) == "token_id:7"
    assert token_bytes(None, 7) is None
