"""Servers are killed at every point of a hand-over: requests end well or with a code, no leak."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.dist.cluster import Cluster, cluster, prompts_and_answers, write_pair

pytestmark = pytest.mark.dist

POINTS = tuple(
    (side, moment) for side in ("prefill", "decode") for moment in ("before", "during", "after")
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("killed"))


def check(found: Cluster, *, num_requests: int, kills: Sequence[tuple[str, str]]) -> None:
    assert not found.wrong, "\n".join(found.wrong[:5])
    assert found.outcomes["right"] >= num_requests
    for side, moment in set(kills):
        assert found.outcomes[f"killed: {side} {moment}"] == kills.count((side, moment))
    for server in found.servers:
        server.wait_answering()
        server.wait_idle()


def kills_and_requests(manifest: Path, directory: Path, *, count: int, kills: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 (a failure is repeated with it)
    order = [POINTS[i % len(POINTS)] for i in range(kills)]
    random.Random(seed).shuffle(order)
    work = prompts_and_answers(manifest, min(count, 100), seed)
    work = [work[i % len(work)] for i in range(count)]
    with cluster(manifest, directory, silence_s=3) as found:
        found.run(work, order, seed=seed)
        print(dict(found.outcomes))  # noqa: T201
        check(found, num_requests=count, kills=order)


@pytest.mark.timeout(600)
def test_sixty_requests_and_six_kills(manifest: Path, tmp_path: Path) -> None:
    kills_and_requests(manifest, tmp_path, count=60, kills=6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_requests_and_sixty_kills(manifest: Path, tmp_path: Path) -> None:
    kills_and_requests(manifest, tmp_path, count=1000, kills=60)
