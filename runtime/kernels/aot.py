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
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from runtime.kernels import aot_cases
from runtime.kernels.aot_attention import attention_cases
from runtime.kernels.aot_blocks import block_cases
from runtime.kernels.aot_cases import KernelCase
from runtime.kernels.aot_draws import draw_cases
from runtime.kernels.aot_rounds import round_cases
from runtime.kernels.cuda import rope, sample

SHARED_LIMIT_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
"""Most shared memory one program may use, by architecture."""

_SPILL_CHECKED_ARCHS = (80, 90)  # sm_100 keeps frames of 8-16 bytes; nothing was tuned for it
_SCALARS = {
    "eps": "fp32",
    "scale_log2": "fp32",
    "norm_eps": "fp32",
    "mean_factor": "fp32",
    "first_eps": "fp32",
    "second_eps": "fp32",
}
_INT64 = frozenset(
    {
        "positions_ptr",
        "limits_ptr",
        "windows_ptr",
        "slots_ptr",
        "out_id_ptr",
        "names_ptr",
        "copy_ptr",
        "ids_ptr",
        "first_ids_ptr",
        "second_ids_ptr",
        "drafts_ptr",
        "chosen_ptr",
        "num_drafts_ptr",
        "accepted_ptr",
        "committed_ptr",
        "seed_low_ptr",
        "seed_high_ptr",
        "choice_ptr",
        "position_ptr",
        "noise_ids_ptr",
        "top_k_ptr",
        "masses_ptr",
        "border_ptr",
        "slot_lengths_ptr",
        "slot_newest_ptr",
        "lengths_ptr",
        "newest_ptr",
        "kv_slots_ptr",
        "row_slots_ptr",
        "anchors_ptr",
        "ends_ptr",
        "output_ptr",
        "found_ptr",
        "place_positions_ptr",
        "place_kv_slots_ptr",
        "round_ids_ptr",
        "first_rows_ptr",
        "last_rows_ptr",
        "inputs_ptr",
        "next_ids_ptr",
        "from_ptr",
        "to_ptr",
        "host_output_ptr",
        "counted_ptr",
        "host_counted_ptr",
        "more_ids_ptr",
        "own_ptr",
        "own_counts_ptr",
    }
)
_INT32 = frozenset(
    {
        "history_ptr",
        "row_request_ptr",
        "request_ptr",
        "counts_ptr",
        "list_ptr",
        "table_ptr",
        "tables_ptr",
        "slot_table_ptr",
        "tiles_ptr",
        "arrivals_ptr",
        "id_ptr",
        "rival_id_ptr",
        "column_ptr",
        "entry_ptr",
    }
)
_FLOAT32 = frozenset(
    {
        "partial_ptr",
        "best_ptr",
        "rival_best_ptr",
        "out_logit_ptr",
        "values_ptr",
        "maximum_ptr",
        "total_ptr",
        "squares_ptr",
        "scale_ptr",
        "logits_ptr",
        "cos_sin_ptr",
        "chances_ptr",
        "kept_ptr",
        "host_chances_ptr",
        "peak_ptr",
        "temperature_ptr",
        "scaled_ptr",
        "log_min_p_ptr",
    }
)
_OTHERS = {"is_sampled_ptr": "*i1", "is_outside_ptr": "*i1", "top_p_ptr": "*fp64"}
_UNSPECIALISED = frozenset(
    {
        "num_rows",
        "num_tiles",
        "tile_start",
        "num_segments",
        "num_blocks",
        "num_places",
        "window",
        "padding_slot",
        "stride_table",
        "stride_output",
        "stride_copy",
        "stride_place",
        "first_id",
        "stride_logits",
        "stride_slots",
        "stride_chances",
        "stride_kept",
        "stride_drafts",
        "stride_chosen",
        "num_cells",
        "num_requests",
        "num_lanes",
        "num_peaks",
        "num_rivals",
        "num_own",
        "num_named",
    }
)

_MANY = frozenset({"states_ptr"})


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
    """Return every distinct case in a fixed order: of models, attention, blocks, draws, rounds."""
    models = aot_cases.kernel_cases(arch)
    return (
        *models,
        *attention_cases(arch),
        *block_cases(arch),
        *draw_cases(arch),
        *round_cases(arch),
    )


def compile_case(case: KernelCase, arch: int) -> CompiledCase:
    """Compile a case to machine code and read its resources.

    Args:
        case: what to compile.
        arch: compute capability as major * 10 + minor.
    """
    kernel = case.kernel
    constants = dict(case.constants)
    signature: dict[str, str | tuple[str, ...]] = {
        name: _argument_type(name, case) for name in kernel.arg_names
    }
    index = {name: position for position, name in enumerate(kernel.arg_names)}
    attributes: dict[tuple[int, ...], list[list[str | int]]] = {
        (index[name],): [["tt.divisibility", 16]]
        for name, kind in signature.items()
        if kind[0] == "*" or (kind == "i32" and name not in _UNSPECIALISED)
    }
    for name in constants:
        signature[name] = "constexpr"
        attributes.pop((index[name],), None)
    for name in _MANY & signature.keys():  # a tuple of pointers, each as aligned as any
        count = constants["COUNT"]
        signature[name] = (_argument_type(name, case),) * count
        aligned = attributes.pop((index[name],))
        attributes |= {(index[name], place): aligned for place in range(count)}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(index[name],): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "launch_pdl": bool(constants.get("OVERLAP", False)),
        "enable_fp_fusion": case.fuses_products,
    }
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


def _argument_type(name: str, case: KernelCase) -> str:
    if not name.endswith("_ptr"):
        return _SCALARS.get(name, "i32")
    if name in _OTHERS:
        return _OTHERS[name]
    if name in _INT64 or (case.kernel is sample.sample_pick_kernel and name == "out_ptr"):
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
