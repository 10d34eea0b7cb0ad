"""The text of `inspect` in terminals of any width, and `--strict`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from specctl.cli import app
from specctl.cli.inspect_text import inspect_text
from specctl.ops.inspect import inspect

CHECKPOINTS = Path(__file__).parents[4] / "fixtures" / "checkpoints"
NAMES = ("speculators-eagle3-end-id-absent", "speculators-dspark-clean", "deepseek-mtp-clean",
         "hf-llama-sharded", "container-config-broken", "container-empty")  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("name", NAMES)
def test_lines_fit_and_every_word_is_there(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CHECKPOINTS)
    report = inspect(name)
    text = inspect_text(report, width=width)
    whole = inspect_text(report)
    assert text.split() == whole.split()
    for line in text.splitlines():
        longest = max(map(len, re.sub(r"\[[^]]*\]", "[" + "x" * 8 + "]", line).split()))
        is_whole = line.startswith(("  -->", "source ")) or longest > width - 14
        assert len(line) <= width or is_whole, line


def test_no_escape_without_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKPOINTS)
    for name in NAMES:
        report = inspect(name)
        assert "\033" not in inspect_text(report, width=60)
        colored = inspect_text(report, width=60, color=True)
        assert ("\033[3" in colored) is bool(report.diagnostics)


def test_details_are_shown_with_hostile_values_escaped() -> None:
    report = inspect(str(CHECKPOINTS / "hydra-clean"))
    assert "\ndetails     num_heads: 3; head_arch: mlp; grounded_heads: yes;" in inspect_text(
        report
    )
    odd = {"a\x1b": "b\nc", "d": {"e": [True, None, 1]}}
    text = inspect_text(msgspec.structs.replace(report, details=odd))
    assert "\ndetails     a\\x1b: b\\nc; d: {e: [yes, open, 1]}\n" in text


def test_the_target_that_a_config_names_is_shown() -> None:
    report = inspect(str(CHECKPOINTS / "speculators-eagle3-clean"))
    assert report.roles.source.target_name == "example/tiny-llama"
    assert "made for example/tiny-llama\n" in inspect_text(report)
    assert inspect(str(CHECKPOINTS / "hf-llama-clean")).roles.source.target_name is None


@pytest.mark.parametrize("command", ["inspect", "validate"])
def test_strict_makes_an_unknown_field_an_error(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = Path(shutil.copytree(CHECKPOINTS / "speculators-eagle3-clean", tmp_path / "draft"))
    path = draft / "config.json"
    config = json.loads(path.read_text())
    config["transformer_layer_config"]["residual_scale"] = 0.5
    path.write_text(json.dumps(config, indent=1))
    assert app.run([command, str(draft)]) == 0
    text = capsys.readouterr().out
    assert "SD211 info    config-field-unknown" in text
    assert app.run([command, str(draft), "--strict"]) == 1
    text = capsys.readouterr().out
    assert "SD211 error   config-field-unknown" in text
    assert "residual_scale" in text
