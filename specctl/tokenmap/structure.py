"""Decide from tokenizer.json whether units may be encoded one by one, and how.

Invariants: only listed normalizers, pre-tokenizers, models and options are accepted; anything else,
known or not, gives a reason and the documents are encoded whole. Text around an added token is
encoded as it stands too, so no flag of an added token has to be imitated.
*Source:* the pre-tokenizer patterns published with GPT-2, cl100k, o200k, Llama 3 and Qwen 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specctl.tokenmap import cuts
from specctl.tokenmap.cuts import Rules

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS: Mapping[str, Rules] = {
    _CONTRACTIONS + _WORD + r"\p{N}{1,3}" + _TAIL: cuts.CL100K,
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    + _WORD
    + r"\p{N}{1,3}"
    + _TAIL: cuts.CL100K,
    _CONTRACTIONS + _WORD + r"\p{N}" + _TAIL: cuts.CL100K + cuts.EACH_DIGIT,
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    + r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": cuts.CL100K + cuts.EACH_DIGIT,
    _CASED
    + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    + _CONTRACTIONS
    + "?|"
    + _CASED
    + r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    + _CONTRACTIONS
    + r"?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+": cuts.O200K,
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": cuts.GPT2,
}
_NFC_MAKES_ASCII = ("\u037e", "\u1fef", "\u212a")
_SPACE_SIGN = "\u2581"
SEPARATOR = "\U0010fffe"
"""Stands between units that are encoded together; is itself one of `FastPlan.whole_if`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitPlan:
    """How documents become units: all that a worker needs of a plan.

    Args:
        rules: where documents are cut into units.
        first_differs: the first unit of a document needs the tokenizer as published.
        whole_if: text around one of these is encoded as it stands, up to the next
            `cuts.PIECE_CUT`; the whole document where the first unit differs.
    """

    rules: Rules
    first_differs: bool
    whole_if: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FastPlan:
    """How units of a tokenizer are encoded.

    Args:
        units: how they are found.
        inner: tokenizer.json, UTF-8, for units that do not begin a document: a text of a large
            vocabulary would take twice the bytes.
        has_letters: whether units of one pre-token may be encoded with `letters_of(inner)`.
        reason: one phrase for the report.
    """

    units: UnitPlan
    inner: bytes
    has_letters: bool
    reason: str


class _NotFastError(Exception):
    """The structure is not one of the listed ones; the text says which part."""


def plan_fast(text: str) -> FastPlan | str:
    """Return the plan for a tokenizer.json, or why there is none.

    Args:
        text: of a tokenizer.json that the `tokenizers` package accepts.
    """
    try:
        return _plan(json.loads(text), text)
    except _NotFastError as error:
        return str(error)


def _plan(config: dict[str, Any], text: str) -> FastPlan:
    model = config.get("model") or {}
    kind = model.get("type", "BPE")
    if model.get("dropout"):
        raise _NotFastError("BPE dropout is random")
    normalizers = _flat(config.get("normalizer"), "normalizers")
    splitters = _flat(config.get("pre_tokenizer"), "pretokenizers")
    types = [part.get("type") for part in splitters]
    if kind == "BPE" and types and types[-1] == "ByteLevel":
        inner, rules, name = _byte_level(config, normalizers, splitters)
    elif kind == "WordPiece" and types == ["BertPreTokenizer"]:
        if [part.get("type") for part in normalizers] != ["BertNormalizer"]:
            raise _NotFastError("WordPiece without BertNormalizer")
        inner, rules, name = config, cuts.BERT, "WordPiece after BertPreTokenizer"
    elif kind in ("BPE", "Unigram"):
        inner, rules, name = _spaced(config, kind, normalizers, splitters)
    else:
        raise _NotFastError(f"model {kind} after {types or 'no pre-tokenizer'}")
    if inner is not config or config.get("truncation") or config.get("padding"):
        inner = {**inner, "truncation": None, "padding": None}
        text = json.dumps(inner, ensure_ascii=False)
    units = UnitPlan(
        rules=rules,
        first_differs=inner.get("normalizer") != config.get("normalizer")
        or inner.get("pre_tokenizer") != config.get("pre_tokenizer"),
        whole_if=_whole_if(config, normalizers),
    )
    return FastPlan(
        units=units,
        inner=text.encode("utf-8"),
        has_letters=bool(types) and types[-1] == "ByteLevel",
        reason=name,
    )


def _flat(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the members of a component, sequences opened."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [inner for member in part[key] for inner in _flat(member, key)]


def _byte_level(
    config: dict[str, Any], normalizers: list[dict[str, Any]], splitters: list[dict[str, Any]]
) -> tuple[dict[str, Any], Rules, str]:
    if any(part.get("type") != "NFC" for part in normalizers):
        raise _NotFastError("a normalizer before byte-level BPE that is not NFC")
    *before, last = splitters
    uses_regex = last.get("use_regex", True)
    has_prefix = last.get("add_prefix_space", True)
    if before and has_prefix:
        raise _NotFastError("a prefix space after another pre-tokenizer")
    inner = config
    if has_prefix:
        inner = {**config, "pre_tokenizer": {**last, "add_prefix_space": False}}
    if uses_regex:
        rules: Rules = cuts.GPT2
        if before:
            if not _is_digits(before):
                raise _NotFastError("pre-tokenizers before ByteLevel that are not listed")
            rules += cuts.EACH_DIGIT
        return inner, rules, "byte-level BPE with GPT-2's pattern"
    if len(before) != 1 or before[0].get("type") != "Split":
        raise _NotFastError("byte-level BPE without one split pattern")
    split = before[0]
    pattern = str((split.get("pattern") or {}).get("Regex"))
    rules_of = _PATTERNS.get(pattern)
    if rules_of is None or split.get("invert") or split.get("behavior") != "Isolated":
        raise _NotFastError("a split pattern that is not listed")
    return inner, rules_of, "byte-level BPE with a listed split pattern"


def _is_digits(parts: list[dict[str, Any]]) -> bool:
    return (
        len(parts) == 1 and parts[0].get("type") == "Digits" and bool(parts[0]["individual_digits"])
    )


def letters_of(inner: bytes) -> bytes:
    """Return tokenizer.json for units that are one pre-token: it looks for no pattern."""
    config = json.loads(inner)
    plain = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    config |= {"normalizer": None, "pre_tokenizer": {**plain, "use_regex": False}}
    config |= {"added_tokens": [], "post_processor": None}
    return json.dumps(config, ensure_ascii=False).encode("utf-8")


def _spaced(
    config: dict[str, Any],
    kind: str,
    normalizers: list[dict[str, Any]],
    splitters: list[dict[str, Any]],
) -> tuple[dict[str, Any], Rules, str]:
    """Return the plan of a tokenizer whose pieces begin at the space sign."""
    vocab = config["model"].get("vocab") or []
    names = list(vocab) if isinstance(vocab, dict) else [entry[0] for entry in vocab]
    types = [part.get("type") for part in splitters]
    splits = types == ["WhitespaceSplit", "Metaspace"] or (
        types == ["Metaspace"] and bool(splitters[-1].get("split", True))
    )
    if kind == "Unigram" and not splits:
        raise _NotFastError("Unigram over whole sentences")
    if not splits and any(_SPACE_SIGN in name.lstrip(_SPACE_SIGN) for name in names):
        raise _NotFastError("tokens that reach across a space")
    if _SPACE_SIGN not in names:
        raise _NotFastError("a vocabulary without the space sign")
    rules = cuts.SPACED
    kept: list[dict[str, Any]] = []
    has_replace = False
    for part in normalizers:
        name = part.get("type")
        if name == "Prepend" and part.get("prepend") == _SPACE_SIGN and not splitters:
            continue
        if name == "Replace" and part.get("pattern") == {"String": " "}:
            has_replace = part.get("content") == _SPACE_SIGN
        elif name == "Precompiled" or _squeezes(part):
            rules = cuts.SPACED_ASCII
        else:
            raise _NotFastError(f"normalizer {name} before {kind}")
        kept.append(part)
    if not splitters and not has_replace:
        raise _NotFastError("spaces that are not replaced by the space sign")
    if not splitters or types in (["Metaspace"], ["WhitespaceSplit", "Metaspace"]):
        inner = {**config, "normalizer": _sequence(kept) if kept else None}
        if types == ["Metaspace"]:
            inner["pre_tokenizer"] = {**splitters[0], "prepend_scheme": "never"}
            inner["pre_tokenizer"].pop("add_prefix_space", None)
        return inner, rules, f"{kind} whose pieces begin at a space"
    raise _NotFastError(f"{kind} after pre-tokenizers that are not listed")


def _squeezes(part: dict[str, Any]) -> bool:
    return part.get("type") == "Replace" and part.get("pattern") == {"Regex": " {2,}"}


def _sequence(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": parts}


def _whole_if(config: dict[str, Any], normalizers: list[dict[str, Any]]) -> tuple[str, ...]:
    """Return the texts of added tokens, and characters that a normalizer could turn into them."""
    marks = {SEPARATOR}
    for token in config.get("added_tokens") or []:
        content = token["content"]
        if token.get("normalized") and normalizers:
            if any(part.get("type") != "NFC" for part in normalizers) or not content.isascii():
                raise _NotFastError("added tokens that are looked for in normalized text")
            marks.update(_NFC_MAKES_ASCII)
        touches = token.get("rstrip") or token.get("single_word") or content[:1] == " "
        # Letters around it: what stands beside a token may complete a place to cut.
        inside = cuts.cut_places(f"xx{content}x", cuts.PIECE_CUT)
        if any(2 < place < 2 + len(content) for place in inside) or (
            touches and (content[-1:].isalpha() or content[:1] == " ")
        ):
            raise _NotFastError("added tokens that a cut document could lose")
        if content:
            marks.add(content)
    # A text that contains a longer one contains the shorter one too.
    ordered = sorted(marks, key=lambda mark: (len(mark), mark))
    kept: list[str] = []
    for mark in ordered:
        if not any(other in mark for other in kept):
            kept.append(mark)
    return tuple(kept)
