"""Rotary embedding tables: fp32 cosines and sines of integer positions, made once at load.

Tables are computed on the CPU and then moved, so that every device rotates by the same numbers.
Angles are fp32 products position * inv_freq, as the reference implementation computes them.
*Source:* transformers `modeling_rope_utils` (default, linear, llama3, yarn); YaRN arXiv 2309.00071.
Kinds whose frequencies depend on the running length (dynamic, longrope) are refused: a row's
numbers must depend on its own position only (exactness contract).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from specctl.contract.diagnostics import Diagnostic, diagnose
from specctl.contract.manifest import Decoder, Rope

# kind -> (numbers that must be given, numbers for which the kind itself defines a default)
_PARAMETERS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "llama3": (
        frozenset(
            {
                "factor",
                "low_freq_factor",
                "high_freq_factor",
                "original_max_position_embeddings",
            }
        ),
        frozenset(),
    ),
    "yarn": (
        frozenset({"factor", "original_max_position_embeddings"}),
        frozenset(
            {
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
}


def rope_problems(rope: Rope, *, head_dim: int, where: str) -> list[Diagnostic]:
    """Return what keeps `rope` from being computed.

    Returns:
        SD811 for an unsupported kind or number, a number that is none or not above 0, or an odd
        `head_dim`; SD812 for a missing number;
        empty when it runs.
    """
    if head_dim % 2:
        return [
            diagnose(
                "SD811",
                where=where,
                message=f"a rotary embedding turns pairs, and `head_dim` {head_dim} is odd",
                expected="an even number",
                found=head_dim,
            )
        ]
    if rope.kind not in _PARAMETERS:
        return [
            diagnose(
                "SD811",
                where=f"{where}/kind",
                message=f"rotary kind `{rope.kind}` is not supported",
                expected=", ".join(sorted(_PARAMETERS)),
                found=rope.kind,
            )
        ]
    required, optional = _PARAMETERS[rope.kind]
    given = {name for name, value in rope.parameters.items() if value is not None}
    unknown = [
        diagnose(
            "SD811",
            where=f"{where}/parameters/{name}",
            message=f"rotary kind `{rope.kind}` does not use `{name}`",
            expected=", ".join(sorted(required | optional)) or "no parameters",
            found=f"{name} = {rope.parameters[name]}",
        )
        for name in sorted(given - required - optional)
    ]
    missing = [
        diagnose(
            "SD812",
            where=f"{where}/parameters",
            message=f"rotary kind `{rope.kind}` needs `{name}`",
            expected=name,
            found=", ".join(sorted(given)) or "no parameters",
        )
        for name in sorted(required - given)
    ]
    wrong = [
        diagnose(
            "SD811",
            where=f"{where}/parameters/{name}",
            message=f"`{name}` of rotary kind `{rope.kind}` is {rope.parameters[name]!r}",
            expected="a number above 0",
            found=repr(rope.parameters[name]),
        )
        for name in sorted(given & required)
        if not _is_above_zero(rope.parameters[name])
    ]
    return unknown + missing + wrong


def _is_above_zero(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def rope_table(
    rope: Rope, *, head_dim: int, num_positions: int, device: torch.device
) -> torch.Tensor:
    """Return cos (first half) and sin (second half) of positions 0..num_positions - 1.

    Args:
        rope: facts without `rope_problems`.
        head_dim: P, even.
        num_positions: rows of the table.
        device: where the table lives; it is computed on the CPU.

    Returns:
        fp32 [num_positions, P].
    """
    inv_freq, scale = _frequencies(rope, head_dim)
    angles = torch.arange(num_positions).float()[:, None] * inv_freq[None, :]
    table = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1)
    return table.to(device)


def decoder_rope_table(
    decoder: Decoder, *, num_positions: int, device: torch.device
) -> torch.Tensor:
    """Return the `rope_table` of a stack of layers."""
    return rope_table(
        decoder.rope, head_dim=decoder.head_dim, num_positions=num_positions, device=device
    )


def _frequencies(rope: Rope, head_dim: int) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies, fp32 [P / 2], and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    powers = rope.theta**exponents
    if rope.kind == "default":
        return 1.0 / powers, 1.0
    if rope.kind == "linear":
        return (1.0 / powers) / _number(rope, "factor"), 1.0
    if rope.kind == "llama3":
        return _llama3(rope, 1.0 / powers), 1.0
    assert rope.kind == "yarn", f"rope kind {rope.kind} passed rope_problems"
    return _yarn(rope, powers, head_dim)


def _llama3(rope: Rope, inv_freq: torch.Tensor) -> torch.Tensor:
    """Scale low frequencies down, keep high ones, interpolate between (Llama 3.1)."""
    factor = _number(rope, "factor")
    low = _number(rope, "low_freq_factor")
    high = _number(rope, "high_freq_factor")
    length = _number(rope, "original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > length / low, inv_freq / factor, inv_freq)
    smooth = (length / wavelength - low) / (high - low)
    interpolated = (1 - smooth) * scaled / factor + smooth * scaled
    is_between = (wavelength >= length / high) & (wavelength <= length / low)
    return torch.where(is_between, interpolated, scaled)


def _yarn(rope: Rope, powers: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """Blend interpolated and original frequencies along a ramp over the dimensions."""
    factor = _number(rope, "factor")
    length = _number(rope, "original_max_position_embeddings")

    def dimension(num_rotations: float) -> float:
        """Return the dimension that turns `num_rotations` times within the original length."""
        turns = length / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low = dimension(_number(rope, "beta_fast", 32.0))
    high = dimension(_number(rope, "beta_slow", 1.0))
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
    keep = 1 - ramp.clamp(0, 1)
    inv_freq = (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep
    return inv_freq, _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: Rope, factor: float) -> float:
    """Return the factor on cos and sin: given, or from `mscale`, or from `factor` alone."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.parameters.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    mscale = _number(rope, "mscale", 0.0)
    mscale_all_dim = _number(rope, "mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _number(rope: Rope, name: str, default: float | None = None) -> float:
    """Return a parameter as a float; `default` is one that the rope kind itself defines."""
    value = rope.parameters.get(name)
    if value is None:
        value = default
    assert isinstance(value, (int, float)), f"rope parameter {name} is {value!r}, not a number"
    return float(value)
