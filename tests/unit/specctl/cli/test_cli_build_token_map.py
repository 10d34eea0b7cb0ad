"""`specctl build-token-map`: an output that cannot be written is wrong usage, no fault of ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specctl.cli import app
from specctl.cli.commands import build_token_map as command

TARGET = str(Path(__file__).parents[4] / "fixtures" / "checkpoints" / "hf-llama-clean")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.txt"
    path.write_text("the cat\n\nthe dog\n" * 20)
    return str(path)


@pytest.mark.parametrize("inside", ["", "map"])
def test_a_file_in_the_place_of_the_directory_is_refused_before_counting(
    tmp_path: Path, corpus: str, inside: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("counted although nothing can be written")

    monkeypatch.setattr(command, "build", never)
    place = tmp_path / "taken"
    place.write_text("before")
    arguments = ["build-token-map", corpus, "--tokenizer", TARGET, "-o", str(place / inside)]
    assert app.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"`{place}` is not a directory" in err
    assert "internal fault" not in err
    assert place.read_text() == "before"


def test_a_refusal_while_writing_names_the_directory_and_the_reason(
    tmp_path: Path, corpus: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specctl.ops.cut_token_map.write_token_map", full)
    place = tmp_path / "map"
    assert app.run(["build-token-map", corpus, "--tokenizer", TARGET, "-o", str(place)]) == 2
    err = capsys.readouterr().err
    assert f"`{place}` cannot be written: No space left on device" in err
    assert "internal fault" not in err


def test_the_answer_names_the_files(tmp_path: Path, corpus: str, capsys: Captured) -> None:
    place = tmp_path / "map"
    assert app.run(["build-token-map", corpus, "--tokenizer", TARGET, "-o", str(place)]) == 0
    out, _ = capsys.readouterr()
    assert f"files in {place}/" in out
    names = sorted(path.name for path in place.iterdir())
    assert re.fullmatch(r"freq_[0-9]+[.]pt", names.pop(1))
    assert names == [
        "coverage.svg",
        "report.json",
        "token_map.html",
        "token_map.json",
        "token_map.provenance.json",
        "token_map.pt",
        "token_map.safetensors",
    ]
