"""Choose the pinned tiles of a model by whole decode steps on the GPU at hand.

One product after another takes the tile under which the captured step of all layers is fastest,
for few rows and for many; what is chosen stays while the next one is searched. Steps are searched
in a whole, since a kernel alone among copies of itself says little about its cost among others.

BLOCK_K and the parts of K move bits, so one choice of them must serve every number of rows;
BLOCK_N, warps, stages, preload and overlap may differ with the rows of a program. Printed are
entries for `fused_table` and the tile of the head for `gemm_table`.

Compiling takes longer than timing, so several processes fill Triton's cache first:

    tune="python docs/benchmarks/tune_step.py SmolLM2-135M"
    for i in 0 1 2 3; do $tune --compile $i/4 & done; wait
    $tune
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from step_profile import LAYERS, Step, Tiles, make_layers, make_step, microseconds
from triton.runtime.errors import OutOfResources

from runtime.kernels.aot_cases import MODELS, ModelShapes
from runtime.kernels.cuda import device
from runtime.kernels.fused_table import FusedConfig, FusedOp, fused_config, preloads
from runtime.kernels.gemm_table import GemmConfig, head_config
from runtime.kernels.stream import square_tile
from runtime.kernels.tile_rules import num_sms

_ARCH = 90
_SHARED_BYTES = 226_000
_SMALL_WEIGHT = 1 << 22  # elements that programs may hold in registers
_CONTEXT = 200
PRODUCTS: Mapping[str, tuple[int, FusedOp]] = {  # name: place among a layer's weights, kind
    "gate_up": (2, "gated"),
    "down": (3, "residual"),
    "qkv": (0, "scaled"),
    "o": (1, "residual"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Steps of a model for some numbers of rows, and what is tried with them."""

    shapes: ModelShapes
    steps: Mapping[int, Step]
    overlaps: tuple[str, ...]

    def time(self, num_rows: int, tiles: Tiles) -> float:
        """Return the microseconds of a step, infinite where a tile does not fit."""
        try:
            return microseconds(lambda: self.steps[num_rows].run((), tiles))
        except OutOfResources:
            return float("inf")


def candidates(shapes: ModelShapes, name: str, overlaps: tuple[str, ...]) -> Iterator[FusedConfig]:
    """Yield the pinned tile, then those worth a try."""
    place, op = PRODUCTS[name]
    columns, features = shapes.weights()[place]
    yield fused_config(op, columns, features, element_bytes=2, arch=_ARCH)
    least = square_tile(columns) if op == "residual" else 16
    sizes = [n for n in (16, 32, 64) if n >= least and columns % n == 0]
    is_small = columns * features <= _SMALL_WEIGHT
    early = itertools.product(sizes, (64,), (3,), (4, 8), (1, 4, 8), (True,))
    late = itertools.product(sizes, (64, 128), (3, 4, 6), (4, 8), (1, 4), (False,))
    for n, k, stages, warps, parts, preload in itertools.chain(early if is_small else (), late):
        if parts > warps or parts * k > features:
            continue
        if not is_small and k == 64 and parts == 1:
            continue
        if is_small and not preload and (parts == 1 or stages == 3):
            continue
        config = FusedConfig(
            block_n=n, block_k=k, num_warps=warps, num_stages=stages, preload=preload, parts=parts
        )
        fits = preloads(config, 16, features, 2) if preload else (
            (n + 16) * k * 2 * parts * stages <= _SHARED_BYTES
        )  # fmt: skip
        if fits and columns // n >= min(30, num_sms(_ARCH)):
            for overlap in overlaps:
                yield replace(config, overlap=overlap)  # type: ignore[arg-type]


def head_candidates(shapes: ModelShapes) -> Iterator[GemmConfig]:
    """Yield the pinned tile of the head, then those with its BLOCK_K that are worth a try."""
    pinned = head_config(shapes.head_rows[0], shapes.hidden_size, element_bytes=2, arch=_ARCH)
    yield pinned
    for n, stages, warps in itertools.product((32, 64, 128), (3, 4, 6), (4, 8)):
        if (n + 16) * pinned.block_k * 2 * stages <= _SHARED_BYTES and n * pinned.block_k > 2048:
            yield replace(pinned, block_n=n, num_stages=stages, num_warps=warps)


def best_of(times: Mapping[FusedConfig, Mapping[int, float]]) -> dict[int, FusedConfig]:
    """Return a tile for each number of rows; all have the BLOCK_K and parts that serve best."""
    base = next(iter(times.values()))
    groups: dict[tuple[int, int], dict[int, FusedConfig]] = {}
    for config in times:
        groups.setdefault((config.block_k, config.parts), {})
    for key, chosen in groups.items():
        mine = [config for config in times if (config.block_k, config.parts) == key]
        for rows in base:
            chosen[rows] = min(mine, key=lambda config, m=rows: times[config][m])  # type: ignore[misc]
    return min(
        groups.values(),
        key=lambda chosen: sum(times[config][m] / base[m] for m, config in chosen.items()),
    )


def search(run: Search, write: Callable[[str], object]) -> None:
    """Search product after product, then the head, and print what was chosen."""
    chosen: dict[int, dict[str, FusedConfig]] = {m: {} for m in run.steps}
    for name, (place, op) in PRODUCTS.items():
        times = {
            config: {m: run.time(m, Tiles(products={**chosen[m], name: config})) for m in run.steps}
            for config in candidates(run.shapes, name, run.overlaps)
        }
        pinned = next(iter(times))
        columns, features = run.shapes.weights()[place]
        for m, config in best_of(times).items():
            chosen[m][name] = config
            write(f'("{op}", {columns}, {features}): M={m} {times[pinned][m]:.0f} -> '
                  f"{times[config][m]:.0f} us {config}")  # fmt: skip
        for m in run.steps:
            leaders = sorted(times, key=lambda config, m=m: times[config][m])[:6]  # type: ignore[misc]
            for config in leaders:
                write(f"#   M={m} {times[config][m]:.0f} us {config}")
    for m in run.steps:
        heads = {
            config: run.time(m, Tiles(products=chosen[m], head=config))
            for config in head_candidates(run.shapes)
        }
        pinned_head = next(iter(heads))
        for head in sorted(heads, key=heads.__getitem__)[:4]:
            write(f"head M={m} {heads[pinned_head]:.0f} -> {heads[head]:.0f} us {head}")


def compile_slice(run: Search, part: str) -> None:
    """Launch every n-th tile once on one layer, so that Triton's cache holds it."""
    index, count = (int(number) for number in part.split("/"))
    tiles = [Tiles(products={name: config}) for name in PRODUCTS
             for config in candidates(run.shapes, name, run.overlaps)]  # fmt: skip
    tiles += [Tiles(head=config) for config in head_candidates(run.shapes)]
    for number, tile in enumerate(tiles):
        if number % count == index:
            for m, step in run.steps.items():
                try:
                    step.run((), tile)
                except OutOfResources:
                    sys.stderr.write(f"M={m} {tile} does not fit\n")


def main() -> None:
    """Tune qkv, o, gate and up, down, and the head of a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(LAYERS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--overlap", nargs="+", default=["at once"], help="of the products")
    parser.add_argument("--no-overlap", action="store_true", help="plain launches")
    parser.add_argument("--compile", metavar="I/N", help="compile every N-th tile, time nothing")
    arguments = parser.parse_args()
    device.IS_OVERLAPPING = not arguments.no_overlap
    shapes = next(model for model in MODELS if model.name == arguments.model)
    num_blocks = max(arguments.rows) * (_CONTEXT // 16 + 2) + 1
    num_layers = 1 if arguments.compile else LAYERS[shapes.name]
    layers = make_layers(shapes, num_blocks, num_layers)
    head_rows = (shapes.head_rows[0], shapes.hidden_size)
    embedding = torch.randn(head_rows, device="cuda", dtype=torch.bfloat16)
    steps = {m: make_step(shapes, layers, embedding, m, _CONTEXT) for m in arguments.rows}
    run = Search(shapes=shapes, steps=steps, overlaps=tuple(arguments.overlap))
    if arguments.compile:
        compile_slice(run, arguments.compile)
    else:
        search(run, lambda line: sys.stdout.write(line + "\n") and sys.stdout.flush())


if __name__ == "__main__":
    main()
