"""`specctl manifest`: what is written where, and what is left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specctl.cli import app
from specctl.cli.shared_options import parse_layer_ids
from specctl.contract.codec import load_manifest

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
TARGET = str(CHECKPOINTS / "hf-llama-clean")
DRAFT = str(CHECKPOINTS / "speculators-eagle3-clean")
OPEN_DRAFT = str(CHECKPOINTS / "safeailab-eagle3-clean")
Captured = pytest.CaptureFixture[str]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_writes_a_file_that_loads(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "m.yaml"
    status = app.run(["manifest", TARGET, DRAFT, "--num-speculative-tokens", "2", "-o", str(out)])
    assert status == 0
    assert capsys.readouterr() == ("", f"wrote {out}\n")
    manifest = load_manifest(out)
    assert manifest.geometry.num_speculative_tokens == 2
    assert names_in(tmp_path) == ["m.yaml"]


def test_without_a_file_the_answer_goes_to_stdout(tmp_path: Path, capsys: Captured) -> None:
    assert app.run(["manifest", TARGET]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    path = tmp_path / "m.yaml"
    path.write_text(out)
    assert load_manifest(path).draft is None


def test_json_is_the_same_schema(tmp_path: Path) -> None:
    for name in ("m.yaml", "m.json"):
        assert app.run(["manifest", TARGET, DRAFT, "-o", str(tmp_path / name)]) == 0
    assert load_manifest(tmp_path / "m.json") == load_manifest(tmp_path / "m.yaml")
    json.loads((tmp_path / "m.json").read_text())


def test_an_error_writes_nothing_and_keeps_the_old_file(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "m.yaml"
    out.write_text("before")
    assert app.run(["manifest", TARGET, OPEN_DRAFT, "-o", str(out)]) == 1
    text, err = capsys.readouterr()
    assert text == ""
    assert err.startswith("SD301 error   gamma-missing: ")
    assert "info" not in err
    assert out.read_text() == "before"
    assert names_in(tmp_path) == ["m.yaml"]


def test_warnings_go_to_stderr_and_into_the_file(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "m.yaml"
    status = app.run(["manifest", TARGET, DRAFT, "--aux-layer-ids", "0,3,4", "-o", str(out)])
    assert status == 0
    assert "SD713 warning given-overrides-file" in capsys.readouterr().err
    assert [d.code for d in load_manifest(out).diagnostics] == ["SD713"]


def test_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.yaml"
    out.write_text("before")

    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specctl.checkpoint.writing.os.fsync", interrupted)
    assert app.run(["manifest", TARGET, "-o", str(out)]) == 130
    assert out.read_text() == "before"
    assert names_in(tmp_path) == ["m.yaml"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "absent" / "m.yaml"
    assert app.run(["manifest", TARGET, "-o", str(out)]) == 2
    assert f"`{out}` cannot be written" in capsys.readouterr().err


def test_schema_is_the_published_one(capsys: Captured) -> None:
    assert app.run(["manifest", "--schema"]) == 0
    published = CHECKPOINTS.parents[1] / "docs" / "reference" / "schemas" / "manifest.schema.json"
    assert json.loads(capsys.readouterr().out) == json.loads(published.read_text())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["manifest"], "name the target's directory"),
        (["manifest", TARGET, DRAFT, "--aux-layer-ids", "1;2"], "`1;2` is not a list of integers"),
        (["manifest", TARGET, DRAFT, "--num-speculative-tokens", "0"], "num-speculative-tokens"),
        (["manifest", TARGET, DRAFT, "--aux-numbering", "layers"], "layers"),
        (["manifest", TARGET, DRAFT, "--num-speculative-token", "2"], "--num-speculative-tokens"),
    ],
)
def test_wrong_usage(arguments: list[str], text: str, capsys: Captured) -> None:
    assert app.run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err


def test_layer_ids_are_a_list_of_integers() -> None:
    assert parse_layer_ids(None) is None
    assert parse_layer_ids("-1, 3,4") == (-1, 3, 4)
