"""Settings of the engine: what a command line can give, and what of it reaches the runtime."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from runtime import main
from runtime.config import Overrides
from specctl.cli.app import run

MANIFEST = min((Path(__file__).parents[4] / "fixtures" / "manifests" / "v1").glob("*.yaml"))
COMMANDS = {"serve": (), "generate": ("hello",), "bench": ("--prompt-tokens", "8")}


def given(monkeypatch: pytest.MonkeyPatch, command: str, *options: str) -> Overrides:
    """Return what a command hands over."""
    taken: list[main.EngineOptions] = []

    def note(path: Path, engine: main.EngineOptions, *args: Any, **kwargs: Any) -> None:
        taken.append(engine)
        raise typer.Exit(0)

    monkeypatch.setattr(main, command, note)
    assert run([command, str(MANIFEST), *COMMANDS[command], *options]) == 0
    return taken[0].to_overrides()


def test_every_setting_goes_through_the_door_under_its_name() -> None:
    names = {item.name for item in fields(Overrides)}
    assert {item.name for item in fields(main.EngineOptions)} == names
    for name in names:
        marked = replace(main.EngineOptions(), **{name: "given"})
        assert marked.to_overrides() == replace(Overrides(), **{name: "given"})


@pytest.mark.parametrize("command", COMMANDS)
def test_the_length_of_a_look_up_reaches_the_runtime(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    found = given(monkeypatch, command, "--proposer", "ngram", "--max-ngram", "7")
    assert (found.proposer, found.max_ngram) == ("ngram", 7)


def test_sizes_of_blocks_and_chunks_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--kv-block-size", "8", "--prefill-chunk-size", "24")
    found = given(monkeypatch, "serve", *sizes)
    assert (found.kv_block_size, found.prefill_chunk_size) == (8, 24)
    nothing = given(monkeypatch, "serve")
    assert (nothing.kv_block_size, nothing.prefill_chunk_size, nothing.max_ngram) == (None,) * 3


def test_a_length_out_of_range_is_named_by_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--device", "cpu", "--max-tokens", "4", "--proposer", "ngram", "--max-ngram")
    assert run(["generate", str(MANIFEST), "hello", *options, "33"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "SD832" in said
    assert "--max-ngram" in said
    assert "at most 32" in said
