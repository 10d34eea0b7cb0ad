"""The use case and its command: plain call, manifest, sizes, warnings, reproducible files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specctl.checkpoint import digest_file
from specctl.cli.app import run
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.vocabulary_map import map_digest
from specctl.ops.build_token_map import build_token_map
from specctl.tokenmap import read_token_map
from tests.tiny_corpus import write_corpus, write_target


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working directory with a `corpus/` in it."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    return tmp_path


def codes(error: DiagnosticError) -> list[str]:
    return [d.code for d in error.diagnostics]


def test_report_and_files_agree(place: Path, target_dir: Path) -> None:
    phases: list[str] = []
    report = build_token_map(
        ["corpus"], tokenizer=target_dir, progress=lambda phase, *_: phases.append(phase)
    )
    assert (report.directory, report.size_origin) == ("token-map", "derived")
    ids = read_token_map(place / "token-map" / "token_map.json")
    assert len(ids) == report.size == report.recommended_size
    assert report.map_digest == map_digest(ids)
    assert {forced.target_id for forced in report.forced} <= set(ids)
    assert max(ids) < report.tokenizer_size < report.target_vocab_size
    for name, digest in report.files.items():
        assert digest_file(place / "token-map" / name, where=name) == digest
    for name in ("token_map.pt", "token_map.safetensors"):
        assert read_token_map(place / "token-map" / name) == ids
    provenance = json.loads((place / "token-map" / "token_map.provenance.json").read_text())
    assert provenance["map_digest"] == report.map_digest
    assert provenance["corpus_digest"] == report.corpus_digest
    assert str(place) not in json.dumps(provenance)
    assert report.num_documents == 60
    assert report.num_tokens > report.num_held_out_tokens > 0
    assert [p.coverage for p in report.curve if p.size == report.size] == [report.coverage]
    assert set(phases) == {"reading", "counting"}


def test_files_are_reproducible_whatever_the_file_names(place: Path, target_dir: Path) -> None:
    first = build_token_map(["corpus"], tokenizer=target_dir, size=64, output="a")
    (place / "other").mkdir()
    for number, path in enumerate(sorted(place.glob("corpus/**/*.[tm]*"), reverse=True)):
        if path.suffix in (".txt", ".md") and not path.name.startswith("."):
            shutil.copy(path, place / "other" / f"{number}{path.suffix}")
    sources = ["corpus/deep/er/chat.jsonl", "other"]
    second = build_token_map(sources, tokenizer=target_dir, size=64, output="b")
    assert first.files == second.files
    assert len(first.files) == 4


def test_given_size_and_kept_ids(place: Path, target_dir: Path) -> None:
    report = build_token_map(["corpus"], tokenizer=target_dir, size=32, keep=["200", "<think>"])
    ids = read_token_map(place / "token-map" / "token_map.json")
    assert (report.size, report.size_origin, len(ids)) == (32, "given", 32)
    assert {200, report.tokenizer_size - 1} <= set(ids)
    assert report.displaced
    assert not set(report.displaced) & set(ids)


def test_size_that_cannot_hold_the_forced_ids_writes_nothing(place: Path, target_dir: Path) -> None:
    with pytest.raises(DiagnosticError, match="cannot hold 5 forced ids") as caught:
        build_token_map(["corpus"], tokenizer=target_dir, size=3)
    assert codes(caught.value) == ["SD421"]
    assert not (place / "token-map").exists()


def test_warnings_of_small_corpora(place: Path, target_dir: Path) -> None:
    (place / "line.txt").write_text("the quick brown fox")
    report = build_token_map(["line.txt"], tokenizer=target_dir, size=101)
    assert [d.code for d in report.diagnostics] == ["SD427", "SD428", "SD407"]
    assert (report.num_held_out_documents, report.num_held_out_tokens) == (0, 0)
    (place / "two.jsonl").write_text('{"text": "fox"}\n{"text": "\\ud83d 0123456789"}\n')
    report = build_token_map(["two.jsonl"], tokenizer=target_dir, size=16)
    assert [d.code for d in report.diagnostics] == ["SD430", "SD431"]


def test_tokenizer_larger_than_the_embedding(place: Path, target_dir: Path) -> None:
    copy = place / "copy"
    shutil.copytree(target_dir, copy)
    (copy / "config.json").write_text('{"vocab_size": 10, "eos_token_id": 0}')
    with pytest.raises(DiagnosticError) as caught:
        build_token_map(["corpus"], tokenizer=copy)
    assert codes(caught.value) == ["SD415"]


def test_corpus_that_changes_under_the_count(place: Path, target_dir: Path) -> None:
    def change(phase: str, done: int, total: int) -> None:
        if phase == "counting":
            (place / "corpus" / "deep" / "er" / "chat.jsonl").write_text('{"text": "new"}\n')

    with pytest.raises(DiagnosticError) as caught:
        build_token_map(["corpus"], tokenizer=target_dir, progress=change)
    assert codes(caught.value) == ["SD429"]


def test_tokenizer_sources(place: Path, target_dir: Path) -> None:
    by_file = build_token_map(["corpus"], tokenizer=target_dir / "tokenizer.json", output="a")
    by_directory = build_token_map(["corpus"], tokenizer=str(target_dir), output="b")
    assert by_file.files == by_directory.files
    for source, code in (("corpus", "SD424"), ("org/name", "SD120"), ("./nowhere", "SD119")):
        with pytest.raises(DiagnosticError) as caught:
            build_token_map(["corpus"], tokenizer=source)
        assert codes(caught.value) == [code]


def test_plain_command_takes_the_target_of_the_manifest(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="the tiny target's weights are made with torch")
    from tests.tiny import write_tiny_target
    from tests.tiny_manifest import tiny_manifest, write_manifest

    write_manifest(place, tiny_manifest(write_tiny_target(place / "target", num_layers=1)))
    assert run(["build-token-map", "corpus/"]) == 0
    printed = capsys.readouterr().out
    ids = read_token_map(place / "token-map" / "token_map.json")
    assert f"size          {len(ids)}, derived" in printed
    assert "token distribution of the held-out text" in printed
    assert "held-out coverage" in printed
    assert "files in token-map/" in printed


def test_command_without_tokenizer_names_the_option(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["build-token-map", "corpus/"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "SD424" in captured.err
    assert "`--tokenizer DIR`" in captured.err
    assert sorted(p.name for p in place.iterdir()) == ["corpus"]


def test_json_is_one_document(
    place: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build-token-map", "corpus", "--tokenizer", str(target_dir), "--size", "64"]
    assert run([*arguments, "--json", "-o", "map"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["size"] == 64
    assert report["files"].keys() == {p.name for p in (place / "map").iterdir()}
    assert {"curve", "forced", "coverage", "diagnostics", "corpus_digest"} <= report.keys()


def test_command_refuses_a_loss_outside_its_range(
    place: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build-token-map", "corpus", "--tokenizer", str(target_dir)]
    assert run([*arguments, "--max-loss", "1.5"]) == 2
    assert "below 1" in capsys.readouterr().err
    assert run([*arguments, "--max-loss", "0.5"]) == 0


def test_interrupt_leaves_nothing(place: Path, target_dir: Path) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        if phase == "counting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_token_map(["corpus"], tokenizer=target_dir, progress=stop)
    assert not (place / "token-map").exists()
