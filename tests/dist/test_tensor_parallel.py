"""Processes over gloo have the bits of their twin: the same ranks as threads of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.engine.llm import LLM
from runtime.parallel.groups import new_store
from runtime.parallel.launch import Launch, launch_environment
from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest
from tests.dist.tensor_parallel_rank import REQUESTS, work
from tests.rank_harness import SMALL, answer, on_rank_pairs, ranked_engine
from tests.tiny import write_tiny_target
from tests.tiny_agreeing import write_agreeing_eagle3
from tests.tiny_manifest import write_manifest

pytestmark = pytest.mark.dist
ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
AGENT_STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def run_processes(size: int, manifest: Path, out: Path) -> list[dict[str, object]]:
    """Run every rank; they meet at a store of this process, as under torchrun's agent."""
    store, port = new_store(timeout_s=LIMIT_S)
    processes = []
    for rank in range(size):
        launch = Launch(rank=rank, world_size=size, local_rank=rank, local_world_size=size)
        environment = launch_environment(launch, address="127.0.0.1", port=port)
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.dist.tensor_parallel_rank", str(manifest), str(out)],
                cwd=ROOT,
                env={**os.environ, **environment, **AGENT_STORE},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
        del store
    assert [process.returncode for process in processes] == [0] * size, "\n".join(texts)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("ranks")
    target = write_tiny_target(directory / "t", layer_gain=0.15)
    draft = write_agreeing_eagle3(directory / "d", target)
    emitted = emit_manifest(str(target), str(draft), num_speculative_tokens=3)
    return write_manifest(directory, emitted)


def test_two_processes_have_the_bits_of_two_threads(tmp_path: Path, manifest: Path) -> None:
    threads = on_rank_pairs(2, lambda ranks, control: work(manifest, ranks, control))
    processes = run_processes(2, manifest, tmp_path)
    for found in (*threads, *processes):
        assert torch.equal(found["sum"], threads[0]["sum"])
        for name in ("alone", "seeded", "rejection"):
            assert found[name] == threads[0][name]
    assert threads[0]["seeded"]["ids"] == threads[0]["alone"]["ids"]
    assert threads[0]["seeded"]["rounds"] < threads[0]["alone"]["rounds"], "drafts were accepted"


def test_two_stages_of_two_ranks_start_answer_and_end_with_a_lost_rank(manifest: Path) -> None:
    """The start of `serve --pp 2 --tp 2`: the ids of two ranks; then rank 1 is killed."""
    expected = on_rank_pairs(
        2, lambda ranks, _: answer(ranked_engine(load_manifest(manifest), ranks, SMALL), REQUESTS)
    )[0].ids_target
    overrides = replace(SMALL, pipeline_parallel=2, tensor_parallel=2)
    llm = LLM.from_manifest(manifest, overrides, needs_tokenizer=False)
    assert llm._staged.peers is not None
    children = llm._staged.peers._started.children
    try:
        answers = llm.generate(REQUESTS)
        assert {item.request_id: item.ids_target for item in answers} == expected
        assert sum(item.usage.num_accepted_drafts for item in answers) > 5
        with pytest.raises(DiagnosticError, match="SD855"):
            llm.generate(REQUESTS, on_delta=lambda _: children[0].kill())
        with pytest.raises(DiagnosticError, match="SD855"):
            llm.generate(REQUESTS)
    finally:
        llm.close()
    assert [child.poll() is None for child in children] == [False] * 3
