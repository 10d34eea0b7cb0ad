"""Distinct units counted once give the tokens of every document encoded whole."""

from __future__ import annotations

import collections
import importlib.util
import itertools
import json
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specctl.tokenmap import cuts
from specctl.tokenmap.structure import FastPlan, plan_fast
from tests.tiny_tokenizers import NAMES, SPLITS, tokenizer_json

RULES = {
    "gpt2": cuts.GPT2,
    "digits": cuts.GPT2 + cuts.EACH_DIGIT,
    "cl100k": cuts.CL100K,
    "o200k": cuts.O200K,
    "spaced": cuts.SPACED,
    "ascii": cuts.SPACED_ASCII,
    "bert": cuts.BERT,
    "piece": cuts.PIECE_CUT,
}
HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
needs_arrow = pytest.mark.skipif(not HAS_ARROW, reason="pyarrow (extra tokenmap) is not installed")
NEAR = st.sampled_from(
    " \n\t\r'abstreLLd(.\"/15\u00e9\u0416\u4e2d\u3002\u3001\u00a0\u3000\u2581\u00b2\u0663\u0301\x00"
    "\x0b\x1c\x85\u2028\u200b\u0600\u1100\uac00\u212a\ufb01"
)
BLANK = st.sampled_from("  \n\n'a(1")
TEXTS = st.text(
    st.one_of(NEAR, BLANK, st.characters(exclude_categories=["Cs"])), min_size=1, max_size=40
)


def plan_of(name: str) -> FastPlan:
    plan = plan_fast(tokenizer_json(name))
    assert isinstance(plan, FastPlan), plan
    return plan


def ids_of_units(text: str, plan: FastPlan, first: Tokenizer, inner: Tokenizer) -> list[int]:
    found: list[int] = []
    for place, unit in enumerate(cuts.split_units(text, plan.units.rules)):
        tokenizer = first if place == 0 and plan.units.first_differs else inner
        found += tokenizer.encode(unit, add_special_tokens=False).ids
    return found


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_units_have_the_ids_of_the_whole_text(name: str, text: str) -> None:
    plan = plan_of(name)
    first = Tokenizer.from_str(tokenizer_json(name))
    inner = Tokenizer.from_buffer(plan.inner)
    if any(mark in text for mark in plan.units.whole_if):
        return
    whole = first.encode(text, add_special_tokens=False).ids
    assert ids_of_units(text, plan, first, inner) == whole, cuts.split_units(text, plan.units.rules)


@pytest.mark.parametrize("name", NAMES)
def test_every_character_between_every_kind_of_neighbour(name: str) -> None:
    """All of Unicode, one character at a time, in the places where rules look."""
    plan = plan_of(name)
    first = Tokenizer.from_str(tokenizer_json(name))
    inner = Tokenizer.from_buffer(plan.inner)
    # Every assigned character below U+3400, then one of sixty.
    codes = [*range(1, 0x3400), *range(0x3400, sys.maxunicode, 61)]
    chars = [chr(c) for c in codes if unicodedata.category(chr(c)) not in ("Cs", "Cn")]
    step = 40
    for start in range(0, len(chars), step):
        text = "".join(f"a{c} b {c}b\n{c}5  {c}x({c}. {c} {c}" for c in chars[start : start + step])
        if any(mark in text for mark in plan.units.whole_if):
            continue
        whole = first.encode(text, add_special_tokens=False).ids
        assert ids_of_units(text, plan, first, inner) == whole, (name, hex(ord(chars[start])))


@given(text=TEXTS, name=st.sampled_from(sorted(RULES)))
@settings(max_examples=200, deadline=None)
def test_units_joined_are_the_text(text: str, name: str) -> None:
    assert "".join(cuts.split_units(text, RULES[name])) == text


@needs_arrow
@given(
    documents=st.lists(TEXTS, max_size=5),
    name=st.sampled_from(sorted(RULES)),
    block=st.integers(1, 9),
)
@settings(max_examples=250, deadline=None)
def test_the_vectorised_scan_finds_the_twins_units(
    documents: list[str], name: str, block: int
) -> None:
    from specctl.tokenmap import scan

    before, scan._BLOCK = scan._BLOCK, block  # every place is the edge of a block once
    try:
        table, _ = scan.unit_counts([d.encode() for d in documents], RULES[name], apart=False)
    finally:
        scan._BLOCK = before
    wanted = collections.Counter(
        unit.encode() for d in documents for unit in cuts.split_units(d, RULES[name])
    )
    assert dict(zip(table["unit"].to_pylist(), table["num"].to_pylist(), strict=True)) == wanted


@needs_arrow
@pytest.mark.parametrize("name", sorted(RULES))
def test_the_scan_finds_the_twins_units_in_all_short_texts(name: str) -> None:
    """Characters of one, two, three and four bytes of every class, in every order."""
    from specctl.tokenmap import scan

    chars = "a1.' \n\u00e9\u4e2d\uff0c\u00a0\u0663\U0001f600"
    texts = ["".join(part) for part in itertools.product(chars, repeat=4)]
    found, _ = scan.unit_counts([text.encode() for text in texts], RULES[name], apart=False)
    wanted = collections.Counter(
        unit.encode() for text in texts for unit in cuts.split_units(text, RULES[name])
    )
    assert dict(zip(found["unit"].to_pylist(), found["num"].to_pylist(), strict=True)) == wanted


@needs_arrow
@pytest.mark.parametrize("name", NAMES)
def test_encoding_multiplies_units(name: str) -> None:
    import numpy as np

    from specctl.tokenmap import encoding, scan

    plan = plan_of(name)
    first = Tokenizer.from_str(tokenizer_json(name))
    size = max(first.get_vocab().values()) + 1
    documents = [
        "the dog's 12 dogs",
        " the  dog\n\tfoo(bar) \u6771\u4eac\u3067\u3059",
        "the dog's 12 dogs",
        "x",
    ]
    rest, firsts = scan.unit_counts(
        [d.encode() for d in documents], plan.units.rules, apart=plan.units.first_differs
    )
    encoder = encoding.UnitEncoder.of(plan, first)
    counts = np.zeros(size, np.uint64)
    encoding.encode_units({0: rest}, encoder, {0: counts})
    if firsts is not None:
        encoding.encode_firsts({0: firsts}, encoder, {0: counts})
    wanted = collections.Counter(
        i for d in documents for i in first.encode(d, add_special_tokens=False).ids
    )
    assert {i: int(n) for i, n in enumerate(counts) if n} == wanted


CHANGES = {
    "dropout": lambda c: c["model"].update(dropout=0.1),
    "normalizer": lambda c: c.update(normalizer={"type": "NFKC"}),
    "pattern": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"\w+"}),
    "behavior": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "invert": lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(invert=True),
    "prefix": lambda c: c["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
    "added": lambda c: c["added_tokens"][0].update(content="ab cd ef"),
    "added, cut with letters beside it": lambda c: c["added_tokens"][0].update(content="b c"),
    "added, ends in a space": lambda c: c["added_tokens"][0].update(content="b "),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_what_is_not_listed_is_encoded_whole(change: str) -> None:
    config = json.loads(tokenizer_json("qwen2"))
    CHANGES[change](config)
    assert isinstance(plan_fast(json.dumps(config)), str)


def test_a_vocabulary_that_reaches_across_spaces_is_encoded_whole() -> None:
    config = json.loads(tokenizer_json("llama2"))
    config["model"]["vocab"]["a\u2581b"] = 9999
    assert plan_fast(json.dumps(config)) == "tokens that reach across a space"


def test_every_published_pattern_is_listed() -> None:
    assert all(isinstance(plan_fast(tokenizer_json(name)), FastPlan) for name in SPLITS)
