"""Dense batches for attention tests: W new rows of each request behind a poisoned pool.

Legend: B requests, W rows of each, M = B W rows, H query heads, G key heads, P head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from runtime.batch import PreparedBatch
from runtime.kernels.attention import paged_attention_twin
from runtime.kernels.kv_write import write_kv_twin
from runtime.kernels.norm import HeadNorms, head_rms_norm
from runtime.kernels.rope import apply_rope_twin
from runtime.kv import KVLayer
from tests.kernels.ladder import paged_requests, plain

KV_BLOCK_SIZE = 16
SCALE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseRequests:
    """New rows before norm and rotation.

    The pool holds each request's keys before them and NaN elsewhere.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layer: KVLayer
    batch: PreparedBatch
    cos_sin: torch.Tensor
    norms: HeadNorms | None = None

    def fresh(self) -> KVLayer:
        """Copy the pool as it is before the rows are written."""
        return KVLayer(k=self.layer.k.clone(), v=self.layer.v.clone())

    def attend(
        self, launch: Callable[..., torch.Tensor], *, window: int | None, overlap: bool = False
    ) -> tuple[KVLayer, torch.Tensor]:
        """Run the fused kernel on a fresh pool; return the pool and the outputs."""
        from runtime.kernels.cuda.attention import NewRows

        layer = self.fresh()
        new = NewRows(k_MGP=self.k, v_MGP=self.v, cos_sin_TP=self.cos_sin, norms=self.norms)
        out = launch(
            self.q, layer, self.batch, scale=SCALE, window=window, new=new, overlap=overlap
        )
        return layer, out

    def attend_separately(
        self,
        attention: ModuleType | None,
        rope: ModuleType | None,
        kv_write: ModuleType | None,
        norm: ModuleType | None = None,
        *,
        window: int | None,
    ) -> tuple[KVLayer, torch.Tensor]:
        """Norm, rotate, write and attend row by row with separate kernels, or with the twins."""
        layer = self.fresh()
        rotate: Any = rope.launch_apply_rope if rope else apply_rope_twin
        write: Any = kv_write.launch_write_kv if kv_write else write_kv_twin
        mix: Any = attention.launch_paged_attention if attention else paged_attention_twin
        q, k = self.q, self.k
        if self.norms is not None:
            normed: Any = norm.launch_head_rms_norm if norm else head_rms_norm
            q = normed(q, self.norms.q_P, self.norms.eps)
            k = normed(k, self.norms.k_P, self.norms.eps)
        q, k = rotate(q, k, self.batch.positions_N, self.cos_sin)
        write(k, self.v, layer, self.batch.slots_N)
        general = dataclasses.replace(self.batch, rows_per_request=None)
        return layer, mix(q, layer, general, scale=SCALE, window=window)

    def request(self, index: int, width: int) -> DenseRequests:
        """Take the first `width` rows of one request as a batch of their own."""
        whole = self.batch.rows_per_request
        assert whole is not None
        rows = slice(index * whole, index * whole + width)
        positions = self.batch.positions_N[rows]
        batch = PreparedBatch(
            ids_target_N=positions,
            positions_N=positions,
            slots_N=self.batch.slots_N[rows],
            row_request_N=torch.zeros_like(self.batch.row_request_N[rows]),
            block_tables_BT=self.batch.block_tables_BT[index : index + 1],
            max_length=int(positions.max()) + 1,
            rows_per_request=width,
        )
        return dataclasses.replace(
            self, q=self.q[rows], k=self.k[rows], v=self.v[rows], batch=batch
        )


def dense_requests(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    width: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    device: str = "cpu",
    has_norms: bool = False,
) -> DenseRequests:
    """Make requests whose last `width` positions, of `lengths` or more, are new rows.

    Args:
        lengths: positions of each request, new ones included; at least `width` are taken.
    """
    lengths = tuple(max(length, width) for length in lengths)
    paged = paged_requests(
        num_kv_heads=num_kv_heads, head_dim=head_dim, kv_block_size=KV_BLOCK_SIZE,
        lengths=lengths, dtype=dtype, seed=1, write=write_kv_twin, device=device, fill=plain,
    )  # fmt: skip
    layer = paged.layer
    for request, length in enumerate(lengths):
        layer = dataclasses.replace(paged, layer=layer).poisoned_after(request, length - width - 1)
    positions = torch.cat([torch.arange(n - width, n) for n in lengths]).to(device)
    requests = torch.arange(len(lengths), dtype=torch.int32, device=device)
    requests = requests.repeat_interleave(width)
    blocks = paged.tables.long()[requests.long(), positions // KV_BLOCK_SIZE]
    angles = torch.arange(max(lengths)).unsqueeze(1) * torch.linspace(1e-4, 1, head_dim // 2)
    count, fused = len(positions), num_heads + 2 * num_kv_heads
    qkv = plain(count, fused, head_dim, seed=7, dtype=dtype, device=device)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return DenseRequests(
        q=q,
        k=k,
        v=v,
        layer=layer,
        batch=PreparedBatch(
            ids_target_N=positions,
            positions_N=positions,
            slots_N=blocks * KV_BLOCK_SIZE + positions % KV_BLOCK_SIZE,
            row_request_N=requests,
            block_tables_BT=paged.tables,
            max_length=max(lengths),
            rows_per_request=width,
        ),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        norms=None
        if not has_norms
        else HeadNorms(
            q_P=plain(head_dim, seed=8, dtype=dtype, device=device),
            k_P=plain(head_dim, seed=9, dtype=dtype, device=device),
            eps=1e-5,
        ),
    )
