"""What `runtime.kernels.aot` compiles of block drafts beside their layers and heads."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.kernels.aot_cases import MODELS, KernelCase
from runtime.kernels.cuda import block_rows, context_kv, corrected
from runtime.kernels.gemm_table import BLOCK_M_CHOICES, head_config

_NUM_DRAFTS = 8
_CORRECTIONS = ((8192, 64), (151_936, 256))  # (draft ids, rank) of Markov heads


def block_cases(arch: int) -> tuple[KernelCase, ...]:
    """Return the cases for an architecture, in a fixed order."""
    return (*_corrected_cases(arch), *_end_cases(arch), *_context_cases(arch))


def _corrected_cases(arch: int) -> Iterator[KernelCase]:
    for num_ids, rank in _CORRECTIONS:
        config = head_config(num_ids, rank, element_bytes=2, arch=arch)
        for is_gathered in (False, True):
            for block_m in BLOCK_M_CHOICES:
                constants = corrected.corrected_constants(
                    config, block_m, rank, is_gathered=is_gathered
                )
                yield KernelCase(
                    kernel=corrected.corrected_tile_kernel,
                    dtype="bf16",
                    out_dtype="bf16",
                    constants=(*constants.items(), ("OVERLAP", 2 * (arch >= 90))),
                    num_warps=config.num_warps,
                    num_stages=3,
                    is_hot=True,
                )


def _end_cases(arch: int) -> Iterator[KernelCase]:
    place = block_rows.place_constants(_NUM_DRAFTS + 1, first_slot=1, mask_id_target=7)
    keep = block_rows.keep_constants(_NUM_DRAFTS)
    for kernel, constants in (
        (block_rows.place_blocks_kernel, place),
        (block_rows.keep_chances_kernel, keep),
    ):
        yield KernelCase(
            kernel=kernel,
            dtype="bf16",
            out_dtype="bf16",
            constants=(*constants.items(), ("OVERLAP", arch >= 90)),
            num_warps=1,
            num_stages=3,
            is_hot=True,
        )


def _context_cases(arch: int) -> Iterator[KernelCase]:
    for model in MODELS:
        for is_normed in (False, True):
            constants = context_kv.context_constants(
                model.num_kv_heads, 16, model.head_dim, is_normed=is_normed
            )
            yield KernelCase(
                kernel=context_kv.write_context_kernel,
                dtype="bf16",
                out_dtype="bf16",
                constants=(*constants.items(), ("OVERLAP", arch >= 90)),
                num_warps=context_kv.CONTEXT_WARPS,
                num_stages=3,
                is_hot=True,
            )
