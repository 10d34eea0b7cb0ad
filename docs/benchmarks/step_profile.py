"""Microseconds of each kernel of a decode step, with and without programmatic dependent launch.

Every figure is of a captured chain: the kernel under all layers' weights one after another, or the
whole step from the prepared round to its commit. A step "without" a kernel shows what the kernel
costs among its neighbours. Weights and caches are random; rows are B requests of W rows each.

    python docs/benchmarks/step_profile.py SmolLM2-135M --rows 1 5 8 --compile   # fill the cache
    python docs/benchmarks/step_profile.py SmolLM2-135M --rows 1 2 5 8 9 16 32 40 64 128 160 256
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import torch

from runtime.batch import PreparedBatch
from runtime.kernels import RowNorm, Stream
from runtime.kernels.aot_cases import MODELS, ModelShapes
from runtime.kernels.cuda import attention, device, fused_linear, head, round, stream
from runtime.kernels.fused_table import FusedConfig
from runtime.kernels.gemm_table import GemmConfig
from runtime.kernels.row_tiles import RowTile
from runtime.kv import KVLayer

DEVICE = "cuda"
DTYPE = torch.bfloat16
_KV_BLOCK_SIZE = 16
_EPS = 1e-5
LAYERS = {"SmolLM2-135M": 30, "Llama-3.2-1B": 16, "Qwen3-8B": 36}
# rows: requests, rows of each
_GEOMETRIES = {5: (1, 5), 9: (1, 9), 40: (8, 5), 64: (8, 8), 160: (32, 5), 256: (32, 8)}
_KERNELS = ("qkv", "attention", "o", "gate_up", "down")


class ProductTiles(TypedDict):
    """Tiles of a product that replace chosen ones."""

    config: FusedConfig | None
    tile: RowTile | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """Tiles that replace chosen ones: of products by name, and of the head."""

    products: Mapping[str, FusedConfig] = field(default_factory=dict)
    rows: Mapping[str, RowTile] = field(default_factory=dict)
    head: GemmConfig | None = None

    def of(self, name: str) -> ProductTiles:
        """Return what replaces the tiles of a product."""
        return {"config": self.products.get(name), "tile": self.rows.get(name)}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTensors:
    """Weights and cache of one layer."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    cache: KVLayer


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One decode step of a model over B requests of W rows, and the state that it reads."""

    shapes: ModelShapes
    layers: tuple[LayerTensors, ...]
    embedding: torch.Tensor
    norm: torch.Tensor
    cos_sin: torch.Tensor
    lengths: torch.Tensor
    newest: torch.Tensor
    tables: torch.Tensor
    slots: torch.Tensor
    num_drafts: torch.Tensor
    sink: torch.Tensor
    arrivals: torch.Tensor
    output: torch.Tensor
    row_request: torch.Tensor
    num_requests: int
    width: int
    context: int
    bound: int

    def run(self, skipped: Collection[str] = (), tiles: Tiles | None = None) -> None:
        """Run everything from the prepared round to its commit, less the skipped kernels.

        `tiles` replace pinned ones.
        """
        tiles = tiles or Tiles()
        rows = round.launch_prepare_round(
            self.slots, self.lengths, self.newest, self.tables,
            num_blocks=self.tables.shape[1], width=self.width, kv_block_size=_KV_BLOCK_SIZE,
        )  # fmt: skip
        ids = rows.newest_ids_target_B.repeat_interleave(self.width) if self.width > 1 else (
            rows.newest_ids_target_B
        )  # fmt: skip
        batch = PreparedBatch(
            ids_target_N=ids,
            positions_N=rows.positions_BW.flatten(),
            slots_N=rows.kv_slots_BW.flatten(),
            row_request_N=self.row_request,
            block_tables_BT=rows.block_tables_BT,
            max_length=self.bound,
            rows_per_request=self.width,
            arrivals_X=self.arrivals,
        )
        made = stream.launch_embed_stream(ids, self.embedding, self.norm)
        qkv = _zeros(ids.shape[0], self.shapes.weights()[0][0])
        mixed = _zeros(ids.shape[0], self.shapes.weights()[1][1])
        gated = _zeros(ids.shape[0], self.shapes.intermediate_size)
        for layer in self.layers:
            if "qkv" not in skipped:
                qkv = fused_linear.launch_scaled_linear(
                    made, layer.qkv, eps=_EPS, **tiles.of("qkv")
                )
            if "attention" not in skipped:
                mixed = self.attend(qkv, layer, batch)
            if "o" not in skipped:
                made = self.add(mixed, layer.o, layer, made, tiles.of("o"))
            if "gate_up" not in skipped:
                gated = fused_linear.launch_scaled_linear(
                    made, layer.gate_up, eps=_EPS, is_gated=True, **tiles.of("gate_up")
                )
            if "down" not in skipped:
                made = self.add(gated, layer.down, layer, made, tiles.of("down"))
        chosen = ids
        if "head" not in skipped:
            own = RowNorm(weight_D=self.norm, eps=_EPS)
            chosen, _ = head.launch_head_argmax(made, self.embedding, own, config=tiles.head)
        choices = chosen.view(self.num_requests, self.width)
        round.launch_finish_round(
            self.slots, rows.lengths_B, choices[:, 1:], choices, self.num_drafts, self.slots,
            num_rows=ids.shape[0], lengths_S=self.sink, newest_ids_target_S=self.sink,
            output_BX=self.output,
        )  # fmt: skip

    def add(
        self, x: torch.Tensor, weight: torch.Tensor, layer: LayerTensors, made: Stream,
        tiles: ProductTiles,
    ) -> Stream:  # fmt: skip
        """Run o or down."""
        return fused_linear.launch_residual_linear(
            x, weight, residual_MD=made.residual_MD, norm_D=layer.norm, **tiles
        )

    def attend(self, qkv: torch.Tensor, layer: LayerTensors, batch: PreparedBatch) -> torch.Tensor:
        """Run attention over the rows' own and older keys."""
        heads = [self.shapes.num_heads, self.shapes.num_kv_heads, self.shapes.num_kv_heads]
        packed = qkv.view(qkv.shape[0], sum(heads), self.shapes.head_dim)
        q, k, v = torch.split(packed, heads, dim=1)
        new = attention.NewRows(k_MGP=k, v_MGP=v, cos_sin_TP=self.cos_sin)
        scale = self.shapes.head_dim**-0.5
        mixed = attention.launch_paged_attention(q, layer.cache, batch, scale=scale, new=new)
        return mixed.flatten(1)


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
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1000)
    return sorted(times)[len(times) // 2]


def _zeros(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.zeros(shape, device=DEVICE, dtype=dtype)


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, device=DEVICE, dtype=DTYPE)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def make_layers(shapes: ModelShapes, num_blocks: int, num_layers: int) -> tuple[LayerTensors, ...]:
    """Return random layers with a cache each."""
    cache = (num_blocks, shapes.num_kv_heads, _KV_BLOCK_SIZE, shapes.head_dim)
    made = []
    for _ in range(num_layers):
        weights = [_random(n, k) / k**0.5 for n, k in shapes.weights()[:4]]
        qkv, o, gate_up, down = weights
        made.append(
            LayerTensors(
                qkv=qkv, o=o, gate_up=gate_up, down=down,
                norm=_ones(shapes.hidden_size),
                cache=KVLayer(k=_random(*cache), v=_random(*cache)),
            )
        )  # fmt: skip
    return tuple(made)


def make_step(
    shapes: ModelShapes, layers: tuple[LayerTensors, ...], embedding: torch.Tensor,
    num_rows: int, context: int,
) -> Step:  # fmt: skip
    """Return the step of `num_rows` rows behind `context` positions."""
    num_requests, width = _GEOMETRIES.get(num_rows, (num_rows, 1))
    bound = context + width
    num_blocks = -(-bound // _KV_BLOCK_SIZE)
    tables = torch.arange(1, num_requests * num_blocks + 1, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((num_requests + 1,), context, dtype=torch.int64, device=DEVICE)
    lengths[-1] = 0
    table = torch.cat([tables.view(num_requests, num_blocks), tables.new_zeros(1, num_blocks)])
    requests = torch.arange(num_requests, dtype=torch.int32, device=DEVICE)
    return Step(
        shapes=shapes,
        layers=layers,
        embedding=embedding,
        norm=_ones(shapes.hidden_size),
        cos_sin=torch.randn(bound + 1, shapes.head_dim, device=DEVICE),
        lengths=lengths,
        newest=torch.zeros_like(lengths),
        tables=table,
        slots=torch.arange(num_requests, dtype=torch.int64, device=DEVICE),
        num_drafts=_zeros(num_requests, dtype=torch.int64),
        sink=torch.zeros_like(lengths),
        arrivals=_zeros(1 << 16, dtype=torch.int32),
        output=_zeros(num_requests, width + 1, dtype=torch.int64),
        row_request=requests.repeat_interleave(width),
        num_requests=num_requests,
        width=width,
        context=context,
        bound=bound,
    )


def profile(step: Step, *, is_compiling: bool) -> str:
    """Return a line of figures; compiling, run every kernel once instead."""
    figures = []
    num_layers = len(step.layers)
    for is_overlapping in (False, True):
        device.IS_OVERLAPPING = is_overlapping
        if is_compiling:
            step.run()
            continue
        whole = microseconds(step.run)
        rate = step.num_requests / whole * 1e6
        parts = [f"step {whole:.0f} us {rate:.0f} steps*B/s"]
        for name in _KERNELS:
            less = microseconds(_without(step, name))
            parts.append(f"{name} {(whole - less) / num_layers:.2f}")
        parts.append(f"head {whole - microseconds(_without(step, 'head')):.2f}")
        parts.append(f"ends {microseconds(_without(step, *_KERNELS, 'head')):.2f}")
        label = "overlap" if is_overlapping else "plain  "
        figures.append(f"  {label} " + "  ".join(parts))
    return "\n".join(figures)


def _without(step: Step, *names: str) -> Callable[[], None]:
    return lambda: step.run(names)


def main() -> None:
    """Print two lines for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted(LAYERS))
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 2, 5, 8, 9, 16, 32, 40, 64, 128, 160, 256]
    )
    parser.add_argument("--context", type=int, default=200, help="positions before the rows")
    parser.add_argument("--compile", action="store_true", help="run every kernel once, time none")
    arguments = parser.parse_args()
    shapes = next(model for model in MODELS if model.name == arguments.model)
    most = max(arguments.rows)
    per_request = -(-(arguments.context + 9) // _KV_BLOCK_SIZE)
    layers = make_layers(shapes, most * per_request + 1, LAYERS[shapes.name])
    embedding = _random(shapes.head_rows[0], shapes.hidden_size)
    sys.stdout.write(f"{shapes.name}, context {arguments.context}, us a kernel and layer\n")
    for num_rows in arguments.rows:
        step = make_step(shapes, layers, embedding, num_rows, arguments.context)
        line = profile(step, is_compiling=arguments.compile)
        sys.stdout.write(f"M={num_rows} B={step.num_requests} W={step.width}\n{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
