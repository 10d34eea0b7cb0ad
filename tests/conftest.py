"""Runs on several workers: `pytest -n 2 --dist loadfile`, which needs pytest-xdist."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from tests.long_first import long_first

if TYPE_CHECKING:
    from tests.workers import FileScheduling

with suppress(ModuleNotFoundError):  # tests of GPUs need none of it
    from hypothesis import HealthCheck, settings

    # How long an example takes is a matter of the machine and of what else runs there.
    settings.register_profile(
        "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any-machine")

if "PYTEST_XDIST_WORKER" in os.environ:  # read when torch is imported: a core for each worker
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Let `tests.workers` share the files out; other kinds of `--dist` stay as they are."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.workers import file_scheduling

    return file_scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker how tests are shared out: its own option says that they are not."""
    node.workerinput["dist"] = node.config.getoption("dist")


@pytest.hookimpl(trylast=True)  # what was not asked for is gone by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests where workers begin that steal from each other."""
    told: dict[str, Any] = getattr(config, "workerinput", {})
    if told.get("dist") == "worksteal":
        items[:] = long_first(
            items, lambda item: item.get_closest_marker("long") is not None, told["workercount"]
        )
