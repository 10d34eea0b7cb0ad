"""Merges of many words at once are those of the package's BPE model."""

from __future__ import annotations

import importlib.util
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from specctl.tokenmap.structure import FastPlan, plan_fast
from tests.tiny_tokenizers import NAMES, tokenizer_json

HAS_NUMPY = importlib.util.find_spec("numpy") is not None
pytestmark = pytest.mark.skipif(not HAS_NUMPY, reason="numpy (extra tokenmap) is not installed")
LETTERS = "abcde"
SIGNS = [chr(code) for code in range(33, 127) if not chr(code).isalnum() and chr(code) != "'"]


def random_model(seed: int) -> dict[str, object]:
    """A model whose merges are in no trained order: parts may come after what they make."""
    chance = random.Random(seed)
    tokens = list(LETTERS)
    merges = []
    for _ in range(40):
        pair = (chance.choice(tokens), chance.choice(tokens))
        if pair not in merges and len("".join(pair)) < 9:
            merges.append(pair)
            if "".join(pair) not in tokens:
                tokens.append("".join(pair))
    chance.shuffle(merges)
    return {
        "type": "BPE",
        "vocab": {token: place for place, token in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }


def ids_of(words: list[str], tokenizer: str) -> list[list[int]]:
    import numpy as np

    from specctl.tokenmap.byte_pairs import merge_table, merged_words

    table = merge_table(tokenizer)
    assert table is not None
    sizes = np.array([len(word.encode()) for word in words])
    raw = np.frombuffer("".join(words).encode(), np.uint8)
    ids, many = merged_words(raw, np.cumsum(sizes) - sizes, sizes, table)
    return [part.tolist() for part in np.split(ids, np.cumsum(many)[:-1])]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 500),
    words=st.lists(st.text(LETTERS, min_size=1, max_size=30), min_size=1, max_size=12),
)
def test_any_order_of_merges_gives_the_ids_of_the_model(seed: int, words: list[str]) -> None:
    model = random_model(seed)
    bpe = models.BPE(
        vocab=model["vocab"],  # type: ignore[arg-type]
        merges=[tuple(pair) for pair in model["merges"]],  # type: ignore[attr-defined]
    )
    wanted = [[token.id for token in bpe.tokenize(word)] for word in words]
    assert ids_of(words, json.dumps({"model": model})) == wanted


def byte_level_plans() -> list[str]:
    plans = {name: plan_fast(tokenizer_json(name)) for name in NAMES}
    return [name for name, p in plans.items() if isinstance(p, FastPlan) and p.has_letters]


@pytest.mark.parametrize("name", byte_level_plans())
@settings(max_examples=60, deadline=None)
@given(
    words=st.lists(
        st.one_of(
            st.text(SIGNS, min_size=1, max_size=9),
            st.text("abdeghnorstuDT\u00e9\u0416\u4e2d\uac00", min_size=1, max_size=30),
            st.sampled_from(["x" * 97, "the" * 40, "\u4e2d" * 32]),
        ),
        min_size=1,
        max_size=9,
    )
)
def test_units_of_one_pre_token_have_the_ids_of_the_tokenizer(name: str, words: list[str]) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow (extra tokenmap) is not installed")
    from specctl.tokenmap import encoding

    plan = plan_fast(tokenizer_json(name))
    assert isinstance(plan, FastPlan)
    inner = Tokenizer.from_buffer(plan.inner)
    encoder = encoding.UnitEncoder.of(plan, inner)
    units = [text for word in words for text in (word, f" {word}")]
    column = pa.array([text.encode() for text in units], pa.binary())
    flat, starts, lengths = encoding._flat_ids(column, encoder)
    for text, start, length in zip(units, starts, lengths, strict=True):
        wanted = inner.encode(text, add_special_tokens=False).ids
        assert flat[start : start + length].tolist() == wanted, text


REFUSED: dict[str, dict[str, object]] = {
    "ignore_merges": {"ignore_merges": True},
    "prefix": {"continuing_subword_prefix": "##"},
    "suffix": {"end_of_word_suffix": "</w>"},
    "a merge twice": {"merges": [["a", "b"], ["a", "b"]]},
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_other_rules_are_left_to_the_package(case: str) -> None:
    from specctl.tokenmap.byte_pairs import merge_table

    model: dict[str, object] = {
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
        **REFUSED[case],
    }
    assert merge_table(json.dumps({"model": model})) is None


def test_pairs_that_share_a_slot_are_all_found() -> None:
    import numpy as np

    from specctl.tokenmap import byte_pairs

    model = random_model(3)
    table = byte_pairs.merge_table(json.dumps({"model": model}))
    assert table is not None
    vocab, merges = model["vocab"], model["merges"]
    left = np.array([vocab[a] for a, _ in merges])  # type: ignore[index, attr-defined]
    right = np.array([vocab[b] for _, b in merges])  # type: ignore[index, attr-defined]
    slots = np.full(64, byte_pairs._NO_PAIR)
    ranks = np.full(64, byte_pairs._NO_MERGE)
    pairs = (left.astype(np.uint64) << np.uint64(20)) | right.astype(np.uint64)
    byte_pairs._fill(slots, ranks, pairs)
    assert sorted(ranks[ranks != byte_pairs._NO_MERGE]) == list(range(len(pairs)))
    assert table.ranks_of(left, right).tolist() == list(range(len(pairs)))
