"""The engine of a prefill server: prompts up to their first token, KV to whoever asked.

While a prompt is computed its KV leaves layer by layer: a layer's blocks go as soon as the kernels
of that layer are launched for all of their positions, with the event that marks the end of these
kernels; the draft's go after it has observed them. At the first token the state of the draft goes
with the answer, and drafts where the decode side wants them. The decode side is told the outcome
when nothing is read or written for a prompt any more; its blocks are not used again before.

Over several ranks each has such an engine, all get the same events at the same steps, and the ports
of all but the first send nothing. Stages before this one are told, ahead of each forward, which
blocks it makes final, and send their layers in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from runtime.disagg.agreement import Agreement, Alone, Ended
from runtime.disagg.early import EarlySender
from runtime.disagg.frames import (
    Abort,
    Failed,
    PackTensor,
    Prefill,
    Prefilled,
    Released,
    pack_tensor,
)
from runtime.disagg.handshake import FirstProposal
from runtime.disagg.listen import Arrived, Left, PeerEvent
from runtime.disagg.outbox import Chunk, Route, Transfer, send_chunks
from runtime.disagg.ports import DecodePort
from runtime.engine.engine import Engine
from runtime.engine.first_drafts import first_drafts
from runtime.engine.forwards import RowsListener
from runtime.engine.prefill_jobs import PrefillJob, PrefillParts
from runtime.engine.request import Admission, Request, RequestDelta, RequestInput
from runtime.engine.stats import EngineStats
from runtime.engine.until_lost import is_rank_fault
from runtime.graphs.marks import Ready, mark
from runtime.parallel.messages import SlotNews
from runtime.spec.types import TokenLogprobs
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

WAIT_S = 0.001
"""Longest wait of a step that has nothing to run; frames are seen after it."""


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
        pack: PackTensor = pack_tensor,
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
            pack: puts state into an answer; `keep_tensor` where the decode engine is in this
                process and launches on the same stream.
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
        self._pack = pack
        self._ways: dict[str, Route] = {}  # decode server -> way to it
        self._refused: dict[str, Diagnostic] = {}  # decode server -> why KV cannot reach it
        self._left: set[str] = set()  # decode servers whose links are still open
        self._jobs: dict[str, PrefillJob] = {}
        self._told: list[str] = []  # prompts that still have their slot and blocks
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
        """Take in what came, compute, tell outcomes; return what prompts yielded, to no client."""
        while self._told:
            self.engine.retire(self._told.pop())
        for event in self._port.poll():
            self._take(event)
        num_steps = self.engine.num_steps
        deltas: tuple[RequestDelta, ...] = ()
        if self.engine.is_runnable:
            try:
                deltas = self._compute()
            except Exception as error:  # a fault of no request: its decode servers wait for a word
                if not is_rank_fault(error):  # else their connections end
                    self._fail_all(f"a step failed with {type(error).__name__}")
                raise
        if self.engine.num_steps == num_steps and self._jobs and not self._port.has_news:
            self._wait()
        self._settle()
        if self._left:
            self._close_ways()
        return deltas

    def stats(self) -> EngineStats:
        """Return the engine's counters."""
        return self.engine.stats()

    def flush_cache(self) -> None:
        """Clear logical state: prefix index and counters."""
        self.engine.flush_cache()

    def _compute(self) -> tuple[RequestDelta, ...]:
        deltas = self.engine.step(
            RowsListener(on_sent_off=self._tell_stages, on_layer=self._send_layer)
        )
        for delta in deltas:
            if delta.error is not None:
                self._fail(delta)
            elif delta.finish_reason is not None:
                self._answer(delta.request_id, delta.ids_target, delta.logprobs)
        self._send_rest()
        return deltas

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
            ending.wait(WAIT_S)

    def _take(self, event: PeerEvent) -> None:
        if isinstance(event, Arrived):
            self._open(event)
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

    def _open(self, arrived: Arrived) -> None:
        """Open the ways to a decode server: on all ranks, or it is refused by all."""
        peer, problem = arrived.peer, None
        try:
            self._ways[peer] = self._routes(arrived)
        except DiagnosticError as error:
            problem = error.diagnostics[0]
        problem = self._agreement.settle((peer,), {peer: Ended(problem=problem)})[peer].problem
        if problem is not None:
            self._refused[peer] = problem
        elif self._parts.stages is not None:
            self._parts.stages.open(arrived)

    def _close_ways(self) -> None:
        """Let go of the links to decode servers that left, after their last transfer."""
        in_use = {job.peer for job in self._jobs.values()}
        for peer in sorted(self._left - in_use):
            self._left.discard(peer)
            way = self._ways.pop(peer, None)
            self._sender.leave(peer)
            if way is not None:
                way.close()
            if self._parts.stages is not None:
                self._parts.stages.close(peer)

    def _begin(self, peer: str, asked: Prefill) -> None:
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
        stages = self._parts.stages
        self._jobs[asked.request_id] = PrefillJob(
            peer=peer,
            asked=asked,
            own=Transfer(
                self._ways[peer],
                sender=self._sender.of(peer),
                pool=self._parts.pool,
                first_block=asked.first_position // self.engine.config.kv_block_size,
                destination_blocks=asked.blocks,
            ),
            before=None if stages is None else stages.begin(peer, asked),
        )

    def _tell_stages(self, news: Sequence[SlotNews]) -> None:
        """Say which blocks the next forward makes final on the stages before this one."""
        for job, chunk in self._chunks(news):
            if job.before is not None:
                job.before.advance(chunk.table, chunk.end_block)

    def _send_layer(self, layer: int, news: Sequence[SlotNews]) -> None:
        """Send the blocks of a target layer that a forward has completed."""
        self._send((layer,), [chunk for _, chunk in self._chunks(news)])

    def _send_rest(self) -> None:
        """Send what a round made beside the target's layers, of prompts that go on."""
        for request_id, job in self._jobs.items():
            request = self.engine.find(request_id)
            if job.answer is None and request is not None and request.placement is not None:
                self._send_draft(job, request)

    def _send_draft(self, job: PrefillJob, request: Request) -> None:
        """Send the draft's layers, as far as they are final."""
        num_computed = request.placed.num_computed_tokens
        is_whole = num_computed >= request.num_prompt_tokens
        behind = 0 if is_whole else max(0, self._parts.proposer.num_lookahead_tokens - 1)
        first = self._parts.num_target_layers
        num_draft_layers = len(self._parts.pool) - self._parts.num_pool_target_layers
        layers = range(first, first + num_draft_layers)
        self._send(layers, [self._chunk(job, request, num_computed - behind)])

    def _send(self, layers: Iterable[int], chunks: Sequence[Chunk]) -> None:
        send_chunks(layers, chunks, device=self.engine.config.device, mark_end=self._mark_end)

    def _chunks(self, news: Sequence[SlotNews]) -> list[tuple[PrefillJob, Chunk]]:
        """Return what a forward makes final in the target's layers, of prompts that go on."""
        found = []
        for item in news:
            request = self.engine.handover.in_slot(item.slot)
            job = self._jobs.get(request.request_id)
            if job is not None and job.answer is None:
                found.append((job, self._chunk(job, request, item.start + item.num_rows)))
        return found

    def _chunk(self, job: PrefillJob, request: Request, num_final: int) -> Chunk:
        """Return the blocks whose positions are before `num_final`.

        The prompt's last block is final at its end.
        """
        is_whole = num_final >= request.num_prompt_tokens
        return Chunk(
            transfer=job.own,
            table=request.placed.table.blocks,
            end_block=(
                job.own.end_block if is_whole else num_final // self.engine.config.kv_block_size
            ),
        )

    def _answer(
        self, request_id: str, ids_target: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        """Settle what is told of a prompt that has its first token, and send what is left."""
        job = self._jobs[request_id]
        request = self.engine.find(request_id)
        assert request is not None, f"{request_id} is parked"
        self._send_draft(job, request)
        assert not job.own.unsent, f"layers with blocks left: {job.own.unsent}"
        job.end(self._transfer_s, is_whole=True)  # it ends while the rest is put together
        state = self._parts.proposer.export_slot(request.placed.slot)
        drafts, probs = first_drafts(
            self._parts.proposer,
            request,
            job.asked.num_drafts,
            max_model_len=self.engine.config.max_model_len,
            target_vocab_size=self._parts.target_vocab_size,
            first_proposal=self._first_proposal,
            pack=self._pack,
        )
        job.answer = Prefilled(
            request_id=request_id,
            committed_target=ids_target,
            state=[self._pack(name, value) for name, value in state.items()],
            draft_ids_target=drafts,
            draft_probs=probs,
            num_kv_bytes=0,  # known when all of it has arrived
            num_cached_tokens=request.num_cached_tokens or 0,
            logprobs=logprobs,
        )
        self._let_go(request_id, job)

    def _fail(self, delta: RequestDelta) -> None:
        """End a prompt that failed; the engine has dropped it."""
        job = self._jobs[delta.request_id]
        assert delta.error is not None, "a failure has a reason"
        job.answer = Failed(request_id=delta.request_id, problem=delta.error)
        job.end(self._transfer_s, is_whole=False)

    def _let_go(self, request_id: str, job: PrefillJob) -> None:
        """End the transfer and free the slot; blocks stay until it is over.

        Where it is over at once the decode side is told first: the next step frees both.
        """
        request = self.engine.find(request_id)
        assert request is not None, f"{request_id} is in flight"
        job.end(self._transfer_s, is_whole=False)
        if isinstance(job.answer, Prefilled) and job.is_ordered:
            self._told.append(request_id)
            return
        if request.placement is not None:
            self.engine.handover.hold(request, request_id)
        if isinstance(job.answer, Prefilled):
            self.engine.retire(request_id)
        else:
            self.engine.abort(request_id)

    def _settle(self) -> None:
        """Tell the outcome of transfers that are over, and free their blocks."""
        mine = {name: job.ended for name, job in self._jobs.items() if job.is_over}
        over = self._agreement.settle(tuple(self._jobs), mine)
        for request_id, ended in over.items():
            job = self._jobs[request_id]
            self.engine.handover.release(request_id)
            del self._jobs[request_id]
            answer = job.answer
            assert answer is not None, "a transfer that is over has an answer"
            if ended.problem is not None and isinstance(answer, Prefilled):
                answer = Failed(request_id=request_id, problem=ended.problem)
            if isinstance(answer, Prefilled):
                answer = msgspec.structs.replace(answer, num_kv_bytes=ended.num_kv_bytes)
                self.num_kv_bytes += answer.num_kv_bytes
            self._port.send(job.peer, answer)
