"""The use case and its command: plain call, manifest, sizes, warnings, reproducible files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specctl.checkpoint import digest_file
from specctl.cli.app import run
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.vocabulary_map import map_digest
from specctl.ops.build_token_map import build_token_map
from specctl.ops.cut_token_map import CutOptions
from specctl.ops.report import json_schema
from specctl.ops.token_map_cost import CostOptions
from specctl.ops.token_map_report import TokenMapReport
from specctl.tokenmap import read_token_map
from specctl.tokenmap.count_corpus import CorpusSpec, CountOptions
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


def build(
    *corpus: str,
    tokenizer: Path | str,
    size: tuple[int, ...] = (),
    keep: tuple[str, ...] = (),
    output: str = "token-map",
) -> TokenMapReport:
    options = CutOptions(sizes=size, weights={}, keep=keep, output=Path(output))
    return build_token_map(
        CorpusSpec(sources=corpus or ("corpus",)),
        tokenizer=tokenizer,
        counting=CountOptions(workers=1),
        options=options,
    )


def codes(error: DiagnosticError) -> list[str]:
    return [d.code for d in error.diagnostics]


def test_report_and_files_agree(place: Path, target_dir: Path) -> None:
    report = build(tokenizer=target_dir)
    (built,) = report.maps
    assert (built.directory, built.size_origin) == ("token-map", "derived")
    ids = read_token_map(place / "token-map" / "token_map.json")
    assert len(ids) == built.size == report.recommended.size
    assert built.map_digest == map_digest(ids)
    assert {forced.target_id for forced in report.forced} <= set(ids)
    assert max(ids) < report.tokenizer_size < report.target_vocab_size
    for name, digest in built.files.items():
        assert digest_file(place / "token-map" / name, where=name) == digest
    for name in ("token_map.pt", "token_map.safetensors"):
        assert read_token_map(place / "token-map" / name) == ids
    ranked = read_token_map(place / "token-map" / f"freq_{built.size}.pt")
    assert sorted(ranked) == list(ids)
    provenance = json.loads((place / "token-map" / "token_map.provenance.json").read_text())
    assert provenance["map_digest"] == built.map_digest
    assert provenance["corpus_digest"] == report.corpus.corpus_digest
    assert provenance["tokenizer_digest"] == report.tokenizer_digest
    assert str(place) not in json.dumps(provenance)
    counted = report.corpus
    assert counted.num_documents + counted.num_held_out_documents == 61
    assert counted.num_tokens > counted.num_held_out_tokens > 0
    assert [p.coverage for p in report.curve if p.size == built.size] == [built.coverage]


def test_files_are_reproducible_whatever_the_file_names(place: Path, target_dir: Path) -> None:
    first = build(tokenizer=target_dir, size=(64,), output="a").maps[0]
    (place / "other").mkdir()
    for number, path in enumerate(sorted(place.glob("corpus/**/*.[tm]*"), reverse=True)):
        if path.suffix in (".txt", ".md") and not path.name.startswith("."):
            shutil.copy(path, place / "other" / f"{number}{path.suffix}")
    sources = ("corpus/deep/er/chat.jsonl", "other")
    second = build(*sources, tokenizer=target_dir, size=(64,), output="b").maps[0]
    names = ("token_map.json", "token_map.pt", "token_map.safetensors", "freq_64.pt")
    assert {n: first.files[n] for n in names[:2]} == {n: second.files[n] for n in names[:2]}
    assert {*names, "token_map.provenance.json"} == first.files.keys()
    again = build(tokenizer=target_dir, size=(64,), output="c").maps[0]
    assert again.files == first.files


def test_given_size_and_kept_ids(place: Path, target_dir: Path) -> None:
    report = build(tokenizer=target_dir, size=(32,), keep=("200", "<think>"))
    (built,) = report.maps
    ids = read_token_map(place / "token-map" / "token_map.json")
    assert (built.size, built.size_origin, len(ids)) == (32, "given", 32)
    assert {200, report.tokenizer_size - 1} <= set(ids)
    assert built.displaced
    assert not set(built.displaced) & set(ids)


def test_several_sizes_are_nested_and_have_a_directory_each(place: Path, target_dir: Path) -> None:
    report = build(tokenizer=target_dir, size=(16, 64, 128))
    maps = [set(read_token_map(Path(b.directory) / "token_map.json")) for b in report.maps]
    assert [b.directory for b in report.maps] == [f"token-map/{n}" for n in (16, 64, 128)]
    assert maps[0] < maps[1] < maps[2]
    assert [len(ids) for ids in maps] == [16, 64, 128]


def test_size_that_cannot_hold_the_forced_ids_writes_nothing(place: Path, target_dir: Path) -> None:
    with pytest.raises(DiagnosticError, match="cannot hold 5 forced ids") as caught:
        build(tokenizer=target_dir, size=(3, 64))
    assert codes(caught.value) == ["SD421"]
    assert not (place / "token-map").exists()


def test_tokenizer_larger_than_the_embedding(place: Path, target_dir: Path) -> None:
    copy = place / "copy"
    shutil.copytree(target_dir, copy)
    (copy / "config.json").write_text('{"vocab_size": 10, "eos_token_id": 0}')
    with pytest.raises(DiagnosticError) as caught:
        build(tokenizer=copy)
    assert codes(caught.value) == ["SD415"]


def test_tokenizer_sources(place: Path, target_dir: Path) -> None:
    by_file = build(tokenizer=target_dir / "tokenizer.json", output="a")
    by_directory = build(tokenizer=str(target_dir), output="b")
    assert by_file.maps[0].files == by_directory.maps[0].files
    for source, code in (("corpus", "SD424"), ("org/name", "SD120"), ("./nowhere", "SD119")):
        with pytest.raises(DiagnosticError) as caught:
            build(tokenizer=source)
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
    assert f"token map     {len(ids)} of " in printed
    assert "by the cost model" in printed
    assert "of held-out text" in printed
    assert "files in token-map/" in printed
    assert "assumed" in printed


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
    (built,) = report["maps"]
    assert built["size"] == 64
    written = {"report.json", "token_map.html", "coverage.svg"}
    assert built["files"].keys() == {p.name for p in (place / "map").iterdir()} - written
    assert json.loads((place / "map" / "report.json").read_text()) == report
    jsonschema.validate(report, json_schema(TokenMapReport, "build-token-map --json"))
    assert {"curve", "slices", "forced", "cost", "diagnostics", "corpus"} <= report.keys()


def test_command_refuses_a_loss_outside_its_range(
    place: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build-token-map", "corpus", "--tokenizer", str(target_dir)]
    assert run([*arguments, "--max-loss", "1.5"]) == 2
    assert "below 1" in capsys.readouterr().err
    assert run([*arguments, "--max-loss", "0.5"]) == 0
    assert "by the max loss" in capsys.readouterr().out


def test_counts_are_kept_and_used_again_for_the_same_corpus_only(
    place: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["build-token-map", "corpus", "--tokenizer", str(target_dir), "--size", "64"]
    assert run([*arguments, "--counts", "c.st", "-o", "a"]) == 0
    before = (place / "c.st").read_bytes()
    assert run([*arguments, "--counts", "c.st", "-o", "b"]) == 0
    assert run(["cut-token-map", "c.st", "--tokenizer", str(target_dir), "--size", "64"]) == 0
    maps = [(place / name / "token_map.json").read_bytes() for name in ("a", "b", "token-map")]
    assert len(set(maps)) == 1
    capsys.readouterr()
    (place / "corpus" / "new.txt").write_text("more text")
    assert run([*arguments, "--counts", "c.st", "-o", "d"]) == 1
    assert "SD433" in capsys.readouterr().err
    assert run([*arguments, "--counts", "c.st", "--role", "user", "-o", "d"]) == 1
    assert not (place / "d").exists()
    assert (place / "c.st").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "code", "where"),
    [
        ({"sizes": (1 << 20,)}, "SD421", "--size 1048576"),
        ({"sizes": (33,), "divisible_by": 2}, "SD421", "--size 33"),
        ({"keep": ("no such token",)}, "SD426", "--keep no such token"),
        ({"outputs": ("absent.jsonl",)}, "SD423", "absent.jsonl"),
        ({"cost": CostOptions(manifest=Path("absent.yaml"))}, "SD703", "absent.yaml#"),
    ],
)
def test_what_no_count_can_mend_is_refused_before_counting(
    place: Path,
    target_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    code: str,
    where: str,
) -> None:
    def count(*_: object) -> None:
        raise AssertionError("hours of counting")

    monkeypatch.setattr("specctl.ops.build_token_map.count_corpus", count)
    with pytest.raises(DiagnosticError) as caught:
        build_token_map(
            CorpusSpec(sources=("corpus",)),
            tokenizer=target_dir,
            counting=CountOptions(workers=1),
            options=CutOptions(weights={}, **options),
        )
    assert [(d.code, d.where) for d in caught.value.diagnostics] == [(code, where)]


def test_a_single_map_does_not_stay_beside_several(place: Path, target_dir: Path) -> None:
    build(tokenizer=target_dir, size=(40,))
    Path("token-map/notes.txt").write_text("mine")
    build(tokenizer=target_dir, size=(40, 50))
    assert sorted(path.name for path in Path("token-map").iterdir()) == ["40", "50", "notes.txt"]
