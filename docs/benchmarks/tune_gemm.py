"""Time the fused products over tiles on the GPU at hand and print entries for `fused_table`.

Weights are rotated through 256 MB so that the L2 does not help; one CUDA graph holds a pass over
all copies. Every tile gives the same bits, so only the time decides.

    python docs/benchmarks/tune_gemm.py SmolLM2-135M --rows 1 8 32 --seconds 60
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator

import torch
from triton.runtime.errors import OutOfResources

from runtime.kernels import enter_stream
from runtime.kernels.aot_cases import MODELS
from runtime.kernels.cuda.fused_linear import launch_residual_linear, launch_scaled_linear
from runtime.kernels.fused_table import FusedConfig, FusedOp
from runtime.kernels.stream import square_tile

_ROTATED_BYTES = 256 << 20
_SHARED_BYTES = 200_000
_MOST_ROWS = 64


def candidates(op: FusedOp, columns: int, features: int) -> Iterator[FusedConfig]:
    """Yield tiles that fit with the largest BLOCK_M."""
    least = square_tile(columns) if op == "residual" else 16
    for n, k, stages, warps, preload in itertools.product(
        (16, 32, 64, 128), (64, 128, 256), (3, 5, 7), (2, 4, 8), (False, True)
    ):
        fits = (n + _MOST_ROWS) * k * 2 * stages <= _SHARED_BYTES
        is_whole = n % least == 0 and features % k == 0
        if fits and is_whole and not (preload and (k != 64 or stages != 3 or features > 1024)):
            yield FusedConfig(
                block_n=n, block_k=k, num_warps=warps, num_stages=stages, preload=preload
            )


def product(
    op: FusedOp, columns: int, features: int, num_rows: int, *, overlap: bool
) -> tuple[Callable[[FusedConfig], None], int]:
    """Return a pass over rotated weights with a tile, and the number of weights."""
    count = max(1, _ROTATED_BYTES // (columns * features * 2))
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(columns, features, **options) / features**0.5 for _ in range(count)]
    x = torch.randn(num_rows, features, **options)
    rows = enter_stream(x, torch.ones(features, **options))
    residual = torch.randn(num_rows, columns, **options)
    norm = torch.ones(columns, **options)

    def run(config: FusedConfig) -> None:
        for weight in weights:
            if op == "residual":
                launch_residual_linear(
                    x, weight, residual_MD=residual, norm_D=norm, config=config, overlap=overlap
                )
            else:
                launch_scaled_linear(
                    rows, weight, eps=1e-5, is_gated=op == "gated", config=config, overlap=overlap
                )

    return run, count


def microseconds(run: Callable[[], None], *, repeats: int = 7) -> float:
    """Return the median time of a captured pass."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000)
    return sorted(times)[len(times) // 2]


def tune(
    op: FusedOp, columns: int, features: int, row_counts: list[int], seconds: float, overlap: bool
) -> None:
    """Print the best tile by the summed time over the row counts."""
    passes = [product(op, columns, features, m, overlap=overlap) for m in row_counts]
    deadline, found = time.monotonic() + seconds, []
    for config in candidates(op, columns, features):
        if time.monotonic() > deadline:
            sys.stdout.write("# stopped by --seconds: not every tile was tried\n")
            break
        try:
            times = [microseconds(lambda r=run: r(config)) / count for run, count in passes]  # type: ignore[misc]  # noqa: B023
        except OutOfResources:
            continue
        found.append((sum(times), times, config))
    _, times, best = min(found, key=lambda entry: entry[0])
    figures = " ".join(f"M={m} {t:.2f} us" for m, t in zip(row_counts, times, strict=True))
    sys.stdout.write(f'    ("{op}", {columns}, {features}): {best!r},  # {figures}\n')


def main() -> None:
    """Tune qkv, o, gate and up, and down of a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=[model.name for model in MODELS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each product")
    parser.add_argument("--overlap", action="store_true", help="programmatic dependent launch")
    arguments = parser.parse_args()
    model = next(model for model in MODELS if model.name == arguments.model)
    ops: tuple[FusedOp, ...] = ("scaled", "residual", "gated", "residual")
    for op, (columns, features) in zip(ops, model.weights()[:4], strict=True):
        tune(op, columns, features, arguments.rows, arguments.seconds, arguments.overlap)


if __name__ == "__main__":
    main()
