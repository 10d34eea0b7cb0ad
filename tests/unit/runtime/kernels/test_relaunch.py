"""Bound launches hand a compiled kernel what a launch of Triton would: the same arguments in order.

A stand-in for the compiled kernel notes what it is given; GPU tests run the real one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (Linux only)")

from runtime.kernels.cuda import outcomes, round_inputs
from runtime.kernels.cuda.relaunch import relaunch
from runtime.kernels.outcomes import OutcomeTensors

Launches = list[tuple[tuple[int, ...], dict[str, Any]]]


class Compiled:
    """Takes all arguments by position, compile-time ones too."""

    def __init__(self, names: list[str], launches: Launches) -> None:
        self._names = names
        self._launches = launches

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            self._launches.append((grid, dict(zip(self._names, args, strict=True))))

        return run


class Kernel:
    """Binds arguments as Triton does and returns what it compiled."""

    def __init__(self, real: Any) -> None:
        self.arg_names = real.arg_names
        self.params = real.params
        self._signature = inspect.signature(real.fn)
        self.first: Launches = []
        self.later: Launches = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> Compiled:
            assert num_warps == 4
            bound = self._signature.bind(*args, **constants).arguments
            self.first.append((grid, dict(bound)))
            return Compiled(self.arg_names, self.later)

        return launch


def test_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(outcomes.store_outcomes_kernel)
    monkeypatch.setattr(outcomes, "store_outcomes_kernel", kernel)
    source, host = (
        OutcomeTensors(
            output_BX=torch.zeros((60, 10), dtype=torch.int64), confidence_BG=torch.zeros((60, 8))
        )
        for _ in range(2)
    )
    store = outcomes.prepare_outcome_store(source, host)
    assert kernel.later == []
    store(7)
    ((grid, first),), ((grid_later, later),) = kernel.first, kernel.later
    assert grid == grid_later == (2, 1, 1)
    assert (first.pop("num_rows"), later.pop("num_rows")) == (0, 7)
    assert first.keys() == later.keys()
    assert all(first[name] is later[name] for name in first)
    assert later["output_ptr"] is later["counted_ptr"] is source.output_BX
    assert later["chances_ptr"] is source.confidence_BG
    assert later["host_output_ptr"] is later["host_counted_ptr"] is host.output_BX
    assert later["host_chances_ptr"] is host.confidence_BG
    sizes = {"COLUMNS": 10, "COUNTED": False, "DRAFTS": 8, "BLOCK": outcomes.STORE_BLOCK}
    assert {name: later[name] for name in sizes} == sizes


def test_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, batch = Kernel(round_inputs.put_blocks_kernel), Kernel(round_inputs.put_batch_kernel)
    monkeypatch.setattr(round_inputs, "put_blocks_kernel", blocks)
    monkeypatch.setattr(round_inputs, "put_batch_kernel", batch)
    example, entry = torch.zeros((2, 2, 132), dtype=torch.int32).unbind()
    table = torch.zeros((3, 9), dtype=torch.int32)
    slots, counts = torch.zeros(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    round_inputs.prepare_block_put(table, example)(entry, 4)
    round_inputs.prepare_batch_put(slots, counts, example, 2)(entry, 1)
    constants = {"CAPACITY": 132, "BLOCK": 256}
    given = {"entry_ptr": entry, "table_ptr": table, "num_cells": 4, **constants}
    assert blocks.later == [((1, 1, 1), given)]
    numbers = {"num_requests": 1, "num_lanes": 3, "padding_slot": 2, **constants}
    given = {"entry_ptr": entry, "slots_ptr": slots, "num_drafts_ptr": counts, **numbers}
    assert batch.later == [((1, 1, 1), given)]
    assert batch.first == [((1, 1, 1), {**given, "entry_ptr": example, "num_requests": 0})]


def test_a_kernel_whose_numbers_choose_its_binary_is_refused() -> None:
    kernel = Kernel(round_inputs.put_batch_kernel)
    kernel.params = list(kernel.params)
    kernel.params[3] = kernel.params[0]  # a specialised one
    numbers = torch.zeros(4, dtype=torch.int64)
    constants = round_inputs.entry_constants(4)
    arguments = (torch.zeros((2, 4), dtype=torch.int32), numbers, numbers, 0, 4, 5)
    with pytest.raises(AssertionError, match="numbers change"):
        relaunch(kernel, arguments, constants, num_programs=1, num_warps=4)


def test_tensors_that_begin_elsewhere_are_refused() -> None:
    kernel = Kernel(round_inputs.put_blocks_kernel)
    entry = torch.zeros(9, dtype=torch.int32)[1:].view(2, 4)
    table = torch.zeros((3, 9), dtype=torch.int32)
    with pytest.raises(AssertionError, match="alignment"):
        relaunch(
            kernel, (entry, table, 0), round_inputs.entry_constants(4), num_programs=1, num_warps=4
        )
    assert kernel.first == []
