"""How `pytest -n 2 --dist loadfile` shares the tests out to its workers.

A file is never divided, so that its fixtures are made once. Files begin in the order of their
folders, not by their number of tests: the long ones come before `tests/unit`, and small ones are
left for the end, when the workers should finish together.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# These start servers and ranks that wait for each other by the clock. On one worker they meet no
# more processes than in a run without workers.
ONE_AT_A_TIME = ("tests/dist/", "tests/e2e/")


def unit_of(nodeid: str) -> str:
    """Return what a test stays together with: its file, or all tests of processes."""
    return "processes" if nodeid.startswith(ONE_AT_A_TIME) else nodeid.partition("::")[0]


class FileScheduling(LoadScopeScheduling):
    """Gives out units in the order of collection."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def file_scheduling(config: pytest.Config, log: Any) -> FileScheduling:
    """Return the scheduler of a run."""
    config.option.loadscopereorder = False
    return FileScheduling(config, log)
