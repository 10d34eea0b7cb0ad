"""Corpora that are not what the options say: counted, named, never silent, never slow."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest

from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from specctl.tokenmap import readers
from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions, CountResult, count_corpus
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.counts import summed
from specctl.tokenmap.ray_engine import check_cluster
from specctl.tokenmap.readers import Reading, read_pieces
from specctl.tokenmap.sources import find_files, plan_tasks
from tests.tiny_tokenizers import tokenizer_json

HAS_RAY = importlib.util.find_spec("ray") is not None
HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
needs_arrow = pytest.mark.skipif(not HAS_ARROW, reason="pyarrow (extra tokenmap) is not installed")
CHAT = [
    {"role": "user", "content": "question question question"},
    {"role": "assistant", "content": "answer"},
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> LoadedTokenizer:
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(tokenizer_json("smollm2"), "utf-8")
    return load_tokenizer(path)


def count(tokenizer: LoadedTokenizer, *sources: Path, **spec: object) -> CountResult:
    corpus = CorpusSpec(sources=tuple(map(str, sources)), held_out=0, **spec)  # type: ignore[arg-type]
    return count_corpus(corpus, tokenizer, CountOptions(workers=1))


def num_tokens(result: CountResult) -> int:
    return result.artefact.counted.num_tokens


def per_id(result: CountResult, tokenizer: LoadedTokenizer) -> list[int]:
    return list(summed(result.artefact.counted.domains, tokenizer.size))


def only(result: CountResult, code: str) -> Diagnostic:
    [found] = [item for item in result.diagnostics if item.code == code]
    return found


def jsonl(path: Path, *values: object) -> Path:
    path.write_text("".join(f"{json.dumps(value)}\n" for value in values), "utf-8")
    return path


def test_roles_hold_for_a_named_field_too(tmp_path: Path, tokenizer: LoadedTokenizer) -> None:
    path = jsonl(tmp_path / "chat.jsonl", {"messages": CHAT})
    usual = count(tokenizer, path, roles=("assistant",))
    named = count(tokenizer, path, roles=("assistant",), fields=("messages",))
    assert named.artefact.counted == usual.artefact.counted
    assert num_tokens(named) < num_tokens(count(tokenizer, path))


def test_a_prompt_is_what_a_user_says(tmp_path: Path, tokenizer: LoadedTokenizer) -> None:
    pair = {"prompt": "question question question", "completion": "answer"}
    pairs = count(tokenizer, jsonl(tmp_path / "a.jsonl", pair), roles=("assistant",))
    assert pairs.artefact.counted.num_tokens == len(
        tokenizer.handle.encode("answer", add_special_tokens=False).ids
    )


def test_texts_without_roles_are_counted_and_named(
    tmp_path: Path, tokenizer: LoadedTokenizer
) -> None:
    lines = jsonl(tmp_path / "a.jsonl", {"text": "plain"}, {"messages": CHAT}, "a line")
    (tmp_path / "b.txt").write_text("prose without roles")
    result = count(tokenizer, lines, tmp_path / "b.txt", roles=("assistant",))
    found = only(result, "SD805")
    assert "3 documents" in found.message
    assert found.where == f"{lines}#1"
    assert not [d for d in count(tokenizer, lines).diagnostics if d.code == "SD805"]


@pytest.mark.parametrize(
    ("option", "spec"),
    [
        ("--field", {"fields": ("text",)}),
        ("--language-field", {"language_field": "lang"}),
        ("--id-type", {"id_type": "u16"}),
    ],
)
def test_an_option_that_no_file_can_use_is_named(
    tmp_path: Path, tokenizer: LoadedTokenizer, option: str, spec: dict[str, object]
) -> None:
    (tmp_path / "b.txt").write_text("prose without fields")
    assert only(count(tokenizer, tmp_path / "b.txt", **spec), "SD805").where == option


def test_no_message_of_the_roles_is_said(tmp_path: Path, tokenizer: LoadedTokenizer) -> None:
    path = jsonl(tmp_path / "chat.jsonl", {"messages": CHAT})
    with pytest.raises(DiagnosticError) as caught:
        count(tokenizer, path, roles=("nobody",))
    [found] = caught.value.diagnostics
    assert found.code == "SD422"
    assert "`nobody`" in "".join(found.notes)


@needs_arrow
def test_a_damaged_table_is_left_out_like_any_damaged_file(
    tmp_path: Path, tokenizer: LoadedTokenizer
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["one row", "and another"]}), tmp_path / "b.parquet")
    whole = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(b"")
    (tmp_path / "c.parquet").write_bytes(whole[: len(whole) // 2])
    result = count(tokenizer, *sorted(tmp_path.glob("*.parquet")))
    assert only(result, "SD434").notes[0].startswith("2 x a table")
    assert result.artefact.counted.num_documents == 2


@needs_arrow
def test_arrays_among_texts_are_left_out_of_a_directory_and_named(
    tmp_path: Path, tokenizer: LoadedTokenizer
) -> None:
    import numpy as np

    corpus = tmp_path / "package"
    corpus.mkdir()
    np.save(corpus / "data.npy", np.arange(3))
    (corpus / "module.py").write_text("import this  # and more text than the array has\n" * 20)
    result = count(tokenizer, corpus)
    assert result.artefact.facts.method == "unique-pre-tokens"
    assert only(result, "SD434").notes[0].startswith("1 x token ids beside texts")
    with pytest.raises(DiagnosticError) as caught:  # named, it is wanted
        count(tokenizer, corpus, corpus / "data.npy")
    assert [d.code for d in caught.value.diagnostics] == ["SD423"]
    np.save(corpus / "data.npy", np.zeros(4096, np.int64))
    with pytest.raises(DiagnosticError) as caught:  # most of it is ids
        count(tokenizer, corpus)
    assert [d.code for d in caught.value.diagnostics] == ["SD423"]


@needs_arrow
@pytest.mark.parametrize("value", [1 << 40, (1 << 63) + 1, -1])
def test_an_id_of_any_size_is_refused_by_number(
    tmp_path: Path, tokenizer: LoadedTokenizer, value: int
) -> None:
    import numpy as np

    dtype = np.uint64 if value > 0 else np.int64
    np.save(tmp_path / "ids.npy", np.array([3, value], dtype))
    with pytest.raises(DiagnosticError) as caught:
        count(tokenizer, tmp_path / "ids.npy")
    [found] = caught.value.diagnostics
    assert (found.code, found.found) == ("SD423", str(value))


@needs_arrow
def test_ids_of_eight_unsigned_bytes_are_counted(
    tmp_path: Path, tokenizer: LoadedTokenizer
) -> None:
    import numpy as np

    np.save(tmp_path / "ids.npy", np.array([3, 3, 1], np.uint64))
    assert per_id(count(tokenizer, tmp_path / "ids.npy"), tokenizer)[:4] == [0, 1, 0, 2]


def test_a_line_over_many_ranges_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 4096)
    path = jsonl(tmp_path / "a.jsonl", {"text": "x"}, {"text": "y" * 200_000}, {"text": "z"})
    read = 0
    plain = io.BufferedReader.readline

    class Counted(io.BufferedReader):
        def readline(self, size: int | None = -1, /) -> bytes:
            nonlocal read
            data = plain(self, size)
            read += len(data)
            return data

    monkeypatch.setattr(readers.io, "BufferedReader", Counted)  # type: ignore[attr-defined]
    texts = []
    for task in plan_tasks(find_files([str(path)]), task_bytes=1000):
        texts += [p.data for f in task.files for p in read_pieces(f, task, Reading())
                  if isinstance(p, readers.Piece)]  # fmt: skip
    assert texts == [b"x", b"z"]
    assert read < 3 * path.stat().st_size


@needs_arrow
@pytest.mark.parametrize(
    "words",
    ["\u043e\u0434\u043d\u0430 \u0442\u0440\u0430\u0432\u0430 ", "\ud55c\uad6d\uc5b4 \ub9d0 "],
)
def test_large_texts_of_other_scripts_are_cut(
    tmp_path: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    (tmp_path / "a.txt").write_text(words * 400, "utf-8")
    whole = per_id(count(tokenizer, tmp_path / "a.txt"), tokenizer)
    monkeypatch.setattr(readers, "PIECE_BYTES", 100)
    monkeypatch.setattr(readers, "MAX_PIECE_BYTES", 1000)
    assert per_id(count(tokenizer, tmp_path / "a.txt"), tokenizer) == whole


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_called_by_its_name(
    tmp_path: Path, tokenizer: LoadedTokenizer, encoding: str
) -> None:
    mark = "\ufeff" if encoding.endswith("be") else ""
    (tmp_path / "a.txt").write_bytes(f"{mark}text of two bytes".encode(encoding))
    with pytest.raises(DiagnosticError) as caught:
        count(tokenizer, tmp_path / "a.txt")
    assert "UTF-16" in "".join(caught.value.diagnostics[0].notes)


def test_a_count_file_without_its_run_file_is_said_to_be_alone(
    tmp_path: Path, tokenizer: LoadedTokenizer
) -> None:
    (tmp_path / "a.txt").write_text("some text, to be counted")
    corpus = CorpusSpec(sources=(str(tmp_path / "a.txt"),), held_out=0)
    options = CountOptions(workers=1, counts=tmp_path / "counts.safetensors")
    count_corpus(corpus, tokenizer, options)
    (tmp_path / "counts.safetensors.run").unlink()
    with pytest.raises(DiagnosticError) as caught:
        count_corpus(corpus, tokenizer, options)
    [found] = caught.value.diagnostics
    assert found.code == "SD433"
    assert "counts.safetensors.run" in str(found.found)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "127.0.0.1:99999"])
def test_a_ray_cluster_that_is_not_there_is_refused_at_once(address: str) -> None:
    """Ray itself waits for minutes."""
    with pytest.raises(DiagnosticError) as caught:
        check_cluster(address)
    [found] = caught.value.diagnostics
    assert (found.code, found.where) == ("SD442", f"--ray-address {address}")


@pytest.mark.skipif(not HAS_RAY, reason="ray (extra ray) is not installed")
def test_an_address_that_ray_refuses_has_a_code(tmp_path: Path, tokenizer: LoadedTokenizer) -> None:
    (tmp_path / "a.txt").write_text("some text")
    corpus = CorpusSpec(sources=(str(tmp_path / "a.txt"),), held_out=0)
    with pytest.raises(DiagnosticError, match="SD442"):
        count_corpus(corpus, tokenizer, CountOptions(engine="ray", ray_address="nohost"))
