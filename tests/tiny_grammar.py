"""Grammars small enough to check by eye, as providers of masks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from runtime.kernels.masks import WORD_BITS, num_mask_words
from tests.tiny import EOS_ID, VOCAB_SIZE

Rule = Callable[[Sequence[int]], torch.Tensor]
"""What may follow an output: bool [V]."""

IDS = torch.arange(VOCAB_SIZE)


def pack_mask(allowed_MV: torch.Tensor) -> torch.Tensor:
    """Return int32 [M, X] of bool [M, V], as grammar libraries write it."""
    num_rows, num_ids = allowed_MV.shape
    padded_MV = allowed_MV.new_zeros((num_rows, num_mask_words(num_ids) * WORD_BITS))
    padded_MV[:, :num_ids] = allowed_MV
    words_MX = (padded_MV.view(num_rows, -1, WORD_BITS).long() << torch.arange(WORD_BITS)).sum(2)
    return words_MX.to(torch.int32)  # bit 31 is the sign


def parity(output: Sequence[int]) -> torch.Tensor:
    """An odd id after an even one and the other way round; the first is odd; no end."""
    is_even_next = bool(output) and output[-1] % 2 == 1
    return ((0 if is_even_next else 1) == IDS % 2) & (IDS > EOS_ID)


def tens(output: Sequence[int]) -> torch.Tensor:
    """One of ten ids."""
    return (IDS >= 20) & (IDS < 30)


def five_tens(output: Sequence[int]) -> torch.Tensor:
    """Five of ten ids, then the end."""
    return tens(output) if len(output) < 5 else IDS == EOS_ID


def dead_end(output: Sequence[int]) -> torch.Tensor:
    """Seven tokens of the other rule, then nothing at all."""
    return parity(output) if len(output) < 7 else torch.zeros(VOCAB_SIZE, dtype=torch.bool)


class Grammar:
    """A rule at work; what follows a draft that it forbids is left unsaid."""

    def __init__(self, rule: Rule, *, num_ids: int = VOCAB_SIZE) -> None:
        self.rule = rule
        self.num_ids = num_ids
        self.num_rows: list[int] = []

    def fill(
        self, output_ids_target: Sequence[int], drafts_target: Sequence[int], words_WX: torch.Tensor
    ) -> None:
        assert words_WX.shape[0] == len(drafts_target) + 1
        self.num_rows.append(words_WX.shape[0])
        for row, draft in enumerate((*drafts_target, None)):
            allowed = self.rule((*output_ids_target, *drafts_target[:row]))
            words_WX[row] = pack_mask(allowed[None])[0]
            if draft is not None and not allowed[draft]:
                words_WX[row + 1 :] = 0
                break

    def accepts(self, output: Sequence[int]) -> bool:
        """Whether every token may stand where it does."""
        return all(bool(self.rule(output[:j])[token]) for j, token in enumerate(output))


class Slow(Grammar):
    """A grammar that makes no masks in split rounds before it is told to."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule)
        self.may_go = threading.Event()
        self.engine_thread = threading.get_ident()

    def fill(
        self, output_ids_target: Sequence[int], drafts_target: Sequence[int], words_WX: torch.Tensor
    ) -> None:
        if threading.get_ident() != self.engine_thread:
            assert self.may_go.wait(60), "nobody went on without these masks"
        super().fill(output_ids_target, drafts_target, words_WX)
