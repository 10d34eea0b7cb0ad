"""Build batches over a paged cache by hand, for the model tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kv import KVLayerSpec, KVPool

KV_BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Rows of one request: tokens `ids` at positions `start`, `start + 1`, ..."""

    request: int
    start: int
    ids: Sequence[int]


class Paged:
    """A pool and scattered block tables for a few requests; block 0 belongs to nobody."""

    def __init__(
        self,
        specs: Sequence[KVLayerSpec],
        *,
        num_requests: int,
        max_length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        is_poisoned: bool = False,
        seed: int = 0,
    ) -> None:
        self.device = device or torch.device("cpu")
        per_request = -(-max_length // KV_BLOCK_SIZE)
        num_blocks = 1 + 2 * num_requests * per_request
        self.pool = KVPool(
            specs,
            num_blocks=num_blocks,
            kv_block_size=KV_BLOCK_SIZE,
            dtype=dtype,
            device=self.device,
        )
        if is_poisoned:
            for layer in self.pool.layers:
                layer.k.fill_(float("nan"))
                layer.v.fill_(float("nan"))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        tables = order[: num_requests * per_request].view(num_requests, per_request)
        self._tables = tables.to(torch.int32)

    def batch(self, spans: Sequence[Span], *, order: torch.Tensor | None = None) -> PreparedBatch:
        """Pack the spans' rows; `order` permutes rows (each request's must stay ascending)."""
        ids = torch.tensor([token for span in spans for token in span.ids])
        positions = torch.cat([span.start + torch.arange(len(span.ids)) for span in spans])
        requests = torch.cat([torch.full((len(span.ids),), span.request) for span in spans])
        if order is not None:
            ids, positions, requests = ids[order], positions[order], requests[order]
        blocks = self._tables[requests, positions // KV_BLOCK_SIZE].long()
        return PreparedBatch(
            ids_target_N=ids.to(self.device),
            positions_N=positions.to(self.device),
            slots_N=(blocks * KV_BLOCK_SIZE + positions % KV_BLOCK_SIZE).to(self.device),
            row_request_N=requests.to(torch.int32).to(self.device),
            block_tables_BT=self._tables.to(self.device),
            max_length=int(positions.max()) + 1,
        )
