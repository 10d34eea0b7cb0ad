"""Places at which texts of a corpus are cut: those of the rules, and around added tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specctl.tokenmap import cuts, readers
from specctl.tokenmap.structure import FastPlan, plan_fast
from specctl.tokenmap.worker import Job, TaskRun
from tests.tiny_tokenizers import NAMES, tokenizer_json

HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
needs_arrow = pytest.mark.skipif(not HAS_ARROW, reason="pyarrow (extra tokenmap) is not installed")


@given(text=st.text("ab \n1.", max_size=20), start=st.integers(0, 20))
@settings(max_examples=200, deadline=None)
def test_the_last_and_next_cut_are_those_of_the_rules(text: str, start: int) -> None:
    places = cuts.cut_places(text, cuts.PIECE_CUT)
    after = [place for place in places if place >= start]
    assert readers.last_cut(text.encode(), start, len(text)) == max(after, default=0)
    assert readers.next_cut(text.encode(), start) == min(after, default=len(text))
    before = [place for place in places if place < start]
    assert readers.last_cut(text.encode(), 0, start) == max(before, default=0)


@needs_arrow
@pytest.mark.parametrize("name", NAMES)
@given(parts=st.lists(st.integers(0, 99), max_size=12))
@settings(max_examples=60, deadline=None)
def test_text_around_an_added_token_is_encoded_as_it_stands(name: str, parts: list[int]) -> None:
    plan = plan_fast(tokenizer_json(name))
    assert isinstance(plan, FastPlan)
    handle = Tokenizer.from_str(tokenizer_json(name))
    pieces = [
        *plan.units.whole_if,
        "the dogs run",
        " then",
        " it. 12",
        " ",
        "  \n",
        "dog",
        "\u00e9 ",
    ]
    text = "".join(pieces[i % len(pieces)] for i in parts)
    job = Job(
        tokenizer=Path("x"),
        plan=plan.units,
        reading=readers.Reading(),
        held_below=0,
        directory=Path(),
    )
    cut = [(data.decode(), whole) for data, whole in TaskRun(job)._parts(text.encode())]
    assert "".join(data for data, _ in cut) == text
    assert not any(mark in data for data, whole in cut if not whole for mark in plan.units.whole_if)
    ids = [i for data, _ in cut for i in handle.encode(data, add_special_tokens=False).ids]
    assert ids == handle.encode(text, add_special_tokens=False).ids
