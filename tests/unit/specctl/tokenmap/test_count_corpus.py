"""Counting whole corpora: readers, workers, resuming, defects, one result whatever the way."""

from __future__ import annotations

import collections
import gzip
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specctl.contract.diagnostics import DiagnosticError
from specctl.tokenmap import count_corpus as counting
from specctl.tokenmap import readers
from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions, CountResult, count_corpus
from specctl.tokenmap.counting import LoadedTokenizer, load_tokenizer
from specctl.tokenmap.counts import SIDES, read_counts, summed
from specctl.tokenmap.sources import find_files, plan_tasks
from tests.tiny_tokenizers import TEXT, tokenizer_json

HAS_ARROW = importlib.util.find_spec("pyarrow") is not None
HAS_RAY = importlib.util.find_spec("ray") is not None
needs_arrow = pytest.mark.skipif(not HAS_ARROW, reason="pyarrow (extra tokenmap) is not installed")
METHODS = ["auto", "batch"]


@pytest.fixture
def tokenizer(tmp_path: Path) -> LoadedTokenizer:
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(tokenizer_json("smollm2"), "utf-8")
    return load_tokenizer(path)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    for domain in ("code", "prose"):
        (root / domain).mkdir(parents=True)
    for number, text in enumerate(TEXT):
        suffix = "py" if "def foo" in text else "txt"
        domain = "code" if suffix == "py" else "prose"
        (root / domain / f"{number}.{suffix}").write_text(f"{text} {number}", "utf-8")
    lines = [json.dumps({"text": f"line {i} <|end|> of text"}) for i in range(40)]
    (root / "prose" / "lines.jsonl").write_text("\n".join(lines), "utf-8")
    with gzip.open(root / "prose" / "more.txt.gz", "wb") as stream:
        stream.write(b"Packed text, 12 of it.")
    return root


def run(corpus: Path, tokenizer: LoadedTokenizer, **options: object) -> CountResult:
    spec = CorpusSpec(sources=(str(corpus),))
    return count_corpus(spec, tokenizer, CountOptions(**{"workers": 1, **options}))  # type: ignore[arg-type]


def all_ids(result: CountResult, tokenizer: LoadedTokenizer) -> dict[int, int]:
    rows = [row for side in SIDES for row in result.artefact.table(side).domains]
    return {i: n for i, n in enumerate(summed(rows, tokenizer.size)) if n}


@pytest.mark.parametrize("method", METHODS)
def test_counts_are_those_of_each_document(
    corpus: Path, tokenizer: LoadedTokenizer, method: str
) -> None:
    texts = [p.read_text("utf-8") for p in corpus.rglob("*.py")]
    texts += [p.read_text("utf-8") for p in corpus.rglob("*.txt")]
    lines = (corpus / "prose" / "lines.jsonl").read_text("utf-8").splitlines()
    texts += [json.loads(line)["text"] for line in lines] + ["Packed text, 12 of it."]
    wanted = collections.Counter(
        i for text in texts for i in tokenizer.handle.encode(text, add_special_tokens=False).ids
    )
    result = run(corpus, tokenizer, method=method)
    assert all_ids(result, tokenizer) == wanted
    sides = [result.artefact.table(side) for side in SIDES]
    assert [row.name for row in sides[0].domains] == ["code", "prose"]
    assert sum(side.num_documents for side in sides) == len(texts)
    assert sum(side.num_text_bytes for side in sides) == sum(len(t.encode()) for t in texts)
    assert "code:py" in {row.name for side in sides for row in side.languages}


@needs_arrow
def test_both_methods_and_any_tasks_give_equal_tables(
    corpus: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = run(corpus, tokenizer).artefact
    assert fast.facts.method == "unique-pre-tokens"
    assert fast.facts.num_units > 0
    whole = run(corpus, tokenizer, method="batch").artefact
    assert (whole.facts.method, whole.facts.method_reason) == ("batch", "asked for")
    assert (fast.counted, fast.held_out) == (whole.counted, whole.held_out)
    monkeypatch.setattr(counting, "plan_tasks", lambda files: plan_tasks(files, task_bytes=300))
    small = run(corpus, tokenizer).artefact
    assert (small.counted, small.held_out) == (fast.counted, fast.held_out)
    assert small.facts.corpus_digest == fast.facts.corpus_digest


@needs_arrow
@pytest.mark.dist
def test_workers_do_not_change_a_byte(
    corpus: Path, tokenizer: LoadedTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "plan_tasks", lambda files: plan_tasks(files, task_bytes=800))
    paths = [tmp_path / "one.counts", tmp_path / "two.counts"]
    for path, workers in zip(paths, (1, 2), strict=True):
        run(corpus, tokenizer, counts=path, workers=workers)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_a_count_file_is_used_again_for_the_same_corpus_only(
    corpus: Path, tokenizer: LoadedTokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.counts"
    first = run(corpus, tokenizer, counts=path)
    assert read_counts(path) == first.artefact
    assert run(corpus, tokenizer, counts=path).artefact == first.artefact
    (corpus / "prose" / "new.txt").write_text("one more", "utf-8")
    with pytest.raises(DiagnosticError) as caught:
        run(corpus, tokenizer, counts=path)
    assert [d.code for d in caught.value.diagnostics] == ["SD433"]


SLOW_RUN = """
import sys, time
from pathlib import Path
from specctl.tokenmap import count_corpus as counting, worker
from specctl.tokenmap.counting import load_tokenizer
from specctl.tokenmap.sources import plan_tasks
done = worker.run_task
def slow(job, task):
    number = done(job, task)
    print(number, flush=True)
    time.sleep(0.2)
    return number
counting.run_task = slow
counting.plan_tasks = lambda files: plan_tasks(files, task_bytes=300)
counting.count_corpus(
    counting.CorpusSpec(sources=(sys.argv[1],)), load_tokenizer(Path(sys.argv[2])),
    counting.CountOptions(workers=1, counts=Path(sys.argv[3])))
"""


@pytest.mark.dist
def test_a_killed_run_goes_on_from_its_parts(
    corpus: Path, tokenizer: LoadedTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "corpus.counts"
    command = [sys.executable, "-c", SLOW_RUN, str(corpus), str(tokenizer.path), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ}) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert not path.exists()
    kept = list((tmp_path / "corpus.counts.parts").glob("part-*"))
    assert len(kept) >= 3
    monkeypatch.setattr(counting, "plan_tasks", lambda files: plan_tasks(files, task_bytes=300))
    done: list[int] = []
    real = counting.run_task
    monkeypatch.setattr(counting, "run_task", lambda job, t: done.append(t.number) or real(job, t))
    resumed = run(corpus, tokenizer, counts=path)
    assert len(done) == len(plan_tasks(find_files([str(corpus)]), task_bytes=300)) - len(kept)
    whole = run(corpus, tokenizer)
    assert (resumed.artefact.counted, resumed.artefact.held_out) == (
        whole.artefact.counted,
        whole.artefact.held_out,
    )
    assert not (tmp_path / "corpus.counts.parts").exists()


BAD = {
    "binary": ("a.txt", b"\x7fELF\0\0\0", "a binary file"),
    "latin-1": ("a.txt", "Gr\u00f6\u00dfe".encode("latin-1"), "text that is not UTF-8"),
    "json": ("a.jsonl", b'{"text": "x"\n', "a line that is not JSON"),
    "field": ("a.jsonl", b'{"no": 1}\n', "a line without a text in the named fields"),
    "gzip": ("a.txt.gz", gzip.compress(b"text " * 999)[:-9], "compressed data that is damaged"),
    "no gzip": ("a.txt.gz", b"plain text", "compressed data that is damaged"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_a_bad_part_is_a_counted_warning(
    corpus: Path, tokenizer: LoadedTokenizer, case: str
) -> None:
    name, content, kind = BAD[case]
    (corpus / "prose" / name).write_bytes(content)
    result = run(corpus, tokenizer)
    assert [d.code for d in result.diagnostics] == ["SD434"]
    assert result.diagnostics[0].notes[0].startswith(f"1 x {kind}")
    assert name in result.diagnostics[0].where


@needs_arrow
def test_what_comes_before_a_damaged_place_is_counted_and_said_to_be(
    corpus: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(corpus, tokenizer)
    monkeypatch.setattr(readers, "PIECE_BYTES", 100)
    text = "some words of text " * 50
    (corpus / "prose" / "cut.txt").write_bytes(text.encode() + b"\xff")
    result = run(corpus, tokenizer)
    wanted = "1 x text that is not UTF-8; the text before it is counted"
    assert result.diagnostics[0].notes[0].startswith(wanted)
    sizes = [sum(r.artefact.table(side).num_documents for side in SIDES) for r in (before, result)]
    assert sizes[1] == sizes[0] + 1


def test_a_corpus_of_blank_files_is_refused(tmp_path: Path, tokenizer: LoadedTokenizer) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_text(" \n\n")
    with pytest.raises(DiagnosticError) as caught:
        run(tmp_path / "empty", tokenizer)
    assert [d.code for d in caught.value.diagnostics] == ["SD422"]


@needs_arrow
def test_a_long_document_is_read_in_pieces(
    tmp_path: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(TEXT) * 3
    (tmp_path / "long.txt").write_text(text, "utf-8")
    monkeypatch.setattr(readers, "PIECE_BYTES", 100)
    result = run(tmp_path / "long.txt", tokenizer)
    ids = tokenizer.handle.encode(text, add_special_tokens=False).ids
    sides = [result.artefact.table(side) for side in SIDES]
    assert sum(side.num_documents for side in sides) > 1  # its paragraphs
    monkeypatch.setattr(counting, "_balanced", lambda totals, *_: totals)
    assert all_ids(run(tmp_path / "long.txt", tokenizer), tokenizer) == collections.Counter(ids)


@needs_arrow
def test_a_line_without_a_place_to_cut_is_left_out(
    corpus: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (corpus / "prose" / "blob.txt").write_text("A" * 5000)
    monkeypatch.setattr(readers, "PIECE_BYTES", 100)
    monkeypatch.setattr(readers, "MAX_PIECE_BYTES", 1000)
    result = run(corpus, tokenizer)
    assert "without a place where it may be cut" in result.diagnostics[0].notes[0]


@needs_arrow
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_are_read(tmp_path: Path, tokenizer: LoadedTokenizer, form: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": [*TEXT, None], "other": [1] * (len(TEXT) + 1)})
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        pq.write_table(table, path, row_group_size=4)
    else:
        with pa.ipc.new_file(path, table.schema) as sink:
            sink.write_table(table, max_chunksize=5)
    result = run(path, tokenizer)
    wanted = collections.Counter(
        i for t in TEXT for i in tokenizer.handle.encode(t, add_special_tokens=False).ids
    )
    assert all_ids(result, tokenizer) == wanted
    assert result.diagnostics[0].notes[0].startswith("1 x a line without a text")


def test_ranges_of_lines_cover_a_file_once(
    corpus: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = corpus / "prose" / "lines.jsonl"
    whole = run(path, tokenizer)
    for size in (7, 40, 101):
        monkeypatch.setattr(
            counting, "plan_tasks", lambda files, size=size: plan_tasks(files, task_bytes=size)
        )
        assert run(path, tokenizer).artefact == whole.artefact


@needs_arrow
@pytest.mark.parametrize("form", ["u16", "u32", "i64", "npy"])
def test_token_ids_are_counted(tmp_path: Path, tokenizer: LoadedTokenizer, form: str) -> None:
    import numpy as np

    ids = np.arange(5000) % 97
    if form == "npy":
        np.save(tmp_path / "ids.npy", ids)
    else:
        dtype = {"u16": "<u2", "u32": "<u4", "i64": "<i8"}[form]
        ids.astype(dtype).tofile(tmp_path / "ids.bin")
    path = tmp_path / ("ids.npy" if form == "npy" else "ids.bin")
    spec = CorpusSpec(sources=(str(path),), id_type=None if form == "npy" else form)  # type: ignore[arg-type]
    result = count_corpus(spec, tokenizer, CountOptions())
    assert result.artefact.facts.method == "token-ids"
    assert all_ids(result, tokenizer) == collections.Counter(ids.tolist())
    np.save(tmp_path / "ids.npy", np.array([tokenizer.size]))
    with pytest.raises(DiagnosticError) as caught:
        count_corpus(CorpusSpec(sources=(str(tmp_path / "ids.npy"),)), tokenizer)
    assert [d.code for d in caught.value.diagnostics] == ["SD423"]


@pytest.mark.dist
@pytest.mark.skipif(not (HAS_RAY and HAS_ARROW), reason="ray (extra ray) is not installed")
def test_ray_gives_the_same_counts(
    corpus: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setattr(counting, "plan_tasks", lambda files: plan_tasks(files, task_bytes=800))
    local = run(corpus, tokenizer)
    assert run(corpus, tokenizer, engine="ray", workers=2).artefact == local.artefact


TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TURNS = [
    {"role": "user", "content": "How many?"},
    {"role": "assistant", "content": "Five of them."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "None."},
]


@pytest.mark.parametrize("roles", [(), ("assistant",)])
def test_conversations_are_rendered(
    tmp_path: Path, tokenizer: LoadedTokenizer, roles: tuple[str, ...]
) -> None:
    pytest.importorskip("jinja2", reason="jinja2 (extra tokenmap) is not installed")
    config = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}
    (tokenizer.path.parent / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"messages": TURNS}) + "\n" + json.dumps({"messages": [3]}) + "\n"
    )
    spec = CorpusSpec(
        sources=(str(tmp_path / "chat.jsonl"),), roles=roles, uses_chat_template=True, held_out=0
    )
    result = count_corpus(spec, tokenizer, CountOptions(workers=1))
    whole = "".join(f"<|im_start|>{t['role']}\n{t['content']}<|im_end|>\n" for t in TURNS)
    texts = ["Five of them.<|im_end|>\n", "None.<|im_end|>\n"] if roles else [whole]
    wanted = collections.Counter(
        i for text in texts for i in tokenizer.handle.encode(text, add_special_tokens=False).ids
    )
    assert all_ids(result, tokenizer) == wanted
    assert "messages that the chat template refuses" in result.diagnostics[0].notes[0]


def test_a_missing_chat_template_is_named(corpus: Path, tokenizer: LoadedTokenizer) -> None:
    pytest.importorskip("jinja2", reason="jinja2 (extra tokenmap) is not installed")
    with pytest.raises(DiagnosticError) as caught:
        count_corpus(CorpusSpec(sources=(str(corpus),), uses_chat_template=True), tokenizer)
    assert [d.code for d in caught.value.diagnostics] == ["SD425"]


def test_a_missing_package_is_named(
    corpus: Path, tokenizer: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(DiagnosticError) as caught:
        run(corpus, tokenizer, engine="ray")
    assert [d.code for d in caught.value.diagnostics] == ["SD435"]
