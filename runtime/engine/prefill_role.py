"""The engine of a prefill server: prompts up to their first token, KV to whoever asked.

While a prompt is computed its KV leaves layer by layer: a layer's blocks go as soon as the kernels
of that layer are launched for all of their positions, with the event that marks the end of these
kernels; the draft's go after it has observed them. At the first token the state of the draft goes
with the answer, and drafts where the decode side wants them. Slot and blocks are let go of when
nothing reads them any more; only then the decode side is told the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from runtime.disagg.agreement import Agreement, Alone
from runtime.disagg.early import EarlySender, Ready, mark
from runtime.disagg.frames import (
    Abort,
    Failed,
    Prefill,
    Prefilled,
    Released,
    TensorBytes,
    pack_tensor,
)
from runtime.disagg.listen import Arrived, Left, PeerEvent
from runtime.disagg.outbox import Route, Transfer
from runtime.disagg.ports import DecodePort
from runtime.engine.engine import Engine
from runtime.engine.prefill_jobs import PrefillJob
from runtime.engine.request import Admission, Request, RequestDelta, RequestInput
from runtime.engine.stats import EngineStats
from runtime.kv import KVLayer
from runtime.parallel.messages import SlotNews
from runtime.spec.types import Proposer, TokenLogprobs
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

FirstProposal = Literal["one_hot", "full"]
"""What stands for the law of a first round's drafts: certainty, or the law itself."""

WAIT_S = 0.001
"""Longest wait of a step that has nothing to run; frames are seen after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePool:
    """The KV of a stage before the last one.

    Args:
        first_layer: of the target.
        pool: its layers.
        routes: as `routes` of `PrefillEngine`, for the rank that computes this stage.
    """

    first_layer: int
    pool: tuple[KVLayer, ...]
    routes: Callable[[Arrived], Route]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillParts:
    """What a prefill engine sends from.

    Args:
        proposer: the engine's own.
        pool: this rank's layers, the target's then the draft's.
        num_pool_target_layers: the first ones of the pool: those of this stage.
        num_target_layers: of the whole target: the draft's are numbered after them.
        vocab_size: of the target.
        stages: those before this one whose pools this process reaches.
    """

    proposer: Proposer
    pool: tuple[KVLayer, ...]
    num_pool_target_layers: int
    num_target_layers: int
    vocab_size: int
    stages: tuple[StagePool, ...] = ()


class PrefillEngine:
    """An `EnginePort` that takes its requests from decode servers."""

    def __init__(
        self,
        engine: Engine,
        parts: PrefillParts,
        *,
        port: DecodePort,
        routes: Callable[[Arrived], Route],
        sender: EarlySender,
        first_proposal: FirstProposal,
        transfer_s: float,
        agreement: Agreement | None = None,
        mark_end: Callable[[torch.device], Ready] = mark,
    ) -> None:
        """Start without requests.

        Args:
            engine: runs the prompts; nobody else gives it requests.
            parts: what is sent from.
            port: to the decode servers.
            routes: makes the way to a decode server that arrived; raises `DiagnosticError` where
                there is none.
            sender: whose thread writes.
            first_proposal: of requests in rejection mode.
            transfer_s: limit of a carrier's last wait.
            agreement: with the other ranks of the stage, which run in step; None: there are none.
            mark_end: marks the end of what was launched; tests put slow kernels there.
        """
        self.engine = engine
        self._parts = parts
        self._port = port
        self._routes = routes
        self._sender = sender
        self._first_proposal = first_proposal
        self._transfer_s = transfer_s
        self._agreement = Alone() if agreement is None else agreement
        self._mark_end = mark_end
        self._ways: dict[str, tuple[Route, ...]] = {}  # decode server -> ways to it
        self._refused: dict[str, Diagnostic] = {}  # decode server -> why KV cannot reach it
        self._left: set[str] = set()  # decode servers whose links are still open
        self._jobs: dict[str, PrefillJob] = {}
        self.num_kv_bytes = 0

    @property
    def has_work(self) -> bool:
        """Whether a prompt is computed or sent, or a decode server said something."""
        return bool(self._jobs) or self._port.has_news or self.engine.has_work

    num_free_places = 0  # requests come from decode servers

    def add_request(self, request: RequestInput) -> Admission:
        """Refuse a client's request.

        Raises:
            DiagnosticError: SD868.
        """
        raise DiagnosticError(
            diagnose(
                "SD868",
                where=f"request={request.request_id}",
                message="a prefill server answers decode servers only",
            )
        )

    def abort(self, request_id: str) -> bool:
        """Drop a prompt; its decode server is told once nothing is written for it any more."""
        job = self._jobs.get(request_id)
        if job is None or isinstance(job.answer, Failed | Released):
            return False
        is_new = job.answer is None
        job.answer = Released(request_id=request_id)
        if is_new:
            self._let_go(request_id, job)
        return True

    @torch.inference_mode()
    def step(self) -> tuple[RequestDelta, ...]:
        """Take in what came, compute, tell outcomes; no client gets a delta."""
        for event in self._port.poll():
            self._take(event)
        num_steps = self.engine.num_steps
        if self.engine.is_runnable:
            try:
                self._compute()
            except Exception as error:  # a fault of no request: its decode servers wait for a word
                self._fail_all(f"a step failed with {type(error).__name__}")
                raise
        if self.engine.num_steps == num_steps and self._jobs and not self._port.has_news:
            self._wait()
        self._settle()
        if self._left:
            self._close_ways()
        return ()

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self.engine.stats()

    def flush_cache(self) -> None:
        """Clear logical state: prefix index and counters."""
        self.engine.flush_cache()

    def _compute(self) -> None:
        for delta in self.engine.step(self._send_layer):
            if delta.error is not None:
                self._fail(delta)
            elif delta.finish_reason is not None:
                self._answer(delta.request_id, delta.ids_target, delta.logprobs)
        self._send_rest()

    def _fail_all(self, message: str) -> None:
        for request_id, job in self._jobs.items():
            if job.answer is None:
                problem = diagnose("SD916", where=f"request={request_id}", message=message)
                job.answer = Failed(request_id=request_id, problem=problem)
                self._let_go(request_id, job)

    def _wait(self) -> None:
        """Wait a little for a transfer that can end, or for news."""
        ending = next((job for job in self._jobs.values() if job.answer is not None), None)
        if ending is None:
            self._port.wait(WAIT_S)
        else:
            ending.transfers[0].wait(WAIT_S)

    def _take(self, event: PeerEvent) -> None:
        if isinstance(event, Arrived):
            try:
                stages = (stage.routes(event) for stage in self._parts.stages)
                self._ways[event.peer] = (self._routes(event), *stages)
            except DiagnosticError as error:
                self._refused[event.peer] = error.diagnostics[0]
        elif isinstance(event, Left):
            for request_id in [name for name, job in self._jobs.items() if job.peer == event.peer]:
                self.abort(request_id)
            self._refused.pop(event.peer, None)
            self._left.add(event.peer)
        elif isinstance(event.frame, Prefill):
            self._begin(event.peer, event.frame)
        elif isinstance(event.frame, Abort):
            self.abort(event.frame.request_id)
            if event.frame.request_id not in self._jobs:  # its answer has left already
                self._port.send(event.peer, Released(request_id=event.frame.request_id))

    def _close_ways(self) -> None:
        """Let go of the links to decode servers that left, after their last transfer."""
        in_use = {job.peer for job in self._jobs.values()}
        for peer in self._left - in_use:
            self._left.discard(peer)
            for way in self._ways.pop(peer, ()):
                for link in way.links.values():
                    link.close()

    def _begin(self, peer: str, asked: Prefill) -> None:
        size = self.engine.config.kv_block_size
        wish = RequestInput(
            request_id=asked.request_id,
            prompt_ids_target=asked.prompt_ids_target,
            params=asked.params,
            max_tokens=1,
            stop_ids=asked.params.end_ids_target,
            ignore_eos=True,  # the decode side settled which ids end the request
            is_parked_at_end=True,
        )
        try:
            if peer in self._refused:
                raise DiagnosticError(self._refused[peer])
            self.engine.add_request(wish)
        except DiagnosticError as error:
            failed = Failed(request_id=asked.request_id, problem=error.diagnostics[0])
            self._port.send(peer, failed)
            return
        pools = (self._parts.pool, *(stage.pool for stage in self._parts.stages))
        transfers = tuple(
            Transfer(
                way,
                sender=self._sender,
                pool=pool,
                first_block=asked.first_position // size,
                destination_blocks=asked.blocks,
            )
            for way, pool in zip(self._ways[peer], pools, strict=True)
        )
        self._jobs[asked.request_id] = PrefillJob(peer=peer, asked=asked, transfers=transfers)

    def _send_layer(self, layer: int, news: Sequence[SlotNews]) -> None:
        """Send the blocks of a target layer that a forward has completed."""
        ready = self._mark_end(self.engine.config.device)
        for item in news:
            request = self.engine.handover.in_slot(item.slot)
            self._send(layer, request, item.start + item.num_rows, ready)

    def _send_rest(self) -> None:
        """Send what a round made beside this stage's target layers, of prompts that go on."""
        for request_id, job in self._jobs.items():
            request = self.engine.find(request_id)
            if job.answer is None and request is not None and request.placement is not None:
                self._send_draft(request)

    def _send_draft(self, request: Request) -> None:
        """Send the draft's layers and the stages before this one, as far as they are final."""
        if not (self._num_draft_layers or self._parts.stages):
            return
        num_computed = request.placed.num_computed_tokens
        ready = self._mark_end(self.engine.config.device)
        is_whole = num_computed >= request.num_prompt_tokens
        behind = 0 if is_whole else max(0, self._parts.proposer.num_lookahead_tokens - 1)
        first = self._parts.num_target_layers
        for layer in range(first, first + self._num_draft_layers):
            self._send(layer, request, num_computed - behind, ready)
        for index, stage in enumerate(self._parts.stages, start=1):
            for layer in range(stage.first_layer, stage.first_layer + len(stage.pool)):
                self._send(layer, request, num_computed, ready, part=index)

    @property
    def _num_draft_layers(self) -> int:
        return len(self._parts.pool) - self._parts.num_pool_target_layers

    def _send(
        self, layer: int, request: Request, num_final: int, ready: Ready, *, part: int = 0
    ) -> None:
        job = self._jobs.get(request.request_id)
        if job is None or job.answer is not None:
            return
        is_whole = num_final >= request.num_prompt_tokens
        end = num_final // self.engine.config.kv_block_size
        transfer = job.transfers[part]
        transfer.send(
            layer,
            request.placed.table.blocks,
            end_block=transfer.end_block if is_whole else end,
            ready=ready,
        )

    def _answer(
        self, request_id: str, ids_target: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        """Settle what is told of a prompt that has its first token, and send what is left."""
        job = self._jobs[request_id]
        request = self.engine.find(request_id)
        assert request is not None, f"{request_id} is parked"
        self._send_draft(request)
        state = self._parts.proposer.export_slot(request.placed.slot)
        drafts, probs = self._first_drafts(request, job.asked.num_drafts)
        unsent = [item.unsent for item in job.transfers if item.unsent]
        assert not unsent, f"layers with blocks left: {unsent}"
        job.answer = Prefilled(
            request_id=request_id,
            committed_target=ids_target,
            state=[pack_tensor(name, value) for name, value in state.items()],
            draft_ids_target=drafts,
            draft_probs=probs,
            num_kv_bytes=sum(item.num_kv_bytes for item in job.transfers),
            num_cached_tokens=request.num_cached_tokens or 0,
            logprobs=logprobs,
        )
        self._let_go(request_id, job)

    def _first_drafts(
        self, request: Request, num_drafts: int
    ) -> tuple[tuple[int, ...], TensorBytes | None]:
        """Return the first round's drafts and their laws, where they are wanted."""
        proposer = self._parts.proposer
        room = self.engine.config.max_model_len - len(request.ids_target) - 1
        view = request.view(max(0, min(num_drafts, room)))
        count = proposer.max_drafts(view) if view.num_drafts else 0
        if not count:
            return (), None
        proposal = proposer.propose([replace(view, num_drafts=count)])
        ids = tuple(proposal.ids_target_BG[0, : proposal.num_drafts[0]].tolist())
        if self._first_proposal == "one_hot" or proposal.q is None:
            return ids, None
        law_GR = proposal.q.log_q_BGR[0, : len(ids)].softmax(dim=1)
        q_GV = law_GR.new_zeros((len(ids), self._parts.vocab_size))
        q_GV.index_copy_(1, proposal.q.ids_target_R, law_GR)
        return ids, pack_tensor("draft_probs", q_GV)

    def _fail(self, delta: RequestDelta) -> None:
        """End a prompt that failed; the engine has dropped it."""
        job = self._jobs[delta.request_id]
        assert delta.error is not None, "a failure has a reason"
        job.answer = Failed(request_id=delta.request_id, problem=delta.error)
        job.end(self._transfer_s)

    def _let_go(self, request_id: str, job: PrefillJob) -> None:
        """Free the slot; blocks stay until the transfer is over."""
        request = self.engine.find(request_id)
        assert request is not None, f"{request_id} is in flight"
        if request.placement is not None:
            self.engine.handover.hold(request, request_id)
        if isinstance(job.answer, Prefilled):
            self.engine.retire(request_id)
        else:
            self.engine.abort(request_id)
        job.end(self._transfer_s)

    def _settle(self) -> None:
        """Tell the outcome of transfers that are over, and free their blocks."""
        mine = {name: job.problem for name, job in self._jobs.items() if job.is_over}
        over = self._agreement.settle(tuple(self._jobs), mine)
        for request_id, problem in over.items():
            job = self._jobs[request_id]
            self.engine.handover.release(request_id)
            del self._jobs[request_id]
            answer = job.answer
            assert answer is not None, "a transfer that is over has an answer"
            if problem is not None and isinstance(answer, Prefilled):
                answer = Failed(request_id=request_id, problem=problem)
            if isinstance(answer, Prefilled):
                self.num_kv_bytes += answer.num_kv_bytes
            self._port.send(job.peer, answer)
