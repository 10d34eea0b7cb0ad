"""What a launcher says about a process, and what does not fit the layout."""

from __future__ import annotations

import pytest
import torch

from runtime.parallel.gpu_memory import gpu_name
from runtime.parallel.groups import transport_of, way_between
from runtime.parallel.launch import Launch, launch_environment, launch_of
from runtime.parallel.layout import ParallelLayout

LAUNCH = Launch(rank=3, world_size=4, local_rank=1, local_world_size=2)


def test_nobody_launched_this_process() -> None:
    assert launch_of({}) is None
    assert launch_of({"RANK": "0"}) is None


def test_what_is_passed_to_a_process_is_what_it_reads() -> None:
    variables = launch_environment(LAUNCH, address="host-a", port=29500)
    assert launch_of(variables) == LAUNCH
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("host-a", "29500")


@pytest.mark.parametrize(
    ("one", "other", "way"),
    [("a", "b", "nccl"), ("a", "a", "cuda-ipc"), ("a", "", "gloo"), ("", "", "gloo")],
)
def test_the_way_between_two_ranks_follows_from_their_gpus(one: str, other: str, way: str) -> None:
    assert way_between(one, other) == way
    assert way_between(other, one) == way


@pytest.mark.parametrize(
    ("stages", "ranks", "gpus", "transport"),
    [
        (2, 1, ["", ""], "gloo"),
        (2, 1, ["a", "a"], "cuda-ipc"),
        (2, 1, ["a", "b"], "nccl"),
        (3, 1, ["a", "b", "b"], "cuda-ipc+nccl"),
        (1, 2, ["a", "b"], "nccl"),
        (1, 2, ["a", "a"], "gloo"),
        (2, 2, ["a", "b", "c", "d"], "nccl"),
        (2, 2, ["a", "b", "a", "b"], "cuda-ipc+nccl"),
        (2, 2, ["a", "a", "b", "b"], "gloo+nccl"),
    ],
)
def test_the_transport_of_a_layout_names_every_way_in_it(
    stages: int, ranks: int, gpus: list[str], transport: str
) -> None:
    """NCCL joins no two ranks on one GPU: their sums go through the host, in the same order."""
    layout = ParallelLayout(pipeline_parallel=stages, tensor_parallel=ranks)
    assert transport_of(layout, gpus) == transport


def test_a_cpu_has_no_gpu_name() -> None:
    assert gpu_name(torch.device("cpu")) == ""
