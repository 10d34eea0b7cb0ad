"""Damaged manifests are refused with codes or read; no other exception escapes the codec."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.contract.codec import dump_manifest, parse_manifest
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest

junk = st.sampled_from(
    [":", "- ", "[", "]", "{", "}", "'", '"', "&a ", "*a", "!!int ", "|", ">", "#", "\t", "\x00",
     "null", "99999999999999999999999", "1e999", "-1", "~", "<<: ", "\n", "  ", "%", "?", "\x85"]
)  # fmt: skip
places = st.floats(0, 1, exclude_max=True)
edits = st.lists(st.tuples(places, st.integers(0, 12), junk), min_size=1, max_size=4)


def damaged(text: str, changes: list[tuple[float, int, str]]) -> str:
    for place, num_removed, inserted in changes:
        at = int(place * len(text))
        text = text[:at] + inserted + text[at + num_removed :]
    return text


def refused_or_read(text: str, *, is_json: bool) -> None:
    try:
        manifest = parse_manifest(text, name="m", is_json=is_json)
    except DiagnosticError as error:
        diagnostics = error.diagnostics
    else:
        assert parse_manifest(dump_manifest(manifest), name="again") == manifest
        return
    assert diagnostics
    for diagnostic in diagnostics:
        assert diagnostic.code.startswith("SD7")
        assert diagnostic.where.startswith("m")
        assert "\n" not in diagnostic.message
        msgspec.json.encode(diagnostic)


@settings(deadline=None, max_examples=120)
@given(changes=edits)
def test_damaged_yaml(manifest_parts: Manifest, changes: list[tuple[float, int, str]]) -> None:
    refused_or_read(damaged(dump_manifest(manifest_parts), changes), is_json=False)


@settings(deadline=None, max_examples=80)
@given(changes=edits)
def test_damaged_json(manifest_parts: Manifest, changes: list[tuple[float, int, str]]) -> None:
    text = msgspec.json.encode(manifest_parts).decode()
    refused_or_read(damaged(text, changes), is_json=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"size_bytes":100000', f'"size_bytes":{2**63}'),
        ('"bos_token_id":1', f'"bos_token_id":-{2**70}'),
        ('"theta":10000.0', f'"theta":{10**400}'),
        ('"dtype":"BF16"', '"dtype":"\\ud800"'),
        ('"factor":8.0', '"\\ud800":8.0'),
        ('"source":"target"', '"source":"target","\\ud800":1'),
        ('"source":"target"', '"source":"target","two\\nlines":1'),
    ],
)
def test_values_that_no_file_can_hold(manifest_parts: Manifest, old: str, new: str) -> None:
    text = msgspec.json.encode(manifest_parts).decode()
    assert old in text
    with pytest.raises(DiagnosticError) as caught:
        parse_manifest(text.replace(old, new, 1), name="m", is_json=True)
    assert {d.code for d in caught.value.diagnostics} <= {"SD705", "SD706"}
    assert all(d.message.isprintable() for d in caught.value.diagnostics)
    msgspec.json.encode(caught.value.diagnostics)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(blacklist_categories=("Cs",)), max_size=6)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["target", "key", "kind", "x/y", ""]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=120)
@given(path=st.lists(places, min_size=1, max_size=4), value=values)
def test_any_value_anywhere(manifest_parts: Manifest, path: list[float], value: object) -> None:
    document = json.loads(msgspec.json.encode(manifest_parts))
    holder: object = document
    for step, place in enumerate(path):
        keys = list(holder) if isinstance(holder, dict) else []
        if not keys:
            break
        key = keys[int(place * len(keys))]
        assert isinstance(holder, dict)
        if step == len(path) - 1 or not isinstance(holder[key], dict):
            holder[key] = value
            break
        holder = holder[key]
    refused_or_read(json.dumps(document), is_json=True)
