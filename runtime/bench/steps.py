"""Times of the steps of a round, apart from a loop around them: the engine's own rounds.

Measured are, with all requests of a point in each: the target's forward and choice for one row a
request (`decode`) and for every verified row (`verify`), the draft's work (`draft`: proposing, and
taking the last round's states in), and the whole round (`round`). On CUDA each is a graph, and
events around its replay give the time; the queue is kept full, so that no launch from the host is
in it, and the steps follow each other in turn, so that each finds the caches as another left them.
On a CPU each is a call, timed by the wall clock.

Keys and values are random, so that nothing is timed on zeros; every sample starts from the same
context.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from runtime.batch import RoundDraft, RoundRequests, RoundStates
from runtime.bench.raw import CopyRecord, StepName, StepRecord
from runtime.bench.timing import Step, clock_of, sample
from runtime.config import RuntimeConfig
from runtime.engine.caches import make_caches_and_proposer
from runtime.graphs.round import DeviceRound
from runtime.graphs.state import RoundShape, RoundState, SlotRow
from runtime.kv import KVLayer
from runtime.loading import LoadedModels
from runtime.models import TargetModel
from runtime.spec.oracle import OracleScript
from runtime.spec.types import DeviceProposer

STEP_ROOM = 32
"""Context beyond the measured one that a round may write to."""

_WARM_UP_ROUNDS = 3
# On an H200 copies of 0.5 GiB and more move 2.7 TB/s, this one 4.1.
_COPY_BYTES: Mapping[str, int] = {"cuda": 1 << 28, "cpu": 1 << 26}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlace:
    """What the steps of a point are measured at.

    Args:
        context: tokens of each request.
        samples: of each step.
    """

    point: int
    concurrency: int
    context: int
    samples: int


class _Recorder:
    """A draft that remembers the states that it was told of last."""

    def __init__(self, draft: RoundDraft) -> None:
        self.draft = draft
        self.states: RoundStates | None = None
        self.aux_layer_ids = draft.aux_layer_ids
        self.needs_final_hidden = draft.needs_final_hidden

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft as the draft does."""
        self.draft.draft_round(requests)

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Remember the states and hand them on."""
        self.states = states
        self.draft.observe_round(requests, states)


class _RepeatingDraft:
    """Stands in for a proposer without a form for the device, so that verification has drafts."""

    aux_layer_ids: tuple[int, ...] = ()
    needs_final_hidden = False

    def draft_round(self, requests: RoundRequests) -> None:
        """Draft the newest token again and again."""
        requests.drafts_BG.copy_(requests.newest_ids_target_B[:, None])

    def observe_round(self, requests: RoundRequests, states: RoundStates) -> None:
        """Nothing to learn."""


class _Bench:
    """One engine's round with a state of its own, at a fixed context."""

    def __init__(
        self,
        models: LoadedModels,
        config: RuntimeConfig,
        place: StepPlace,
        script: OracleScript | None,
    ) -> None:
        self.target: TargetModel = models.target
        self.target_kv: tuple[KVLayer, ...]
        self.target_kv, proposer = make_caches_and_proposer(models, config, script=script)
        self._has_draft = isinstance(proposer, DeviceProposer)
        self._draft: RoundDraft = _RepeatingDraft()
        if isinstance(proposer, DeviceProposer):
            self._draft = proposer
        self._place = place
        self._config = config
        for layer in self.target_kv:
            layer.k.normal_()
            layer.v.normal_()
        self.state = RoundState(
            num_slots=place.concurrency,
            max_batch=place.concurrency,
            max_drafts=config.num_speculative_tokens,
            max_length=config.max_model_len,
            kv_block_size=config.kv_block_size,
            device=config.device,
        )
        self.shape = RoundShape(
            batch=place.concurrency,
            num_drafts=config.num_speculative_tokens,
            context=place.context + STEP_ROOM,
        )

    def reset(self) -> None:
        """Put every request back to the measured context."""
        each = -(-self._config.max_model_len // self._config.kv_block_size)
        rows = [
            SlotRow(
                slot=slot,
                length=self._place.context,
                newest_id_target=slot % self.target.num_reachable_ids,
                blocks=range(1 + slot * each, 1 + (slot + 1) * each),
            )
            for slot in range(self._place.concurrency)
        ]
        self.state.write_requests(rows)
        self.state.write_batch(
            [row.slot for row in rows], [self.shape.num_drafts] * self._place.concurrency
        )

    def steps(self, forward: StepName) -> dict[StepName, Step]:
        """Return what is measured; the target's part goes by the name `forward`.

        A round runs first: its states are what the draft takes in each time.
        """
        draft = self._draft
        recorder = _Recorder(draft)
        round_ = DeviceRound(
            target=self.target, target_kv=self.target_kv, draft=recorder, state=self.state
        )
        for _ in range(_WARM_UP_ROUNDS):
            self.reset()
            round_.run(self.shape)
        states = recorder.states
        assert states is not None, "a round tells the draft of its states"

        def run_target() -> torch.Tensor:
            output = self.target.forward(states.batch, self.target_kv, draft.aux_layer_ids)
            return self.target.greedy_ids(output.head_rows)

        def run_draft() -> None:
            requests = self.state.requests(self.shape)
            draft.draft_round(requests)
            draft.observe_round(requests, states)

        found: dict[StepName, Step] = {forward: run_target}
        if self.shape.num_drafts and self._has_draft:
            found["draft"] = run_draft
            found["round"] = lambda: round_.run(self.shape)
        return found


@torch.inference_mode()
def measure_steps(
    models: LoadedModels,
    config: RuntimeConfig,
    place: StepPlace,
    *,
    script: OracleScript | None = None,
    name: StepName | None = None,
) -> list[StepRecord]:
    """Measure one engine's steps.

    Args:
        models: with the draft if the proposer runs one.
        config: `max_model_len` is the context + STEP_ROOM at least, with blocks for all requests.
        place: at what.
        script: of the oracle.
        name: of the target's part; None: `verify`, `decode` without drafts.

    Returns:
        One record a step; of a proposer without a form for the device, verification alone.
    """
    bench = _Bench(models, config, place, script)
    gamma = config.num_speculative_tokens
    steps = bench.steps(name or ("verify" if gamma else "decode"))
    sampled = sample(steps, bench.reset, place.samples, config.device)
    return [
        StepRecord(
            point=place.point,
            step=step,
            width=gamma if step == "draft" else gamma + 1,
            clock=clock_of(config.device),
            samples_s=samples,
        )
        for step, samples in sampled.items()
    ]


@torch.inference_mode()
def measure_copy(device: torch.device, samples: int) -> CopyRecord:
    """Measure a copy from device memory to device memory."""
    source = torch.empty(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    source.random_()
    sink = torch.empty_like(source)
    step: StepName = "round"  # any: one step is measured
    times = sample({step: lambda: sink.copy_(source)}, lambda: None, samples, device)
    return CopyRecord(num_bytes=2 * source.numel(), clock=clock_of(device), samples_s=times[step])
