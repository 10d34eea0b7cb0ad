"""Fuzzing with hypothesis: 2,000 cases in CI, `SPECCTL_FUZZ_CASES` in the nightly script."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz_entry import judge
from tests.fuzz_strategies import (
    CHECKPOINTS,
    CONFIG,
    INDEX,
    WEIGHTS,
    Files,
    LongFile,
    configs,
    edited_fixtures,
    indexes,
    long_files,
    weight_files,
)

CASES = int(os.environ.get("SPECCTL_FUZZ_CASES", "2000"))
PER_ROUND = 2000  # the memory of one hypothesis run grows with its examples
ROUNDS = max(1, CASES // PER_ROUND)
TARGET = CHECKPOINTS / "hf-llama-clean"
DRAFT = CHECKPOINTS / "speculators-eagle3-clean"


def share(percent: int) -> settings:
    """Return settings for this share of a round."""
    return settings(
        max_examples=min(CASES, PER_ROUND) * percent // 100,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        database=None,
    )


rounds = pytest.mark.parametrize("number", range(ROUNDS))


@rounds
def test_generated_weights_and_config(number: int) -> None:
    @seed(number)
    @share(20)
    @given(weight_files, configs)
    def run(weights: bytes, config: bytes) -> None:
        judge({WEIGHTS: weights, CONFIG: config})

    run()


@rounds
def test_generated_index_over_generated_shards(number: int) -> None:
    @seed(number)
    @share(14)
    @given(indexes, weight_files, weight_files)
    def run(index: bytes, first: bytes, second: bytes) -> None:
        judge({INDEX: index, "a.safetensors": first, WEIGHTS: second})

    run()


@rounds
def test_changed_fixtures(number: int) -> None:
    @seed(number)
    @share(35)
    @given(edited_fixtures())
    def run(files: Files) -> None:
        judge(files)

    run()


@rounds
def test_changed_fixtures_in_a_pair(number: int) -> None:
    @seed(number)
    @share(30)
    @given(edited_fixtures(), st.booleans())
    def run(files: Files, is_target: bool) -> None:
        if is_target:
            judge(files, draft=DRAFT)
        else:
            judge(files, TARGET)

    run()


@rounds
def test_long_texts(number: int) -> None:
    @seed(number)
    @share(1)
    @given(long_files)
    def run(recipe: LongFile) -> None:
        judge(recipe.files())

    run()
