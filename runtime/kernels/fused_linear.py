"""Dense products of the residual stream: the norm before them, or the sum after them, inside.

`scaled_linear` reads a stream (qkv; gate and up with the activation), `residual_linear` adds to
one and writes it (o_proj, down_proj). Both are row-invariant as `linear` is;
`runtime.kernels.stream` says what travels between them.

Legend: M rows, K input features, N output features, I = N / 2, D stream width, T square tiles.
"""

from __future__ import annotations

import torch

from runtime.kernels.linear import linear_twin
from runtime.kernels.rows import fixed_exp, tree_sum
from runtime.kernels.stream import Stream, enter_stream_twin


def scaled_linear(
    stream: Stream,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    eps: float,
    is_gated: bool = False,
) -> torch.Tensor:
    """Normalise the stream's rows and multiply them by a weight.

    Args:
        stream: rows at the norm, K wide.
        weight_NK: [N, K]; gated, gate and up rows alternate (`interleave`).
        bias_N: [N] in the weight's row order, or None.
        eps: of the norm.
        is_gated: return silu(gate) * up instead of the product.

    Returns:
        [M, N], or [M, I] when gated, dtype of the stream.

    Exactness: float32 throughout, one rounding at the end; bits of a row are a function of that row
    and the weights alone.
    Graph-safe: yes (CUDA).
    """
    if stream.weighted_MD.is_cuda:
        from runtime.kernels.cuda.fused_linear import launch_scaled_linear

        return launch_scaled_linear(stream, weight_NK, bias_N, eps=eps, is_gated=is_gated)
    return scaled_linear_twin(stream, weight_NK, bias_N, eps=eps, is_gated=is_gated)


def residual_linear(
    x_MK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    *,
    residual_MD: torch.Tensor,
    norm_D: torch.Tensor,
    out_MD: torch.Tensor | None = None,
) -> Stream:
    """Multiply rows by a weight and add them to the stream.

    Args:
        x_MK: [M, K].
        weight_DK: [D, K], dtype of `x_MK`.
        bias_D: [D] or None.
        residual_MD: the stream, not modified.
        norm_D: [D], weight of the norm that comes next.
        out_MD: takes the new stream's own rows, with any stride between them; None: anywhere.

    Returns:
        The new stream at that norm.

    Exactness: product, bias and stream are added in float32 and rounded once; else as
    `scaled_linear`.
    Graph-safe: yes (CUDA).
    """
    if x_MK.is_cuda:
        from runtime.kernels.cuda.fused_linear import launch_residual_linear

        return launch_residual_linear(
            x_MK, weight_DK, bias_D, residual_MD=residual_MD, norm_D=norm_D, out_MD=out_MD
        )
    return residual_linear_twin(
        x_MK, weight_DK, bias_D, residual_MD=residual_MD, norm_D=norm_D, out_MD=out_MD
    )


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return rows gate 0, up 0, gate 1, up 1, ...: a tile of any width holds whole pairs.

    Args:
        gate: [I, ...].
        up: [I, ...].
    """
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def scaled_linear_twin(
    stream: Stream,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None = None,
    *,
    eps: float,
    is_gated: bool = False,
) -> torch.Tensor:
    """Compute `scaled_linear` with torch."""
    num_features = weight_NK.shape[1]
    product_MN = linear_twin(stream.weighted_MD, weight_NK, out_dtype=torch.float32)
    mean_square_M1 = tree_sum(stream.squares_MT) / num_features
    out_MN = product_MN * (1.0 / torch.sqrt(mean_square_M1 + eps))
    if bias_N is not None:
        out_MN = out_MN + bias_N.float()
    if is_gated:
        gate_MI, up_MI = out_MN[:, 0::2], out_MN[:, 1::2]
        out_MN = gate_MI / (1.0 + fixed_exp(-gate_MI)) * up_MI
    return out_MN.to(stream.weighted_MD.dtype)


def residual_linear_twin(
    x_MK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None = None,
    *,
    residual_MD: torch.Tensor,
    norm_D: torch.Tensor,
    out_MD: torch.Tensor | None = None,
) -> Stream:
    """Compute `residual_linear` with torch."""
    product_MD = linear_twin(x_MK, weight_DK, bias_D, out_dtype=torch.float32)
    stream_MD = (product_MD + residual_MD.float()).to(residual_MD.dtype)
    return enter_stream_twin(stream_MD if out_MD is None else out_MD.copy_(stream_MD), norm_D)
