"""A rank that a launcher started and that waits for the others: it says so, and Ctrl-C ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.dist

WAIT = """
import logging, signal, torch
from runtime.parallel.groups import ProcessGroups
from runtime.parallel.launch import launch_of
from runtime.parallel.layout import ParallelLayout

logging.basicConfig(level="INFO")
signal.signal(signal.SIGINT, lambda *_: print("too late"))  # runs once the library lets it
layout = ParallelLayout(pipeline_parallel=2, tensor_parallel=1)
ProcessGroups(layout, launch_of(), device=torch.device("cpu"))
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_says_for_whom_and_ends_at_ctrl_c(rank: int) -> None:
    port = free_port()
    environment = os.environ | {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT],
        env=environment,
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "waits" in line)
        assert f"rank {rank} of 2 waits at 127.0.0.1:{port}" in line
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == -signal.SIGINT
    finally:
        process.kill()
        process.communicate()
