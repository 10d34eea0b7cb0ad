"""Values and the protocol of speculation: what a proposer sees, proposes and is told afterwards.

Legend: B requests, G num_speculative_tokens, N rows, A*H concatenated aux hidden states.
Every id tensor names its vocabulary; proposers hand over *target* ids only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from runtime.batch import PrefillDraft, PreparedBatch, RoundDraft, RoundKind
from specctl.contract.manifest import VerificationMode

MAX_LOGPROBS = 20
"""Likeliest ids that are reported with a token at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen; temperature 0 is greedy.

    Args:
        top_k: 0 keeps all.
        seed: always set (drawn at admission when the client gave none).
        logit_bias: target id -> added to the logit before temperature.
        min_tokens: end ids are masked until this many tokens are out.
        end_ids_target: ids that end the request (masked while below `min_tokens`); empty under
            ignore_eos.
        verification: how drafts of a sampled request are decided about; settled at admission.
        num_logprobs: likeliest ids reported with each token's log probability; None reports none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    choice_index: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    end_ids_target: tuple[int, ...] = ()
    verification: VerificationMode = "seeded"
    num_logprobs: int | None = None

    @property
    def is_rejection(self) -> bool:
        """Whether drafts are accepted with a probability (rejection mode)."""
        return self.verification == "rejection" and not self.is_greedy

    @property
    def device_kind(self) -> RoundKind | None:
        """What a round on the device must do for the request; None: only the eager path can.

        Penalties, bias, masks of end ids and log probabilities are left to the eager path.
        """
        if self.num_logprobs is not None:
            return None
        if self.is_plain_greedy:
            return "greedy"
        if self.is_greedy or not replace(self, temperature=0.0).is_plain_greedy:
            return None
        if self.is_rejection:
            return "rejection"
        has_filters = self.top_k > 0 or self.min_p > 0.0 or self.top_p < 1.0
        return "filtered" if has_filters else "sampled"

    @property
    def is_greedy(self) -> bool:
        """Whether the token is the argmax of the processed logits."""
        return self.temperature == 0.0

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the argmax of the raw logits: no logit is changed before it."""
        return (
            self.is_greedy
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.min_tokens == 0
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestView:
    """A running request as speculation sees it; the newest token's KV is not computed yet.

    Args:
        request_id: for messages only, never an input of arithmetic.
        slot: row of per-request device state, in [0, max_num_requests).
        ids_target: prompt and committed tokens, newest last (length L + 1 when L are computed).
        num_prompt_tokens: how many of them are the prompt.
        block_table: KV blocks, enough for positions 0..L + num_drafts.
        num_drafts: how many drafts are wanted this round, 0..G.
    """

    request_id: str
    slot: int
    ids_target: Sequence[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_table: Sequence[int]
    num_drafts: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DraftLaw:
    """The laws q that drafts were drawn from, over the draft's vocabulary.

    Args:
        log_q_BGR: fp32 log weights, up to a constant for each draft; -inf cannot be drawn.
        ids_target_R: int64, target id of each column.
        is_known: per request, whether its drafts were drawn with these weights; a request without
            a known law has drafts that count as certain (q is one-hot), and its rows hold anything.
    """

    log_q_BGR: torch.Tensor
    ids_target_R: torch.Tensor
    is_known: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Drafts of one round.

    Args:
        ids_target_BG: int64 [B, G] on the runtime's device; entries at or beyond a request's
            `num_drafts` are 0 and not drafts.
        num_drafts: per request, 0..G; never more than the view asked for.
        q: laws of the drafts, read for requests in rejection mode; None: every draft is certain.
    """

    ids_target_BG: torch.Tensor
    num_drafts: tuple[int, ...]
    q: DraftLaw | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log probabilities under the target at one committed token, before any request option.

    Args:
        logprob: of the token, natural logarithm.
        top: (target id, logprob) of the likeliest ids, most likely first, the lowest id on a tie.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """Outcome of one verify, per request, before any stop or length cut.

    Args:
        committed: target ids that the round commits: accepted drafts then the bonus token.
        num_drafts: drafts verified.
        num_accepted_drafts: len(committed) - 1.
        logprobs: per request one entry for each committed token, or none where none are asked for.
    """

    committed: tuple[tuple[int, ...], ...]
    num_drafts: tuple[int, ...]
    num_accepted_drafts: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Target states that became final: prefill rows and the accepted rows of a verify.

    Args:
        batch: rows in request order; for row i at position p the ids are the token at p.
        next_ids_target_N: int64, the known token at p + 1 (next prompt token or committed token).
        aux_hidden_N: [N, A*H_t], the target's captured states at p, ascending layer order;
            None when the proposer asked for none.
        views: one per row of `batch.block_tables_BT`, as they stand after the commit.
        last_row: per view: index of its last row if that row is the newest computed position of the
            request, so that the next round starts from it; else -1 (a chunk that is not the last).
        final_hidden_NH: [N, H_t], the target's final-normed state at p, which its head reads; None
            unless the proposer asked for it (`needs_final_hidden`).
    """

    batch: PreparedBatch
    next_ids_target_N: torch.Tensor
    aux_hidden_N: torch.Tensor | None
    views: tuple[RequestView, ...]
    last_row: tuple[int, ...]
    final_hidden_NH: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotTensor:
    """One tensor that a proposer keeps of a request between rounds, besides KV.

    Everything else that it keeps follows from the request's tokens.

    Args:
        name: what it means; see the proposer.
        shape: of one request.
        dtype: of its numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        """Return `name[shape] dtype`, as two processes compare it."""
        sizes = "x".join(map(str, self.shape)) or "1"
        return f"{self.name}[{sizes}] {str(self.dtype).removeprefix('torch.')}"


class Proposer(Protocol):
    """Runs a draft. Proposals change speed, never output (docs/explanation/exactness.md)."""

    @property
    def name(self) -> str:
        """`eagle3`, `ngram`, `oracle`, ..."""

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Target layers whose output the proposer needs (0-based output ids, -1 embedding)."""

    @property
    def needs_final_hidden(self) -> bool:
        """Whether it reads the target's final-normed states (MTP, EAGLE-1)."""

    @property
    def num_lookahead_tokens(self) -> int:
        """Tokens after a position that its draft KV depends on (EAGLE-3: 1); prefix keys use it."""

    def max_drafts(self, view: RequestView) -> int:
        """Return how many drafts this request may get, 0..view.num_drafts (context limits)."""

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        """Draft `view.num_drafts` tokens for each view; all views have a computed context."""

    def observe(self, observation: Observation) -> None:
        """Take final target states; called after every forward that made some, before `propose`."""

    def release(self, slot: int) -> None:
        """Forget the request in `slot`."""

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        """All tensors that it keeps of a request between rounds, besides KV."""

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        """Return copies of what `slot_state` names of the request in `slot`; Sync: none."""

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a request whose prompt another process observed, to the newest position.

        Its KV is in the blocks of `view` already. Sync: none.

        Args:
            view: the request, its first token committed.
            state: what `export_slot` returned there, on this device.
        """


@runtime_checkable
class DeviceProposer(Proposer, RoundDraft, Protocol):
    """A proposer that has, besides its eager form, one for rounds without host reads.

    Both forms share the per-slot state and give the same drafts, so the engine may switch between
    them from round to round. Per-slot state has a row for padding after those of the requests.
    """

    def last_length(self, num_drafts: int) -> int | None:
        """Return the most known tokens with which `max_drafts` still grants that many drafts.

        None: the draft sets no limit.
        """


@runtime_checkable
class PrefillProposer(DeviceProposer, PrefillDraft, Protocol):
    """A proposer whose part of a prefill may run without host reads, too."""

    def note_prefill(self, views: Sequence[RequestView]) -> None:
        """Do the host's part of `observe` after `observe_prefill` saw the last rows of prompts.

        What it launches follows no number of requests: their first tokens wait for it.

        Args:
            views: the requests of a prefill, the token that the rows of each yielded committed.

        Sync: none.
        """
