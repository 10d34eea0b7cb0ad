"""Embedding and head over a target vocabulary, whole or split over the ranks of a stage by rows.

Every rank holds the same number of rows, `rank_rows(V, size)`; the last ones are padded with zeros
that no id reaches. One rank is the whole matrix, and nothing is exchanged.

Legend: N rows, D width, V ids, R rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runtime.kernels import (
    HeadRows,
    RowHalf,
    RowNorm,
    embed,
    embed_stream,
    enter_stream,
    head_argmax,
    head_logits,
    plain_rows,
)
from runtime.kernels.stream import Stream
from runtime.parallel.ranks import Ranks, choose_highest, gather_columns

_NO_ID = torch.iinfo(torch.int64).max


def rank_rows(num_ids: int, num_ranks: int) -> int:
    """Return the rows of a vocabulary that each rank holds, padding included."""
    return -(-num_ids // num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VocabEmbedding:
    """Input embedding rows.

    Args:
        weight_RD: rows `ranks.rank * R` and on.
        ranks: who holds the others.
    """

    weight_RD: torch.Tensor
    ranks: Ranks

    def rows(self, ids_N: torch.Tensor) -> torch.Tensor:
        """Return [N, D]: the rows of ids, bit for bit those of the whole matrix."""
        if self.ranks.size == 1:
            return embed(ids_N, self.weight_RD)
        num_rows = self.weight_RD.shape[0]
        owners_N = ids_N // num_rows
        # Ids of other ranks read some row of this one; it is not looked at.
        found = self.ranks.gather(embed(ids_N % num_rows, self.weight_RD))
        return found[owners_N, torch.arange(ids_N.shape[0], device=ids_N.device)]

    def half(self, ids_N: torch.Tensor, norm: RowNorm | None) -> RowHalf:
        """Return the rows of ids as one half of a product's rows."""
        if self.ranks.size == 1:
            return RowHalf(rows_XD=self.weight_RD, ids_M=ids_N, norm=norm)
        return RowHalf(rows_XD=self.rows(ids_N), norm=norm)

    def stream(
        self, ids_N: torch.Tensor, norm_D: torch.Tensor, out_ND: torch.Tensor | None = None
    ) -> Stream:
        """Return the residual stream of ids at the norm whose weight is `norm_D`.

        Args:
            ids_N: int64.
            norm_D: [D].
            out_ND: takes the rows themselves, of one rank; None: they lie anywhere.
        """
        if self.ranks.size == 1:
            return embed_stream(ids_N, self.weight_RD, norm_D, out_ND)
        assert out_ND is None, "rows of several ranks are gathered"
        return enter_stream(self.rows(ids_N), norm_D)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class VocabHead:
    """Output head rows; logits exist for the first `num_ids` ids, the others cannot be chosen.

    Args:
        weight_RD: rows `ranks.rank * R` and on.
        num_ids: ids that can be chosen, over all ranks.
        ranks: who holds the other rows.
    """

    weight_RD: torch.Tensor
    num_ids: int
    ranks: Ranks

    @property
    def first_id(self) -> int:
        """Id of this rank's first row."""
        return self.ranks.rank * self.weight_RD.shape[0]

    @property
    def reachable_rows(self) -> torch.Tensor:
        """Rows of this rank whose ids can be chosen: what products multiply."""
        return self.weight_RD[: max(0, self.num_ids - self.first_id)]

    def logits(self, hidden_ND: HeadRows, norm: RowNorm | None = None) -> torch.Tensor:
        """Return fp32 [N, num_ids] over all ranks; `norm` is of the rows before the product."""
        rows = self.reachable_rows
        if self.ranks.size == 1:
            return head_logits(hidden_ND, rows, norm)
        missing = self.weight_RD.shape[0] - rows.shape[0]
        local = torch.nn.functional.pad(_logits(hidden_ND, rows, norm), (0, missing))
        return gather_columns(self.ranks, local)[:, : self.num_ids]

    def argmax(
        self,
        hidden_ND: HeadRows,
        norm: RowNorm | None = None,
        *,
        names_V: torch.Tensor | None = None,
        copy_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return int64 [N]: the id with the highest of `logits`, the lowest among equals.

        Args:
            hidden_ND: rows, or their stream at `norm`.
            norm: of the rows before the product.
            names_V: int64, what ids are called elsewhere; None: their numbers.
            copy_N: int64 with any stride, takes the result, too.
        """
        rows = self.reachable_rows
        if self.ranks.size == 1:
            return head_argmax(hidden_ND, rows, norm, names_V=names_V, copy_M=copy_N)[0]
        if rows.shape[0]:
            ids, values = head_argmax(hidden_ND, rows, norm)
            ids = ids + self.first_id
        else:
            plain = plain_rows(hidden_ND)
            ids = torch.full_like(plain[:, 0], 0, dtype=torch.int64) + _NO_ID
            values = plain.new_full((plain.shape[0],), float("-inf"), dtype=torch.float32)
        ids = choose_highest(self.ranks, values, ids)
        if names_V is not None:
            ids = names_V[ids]
        if copy_N is not None:
            copy_N.copy_(ids)
        return ids


def _logits(hidden_ND: HeadRows, rows: torch.Tensor, norm: RowNorm | None) -> torch.Tensor:
    if rows.shape[0]:
        return head_logits(hidden_ND, rows, norm)
    plain = plain_rows(hidden_ND)
    return plain.new_empty((plain.shape[0], 0), dtype=torch.float32)


def pick_rows(head: VocabHead, ids_R: torch.Tensor, ranks: Ranks) -> VocabHead:
    """Return a head over rows of another one, in the order of `ids_R`; the rows are copied.

    Args:
        head: whole, or split over ranks that all call this.
        ids_R: int64, rows of `head` over all its ranks.
        ranks: over which the new head is split.
    """
    size = rank_rows(ids_R.numel(), ranks.size)
    padding = size * ranks.size - ids_R.numel()
    padded = torch.nn.functional.pad(ids_R, (0, padding)).to(head.weight_RD.device)
    source = VocabEmbedding(weight_RD=head.weight_RD, ranks=head.ranks)
    rows = torch.empty_like(head.weight_RD[:0])
    for rank, part in enumerate(padded.view(ranks.size, size)):
        # Every rank helps every other one to its rows, so all ask for all parts in turn.
        if rank == ranks.rank or head.ranks.size > 1:
            found = source.rows(part)
            rows = found if rank == ranks.rank else rows
    num_own = max(0, min(size, ids_R.numel() - ranks.rank * size))
    rows[num_own:] = 0
    return VocabHead(weight_RD=rows, num_ids=ids_R.numel(), ranks=ranks)
