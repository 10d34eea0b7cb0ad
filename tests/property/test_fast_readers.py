"""The fast readers of JSON and headers against the slow ones that they stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.checkpoint.header_table import read_table
from specctl.checkpoint.json_text import _parse_slowly, decode_flawless
from specctl.checkpoint.safetensors_header import _entries
from specctl.checkpoint.tensor_entry import DTYPE_BITS, TensorEntry
from specctl.contract.findings import Findings

COMMON = settings(max_examples=300, deadline=None)
BASE = 1000

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["\\", '"', '\\"', "\ud800", "a\\u0062", "{", "}"])
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)
keys = st.sampled_from(["a", "b", "__metadata__", "x\\", 'y"', "__metadata__2", "\u00e9"])
sizes = st.integers(0, 5) | st.sampled_from([-1, 1.0, 1 << 62, 1 << 63, 1 << 64, True, None])
entries = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "U8", "F4", "F7"]), "shape": st.lists(sizes, max_size=3)},
    optional={"extra": st.none()},
)


def joined(pairs: list[tuple[str, str]]) -> str:
    """Return a JSON object as text; unlike a dict, it may have a key twice."""
    return "{" + ", ".join(f"{name}: {value}" for name, value in pairs) + "}"


spelled_keys = st.builds(
    lambda key, is_escaped: (
        '"' + "".join(f"\\u{ord(c):04x}" for c in key) + '"' if is_escaped else json.dumps(key)
    ),
    keys,
    st.booleans(),
)


@st.composite
def header_texts(draw: st.DrawFn) -> bytes:
    """Headers of which many are right, and the others wrong in one small way."""
    place = 0
    pairs: list[tuple[str, str]] = []
    if draw(st.booleans()):
        texts = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
        pairs.append(('"__metadata__"', json.dumps(texts)))
    for _ in range(draw(st.integers(0, 3))):
        entry: dict[str, Any] = dict(draw(entries))
        count = 1
        for size in entry["shape"]:
            count *= size if isinstance(size, int) and size >= 0 else 1
        length = count * DTYPE_BITS.get(entry["dtype"], 8) // 8 + draw(
            st.sampled_from([0, 0, 0, 1])
        )
        entry["data_offsets"] = [place, place + length]
        place += length
        pairs.append((draw(spelled_keys), json.dumps(entry)))
    if draw(st.booleans()):
        pairs.append((draw(spelled_keys), json.dumps(draw(values))))
    text = joined(draw(st.permutations(pairs)))
    tail = draw(st.sampled_from(["", "", " ", ",", "}", '"']))
    return (text + tail).encode("utf-8", "surrogatepass")


def slow_table(raw: bytes) -> list[TensorEntry] | None:
    """Return what the slow reader gives for a header without a finding, None for another one."""
    findings = Findings()
    table = _parse_slowly(raw, file="f", findings=findings, code="SD101", what="header")
    if table is None:
        return None
    size = BASE
    for value in table.values():
        offsets = value.get("data_offsets") if isinstance(value, dict) else None
        if isinstance(offsets, list) and offsets and isinstance(offsets[-1], int):
            size = max(size, BASE + offsets[-1])
    found = _entries(table, file="f", size=size, base=BASE, findings=findings)
    cover = {"SD108", "SD109", "SD110", "SD111"}  # the order and the end are not a table's matter
    return None if {d.code for d in findings.result()} - cover else found


@settings(COMMON, max_examples=600)
@given(header_texts())
def test_a_table_that_is_read_fast_is_the_slow_one(raw: bytes) -> None:
    fast, slow = read_table(raw, file="f", base=BASE), slow_table(raw)
    assert fast == slow or (fast is None and b'"__metadata__": null' in raw)


@pytest.mark.parametrize(
    "text",
    [
        '{"__metadata__":{},"__metadata__":{"dtype":"U8","shape":[],"data_offsets":[0,1]}}',
        '{"__metadata__":{"dtype":"U8","shape":"","data_offsets":""},"a":{}}',
        '{"__metadata__":{},}',
        '{"__metadata__":{"a":"}"}}',
        '{"__metadata__":{"a":"1","a":"1"}}',
        '{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"__metadata__":{"x":"{\\"y\\":1}"}}',
        '{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1],"dtype":"U8"}}',
        '{"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"\\u0061":{}}',
        '{"a":{"dtype":"U8","shape":[' + ",".join(["1"] * 70) + '],"data_offsets":[0,1]}}',
        '{"__metadata__" : {"format" : "pt"} }',
        "{}",
        "{",
    ],
)
def test_headers_that_were_thought_of(text: str) -> None:
    raw = text.encode()
    fast, slow = read_table(raw, file="f", base=BASE), slow_table(raw)
    assert fast == slow or (fast is None and "1,1,1" in text)


@settings(COMMON, max_examples=600)
@given(
    st.builds(json.dumps, values)
    | st.builds(
        joined, st.lists(st.tuples(spelled_keys, st.builds(json.dumps, values)), max_size=4)
    ),
    st.sampled_from(["", "", " ", "x", "\n"]),
)
def test_an_object_that_is_read_fast_is_the_slow_one(text: str, tail: str) -> None:
    raw = (text + tail).encode("utf-8", "surrogatepass")
    findings = Findings()
    slow = _parse_slowly(raw, file="f", findings=findings, code="SD117", what="file")
    fast = decode_flawless(raw)
    if findings.result():
        assert fast is None
    else:
        assert json.dumps(fast) == json.dumps(slow)
