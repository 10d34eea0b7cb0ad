"""Stages, ranks and roles as processes on GPUs: the ids of one process, or of its emulation.

One GPU: stages over CUDA IPC, a prefill and a decode process over CUDA IPC, ranks whose sums go
through the host. Two GPUs: stages and ranks over NCCL, and what becomes of one whose peer is lost.
All on a tiny Qwen3 target in bfloat16 with an EAGLE-3 draft, greedy and seeded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.parallel_cases import (
    Answers,
    answers_of,
    emulated_ranks,
    lost_rank,
    num_gpus,
    prefilled_elsewhere,
    small,
    write_qwen3,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(280),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
needs_two_gpus = pytest.mark.skipif(
    num_gpus() < 2 or not dist.is_nccl_available(),
    reason=f"NCCL joins two GPUs, this machine has {num_gpus()}",
)
SMALL = small("cuda")
STAGES = replace(SMALL, pipeline_parallel=2, stages_in_process=False)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("qwen3-gpu"))


@pytest.fixture(scope="module")
def alone(manifest: Path) -> Answers:
    """What one process answers eagerly; captured rounds and the target alone say the same ids."""
    found = answers_of(manifest, replace(SMALL, graphs="off"))
    assert answers_of(manifest, SMALL).ids == found.ids
    assert answers_of(manifest, replace(SMALL, proposer="none")).ids == found.ids
    assert found.num_accepted_drafts > 0
    return found


def two_stages(manifest: Path) -> Answers:
    """Serve twice over two processes, so that every slot of the ring is used again."""
    return answers_of(manifest, STAGES, num_runs=2)


@pytest.mark.skipif(num_gpus() != 1, reason="with several GPUs each stage has one of its own")
def test_two_stages_share_one_gpu(manifest: Path, alone: Answers) -> None:
    assert two_stages(manifest) == replace(alone, transport="cuda-ipc")


def test_two_stages_in_one_process(manifest: Path, alone: Answers) -> None:
    overrides = replace(SMALL, pipeline_parallel=2, stages_in_process=True)
    assert answers_of(manifest, overrides).ids == alone.ids


@pytest.mark.skipif(num_gpus() != 1, reason="with several GPUs each rank has one of its own")
def test_two_ranks_share_one_gpu(manifest: Path) -> None:
    expected = emulated_ranks(manifest, SMALL, 2)
    assert expected.num_accepted_drafts > 0
    found = answers_of(manifest, replace(SMALL, tensor_parallel=2))
    assert found == replace(expected, transport="gloo")


def test_a_prefill_and_a_decode_process_share_one_gpu(manifest: Path, alone: Answers) -> None:
    """KV goes from pool to pool within the GPU; the second run meets blocks that were used."""
    assert prefilled_elsewhere(manifest, "cuda", num_runs=2).ids == alone.ids


@pytest.mark.multi_gpu
@needs_two_gpus
def test_two_stages_on_two_gpus(manifest: Path, alone: Answers) -> None:
    assert two_stages(manifest) == replace(alone, transport="nccl")


@pytest.mark.multi_gpu
@needs_two_gpus
def test_two_ranks_on_two_gpus(manifest: Path) -> None:
    expected = emulated_ranks(manifest, SMALL, 2)
    alone = answers_of(manifest, replace(SMALL, tensor_parallel=2, proposer="none"))
    found = answers_of(manifest, replace(SMALL, tensor_parallel=2))
    assert alone.ids == expected.ids
    assert found == replace(expected, transport="nccl")


@pytest.mark.multi_gpu
@needs_two_gpus
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_killed_rank_is_lost_long_before_its_time_limit(manifest: Path, layout: str) -> None:
    """Its end is seen; the limit of four hours could not end the wait on the device."""
    said = lost_rank(manifest, "cuda", layout, "SIGKILL", rank_timeout_s=14400, within_s=200)
    assert said == "SD855 SD855 nccl child-is-over=True"


@pytest.mark.multi_gpu
@needs_two_gpus
@pytest.mark.parametrize("layout", ["tp", "pp"])
def test_a_rank_that_stands_still_is_lost_within_its_time_limit(
    manifest: Path, layout: str
) -> None:
    """Nothing closes a connection: rank 0 misses its signs of life."""
    said = lost_rank(manifest, "cuda", layout, "SIGSTOP", rank_timeout_s=40, within_s=240)
    assert said == "SD855 SD855 nccl child-is-over=True"
