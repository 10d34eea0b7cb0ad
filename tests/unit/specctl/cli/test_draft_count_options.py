"""`--gamma N|auto` and `--length-mode`: what they say together, and what reaches the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from runtime import main
from specctl.cli.app import run
from specctl.cli.shared_options import DraftCounts, LengthMode, parse_draft_counts


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        (None, None, DraftCounts(None, None)),
        ("0", None, DraftCounts(0, None)),
        ("7", None, DraftCounts(7, None)),
        ("7", LengthMode.compact, DraftCounts(7, "compact")),
        ("7", LengthMode.static, DraftCounts(7, "static")),
        ("auto", None, DraftCounts(None, "compact")),
        ("auto", LengthMode.cap_accept, DraftCounts(None, "cap-accept")),
        (None, LengthMode.cap_accept, DraftCounts(None, "cap-accept")),
    ],
)
def test_numbers_and_modes(text: str | None, mode: LengthMode | None, expected: object) -> None:
    assert parse_draft_counts(text, mode) == expected


@pytest.mark.parametrize("text", ["", "-1", "1.5", "Auto", "4,5", "\u0664"])
def test_other_texts_are_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="neither a number"):
        parse_draft_counts(text, None)


def test_auto_and_static_contradict() -> None:
    with pytest.raises(typer.BadParameter, match="static does not"):
        parse_draft_counts("auto", LengthMode.static)


@pytest.mark.parametrize("spelling", ["--gamma", "--num-speculative-tokens"])
def test_serve_hands_them_on(monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    taken: list[main.EngineOptions] = []

    def note(path: Path, engine: main.EngineOptions, *args: Any, **kwargs: Any) -> None:
        taken.append(engine)

    monkeypatch.setattr(main, "serve", note)
    manifests = Path(__file__).parents[4] / "fixtures" / "manifests" / "v1"
    served = min(manifests.glob("*.yaml"))
    assert run(["serve", str(served), spelling, "auto", "--cost-table", "c.json"]) == 0
    (engine,) = taken
    assert (engine.num_speculative_tokens, engine.length_mode) == (None, "compact")
    overrides = engine.to_overrides()
    assert (overrides.length_mode, overrides.cost_table) == ("compact", "c.json")
