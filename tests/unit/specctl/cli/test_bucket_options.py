"""`--batch-buckets` and `--prefill-buckets`: what reaches the runtime, and what is wrong usage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from runtime import main
from specctl.cli.app import run

MANIFESTS = Path(__file__).parents[4] / "fixtures" / "manifests" / "v1"
COMMANDS = {"serve": (), "generate": ("hello",), "bench": ("--prompt-tokens", "8")}


@pytest.mark.parametrize("command", COMMANDS)
def test_buckets_reach_the_runtime(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    taken: list[main.EngineOptions] = []

    def note(path: Path, engine: main.EngineOptions, *args: Any, **kwargs: Any) -> None:
        taken.append(engine)
        raise typer.Exit(0)

    monkeypatch.setattr(main, command, note)
    arguments = [command, str(min(MANIFESTS.glob("*.yaml"))), *COMMANDS[command]]
    assert run([*arguments, "--batch-buckets", "1,6", "--prefill-buckets", "64,512"]) == 0
    assert run([*arguments, "--batch-buckets", "3"]) == 0
    assert run(arguments) == 0
    given = [engine.to_overrides() for engine in taken]
    assert [item.batch_buckets for item in given] == [(1, 6), (3,), None]
    assert [item.prefill_buckets for item in given] == [(64, 512), None, None]


@pytest.mark.parametrize("option", ["--batch-buckets", "--prefill-buckets"])
@pytest.mark.parametrize("text", ["", "4,x", "1.5"])
def test_other_texts_are_wrong_usage(
    capsys: pytest.CaptureFixture[str], option: str, text: str
) -> None:
    assert run(["serve", str(min(MANIFESTS.glob("*.yaml"))), option, text]) == 2
    assert option in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch-buckets", "--prefill-buckets"])
def test_a_number_below_1_is_out_of_range(capsys: pytest.CaptureFixture[str], option: str) -> None:
    manifest = str(min(MANIFESTS.glob("*.yaml")))
    options = ["--device", "cpu", "--max-tokens", "4", option, "8,0"]
    assert run(["generate", manifest, "hello", *options]) == 1
    said = capsys.readouterr().err
    assert "SD832" in said
    assert option in said
