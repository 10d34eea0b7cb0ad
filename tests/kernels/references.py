"""float64 references of every op, and the error that float32 accumulation may leave.

Legend: M rows, K input features, N output features, H heads, G key heads, P head size.
"""

from __future__ import annotations

import torch

from tests.kernels.ladder import PagedRequests

HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of one rounding."""


def linear_reference(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    out = x_MK.double() @ weight_NK.double().t()
    return out if bias_N is None else out + bias_N.double()


def linear_tolerance(
    x_MK: torch.Tensor, weight_NK: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Bound |error| per element: any order of K float32 sums, then one rounding.

    Tensor cores may truncate while they align products, so a sum costs up to 2**-22 of the
    absolute products' total instead of 2**-24.
    """
    total = x_MK.double().abs() @ weight_NK.double().abs().t()
    sums = (x_MK.shape[1] + 1) * 2.0**-24 * total + 2.0**-22 * total
    rounding = HALF_ULP[out_dtype] * linear_reference(x_MK, weight_NK).abs()
    return sums + rounding + 1e-6 * (out_dtype == torch.float16) + 1e-30


def assert_linear_close(
    got_MN: torch.Tensor,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
) -> None:
    expected = linear_reference(x_MK, weight_NK, bias_N)
    allowed = linear_tolerance(x_MK, weight_NK, got_MN.dtype)
    if bias_N is not None:
        allowed = allowed + bias_N.double().abs() * (HALF_ULP[got_MN.dtype] + 2.0**-23)
    excess = (got_MN.double() - expected).abs() - allowed
    assert bool((excess <= 0).all()), f"largest excess {float(excess.max()):.3g}"


def rms_norm_reference(x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    x = x_MD.double()
    scale = (x.pow(2).mean(dim=-1, keepdim=True) + eps).rsqrt()
    return x * scale * weight_D.double()


def rope_reference(
    x_MHP: torch.Tensor, positions_M: torch.Tensor, cos_sin_TP: torch.Tensor
) -> torch.Tensor:
    half = x_MHP.shape[-1] // 2
    table = cos_sin_TP.double()[positions_M].unsqueeze(1)
    cos, sin = table[..., :half], table[..., half:]
    first, second = x_MHP.double().split(half, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def silu_and_mul_reference(gate_up_M2I: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_M2I.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def attention_reference(
    q_MHP: torch.Tensor,
    requests: PagedRequests,
    rows: list[tuple[int, int]],
    *,
    scale: float,
    window: int | None,
    limits: list[int] | None = None,
) -> torch.Tensor:
    """Attend row by row over gathered keys, up to the row's limit (default: its position)."""
    kv_block_size = requests.layer.k.shape[2]
    out = []
    limits = limits or [position for _, position in rows]
    for q_HP, (request, position), limit in zip(q_MHP.double(), rows, limits, strict=True):
        first = 0 if window is None else max(0, position - window + 1)
        keys = torch.arange(first, limit + 1, device=q_MHP.device)
        blocks = requests.tables[request].long()[keys // kv_block_size]
        k_LGP = requests.layer.k[blocks, :, keys % kv_block_size].double()
        v_LGP = requests.layer.v[blocks, :, keys % kv_block_size].double()
        group = q_HP.shape[0] // k_LGP.shape[1]
        q_GCP = q_HP.view(k_LGP.shape[1], group, -1)
        weights = torch.softmax(torch.einsum("gcp,lgp->gcl", q_GCP, k_LGP) * scale, dim=-1)
        out.append(torch.einsum("gcl,lgp->gcp", weights, v_LGP).flatten(0, 1))
    return torch.stack(out)
