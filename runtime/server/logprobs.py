"""Log probabilities as the two endpoints spell them.

A token's text is its decode alone, so texts add up to the answer's except where a character spans
tokens; `bytes` has the exact bytes there. Without a tokenizer a token is spelt `token_id:<id>`.
*Source:* OpenAI API reference: completions `logprobs`, chat `choices[].logprobs.content[]`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from runtime.spec.types import TokenLogprobs

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\ufffd"
_WORD_START = "\u2581"


def token_text(tokenizer: Tokenizer | None, id_target: int) -> str:
    """Return the text of one token, special ones included."""
    if tokenizer is None:
        return f"token_id:{id_target}"
    text: str = tokenizer.decode([id_target], skip_special_tokens=False)
    token = tokenizer.id_to_token(id_target)
    # SentencePiece-style decoders strip the space of a first token.
    if token is not None and token.startswith(_WORD_START) and not text.startswith(" "):
        return " " + text
    return text


def token_bytes(tokenizer: Tokenizer | None, id_target: int) -> list[int] | None:
    """Return the bytes of one token; None where they cannot be told."""
    if tokenizer is None:
        return None
    text = token_text(tokenizer, id_target)
    if _REPLACEMENT not in text:
        return list(text.encode("utf-8"))
    token = tokenizer.id_to_token(id_target)
    if token is None:
        return None
    match = _BYTE_TOKEN.fullmatch(token)
    if match is not None:
        return [int(match.group(1), 16)]
    table = _byte_level_table()
    return [table[char] for char in token] if all(char in table for char in token) else None


@functools.cache
def _byte_level_table() -> dict[str, int]:
    """Return the characters that byte-level BPE writes bytes as (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in shown}
    hidden = (byte for byte in range(256) if byte not in shown)
    table.update({chr(256 + place): byte for place, byte in enumerate(hidden)})
    return table


def completion_logprobs(
    tokenizer: Tokenizer | None,
    ids_target: Sequence[int],
    entries: Sequence[TokenLogprobs],
    *,
    offset: int,
) -> dict[str, object]:
    """Build `logprobs` of a completion choice or chunk.

    Args:
        tokenizer: of the target.
        ids_target: the tokens.
        entries: one for each token.
        offset: characters before the first token, in the texts of the tokens before it.
    """
    tokens = [token_text(tokenizer, item) for item in ids_target]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            {token_text(tokenizer, item): logprob for item, logprob in reversed(entry.top)}
            for entry in entries
        ],
        "text_offset": offsets,
    }


def chat_logprobs(
    tokenizer: Tokenizer | None, ids_target: Sequence[int], entries: Sequence[TokenLogprobs]
) -> dict[str, object]:
    """Build `logprobs` of a chat choice or chunk."""
    content = [
        {
            **_chat_token(tokenizer, id_target, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, *pair) for pair in entry.top],
        }
        for id_target, entry in zip(ids_target, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(tokenizer: Tokenizer | None, id_target: int, logprob: float) -> dict[str, object]:
    return {
        "token": token_text(tokenizer, id_target),
        "logprob": logprob,
        "bytes": token_bytes(tokenizer, id_target),
    }
