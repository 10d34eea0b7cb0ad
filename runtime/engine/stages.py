"""A target whose stages are other processes or threads: workers, and the last stage's view of all.

The last stage plans, drafts, verifies and commits; the stages before it know nothing of requests.
For each forward they get its rows and what became of the rows before, run their layers over their
own KV, and hand the residual stream on, with the captured states in ascending layer order. Messages
and states pass every channel in order, so several forwards over different requests may be under way
and stages work at the same time.

A forward has two halves: `submit` sends the rows off, `collect` waits for the stream, in the order
of submission.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from runtime.batch import PreparedBatch
from runtime.kv import KVLayer
from runtime.models import StageStates, TargetModel, TargetOutput
from runtime.parallel.channels import Channel
from runtime.parallel.messages import Kind, SlotLengths, SlotNews, StageInput, decode, encode


def captured_before(aux_layer_ids: Sequence[int], first_layer: int) -> tuple[int, ...]:
    """Return the ids, ascending, whose states stages before `first_layer` have captured."""
    return tuple(sorted(index for index in aux_layer_ids if index < first_layer))


class StageWorker:
    """Runs one stage before the last until it is told to stop."""

    def __init__(
        self,
        model: TargetModel,
        kv: Sequence[KVLayer],
        *,
        control: Channel,
        upstream: Channel | None,
        downstream: Channel,
    ) -> None:
        """Serve a stage.

        Args:
            model: the stage.
            kv: its cache layers.
            control: messages of the last stage.
            upstream: states of the stage before; None on the first.
            downstream: takes states to the stage after.
        """
        self._model = model
        self._kv = tuple(kv)
        self._control = control
        self._upstream = upstream
        self._downstream = downstream
        self._lengths = SlotLengths()

    @property
    def ends(self) -> dict[int, int]:
        """Slot -> one past the last position computed here."""
        return self._lengths.ends()

    def run(self) -> None:
        """Serve messages until STOP.

        Raises:
            DiagnosticError: SD853 to SD855, see `runtime.parallel`.
        """
        while self.serve_one():
            pass

    @torch.inference_mode()
    def serve_one(self) -> bool:
        """Serve the next message; False after STOP."""
        (numbers,) = self._control.receive()
        message = decode(numbers.cpu(), device=self._model.device)
        if message.kind == Kind.STOP:
            return False
        assert message.batch is not None, "a message that runs has rows"
        self._lengths.apply(message.news)
        states = self._receive(message.aux_layer_ids)
        states = self._model.run_stage(message.batch, self._kv, message.aux_layer_ids, states)
        end = self._model.first_layer + self._model.num_layers
        names = captured_before(message.aux_layer_ids, end)
        self._downstream.send([states.residual_ND, *(states.captured[name] for name in names)])
        return True

    def _receive(self, aux_layer_ids: tuple[int, ...]) -> StageStates | None:
        if self._upstream is None:
            return None
        return states_of(self._upstream.receive(), aux_layer_ids, self._model.first_layer)


def states_of(
    tensors: Sequence[torch.Tensor], aux_layer_ids: Sequence[int], first_layer: int
) -> StageStates:
    """Return the states that the stages before `first_layer` handed over."""
    residual, *captured = tensors
    names = captured_before(aux_layer_ids, first_layer)
    return StageStates(residual_ND=residual, captured=dict(zip(names, captured, strict=True)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Forward:
    """A forward that was submitted."""

    batch: PreparedBatch
    kv: tuple[KVLayer, ...]
    aux_layer_ids: tuple[int, ...]


class PipelinedTarget:
    """Forwards through all stages, as the last one sees them; see `Forwards`.

    A forward for every stage keeps all of them at work.
    """

    def __init__(
        self, last: TargetModel, *, controls: Sequence[Channel], upstream: Channel
    ) -> None:
        """Speak for all stages.

        Args:
            last: the stage of this process.
            controls: one to each stage before it, first stage first.
            upstream: states of the stage just before.
        """
        self.last = last
        self.depth = len(controls) + 1
        self._controls = tuple(controls)
        self._upstream = upstream
        self._round_number = 0
        self._submitted: deque[_Forward] = deque()

    @property
    def num_submitted(self) -> int:
        """Forwards that were submitted and not collected."""
        return len(self._submitted)

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
        self._tell(
            StageInput(
                kind=Kind.RUN,
                round_number=self._round_number,
                batch=batch,
                news=tuple(news),
                aux_layer_ids=aux_layer_ids,
            )
        )
        self._submitted.append(_Forward(batch=batch, kv=tuple(kv), aux_layer_ids=aux_layer_ids))

    def collect(self) -> TargetOutput:
        """Wait for the oldest forward and run this stage's layers on it."""
        forward = self._submitted.popleft()
        states = states_of(self._upstream.receive(), forward.aux_layer_ids, self.last.first_layer)
        states = self.last.run_stage(forward.batch, forward.kv, forward.aux_layer_ids, states)
        return self.last.finish(states, forward.aux_layer_ids)

    def stop(self) -> None:
        """Tell every stage to end."""
        self._tell(StageInput(kind=Kind.STOP, round_number=self._round_number))

    def _tell(self, message: StageInput) -> None:
        numbers = encode(message)
        for control in self._controls:
            control.send([numbers])
        self._round_number += 1
