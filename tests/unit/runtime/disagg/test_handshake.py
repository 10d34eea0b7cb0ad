"""The handshake names the first difference with both values, and lets layouts differ."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from runtime.disagg.handshake import Hello, Layout, Role, compare, shared_facts
from specctl.contract.codec import load_manifest
from specctl.contract.diagnostics import DiagnosticError

MANIFESTS = Path(__file__).parents[4] / "fixtures" / "manifests" / "v1"
EAGLE3 = load_manifest(MANIFESTS / "speculators-eagle3.yaml")
TARGET_ONLY = load_manifest(MANIFESTS / "target-only.yaml")


def facts(**changes: object) -> dict[str, str]:
    arguments = {
        "weights": "sha256:1",
        "dtype": "bfloat16",
        "kv_block_size": 16,
        "kv_heads": (2,) * 9,
        "proposer": "eagle3",
        "num_speculative_tokens": 4,
        "verification": "seeded",
        "first_proposal": "one_hot",
        "slot_state": ("feedback[64] bfloat16", "head_input[64] bfloat16"),
        "kernels": {"table": "a", "triton": "3.6.0", "architecture": "sm_90"},
    } | changes
    return shared_facts(EAGLE3, **arguments)  # type: ignore[arg-type]


def hello(role: Role, facts: dict[str, str], **changes: object) -> Hello:
    made = Hello(
        protocol=1,
        role=role,
        facts=facts,
        layout=Layout(stage_layers=(8,), tensor_parallel=1),
        transport="memory",
    )
    return msgspec.structs.replace(made, **changes)


def refusal(ours: Hello, theirs: Hello) -> str:
    with pytest.raises(DiagnosticError) as caught:
        compare(ours, theirs)
    (problem,) = caught.value.diagnostics
    assert problem.code == "SD860"
    return f"{problem.where}: {problem.expected} / {problem.found}"


def test_equal_sides_may_have_other_layouts() -> None:
    layout = Layout(stage_layers=(4, 4), tensor_parallel=2)
    ours, theirs = hello("decode", facts()), hello("prefill", facts(), layout=layout)
    assert ours.layout != theirs.layout
    compare(ours, theirs)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_speculative_tokens", 3, "num_speculative_tokens: 4 / 3"),
        ("proposer", "none", "proposer: eagle3 / none"),
        ("kv_block_size", 32, "kv_block_size: 16 / 32"),
        ("dtype", "float16", "dtype: bfloat16 / float16"),
        ("verification", "rejection", "verification: seeded / rejection"),
        ("first_proposal", "full", "first_proposal: one_hot / full"),
        (
            "slot_state",
            ("feedback[192] bfloat16", "head_input[64] bfloat16"),
            (
                "slot_state: feedback[64] bfloat16; head_input[64] bfloat16"
                " / feedback[192] bfloat16; head_input[64] bfloat16"
            ),
        ),
        ("kv_heads", (2,) * 8, "kv_heads: 2,2,2,2,2,2,2,2,2 / 2,2,2,2,2,2,2,2"),
        ("weights", "sha256:2", "weights: sha256:1 / sha256:2"),
        ("kernels", {"table": "b"}, "kernels.architecture: sm_90 / not stated"),
    ],
)
def test_the_first_difference_is_named(name: str, value: object, text: str) -> None:
    theirs = hello("prefill", facts(**{name: value}))
    assert refusal(hello("decode", facts()), theirs) == f"handshake, {text}"


def test_another_manifest_is_told_by_name_before_its_fingerprint() -> None:
    other = shared_facts(
        TARGET_ONLY,
        weights="sha256:1",
        dtype="bfloat16",
        kv_block_size=16,
        kv_heads=(2,) * 9,
        proposer="eagle3",
        num_speculative_tokens=4,
        verification="seeded",
        first_proposal="one_hot",
        slot_state=(),
        kernels={},
    )
    assert not refusal(hello("decode", facts()), hello("prefill", other)).startswith(
        "handshake, fingerprint"
    )


def test_roles_transports_and_protocols() -> None:
    ours = hello("decode", facts())
    assert refusal(ours, ours).startswith("handshake, role: decode")
    other = hello("prefill", facts(), transport="nixl")
    assert refusal(ours, other) == "handshake, transport: memory / nixl"
    assert refusal(ours, hello("prefill", facts(), protocol=2)) == "handshake, protocol: 1 / 2"


def test_a_hello_survives_the_wire() -> None:
    sent = hello("prefill", facts())
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Hello) == sent
