"""A stage before the last sends its layers while they are computed, each after its own kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runtime.engine.request import RequestInput
from runtime.kv import KVLayer
from specctl.contract.manifest import Manifest
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import prompt_of
from tests.pd_layouts import Served, System
from tests.rank_harness import SMALL
from tests.slow_pool import SlowPool
from tests.tiny import write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3

PROMPT = 29
REQUESTS = [
    RequestInput(
        request_id=f"d/{number}",
        prompt_ids_target=prompt_of(number, PROMPT + number),
        max_tokens=6,
        ignore_eos=True,
    )
    for number in range(2)
]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    directory: Path = tmp_path_factory.mktemp("stage-early")
    target = write_tiny_target(directory / "t", layer_gain=0.15)
    draft = write_agreeing_eagle3(directory / "d", target)
    return emit_manifest(str(target), str(draft), num_speculative_tokens=3)


def served_slowly(manifest: Manifest, *, chunk: int, is_waited: bool) -> tuple[Served, SlowPool]:
    slow = SlowPool(is_waited=is_waited)
    overrides = replace(SMALL, prefill_chunk_size=chunk)
    system = System(manifest, overrides, prefill=(2, 1), decode=1, slow=slow)
    served = system.serve(REQUESTS)
    slow.settle()
    return served, slow


def torn(served: Served) -> list[int]:
    """Return the layers of the decode side that hold what no kernel wrote."""
    pool: tuple[KVLayer, ...] = served.decoding[0].caches.pool.layers
    return [
        number
        for number, layer in enumerate(pool)
        if layer.k.isnan().any() or layer.v.isnan().any()
    ]


@pytest.mark.parametrize("chunk", [64, 11])
def test_no_block_of_an_earlier_stage_is_torn(manifest: Manifest, chunk: int) -> None:
    served, slow = served_slowly(manifest, chunk=chunk, is_waited=True)
    assert torn(served) == []
    ids, _ = served.answers()
    system = System(manifest, SMALL, prefill=(2, 1), decode=1)
    assert ids == system.serve(REQUESTS).answers()[0]
    covered = [writer.num_tensors for writer in slow.writers]
    assert set(covered) == {2}, "a mark covers one layer, keys and values"
    assert len(covered) % served.system.stages[0].num_layers == 0


def test_without_the_wait_blocks_of_an_earlier_stage_are_torn(manifest: Manifest) -> None:
    """The mutant: marks that are thought to be over."""
    served, _ = served_slowly(manifest, chunk=64, is_waited=False)
    assert torn(served)
    assert set(torn(served)) <= set(range(served.system.stages[0].num_layers))
