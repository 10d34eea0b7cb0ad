"""A pipeline changes no token: every proposer, greedy and seeded, against one stage and none.

Stages are threads with the messages, the states and the checks of processes; a few tests start
processes. Cases C049, C051, C053 and C055 are those of the field reports.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from runtime.config import Overrides
from runtime.engine.engine import Engine
from runtime.engine.llm import LLM
from runtime.engine.lockstep import LockstepLeader
from runtime.engine.request import Placement, RequestInput
from runtime.engine.text import load_tokenizer
from runtime.spec.oracle import OracleScript
from runtime.spec.types import SamplingParams
from specctl.contract.diagnostics import DiagnosticError
from specctl.ops.emit_manifest import emit_manifest
from tests.engine_harness import World, prompt_of
from tests.fake_graph import make_agreeing_world
from tests.pipeline_harness import Staged, run, scripted, staged_engine, whole_engine
from tests.tiny import write_tiny_target
from tests.tiny_agreeing import write_agreeing_pair
from tests.tiny_block import BlockCase, make_block_world
from tests.tiny_last_state import last_state_world, write_mtp
from tests.tiny_manifest import load_tiny, write_manifest
from tests.tiny_pair import edit_tensors
from tests.tiny_parallel import parallel_world

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

SAMPLED = SamplingParams(temperature=0.9, top_k=30, top_p=0.95, seed=11)
REQUESTS = tuple(
    RequestInput(
        request_id=f"r{index}",
        prompt_ids_target=prompt_of(index, 1 + 7 * index),
        params=replace(SAMPLED, seed=index) if index % 2 else SamplingParams(),
        max_tokens=10 + index,
        ignore_eos=True,
    )
    for index in range(5)
)
ARRIVALS = {3: 2, 4: 5}  # a prefill beside verify rows in one batch


def deep_mtp_world(directory: Path) -> World:
    """Prediction layers behind four target layers, with a token map: the source document's arm."""
    target = write_tiny_target(directory / "target", num_layers=4, layer_gain=0.15)
    draft = write_mtp(directory / "draft", target, num_layers=3, is_agreeing=True)
    path = directory / "map.json"
    path.write_text(json.dumps([2, *range(5, 80)]), encoding="utf-8")
    manifest = emit_manifest(str(target), str(draft), num_speculative_tokens=3, token_map=str(path))
    return World(manifest=manifest, models=load_tiny(manifest), tokenizer=load_tokenizer(target))


WORLDS: Mapping[str, Callable[[Path], World]] = {
    "eagle3": make_agreeing_world,
    "eagle": partial(last_state_world, kind="eagle"),
    "mtp": partial(last_state_world, kind="mtp"),
    "mtp-layers-map": deep_mtp_world,
    "peagle": parallel_world,
    "dspark": partial(make_block_world, case=BlockCase()),
    "dflash": partial(make_block_world, case=BlockCase(markov=None)),
}
CASES = [
    ("eagle3", 2),
    ("eagle3", 4),
    ("eagle", 2),
    ("mtp", 2),
    ("mtp-layers-map", 4),
    ("peagle", 4),
    ("dspark", 2),
    ("dflash", 2),
]


class Worlds:
    """Worlds made once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[str, World] = {}
        self._answers: dict[str, dict[str, tuple[int, ...]]] = {}

    def world(self, name: str) -> World:
        if name not in self._made:
            self._made[name] = WORLDS[name](self._directory / name)
        return self._made[name]

    def answers(self, name: str) -> dict[str, tuple[int, ...]]:
        """What target-only decoding on one stage says."""
        if name not in self._answers:
            self._answers[name] = run(whole_engine(self.world(name), proposer="none"), REQUESTS)
        return self._answers[name]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("pipeline"))


@pytest.mark.parametrize(("name", "num_stages"), CASES)
def test_every_draft_model_over_stages(worlds: Worlds, name: str, num_stages: int) -> None:
    """Tokens of one stage and of target-only; rounds and accepted drafts of one stage."""
    world, expected = worlds.world(name), worlds.answers(name)
    whole = whole_engine(world)
    assert run(whole, REQUESTS, arrivals=ARRIVALS) == expected
    with staged_engine(world, num_stages) as staged:
        assert staged.models.target.embedding is None
        assert run(staged.engine, REQUESTS, arrivals=ARRIVALS) == expected
        stats, alone = staged.engine.stats(), whole.stats()
    assert staged.errors == []
    assert stats.num_accepted_drafts > 0
    assert (stats.num_drafts, stats.num_accepted_at) == (alone.num_drafts, alone.num_accepted_at)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("proposer", ["none", "ngram", "oracle"])
def test_proposers_without_a_model(worlds: Worlds, proposer: str, num_stages: int) -> None:
    world, expected = worlds.world("eagle3"), worlds.answers("eagle3")
    script = OracleScript(continuations=scripted(expected), corruption_rates=(0.2, 0.4))
    gamma = None if proposer == "none" else 3
    with staged_engine(
        world,
        num_stages,
        script=script if proposer == "oracle" else None,
        proposer=proposer,
        num_speculative_tokens=gamma,
    ) as staged:
        assert run(staged.engine, REQUESTS, arrivals=ARRIVALS) == expected


def test_c049_the_draft_is_whole_on_the_last_stage(worlds: Worlds) -> None:
    world = worlds.world("eagle3")
    with staged_engine(world, 4) as staged:
        draft, whole = staged.models.draft, world.models.draft
        assert draft is not None
        assert whole is not None
        assert draft.kv_specs == whole.kv_specs
        assert [worker._model.first_layer for worker in staged.workers] == [0, 1, 2]
        assert all(worker._model.head is None for worker in staged.workers)


def test_c051_prefill_beside_verify_then_a_step_without_drafts(worlds: Worlds) -> None:
    """Rows of every width in one message; a queue waits a minute at most, so a hang is an error."""
    world = worlds.world("eagle3")
    requests = [
        replace(REQUESTS[0], num_speculative_tokens=4),
        replace(REQUESTS[2], num_speculative_tokens=0),
        replace(REQUESTS[4], num_speculative_tokens=1),
    ]
    with staged_engine(world, 2, max_num_batched_tokens=24) as staged:
        found = run(staged.engine, requests, arrivals={1: 2, 2: 4})
    expected = worlds.answers("eagle3")
    assert found == {item.request_id: expected[item.request_id] for item in requests}


def finish(engine: Engine | LockstepLeader) -> None:
    """Step until nothing is in flight."""
    while engine.has_work:
        engine.step()


def compare_lengths(staged: Staged, placed: Placement) -> int:
    """Compare the final length of a request on every stage; return how many were compared."""
    num_compared = 0
    for worker in staged.workers:
        span = worker._pools[0].lengths._spans.get(placed.slot)
        if span is not None and placed.num_final_rows > 0:
            assert span[0] + placed.num_final_rows == placed.num_computed_tokens
            num_compared += 1
    return num_compared


def test_c053_every_stage_stands_where_the_last_one_does_after_each_round(worlds: Worlds) -> None:
    """A draft that is always wrong: whatever a stage counted too much would move its next rows."""
    world, expected = worlds.world("eagle3"), worlds.answers("eagle3")
    script = OracleScript(continuations=scripted(expected), accept_counts=(0,))
    with staged_engine(
        world, 3, script=script, proposer="oracle", num_speculative_tokens=3
    ) as staged:
        engine = staged.engine
        for request in REQUESTS[:3]:
            engine.add_request(request)
        ids: dict[str, list[int]] = {request.request_id: [] for request in REQUESTS[:3]}
        num_compared = 0
        while engine.has_work:
            for delta in engine.step():
                ids[delta.request_id] += delta.ids_target
            for item in engine._scheduler.running:
                if not item.placed.is_under_way:
                    num_compared += compare_lengths(staged, item.placed)
        assert engine.stats().num_accepted_drafts == 0
    assert {name: tuple(found) for name, found in ids.items()} == {
        name: expected[name] for name in ids
    }
    assert num_compared > 50
    assert staged.errors == []


@pytest.mark.parametrize("num_stages", [2, 4])
def test_preemption_over_stages(worlds: Worlds, num_stages: int) -> None:
    world = worlds.world("eagle3")
    with staged_engine(
        world, num_stages, num_kv_blocks=11, max_model_len=64, max_num_requests=5
    ) as staged:
        assert run(staged.engine, REQUESTS) == worlds.answers("eagle3")
        assert staged.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_abort_with_rows_under_way(worlds: Worlds, num_steps: int) -> None:
    """The slot and the blocks go to another request once the rows are through."""
    world, expected = worlds.world("eagle3"), worlds.answers("eagle3")
    with staged_engine(world, 3, max_num_requests=3) as staged:
        engine = staged.engine
        for request in REQUESTS[:3]:
            engine.add_request(request)
        ids: dict[str, list[int]] = {request.request_id: [] for request in REQUESTS}
        for _ in range(num_steps):
            for delta in engine.step():
                ids[delta.request_id] += delta.ids_target
        assert engine.abort("r1")
        for request in REQUESTS[3:]:
            engine.add_request(request)
        while engine.has_work:
            for delta in engine.step():
                assert delta.request_id != "r1"
                ids[delta.request_id] += delta.ids_target
            engine.check()
        assert engine.stats().num_free_kv_blocks == engine.stats().num_kv_blocks
    del ids["r1"]
    assert {name: tuple(found) for name, found in ids.items()} == {
        name: expected[name] for name in ids
    }


def test_prompts_share_a_prefix_over_stages(worlds: Worlds) -> None:
    """A prefix hit starts a new request at a later position on every stage."""
    world = worlds.world("eagle3")
    first = replace(REQUESTS[4], request_id="first")
    second = replace(
        first,
        request_id="second",
        prompt_ids_target=(*first.prompt_ids_target, *prompt_of(40, 9)),
    )
    expected = run(whole_engine(world, proposer="none"), [second])
    with staged_engine(world, 2) as staged:
        run(staged.engine, [first])
        assert run(staged.engine, [second]) == expected
        assert staged.engine.stats().num_cached_tokens > 0


def test_a_lost_stage_ends_requests_and_the_engine_refuses(worlds: Worlds) -> None:
    world = worlds.world("eagle3")
    with staged_engine(world, 3) as staged:
        engine = staged.engine
        for request in REQUESTS[:3]:
            engine.add_request(request)
        engine.step()
        # Another slot length than the stage has: it refuses, tells the last stage, and ends.
        staged.workers[0]._pools[0].lengths._spans.clear()
        with pytest.raises(DiagnosticError, match="SD854"):
            finish(engine)
        for request in REQUESTS[:3]:
            engine.abort(request.request_id)
        assert not engine.has_work
        engine.check()
        engine.add_request(REQUESTS[3])
        with pytest.raises(DiagnosticError, match="SD854"):
            engine.step()


# Processes


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("processes")
    return write_manifest(directory, write_agreeing_pair(directory).manifest())


SMALL = Overrides(device="cpu", kv_block_size=8, max_num_requests=4, max_model_len=128)


def test_processes_over_gloo_equal_one(manifest: Path) -> None:
    alone = LLM.from_manifest(manifest, replace(SMALL, proposer="none"))
    expected = [done.ids_target for done in alone.generate(REQUESTS)]
    llm = LLM.from_manifest(manifest, replace(SMALL, pipeline_parallel=2, stage_layers=(3, 1)))
    try:
        assert llm.transport == "gloo"
        assert [done.ids_target for done in llm.generate(REQUESTS)] == expected
        plain = llm.sibling(proposer="none", num_speculative_tokens=0)
        assert [done.ids_target for done in plain.generate(REQUESTS)] == expected
    finally:
        llm.close()


def test_c055_a_stage_that_cannot_load_is_named_in_seconds(tmp_path: Path) -> None:
    """The fast loader is refused; what another process meets ends the start here, with its code.

    A world-wide collective would wait half an hour; this module's tests may take ten minutes.
    """
    pair = write_agreeing_pair(tmp_path)
    edit_tensors(
        pair.target, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(torch.nan)
    )
    manifest = write_manifest(tmp_path, pair.manifest())
    for load_format, code in (("fastsafetensors", "SD857"), ("auto", "SD817")):
        with pytest.raises(DiagnosticError) as caught:
            LLM.from_manifest(
                manifest, replace(SMALL, pipeline_parallel=2, load_format=load_format)
            )
        assert caught.value.diagnostics[0].code == code
    assert "layers.0" in caught.value.diagnostics[0].where


def test_torchrun_starts_the_same_path(manifest: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "specctl"),
        *("generate", str(manifest), "w1 w2 w3", "--raw", "--max-tokens", "8"),
        *("--pp", "2", "--device", "cpu", "--compare"),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "identical: yes" in done.stderr


def test_sigkill_of_a_stage_ends_requests_with_its_code(manifest: Path) -> None:
    llm = LLM.from_manifest(manifest, replace(SMALL, pipeline_parallel=2))
    try:
        peers = llm._staged.peers
        assert peers is not None
        child = peers._started.children[0]
        llm.engine.add_request(replace(REQUESTS[0], max_tokens=100))
        llm.engine.step()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(DiagnosticError, match="SD855"):
            finish(llm.engine)
        end = time.monotonic() + 60
        while llm.problem is None and time.monotonic() < end:
            time.sleep(0.05)
        assert llm.problem is not None
        assert llm.problem.code == "SD855"
    finally:
        llm.close()
    assert child.poll() is not None


def test_stages_end_with_the_process_that_started_them(manifest: Path) -> None:
    """SIGKILL of rank 0 leaves no stage behind."""
    script = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from runtime.config import Overrides\n"
        "from runtime.engine.llm import LLM\n"
        f"llm = LLM.from_manifest(Path({str(manifest)!r}), Overrides(device='cpu',"
        " kv_block_size=8, max_model_len=64, pipeline_parallel=2))\n"
        "print(llm._staged.peers._started.children[0].pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    child = int(server.stdout.readline())
    server.kill()
    server.wait()
    end = time.monotonic() + 60
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        state = Path(f"/proc/{child}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
        if state == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists(), "a stage lives on"
