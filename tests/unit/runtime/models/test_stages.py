"""A target in stages and over ranks: the same bits at every cut, and sums in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from runtime.batch import PreparedBatch
from runtime.kv import KVLayer
from runtime.loading import read_target
from runtime.models import StageStates, TargetModel, TargetOutput
from runtime.parallel.ranks import ONE_RANK, Ranks, ThreadExchange
from specctl.contract.manifest import Manifest
from specctl.contract.stage_split import split_stages
from tests.tiny import VOCAB_SIZE, Family, Sizes, write_tiny_target
from tests.tiny_manifest import CPU, tiny_manifest

AUX = (-1, 0, 2)
FOUR_HEADS = Sizes(hidden=48, heads=8, kv_heads=4, head_dim=16, inner=64)
T = TypeVar("T")


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def manifest(request: pytest.FixtureRequest, tmp_path: Path) -> Manifest:
    family: Family = request.param
    return tiny_manifest(write_tiny_target(tmp_path / "target", family=family, num_layers=4))


def read(
    manifest: Manifest, *, stage_layers: Sequence[int] | None = None, ranks: Ranks = ONE_RANK
) -> tuple[TargetModel, ...]:
    """Read a target as one model, or as one for each stage."""
    stages = (
        [None]
        if stage_layers is None
        else split_stages(manifest, len(stage_layers), stage_layers=stage_layers)
    )
    return tuple(
        read_target(manifest, Path("/"), device=CPU, dtype=torch.float32, stage=stage, ranks=ranks)[
            0
        ]
        for stage in stages
    )


def prompt_batch(num_rows: int = 21, *, block_size: int = 4) -> PreparedBatch:
    """One request from position 0, its blocks in reverse order."""
    positions = torch.arange(num_rows)
    num_blocks = -(-num_rows // block_size)
    blocks = torch.arange(num_blocks, 0, -1)
    return PreparedBatch(
        ids_target_N=(positions * 7 + 3) % VOCAB_SIZE,
        positions_N=positions,
        slots_N=blocks[positions // block_size] * block_size + positions % block_size,
        row_request_N=torch.zeros(num_rows, dtype=torch.int32),
        block_tables_BT=blocks[None].to(torch.int32),
        max_length=num_rows,
    )


def empty_kv(model: TargetModel) -> tuple[KVLayer, ...]:
    return tuple(
        KVLayer(
            k=torch.zeros(8, spec.num_kv_heads, 4, spec.head_dim),
            v=torch.zeros(8, spec.num_kv_heads, 4, spec.head_dim),
        )
        for spec in model.kv_specs
    )


def run(stages: Sequence[TargetModel], batch: PreparedBatch) -> TargetOutput:
    """Hand the states from stage to stage."""
    states: StageStates | None = None
    with torch.inference_mode():
        for stage in stages:
            states = stage.run_stage(batch, empty_kv(stage), AUX, states)
        assert states is not None
        return stages[-1].finish(states, AUX)


def on_ranks(size: int, work: Callable[[Ranks], T]) -> list[T]:
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, ThreadExchange(size, timeout_s=60).ranks()))


@pytest.mark.parametrize("stage_layers", [(1, 3), (2, 2), (3, 1), (1, 1, 1, 1)])
def test_every_cut_gives_the_same_bits(manifest: Manifest, stage_layers: tuple[int, ...]) -> None:
    batch = prompt_batch()
    whole = run(read(manifest), batch)
    found = run(read(manifest, stage_layers=stage_layers), batch)
    assert torch.equal(found.hidden_ND, whole.hidden_ND)
    assert whole.aux_hidden_NA is not None
    assert found.aux_hidden_NA is not None
    assert torch.equal(found.aux_hidden_NA, whole.aux_hidden_NA)


def test_a_stage_holds_its_part_and_nothing_else(manifest: Manifest) -> None:
    first, middle, last = read(manifest, stage_layers=(1, 2, 1))
    assert [stage.num_layers for stage in (first, middle, last)] == [1, 2, 1]
    assert first.embedding is not None
    assert (first.head, first.norm_D) == (None, None)
    assert (middle.embedding, middle.head, middle.norm_D) == (None, None, None)
    assert last.embedding is None
    assert last.head is not None


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_and_are_near_one_rank(tmp_path: Path, size: int) -> None:
    directory = write_tiny_target(tmp_path / "t", family="qwen3", num_layers=2, sizes=FOUR_HEADS)
    manifest = tiny_manifest(directory)
    batch = prompt_batch()
    (whole,) = read(manifest)

    def work(ranks: Ranks) -> tuple[TargetOutput, torch.Tensor, torch.Tensor]:
        (model,) = read(manifest, ranks=ranks)
        with torch.inference_mode():
            output = model.forward(batch, empty_kv(model))
            return output, model.logits(output.hidden_ND), model.greedy_ids(output.hidden_ND)

    with torch.inference_mode():
        expected = whole.forward(batch, empty_kv(whole))
        logits = whole.logits(expected.hidden_ND)
    results = on_ranks(size, work)
    for output, found, ids in results:
        assert torch.equal(output.hidden_ND, results[0][0].hidden_ND)
        assert torch.equal(found, results[0][1])
        assert found.shape == logits.shape
        torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(ids, found.argmax(dim=1))


def test_rows_of_ranks_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    directory = write_tiny_target(tmp_path / "t", family="llama", num_layers=2)
    manifest = tiny_manifest(directory)

    def work(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        (model,) = read(manifest, ranks=ranks)
        kv, batch = empty_kv(model), prompt_batch()
        with torch.inference_mode():
            together = model.forward(batch, kv).hidden_ND
            kv = empty_kv(model)
            alone = [
                model.forward(row_of(batch, index), kv).hidden_ND for index in range(batch.num_rows)
            ]
        return together, torch.cat(alone)

    for together, alone in on_ranks(2, work):
        assert torch.equal(together, alone)


def row_of(batch: PreparedBatch, index: int) -> PreparedBatch:
    row = slice(index, index + 1)
    return PreparedBatch(
        ids_target_N=batch.ids_target_N[row],
        positions_N=batch.positions_N[row],
        slots_N=batch.slots_N[row],
        row_request_N=batch.row_request_N[row],
        block_tables_BT=batch.block_tables_BT,
        max_length=index + 1,
    )


def test_stages_of_ranks_give_the_bits_of_ranks(tmp_path: Path) -> None:
    directory = write_tiny_target(tmp_path / "t", family="llama", num_layers=3)
    manifest = tiny_manifest(directory)
    batch = prompt_batch()
    whole = on_ranks(2, lambda ranks: run(read(manifest, ranks=ranks), batch).hidden_ND)
    cut = on_ranks(
        2, lambda ranks: run(read(manifest, stage_layers=(1, 2), ranks=ranks), batch).hidden_ND
    )
    assert torch.equal(whole[0], cut[0])
    assert torch.equal(whole[0], cut[1])


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_vocabulary_rows_of_ranks_are_those_of_the_matrix(
    tmp_path: Path, size: int, is_tied: bool
) -> None:
    """106 rows: neither size divides them, and the last rank has rows that no id reaches."""
    directory = write_tiny_target(
        tmp_path / "t",
        family="qwen3",
        num_layers=1,
        sizes=FOUR_HEADS,
        vocab_size=106,
        is_tied=is_tied,
    )
    manifest = tiny_manifest(directory)
    (whole,) = read(manifest)
    ids = torch.arange(106).flip(0)
    hidden = torch.randn(9, 48, generator=torch.Generator().manual_seed(1))
    expected = whole.logits(hidden)

    def work(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (model,) = read(manifest, ranks=ranks)
        return model.embed(ids), model.logits(hidden), model.greedy_ids(hidden)

    for rows, logits, chosen in on_ranks(size, work):
        assert torch.equal(rows, whole.embed(ids))
        assert torch.equal(logits, expected)
        assert torch.equal(chosen, whole.greedy_ids(hidden))


def test_a_tied_head_on_a_stage_of_its_own_is_read_from_the_embedding(tmp_path: Path) -> None:
    directory = write_tiny_target(tmp_path / "t", num_layers=2, is_tied=True)
    manifest = tiny_manifest(directory)
    first, last = read(manifest, stage_layers=(1, 1))
    assert torch.equal(last.head_VD, first.embedding_VD)
