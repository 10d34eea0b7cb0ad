"""The arm without the exactness contract: what the contract costs is measured against it.

For one number of rows, that of the point's target-only rounds, every product of the layers takes
the fastest of the vendor library and of a list of Triton tiles, the pinned one among them, and
attention the fastest of several segment lengths, the pinned one among them. The choice follows the
number of rows, so a row's bits may, too: that is what the contract forbids. Prefills, and rounds of
another number of rows, take the pinned kernels. The head's product is the pinned one in both arms.

Choices are timed once, before the engine is made, and frozen. On a CPU there is one alternative,
the vendor library's plain product, and no timing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch

from runtime.batch import PreparedBatch
from runtime.bench.steps import StepPlace, measure_steps
from runtime.bench.timing import sample
from runtime.config import RuntimeConfig
from runtime.kernels import Stream, enter_stream, residual_linear, scaled_linear
from runtime.kernels.fused_table import FusedConfig, FusedOp
from runtime.kernels.rows import attention_segment
from runtime.kernels.stream import square_tile
from runtime.kv import KVLayer
from runtime.loading import LoadedModels
from runtime.models import TargetModel
from runtime.models.layers import DecoderLayer

_SAMPLES = 5
_SEGMENTS = (64, 128, 256, 512, 1024)
"""Keys of a segment that are tried beside the pinned ones."""

Choice = FusedConfig | Literal["library", "pinned"]
Product = tuple[FusedOp, int, int]
"""What it is fused with, output and input features."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreeChoices:
    """How layers compute rounds of `num_rows` rows.

    Args:
        products: products that are not in it are pinned.
        segment: keys that attention sums at once; None pins it.
    """

    num_rows: int
    products: Mapping[Product, Choice]
    segment: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FreeLayer(DecoderLayer):
    """A decoder layer whose kernels follow the number of rows."""

    choices: FreeChoices

    def advance(
        self,
        stream: Stream,
        batch: PreparedBatch,
        cache: KVLayer,
        cos_sin_TP: torch.Tensor,
        *,
        next_norm_D: torch.Tensor,
        out_ND: torch.Tensor | None = None,
    ) -> Stream:
        """Run the layer; see `DecoderLayer.advance`."""
        assert out_ND is None, "nobody captures states of a target without the contract"
        choices, attention, mlp = self.choices, self.attention, self.mlp
        if batch.num_rows != choices.num_rows:
            return DecoderLayer.advance(
                self, stream, batch, cache, cos_sin_TP, next_norm_D=next_norm_D
            )
        eps = self.rms_norm_eps
        qkv = _scaled(choices, stream, attention.qkv_weight, attention.qkv_bias, eps, False)
        mixed = attention.mix(qkv, batch, cache, cos_sin_TP, segment=choices.segment)
        attended = _residual(
            choices,
            mixed,
            attention.o_weight,
            attention.o_bias,
            stream.residual_MD,
            self.post_attention_norm,
        )
        gated = _scaled(choices, attended, mlp.gate_up_weight, mlp.gate_up_bias, eps, True)
        return _residual(
            choices, gated, mlp.down_weight, mlp.down_bias, attended.residual_MD, next_norm_D
        )


def free_models(models: LoadedModels, choices: FreeChoices) -> LoadedModels:
    """Return the target over the same weights without the contract, and no draft."""
    target = models.target
    layers = tuple(
        FreeLayer(
            **{field.name: getattr(layer, field.name) for field in fields(DecoderLayer)},
            choices=choices,
        )
        for layer in target.layers
    )
    return LoadedModels(target=replace(target, layers=layers), draft=None, diagnostics=())


@torch.inference_mode()
def tune_products(models: LoadedModels, num_rows: int) -> FreeChoices:
    """Return the fastest choice for every product of the layers.

    A candidate is timed over the weights of all layers in turn, so that caches do not serve them.
    """
    target = models.target
    products: dict[Product, Choice] = {}
    for product in _products(target.layers[0]):
        if target.device.type != "cuda":
            products[product] = "library"
            continue
        steps: dict[Choice, Callable[[], object]] = {
            choice: _all_layers(target, product, choice, num_rows)
            for choice in _candidates(product)
        }
        times = sample(steps, lambda: None, _SAMPLES, target.device)
        products[product] = min(times, key=lambda choice: sorted(times[choice])[_SAMPLES // 2])
    return FreeChoices(num_rows=num_rows, products=products, segment=_pinned_segment(target))


def choose_kernels(models: LoadedModels, config: RuntimeConfig, place: StepPlace) -> FreeChoices:
    """Return the fastest products, then the fastest segment for whole steps with them.

    Args:
        models: with the target.
        config: of an engine without drafts.
        place: what the arm runs at; its requests give the number of rows.
    """
    found = tune_products(models, place.concurrency)
    if models.target.device.type != "cuda":
        return found
    times = {}
    for segment in sorted({*_SEGMENTS, _pinned_segment(models.target)}):
        tried = replace(found, segment=segment)
        (record,) = measure_steps(free_models(models, tried), config, place, name="contract-off")
        times[segment] = statistics.median(record.samples_s)
    return replace(found, segment=min(times, key=lambda segment: times[segment]))


def described(choices: FreeChoices) -> dict[str, str]:
    """Return what is computed how, in words."""
    found = {}
    for (op, columns, features), choice in choices.products.items():
        tile: object = choice
        if isinstance(choice, FusedConfig):
            tile = f"tile {choice.block_n} x {choice.block_k}, {choice.num_warps} warps"
        found[f"{op} {columns} x {features}"] = str(tile)
    return found | {"attention": f"segments of {choices.segment} keys"}


def _pinned_segment(target: TargetModel) -> int:
    return attention_segment(target.layers[0].attention.head_dim)


def _products(layer: DecoderLayer) -> Iterator[Product]:
    for op, weight in (
        ("scaled", layer.attention.qkv_weight),
        ("residual", layer.attention.o_weight),
        ("gated", layer.mlp.gate_up_weight),
        ("residual", layer.mlp.down_weight),
    ):
        yield _product(op, weight)  # type: ignore[arg-type]  # of the four literals above


def _product(op: FusedOp, weight_NK: torch.Tensor) -> Product:
    return op, weight_NK.shape[0], weight_NK.shape[1]


def _candidates(product: Product) -> list[Choice]:
    """Return the library, the pinned tile, and tiles around it."""
    op, columns, features = product
    found: list[Choice] = ["library", "pinned"]
    for block_n in (16, 32, 64):
        if op == "residual" and block_n % square_tile(columns):
            continue
        for block_k, stages in ((64, 4), (128, 4), (256, 3)):
            if block_k <= features:
                found.append(
                    FusedConfig(block_n=block_n, block_k=block_k, num_warps=4, num_stages=stages)
                )
    return found


def _all_layers(
    target: TargetModel, product: Product, choice: Choice, num_rows: int
) -> Callable[[], object]:
    """Return a function that computes one product in every layer, on random rows."""
    op, columns, features = product
    choices = FreeChoices(num_rows=num_rows, products={product: choice})
    like, eps = target.embedding_VD, target.facts.decoder.rms_norm_eps
    rows = like.new_empty((num_rows, features)).normal_()
    weights = [
        weight for layer in target.layers for known, weight in _weights(layer) if known == product
    ]
    if op == "residual":
        residual = like.new_empty((num_rows, columns)).normal_()
        norm = like.new_ones(columns)
        return lambda: [_residual(choices, rows, w, None, residual, norm) for w in weights]
    stream = enter_stream(rows, like.new_ones(features))
    return lambda: [_scaled(choices, stream, w, None, eps, op == "gated") for w in weights]


def _weights(layer: DecoderLayer) -> Sequence[tuple[Product, torch.Tensor]]:
    return (
        (_product("scaled", layer.attention.qkv_weight), layer.attention.qkv_weight),
        (_product("residual", layer.attention.o_weight), layer.attention.o_weight),
        (_product("gated", layer.mlp.gate_up_weight), layer.mlp.gate_up_weight),
        (_product("residual", layer.mlp.down_weight), layer.mlp.down_weight),
    )


def _scaled(
    choices: FreeChoices,
    stream: Stream,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    eps: float,
    is_gated: bool,
) -> torch.Tensor:
    choice = choices.products.get(_product("gated" if is_gated else "scaled", weight_NK), "pinned")
    if choice == "pinned":
        return scaled_linear(stream, weight_NK, bias_N, eps=eps, is_gated=is_gated)
    if isinstance(choice, FusedConfig):
        from runtime.kernels.cuda.fused_linear import launch_scaled_linear

        return launch_scaled_linear(
            stream, weight_NK, bias_N, eps=eps, is_gated=is_gated, config=choice
        )
    x_MK = stream.weighted_MD
    mean_M1 = stream.squares_MT.sum(dim=1, keepdim=True) / weight_NK.shape[1]
    out_MN = torch.nn.functional.linear(x_MK, weight_NK).float() * torch.rsqrt(mean_M1 + eps)
    if bias_N is not None:
        out_MN = out_MN + bias_N.float()
    if is_gated:
        out_MN = torch.nn.functional.silu(out_MN[:, 0::2]) * out_MN[:, 1::2]
    return out_MN.to(x_MK.dtype)


def _residual(
    choices: FreeChoices,
    x_MK: torch.Tensor,
    weight_DK: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual_MD: torch.Tensor,
    norm_D: torch.Tensor,
) -> Stream:
    choice = choices.products.get(_product("residual", weight_DK), "pinned")
    if choice == "pinned":
        return residual_linear(x_MK, weight_DK, bias_D, residual_MD=residual_MD, norm_D=norm_D)
    if isinstance(choice, FusedConfig):
        from runtime.kernels.cuda.fused_linear import launch_residual_linear

        return launch_residual_linear(
            x_MK, weight_DK, bias_D, residual_MD=residual_MD, norm_D=norm_D, config=choice
        )
    out_MD = torch.nn.functional.linear(x_MK, weight_DK, bias_D) + residual_MD
    return enter_stream(out_MD, norm_D)
