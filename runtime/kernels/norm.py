"""Root-mean-square norms of rows and of heads.

Rounding points are those of `transformers`' LlamaRMSNorm: square, mean and scale in float32, the
normalised value rounded to the storage dtype, then multiplied by the weight in the storage dtype.

Legend: M rows, D width, H heads, P head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels.rows import tree_sum


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowNorm:
    """A norm of rows that the product after it takes in.

    Args:
        weight_D: [D].
        eps: added to the mean square.
    """

    weight_D: torch.Tensor
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadNorms:
    """The norms of a row's query and key heads.

    Args:
        q_P: [P], weight shared by the query heads.
        k_P: [P], weight shared by the key heads.
        eps: added to the mean squares.
    """

    q_P: torch.Tensor
    k_P: torch.Tensor
    eps: float


def rms_norm(x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise each row.

    Args:
        x_MD: [M, D] float32, bfloat16 or float16.
        weight_D: [D], dtype of `x_MD`.
        eps: added to the mean square.

    Returns:
        [M, D], dtype of `x_MD`.

    Exactness: one program per row, a summation tree fixed by D.
    Graph-safe: yes (CUDA).
    """
    if x_MD.is_cuda:
        from runtime.kernels.cuda.norm import launch_rms_norm

        return launch_rms_norm(x_MD, weight_D, eps)
    return rms_norm_twin(x_MD, weight_D, eps)


def head_rms_norm(x_MHP: torch.Tensor, weight_P: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise every head of every row (the q and k norm of Qwen3).

    Args:
        x_MHP: [M, H, P].
        weight_P: [P], shared by the heads.
        eps: added to the mean square.

    Returns:
        [M, H, P], dtype of `x_MHP`; P is even.

    Exactness: a summation tree fixed by P, the one of `attend_new_rows`.
    Graph-safe: yes (CUDA).
    """
    if x_MHP.is_cuda:
        from runtime.kernels.cuda.norm import launch_head_rms_norm

        return launch_head_rms_norm(x_MHP, weight_P, eps)
    num_rows, num_heads, head_dim = x_MHP.shape
    flat = rms_norm_twin(x_MHP.reshape(num_rows * num_heads, head_dim), weight_P, eps)
    return flat.view(num_rows, num_heads, head_dim)


def weigh_rows_twin(x_MD: torch.Tensor, norm: RowNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a norm into what goes before a product and what goes after it.

    Returns:
        (rows times the weight, rounded once, [M, D]; the rows' scale, float32 [M, 1]): the product
        of the former times the latter is that of the normalised rows, with fewer roundings.
    """
    x = x_MD.float()
    mean_square_M1 = tree_sum(x * x) / x.shape[-1]
    weighted_MD = (x * norm.weight_D.float()).to(x_MD.dtype)
    return weighted_MD, 1.0 / torch.sqrt(mean_square_M1 + norm.eps)


def rms_norm_twin(x_MD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `rms_norm` with torch; division and square root are correctly rounded."""
    x = x_MD.float()
    mean_square = tree_sum(x * x) / x.shape[-1]
    scale = 1.0 / torch.sqrt(mean_square + eps)
    return (x * scale).to(x_MD.dtype) * weight_D
