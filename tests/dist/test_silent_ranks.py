"""Stages and ranks whose process stands still without ending: SIGSTOP closes no connection."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.engine.llm import LLM
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest
from tests.dist.tensor_parallel_rank import REQUESTS
from tests.rank_harness import SMALL
from tests.tiny import write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_manifest import write_manifest

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(120)]
TIMEOUT_S = 3.0
LAYOUTS = ("tensor_parallel", "pipeline_parallel")


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("silent")
    target = write_tiny_target(directory / "t", layer_gain=0.15)
    draft = write_agreeing_eagle3(directory / "d", target)
    emitted = emit_manifest(str(target), str(draft), num_speculative_tokens=3)
    return write_manifest(directory, emitted)


def over_two(manifest: Path, layout: str) -> tuple[LLM, subprocess.Popen[bytes]]:
    """Return a model over this process and another one, and that one."""
    overrides = replace(SMALL, rank_timeout_s=TIMEOUT_S, **{layout: 2})
    llm = LLM.from_manifest(manifest, overrides, needs_tokenizer=False)
    assert llm._staged.peers is not None
    (child,) = llm._staged.peers._started.children
    return llm, child


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_server_may_be_idle_for_longer_than_a_process_may_be_silent(
    manifest: Path, layout: str
) -> None:
    """And requests in flight end with a code when the other process hangs amid them."""
    llm, child = over_two(manifest, layout)
    try:
        first = llm.generate(REQUESTS)
        time.sleep(1.5 * TIMEOUT_S)
        assert llm.problem is None
        again = llm.generate(REQUESTS)
        assert [item.ids_target for item in again] == [item.ids_target for item in first]
        with pytest.raises(DiagnosticError, match="SD855"):
            llm.generate(REQUESTS, on_delta=lambda _: os.kill(child.pid, signal.SIGSTOP))
        assert llm.problem is not None
        assert llm.problem.code == "SD855"
        with pytest.raises(DiagnosticError, match="SD855"):
            llm.generate(REQUESTS)
        llm.engine.check()
        stats = llm.engine.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_kv_blocks == stats.num_kv_blocks
    finally:
        llm.close()
    assert child.poll() is not None


def test_a_rank_that_hangs_while_there_is_no_work_is_noticed(manifest: Path) -> None:
    llm, child = over_two(manifest, "tensor_parallel")
    try:
        os.kill(child.pid, signal.SIGSTOP)
        while llm.problem is None:
            time.sleep(0.05)
        assert llm.problem.code == "SD855"
    finally:
        llm.close()
    assert child.poll() is not None


@pytest.mark.parametrize(
    "layout", ["tensor_parallel", pytest.param("pipeline_parallel", marks=pytest.mark.slow)]
)
def test_processes_end_when_the_first_one_hangs(manifest: Path, layout: str) -> None:
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.dist.test_silent_ranks import REQUESTS, over_two\n"
        f"llm, child = over_two(Path({str(manifest)!r}), {layout!r})\n"
        "llm.generate(REQUESTS)  # a child that waits to begin has the time of a start\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(120)\n"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        child = int(server.stdout.readline())
        server.send_signal(signal.SIGSTOP)
        while is_running(child):
            time.sleep(0.05)
    finally:
        server.kill()
    _, said = server.communicate()
    assert "SD855" in said


def is_running(pid: int) -> bool:
    """Return whether a process runs; one that has ended waits for its parent as a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text("utf-8")
    except FileNotFoundError:
        return False
