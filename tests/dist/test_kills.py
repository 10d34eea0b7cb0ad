"""Servers are killed at every point of a hand-over: requests end well or with a code, no leak."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.config import Overrides
from runtime.engine.llm import LLM
from runtime.engine.request import RequestInput
from tests.dist.cluster import Cluster, cluster
from tests.tiny import write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import tiny_manifest, write_manifest

pytestmark = pytest.mark.dist

POINTS = tuple(
    (side, moment) for side in ("prefill", "decode") for moment in ("before", "during", "after")
)
CONTEXT = 512


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("killed")
    target = write_tiny_target(
        directory / "tiny-target", num_layers=2, max_position_embeddings=CONTEXT
    )
    draft = write_tiny_eagle3(
        directory / "draft", target, boundary_ids=(0, 1, 2), max_position_embeddings=CONTEXT
    )
    return write_manifest(directory, tiny_manifest(target, draft))


def prompts_and_answers(manifest: Path, count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    """Return prompts and what one server alone says to them."""
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(3, 60) for _ in range(rng.choice((3, 17, 40, 90, 200)))]
        for _ in range(count)
    ]
    llm = LLM.from_manifest(manifest, Overrides(device="cpu"), needs_tokenizer=False)
    inputs = [
        RequestInput(request_id=str(i), prompt_ids_target=prompt, max_tokens=rng.randrange(4, 40))
        for i, prompt in enumerate(prompts)
    ]
    answers = [list(done.ids_target) for done in llm.generate(inputs)]
    return list(zip(prompts, answers, strict=True))


def check(found: Cluster, *, num_requests: int, kills: Sequence[tuple[str, str]]) -> None:
    assert not found.wrong, "\n".join(found.wrong[:5])
    assert sum(c for k, c in found.outcomes.items() if not k.startswith("kill")) >= num_requests
    for side, moment in set(kills):
        assert found.outcomes[f"killed: {side} {moment}"] == kills.count((side, moment))
    assert found.outcomes["right"] > num_requests / 2
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


@pytest.mark.timeout(240)
def test_sixty_requests_and_six_kills(manifest: Path, tmp_path: Path) -> None:
    kills_and_requests(manifest, tmp_path, count=60, kills=6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_requests_and_sixty_kills(manifest: Path, tmp_path: Path) -> None:
    kills_and_requests(manifest, tmp_path, count=1000, kills=60)
