"""Forms of many keys at once are those of each key, whatever the keys are."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.formats.generic_keys import generic_forms, generic_key, matching

KEYS = st.text(alphabet="0019a.\n{i}\u0663", max_size=9)


@given(st.lists(KEYS, max_size=8), st.sampled_from([1, 5]))
@settings(max_examples=300, deadline=None)
def test_forms_of_a_list(keys: list[str], times: int) -> None:
    """Many keys of few masks, and few of many, are read in different ways."""
    assert generic_forms(keys * times) == [generic_key(key) for key in keys] * times


def test_forms_of_many_keys() -> None:
    letters = "abcdefghijklmnopqrstuvwx"
    keys = [f"{a}{b}{c}.7.w{a}" for a in letters for b in letters for c in letters]
    assert generic_forms(keys) == [generic_key(key) for key in keys]


@given(
    st.lists(KEYS, max_size=8, unique=True),
    st.sampled_from([r".*9", r"a\.\{i\}", r"\d+|x.*", r"(a|0)+", r"\{i\}\..*", ""]),
)
@settings(max_examples=300, deadline=None)
def test_names_of_a_pattern(names: list[str], pattern: str) -> None:
    assert list(matching(pattern, names)) == [n for n in names if re.fullmatch(pattern, n)]
