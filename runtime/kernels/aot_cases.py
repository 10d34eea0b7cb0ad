"""What `runtime.kernels.aot` compiles: kernels under the pinned tiles of representative models.

Legend: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.kernels.cuda import (
    activation,
    fused_linear,
    head,
    head_rows,
    joined_linear,
    kv_write,
    linear,
    norm,
    normed_rows,
    rope,
    stream,
)
from runtime.kernels.fused_table import FusedConfig, FusedOp, fused_config
from runtime.kernels.gemm_table import BLOCK_M_CHOICES, GemmConfig, gemm_config, head_config
from runtime.kernels.row_tiles import RowTile, row_tile

_ROW_COUNTS = (16, 32, 64, 160, 256, 512, 1024, 4096)  # each runs a row tile of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShapes:
    """Facts of a model that size its kernels.

    Args:
        head_rows: rows of its head, and of reduced heads of drafts for it.
        extra_weights: (N, K) of a draft's own products.
        joined_width: of the halves that its EAGLE-3 draft's first layer joins, or None.
        has_bias: also compile the products with a bias (none of the models has one; Qwen2 does).
        has_qk_norm: whether its heads have norms before the rotation.
        dtypes: Triton names of the storage dtypes to compile for.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_rows: tuple[int, ...]
    extra_weights: tuple[tuple[int, int], ...] = ()
    joined_width: int | None = None
    has_bias: bool = False
    has_qk_norm: bool = False
    dtypes: tuple[str, ...] = ("bf16",)

    def weights(self) -> tuple[tuple[int, int], ...]:
        """Return (N, K) of qkv, o, gate and up, down, and the extra weights."""
        query = self.num_heads * self.head_dim
        key = self.num_kv_heads * self.head_dim
        return (
            (query + 2 * key, self.hidden_size),
            (self.hidden_size, query),
            (2 * self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.intermediate_size),
            *self.extra_weights,
        )


MODELS = (
    ModelShapes(
        name="SmolLM2-135M",
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        head_rows=(49_152, 8_192),
        extra_weights=((576, 1728),),
        joined_width=576,
        has_bias=True,
        dtypes=("bf16", "fp16", "fp32"),
    ),
    ModelShapes(
        name="Llama-3.2-1B",
        hidden_size=2048,
        intermediate_size=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        head_rows=(128_256, 248_320, 32_768),
    ),
    ModelShapes(
        name="Qwen3-8B",
        hidden_size=4096,
        intermediate_size=12_288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        head_rows=(151_936, 32_768),
        has_qk_norm=True,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCase:
    """One kernel with everything that selects a binary.

    Args:
        kernel: the Triton function.
        dtype: Triton name of the storage dtype: bf16, fp16 or fp32.
        out_dtype: Triton name of the dtype of `out_ptr`.
        constants: compile-time arguments.
        num_warps: warps of a program.
        num_stages: depth of the load pipeline.
        is_hot: whether a register spill counts as a failure.
        fuses_products: whether a product and a sum may become one operation with one rounding.
    """

    kernel: Any
    dtype: str
    out_dtype: str
    constants: tuple[tuple[str, int | bool], ...]
    num_warps: int
    num_stages: int
    is_hot: bool
    fuses_products: bool = True

    @property
    def name(self) -> str:
        """Readable name, e.g. `linear_kernel bf16->fp32 BLOCK_M=16 ...`."""
        constants = " ".join(f"{key}={value}" for key, value in self.constants)
        return f"{self.kernel.__name__} {self.dtype}->{self.out_dtype} {constants}"


def kernel_cases(arch: int) -> tuple[KernelCase, ...]:
    """Return every distinct case of every model, in a fixed order."""
    cases: dict[KernelCase, None] = {}
    for model in MODELS:
        for dtype in model.dtypes:
            for case in _model_cases(model, dtype, arch):
                cases[case] = None
    return tuple(cases)


def _model_cases(model: ModelShapes, dtype: str, arch: int) -> Iterator[KernelCase]:
    yield from _gemm_cases(model, dtype, arch)
    yield from _fused_cases(model, dtype, arch)
    if model.joined_width is not None:
        yield from _joined_cases(model.weights()[0][0], model.joined_width, dtype, arch)
    yield from _row_cases(model, dtype, is_overlapping=arch >= 90)


def _gemm_cases(model: ModelShapes, dtype: str, arch: int) -> Iterator[KernelCase]:
    element_bytes = 4 if dtype == "fp32" else 2
    for shape in model.weights():
        config = gemm_config(*shape, element_bytes=element_bytes, arch=arch)
        out_dtype = "fp32" if config.split_k > 1 else dtype
        yield from _linear_cases(config, dtype, out_dtype, arch, has_bias=model.has_bias)
        if config.split_k > 1:
            reduce = {"SPLIT_K": config.split_k, "BLOCK": linear.REDUCE_BLOCK}
            flags = {"HAS_BIAS": model.has_bias, "OVERLAP": arch >= 90}
            yield _case(linear.reduce_parts_kernel, dtype, {**reduce, **flags})
    for rows in model.head_rows:
        config = head_config(rows, model.hidden_size, element_bytes=element_bytes, arch=arch)
        yield from _linear_cases(config, dtype, "fp32", arch, is_scaled=True)
        for block_m in _block_ms(dtype):
            yield _case(
                head.head_tile_kernel,
                dtype,
                {
                    **head.head_constants(config, block_m),
                    **head.head_features(config, model.hidden_size),
                    **stream.scale_constants(model.hidden_size),
                    "STAGES": config.num_stages,
                    "SCALED": True,
                    "OVERLAP": 2 * (arch >= 90),
                },
                num_warps=config.num_warps,
                is_hot=dtype != "fp32",
            )
    for is_named, has_rivals in ((False, False), (True, False), (True, True)):
        pick = head.pick_constants(is_named=is_named, is_copied=is_named, has_rivals=has_rivals)
        yield _case(head.head_pick_kernel, "fp32", {**pick, "OVERLAP": arch >= 90})
    config = head_config(1, model.hidden_size, element_bytes=element_bytes, arch=arch)
    yield _case(
        normed_rows.row_scales_kernel, "fp32", normed_rows.row_scale_constants(model.hidden_size)
    )
    yield _case(
        head_rows.head_rows_kernel,
        dtype,
        {
            **head_rows.head_rows_constants(config, model.hidden_size),
            "SLOTTED": True,
            "SCALED": True,
            "OVERLAP": arch >= 90,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        is_hot=dtype != "fp32",
    )


def _linear_cases(
    config: GemmConfig,
    dtype: str,
    out_dtype: str,
    arch: int,
    *,
    has_bias: bool = False,
    is_scaled: bool = False,
) -> Iterator[KernelCase]:
    for block_m in _block_ms(dtype):
        # A split product adds its bias in the reduction.
        own_bias = has_bias and config.split_k == 1
        yield _case(
            linear.linear_kernel,
            dtype,
            {
                **linear.linear_constants(config, block_m, has_bias=own_bias),
                "SCALED": is_scaled,
                "OVERLAP": arch >= 90,
            },
            out_dtype=out_dtype,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            is_hot=dtype != "fp32",
        )


def _fused_cases(model: ModelShapes, dtype: str, arch: int) -> Iterator[KernelCase]:
    qkv, o, gate_up, down = model.weights()[:4]
    products: tuple[tuple[FusedOp, tuple[int, int]], ...] = (
        ("scaled", qkv),
        ("residual", o),
        ("gated", gate_up),
        ("residual", down),
    )
    element_bytes = 4 if dtype == "fp32" else 2
    for op, (columns, features) in products:
        config = fused_config(op, columns, features, element_bytes=element_bytes, arch=arch)
        for tile in _row_tiles(op, config, columns, features, dtype):
            # Overlapping only adds the waits; the least tile stands for it.
            is_overlapping = arch >= 90 and tile.block_m == BLOCK_M_CHOICES[0]
            own = (
                fused_linear.residual_constants(columns)
                if op == "residual"
                else {**stream.scale_constants(features), "GATED": op == "gated"}
            )
            shared = fused_linear.tile_constants(
                columns, features, config, tile, overlapped=2 * is_overlapping
            )
            yield _case(
                fused_linear.residual_linear_kernel
                if op == "residual"
                else fused_linear.scaled_linear_kernel,
                dtype,
                {**own, **shared, "HAS_BIAS": model.has_bias and not is_overlapping},
                num_warps=tile.num_warps,
                is_hot=dtype != "fp32" and not tile.in_turn,
            )
    entry = stream.stream_constants(model.hidden_size)
    for is_gathered in (False, True):
        flags = {"GATHER": is_gathered, "OVERLAP": arch >= 90}
        yield _case(stream.enter_stream_kernel, dtype, {**entry, **flags})


def _row_tiles(
    op: FusedOp, config: FusedConfig, columns: int, features: int, dtype: str
) -> list[RowTile]:
    """Return what launches of any number of rows run, each once."""
    counts = _ROW_COUNTS if dtype == "bf16" else BLOCK_M_CHOICES[-1:]
    size = 4 if dtype == "fp32" else 2
    tiles = (row_tile(op, config, columns, features, m, element_bytes=size) for m in counts)
    return list(dict.fromkeys(tiles))


def _joined_cases(columns: int, width: int, dtype: str, arch: int) -> Iterator[KernelCase]:
    element_bytes = 4 if dtype == "fp32" else 2
    config = joined_linear.joined_config(columns, width, element_bytes=element_bytes, arch=arch)
    flags = {
        "FIRST_GATHERED": True,
        "FIRST_NORMED": True,
        "SECOND_GATHERED": False,
        "SECOND_NORMED": True,
        "HAS_BIAS": False,
    }
    for block_m in _block_ms(dtype):
        constants = joined_linear.joined_constants(
            columns,
            width,
            config,
            block_m,
            element_bytes=element_bytes,
            is_overlapping=arch >= 90,
        )
        yield _case(
            joined_linear.joined_linear_kernel,
            dtype,
            {**flags, **constants},
            num_warps=config.num_warps,
            is_hot=dtype != "fp32",
        )


def _block_ms(dtype: str) -> tuple[int, ...]:
    """All row tiles for the usual dtype, the largest one for the others: it needs most."""
    return BLOCK_M_CHOICES if dtype == "bf16" else BLOCK_M_CHOICES[-1:]


def _row_cases(model: ModelShapes, dtype: str, *, is_overlapping: bool) -> Iterator[KernelCase]:
    hidden, head_dim = model.hidden_size, model.head_dim
    heads = (model.num_heads, model.num_kv_heads, head_dim)
    constants = {**norm.norm_constants(hidden), "OVERLAP": is_overlapping}
    yield _case(norm.rms_norm_kernel, dtype, constants, num_warps=norm.norm_warps(hidden))
    if model.has_qk_norm:
        for num_heads in heads[:2]:
            yield _case(norm.head_norm_kernel, dtype, norm.head_norm_constants(num_heads, head_dim))
    yield _case(rope.rope_kernel, dtype, rope.rope_constants(*heads))
    write = kv_write.write_kv_constants(model.num_kv_heads, 16, head_dim)
    yield _case(kv_write.write_kv_kernel, dtype, write)
    block = {"BLOCK": activation.ACTIVATION_BLOCK}
    yield _case(activation.silu_and_mul_kernel, dtype, block)


def _case(
    kernel: Any,
    dtype: str,
    constants: Mapping[str, int | bool],
    *,
    out_dtype: str | None = None,
    num_warps: int = 4,
    num_stages: int = 3,
    is_hot: bool = False,
) -> KernelCase:
    return KernelCase(
        kernel=kernel,
        dtype=dtype,
        out_dtype=out_dtype or dtype,
        constants=tuple(constants.items()),
        num_warps=num_warps,
        num_stages=num_stages,
        is_hot=is_hot,
    )
