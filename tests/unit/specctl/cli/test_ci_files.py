"""The pre-commit hook and the GitHub Action that other repositories use, run as those run them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from specctl.cli.output import Format

ROOT = Path(__file__).parents[4]
CHECKPOINTS = "fixtures/checkpoints"
CLEAN = f"{CHECKPOINTS}/hf-llama-clean"
BROKEN = f"{CHECKPOINTS}/speculators-dspark-width-mismatch"
ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))


def run(arguments: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120, **options
    )


# pre-commit


def hook(files: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the hook's entry on the files that its pattern lets through."""
    passed = [name for name in files if re.search(HOOK["files"], name)]
    command, *arguments = HOOK["entry"].split()
    assert command == "specctl"
    return run([sys.executable, "-m", "specctl", *arguments, *passed])


def files_of(*directories: str) -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for directory in directories
        for path in sorted((ROOT / directory).iterdir())
    ]


def test_the_hook_is_complete() -> None:
    assert set(HOOK) >= {"id", "name", "description", "entry", "language", "files"}
    assert HOOK["id"] == "specctl-validate"
    assert HOOK["require_serial"], "one process, so that a checkpoint is checked once"


@pytest.mark.parametrize(
    ("name", "is_wanted"),
    [
        ("a/config.json", True), ("config.json", True),
        ("a/model-00001-of-00002.safetensors", True),
        ("a/model.safetensors.index.json", True), ("pytorch_model.bin", True),
        ("manifest.yaml", True), ("x/manifest.yml", True), ("a/my_config.json", False),
        ("a/README.md", False), ("package.json", False), ("a/config.json.bak", False),
        ("training_args.bin", False),
    ],
)  # fmt: skip
def test_the_hook_takes_files_of_checkpoints(name: str, is_wanted: bool) -> None:
    assert bool(re.search(HOOK["files"], name)) is is_wanted


def test_the_hook_on_fixtures() -> None:
    clean = hook(files_of(CLEAN, f"{CHECKPOINTS}/hf-llama-sharded"))
    assert (clean.returncode, clean.stdout) == (0, "2 sources: clean\n"), clean.stderr
    broken = hook(files_of(BROKEN, CLEAN))
    assert broken.returncode == 1
    lines = broken.stdout.splitlines()
    assert len(lines) == 2, "each checkpoint once, however many of its files changed"
    assert lines[0].startswith(f"{BROKEN}/config.json:1:")
    assert " SD302 error " in lines[0]


# GitHub


def test_the_page_shows_what_exists() -> None:
    page = (ROOT / "docs" / "how-to" / "validate-in-ci.md").read_text("utf-8")
    first, second = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.S))
    assert first["repos"][0]["hooks"][0]["id"] == HOOK["id"]
    (step,) = (s for s in second["jobs"]["drafts"]["steps"] if "specctl@" in s["uses"])
    assert set(step["with"]) <= set(ACTION["inputs"])
    for name in ACTION["inputs"]:
        assert f"`{name}`" in page
    for format in Format:
        assert f"| `{format.value}` |" in page


EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")


class Runner:
    """Runs the shell steps of the composite action; `uses` steps are left out."""

    def __init__(self, directory: Path, inputs: dict[str, str]) -> None:
        self.directory = directory
        defaults = {name: entry.get("default", "") for name, entry in ACTION["inputs"].items()}
        self.values = {f"inputs.{k}": v for k, v in (defaults | inputs).items()}
        self.values |= {
            "runner.temp": str(directory),
            "github.action_path": str(ROOT),
            "steps.python.outputs.python-path": str(self._stand_in()),
        }
        self.output = ""

    def _stand_in(self) -> Path:
        """Return a Python whose `venv` holds the package under test instead of an installed one."""
        script = self.directory / "python"
        script.write_text(
            f"""#!/bin/bash
            set -eu
            [ "$1 $2" = "-m venv" ]
            mkdir -p "$3/bin"
            printf '#!/bin/bash\\necho "$@" >> {self.directory}/pip.log\\n' > "$3/bin/python"
            printf '#!/bin/bash\\nexec {sys.executable} -m specctl "$@"\\n' > "$3/bin/specctl"
            chmod +x "$3/bin/python" "$3/bin/specctl"
            """
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return script

    def text(self, value: str) -> str:
        """Return a value with its expressions replaced; an unknown one is an error of the file."""
        return EXPRESSION.sub(lambda match: self._value(match[1]), value)

    def _value(self, expression: str) -> str:
        first, _, second = expression.partition(" || ")
        return self.values[first] or (self.values[second] if second else "")

    def run(self) -> int:
        """Run the steps until one fails; returns its status."""
        for step in ACTION["runs"]["steps"]:
            if "run" not in step:
                continue
            assert "${{" not in step["run"], "inputs reach a shell through its environment only"
            file = self.directory / "output"
            file.write_text("")
            env = {name: self.text(value) for name, value in step["env"].items()}
            done = run(
                ["bash", "-c", step["run"]], env={**os.environ, **env, "GITHUB_OUTPUT": str(file)}
            )
            self.output += done.stdout + done.stderr
            for line in file.read_text().splitlines():
                name, _, value = line.partition("=")
                self.values[f"steps.{step['id']}.outputs.{name}"] = value
            if done.returncode:
                return done.returncode
        return 0


def test_the_action_is_well_formed() -> None:
    assert ACTION["runs"]["using"] == "composite"
    assert ACTION["inputs"]["sources"]["required"] is True
    for name, entry in ACTION["inputs"].items():
        assert entry["description"], name
        assert entry.get("required") or isinstance(entry["default"], str), name
    text = (ROOT / "action.yml").read_text("utf-8")
    used = set(re.findall(r"inputs\.([a-z-]+)", text))
    assert used == set(ACTION["inputs"]), "each input is used, none is invented"
    for step in ACTION["runs"]["steps"]:
        assert ("run" in step) is ("shell" in step)
        assert ("run" in step) is not ("uses" in step)


def test_the_action_on_a_clean_pair(tmp_path: Path) -> None:
    source = f"{CHECKPOINTS}/speculators-eagle3-clean"
    runner = Runner(tmp_path, {"sources": source, "target": CLEAN})
    assert runner.run() == 0, runner.output
    assert runner.output == ""
    installed = (tmp_path / "pip.log").read_text()
    assert installed == f"-m pip install --quiet --disable-pip-version-check {ROOT}\n"


def test_the_action_annotates_and_then_fails(tmp_path: Path) -> None:
    sarif = tmp_path / "found.sarif"
    inputs = {
        "sources": f"\n  {BROKEN}/config.json  \n\n{CHECKPOINTS}/container-z*\n",
        "args": "--error SD107\n--ignore  SD301",
        "sarif-file": str(sarif),
        "specctl": "specctl==0.1.0",
    }
    runner = Runner(tmp_path, inputs)
    assert runner.run() == 1
    lines = runner.output.splitlines()
    assert any(f"file={BROKEN}/config.json,line=1" in line for line in lines)
    assert any("SD107" in line for line in lines)
    assert all(line.startswith("::") for line in lines)
    log = json.loads(sarif.read_text())
    assert {r["ruleId"] for r in log["runs"][0]["results"]} >= {"SD107", "SD302"}
    assert runner.values["steps.validate.outputs.exit-status"] == "1"
    assert (tmp_path / "pip.log").read_text().endswith(" specctl==0.1.0\n")


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ({"sources": " \n "}, "::error::the input sources"),
        ({"sources": CLEAN, "args": "--no-such-option"}, "no option `--no-such-option`"),
        ({"sources": CLEAN, "args": "--ignore SD999x"}, "there is no code `SD999x`"),
    ],
)
def test_wrong_inputs_stop_the_action(tmp_path: Path, inputs: dict[str, str], text: str) -> None:
    runner = Runner(tmp_path, inputs)
    assert runner.run() == 2
    assert text in runner.output


def test_inputs_are_never_code(tmp_path: Path) -> None:
    inputs = {"sources": f"$(touch {tmp_path}/owned)\n`id`\n-x", "target": "; exit 0"}
    runner = Runner(tmp_path, inputs)
    assert runner.run() == 1
    assert runner.output.count("SD119") >= 3
    assert not (tmp_path / "owned").exists()
