"""A target whose stages are other processes or threads: workers, and the last stage's view of all.

The last stage plans, drafts, verifies and commits; the stages before it know nothing of requests.
For each forward they get its rows and what became of the rows before, run their layers over their
own KV, and hand the residual stream on, with the captured states in ascending layer order. Messages
and states pass every channel in order, so several forwards over different requests may be under way
and stages work at the same time.

A forward has two halves: `submit` sends its rows off, `collect` waits for the oldest one's stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec
import torch

from runtime.batch import PreparedBatch
from runtime.engine.forwards import RowsDone, layer_listener
from runtime.kv import KVLayer, KVPool
from runtime.models import StageStates, TargetModel, TargetOutput
from runtime.parallel.channels import Channel
from runtime.parallel.messages import Kind, SlotLengths, SlotNews, StageInput, decode, encode
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

_FORWARD_FAULTS = (RuntimeError, AssertionError, LookupError, TypeError, ValueError)
"""What layers, kernels and their libraries raise when they fail over their inputs."""


def captured_before(aux_layer_ids: Sequence[int], first_layer: int) -> tuple[int, ...]:
    """Return the ids, ascending, whose states stages before `first_layer` have captured."""
    return tuple(sorted(index for index in aux_layer_ids if index < first_layer))


class StagePoolOrders(Protocol):
    """What is done with a stage's KV pool beside running layers over it."""

    def obey(self, order: bytes) -> None:
        """Carry out what the last stage says, behind the forwards before."""

    def layer_done(self, layer: int) -> None:
        """Take in that a forward has launched a layer, counted over the whole target."""


class StageKV(Protocol):
    """What a stage of a prefill or decode server does with its KV pool."""

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return zeros that a transport reaches."""

    def open(self, layers: tuple[KVLayer, ...], kv_block_size: int) -> StagePoolOrders:
        """Return what takes the orders about a pool that was made."""


class StageWorker:
    """Runs one stage before the last until it is told to stop."""

    def __init__(
        self,
        model: TargetModel,
        *,
        control: Channel,
        upstream: Channel | None,
        downstream: Channel,
        kv: StageKV | None = None,
    ) -> None:
        """Serve a stage.

        Args:
            model: the stage.
            control: messages of the last stage.
            upstream: states of the stage before; None on the first.
            downstream: takes states to the stage after.
            kv: of a prefill or decode server; None: the pool is nobody else's.
        """
        self._kv = kv
        self._model = model
        self._control = control
        self._upstream = upstream
        self._downstream = downstream
        self._pools: dict[int, _StagePool] = {}
        self._is_awaited = False  # whether the next stage waits for a forward of this one

    def ends(self, engine: int = 0) -> dict[int, int]:
        """Return slot -> one past the last position computed here for an engine."""
        return self._pools[engine].lengths.ends()

    def run(self) -> None:
        """Serve messages until STOP; a fault is handed on, so that the last stage can say why.

        Raises:
            DiagnosticError: SD853 to SD855, see `runtime.parallel`.
        """
        try:
            while self.serve_one():
                pass
        except (DiagnosticError, *_FORWARD_FAULTS) as error:  # others end the process: SD855
            self._hand_on(self._problem(error))
            raise

    @torch.inference_mode()
    def serve_one(self) -> bool:
        """Serve the next message; False after STOP."""
        numbers, *order = self._control.receive()
        message = decode(numbers.cpu(), device=self._model.device)
        if message.kind == Kind.STOP:
            return False
        if message.kind == Kind.OPEN:
            self._pools[message.engine] = self._new_pool(message)
        elif message.kind == Kind.CLOSE:
            del self._pools[message.engine]
        elif message.kind == Kind.RUN:
            self._run_stage(message)
        elif message.kind == Kind.KV:
            orders = self._pools[message.engine].orders
            assert orders is not None, "a pool of this server takes orders"
            orders.obey(order[0].cpu().numpy().tobytes())
        return True

    def _run_stage(self, message: StageInput) -> None:
        assert message.batch is not None, "a message that runs has rows"
        self._is_awaited = True
        pool = self._pools[message.engine]
        pool.lengths.apply(message.news)
        states = self._receive(message.aux_layer_ids)
        states = self._model.run_stage(
            message.batch,
            pool.kv,
            message.aux_layer_ids,
            states,
            on_layer=None if pool.orders is None else pool.orders.layer_done,
        )
        end = self._model.first_layer + self._model.num_layers
        names = captured_before(message.aux_layer_ids, end)
        self._downstream.send([states.residual_ND, *(states.captured[name] for name in names)])
        self._is_awaited = False

    def _receive(self, aux_layer_ids: tuple[int, ...]) -> StageStates | None:
        if self._upstream is None:
            return None
        return states_of(self._upstream.receive(), aux_layer_ids, self._model.first_layer)

    def _new_pool(self, message: StageInput) -> _StagePool:
        pool = KVPool(
            self._model.kv_specs,
            num_blocks=message.num_kv_blocks,
            kv_block_size=message.kv_block_size,
            dtype=self._model.dtype,
            device=self._model.device,
            allocate=None if self._kv is None else self._kv.allocate,
        )
        orders = None if self._kv is None else self._kv.open(pool.layers, message.kv_block_size)
        return _StagePool(kv=pool.layers, lengths=SlotLengths(), orders=orders)

    def _hand_on(self, problem: Diagnostic) -> None:
        """Send what ended this stage; what is not asked for before it ends never leaves."""
        with suppress(DiagnosticError, RuntimeError):  # it is gone, or the device has failed
            self._downstream.send([_as_tensor(problem)])
            if self._is_awaited:
                self._downstream.flush()

    def _problem(self, error: Exception) -> Diagnostic:
        if isinstance(error, DiagnosticError):
            return error.diagnostics[0]
        first = self._model.first_layer
        return diagnose(
            "SD856",
            where=f"pipeline, layers {first} to {first + self._model.num_layers - 1}",
            message=f"a stage failed: {type(error).__name__}: {error}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _StagePool:
    """What a stage keeps for one engine of the last stage."""

    kv: tuple[KVLayer, ...]
    lengths: SlotLengths
    orders: StagePoolOrders | None


def _as_tensor(problem: Diagnostic) -> torch.Tensor:
    """Return a message that no state looks like: one row of bytes."""
    return torch.frombuffer(bytearray(msgspec.json.encode(problem)), dtype=torch.uint8)


def states_of(
    tensors: Sequence[torch.Tensor], aux_layer_ids: Sequence[int], first_layer: int
) -> StageStates:
    """Return the states that the stages before `first_layer` handed over.

    Raises:
        DiagnosticError: what a stage before met in place of its states.
    """
    residual, *captured = tensors
    if residual.dtype == torch.uint8:
        raise DiagnosticError(msgspec.json.decode(bytes(residual.tolist()), type=Diagnostic))
    names = captured_before(aux_layer_ids, first_layer)
    return StageStates(residual_ND=residual, captured=dict(zip(names, captured, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forward:
    """A forward that was submitted."""

    batch: PreparedBatch
    kv: tuple[KVLayer, ...]
    aux_layer_ids: tuple[int, ...]
    news: tuple[SlotNews, ...]


class StageLine:
    """The stages before the last one, as it sees them; several engines take turns on them.

    Once a stage is lost, or has failed, every call raises what happened.
    """

    def __init__(
        self, last: TargetModel, *, controls: Sequence[Channel], upstream: Channel
    ) -> None:
        """Speak to all stages.

        Args:
            last: the stage of this process.
            controls: one to each stage before it, first stage first.
            upstream: states of the stage just before.
        """
        self.last = last
        self.num_stages = len(controls) + 1
        self._problem: Diagnostic | None = None
        self._controls = tuple(controls)
        self._upstream = upstream
        self._num_told = self._num_engines = 0
        self._last_told_s = time.monotonic()
        self._lock = threading.Lock()  # the heartbeat is another thread's

    @property
    def problem(self) -> Diagnostic | None:
        """What ended it; None while all stages are there."""
        return self._problem

    def lose(self, problem: Diagnostic) -> None:
        """Let a call that is under way, and every later one, raise what happened; any thread."""
        self._problem = self._problem or problem

    def open(self, *, num_kv_blocks: int, kv_block_size: int) -> PipelinedTarget:
        """Make a KV pool on every stage before the last and return the forwards over it."""
        engine, self._num_engines = self._num_engines, self._num_engines + 1
        self.tell(
            StageInput(
                kind=Kind.OPEN,
                round_number=0,
                engine=engine,
                num_kv_blocks=num_kv_blocks,
                kv_block_size=kv_block_size,
            )
        )
        return PipelinedTarget(self, engine)

    def tell(self, message: StageInput) -> None:
        """Send a message to every stage before the last.

        Raises:
            DiagnosticError: SD855, a stage is gone.
        """
        with self._lock, self._remembered():
            parts = [encode(replace(message, round_number=self._num_told))]
            if message.order:
                parts.append(torch.frombuffer(bytearray(message.order), dtype=torch.uint8))
            for control in self._controls:
                control.send(parts)
            self._num_told += 1
            self._last_told_s = time.monotonic()

    def order(self, order: bytes) -> None:
        """Tell every stage before the last what to do with the KV of the first engine.

        Raises:
            DiagnosticError: SD855, a stage is gone.
        """
        self.tell(StageInput(kind=Kind.KV, round_number=0, engine=0, order=order))

    def check(self) -> None:
        """Do nothing while all stages are there.

        Raises:
            DiagnosticError: SD853 to SD856, a stage is lost or failed.
        """
        if self._problem is not None:
            raise DiagnosticError(self._problem)

    def receive(self, aux_layer_ids: tuple[int, ...]) -> StageStates:
        """Wait for the states of the oldest forward.

        Raises:
            DiagnosticError: SD853 to SD856, a stage is lost or failed.
        """
        with self._remembered():
            return states_of(self._upstream.receive(), aux_layer_ids, self.last.first_layer)

    def beat(self, quiet_s: float) -> None:
        """Tell the stages that this one is there, unless they heard of it in the last seconds."""
        if self.problem is None and time.monotonic() - self._last_told_s >= quiet_s:
            self.tell(StageInput(kind=Kind.ALIVE, round_number=0))

    def stop(self) -> None:
        """Tell every stage to end; one that is lost needs no telling."""
        if self.problem is None:
            self.tell(StageInput(kind=Kind.STOP, round_number=0))
            for control in self._controls:
                control.flush()

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        self.check()
        try:
            yield
        except DiagnosticError as error:
            self.lose(error.diagnostics[0])
            raise
        self.check()  # a wait that was ended from outside has received nothing


class PipelinedTarget:
    """One engine's forwards through all stages, as the last one sees them; see `Forwards`.

    A forward for every stage keeps all of them at work.
    """

    def __init__(self, line: StageLine, engine: int) -> None:
        """Run over the pools that the stages keep for `engine`; `StageLine.open` makes them."""
        self.depth = line.num_stages
        self._line = line
        self._engine = engine
        self._submitted: deque[_Forward] = deque()

    def submit(
        self,
        batch: PreparedBatch,
        kv: Sequence[KVLayer],
        aux_layer_ids: tuple[int, ...],
        news: Sequence[SlotNews],
    ) -> None:
        """Send the rows of a forward to the stages before this one.

        Args:
            batch: rows of every stage.
            kv: cache layers of this stage.
            aux_layer_ids: states to capture, ascending.
            news: what became of each request's rows before.
        """
        self._line.tell(
            StageInput(
                kind=Kind.RUN,
                round_number=0,
                engine=self._engine,
                batch=batch,
                news=tuple(news),
                aux_layer_ids=aux_layer_ids,
            )
        )
        self._submitted.append(
            _Forward(batch=batch, kv=tuple(kv), aux_layer_ids=aux_layer_ids, news=tuple(news))
        )

    def collect(self, on_rows: RowsDone | None = None) -> TargetOutput:
        """Wait for the oldest forward and run this stage's layers on it."""
        forward = self._submitted.popleft()
        states = self._line.receive(forward.aux_layer_ids)
        last = self._line.last
        states = last.run_stage(
            forward.batch,
            forward.kv,
            forward.aux_layer_ids,
            states,
            on_layer=layer_listener(on_rows, forward.news),
        )
        return last.finish(states, forward.aux_layer_ids)

    def abandon(self) -> None:
        """Let the forwards go that were submitted; what the stages yield for them is dropped."""
        while self._submitted:
            forward = self._submitted.popleft()
            if self._line.problem is None:
                self._line.receive(forward.aux_layer_ids)

    def close(self) -> None:
        """Give the pools of the stages up."""
        self.abandon()
        if self._line.problem is None:
            self._line.tell(StageInput(kind=Kind.CLOSE, round_number=0, engine=self._engine))
