"""Generated pages are fresh, options frozen, codes documented and shown by a fixture or test."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from runtime.config import Overrides
from runtime.config.ledger import option_name
from specctl.cli.registry import BY_NAME, COMMANDS
from specctl.contract.codes import CODES

ROOT = Path(__file__).parents[2]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*\b")
# Not of a command: they follow another program's name, or go without a command.
OTHER_OPTIONS = {
    "--upgrade": "pip install",
    "--model": "modelscope download",
    "--revision": "hf download",
    "--help": "specctl",
    "--version": "specctl",
}
FIXTURE_LISTS = ("fixtures/expected.yaml", "fixtures/manifests/expected.yaml")


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "_generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh(generator: ModuleType) -> None:
    assert generator.stale() == [], "run `python docs/_generate.py`"


def test_a_changed_code_makes_its_page_stale(
    generator: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "CODES", {"SD701": CODES["SD701"]})
    assert generator.stale() == ["diagnostics.md"]


def test_command_line_options_are_frozen(generator: ModuleType) -> None:
    frozen = json.loads(generator.FROZEN_CLI.read_text("utf-8"))
    assert generator.cli_options() == frozen, (
        "a new option is a decision: `python docs/_generate.py --freeze-cli`"
    )


def test_every_command_has_help_with_examples(generator: ModuleType) -> None:
    for command in COMMANDS:
        assert command.examples, command.name
        assert all(line.startswith("specctl ") for line in command.examples)
        undocumented = [p["names"] for p in generator.parameters(command) if not p["help"]]
        assert not undocumented, f"{command.name}: {undocumented}"


def test_every_option_in_an_example_exists(generator: ModuleType) -> None:
    for command in COMMANDS:
        known = {name for p in generator.parameters(command) for name in p["names"]}
        for example in command.examples:
            used = re.findall(r"(?<!\S)--?[a-z][a-z-]*", example.partition("|")[0])
            assert set(used) <= known, example


def texts(path: Path) -> Iterator[str]:
    """Yield the literals of a module but docstrings and the options of its own parser."""
    tree = ast.parse(path.read_text("utf-8"))
    passed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            passed.add(id(node.value))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            passed.update(map(id, node.args))
        elif id(node) not in passed and isinstance(node, ast.Constant):
            yield str(node.value)


def test_every_option_that_a_text_names_exists(generator: ModuleType) -> None:
    """Whatever a diagnostic or another message tells a user to give can be given."""
    known = {name for c in COMMANDS for p in generator.parameters(c) for name in p["names"]}
    named: dict[str, set[str]] = defaultdict(set)
    for path in [*ROOT.glob("specctl/**/*.py"), *ROOT.glob("runtime/**/*.py")]:
        if "html" not in path.parts:  # its texts are styles
            for option in OPTION.findall("\n".join(texts(path))):
                named[option].add(path.relative_to(ROOT).as_posix())
    assert len(named) > 50
    unknown = {option: places for option, places in named.items() if option not in known}
    assert unknown.keys() == OTHER_OPTIONS.keys(), unknown


def test_every_setting_is_called_by_an_option_that_exists(generator: ModuleType) -> None:
    """SD805, SD832 and others are about a setting, and name the option that sets it."""
    options = {name for p in generator.parameters(BY_NAME["serve"]) for name in p["names"]}
    options |= {"--force-anchor-layout"}  # for diagnosis: of `generate` and `bench`
    missing = [item.name for item in fields(Overrides) if option_name(item.name) not in options]
    assert not missing


def test_every_code_has_a_page() -> None:
    page = (ROOT / "docs" / "reference" / "diagnostics.md").read_text("utf-8")
    for code in CODES.values():
        assert f"## {code.code} {code.slug}\n" in page


@pytest.mark.parametrize("code", CODES.values(), ids=lambda code: code.code)
def test_code_texts_are_written_for_users(code: object) -> None:
    entry = CODES[getattr(code, "code", "")]
    assert re.fullmatch(r"SD[1-9]\d\d", entry.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", entry.slug)
    assert entry.summary.endswith(".")
    assert len(entry.why) > 20
    assert entry.why.endswith(".")
    assert entry.fix
    assert not entry.fix.endswith(".")
    assert "!" not in entry.summary + entry.fix


def test_names_of_codes_are_unique() -> None:
    slugs = [code.slug for code in CODES.values()]
    assert len(slugs) == len(set(slugs))


def codes_in_fixtures() -> set[str]:
    found: set[str] = set()
    for name in FIXTURE_LISTS:
        path = ROOT / name
        if path.is_file():
            for entry in (yaml.safe_load(path.read_text("utf-8")) or {}).values():
                found.update(entry["codes"])
    for path in (ROOT / "fixtures" / "requests").glob("*.json"):
        found.update(re.findall(r"SD9\d\d", path.read_text("utf-8")))
    return found


def codes_in_tests() -> set[str]:
    texts = [
        path.read_text("utf-8")
        for path in (ROOT / "tests").rglob("*.py")
        if path.parent != Path(__file__).parent
    ]
    return set(re.findall(r"SD\d{3}", "\n".join(texts)))


def test_every_code_of_files_and_manifests_has_a_fixture() -> None:
    """What a directory or a manifest alone can show stands in fixtures/, for users to look at."""
    fixtures = codes_in_fixtures()
    missing = {code for code in CODES if code[2] in "1234567"} - fixtures - NEEDS_A_COMMAND
    assert not missing


def test_every_code_is_shown_somewhere() -> None:
    missing = set(CODES) - codes_in_fixtures() - codes_in_tests()
    assert not missing


# Codes of hubs, options and token maps: no directory shows them, a named test does.
NEEDS_A_COMMAND = {c for c in CODES if "SD420" <= c < "SD500" or "SD600" <= c < "SD700"} | {
    *("SD120", "SD150", "SD212", "SD213", "SD713", "SD714", "SD715", "SD716"),
    *(f"SD{number}" for number in range(136, 150) if number != 148),
}
