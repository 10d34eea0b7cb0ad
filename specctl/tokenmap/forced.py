"""Which ids a map must hold whatever their frequency, and why.

Rule: every end id of config, generation config and tokenizer config; the begin id; the tokenizer's
special tokens, but for those whose name says that they are reserved and have no meaning; every
added token that the chat template writes; what the user asks to keep, by id, by token or as a
range of characters (`U+4E00-U+9FFF`: every token with such a character).
*Source:* field practice: a draft that cannot propose the end or a turn marker costs a round each
time; several models have more than one end id, and only some file names each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.checkpoint.config_sections import model_sections, stated
from specctl.checkpoint.json_text import read_object
from specctl.checkpoint.sources import LocalStore
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.file_names import CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG
from specctl.contract.findings import Findings
from specctl.tokenmap.counting import LoadedTokenizer

if TYPE_CHECKING:
    from tokenizers import AddedToken


_MAX_TEMPLATE_BYTES = 4 << 20
_RANGE = re.compile(r"U\+([0-9A-Fa-f]{1,6})(?:-U\+([0-9A-Fa-f]{1,6}))?")
_REPLACEMENT = "\ufffd"  # a token that is a part of a character only
# <|reserved_special_token_7|>, <unused3>, [control_8], <|dummy_0|>, <extra_id_1>, <|endofprompt1|>
_RESERVED = re.compile(r"reserved|unused|dummy|control_\d|extra_id|placeholder", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcedId:
    """One id that must be in the map.

    Args:
        target_id: the id.
        token: its text in the tokenizer.
        reasons: places that ask for it, such as `generation_config.json#/eos_token_id`.
    """

    target_id: int
    token: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetIds:
    """What the files beside a tokenizer say.

    Args:
        forced: ascending by id.
        target_vocab_size: embedding rows of the target's config, None without a config.
        num_reserved: special tokens left out because they are reserved.
        without_token: ids below the tokenizer's size that it gives to no token.
    """

    forced: tuple[ForcedId, ...]
    target_vocab_size: int | None
    num_reserved: int
    without_token: frozenset[int] = frozenset()


def find_forced_ids(tokenizer: LoadedTokenizer, keep: Iterable[str] = ()) -> TargetIds:
    """Return the ids that a map for this tokenizer must hold.

    Args:
        tokenizer: its directory's JSON files are read as well, when they are there.
        keep: ids in decimal, texts of tokens, or ranges of characters.

    Raises:
        DiagnosticError: SD426 for each id that the tokenizer does not have, SD116 to SD135 for
            JSON files that cannot be read.
    """
    directory = tokenizer.path.parent
    findings = Findings()
    tables = {
        name: _read(directory, name, findings)
        for name in (CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG)
    }
    problems = [d for d in findings.result() if d.severity == "error"]
    reasons = _configured(tables, tokenizer)
    added: Mapping[int, AddedToken] = tokenizer.handle.get_added_tokens_decoder()
    num_reserved = _add_specials(added, _template(directory, tables[TOKENIZER_CONFIG]), reasons)
    for wanted in keep:
        kept = _kept(wanted, tokenizer)
        if not kept:
            problems.append(_unknown(f"--keep {wanted}", f"`{wanted}` is not a token", tokenizer))
        for target_id in kept:
            reasons.setdefault(target_id, []).append("--keep")
    forced: list[ForcedId] = []
    for target_id in sorted(reasons):
        is_inside = target_id < tokenizer.size  # the binding takes 32 bits
        token = tokenizer.handle.id_to_token(target_id) if is_inside else None
        if token is None:
            where = reasons[target_id][0]
            problems.append(_unknown(where, f"id {target_id} is not a token's", tokenizer))
            continue
        why = tuple(dict.fromkeys(reasons[target_id]))
        forced.append(ForcedId(target_id=target_id, token=token, reasons=why))
    if problems:
        raise DiagnosticError(problems)
    return TargetIds(
        forced=tuple(forced),
        target_vocab_size=_target_vocab_size(tables[CONFIG]),
        num_reserved=num_reserved,
        without_token=ids_without_token(tokenizer),
    )


def ids_without_token(tokenizer: LoadedTokenizer) -> frozenset[int]:
    """Return the ids below the tokenizer's size that no token has."""
    known = tokenizer.handle.get_vocab(with_added_tokens=True).values()
    return frozenset(range(tokenizer.size)).difference(known)


def _kept(wanted: str, tokenizer: LoadedTokenizer) -> list[int]:
    """Return the ids that one `--keep` names; none when it names nothing."""
    if wanted.isdecimal():
        return [int(wanted)]
    match = _RANGE.fullmatch(wanted)
    if match is None:
        found = tokenizer.handle.token_to_id(wanted)
        return [] if found is None else [found]
    first = int(match[1], 16)
    last = int(match[2] or match[1], 16)
    texts = tokenizer.handle.decode_batch(
        [[target_id] for target_id in range(tokenizer.size)], skip_special_tokens=False
    )
    return [
        target_id
        for target_id, text in enumerate(texts)
        if _REPLACEMENT not in text and any(first <= ord(character) <= last for character in text)
    ]


def _configured(
    tables: Mapping[str, Mapping[str, Any]], tokenizer: LoadedTokenizer
) -> dict[int, list[str]]:
    """Return id -> places for the end and begin ids that the configs name."""
    reasons: dict[int, list[str]] = {}
    for name in (CONFIG, GENERATION_CONFIG):
        for key in ("eos_token_id", "bos_token_id"):
            for target_id in _ids(tables[name], key):
                reasons.setdefault(target_id, []).append(f"{name}#/{key}")
    for key in ("eos_token", "bos_token"):
        text = _token_text(tables[TOKENIZER_CONFIG].get(key))
        found = None if text is None else tokenizer.handle.token_to_id(text)
        if found is not None:
            reasons.setdefault(found, []).append(f"{TOKENIZER_CONFIG}#/{key}")
    return reasons


def _unknown(where: str, message: str, tokenizer: LoadedTokenizer) -> Diagnostic:
    return diagnose(
        "SD426",
        where=where,
        message=f"{message} of `{tokenizer.path.name}`",
        expected=f"an id below {tokenizer.size} with a token",
        found=message,
    )


def _read(directory: Path, name: str, findings: Findings) -> dict[str, Any]:
    store = LocalStore(directory)
    if not store.has(name):
        return {}
    table, _ = read_object(store, name, findings)
    return table or {}


def _ids(table: Mapping[str, Any], key: str) -> list[int]:
    value = stated(table, key)
    items = value if isinstance(value, list) else [value]
    return [item for item in items if type(item) is int and item >= 0]


def _target_vocab_size(config: Mapping[str, Any]) -> int | None:
    sizes = [section.get("vocab_size") for _, section in model_sections(config)]
    return next((size for size in sizes if type(size) is int and size > 0), None)


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """Return all chat template texts joined; they are searched for tokens, never rendered."""
    texts: list[str] = []
    value = tokenizer_config.get("chat_template")
    for item in value if isinstance(value, list) else [value]:
        text = item.get("template") if isinstance(item, dict) else item
        if isinstance(text, str):
            texts.append(text)
    path = directory / CHAT_TEMPLATE
    if path.is_file() and path.stat().st_size <= _MAX_TEMPLATE_BYTES:
        texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts)


def _add_specials(
    added: Mapping[int, AddedToken], template: str, reasons: dict[int, list[str]]
) -> int:
    """Add special and template tokens to `reasons`; return how many were left out as reserved."""
    num_reserved = 0
    for target_id, token in added.items():
        is_in_template = bool(token.content) and token.content in template
        if is_in_template:
            reasons.setdefault(target_id, []).append("chat template")
        if not token.special:
            continue
        if _RESERVED.search(token.content) is None:
            reasons.setdefault(target_id, []).append("special token")
        elif target_id not in reasons:
            num_reserved += 1
    return num_reserved
