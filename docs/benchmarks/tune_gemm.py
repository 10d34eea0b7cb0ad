"""Time the fused products over tiles on the GPU at hand and print entries for `fused_table`.

Weights are rotated through 256 MB so that the L2 does not help; one CUDA graph holds a pass over
all copies. Parts of K move bits, so they are pinned with the rest of an entry; all else does not.

Compiling takes longer than timing, so let several processes fill Triton's cache first:

    tune="python docs/benchmarks/tune_gemm.py SmolLM2-135M"
    for i in 0 1 2 3; do $tune --compile $i/4 & done; wait
    $tune --rows 1 8 32 --seconds 30
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
from runtime.kernels.fused_table import FusedConfig, FusedOp, fused_config, preloads
from runtime.kernels.stream import square_tile
from runtime.kernels.tile_rules import BLOCK_M_CHOICES, num_sms

_ROTATED_BYTES = 256 << 20
_SHARED_BYTES = 200_000
_SHOWN = 4
_ARCH = 90


def candidates(op: FusedOp, columns: int, features: int) -> Iterator[FusedConfig]:
    """Yield the pinned tile, then those worth a try: the ones that load weights early first."""
    pinned = fused_config(op, columns, features, element_bytes=2, arch=_ARCH)
    yield pinned
    least = square_tile(columns) if op == "residual" else 16
    is_small = columns * features <= 1 << 23
    sizes = [n for n in (16, 32, 64) if n >= least and columns % n == 0]
    early = itertools.product(sizes, (32, 64, 128), (3,), (4, 8), (1, 4, 8), (True,))
    late = itertools.product(sizes, (64, 128), (3, 4, 6, 8), (4, 8), (1, 4), (False,))
    for n, k, stages, warps, parts, preload in itertools.chain(early if is_small else (), late):
        config = FusedConfig(
            block_n=n, block_k=k, num_warps=warps, num_stages=stages, preload=preload, parts=parts
        )
        staged = (n + BLOCK_M_CHOICES[0]) * k * 2 * parts * stages
        is_fed = preload or n * k * parts >= warps * 32 * 8
        fits = preloads(config, BLOCK_M_CHOICES[0], features, 2) if preload else (
            staged <= _SHARED_BYTES
        )  # fmt: skip
        is_spread = columns // n >= min(30, num_sms(_ARCH))
        is_sane = parts <= warps and parts * k <= 2 * features and config != pinned
        if is_sane and is_fed and fits and is_spread:
            yield config


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
    graph.replay()
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
    """Print the pinned tile's times and the best ones by the summed time over the row counts."""
    passes = [product(op, columns, features, m, overlap=overlap) for m in row_counts]
    deadline, found = time.monotonic() + seconds, []
    for tried, config in enumerate(candidates(op, columns, features)):
        if time.monotonic() > deadline:
            sys.stdout.write(f"# stopped by --seconds after {tried} tiles\n")
            break
        try:
            times = [microseconds(lambda r=run: r(config)) / count for run, count in passes]  # type: ignore[misc]  # noqa: B023
        except OutOfResources:
            continue
        found.append((sum(times), times, config))
    weight_bytes = columns * features * 2
    for label, (_, times, config) in [
        ("pinned", found[0]),
        *(("best", entry) for entry in sorted(found, key=lambda entry: entry[0])[:_SHOWN]),
    ]:
        figures = " ".join(
            f"M={m} {t:.2f} us {weight_bytes / t / 1e6:.2f} TB/s"
            for m, t in zip(row_counts, times, strict=True)
        )
        sys.stdout.write(f'    ("{op}", {columns}, {features}): {config!r},  # {label} {figures}\n')
    sys.stdout.flush()


def compile_slice(
    op: FusedOp, columns: int, features: int, row_counts: list[int], part: str, overlap: bool
) -> None:
    """Launch every n-th tile once, so that Triton's cache holds it."""
    index, count = (int(number) for number in part.split("/"))
    for number, config in enumerate(candidates(op, columns, features)):
        if number % count != index:
            continue
        for m in row_counts:
            x = torch.zeros(m, features, device="cuda", dtype=torch.bfloat16)
            weight = torch.zeros(columns, features, device="cuda", dtype=torch.bfloat16)
            norm = torch.ones(max(columns, features), device="cuda", dtype=torch.bfloat16)
            try:
                if op == "residual":
                    residual = torch.zeros(m, columns, device="cuda", dtype=torch.bfloat16)
                    launch_residual_linear(
                        x, weight, residual_MD=residual, norm_D=norm[:columns], config=config,
                        overlap=overlap,
                    )  # fmt: skip
                else:
                    rows = enter_stream(x, norm[:features])
                    launch_scaled_linear(
                        rows, weight, eps=1e-5, is_gated=op == "gated", config=config,
                        overlap=overlap,
                    )  # fmt: skip
            except OutOfResources:
                continue


def main() -> None:
    """Tune qkv, o, gate and up, and down of a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=[model.name for model in MODELS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each product")
    parser.add_argument("--no-overlap", action="store_true", help="plain launches")
    parser.add_argument("--compile", metavar="I/N", help="compile every N-th tile, time nothing")
    arguments = parser.parse_args()
    model = next(model for model in MODELS if model.name == arguments.model)
    ops: tuple[FusedOp, ...] = ("scaled", "residual", "gated", "residual")
    overlap = not arguments.no_overlap
    for op, (columns, features) in zip(ops, model.weights()[:4], strict=True):
        if arguments.compile:
            compile_slice(op, columns, features, arguments.rows, arguments.compile, overlap)
        else:
            tune(op, columns, features, arguments.rows, arguments.seconds, overlap)


if __name__ == "__main__":
    main()
