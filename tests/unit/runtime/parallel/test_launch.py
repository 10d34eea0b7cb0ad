"""What a launcher says that cannot be: a code and the name of the variable, before any wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined] # public, not listed
from torch.distributed.distributed_c10d import PrefixStore

from runtime.config import Overrides, resolve_config
from runtime.engine.peers import plan_of
from runtime.engine.stage_process import refuse_another_start
from runtime.main import EngineOptions, launched_options
from runtime.parallel import launch
from runtime.parallel.groups import ProcessGroups
from runtime.parallel.launch import Launch, launch_of
from runtime.parallel.layout import ParallelLayout
from specctl.contract.diagnostics import Diagnostic, DiagnosticError
from tests.tiny_pair import write_pair

TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def refused(changes: dict[str, str]) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        launch_of(TWO | changes)
    [found] = caught.value.diagnostics
    return found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "2"),
        ("RANK", "-1"),
        ("RANK", "first"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", ""),
        ("LOCAL_RANK", "-1"),
        ("LOCAL_RANK", "x"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("MASTER_PORT", "99999"),
        ("MASTER_PORT", "http"),
        ("MASTER_ADDR", ""),
    ],
)
def test_a_variable_that_cannot_be_is_named(name: str, value: str) -> None:
    found = refused({name: value})
    assert (found.code, found.where) == ("SD832", name)
    assert found.found == (value or "not set")


def test_processes_without_a_meeting_place_are_refused() -> None:
    with pytest.raises(DiagnosticError) as caught:
        launch_of({"RANK": "0", "WORLD_SIZE": "2"})
    assert [d.where for d in caught.value.diagnostics] == ["MASTER_ADDR", "MASTER_PORT"]
    assert launch_of({"RANK": "0", "WORLD_SIZE": "1"}) is not None


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "engine",
    [
        EngineOptions(),  # each would serve the whole, or wait for ranks that never come
        EngineOptions(pipeline_parallel=3),
        EngineOptions(tensor_parallel=2, pipeline_parallel=2),
        EngineOptions(pipeline_parallel=2, stages_in_process=True),
    ],
)
def test_every_rank_refuses_a_command_for_another_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, rank: str, engine: EngineOptions
) -> None:
    for name, value in (TWO | {"RANK": rank}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DiagnosticError, match="SD832"):
        launched_options(Path("absent.yaml"), engine)


def test_stages_that_were_launched_are_processes_whatever_gpus_this_host_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two hosts of one GPU each: seen from one of them, two stages would share its GPU."""
    engine = EngineOptions(pipeline_parallel=2)
    assert launched_options(Path("absent.yaml"), engine) == engine
    for name, value in TWO.items():
        monkeypatch.setenv(name, value)
    found = launched_options(Path("absent.yaml"), engine)
    assert found is not None
    assert found.stages_in_process is False


def test_a_layout_of_another_size_is_refused_before_anything_is_waited_for() -> None:
    layout = ParallelLayout(pipeline_parallel=3, tensor_parallel=1)
    last = Launch(rank=3, world_size=4, local_rank=1, local_world_size=2)
    with pytest.raises(DiagnosticError, match="SD832") as caught:
        ProcessGroups(layout, last, device=torch.device("cpu"))
    assert (caught.value.diagnostics[0].expected, caught.value.diagnostics[0].found) == ("3", "4")


def test_gloo_is_told_the_interface_towards_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's own name often means 127.0.1.1, where no other host is."""
    monkeypatch.setattr(launch, "interface_towards", lambda address: f"to-{address}")
    environment = {"MASTER_ADDR": "10.0.0.1"}
    launch.name_interface(environment)
    assert environment["GLOO_SOCKET_IFNAME"] == "to-10.0.0.1"
    launch.name_interface(environment | {"MASTER_ADDR": "10.0.0.2"})
    assert environment["GLOO_SOCKET_IFNAME"] == "to-10.0.0.1"


@pytest.mark.parametrize("address", ["127.0.0.1", "no.such.host.invalid"])
def test_without_a_way_to_another_host_gloo_is_left_alone(address: str) -> None:
    environment = {"MASTER_ADDR": address}
    launch.name_interface(environment)
    assert "GLOO_SOCKET_IFNAME" not in environment


def test_a_rank_that_was_started_twice_is_refused() -> None:
    store = HashStore()
    PrefixStore("specctl", store).add("claim/1", 1)
    layout = ParallelLayout(pipeline_parallel=2, tensor_parallel=1)
    second = Launch(rank=1, world_size=2, local_rank=1, local_world_size=2)
    with pytest.raises(DiagnosticError, match="SD832") as caught:
        ProcessGroups(layout, second, store=store, device=torch.device("cpu"))
    assert caught.value.diagnostics[0].where == "RANK"


def test_a_rank_with_another_layout_or_other_weights_than_rank_0_ends(tmp_path: Path) -> None:
    """As many processes as rank 0 asks for, in other parts: each would wait for another group."""
    manifest = write_pair(tmp_path).manifest()
    plan = plan_of(
        manifest,
        resolve_config(manifest, Overrides(device="cpu", pipeline_parallel=2)),
        weights="sha256:1",
        has_tokenizer=False,
    )
    same = ParallelLayout(pipeline_parallel=2, tensor_parallel=1)
    refuse_another_start(plan, manifest, same, weights="sha256:1")
    other = ParallelLayout(pipeline_parallel=1, tensor_parallel=2)
    with pytest.raises(DiagnosticError, match="SD853") as caught:
        refuse_another_start(plan, manifest, other, weights="sha256:1")
    assert caught.value.diagnostics[0].found == "--pp 1 --tp 2"
    with pytest.raises(DiagnosticError, match="SD853") as caught:
        refuse_another_start(plan, manifest, same, weights="sha256:2")
    assert caught.value.diagnostics[0].where == "manifest#/target/files"
