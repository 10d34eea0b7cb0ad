"""Compile every Triton kernel for a GPU architecture on a machine without one.

The cases are the kernels under the pinned configurations of representative models, so a tile that
no longer fits in shared memory, or a kernel that no longer compiles, shows in CI. Needs triton,
started without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.kernels.cuda import activation, attention, head, kv_write, linear, norm, rope
from runtime.kernels.gemm_table import BLOCK_M_CHOICES, GemmConfig, gemm_config, head_config

SHARED_LIMIT_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
"""Most shared memory one program may use, by architecture."""

_SPILL_CHECKED_ARCHS = (80, 90)  # sm_100 keeps frames of 8-16 bytes; nothing was tuned for it
_SCALARS = {"eps": "fp32", "scale_log2": "fp32"}
_INT64 = frozenset({"positions_ptr", "limits_ptr", "slots_ptr", "out_id_ptr"})
_INT32 = frozenset({"row_request_ptr", "table_ptr", "id_ptr"})
_FLOAT32 = frozenset(
    {"partial_ptr", "best_ptr", "out_logit_ptr", "values_ptr", "maximum_ptr", "total_ptr"}
)
_UNSPECIALISED = frozenset(
    {"num_rows", "num_tiles", "row_start", "num_segments", "window", "stride_table"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShapes:
    """Facts of a model that size its kernels.

    Args:
        head_rows: rows of its head, and of reduced heads of drafts for it.
        extra_weights: (N, K) of a draft's own products.
        has_bias: also compile the products with a bias (none of the models has one; Qwen2 does).
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
    has_bias: bool = False
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
        extra_weights=((576, 1728), (960, 1152)),
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
        head_rows=(128_256,),
    ),
    ModelShapes(
        name="Qwen3-8B",
        hidden_size=4096,
        intermediate_size=12_288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        head_rows=(151_936,),
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
    """

    kernel: Any
    dtype: str
    out_dtype: str
    constants: tuple[tuple[str, int | bool], ...]
    num_warps: int
    num_stages: int
    is_hot: bool

    @property
    def name(self) -> str:
        """Readable name, e.g. `linear_kernel bf16->fp32 BLOCK_M=16 ...`."""
        constants = " ".join(f"{key}={value}" for key, value in self.constants)
        return f"{self.kernel.__name__} {self.dtype}->{self.out_dtype} {constants}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledCase:
    """Resources of a compiled case.

    Args:
        shared_bytes: shared memory of one program.
        registers: per thread.
        spill_bytes: stack and local memory per thread; 0 when nothing spilled.
        ptx: the assembly text.
    """

    case: KernelCase
    shared_bytes: int
    registers: int
    spill_bytes: int
    ptx: str


def kernel_cases(arch: int) -> tuple[KernelCase, ...]:
    """Return every distinct case of every model, in a fixed order."""
    cases: dict[KernelCase, None] = {}
    for model in MODELS:
        for dtype in model.dtypes:
            for case in _model_cases(model, dtype, arch):
                cases[case] = None
    return tuple(cases)


def compile_case(case: KernelCase, arch: int) -> CompiledCase:
    """Compile a case to machine code and read its resources.

    Args:
        case: what to compile.
        arch: compute capability as major * 10 + minor.
    """
    kernel = case.kernel
    constants = dict(case.constants)
    signature = {name: _argument_type(name, case) for name in kernel.arg_names}
    for name in constants:
        signature[name] = "constexpr"
    index = {name: position for position, name in enumerate(kernel.arg_names)}
    attributes = {
        (index[name],): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind.startswith("*") or (kind == "i32" and name not in _UNSPECIALISED)
    }
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(index[name],): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spill_bytes = _resources(compiled.asm["cubin"])
    return CompiledCase(
        case=case,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        ptx=compiled.asm["ptx"],
    )


def failures(compiled: CompiledCase, arch: int) -> tuple[str, ...]:
    """Return what is wrong with a compiled case, empty when it may run."""
    found = []
    limit = SHARED_LIMIT_BYTES[arch]
    if compiled.shared_bytes > limit:
        found.append(f"{compiled.case.name}: {compiled.shared_bytes} B shared, limit {limit}")
    if compiled.case.is_hot and compiled.spill_bytes and arch in _SPILL_CHECKED_ARCHS:
        found.append(f"{compiled.case.name}: {compiled.spill_bytes} B spilled")
    return tuple(found)


def main(arguments: list[str] | None = None) -> int:
    """Compile every case and print one line each; exit 1 if any may not run."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--arch", type=int, default=90, choices=sorted(SHARED_LIMIT_BYTES))
    arch = parser.parse_args(arguments).arch
    problems: list[str] = []
    for case in kernel_cases(arch):
        compiled = compile_case(case, arch)
        sys.stdout.write(
            f"{compiled.shared_bytes:>7} B shared {compiled.registers:>4} registers "
            f"{compiled.spill_bytes:>4} B spilled  {case.name}\n"
        )
        problems.extend(failures(compiled, arch))
    sys.stdout.writelines(f"FAIL {problem}\n" for problem in problems)
    return 1 if problems else 0


def _model_cases(model: ModelShapes, dtype: str, arch: int) -> Iterator[KernelCase]:
    yield from _gemm_cases(model, dtype, arch)
    yield from _row_cases(model, dtype)
    heads = (model.num_heads, model.num_kv_heads, model.head_dim)
    yield _case(
        attention.attention_segment_kernel,
        dtype,
        attention.segment_constants(*heads, kv_block_size=16),
        num_warps=attention.ATTENTION_WARPS,
        num_stages=attention.ATTENTION_STAGES,
        is_hot=dtype != "fp32",
    )
    combine = attention.combine_constants(model.num_heads, model.head_dim)
    yield _case(attention.attention_combine_kernel, dtype, combine, num_warps=1)


def _gemm_cases(model: ModelShapes, dtype: str, arch: int) -> Iterator[KernelCase]:
    element_bytes = 4 if dtype == "fp32" else 2
    for shape in model.weights():
        config = gemm_config(*shape, element_bytes=element_bytes, arch=arch)
        out_dtype = "fp32" if config.split_k > 1 else dtype
        yield from _linear_cases(config, dtype, out_dtype, has_bias=model.has_bias)
        if config.split_k > 1:
            reduce = {"SPLIT_K": config.split_k, "BLOCK": linear.REDUCE_BLOCK}
            yield _case(linear.reduce_parts_kernel, dtype, {**reduce, "HAS_BIAS": model.has_bias})
    for head_rows in model.head_rows:
        config = head_config(head_rows, model.hidden_size, element_bytes=element_bytes, arch=arch)
        yield from _linear_cases(config, dtype, "fp32", has_bias=False)
        for block_m in _block_ms(dtype):
            yield _case(
                head.head_tile_kernel,
                dtype,
                head.head_constants(config, block_m),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                is_hot=dtype != "fp32",
            )
    yield _case(head.head_pick_kernel, "fp32", {"BLOCK": head.PICK_BLOCK})


def _linear_cases(
    config: GemmConfig, dtype: str, out_dtype: str, *, has_bias: bool
) -> Iterator[KernelCase]:
    for block_m in _block_ms(dtype):
        # A split product adds its bias in the reduction.
        own_bias = has_bias and config.split_k == 1
        yield _case(
            linear.linear_kernel,
            dtype,
            linear.linear_constants(config, block_m, has_bias=own_bias),
            out_dtype=out_dtype,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            is_hot=dtype != "fp32",
        )


def _block_ms(dtype: str) -> tuple[int, ...]:
    """All row tiles for the usual dtype, the largest one for the others: it needs most."""
    return BLOCK_M_CHOICES if dtype == "bf16" else BLOCK_M_CHOICES[-1:]


def _row_cases(model: ModelShapes, dtype: str) -> Iterator[KernelCase]:
    hidden, head_dim = model.hidden_size, model.head_dim
    heads = (model.num_heads, model.num_kv_heads, head_dim)
    for num_heads, width in ((1, hidden), (model.num_heads, head_dim)):
        constants = {"HEADS": num_heads, **norm.norm_constants(width)}
        yield _case(norm.rms_norm_kernel, dtype, constants, num_warps=norm.norm_warps(width))
    yield _case(
        norm.add_rms_norm_kernel,
        dtype,
        norm.norm_constants(hidden),
        num_warps=norm.norm_warps(hidden),
    )
    yield _case(rope.rope_kernel, dtype, rope.rope_constants(*heads))
    write = kv_write.write_kv_constants(model.num_kv_heads, 16, head_dim)
    yield _case(kv_write.write_kv_kernel, dtype, write)
    block = {"BLOCK": activation.ACTIVATION_BLOCK}
    yield _case(activation.silu_and_mul_kernel, dtype, block)


def _case(
    kernel: Any,
    dtype: str,
    constants: dict[str, int | bool] | dict[str, int],
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


def _argument_type(name: str, case: KernelCase) -> str:
    if not name.endswith("_ptr"):
        return _SCALARS.get(name, "i32")
    if name in _INT64:
        return "*i64"
    if name in _INT32:
        return "*i32"
    is_table = case.kernel is rope.rope_kernel and name == "table_ptr"
    if name in _FLOAT32 or is_table:
        return "*fp32"
    return f"*{case.out_dtype}" if name == "out_ptr" else f"*{case.dtype}"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return (registers, bytes of stack and local memory) per thread of a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        report = subprocess.run(
            [str(tool), "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report)}
    return found["REG"], found["STACK"] + found["LOCAL"]


if __name__ == "__main__":
    sys.exit(main())
