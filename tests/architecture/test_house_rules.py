"""Rules of the house that a machine can check: sizes, docstrings, ASCII, paths."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
DOCUMENTED = ("specctl/contract", "runtime/spec", "runtime/disagg", "runtime/kernels")
PLACES = ("specctl", "runtime", "tests", "fixtures", "docs", ".ci")
TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".json", ".txt", ""}
# Built from parts, so that this file does not contain what it forbids.
MACHINE_PATHS = re.compile(
    "|".join((r"(?<![\w.])/" + name + r"/[\w.]") for name in ("work", "opt", "root", "home"))
)


def python_files(*places: str) -> list[Path]:
    return [path for place in places for path in sorted((ROOT / place).rglob("*.py"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def test_no_file_is_longer_than_the_cap() -> None:
    sizes = {name(p): len(p.read_text("utf-8").splitlines()) for p in python_files(*PLACES)}
    too_long = {path: lines for path, lines in sizes.items() if lines > MAX_FILE_LINES}
    assert not too_long


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement on: options with their help make long signatures."""
    first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
    return (node.end_lineno or first.lineno) - first.lineno + 1


def test_no_function_is_longer_than_two_screens() -> None:
    too_long = [
        f"{name(path)}:{node.lineno} {node.name}"
        for path in python_files("specctl", "runtime")
        for node in functions(ast.parse(path.read_text("utf-8")))
        if body_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not too_long


def undocumented(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text("utf-8"))
    if not (ast.get_docstring(tree) or "").strip():
        yield f"{name(path)}: module"
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if node.name.startswith("_"):
            continue
        if ast.get_docstring(node) is None:
            yield f"{name(path)}:{node.lineno} {node.name}"
        members = node.body if isinstance(node, ast.ClassDef) else []
        for member in members:
            is_public = isinstance(member, ast.FunctionDef) and not member.name.startswith("_")
            if is_public and ast.get_docstring(member) is None:
                yield f"{name(path)}:{member.lineno} {node.name}.{member.name}"


def test_public_names_of_contract_spec_disagg_and_kernels_are_documented() -> None:
    missing = [line for path in python_files(*DOCUMENTED) for line in undocumented(path)]
    assert not missing, "\n".join(missing)


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name(path)
        for path in python_files("specctl", "runtime")
        if not (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").strip()
    ]
    assert not silent


def test_code_is_ascii() -> None:
    wrong = [
        name(path)
        for path in python_files("specctl", "runtime", "tests", "docs")
        if not path.read_text("utf-8").isascii()
    ]
    assert not wrong


def test_nothing_names_a_path_of_one_machine() -> None:
    files = [
        path
        for place in PLACES
        for path in sorted((ROOT / place).rglob("*"))
        if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts
    ]
    wrong: list[str] = []
    for path in [*files, ROOT / "README.md", ROOT / "pyproject.toml"]:
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue  # a fixture that is broken on purpose
        wrong += [f"{name(path)}: {found.group()}" for found in MACHINE_PATHS.finditer(text)]
    assert not wrong, "\n".join(wrong)


def test_no_loose_ends() -> None:
    pattern = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XXX)\b|raise NotImplemented" + "Error")
    wrong = [
        f"{name(path)}: {found.group()}"
        for path in python_files("specctl", "runtime")
        for found in pattern.finditer(path.read_text("utf-8"))
    ]
    assert not wrong
