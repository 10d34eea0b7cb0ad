"""What modules of tests about prefills on the device share."""

from __future__ import annotations

import pytest

from tests.prefill_cases import KINDS, PrefillCase, prefill_world


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PrefillCase:
    """Every kind of proposer over a world of its own."""
    return PrefillCase(
        request.param, prefill_world(tmp_path_factory.mktemp("kinds"), request.param)
    )
