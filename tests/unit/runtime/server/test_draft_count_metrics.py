"""How many drafts rounds had, in `/metrics`, and how they are chosen, in the line at the start."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.config import LengthMode, Overrides, resolve_config
from runtime.engine.device_rounds import captured_contexts, round_menu
from runtime.engine.stats import Tally
from runtime.graphs.capture import GraphReport
from runtime.graphs.key import round_key
from runtime.server.metrics import MetricsCollector
from runtime.server.start import drafts_text
from runtime.spec.types import RoundResult
from specctl.contract.manifest import Manifest
from tests.engine_harness import World, make_world


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("metrics"))


def _stats() -> Any:
    tally = Tally(4)
    for num_drafts, accepted in (((4, 2), (1, 2)), ((2, 0), (0, 0))):
        result = RoundResult(
            committed=tuple((5,) * (count + 1) for count in accepted),
            num_drafts=num_drafts,
            num_accepted_drafts=accepted,
        )
        key = round_key(num_drafts, draft_width=1, batch_buckets=(2,))
        tally.count_rounds(result, key, num_rounds=2)
    return tally.snapshot(
        num_running=0,
        num_waiting=0,
        num_preemptions=0,
        num_kv_blocks=1,
        num_free_kv_blocks=1,
        num_cached_kv_blocks=0,
        graphs=GraphReport(),
    )


def test_rounds_are_counted_by_drafts() -> None:
    stats = _stats()
    assert stats.rounds_by_drafts == {0: 1, 2: 2, 4: 1}
    front = SimpleNamespace(
        engine=SimpleNamespace(stats=stats), outcomes=Counter[str](), num_open=0
    )
    collector = MetricsCollector(front, verification="seeded", proposer="eagle3", model="m")  # type: ignore[arg-type]
    found = {
        sample.labels["drafts"]: sample.value
        for metric in collector.collect()
        for sample in metric.samples
        if sample.name == "specctl_rounds_by_drafts_total"
    }
    assert found == {"0": 1, "2": 2, "4": 1}


@pytest.mark.parametrize(
    ("mode", "text"),
    [
        ("static", "4 drafts a round"),
        ("compact", "up to 4 drafts a round as costs say (compact)"),
        ("cap-accept", "up to 4 drafts a round as costs say (cap-accept)"),
    ],
)
def test_sizes_of_a_mode(world: World, mode: LengthMode, text: str) -> None:
    config = _config(world.manifest, mode)
    assert drafts_text(config) == text
    menu = round_menu(config)
    assert menu.draft_counts == ((4,) if mode == "static" else (0, 1, 2, 3, 4))
    assert menu.batches == (1, 2, 4, 6)
    contexts = captured_contexts(replace(config, max_model_len=1000))
    assert contexts == ((256, 1000) if mode == "compact" else (256, 512, 1000))
    assert captured_contexts(replace(config, max_model_len=200)) == (200,)
    wide = replace(config, max_model_len=1000, num_speculative_tokens=256)
    assert captured_contexts(wide) == (512, 1000), "257 rows are more than 256 positions"


def _config(manifest: Manifest, mode: LengthMode) -> Any:
    given = Overrides(
        device="cpu", num_speculative_tokens=4, max_num_requests=6, length_mode=mode,
        batch_buckets=(1, 2, 4),
    )  # fmt: skip
    return resolve_config(manifest, given)
