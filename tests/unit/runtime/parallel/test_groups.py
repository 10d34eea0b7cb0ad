"""What a launcher says about a process, and what does not fit the layout."""

from __future__ import annotations

import pytest
import torch

from runtime.parallel.groups import (
    Launch,
    ProcessGroups,
    launch_environment,
    launch_of,
    transport_of,
)
from runtime.parallel.layout import ParallelLayout
from specctl.contract.diagnostics import DiagnosticError

LAUNCH = Launch(rank=3, world_size=4, local_rank=1, local_world_size=2)


def test_nobody_launched_this_process() -> None:
    assert launch_of({}) is None
    assert launch_of({"RANK": "0"}) is None


def test_what_is_passed_to_a_process_is_what_it_reads() -> None:
    variables = launch_environment(LAUNCH, address="host-a", port=29500)
    assert launch_of(variables) == LAUNCH
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("host-a", "29500")


def test_another_number_of_processes_than_the_layout_has_is_refused() -> None:
    """Before anything is waited for."""
    layout = ParallelLayout(pipeline_parallel=3, tensor_parallel=1)
    with pytest.raises(DiagnosticError, match="SD832") as caught:
        ProcessGroups(layout, LAUNCH, device=torch.device("cpu"))
    assert (caught.value.diagnostics[0].expected, caught.value.diagnostics[0].found) == ("3", "4")


def test_processes_on_cpus_use_gloo() -> None:
    assert transport_of(torch.device("cpu"), LAUNCH) == "gloo"
