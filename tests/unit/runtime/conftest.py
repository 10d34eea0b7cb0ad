"""Worlds that several modules of tests run engines over; each module has its own."""

from __future__ import annotations

import pytest

from tests.engine_harness import World
from tests.fake_graph import make_agreeing_world


@pytest.fixture(scope="module")
def agreeing(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A draft that is often right."""
    return make_agreeing_world(tmp_path_factory.mktemp("agreeing"))
