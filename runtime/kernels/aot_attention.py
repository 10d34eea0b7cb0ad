"""What `runtime.kernels.aot` compiles of attention over the heads of representative models."""

from __future__ import annotations

from collections.abc import Iterator

from runtime.batch import ROW_TILE_ROWS
from runtime.kernels.aot_cases import MODELS, KernelCase, ModelShapes
from runtime.kernels.cuda import attention

_VERIFY_WIDTH = 9  # the newest token and 8 drafts


def attention_cases(arch: int) -> tuple[KernelCase, ...]:
    """Return every distinct case of every model, in a fixed order."""
    cases: dict[KernelCase, None] = {}
    for model in MODELS:
        for dtype in model.dtypes:
            for case in _model_cases(model, dtype, arch):
                cases[case] = None
    return tuple(cases)


def _model_cases(model: ModelShapes, dtype: str, arch: int) -> Iterator[KernelCase]:
    """One row of a general batch; one row and verifies of a dense one; row tiles of a prefill."""
    element_bytes = 4 if dtype == "fp32" else 2
    for width, is_tiled, is_fused in (
        (1, False, False),
        (1, False, True),
        (5, False, True),
        (_VERIFY_WIDTH, False, True),
        (ROW_TILE_ROWS, True, False),
    ):
        if dtype != "bf16" and width != 5 and is_fused:
            continue  # the other dtypes stand for themselves with one row and one verify
        constants = attention.segment_constants(
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            kv_block_size=16,
            width=width,
            element_bytes=element_bytes,
        )
        flags = {
            "TILED": is_tiled,
            "FUSED": is_fused,
            "NORMED": is_fused and model.has_qk_norm,
            "OVERLAP": 2 * (is_fused and arch >= 90),
        }
        yield from _forms({**constants, **flags}, dtype, has_single=is_fused and width == 1)


def _forms(constants: dict[str, int], dtype: str, *, has_single: bool) -> Iterator[KernelCase]:
    """Few programs and many; of one segment, of many side by side, and of many in turn.

    What many programs launch may spill a little, and wins there.
    """
    few, many = attention.SEGMENT_WARPS, attention.CROWDED_WARPS
    forms = [(few, False, False), (many, False, True)]
    if constants["FUSED"]:
        forms.append((many, False, False))
    if has_single:
        forms += [(few, True, False), (many, True, False)]
    for num_warps, is_single, in_turn in forms:
        early = attention.loads_early(constants, num_warps, is_single=is_single)
        flags = {"SINGLE": is_single, "IN_TURN": in_turn, "EARLY": early}
        yield KernelCase(
            kernel=attention.attention_segment_kernel,
            dtype=dtype,
            out_dtype=dtype,
            constants=tuple({**constants, **flags}.items()),
            num_warps=num_warps,
            num_stages=3,
            is_hot=dtype != "fp32" and num_warps == few,
        )
