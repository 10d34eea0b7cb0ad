"""`specctl convert` and `specctl normalize` from the command line: answers, talk, exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

from specctl.cli.app import run
from specctl.convert.dialects import dialect_names

ROOT = Path(__file__).parents[4]
CHECKPOINTS = ROOT / "fixtures" / "checkpoints"
SCHEMA = json.loads((ROOT / "docs/reference/schemas/convert.schema.json").read_text("utf-8"))
DRAFT = str(CHECKPOINTS / "speculators-eagle3-clean")


def test_a_conversion_talks_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    for word in ("wrote", "is there already and equal"):
        assert run(["convert", DRAFT, "--to", "specforge", "-o", out]) == 0
        captured = capsys.readouterr()
        assert captured.out == ""
        assert word in captured.err


def test_a_refusal_is_exit_1_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["convert", str(CHECKPOINTS / "safeailab-eagle3-clean"), "--to", "speculators"]
    assert run([*arguments, "-o", str(tmp_path / "out")]) == 1
    errors = capsys.readouterr().err
    assert "SD602" in errors
    assert "nothing was written" in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["convert", "normalize"])
@pytest.mark.parametrize("is_refused", [False, True])
def test_json_follows_its_schema(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, is_refused: bool
) -> None:
    source = str(CHECKPOINTS / "speculators-eagle3-map-duplicate") if is_refused else DRAFT
    to = ["--to", "specforge"] if command == "convert" else []
    arguments = [command, source, *to, "-o", str(tmp_path / "out"), "--json"]
    assert run(arguments) == (1 if is_refused else 0)
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, SCHEMA)
    assert document["state"] == ("refused" if is_refused else "written")
    assert bool(document["tensors"]) is not is_refused


def test_a_dry_run_answers_with_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert run(["convert", DRAFT, "--to", "specforge", "-o", out, "--dry-run"]) == 0
    assert "midlayer.hidden_norm.weight" in capsys.readouterr().out
    source = str(CHECKPOINTS / "safeailab-eagle3-layers-40")
    assert run(["normalize", source, "--dry-run"]) == 0
    answer = capsys.readouterr().out
    assert "- config.json#/num_hidden_layers: 40" in answer
    assert "+ config.json#/num_hidden_layers: 1" in answer
    assert list(tmp_path.iterdir()) == []


def test_normalize_says_what_it_fixed_and_what_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "odd", str(tmp_path / "out")
    shutil.copytree(CHECKPOINTS / "safeailab-eagle3-layers-40", source)
    config = json.loads((source / "config.json").read_text("utf-8"))
    (source / "config.json").write_text(json.dumps({**config, "of_the_trainer": True}), "utf-8")
    assert run(["normalize", str(source), "-o", out]) == 0
    talk = capsys.readouterr().err
    assert "fixes: layer-count" in talk
    assert "SD608" in talk
    assert run(["normalize", out, "--dry-run"]) == 0
    assert capsys.readouterr().out == "no field and no tensor would change\n"


def test_the_names_of_the_dialects(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "--to", "help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(dialect_names())
    assert lines[1].split(maxsplit=1)[1] == "by algorithm: safeailab-eagle3"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["convert", DRAFT, "-o", "out"], "name a dialect"),
        (["convert", DRAFT, "--to", "specforge"], "name the directory"),
        (["normalize", DRAFT], "name the directory"),
        (["convert", DRAFT, "--to", "specforge", "-o", "out", "--allow", "all"], "is no loss"),
        (["convert", DRAFT, "--to", "specforge", "-o", "out", "--max-shard-size", "5"], None),
        (
            ["convert", DRAFT, "--to", "specforge", "-o", "out", "--max-shard-size", "big"],
            "is no size",
        ),
    ],
)
def test_wrong_usage_is_exit_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == (0 if text is None else 2)
    assert text is None or text in capsys.readouterr().err


def test_stitching_and_the_map_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(CHECKPOINTS / "hf-qwen35-mtp")
    part, out, ids = (str(tmp_path / name) for name in ("part", "out", "map.json"))
    assert run(["convert", target, "--to", "qwen-mtp", "-o", part]) == 0
    capsys.readouterr()
    assert run(["convert", part, "--stitch-into", target, "-o", out]) == 0
    # the whole target's tensors, as the bytes beside them are
    assert "huggingface, 19 tensors, 2,872 bytes" in capsys.readouterr().err
    assert (Path(out) / "config.json").read_bytes() == (Path(target) / "config.json").read_bytes()
    assert run(["convert", DRAFT, "--to", "gguf-map", "-o", ids, "--allow", "t2d"]) == 0
    assert json.loads(Path(ids).read_text())["keys"]["eagle3.extract_layers"] == [2, 4, 5]


@pytest.mark.parametrize(
    ("chosen", "unused"),
    [
        (["--stitch-into", DRAFT], ["--to", "specforge"]),
        (["--stitch-into", DRAFT], ["--gamma", "3"]),
        (["--to", "gguf-map"], ["--full-vocabulary"]),
        (["--to", "specforge", "--token-map", "map.json"], ["--full-vocabulary"]),
    ],
)
def test_an_option_without_effect_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], chosen: list[str], unused: list[str]
) -> None:
    out = str(tmp_path / "out")
    assert run(["convert", DRAFT, *chosen, *unused, "-o", out]) == 2
    assert f"has no effect with `{chosen[-2]}" in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["convert", "--to", "eagle"], ["normalize"]])
@pytest.mark.parametrize("out", [None, "", " ", "hf:org/name", "ms:org/name"])
def test_an_output_that_is_no_directory_of_this_machine(
    command: list[str], out: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    option = [] if out is None else ["-o", out]
    assert run([command[0], str(CHECKPOINTS / "eagle-clean"), *command[1:], *option]) == 2
    assert list(tmp_path.iterdir()) == []
