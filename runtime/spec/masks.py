"""The seam of grammars: who says which ids may follow a request's tokens, and when it is asked.

A provider fills the masks of all rows of a round at once: what may follow the request's tokens, and
what may follow them and each of its drafts. Verification masks the target's logits with that, so
constrained decoding with drafts yields the tokens of constrained decoding without any; drafts
themselves are made without a mask, and one that is not allowed is never the target's choice.

Legend: B requests, V target ids, W rows of a request (its drafts + 1), X words of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from runtime.kernels.masks import num_mask_words, unpack_mask


class MaskProvider(Protocol):
    """A grammar at work on one request.

    Calls come one at a time, not always from the same thread, and never while the engine changes
    the request. After a preemption the tokens are the same again, so a call may go back.
    """

    @property
    def num_ids(self) -> int:
        """Target ids that it knows; the target's vocabulary has as many."""

    def fill(
        self, output_ids_target: Sequence[int], drafts_target: Sequence[int], words_WX: torch.Tensor
    ) -> None:
        """Write the masks of a round; it takes what it cannot allow for masked and raises nothing.

        Args:
            output_ids_target: tokens after the prompt so far.
            drafts_target: of the round; any ids, allowed or not.
            words_WX: int32 on the CPU, bits as in `runtime.kernels.masks`. Row 0 says what may
                follow the output, row j what may follow it and the first j drafts; rows after a
                draft that is not allowed count for nothing and may hold anything.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskWish:
    """What a provider is asked in one round; a copy of the request's tokens, none of them live."""

    provider: MaskProvider
    output_ids_target: tuple[int, ...]
    drafts_target: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows to fill."""
        return len(self.drafts_target) + 1


@torch.inference_mode()  # of whatever thread makes them: the engine's tensors may ask for it
def fill_masks(wishes: Sequence[MaskWish], words_BWX: torch.Tensor) -> None:
    """Fill the rows of each request; its rows beyond the wish stay as they are.

    Args:
        wishes: of the first requests.
        words_BWX: int32 on the CPU.
    """
    for wish, words_WX in zip(wishes, words_BWX, strict=False):
        wish.provider.fill(wish.output_ids_target, wish.drafts_target, words_WX[: wish.num_rows])


def allowed_rows(wish: MaskWish, num_ids: int, device: torch.device) -> torch.Tensor:
    """Return bool [W, V] on the device: what the eager path verifies with.

    Sync: none.
    """
    words_WX = torch.zeros((wish.num_rows, num_mask_words(num_ids)), dtype=torch.int32)
    fill_masks([wish], words_WX[None])
    return unpack_mask(words_WX.to(device, non_blocking=True), num_ids)
