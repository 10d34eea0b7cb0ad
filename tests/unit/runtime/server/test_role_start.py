"""What a role server is refused at its start, and how it says what it is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer

from runtime.config import Overrides
from runtime.disagg.handshake import CarrierName, Role
from runtime.disagg.limits import Limits
from runtime.disagg.listen import listen_at
from runtime.disagg.memory import SharedTransport
from runtime.engine.role_site import pool_allocator
from runtime.kv import KVLayer
from runtime.server.role_settings import RoleOptions
from runtime.server.roles import role_plan, transport_of
from specctl.cli.role_options import RoleFlags, ServeRole, check_role
from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import Diagnostic, DiagnosticError

MANIFEST = load_manifest(
    Path(__file__).parents[4] / "fixtures" / "manifests" / "v1" / "speculators-eagle3.yaml"
)


def refusal(options: RoleOptions, overrides: Overrides) -> Diagnostic:
    with pytest.raises(DiagnosticError) as caught:
        transport_of(options, MANIFEST, overrides)
    return caught.value.diagnostics[0]


def test_ranks_that_would_hold_parts_of_heads_are_refused() -> None:
    num_heads = MANIFEST.target.decoder.num_kv_heads
    for size in range(1, 2 * num_heads + 1):
        overrides = Overrides(pipeline_parallel=2, tensor_parallel=size)
        if num_heads % size == 0:
            assert transport_of(RoleOptions(role="decode"), MANIFEST, overrides).name == "shared"
            continue
        problem = refusal(RoleOptions(role="decode"), overrides)
        assert (problem.code, problem.where, problem.found) == ("SD869", "--tp", str(size))
        assert str(num_heads) in problem.message


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_only_a_pool_that_others_write_into_is_shared_memory(role: Role) -> None:
    """A prefill server's would outlive it: the system's tracker says so when it ends."""
    transport = SharedTransport()
    options = RoleOptions(role=role, listen="127.0.0.1:9" if role == "prefill" else None)
    plan = role_plan(options, weights="")
    allocate = pool_allocator(plan, transport)
    k, v = (allocate((2, 1, 4, 8), torch.float32, torch.device("cpu")) for _ in range(2))
    assert not k.any()
    layers = (KVLayer(k=k, v=v),)
    if role == "decode":
        transport.receive_into(layers).close()
        return
    with pytest.raises(DiagnosticError) as caught:
        transport.receive_into(layers)
    assert caught.value.diagnostics[0].found == "a pool outside shared memory"


def test_memory_joins_no_processes() -> None:
    problem = refusal(RoleOptions(role="decode", transport="memory"), Overrides())
    assert problem.code == "SD863"
    assert "--transport shared" in (problem.help or "")


@pytest.mark.parametrize("name", ["nixl", "mooncake"])
def test_a_missing_package_is_named_with_its_extra(
    name: CarrierName, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("importlib.import_module", missing)
    problem = refusal(RoleOptions(role="prefill", transport=name), Overrides())
    assert problem.code == "SD863"
    assert f"pip install 'specctl[{name}]'" in (problem.help or "")


def flags(**given: object) -> RoleFlags:
    names = RoleFlags.__dataclass_fields__
    return RoleFlags(**(dict.fromkeys(names) | given))


@pytest.mark.parametrize(
    ("given", "option"),
    [
        (flags(peer="a:1"), "--peer"),
        (flags(role=ServeRole.both, transport="nixl"), "--transport"),
        (flags(role=ServeRole.prefill), "--listen"),
        (flags(role=ServeRole.prefill, listen="a:1", peer="b:1"), "--peer"),
        (flags(role=ServeRole.decode), "--peer"),
        (flags(role=ServeRole.decode, peer="a:1", listen="b:1"), "--listen"),
    ],
)
def test_options_that_miss_or_do_nothing_are_wrong_usage(given: RoleFlags, option: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        check_role(given)
    assert caught.value.param_hint == option


def test_a_peer_that_may_write_is_fenced_for_its_own_silence_too() -> None:
    limits = Limits(silence_s=8, fence_s=1)
    assert limits.fence_after(may_write=False) == 1
    assert limits.fence_after(may_write=True) == 9


def test_an_address_that_is_none_is_refused_before_a_pool_is_made() -> None:
    with pytest.raises(DiagnosticError, match="SD865"):
        role_plan(RoleOptions(role="decode", peers=("127.0.0.1:9", "nohost")), weights="")


def test_a_taken_address_names_the_option_that_gave_it() -> None:
    with (
        listen_at("127.0.0.1", 0) as taken,
        pytest.raises(DiagnosticError, match="SD835") as caught,
    ):
        listen_at("127.0.0.1", taken.getsockname()[1])
    [found] = caught.value.diagnostics
    assert found.where == "--listen"
    assert "--listen" in (found.help or "")
