"""What a split round keeps between its two halves, and the masks that the host hands in.

Requests with a grammar run apart from the others. Their round is one graph that drafts, and one
that verifies, accepts and commits; in between the host reads the drafts and makes the masks of all
rows. Other rounds may run there: a half reads nothing of theirs but what is a slot's own. Every
tensor is allocated once, so captured graphs may keep their addresses.

Legend: B requests, G drafts, W = G + 1 rows of each, X words of a mask, R draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from runtime.batch import RoundKind, RoundRequests, on_device
from runtime.graphs.state import RoundShape, RoundState
from runtime.kernels.masks import num_mask_words


def split_kind(kind: RoundKind) -> RoundKind:
    """Return the kind of split round that runs requests of a kind; greedy ones have none."""
    return "sampled" if kind == "greedy" else kind


class SplitState:
    """Device tensors of the requests of one split round.

    Attributes:
        slots_B: int64 input, slots of the requests, then the padding slot.
        num_drafts_B: int64 input, drafts that count, 0 for padding.
        drafts_BG: int64, target ids; written by the first half, read by the second.
        words_BWX: int32 input of the second half, the masks of all rows.
        host_words_BWX: where the host makes them.
    """

    def __init__(self, state: RoundState, *, max_batch: int, max_drafts: int, num_ids: int) -> None:
        """Allocate everything; every request of the next round is padding.

        Args:
            state: of all slots.
            max_batch: requests of the largest round.
            max_drafts: drafts of a request at most.
            num_ids: of the target's vocabulary.
        """
        device = state.device
        self._state = state
        self.slots_B = torch.full(
            (max_batch,), state.padding_slot, dtype=torch.int64, device=device
        )
        self.num_drafts_B = torch.zeros_like(self.slots_B)
        self.drafts_BG = torch.zeros((max_batch, max_drafts), dtype=torch.int64, device=device)
        shape = (max_batch, max_drafts + 1, num_mask_words(num_ids))
        self.words_BWX = torch.zeros(shape, dtype=torch.int32, device=device)
        # Pinned memory: a copy from elsewhere would be staged by the host.
        self.host_words_BWX = torch.zeros(
            shape, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._laws: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def padding_slot(self) -> int:
        """The slot that no request has."""
        return self._state.padding_slot

    def write_batch(self, slots: Sequence[int], num_drafts: Sequence[int]) -> None:
        """Choose the requests of the next half; all others are padding.

        Sync: none.
        """
        rest = self.slots_B.shape[0] - len(slots)
        padding = [self.padding_slot] * rest
        table = [[*slots, *padding], [*num_drafts, *[0] * rest]]
        both = on_device(table, device=self.slots_B.device)
        self.slots_B.copy_(both[0])
        self.num_drafts_B.copy_(both[1])

    def write_masks(self, num_requests: int) -> None:
        """Hand the masks over that the host made for the first requests.

        The host may make others once a round that was launched after this is read.

        Sync: none.
        """
        made_BWX = self.host_words_BWX[:num_requests]
        self.words_BWX[:num_requests].copy_(made_BWX, non_blocking=True)

    def requests(self, shape: RoundShape) -> RoundRequests:
        """Return the requests of a half as they stand on the device.

        Sync: none.
        """
        return self._state.requests_in(shape, self.slots_B, self.num_drafts_B)

    def keep(self, shape: RoundShape, requests: RoundRequests) -> None:
        """Keep the drafts that the first half made, and their laws.

        Laws get tensors of their own on the first run of a shape, which is never a captured one.

        Sync: none.
        """
        self.drafts_BG[: shape.batch, : shape.num_drafts].copy_(requests.drafts_BG)
        laws = requests.laws
        if laws is None or not laws.log_q:
            return
        log_q_BGR, map_R = torch.stack(laws.log_q, dim=1), laws.maps[0]
        if shape.batch not in self._laws:
            self._laws[shape.batch] = (log_q_BGR.clone(), map_R.clone())
        kept_BGR, kept_R = self._laws[shape.batch]
        kept_BGR.copy_(log_q_BGR)
        kept_R.copy_(map_R)

    def restore(self, shape: RoundShape, requests: RoundRequests) -> None:
        """Give the requests of the second half the drafts that were kept, and their laws.

        Sync: none.
        """
        requests.drafts_BG.copy_(self.drafts_BG[: shape.batch, : shape.num_drafts])
        kept = self._laws.get(shape.batch)
        if requests.laws is not None and kept is not None:
            for log_q_BR in kept[0].unbind(dim=1):
                requests.laws.add(log_q_BR, kept[1])

    def words(self, shape: RoundShape) -> torch.Tensor:
        """Return int32 [N, X], the mask of each verified row.

        Sync: none.
        """
        return self.words_BWX[: shape.batch, : shape.width].flatten(0, 1)
