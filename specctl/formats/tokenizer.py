"""What a target's tokenizer and generation config say about ids.

Invariants: reads JSON only; `tokenizer_config.json`'s Python class names are never imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from specctl.checkpoint import Checkpoint
from specctl.checkpoint.config_sections import stated
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.file_names import CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG
from specctl.formats.fields import MAX_INTEGER, ReaderFindings


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    # Unigram vocabularies are lists of [piece, score]; the id is the place in the list.
    vocab: dict[str, int] | list[msgspec.Raw] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFacts:
    """Sizes and end ids of a target.

    Args:
        size: highest token id + 1, None without a tokenizer.json.
        digest: `sha256:` of tokenizer.json.
        eos_token_ids: of config, generation config and tokenizer, ascending.
    """

    size: int | None
    digest: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


def read_tokenizer(checkpoint: Checkpoint, findings: ReaderFindings) -> TokenizerFacts:
    """Return the tokenizer's facts; an unreadable file is SD207 at its name."""
    tokenizer = _decode(checkpoint, findings)
    vocabulary: Mapping[str, int] = {}
    size: int | None = None
    added: dict[str, int] = {}
    if tokenizer is not None:
        added = {token.content: token.id for token in tokenizer.added_tokens}
        vocab = tokenizer.model.vocab
        if isinstance(vocab, dict):
            vocabulary = vocab
            highest = max(vocab.values(), default=-1)
        else:
            highest = len(vocab) - 1
        size = max(highest, *added.values(), -1) + 1
    config = checkpoint.config or {}
    generation = _json(checkpoint, GENERATION_CONFIG, findings)
    end_token = _json(checkpoint, TOKENIZER_CONFIG, findings).get("eos_token")
    text = end_token.get("content") if isinstance(end_token, dict) else end_token
    named = added.get(text, vocabulary.get(text)) if isinstance(text, str) else None
    where = f"{CONFIG}#/eos_token_id"
    end_ids = {
        *read_ids(stated(config, "eos_token_id"), where, findings),
        *read_ids(generation.get("eos_token_id"), f"{GENERATION_CONFIG}#/eos_token_id", findings),
        *target_ids(named),
    }
    findings.derived(
        "target.eos_token_ids", where, "end ids of config, generation config and tokenizer"
    )
    begin = read_ids(stated(config, "bos_token_id"), f"{CONFIG}#/bos_token_id", findings)
    return TokenizerFacts(
        size=size,
        digest=checkpoint.file_digest(TOKENIZER) if tokenizer is not None else None,
        bos_token_id=begin[0] if begin else None,
        eos_token_ids=tuple(sorted(end_ids)),
    )


def token_ids(checkpoint: Checkpoint) -> Mapping[str, int] | None:
    """Return token -> id of a directory's tokenizer.json, None without a readable one."""
    tokenizer = _decode(checkpoint, ReaderFindings())
    if tokenizer is None or not isinstance(tokenizer.model.vocab, dict):
        return None
    return {
        **tokenizer.model.vocab,
        **{token.content: token.id for token in tokenizer.added_tokens},
    }


def text_token(checkpoint: Checkpoint, token: int) -> str | None:
    """Return the entry of an id that stands for text, None for a special token or no entry."""
    tokenizer = _decode(checkpoint, ReaderFindings())
    if tokenizer is None or not isinstance(tokenizer.model.vocab, dict):
        return None
    if any(added.id == token for added in tokenizer.added_tokens):
        return None
    return next((text for text, number in tokenizer.model.vocab.items() if number == token), None)


def target_ids(value: object) -> tuple[int, ...]:
    """Return a config's id or list of ids, without what is no id."""
    return tuple(item for item in _integers(value) if 0 <= item <= MAX_INTEGER)


def read_ids(value: object, where: str, findings: ReaderFindings) -> tuple[int, ...]:
    """Return `target_ids` of a field; what is no id, or one that no vocabulary has, is SD207."""
    others = [item for item in _items(value) if type(item) is not int]
    if others:
        findings.add(
            "SD207",
            where=where,
            message="an id is a whole number",
            expected="a token id, or a list of them",
            found=repr(value)[:80],
        )
    largest = max(_integers(value), default=0)
    if largest > MAX_INTEGER:
        findings.add(
            "SD207",
            where=where,
            message="the id is larger than any vocabulary",
            expected=f"at most {MAX_INTEGER}",
            found=largest if largest < 1 << 64 else "2^64 or more",
        )
    return target_ids(value)


def _integers(value: object) -> tuple[int, ...]:
    return tuple(item for item in _items(value) if type(item) is int)


def _items(value: object) -> tuple[object, ...]:
    items = value if isinstance(value, list) else [value]
    return tuple(item for item in items if item is not None)


def _decode(checkpoint: Checkpoint, findings: ReaderFindings) -> _Tokenizer | None:
    try:
        raw = checkpoint.read_file(TOKENIZER)
    except DiagnosticError as error:
        findings.extend(error.diagnostics)
        return None
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=_Tokenizer)
    except msgspec.DecodeError as error:
        findings.add(
            "SD207",
            where=TOKENIZER,
            message=f"not a tokenizer file: {error}",
            expected="model.vocab and added_tokens",
            found="another layout",
            help="Copy tokenizer.json from where the weights were published",
        )
        return None


def _json(checkpoint: Checkpoint, name: str, findings: ReaderFindings) -> Mapping[str, object]:
    """Return a file's object; empty when there is none, or an unreadable one (with a finding)."""
    try:
        return checkpoint.json_file(name) or {}
    except DiagnosticError as error:
        findings.extend(error.diagnostics)
        return {}
