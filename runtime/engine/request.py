"""Requests: what a caller hands in, what the engine tracks, what a step reports back.

`Request` is the only value here that changes. Everything it holds only while it runs (slot, KV
blocks, progress) is one `Placement`, made at admission and dropped by preemption or at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from runtime.engine.block_manager import BlockTable
from runtime.engine.text import TextStream
from runtime.spec.adaptive import Acceptance
from runtime.spec.masks import MaskProvider, MaskWish
from runtime.spec.received import ReceivedDrafts
from runtime.spec.types import RequestView, SamplingParams, TokenLogprobs
from specctl.contract.diagnostics import Diagnostic

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestInput:
    """One generation as its caller asks for it.

    Args:
        request_id: unique among the requests in flight; never an input of arithmetic.
        prompt_ids_target: target ids, at least one.
        params: how tokens are chosen; `end_ids_target` is filled in at admission.
        max_tokens: new tokens at most; None: until the context is full.
        stop: strings that end the text; the completing token stays in the ids.
        stop_ids: target ids that end the request like the model's end tokens.
        ignore_eos: whether the model's end tokens are ordinary tokens.
        has_seed: whether `params.seed` was given; False draws one at admission.
        num_speculative_tokens: drafts per round, at most the engine's number; None: the engine's.
        is_parked_at_end: whether slot and blocks stay taken when it ends, until `Engine.retire`.
        masks: grammar that its tokens keep to, of this request alone; None: any tokens.
    """

    request_id: str
    prompt_ids_target: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    has_seed: bool = True
    num_speculative_tokens: int | None = None
    is_parked_at_end: bool = False
    masks: MaskProvider | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """What the engine fixed for a request when it took it."""

    request_id: str
    seed: int


def accept_length(num_accepted_drafts: int, num_rounds: int) -> float | None:
    """Return 1 + accepted drafts / verify rounds; None before the first round."""
    return 1 + num_accepted_drafts / num_rounds if num_rounds else None


class Usage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Counts of one request so far; a struct, because every round makes one for each request.

    Args:
        num_cached_tokens: prompt tokens whose KV came from the prefix cache at first admission.
        num_output_tokens: tokens kept, end token included.
        num_rounds: verify rounds; the token that a prefill yields belongs to none.
        num_drafts: drafts verified, before any stop or length cut.
        num_accepted_drafts: drafts accepted, before any stop or length cut.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_rounds: int
    num_drafts: int
    num_accepted_drafts: int

    @property
    def accept_length(self) -> float | None:
        """Of this request's rounds; None before the first."""
        return accept_length(self.num_accepted_drafts, self.num_rounds)


class RequestDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What one step added to a request; a struct as `Usage` is.

    Args:
        ids_target: new output ids, in order; nothing after a stop.
        text: new final text; empty without a tokenizer.
        finish_reason: set in the last delta of a request only.
        error: why, when the reason is `error`.
        logprobs: one entry for each new id where the request wants them, else none.
    """

    request_id: str
    ids_target: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    usage: Usage
    error: Diagnostic | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(kw_only=True, slots=True)
class Placement:
    """What a request holds while it runs.

    Args:
        slot: row of per-request device state.
        table: its KV blocks.
        num_computed_tokens: leading positions whose KV is final.
        num_prefill_tokens: tokens known at admission; all of them are computed as prefill.
        is_under_way: a forward with its rows was sent off and not waited for.
        num_final_rows: rows of its last forward that became final, 0 while that is not known; -1
            before the first.
        received: drafts of the first round, made by another process; None once they are used.
    """

    slot: int
    table: BlockTable
    num_computed_tokens: int
    num_prefill_tokens: int
    is_under_way: bool = False
    num_final_rows: int = -1
    received: ReceivedDrafts | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether prefill is over: one token is not computed, the newest."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def num_tokens_to_prefill(self) -> int:
        """Prefill rows that are still to run."""
        return max(0, self.num_prefill_tokens - self.num_computed_tokens)


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """A request in flight.

    Args:
        ids_target: prompt and kept output, newest last.
        max_length: tokens at which it ends, prompt included.
        num_speculative_tokens: drafts wanted per round.
        text: decoder of the output; None without a tokenizer.
        placement: None while it waits.
        num_cached_tokens: prefix hit of the first admission; None before it.
        acceptance: what its rounds have shown.
        is_parked_at_end: whether it keeps slot and blocks when it ends, until it is retired.
        masks: grammar that its tokens keep to; None: any tokens.
    """

    request_id: str
    params: SamplingParams
    ids_target: list[int]
    num_prompt_tokens: int
    max_length: int
    num_speculative_tokens: int
    text: TextStream | None
    placement: Placement | None = None
    num_cached_tokens: int | None = None
    num_rounds: int = 0
    num_drafts: int = 0
    num_accepted_drafts: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    is_parked_at_end: bool = False
    masks: MaskProvider | None = None

    @property
    def num_output_tokens(self) -> int:
        """Kept output tokens."""
        return len(self.ids_target) - self.num_prompt_tokens

    @property
    def placed(self) -> Placement:
        """The placement of a running request."""
        assert self.placement is not None, f"request {self.request_id} is not running"
        return self.placement

    def view(self, num_drafts: int) -> RequestView:
        """Return the request as speculation sees it; token and block lists are live, not copies."""
        placed = self.placed
        return RequestView(
            request_id=self.request_id,
            slot=placed.slot,
            ids_target=self.ids_target,
            num_prompt_tokens=self.num_prompt_tokens,
            params=self.params,
            block_table=placed.table.blocks,
            num_drafts=num_drafts,
        )

    def mask_wish(self, drafts_target: Sequence[int]) -> MaskWish | None:
        """Return what its grammar is asked in a round with these drafts; None without a grammar."""
        if self.masks is None:
            return None
        return MaskWish(
            provider=self.masks,
            output_ids_target=tuple(self.ids_target[self.num_prompt_tokens :]),
            drafts_target=tuple(drafts_target),
        )

    def usage(self) -> Usage:
        """Return the counts so far."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_output_tokens=self.num_output_tokens,
            num_rounds=self.num_rounds,
            num_drafts=self.num_drafts,
            num_accepted_drafts=self.num_accepted_drafts,
        )
