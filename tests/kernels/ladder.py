"""Step 1 of the exactness ladder, shared by the CPU, interpreter and GPU tests.

`rows of M == M rows alone`, bit for bit, wherever a row lies and whatever lies beside it.

Legend: M rows, K input features, N output features, G key heads, P head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kv import KVLayer

Rows = tuple[torch.Tensor, ...]
RowOp = Callable[..., "torch.Tensor | Rows"]

NUM_ROWS = 64
EVERY_COUNT = tuple(range(1, NUM_ROWS + 1))
SOME_COUNTS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 49, 63, 64)


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def adversarial(*shape: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Signed values over about nine orders of magnitude, with zeros, that fit float16."""
    gen = generator(seed, device)
    values = torch.rand(shape, generator=gen, device=device).mul_(9).sub_(7)
    values = torch.pow(10.0, values).mul_(torch.randn(shape, generator=gen, device=device))
    values.masked_fill_(torch.rand(shape, generator=gen, device=device) < 0.02, 0.0)
    return values.clamp_(-3e2, 3e2).to(dtype)


def plain(*shape: int, seed: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Normal values."""
    return torch.randn(shape, generator=generator(seed, device), device=device).to(dtype)


def as_tuple(value: torch.Tensor | Rows) -> Rows:
    return value if isinstance(value, tuple) else (value,)


def assert_rows_independent(op: RowOp, inputs: Rows, counts: Iterable[int], *, seed: int) -> None:
    """Assert that batches of every count, rows drawn and placed at random, equal single rows.

    Args:
        op: takes one tensor per input, rows first, and returns one or more tensors, rows first.
        inputs: tensors of the same number of rows.
        counts: batch sizes to try.
        seed: of the placement.
    """
    total = inputs[0].shape[0]
    singles = [as_tuple(op(*(x[r : r + 1] for x in inputs))) for r in range(total)]
    gen = generator(seed)
    for count in counts:
        chosen = torch.randperm(total, generator=gen)[:count]
        index = chosen.to(inputs[0].device)
        batch = as_tuple(op(*(x[index] for x in inputs)))
        for part, got in enumerate(batch):
            expected = torch.cat([singles[row][part] for row in chosen.tolist()])
            assert same_bits(got, expected), f"M={count}, output {part}: {differing(got, expected)}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes, dtypes and bytes: +0 and -0 differ, a NaN equals its copy."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def differing(a: torch.Tensor, b: torch.Tensor) -> str:
    unequal = (a != b).flatten(1).any(dim=1) if a.dim() > 1 else a != b
    largest = (a.double() - b.double()).abs().max()
    return f"rows {unequal.nonzero().flatten().tolist()} differ, by up to {float(largest):.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedRequests:
    """Requests in a poisoned pool: every slot that no request wrote is NaN.

    Args:
        layer: the pool.
        tables: int32 [B, T], random distinct blocks, unused entries 0 (a poisoned block).
        lengths: keys of each request.
    """

    layer: KVLayer
    tables: torch.Tensor
    lengths: tuple[int, ...]

    def batch(self, rows: list[tuple[int, int]], limits: list[int] | None = None) -> PreparedBatch:
        """Pack (request, position) rows, with the last position that each may see."""
        device = self.tables.device
        positions = torch.tensor([position for _, position in rows], device=device)
        requests = [request for request, _ in rows]
        return PreparedBatch(
            ids_target_N=torch.zeros_like(positions),
            positions_N=positions,
            slots_N=torch.zeros_like(positions),
            row_request_N=torch.tensor(requests, dtype=torch.int32, device=device),
            block_tables_BT=self.tables,
            max_length=max(limits or (position for _, position in rows)) + 1,
            limits_N=None if limits is None else torch.tensor(limits, device=device),
        )

    def poisoned_after(self, request: int, position: int) -> KVLayer:
        """Copy the pool with NaN in every slot of a request after a position."""
        kv_block_size = self.layer.k.shape[2]
        after = torch.arange(position + 1, self.lengths[request], device=self.tables.device)
        blocks = self.tables[request].long()[after // kv_block_size]
        k, v = self.layer.k.clone(), self.layer.v.clone()
        k[blocks, :, after % kv_block_size] = float("nan")
        v[blocks, :, after % kv_block_size] = float("nan")
        return KVLayer(k=k, v=v)


def paged_requests(
    *,
    num_kv_heads: int,
    head_dim: int,
    kv_block_size: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    seed: int,
    write: Callable[[torch.Tensor, torch.Tensor, KVLayer, torch.Tensor], None],
    device: str = "cpu",
    fill: Callable[..., torch.Tensor] = adversarial,
) -> PagedRequests:
    """Write keys and values of every request into a poisoned pool through `write`."""
    width = max(lengths) // kv_block_size + 3
    num_blocks = len(lengths) * width + 5
    shape = (num_blocks, num_kv_heads, kv_block_size, head_dim)
    layer = KVLayer(
        k=torch.full(shape, float("nan"), dtype=dtype, device=device),
        v=torch.full(shape, float("nan"), dtype=dtype, device=device),
    )
    order = torch.randperm(num_blocks - 1, generator=generator(seed)) + 1
    tables = torch.zeros((len(lengths), width), dtype=torch.int32)
    taken = 0
    for request, length in enumerate(lengths):
        count = -(-length // kv_block_size)
        tables[request, :count] = order[taken : taken + count].int()
        taken += count
        keys = torch.arange(length)
        blocks = tables[request].long()[keys // kv_block_size]
        slots = (blocks * kv_block_size + keys % kv_block_size).to(device)
        k, v = (
            fill(
                length, num_kv_heads, head_dim, seed=seed + 2 * request + part,
                dtype=dtype, device=device,
            )
            for part in (1, 2)
        )  # fmt: skip
        write(k, v, layer, slots)
    return PagedRequests(layer=layer, tables=tables.to(device), lengths=lengths)


def tail_rows(requests: PagedRequests, count: int) -> list[tuple[int, int]]:
    """Return the last positions of every request, up to `count` of each, in order."""
    return [
        (request, position)
        for request, length in enumerate(requests.lengths)
        for position in range(max(0, length - count), length)
    ]


AttentionOp = Callable[[torch.Tensor, KVLayer, PreparedBatch], torch.Tensor]


def assert_attention_rows_independent(
    attend: AttentionOp,
    requests: PagedRequests,
    q_MHP: torch.Tensor,
    rows: list[tuple[int, int]],
    counts: Iterable[int],
    *,
    seed: int,
) -> None:
    """Assert that rows in random batches equal single rows on a pool poisoned after them.

    A batch keeps the order of a request's rows and shuffles the requests.
    """
    singles = [
        attend(
            q_MHP[i : i + 1],
            requests.poisoned_after(request, position),
            requests.batch([(request, position)]),
        )
        for i, (request, position) in enumerate(rows)
    ]
    assert all(bool(torch.isfinite(single).all()) for single in singles), "poison came through"
    gen = generator(seed)
    for count in counts:
        chosen = torch.randperm(len(rows), generator=gen)[:count].tolist()
        first_seen = {}
        for i in chosen:
            first_seen.setdefault(rows[i][0], len(first_seen))
        chosen.sort(key=lambda i: (first_seen[rows[i][0]], rows[i][1]))
        index = torch.tensor(chosen, device=q_MHP.device)
        got = attend(q_MHP[index], requests.layer, requests.batch([rows[i] for i in chosen]))
        expected = torch.cat([singles[i] for i in chosen])
        assert same_bits(got, expected), f"M={count}: {differing(got, expected)}"
