"""Choose how many rows run the pinned tiles of a model, by whole steps on the GPU at hand.

For each number of rows one product after another takes the row tile (`row_tiles.RowTile`) under
which the captured step of the layers is fastest; what is chosen stays while the next is searched.
Row tiles move no bit, so each number of rows may have its own. Printed are the leaders, which
`row_tiles.row_tile` condenses.

Compiling takes longer than timing, so several processes fill Triton's cache first:

    tune="python docs/benchmarks/tune_rows.py SmolLM2-135M"
    for i in 0 1 2 3; do $tune --compile $i/4 & done; wait
    $tune
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from step_profile import LAYERS, Step, Tiles, make_layers, make_step, microseconds
from triton.runtime.errors import OutOfResources
from tune_step import PRODUCTS

from runtime.kernels.aot_cases import MODELS, ModelShapes
from runtime.kernels.fused_table import STAGE_BYTES, fused_config, preloads
from runtime.kernels.row_tiles import RowTile, row_tile
from runtime.kernels.stream import square_tile

_ARCH = 90
_MOST_LAYERS = 8  # more than the L2 holds, of every model


def candidates(shapes: ModelShapes, name: str, num_rows: int) -> Iterator[RowTile]:
    """Yield what is chosen today, then the row tiles worth a try."""
    place, op = PRODUCTS[name]
    columns, features = shapes.weights()[place]
    config = fused_config(op, columns, features, element_bytes=2, arch=_ARCH)
    chosen = row_tile(op, config, columns, features, num_rows, element_bytes=2)
    yield chosen
    least = max(16, square_tile(columns) if op == "residual" else 16)
    sizes = [n for n in (16, 32, 64, 128) if n >= least and n >= config.block_n // 2]
    few = [m for m in (16, 32, 64) if m < 2 * num_rows and num_rows // m <= 16]
    rows = [*few, 128] if num_rows >= 64 else few
    for m, n, warps, in_turn in itertools.product(rows, sizes, (4, 8), (False, True)):
        if m * n > 128 * 128 or (in_turn and m < 64) or (m == 128 and not in_turn):
            continue
        if not in_turn and (warps < config.parts or n > 2 * config.block_n):
            continue
        parts = 1 if in_turn else config.parts
        step_bytes = (m + n) * config.block_k * parts * 2
        stages = max(1, min(4 if in_turn else config.num_stages, STAGE_BYTES // step_bytes))
        widened = replace(config, block_n=n, num_warps=warps)
        yield RowTile(
            block_m=m, block_n=n, num_warps=warps, num_stages=stages, in_turn=in_turn,
            preload=not in_turn and preloads(widened, m, features, 2),
            overlap="never" if in_turn else config.overlap,
        )  # fmt: skip


def time(step: Step, rows: dict[str, RowTile]) -> float:
    """Return the microseconds of a step, infinite where a tile does not fit."""
    try:
        return microseconds(lambda: step.run((), Tiles(rows=rows)))
    except OutOfResources:
        return float("inf")


def search(shapes: ModelShapes, step: Step, num_rows: int) -> None:
    """Search product after product and print what was found."""
    chosen: dict[str, RowTile] = {}
    before = time(step, {})
    for name in PRODUCTS:
        times: dict[RowTile, float] = {}
        for tile in candidates(shapes, name, num_rows):
            times.setdefault(tile, time(step, {**chosen, name: tile}))
        ranked = sorted(times, key=times.__getitem__)
        chosen[name] = ranked[0]
        today = next(iter(times))
        sys.stdout.write(f"M={num_rows} {name}: {times[today]:.0f} us {_short(today)}\n")
        for tile in ranked[:5]:
            sys.stdout.write(f"    {times[tile]:.0f} us {_short(tile)}\n")
    sys.stdout.write(f"M={num_rows}: step {before:.0f} -> {time(step, chosen):.0f} us\n")
    sys.stdout.flush()


def _short(tile: RowTile) -> str:
    flags = " ".join(name for name in ("preload", "in_turn") if getattr(tile, name))
    sizes = f"{tile.block_m}x{tile.block_n} w{tile.num_warps} s{tile.num_stages}"
    return f"{sizes} {flags} {tile.overlap}"


def compile_slice(shapes: ModelShapes, steps: dict[int, Step], part: str) -> None:
    """Launch every n-th tile once on one layer, so that Triton's cache holds it."""
    index, count = (int(number) for number in part.split("/"))
    tiles = {
        (name, tile): num_rows
        for num_rows in steps
        for name in PRODUCTS
        for tile in candidates(shapes, name, num_rows)
    }
    for number, ((name, tile), num_rows) in enumerate(tiles.items()):
        if number % count == index:
            try:
                steps[num_rows].run((), Tiles(rows={name: tile}))
            except OutOfResources:
                sys.stderr.write(f"{name} {tile} does not fit\n")


def main() -> None:
    """Tune qkv, o, gate and up, and down of a model for some numbers of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(LAYERS))
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 40, 64, 160])
    parser.add_argument("--context", type=int, default=200, help="positions before the rows")
    parser.add_argument("--compile", metavar="I/N", help="compile every N-th tile, time nothing")
    given = parser.parse_args()
    shapes = next(model for model in MODELS if model.name == given.model)
    blocks = max(given.rows) * (given.context // 16 + 2) + 1
    most = 1 if given.compile else _MOST_LAYERS if shapes.hidden_size > 1024 else 30
    layers = make_layers(shapes, blocks, min(most, LAYERS[shapes.name]))
    embedding = torch.randn(
        shapes.head_rows[0], shapes.hidden_size, device="cuda", dtype=torch.bfloat16
    )
    steps = {m: make_step(shapes, layers, embedding, m, given.context) for m in given.rows}
    if given.compile:
        compile_slice(shapes, steps, given.compile)
        return
    for num_rows, step in steps.items():
        search(shapes, step, num_rows)


if __name__ == "__main__":
    main()
