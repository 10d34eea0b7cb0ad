"""A decode step's kernels on a CUDA GPU: early starts, parts of K, prefill tiles, a round's ends.

Needs torch, triton and pytest only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch

from runtime import kernels
from runtime.batch import PreparedBatch
from runtime.kernels.cuda import accept, attention, head, kv_write, round
from runtime.kernels.cuda.fused_linear import launch_residual_linear, launch_scaled_linear
from runtime.kernels.cuda.stream import launch_embed_stream, launch_enter_stream
from runtime.kernels.fused_table import FusedConfig
from runtime.kernels.norm import RowNorm
from runtime.kernels.round import finish_round_twin, prepare_round_twin
from runtime.kv import KVLayer
from runtime.spec.packing import row_tiles
from tests.kernels.dense import DenseRequests, dense_requests
from tests.kernels.ladder import adversarial, differing, paged_requests, plain, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

DEVICE = "cuda"
EPS = 1e-5
COUNTS = (1, 2, 5, 8, 16, 17, 32, 33, 64, 65, 100, 128, 129, 257)


def parts_of(block_n: int, block_k: int, parts: int, *, preload: bool = True) -> FusedConfig:
    """Return a tile that a tuning run may pin."""
    return FusedConfig(
        block_n=block_n, block_k=block_k, num_warps=8, num_stages=4, preload=preload, parts=parts
    )


PARTS = [
    ("scaled", 960, 576, parts_of(16, 32, 8)),
    ("residual", 576, 576, parts_of(16, 32, 8)),
    ("gated", 3072, 576, parts_of(32, 64, 4)),
    ("residual", 576, 1536, parts_of(16, 64, 8)),
    ("residual", 576, 1536, parts_of(16, 64, 4, preload=False)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("op", "columns", "features", "config"), PARTS)
def test_parts_of_k_move_no_bit_between_rows(
    op: str, columns: int, features: int, config: FusedConfig, dtype: torch.dtype
) -> None:
    most = max(COUNTS)
    x = adversarial(most, features, seed=1, dtype=dtype, device=DEVICE)
    weight = adversarial(columns, features, seed=2, dtype=dtype, device=DEVICE)
    residual = adversarial(most, columns, seed=3, dtype=dtype, device=DEVICE)
    ones = torch.ones(max(columns, features), dtype=dtype, device=DEVICE)

    def run(count: int, *, overlap: bool) -> torch.Tensor:
        if op == "residual":
            made = launch_residual_linear(
                x[:count], weight, residual_MD=residual[:count], norm_D=ones[:columns],
                config=config, overlap=overlap,
            )  # fmt: skip
            return torch.cat([made.residual_MD.float(), made.squares_MT], dim=1)
        rows = launch_enter_stream(x[:count], ones[:features])
        return launch_scaled_linear(
            rows, weight, eps=EPS, is_gated=op == "gated", config=config, overlap=overlap
        )

    expected = run(most, overlap=False)
    for count in COUNTS:
        found = run(count, overlap=count % 2 == 0)
        assert same_bits(found, expected[:count]), f"{count}: {differing(found, expected[:count])}"


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128)])
@pytest.mark.parametrize("window", [None, 270])
def test_a_prefill_s_rows_are_the_rows_of_a_decode(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    requests = paged_requests(
        num_kv_heads=num_kv_heads, head_dim=head_dim, kv_block_size=16, lengths=(137, 3, 1_030),
        dtype=torch.bfloat16, seed=1, write=kv_write.launch_write_kv, device=DEVICE, fill=plain,
    )  # fmt: skip
    rows = [(0, p) for p in range(137)] + [(1, 2)] + [(2, p) for p in range(200, 1_030)]
    batch = requests.batch(rows)
    tiles = torch.tensor(row_tiles([r for r, _ in rows]), dtype=torch.int32, device=DEVICE)
    q = plain(len(rows), num_heads, head_dim, seed=2, dtype=torch.bfloat16, device=DEVICE)
    shared = {"scale": 0.3, "window": window}
    single = attention.launch_paged_attention(q, requests.layer, batch, **shared)
    together = attention.launch_paged_attention(
        q, requests.layer, dataclasses.replace(batch, tiles_U2=tiles), **shared
    )
    assert same_bits(together, single), differing(together, single)


def check_launches(
    dense: DenseRequests, launches: Sequence[Callable[..., torch.Tensor]], *, window: int | None
) -> None:
    """Check that launches with other options leave the bits of the first one."""
    (first_layer, first), *others = [dense.attend(launch, window=window) for launch in launches]
    assert bool(first.isfinite().all())
    for layer, values in others:
        assert same_bits(values, first)
        assert same_bits(layer.k.nan_to_num(9.0), first_layer.k.nan_to_num(9.0))
        assert same_bits(layer.v.nan_to_num(9.0), first_layer.v.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 270])
@pytest.mark.parametrize("width", [1, 5, 9])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128)])
def test_one_program_takes_all_segments_with_the_bits_of_many(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    width: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    dense = dense_requests(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, width=width,
        lengths=(width, 130, 256, 258, 264, 385, 511, 512, 513, 641, 1_200, 2_100, 40),
        dtype=dtype, device="cuda",
    )  # fmt: skip
    launch = attention.launch_paged_attention
    check_launches(
        dense, [partial(launch, in_turn=choice) for choice in (False, True)], window=window
    )


@pytest.mark.parametrize("num_requests", [1, 9, 33])
@pytest.mark.parametrize("width", [1, 5, 9])
def test_the_ends_of_a_round_equal_their_twins(num_requests: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    lengths = torch.randint(0, 900, (41,), generator=generator)
    newest = torch.randint(0, 99, (41,), generator=generator)
    tables = torch.randint(1, 5_000, (41, 70), generator=generator, dtype=torch.int32)
    lengths[40] = newest[40] = tables[40] = 0
    slots = torch.cat([torch.randperm(40, generator=generator)[:num_requests], torch.tensor([40])])
    sizes = {"num_blocks": 64, "width": width, "kv_block_size": 16}
    inputs = (slots, lengths, newest, tables)
    expected = prepare_round_twin(*inputs, **sizes)
    got = round.launch_prepare_round(*(x.to(DEVICE) for x in inputs), **sizes)
    for name in expected.__slots__:
        found, wanted = getattr(got, name).cpu(), getattr(expected, name)
        if name == "ids_target_BW":  # the rest is room for drafts
            found, wanted = found[:, :1], wanted[:, :1]
        assert torch.equal(found, wanted), name
    chosen = torch.randint(0, 2, (num_requests + 1, width), generator=generator)
    drafts = torch.randint(0, 2, (num_requests + 1, width), generator=generator)[:, 1:]
    num_drafts = torch.randint(0, width, (num_requests + 1,), generator=generator)
    first_rows = torch.arange(num_requests + 1) * width
    states, ends = [], []
    for place, finish in ((DEVICE, round.launch_finish_round), ("cpu", finish_round_twin)):
        state = {
            "lengths_S": lengths.to(place, copy=True),
            "newest_ids_target_S": newest.to(place, copy=True),
            "output_BX": torch.full((num_requests + 1, 11), -7, device=place),
        }
        arguments = (slots, expected.lengths_B, drafts, chosen, num_drafts, first_rows)
        num_rows = num_requests * width
        ends.append(finish(*(x.to(place) for x in arguments), num_rows=num_rows, **state))
        states.append(state)
    for name, found in states[0].items():
        assert torch.equal(found.cpu(), states[1][name]), name
    for name in ends[0].__slots__:
        assert torch.equal(getattr(ends[0], name).cpu(), getattr(ends[1], name)), name


def test_copies_of_rows() -> None:
    table = plain(40, 640, seed=1, dtype=torch.bfloat16, device=DEVICE)[:, 32:608]
    index = torch.tensor([39, 0, 7], device=DEVICE)
    slots = torch.tensor([4, 1, 0], device=DEVICE)
    assert torch.equal(kernels.take_rows(table, index), table[index])
    kept = torch.zeros(5, 576, dtype=torch.bfloat16, device=DEVICE)
    kernels.keep_rows(table, index, kept, slots)
    assert torch.equal(kept, torch.zeros_like(kept).index_copy(0, slots, table[index]))
    states = [table * factor for factor in (1, 2, 3)]
    assert torch.equal(kernels.side_by_side(states), torch.cat(states, dim=1))


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_states_are_written_side_by_side(num_rows: int) -> None:
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    x, residual = plain(num_rows, 1536, seed=1, **options), plain(num_rows, 576, seed=2, **options)
    weight, norm = plain(576, 1536, seed=3, **options), plain(576, seed=4, **options)
    ids = torch.arange(num_rows, device=DEVICE).flip(0)
    beside = torch.full((num_rows, 3 * 576), -1.0, **options)
    first, second, third = beside.split(576, dim=1)
    alone = kernels.residual_linear(x, weight, residual_MD=residual, norm_D=norm)
    made = kernels.residual_linear(x, weight, residual_MD=residual, norm_D=norm, out_MD=second)
    for name in ("residual_MD", "weighted_MD", "squares_MT"):
        assert same_bits(getattr(made, name), getattr(alone, name)), name
    kernels.embed_stream(ids, alone.residual_MD, norm, first)
    assert same_bits(first, alone.residual_MD[ids])
    assert same_bits(second, alone.residual_MD)
    assert (third == -1).all()


@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_a_head_reads_a_stream_names_ids_and_writes_them_twice(num_rows: int) -> None:
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    x, weight = plain(num_rows, 576, seed=1, **options), plain(8192, 576, seed=2, **options)
    own = RowNorm(weight_D=plain(576, seed=3, **options), eps=EPS)
    ids, logits = kernels.head_argmax(x, weight, own)
    names = torch.arange(8192, device=DEVICE) * 5 + 2
    wide = torch.full((num_rows, 3), -1, device=DEVICE)
    named, again = kernels.head_argmax(
        kernels.enter_stream(x, own.weight_D), weight, own, names_V=names, copy_M=wide[:, 1]
    )
    assert same_bits(again, logits)
    assert torch.equal(named, names[ids])
    assert torch.equal(wide[:, 1], named)
    assert (wide[:, ::2] == -1).all()
    found = kernels.logits_argmax(kernels.head_logits(x, weight, own), names_V=names)
    assert torch.equal(found, named)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """Four layers of SmolLM2's shape over their caches, from a prepared round to its commit."""

    weights: list[list[torch.Tensor]]
    caches: list[KVLayer]
    table: torch.Tensor
    norm: torch.Tensor
    cos_sin: torch.Tensor
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    slots: torch.Tensor
    width: int
    bound: int
    arrivals: torch.Tensor

    def run(self, *, overlap: bool) -> torch.Tensor:
        """Decode one step of every request; return ids, logits and the output."""
        lengths, newest, tables = self.state
        rows = round.launch_prepare_round(
            self.slots, lengths, newest, tables,
            num_blocks=tables.shape[1], width=self.width, kv_block_size=16,
        )  # fmt: skip
        ids = rows.newest_ids_target_B.repeat_interleave(self.width)
        count = self.slots.shape[0]
        request = torch.arange(count, dtype=torch.int32, device=DEVICE)
        batch = PreparedBatch(
            ids_target_N=ids, positions_N=rows.positions_BW.flatten(),
            slots_N=rows.kv_slots_BW.flatten(), block_tables_BT=rows.block_tables_BT,
            row_request_N=request.repeat_interleave(self.width), max_length=self.bound,
            rows_per_request=self.width, arrivals_X=self.arrivals,
        )  # fmt: skip
        made = launch_embed_stream(ids, self.table, self.norm, overlap=overlap)
        for (qkv, o, gate_up, down), cache in zip(self.weights, self.caches, strict=True):
            mixed = launch_scaled_linear(made, qkv, eps=EPS, overlap=overlap).view(-1, 15, 64)
            q, k, v = mixed.split([9, 3, 3], dim=1)
            new = attention.NewRows(k_MGP=k, v_MGP=v, cos_sin_TP=self.cos_sin)
            attended = attention.launch_paged_attention(
                q, cache, batch, scale=0.125, new=new, overlap=overlap
            )
            made = launch_residual_linear(
                attended.flatten(1), o, residual_MD=made.residual_MD, norm_D=self.norm,
                overlap=overlap,
            )  # fmt: skip
            gated = launch_scaled_linear(made, gate_up, eps=EPS, is_gated=True, overlap=overlap)
            made = launch_residual_linear(
                gated, down, residual_MD=made.residual_MD, norm_D=self.norm, overlap=overlap
            )
        chosen, logits = head.launch_head_argmax(
            made.residual_MD, self.table, RowNorm(weight_D=self.norm, eps=EPS), overlap=overlap
        )
        choices = chosen.view(count, self.width)
        accepted, _ = accept.launch_accept(choices[:, 1:], choices, torch.zeros_like(self.slots))
        return torch.cat([chosen.double(), logits.double(), accepted.double()])


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("lengths", [(200, 7, 0), (600, 255, 256)], ids=str)
def test_a_captured_step_with_early_starts_has_the_bits_of_one_without(
    width: int, lengths: tuple[int, ...]
) -> None:
    """Caches are rewritten between replays, so a key that is read too early would show."""
    shapes = ((960, 576), (576, 576), (3072, 576), (576, 1536))
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    blocks = -(-(max(lengths) + width) // 16)
    tables = torch.arange(1, len(lengths) * blocks + 1, dtype=torch.int32, device=DEVICE)
    cache = (len(lengths) * blocks + 1, 3, 16, 64)
    chain = Chain(
        weights=[[plain(n, k, seed=i, **options) / k**0.5 for n, k in shapes] for i in range(4)],
        caches=[
            KVLayer(k=plain(*cache, seed=i, **options), v=plain(*cache, seed=9 + i, **options))
            for i in range(4)
        ],
        table=plain(5_000, 576, seed=3, **options),
        norm=torch.ones(576, **options),
        cos_sin=plain(max(lengths) + width, 64, seed=4, dtype=torch.float32, device=DEVICE),
        state=(
            torch.tensor(lengths, device=DEVICE),
            torch.arange(len(lengths), device=DEVICE),
            tables.view(len(lengths), blocks),
        ),
        slots=torch.arange(len(lengths), device=DEVICE),
        width=width,
        bound=max(lengths) + width,
        arrivals=torch.zeros(1_024, dtype=torch.int32, device=DEVICE),
    )
    chain.run(overlap=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain.run(overlap=True)
    for replay in range(40):
        fresh = [plain(*cache, seed=100 + replay + i, **options) for i in range(2)]
        chain.state[1].copy_(torch.arange(len(lengths), device=DEVICE) + 3 * replay)
        results = []
        for is_captured in (True, False):
            for layer in chain.caches:
                layer.k.copy_(fresh[0])
                layer.v.copy_(fresh[1])
            if is_captured:
                graph.replay()
                results.append(captured.clone())
            else:
                results.append(chain.run(overlap=False))
        assert same_bits(*results), f"replay {replay}: {differing(*results)}"
    assert not bool(chain.arrivals.any())
