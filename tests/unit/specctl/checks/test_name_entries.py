"""Entries of ignore lists: what they name, and that none can take long."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specctl.checks.name_entries import name_entries

MODULE = "model.layers.3.mlp.gate_proj"


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("lm_head", False),
        ("model.layers.3", True),
        ("model.layers.3.", False),
        ("model.layers", True),
        ("mlp", True),
        ("layers.3.mlp", True),
        ("mlp.gate", False),
        (MODULE, True),
        ("model.layers.*", True),
        ("*.mlp", True),
        ("*mlp.gate_pro?", True),
        ("*mlp.gate_pr", False),
        ("re:.*gate_proj$", True),
        ("re:.*mlp.gate$", False),
        ("re:gate_proj", False),
        (r"re:model\.layers\.\d+\.mlp\..*", True),
        (r"re:model.layers.[0-9]+.self_attn.*", False),
        (r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", True),
        ("re:.*", True),
        ("re:.+gate.+", True),
        ("re:model.+x", False),
        ("re:^model.*proj$", True),
    ],
)
def test_what_an_entry_names(entry: str, expected: bool) -> None:
    found = name_entries([entry])
    assert found.unknown == ()
    assert found.has(MODULE) is expected


@pytest.mark.parametrize(
    "entry",
    [
        "re:(a+)+$",
        "re:(.*)*x",
        "re:a{3,}",
        "re:(?=x)y",
        "re:[",
        "re:(",
        "re:a|b",
        "re:" + "a" * 2000,
    ],
)
def test_an_expression_that_is_not_understood_is_said_to_be(entry: str) -> None:
    assert name_entries([entry, "mlp"]).unknown == (entry,)


@pytest.mark.timeout(60)  # a second; one that backtracks never ends
def test_no_expression_takes_long() -> None:
    hostile = "re:" + ".*a" * 300 + "b"
    entries = name_entries([hostile, "re:.*" + "a" * 490 + "b", "*" * 400 + "b"])
    for _ in range(200):
        assert not entries.has("a" * 500)
    assert not entries.has("a." * 500_000)


pieces = st.sampled_from(["a", "b", r"\.", ".*", ".+", r"\d+", ".", "[ab]", "(?:a|b)"])
names = st.text("ab.12", max_size=8)


@settings(max_examples=400, deadline=None)
@example(["a", r"\d+", ".*", ".+"], "a11")
@given(st.lists(pieces, max_size=6), names)
def test_expressions_match_as_the_library_does(parts: list[str], name: str) -> None:
    text = "".join(parts)
    assert name_entries(["re:" + text]).has(name) == (re.match(text, name) is not None)


@settings(max_examples=400, deadline=None)
@given(st.text("ab.*?", max_size=6).filter(lambda text: {"*", "?"} & set(text)), names)
def test_globs_match_as_the_library_does(entry: str, name: str) -> None:
    expected = fnmatch.fnmatchcase(name, entry) or fnmatch.fnmatchcase(name, entry + ".*")
    assert name_entries([entry]).has(name) == expected
