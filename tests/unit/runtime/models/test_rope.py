"""Rotary tables against transformers' own frequencies, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from runtime.models.layers import rope_problems, rope_table
from specctl.contract.manifest import Rope

CPU = torch.device("cpu")
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {"factor": 2.5}),
    "llama3": ("llama3", LLAMA3),
    "yarn": ("yarn", YARN),
    "yarn-no-truncate": ("yarn", YARN | {"truncate": False}),
    "yarn-betas": ("yarn", YARN | {"beta_fast": 16, "beta_slow": 2}),
    "yarn-mscale": ("yarn", YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}),
    "yarn-attention-factor": ("yarn", YARN | {"attention_factor": 1.25}),
}


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_scaled_tables_have_the_bits_of_transformers(case: str, head_dim: int) -> None:
    kind, parameters = CASES[case]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": kind, "rope_theta": 50000.0, **parameters},
    )
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config)
    rope = Rope(theta=50000.0, kind=kind, parameters=parameters)
    assert rope_problems(rope, head_dim=head_dim, where="manifest#/target/decoder/rope") == []
    table = rope_table(rope, head_dim=head_dim, num_positions=2048, device=CPU)
    assert torch.equal(table, _table(inv_freq, scale))


def test_default_table_has_the_bits_of_the_model_class() -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=4096)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 100000.0}
    positions = torch.arange(4096)[None]
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    table = rope_table(Rope(theta=100000.0), head_dim=64, num_positions=4096, device=CPU)
    assert table.dtype == torch.float32
    assert torch.equal(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "axial"])
def test_kinds_that_change_with_length_are_refused(kind: str) -> None:
    (problem,) = rope_problems(Rope(theta=1e4, kind=kind), head_dim=8, where="manifest#/rope")
    assert problem.code == "SD811"
    assert problem.found == kind
    assert "yarn" in (problem.expected or "")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_each_missing_number_is_named(kind: str) -> None:
    problems = rope_problems(Rope(theta=1e4, kind=kind), head_dim=8, where="manifest#/rope")
    assert {problem.code for problem in problems} == {"SD812"}
    assert "factor" in {problem.expected for problem in problems}


def test_a_number_nobody_reads_is_refused() -> None:
    rope = Rope(theta=1e4, kind="linear", parameters={"factor": 2.0, "mrope_section": [2.0, 2.0]})
    (problem,) = rope_problems(rope, head_dim=8, where="manifest#/rope")
    assert problem.code == "SD811"
    assert problem.where == "manifest#/rope/parameters/mrope_section"


def test_odd_head_size_is_refused() -> None:
    (problem,) = rope_problems(Rope(theta=1e4), head_dim=7, where="manifest#/rope")
    assert problem.code == "SD811"
    assert problem.found == "7"


def _table(inv_freq: torch.Tensor, scale: float) -> torch.Tensor:
    angles = torch.arange(2048)[:, None].float() * inv_freq.float()
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1)


@pytest.mark.parametrize("value", ["8.0", 0, -8.0, True, [8.0]])
def test_a_factor_that_is_no_number_above_zero_is_refused(value: object) -> None:
    rope = Rope(theta=1e4, kind="linear", parameters={"factor": value})  # type: ignore[dict-item]
    (problem,) = rope_problems(rope, head_dim=8, where="manifest#/rope")
    assert (problem.code, problem.found) == ("SD811", repr(value))
    assert problem.where == "manifest#/rope/parameters/factor"
