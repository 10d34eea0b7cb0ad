"""Rows of the registry: what they name exists, and is not imported before it is called."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from specctl.formats.format import Late
from specctl.formats.registry import DRAFT_FORMATS

READERS = [(entry.name, entry.read) for entry in DRAFT_FORMATS if entry.read is not None]
WRITERS = [(entry.name, entry.write) for entry in DRAFT_FORMATS if entry.write is not None]


def assert_takes_one_more(late: Late[object, object], given: str) -> None:
    """Assert that the function takes the row's arguments and `given`."""
    parameters = inspect.signature(late.resolve()).bind(*late.first, object()).arguments
    assert list(parameters)[-1] == given


@pytest.mark.parametrize(("name", "read"), READERS, ids=[name for name, _ in READERS])
def test_a_row_names_a_reader(name: str, read: Late[object, object]) -> None:
    assert_takes_one_more(read, "checkpoint")


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])
def test_a_row_names_a_writer(name: str, write: Late[object, object]) -> None:
    assert_takes_one_more(write, "request")


def test_detection_imports_no_reader_and_no_writer() -> None:
    program = "import sys, specctl.formats.detect; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    late = {row.module for _, row in READERS} | {row.module for _, row in WRITERS}
    assert late
    assert late & set(done.stdout.split()) == set()
