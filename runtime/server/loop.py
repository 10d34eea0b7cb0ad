"""The engine's own thread: requests in through a queue, deltas out through callbacks.

Invariants: the engine is touched by this thread only; a sink gets every delta of its request in
order and nothing after the last; a fault while a request is added ends that request, a fault of a
step ends the requests in flight, and the loop goes on with the next ones.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from runtime.config.devices import make_current
from runtime.engine.request import Admission, RequestDelta, RequestInput, Usage
from runtime.engine.stats import EngineStats
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose

logger = logging.getLogger(__name__)

Sink: TypeAlias = Callable[[RequestDelta], None]


class EnginePort(Protocol):
    """What the loop needs of an engine; tests drive it with a scripted one."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""

    def add_request(self, request: RequestInput) -> Admission:
        """Queue a request.

        Raises:
            DiagnosticError: it can never run.
        """

    def abort(self, request_id: str) -> bool:
        """Drop a request; False when it is not in flight."""

    def step(self) -> tuple[RequestDelta, ...]:
        """Run one round and return what it added."""

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""

    def flush_cache(self) -> None:
        """Clear logical state: prefix index and counters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Submit:
    inputs: tuple[RequestInput, ...]
    sink: Sink


@dataclass(frozen=True, kw_only=True, slots=True)
class _Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _FailAll:
    error: Diagnostic


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flush:
    done: Future[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wake:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stop:
    pass


_Command: TypeAlias = _Submit | _Abort | _FailAll | _Flush | _Wake | _Stop


class EngineLoop:
    """Runs an engine in one daemon thread."""

    def __init__(
        self,
        engine: EnginePort,
        *,
        fault: Callable[[], Diagnostic | None] = lambda: None,
        device: torch.device | None = None,
    ) -> None:
        """Take the engine over; nobody else may call it from now on.

        Args:
            engine: what runs.
            fault: says what ended the engine for good, such as a stage that is lost.
            device: what the engine runs on; None: what a new thread launches on.
        """
        self._engine = engine
        self._fault = fault
        self._device = device
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._snapshot = engine.stats()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def stats(self) -> EngineStats:
        """Counters as of the end of the last step; never waits for the engine."""
        return self._snapshot

    @property
    def problem(self) -> Diagnostic | None:
        """Why no request can run any more; None while they can."""
        if not self.is_alive:
            return _no_thread("server")
        return self._fault()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, inputs: Sequence[RequestInput], sink: Sink) -> None:
        """Hand over requests; `sink` is called in the engine's thread with each delta."""
        self._commands.put(_Submit(inputs=tuple(inputs), sink=sink))
        if self._has_ended.is_set():
            self._refuse_queued()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests before the next step; their sinks are not called again."""
        self._commands.put(_Abort(request_ids=tuple(request_ids)))

    def fail_all(self, error: Diagnostic) -> None:
        """End everything in flight with an error before the next step."""
        self._commands.put(_FailAll(error=error))

    def flush(self) -> Future[None]:
        """Clear the prefix cache and the counters before the next step.

        Returns:
            What raises SD916 where the thread has ended, or ends before.
        """
        done: Future[None] = Future()
        self._commands.put(_Flush(done=done))
        if self._has_ended.is_set():
            self._refuse_queued()
        return done

    def wake(self) -> None:
        """Make an idle engine look again whether it has work; for what comes from elsewhere."""
        self._commands.put(_Wake())

    def stop(self, timeout_s: float) -> None:
        """End the thread after its current step; requests in flight are dropped."""
        self._commands.put(_Stop())
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            if self._device is not None:
                make_current(self._device)
            while self._obey():
                if self._engine.has_work:
                    self._step()
        finally:  # however it ends, nobody is left waiting
            self._has_ended.set()
            sinks, self._sinks = self._sinks, {}
            for request_id, sink in sinks.items():
                sink(_ending(request_id, _ended(request_id)))
            self._refuse_queued()

    def _refuse_queued(self) -> None:
        """End what was queued after the thread's last look."""
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if isinstance(command, _Submit):
                for request in command.inputs:
                    command.sink(_refusal(request, _ended(request.request_id)))
            elif isinstance(command, _Flush) and command.done.set_running_or_notify_cancel():
                command.done.set_exception(DiagnosticError(_no_thread("server")))

    def _obey(self) -> bool:
        """Carry out what is queued, waiting for a command while idle; False ends the thread."""
        should_wait = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block=should_wait)
            except queue.Empty:
                return True
            should_wait = False
            if isinstance(command, _Stop):
                return False
            self._carry_out(command)
            self._snapshot = self._engine.stats()

    def _carry_out(self, command: _Submit | _Abort | _FailAll | _Flush | _Wake) -> None:
        if isinstance(command, _Submit):
            for request in command.inputs:
                self._add(request, command.sink)
        elif isinstance(command, _Abort):
            for request_id in command.request_ids:
                self._drop(request_id)
        elif isinstance(command, _FailAll):
            self._end_all(command.error)
        elif isinstance(command, _Flush) and command.done.set_running_or_notify_cancel():
            self._engine.flush_cache()
            command.done.set_result(None)

    def _add(self, request: RequestInput, sink: Sink) -> None:
        try:
            self._engine.add_request(request)
        except DiagnosticError as error:
            sink(_refusal(request, error.diagnostics[0]))
            return
        except Exception as error:  # of its text or grammar: other requests must not end with it
            logger.exception("request %s could not be added", request.request_id)
            sink(_refusal(request, _fault(request.request_id, error)))
            return
        self._sinks[request.request_id] = sink

    def _drop(self, request_id: str) -> None:
        if self._sinks.pop(request_id, None) is not None:
            self._engine.abort(request_id)

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except DiagnosticError as error:  # it says where and what to do; a trace adds nothing
            problem = error.diagnostics[0]
            logger.error(
                "a step failed; the requests in flight end with %s, found: %s",
                *(problem.oneline(), problem.found),
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
            self._end_all(problem)
            return
        except Exception as error:  # whatever it is, every client in flight is told, none waits on
            logger.exception("a step failed; the requests in flight end with an error")
            self._end_all(_fault("all in flight", error))
            return
        self._snapshot = self._engine.stats()  # before the sinks: a finished request is counted
        for delta in deltas:
            sink = self._sinks.get(delta.request_id)
            if sink is None:
                continue
            if delta.finish_reason is not None:
                del self._sinks[delta.request_id]
            sink(delta)

    def _end_all(self, error: Diagnostic) -> None:
        for request_id in tuple(self._sinks):
            self._sinks.pop(request_id)(_ending(request_id, error))
            self._engine.abort(request_id)


def _refusal(request: RequestInput, error: Diagnostic) -> RequestDelta:
    return _ending(request.request_id, error, num_prompt_tokens=len(request.prompt_ids_target))


def _ending(request_id: str, error: Diagnostic, *, num_prompt_tokens: int = 0) -> RequestDelta:
    return RequestDelta(
        request_id=request_id,
        ids_target=(),
        text="",
        finish_reason="error",
        usage=Usage(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=0,
            num_output_tokens=0,
            num_rounds=0,
            num_drafts=0,
            num_accepted_drafts=0,
        ),
        error=error,
    )


def _ended(request_id: str) -> Diagnostic:
    return _no_thread(f"request={request_id}")


def _no_thread(where: str) -> Diagnostic:
    return diagnose("SD916", where=where, message="the engine's thread has ended")


def _fault(request_id: str, error: Exception) -> Diagnostic:
    return diagnose(
        "SD916",
        where=f"request={request_id}",
        message=f"the engine failed: {type(error).__name__}: {error}",
    )
