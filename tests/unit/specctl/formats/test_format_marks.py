"""The table of docs/reference/formats.md, walked: a fixture for each format, and what it allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from specctl import formats
from specctl.checkpoint import open_checkpoint
from specctl.formats.format import Format
from specctl.formats.registry import DRAFT_FORMATS
from specctl.ops.inspect import inspect
from specctl.ops.load import load
from specctl.ops.validate import validate

ROOT = Path(__file__).resolve().parents[4]
FIXTURES = ROOT / "fixtures"
PAGE = (ROOT / "docs" / "reference" / "formats.md").read_text("utf-8")
EXPECTED = yaml.safe_load((FIXTURES / "expected.yaml").read_text("utf-8"))
TABLE = PAGE[: PAGE.index("# Tensor roles")]
READ = tuple(entry for entry in DRAFT_FORMATS if entry.read is not None)


def _names(path: Path) -> set[str]:
    found = formats.detect(open_checkpoint(path))
    return {name for name in (found.format, found.bundled) if name is not None}


@pytest.fixture(scope="module")
def clean() -> dict[str, Path]:
    """Return format -> a fixture of it without an error; a dated wrapper is a warning."""
    found: dict[str, Path] = {}
    for name in sorted(EXPECTED, key=lambda name: (not name.endswith("-clean"), name)):
        path = FIXTURES / name
        if "/container-" in name or not path.is_dir():
            continue
        loaded = load(str(path))
        if any(d.severity == "error" for d in loaded.diagnostics):
            continue
        for form in {loaded.detection.format, loaded.detection.bundled} - {None, "huggingface"}:
            found.setdefault(str(form), path)
    return found


@pytest.mark.parametrize("name", [entry.name for entry in READ])
def test_a_format_that_is_read_has_a_clean_fixture(name: str, clean: dict[str, Path]) -> None:
    path = clean[name]
    assert name in _names(path)
    report = inspect(str(path))
    assert [d.code for d in report.diagnostics if d.severity == "error"] == []
    assert report.tensors.num_tensors
    assert validate([str(path)]).num_errors == 0


@pytest.mark.parametrize("entry", DRAFT_FORMATS, ids=lambda entry: entry.name)
def test_the_page_has_the_marks_of_the_registry(entry: Format) -> None:
    (row,) = [line for line in TABLE.splitlines() if f"| `{entry.name}` |" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    is_read, is_written = entry.read is not None, entry.write is not None
    marks = ["yes" if mark else "-" for mark in (is_read, is_read, is_written, is_written)]
    assert cells[-4:] == marks
