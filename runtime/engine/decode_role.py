"""The engine of a decode server: prompts are computed elsewhere, everything after them here.

A request waits for a slot and blocks, then for its KV; then it is a request of the engine like any
other (preempted, it is computed again here). Its blocks are not used for anything else before the
writer is known to have stopped: after an abort they are held until `Released`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from runtime.disagg.frames import (
    Abort,
    Failed,
    Prefill,
    Prefilled,
    Released,
    unpack_tensor,
)
from runtime.disagg.outbox import wire_bytes
from runtime.disagg.ports import PrefillPort
from runtime.engine.admission import refuse_known, refuse_masks
from runtime.engine.engine import Engine
from runtime.engine.handover import Arrival
from runtime.engine.request import Admission, Request, RequestDelta, RequestInput
from runtime.engine.stats import EngineStats
from runtime.spec.received import ReceivedDrafts
from specctl.contract.diagnostics import Diagnostic, diagnose

WAIT_S = 0.002
"""Longest wait of a step that has nothing to run; new requests are seen after it."""


class DecodeEngine:
    """An `EnginePort` whose prefills run on other servers."""

    def __init__(
        self, engine: Engine, *, port: PrefillPort, name: str, block_bytes: Sequence[int]
    ) -> None:
        """Start without requests.

        Args:
            engine: runs the rounds; nobody else gives it requests.
            port: to the prefill servers.
            name: begins the names of this server's requests; no two servers share it.
            block_bytes: of a block of each layer, on all ranks of this server together.
        """
        self._block_bytes = tuple(block_bytes)
        self._slot_state = {str(item) for item in engine.slot_state}
        self.engine = engine
        self._port = port
        self._name = name
        self._numbers = itertools.count()
        self._pending: deque[Request] = deque()
        self._rooms: dict[str, str] = {}  # name on the wire -> id of a request that waits for KV
        self._held: set[str] = set()  # names on the wire whose blocks wait for the writer
        self.num_kv_bytes = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight, or a writer may still write."""
        return bool(self._pending or self._rooms or self._held) or self.engine.has_work

    @property
    def num_free_places(self) -> int:
        """How many more requests `add_request` takes now."""
        return max(0, self.engine.num_free_places - len(self._pending))

    def add_request(self, request: RequestInput) -> Admission:
        """Queue a request.

        Raises:
            DiagnosticError: as `Engine.admit`; SD842, another process yields the first token.
        """
        refuse_masks(request)
        refuse_known(request, {item.request_id for item in self._pending})
        admitted = self.engine.admit(request, num_others=len(self._pending))
        self._pending.append(admitted)
        return Admission(request_id=request.request_id, seed=admitted.params.seed)

    def abort(self, request_id: str) -> bool:
        """Drop a request; its blocks stay held while a prefill server may write into them."""
        for request in self._pending:
            if request.request_id == request_id:
                self._pending.remove(request)
                return True
        room = next((room for room, item in self._rooms.items() if item == request_id), None)
        if room is not None:
            self._leave(room)
        return self.engine.abort(request_id)

    @torch.inference_mode()
    def step(self) -> tuple[RequestDelta, ...]:
        """Take in what came, ask for prefills, run one round."""
        deltas = self._receive()
        self._ask()
        num_steps = self.engine.num_steps
        if self.engine.is_runnable:
            deltas += self.engine.step()
        is_waiting = self.engine.num_steps == num_steps and not deltas
        if is_waiting and (self._rooms or self._held):
            self._port.wait(WAIT_S)
        return tuple(deltas)

    def stats(self) -> EngineStats:
        """Return the engine's counters; requests without a slot count as waiting."""
        found = self.engine.stats()
        return replace(found, num_waiting=found.num_waiting + len(self._pending))

    def flush_cache(self) -> None:
        """Clear logical state: prefix index and counters."""
        self.engine.flush_cache()

    def _receive(self) -> list[RequestDelta]:
        deltas: list[RequestDelta] = []
        for frame in self._port.poll():
            if not isinstance(frame, Prefilled | Failed | Released):
                continue
            room = frame.request_id
            if room in self._held:  # whatever it says, nothing more is written
                self._held.discard(room)
                self.engine.handover.release(room)
                continue
            request_id = self._rooms.pop(room, None)
            if request_id is None:
                continue
            if isinstance(frame, Prefilled):
                deltas += self._deliver(request_id, frame)
            elif isinstance(frame, Failed):
                problem = replace_place(frame.problem, request_id)
                deltas.append(self.engine.fail(request_id, problem))
        return deltas

    def _deliver(self, request_id: str, frame: Prefilled) -> list[RequestDelta]:
        self.num_kv_bytes += frame.num_kv_bytes
        request = self.engine.find(request_id)
        assert request is not None, f"{request_id} waits for KV and is not in flight"
        device = self.engine.config.device
        state = {item.name: unpack_tensor(item, device) for item in frame.state}
        found = {describe(name, value) for name, value in state.items()}
        if found != self._slot_state:
            problem = _other_state(request_id, self._slot_state, found)
            return [self.engine.fail(request_id, problem)]
        expected_bytes = wire_bytes(
            request.num_prompt_tokens,
            first_position=request.placed.table.num_cached_tokens,
            kv_block_size=self.engine.config.kv_block_size,
            block_bytes=self._block_bytes,
        )
        if frame.num_kv_bytes != expected_bytes:
            problem = _other_bytes(request_id, expected_bytes, frame.num_kv_bytes)
            return [self.engine.fail(request_id, problem)]
        received = None
        if frame.draft_ids_target:
            probs = frame.draft_probs
            received = ReceivedDrafts(
                ids_target=frame.draft_ids_target,
                q_GV=None if probs is None else unpack_tensor(probs, device),
            )
        arrival = Arrival(
            committed=frame.committed_target,
            state=state,
            received=received,
            num_cached_tokens=frame.num_cached_tokens,
            logprobs=frame.logprobs,
        )
        return list(self.engine.deliver(request_id, arrival))

    def _ask(self) -> None:
        """Ask for the prompts of all requests that there is room for, in order."""
        while self._pending and self.engine.reserve(self._pending[0]):
            request = self._pending.popleft()
            room = f"{self._name}/{next(self._numbers)}"
            self._rooms[room] = request.request_id
            self._port.send(self._prefill(request, room))

    def _prefill(self, request: Request, room: str) -> Prefill:
        table, size = request.placed.table, self.engine.config.kv_block_size
        num_blocks = -(-request.num_prompt_tokens // size)
        first = table.num_cached_tokens
        is_drawn = request.params.is_rejection
        return Prefill(
            request_id=room,
            prompt_ids_target=tuple(request.ids_target),
            params=request.params,
            first_position=first,
            blocks=tuple(table.blocks[first // size : num_blocks]),
            num_drafts=request.num_speculative_tokens if is_drawn else 0,
        )

    def _leave(self, room: str) -> None:
        request = self.engine.find(self._rooms.pop(room))
        assert request is not None, "a request that waits for KV is in flight"
        self.engine.handover.hold(request, room)
        self._held.add(room)
        self._port.send(Abort(request_id=room))


def describe(name: str, value: torch.Tensor) -> str:
    """Return a tensor's name, shape and dtype as `SlotTensor` states them."""
    sizes = "x".join(map(str, value.shape)) or "1"
    return f"{name}[{sizes}] {str(value.dtype).removeprefix('torch.')}"


def replace_place(problem: Diagnostic, request_id: str) -> Diagnostic:
    """Return a prefill server's finding under the client's name of the request."""
    if not problem.where.startswith("request="):
        return problem
    return msgspec.structs.replace(problem, where=f"request={request_id}")


def _other_bytes(request_id: str, expected: int, found: int) -> Diagnostic:
    return diagnose(
        "SD872",
        where=f"request={request_id}",
        message="the ranks of the prefill server wrote another number of bytes than the KV has",
        expected=expected,
        found=found,
    )


def _other_state(request_id: str, expected: set[str], found: set[str]) -> Diagnostic:
    return diagnose(
        "SD867",
        where=f"request={request_id}",
        message="the prefill server sent another state of the draft than this one keeps",
        expected="; ".join(sorted(expected)) or "none",
        found="; ".join(sorted(found)) or "none",
    )
