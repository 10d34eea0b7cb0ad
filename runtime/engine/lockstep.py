"""The same engines on every tensor-parallel rank, all at the same step over the same requests.

Ranks gather equal bits, so what follows from them is equal: drafts, accepted counts, committed ids,
blocks and queues need not be sent. What does not follow from them is what comes from outside, new
engines, requests with their seeds, aborts, flushes and what peers of a role say: the first rank
hands these to the others before each step. With every step goes a digest of all ids committed so
far; a rank that has another one is named, and nothing of the step is delivered.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch

from runtime.config import RuntimeConfig
from runtime.engine.admission import refuse_masks
from runtime.engine.commands import Abort, Add, Command, Flush, News, obey, pack, unpack
from runtime.engine.engine import Engine
from runtime.engine.request import Admission, RequestDelta, RequestInput
from runtime.engine.role_rank import RoleRank
from runtime.engine.stats import EngineStats
from runtime.engine.until_lost import is_rank_fault
from runtime.graphs.capture import GraphReport
from runtime.parallel.lost import disagreement
from runtime.parallel.ranks import Ranks
from runtime.spec.oracle import OracleScript
from specctl.contract.diagnostics import Diagnostic, DiagnosticError


class _Kind(enum.IntEnum):
    STEP = 1
    OPEN = 2
    CLOSE = 3
    STOP = 4
    ALIVE = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOrder:
    """What every rank builds an engine from.

    Args:
        config: settings of the first rank; the device is each rank's own.
        script: what the `oracle` proposer replays, or what replaces ids of a draft.
    """

    config: RuntimeConfig
    script: OracleScript | None = None


def _torch_value(kind: type, value: str) -> Any:
    return torch.device(value) if kind is torch.device else getattr(torch, value)


_ORDER = msgspec.msgpack.Decoder(EngineOrder, dec_hook=_torch_value)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """What the first rank brings to an exchange."""

    kind: _Kind
    engine: int
    payload: bytes


class _Journal:
    """What one rank has done, and how ranks compare it."""

    def __init__(self, ranks: Ranks) -> None:
        """Start at step 0.

        Args:
            ranks: carry tensors of the CPU.
        """
        self.problem: Diagnostic | None = None
        self.ranks = ranks
        self.step_under_way: int | None = None
        self._num_steps = 0
        self._spoke_at_s = time.monotonic()
        self._digest = hashlib.blake2b(digest_size=8)

    def exchange(self, kind: _Kind, engine: int = 0, payload: bytes = b"") -> _Message:
        """Return what the first rank brings; the others bring nothing.

        Raises:
            DiagnosticError: SD859, ranks have committed other ids; SD855, a rank is gone. Every
                later call raises it again: ranks that have lost count of exchanges stay lost.
        """
        if self.problem is not None:
            raise DiagnosticError(self.problem)
        try:
            return self._exchange(kind, engine, payload)
        except DiagnosticError as error:
            self.problem = error.diagnostics[0]
            raise

    @property
    def silent_s(self) -> float:
        """Seconds since the last exchange."""
        return time.monotonic() - self._spoke_at_s

    def _exchange(self, kind: _Kind, engine: int, payload: bytes) -> _Message:
        # 63 bits: the tensors are signed.
        digest = int.from_bytes(self._digest.digest(), "little") >> 1
        header = torch.tensor([self._num_steps, digest, kind, engine, len(payload)])
        headers: list[list[int]] = self.ranks.gather(header).tolist()
        first = headers[0]
        others = [rank for rank, row in enumerate(headers) if row[:2] != first[:2]]
        if others:
            raise DiagnosticError(disagreement(others, headers))
        num_bytes = first[4]
        if num_bytes:
            brought = torch.zeros(num_bytes, dtype=torch.uint8)
            if payload:
                brought = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            payload = bytes(self.ranks.gather(brought)[0].tolist())
        self._spoke_at_s = time.monotonic()
        return _Message(kind=_Kind(first[2]), engine=first[3], payload=payload)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run a step; what it makes without the other ranks is nothing.

        A rank that is lost is noticed in another thread, which ends the step's waits for it.

        Raises:
            DiagnosticError: SD855, a rank was lost meanwhile; what the step raises.
        """
        self.step_under_way = self._num_steps
        try:
            yield
        except DiagnosticError as error:
            if self.problem is None and is_rank_fault(error):
                self.problem = error.diagnostics[0]
            raise
        except RuntimeError as error:  # of the device, over values that never came
            if self.problem is not None:
                raise DiagnosticError(self.problem) from error
            raise
        finally:
            self.step_under_way = None
        if self.problem is not None:
            raise DiagnosticError(self.problem)

    def note(self, deltas: Sequence[RequestDelta]) -> None:
        """Take a step's results in."""
        self._num_steps += 1
        for delta in deltas:
            text = f"{delta.request_id} {delta.ids_target} {delta.finish_reason};"
            self._digest.update(text.encode())


class Lockstep:
    """The first rank's hold on the others: it opens engines everywhere and leads them."""

    def __init__(self, ranks: Ranks) -> None:
        """Lead.

        Args:
            ranks: this one is the first; the others run `follow`.
        """
        assert ranks.rank == 0, f"rank {ranks.rank} cannot lead"
        self._journal = _Journal(ranks)
        self._num_engines = 0
        self._is_over = False
        self._lock = threading.Lock()  # the heartbeat is another thread's

    @property
    def problem(self) -> Diagnostic | None:
        """What ended the hold on the others; None while it lasts."""
        return self._journal.problem

    def lose(self, problem: Diagnostic) -> None:
        """Let a step that is under way, and every later call, raise what happened; any thread."""
        self._journal.problem = self._journal.problem or problem

    @property
    def step_number(self) -> int | None:
        """The step under way, which waits for the other ranks; None between steps; any thread."""
        return self._journal.step_under_way

    def beat(self, quiet_s: float) -> None:
        """Tell the others that this rank is there, unless they heard of it in the last seconds.

        Raises:
            DiagnosticError: SD855, one of them is gone or silent.
        """
        if not self._lock.acquire(blocking=False):
            return  # a step is under way: they hear of it, and the step of them
        try:
            if not self._is_over and self.problem is None and self._journal.silent_s >= quiet_s:
                self._journal.exchange(_Kind.ALIVE)
        finally:
            self._lock.release()

    def open(self, order: EngineOrder, build: Callable[[EngineOrder], Engine]) -> LockstepLeader:
        """Build an engine on every rank, at the same time, and lead it.

        Args:
            order: what it is built from.
            build: makes this rank's.
        """
        number, self._num_engines = self._num_engines, self._num_engines + 1
        config = replace(order.config, diagnostics=(), origins={})
        payload = pack(replace(order, config=config))
        with self._lock:
            self._journal.exchange(_Kind.OPEN, number, payload)
            return LockstepLeader(build(order), self._journal, number, self._lock)

    @property
    def ranks(self) -> Ranks:
        """The ranks that are led, for what they agree on in the middle of a step."""
        return self._journal.ranks

    def close(self) -> None:
        """Let the other ranks end.

        Raises:
            DiagnosticError: SD859, they disagree about the last step; SD855, one is gone.
        """
        with self._lock:
            self._is_over = True
            self._journal.exchange(_Kind.STOP)


class LockstepLeader:
    """An engine of the first rank, which tells the others what it is told."""

    def __init__(
        self,
        engine: Engine,
        journal: _Journal,
        number: int,
        lock: threading.Lock,
        role: RoleRank | None = None,
    ) -> None:
        """Lead one engine; `Lockstep.open` makes it.

        Args:
            engine: of this rank; nobody else may call it from now on.
            journal: of this rank.
            number: of the engine among those that were opened.
            lock: held while ranks run a step.
            role: what drives the engine, here and on every other rank; None: this does.
        """
        self.engine = engine
        self._engine: Engine | RoleRank = engine if role is None else role
        self._role = role
        self._lock = lock
        self._journal = journal
        self._number = number
        self._commands: list[Command] = []

    def in_role(self, role: RoleRank) -> LockstepLeader:
        """Return what leads the engine in its role; the other ranks have made theirs."""
        return LockstepLeader(self.engine, self._journal, self._number, self._lock, role)

    @property
    def config(self) -> RuntimeConfig:
        """Settings, the same on every rank but for the device."""
        return self.engine.config

    @property
    def graph_report(self) -> GraphReport:
        """What captured graphs cost on this rank."""
        return self.engine.graph_report

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight."""
        return self._engine.has_work

    @property
    def num_free_places(self) -> int:
        """How many more requests `add_request` takes now."""
        return self._engine.num_free_places

    def add_request(self, request: RequestInput) -> Admission:
        """Queue a request on every rank; a seed is drawn here where none was given.

        Raises:
            DiagnosticError: as `Engine.add_request`; SD842, a grammar stays in this process. The
                other ranks do not hear of the request.
        """
        refuse_masks(request)
        if not request.has_seed:
            params = replace(request.params, seed=secrets.randbits(63))
            request = replace(request, params=params, has_seed=True)
        admission = self._engine.add_request(request)
        self._commands.append(Add(request=request))
        return admission

    def abort(self, request_id: str) -> bool:
        """Drop a request on every rank; see `Engine.abort`."""
        is_dropped = self._engine.abort(request_id)
        if is_dropped:
            self._commands.append(Abort(request_id=request_id))
        return is_dropped

    def flush_cache(self) -> None:
        """Clear logical state on every rank; see `Engine.flush_cache`."""
        self._engine.flush_cache()
        self._commands.append(Flush())

    def step(self) -> tuple[RequestDelta, ...]:
        """Run one round on every rank.

        Raises:
            DiagnosticError: SD855, a rank is gone; SD859, ranks disagree about the steps before.
        """
        if self._role is not None and (news := self._role.port.fetch()):
            self._role.port.hear(news)
            self._commands.append(News(items=list(news)))
        payload = pack(self._commands) if self._commands else b""
        self._commands.clear()
        with self._lock:
            self._journal.exchange(_Kind.STEP, self._number, payload)
            with self._journal.together():
                deltas = self._engine.step()
            self._journal.note(deltas)
        return deltas

    def stats(self) -> EngineStats:
        """Return a snapshot of this rank's counters; those of other ranks are the same."""
        found = self.engine if self._role is None else self._role.role_engine
        return found.stats()

    def check(self) -> None:
        """Assert that this rank's blocks, slots and queues agree."""
        self.engine.check()

    def close(self) -> None:
        """Give the engine up on every rank.

        Raises:
            DiagnosticError: SD859, they disagree about the last step; SD855, one is gone.
        """
        with self._lock:
            self._journal.exchange(_Kind.CLOSE, self._number)
        self._engine.close()


def own_engine(engine: Engine | LockstepLeader) -> Engine:
    """Return this rank's engine, which others may read and only its leader may call."""
    return engine if isinstance(engine, Engine) else engine.engine


def follow(ranks: Ranks, build: Callable[[EngineOrder], Engine | RoleRank]) -> None:
    """Run engines in step with the first rank's until that one ends.

    Args:
        ranks: carry tensors of the CPU; their time limit is how long the first rank may be silent.
        build: makes this rank's engine of an order.

    Raises:
        DiagnosticError: SD855, a rank is gone; SD859, ranks disagree.
    """
    assert ranks.rank > 0, "the first rank leads"
    journal = _Journal(ranks)
    engines: dict[int, Engine | RoleRank] = {}
    try:
        _follow(journal, engines, build)
    finally:
        for engine in engines.values():
            if isinstance(engine, RoleRank):
                engine.close()


def _follow(
    journal: _Journal,
    engines: dict[int, Engine | RoleRank],
    build: Callable[[EngineOrder], Engine | RoleRank],
) -> None:
    while (message := journal.exchange(_Kind.STEP)).kind != _Kind.STOP:
        if message.kind == _Kind.OPEN:
            engines[message.engine] = build(_ORDER.decode(message.payload))
        elif message.kind == _Kind.CLOSE:
            engines.pop(message.engine).close()
        elif message.kind == _Kind.STEP:
            engine = engines[message.engine]
            for command in unpack(message.payload):
                obey(engine, command)
            journal.note(engine.step())
