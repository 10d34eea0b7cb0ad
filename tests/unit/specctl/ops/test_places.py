"""From the place of a finding to file, line and columns, for good, broken and hostile texts."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specctl.ops import places
from specctl.ops.json_spans import json_spans, yaml_spans
from specctl.ops.places import Place, find_places
from specctl.ops.validate import validate

ROOT = Path(__file__).parents[4]
CONFIG = """{
  "model_type": "llama",
  "speculators_config": {
    "proposal_methods": [
      {"a/b": 1, "speculative_tokens": 8}
    ],
    "~odd": [[10, 20], {"deep": null}]
  },
  "twice": 1,
  "twice": 2
}
"""


def at(where: str) -> Place:
    return find_places([where])[where]


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.parametrize(
    ("pointer", "line", "text"),
    [
        ("/model_type", 2, '"model_type": "llama"'),
        ("/speculators_config", 3, '"speculators_config"'),
        ("/speculators_config/proposal_methods", 4, '"proposal_methods"'),
        ("/speculators_config/proposal_methods/0", 5, "{"),
        ("/speculators_config/proposal_methods/0/speculative_tokens", 5, '"speculative_tokens": 8'),
        ("/speculators_config/proposal_methods/0/a~1b", 5, '"a/b": 1'),
        ("/speculators_config/~0odd/0/1", 7, "20"),
        ("/speculators_config/~0odd/1/deep", 7, '"deep": null'),
        ("/speculators_config/absent/below", 3, '"speculators_config"'),
        ("/absent", 1, "{"),
        ("/twice", 10, '"twice": 2'),
        ("twice", 10, '"twice"'),
        ("no key anywhere", 1, "{"),
    ],
)
def test_pointers_into_a_config(config: str, pointer: str, line: int, text: str) -> None:
    found = at(f"{config}#{pointer}")
    assert (found.file, found.line, found.pointer) == (config, line, pointer)
    assert found.column is not None
    assert found.end_column is not None
    shown = CONFIG.splitlines()[line - 1][found.column - 1 : found.end_column - 1]
    assert shown == text


def test_places_without_a_line(config: str, tmp_path: Path) -> None:
    assert at(f"{config}#") == Place(file=config, pointer="")
    assert at(config) == Place(file=config)
    assert at(f"{config}:7") == Place(file=config, line=7)
    assert at("--expect") == Place(file=None)
    assert at("request=abc") == Place(file=None)
    weights = tmp_path / "model.safetensors"
    assert at(f"{weights}::a.b[2,3 BF16]") == Place(file=str(weights), tensor="a.b")
    assert at(f"{weights}::odd#name[1]") == Place(file=str(weights), tensor="odd#name")
    absent = tmp_path / "absent.json"
    assert at(f"{absent}#/a").line is None
    assert at(f"{tmp_path}#/tensors") == Place(file=str(tmp_path), pointer="/tensors")


def test_a_directory_name_with_separators_is_kept_whole(tmp_path: Path) -> None:
    directory = tmp_path / "a#b::c"
    directory.mkdir()
    (directory / "config.json").write_text('{\n"x": 1}')
    found = at(f"{directory}/config.json#/x")
    assert (found.file, found.line, found.column) == (f"{directory}/config.json", 2, 1)


def test_columns_count_code_points_and_skip_the_mark(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + '{"\u00e4\U0001f600": 1, "b": 2}'.encode())
    assert at(f"{path}#/b").column == 11


def test_a_manifest_has_lines_too(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("# \u00e4\ngeometry:\n  widths: [1, 2]\n  verify_width: 5\n")
    found = at(f"{path}#/geometry/verify_width")
    assert (found.line, found.column, found.end_column) == (4, 3, 15)
    assert at(f"{path}#/geometry/widths/1").column == 15
    path.write_text("a: [\n")
    assert at(f"{path}#/a").line is None


def test_a_large_file_is_not_read(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MAX_BYTES", 10)
    assert at(f"{config}#/model_type").line is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


def walk(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = [(path, value)]
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += walk(item, (*path, str(key)))
    return found


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.text(max_size=4), json_values, max_size=4), st.sampled_from([None, 1]))
def test_every_path_of_any_document_is_found(value: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    nodes = walk(value)
    found = json_spans(text, [path for path, _ in nodes])
    assert set(found) == {path for path, _ in nodes}
    for path, item in nodes:
        begin, end = found[path]
        assert 0 <= begin < end <= len(text)
        shown = text[begin:end]
        is_member = bool(path) and shown.startswith(json.dumps(path[-1], ensure_ascii=False))
        assert is_member or shown in ("{", "[") or json.loads(shown) == item


@settings(deadline=None, max_examples=150)
@given(st.text(alphabet='{}[],:"\\ab1 \n', max_size=60))
def test_broken_texts_never_raise(text: str) -> None:
    for begin, end in json_spans(text, [("a",), ("b", "0"), (None, "a")]).values():
        assert 0 <= begin <= end <= len(text)
    yaml_spans(text, [("a",), ("b", "0")])


N = 1 << 20


@pytest.mark.parametrize(
    "text",
    ['"' + '\\"' * (N // 2), '"' + "\\" * N, '"' * N, "[" * N, '{"a":' * (N // 5), "," * N,
     "{}," * (N // 3), "[" + '"a",' * (N // 4), "[]" * (N // 2), "a " * (N // 2)],
    ids=["escaped quotes", "backslashes", "quotes", "lists", "objects", "commas", "empty",
         "strings", "pairs", "words"],
)  # fmt: skip
@pytest.mark.timeout(60)
def test_a_mebibyte_of_anything_is_cheap(text: str) -> None:
    wanted: list[tuple[str | None, ...]] = [("a", "a", "a"), ("0",), (None, "a")]
    tracemalloc.start()
    json_spans(text[: N // 16], wanted)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 << 10, "a fraction of 1 MiB / 16"
    json_spans(text, wanted)  # a second on an idle core; a quadratic one takes hours


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=30) | st.text("#:/~0\0\udcff\n-a", max_size=12))
def test_any_text_is_a_place(text: str) -> None:
    assert set(find_places([text])) == {text}


def test_every_pointer_of_the_fixtures_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    report = validate(["fixtures/checkpoints"])
    wheres = {item.where for result in report.results for item in result.diagnostics}
    found = find_places(wheres)
    pointed = {w: p for w, p in found.items() if p.pointer and p.file and Path(p.file).is_file()}
    assert len(pointed) > 50
    assert [where for where, place in pointed.items() if place.line is None] == []
