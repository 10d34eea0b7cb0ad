"""Makes what an engine runs rounds on the device with, where proposer and device allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from runtime.batch import RoundKind
from runtime.config import RuntimeConfig
from runtime.config.round_sizes import RoundMenu, draft_counts_up_to
from runtime.engine.slot_params import prefill_kind
from runtime.graphs.capture import GraphReport, GraphSet
from runtime.graphs.prefill import PrefillShape, PrefillState, group_end
from runtime.graphs.round import DeviceRound, RoundRunner, batch_sizes, context_buckets
from runtime.graphs.split import SplitState
from runtime.graphs.state import RoundState
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.spec.forced import ForcedLengths
from runtime.spec.types import DeviceProposer, PrefillProposer, Proposer

MakeRunner = Callable[[DeviceRound, RuntimeConfig], RoundRunner]
"""Makes the runner of a round; tests put one that runs it eagerly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRounds:
    """What an engine runs rounds on the device with.

    Args:
        runner: runs rounds over `state`.
        state: of all slots.
        proposer: the engine's own.
        report: what captured graphs cost.
        round_: what the runner runs.
        prefill_s: seconds of captured prefills.
    """

    runner: RoundRunner
    state: RoundState
    proposer: DeviceProposer
    report: GraphReport
    round_: DeviceRound
    prefill_s: Mapping[PrefillShape, float] = field(default_factory=dict)


def round_menu(config: RuntimeConfig) -> RoundMenu:
    """Return the sizes among which an engine with these settings chooses."""
    gamma = config.num_speculative_tokens
    is_choosing = config.length_mode != "static"
    return RoundMenu(
        batches=batch_sizes(config.batch_buckets, config.max_num_requests),
        draft_counts=draft_counts_up_to(gamma) if is_choosing else (gamma,),
    )


def is_ragged(config: RuntimeConfig) -> bool:
    """Whether rounds with packed rows are captured."""
    return config.length_mode == "compact"


def captured_contexts(config: RuntimeConfig) -> tuple[int, ...]:
    """Return the bounds of positions that have graphs of their own.

    Ragged engines capture many more sizes of batch, drafts and rows; they have the smallest and the
    largest bound only. A larger bound than needed costs programs that end at once. Every bound
    holds all rows of a round that starts at position 0, as padding does.
    """
    gamma = config.num_speculative_tokens
    contexts = tuple(size for size in context_buckets(config.max_model_len) if size > gamma)
    return tuple(sorted({contexts[0], contexts[-1]})) if is_ragged(config) else contexts


def captured_prefill_rows(config: RuntimeConfig) -> tuple[int, ...]:
    """Return the row counts of prefills that have graphs: up to the one that holds any step's."""
    longest = group_end(min(config.prefill_chunk_size, config.max_model_len))
    most = min(config.max_num_batched_tokens, longest * config.max_num_requests)
    buckets = sorted(set(config.prefill_buckets))
    return tuple(rows for i, rows in enumerate(buckets) if i == 0 or buckets[i - 1] < most)


def _round_kinds(config: RuntimeConfig) -> tuple[RoundKind, ...]:
    """Return the ways to choose tokens that requests of an engine may ask for."""
    if config.verification == "rejection":
        return ("greedy", "rejection")
    return ("greedy", "sampled", "filtered")


def _prefill_state(
    state: RoundState, proposer: Proposer, config: RuntimeConfig
) -> PrefillState | None:
    """Return what prefills on the device read and write; None where all of them are eager."""
    row_counts, contexts = captured_prefill_rows(config), context_buckets(config.max_model_len)
    if not row_counts or not isinstance(proposer, PrefillProposer):
        return None
    return PrefillState(
        state,
        row_counts=row_counts,
        contexts=(contexts[0], contexts[-1]),
        max_num_prompts=config.max_num_requests,
        kinds=tuple(map(prefill_kind, _round_kinds(config))),
    )


def make_device_rounds(
    target: TargetModel,
    target_kv: Sequence[KVLayer],
    proposer: Proposer,
    config: RuntimeConfig,
    *,
    make_runner: MakeRunner | None = None,
    forced: ForcedLengths | None = None,
) -> DeviceRounds | None:
    """Return the rounds, captured on CUDA; None where rounds run eagerly.

    Args:
        target: the model that verifies.
        target_kv: its layers of the pool.
        proposer: with a row of per-slot state for padding, if it is a `DeviceProposer`.
        config: settings.
        make_runner: replaces capture.
        forced: decides in the target's place what a round accepts.
    """
    if config.graphs == "off" or not isinstance(proposer, DeviceProposer):
        return None
    if make_runner is None and config.device.type != "cuda":
        return None
    state = RoundState(
        num_slots=config.max_num_requests,
        max_batch=config.max_num_requests,
        max_drafts=config.num_speculative_tokens,
        max_length=config.max_model_len,
        kv_block_size=config.kv_block_size,
        device=config.device,
    )
    split = SplitState(
        state,
        max_batch=config.max_num_requests,
        max_drafts=config.num_speculative_tokens,
        num_ids=target.facts.vocab_size,
    )
    round_ = DeviceRound(
        target=target,
        target_kv=target_kv,
        draft=proposer,
        state=state,
        split=None if forced is not None else split,
        prefill=_prefill_state(state, proposer, config),
        forced=forced,
    )
    if make_runner is not None:
        return DeviceRounds(
            runner=make_runner(round_, config),
            state=state,
            proposer=proposer,
            report=GraphReport(),
            round_=round_,
        )
    menu = round_menu(config)
    graphs = GraphSet(
        round_,
        batches=menu.batches,
        draft_counts=menu.draft_counts if is_ragged(config) else menu.draft_counts[-1:],
        contexts=captured_contexts(config),
        is_ragged=is_ragged(config),
        kinds=_round_kinds(config),
    )
    return DeviceRounds(
        runner=graphs,
        state=state,
        proposer=proposer,
        report=graphs.report,
        round_=round_,
        prefill_s=graphs.prefill_s,
    )
