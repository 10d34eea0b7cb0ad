"""Runs on several workers: `pytest -n 2 --dist loadfile`, which needs pytest-xdist."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.workers import FileScheduling

if "PYTEST_XDIST_WORKER" in os.environ:  # read when torch is imported: a core for each worker
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Let `tests.workers` share the files out; other kinds of `--dist` stay as they are."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.workers import file_scheduling

    return file_scheduling(config, log)
