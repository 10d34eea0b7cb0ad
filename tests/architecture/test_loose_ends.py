"""Code that only tests use, tests that assert nothing, links that lead nowhere."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Twins that tests compare with, and what shows a test the inside of something.
FOR_TESTS = {
    "head_VD": "loading is compared by it; the forward reads the shard that it shows",
    "num_submitted": "how far a pipeline got, for a test that stops it",
    "split_units": "the readable twin of specctl.tokenmap.scan",
}
ASSERTING = re.compile(r"\b(?:assert|raise)\s|\.(?:raises|warns|fail|assert_close|validate)\(")
Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield functions and methods; what is nested in one belongs to it."""
    for node in tree.body:
        if isinstance(node, Function):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (part for part in node.body if isinstance(part, Function))


def test_every_test_asserts() -> None:
    """By itself, by `pytest.raises` or its like, or by a helper that does."""
    texts: dict[str, list[str]] = defaultdict(list)
    places: dict[str, Path] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        source = path.read_text("utf-8")
        lines = source.splitlines()
        for node in functions(ast.parse(source)):
            texts[node.name].append("\n".join(lines[node.body[0].lineno - 1 : node.end_lineno]))
            if node.name.startswith("test_"):
                places[node.name] = path
    words = {name: set(re.findall(r"\w+", "\n".join(found))) for name, found in texts.items()}
    asserting = {name for name, found in texts.items() if any(map(ASSERTING.search, found))}
    while more := {n for n, found in words.items() if n not in asserting and found & asserting}:
        asserting |= more
    silent = [f"{path.name} {name}" for name, path in places.items() if name not in asserting]
    assert not silent


def definitions(tree: ast.Module) -> Iterator[str]:
    """Yield functions, classes, and methods of classes that inherit from nothing."""
    for node in tree.body:
        if isinstance(node, (*Function, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            yield from (part.name for part in node.body if isinstance(part, Function))


def uses(tree: ast.Module) -> Iterator[str]:
    """Yield names that are read, and texts: registries name functions by them."""
    exports = {
        id(part)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for part in ast.walk(node.value)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield node.name
        elif isinstance(node, ast.Constant) and id(node) not in exports:
            yield str(node.value).rpartition(":")[2].replace("-", "_")


@pytest.mark.slow
def test_no_code_is_there_for_tests_alone() -> None:
    """By name only: one that something else has as well is not found."""
    trees = {
        path: ast.parse(path.read_text("utf-8"))
        for place in ("runtime", "specctl", "docs", "fixtures")
        for path in sorted((ROOT / place).rglob("*.py"))
    }
    used = {name for tree in trees.values() for name in uses(tree)}
    unused = [
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for path, tree in trees.items()
        if path.relative_to(ROOT).parts[0] in ("runtime", "specctl")
        for name in definitions(tree)
        if name not in used and not name.startswith("__") and name not in FOR_TESTS
    ]
    assert not unused


def anchors(page: Path) -> set[str]:
    """Return what a link into a page may name: its headings and its `<a id=...>`."""
    text = page.read_text("utf-8")
    headings = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
    return named | set(re.findall(r'<a id="([^"]+)">', text))


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    places = ("tutorials", "how-to", "explanation", "reference")
    pages = [path for place in places for path in sorted((ROOT / "docs" / place).glob("*.md"))]
    assert pages
    assert not [page.name for page in pages if f"({page.parent.name}/{page.name})" not in index]


def test_links_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    known = {page: anchors(page) for page in pages}
    dead = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if re.match(r"[a-z]+:", link):
                continue
            if not target.exists() or (anchor and anchor not in known.get(target, {anchor})):
                dead.append(f"{page.relative_to(ROOT).as_posix()}: {link}")
    assert not dead
