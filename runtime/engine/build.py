"""An engine over loaded models: its KV pool, proposer, rounds on the device and draft counts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from tokenizers import Tokenizer

from runtime.config import RuntimeConfig
from runtime.config.cost_table import CostTable
from runtime.engine.caches import Caches, make_caches
from runtime.engine.costs import CostPlace, TimedParts, engine_costs
from runtime.engine.device_rounds import (
    DeviceRounds,
    MakeRunner,
    make_device_rounds,
    round_menu,
)
from runtime.engine.engine import Engine
from runtime.engine.prefill_costs import PrefillCosts, measured_costs
from runtime.engine.stages import StageLine
from runtime.engine.warm_up import WarmUp, warm_up
from runtime.graphs.capture import GraphReport
from runtime.loading import LoadedModels
from runtime.spec.adaptive import AdaptiveLengths
from runtime.spec.forced import ForcedLengths
from runtime.spec.oracle import OracleScript
from specctl.contract.diagnostics import Diagnostic

logger = logging.getLogger(__name__)


def build_engine(
    models: LoadedModels,
    config: RuntimeConfig,
    *,
    tokenizer: Tokenizer | None = None,
    script: OracleScript | None = None,
    make_runner: MakeRunner | None = None,
    costs: CostTable | CostPlace | None = None,
    forced: ForcedLengths | None = None,
    on_diagnostic: Callable[[Diagnostic], None] | None = None,
    caches: Caches | None = None,
    line: StageLine | None = None,
    prefill_costs: PrefillCosts | None = None,
) -> Engine:
    """Allocate the KV pool, make the proposer and join them to an engine.

    Args:
        models: loaded with the draft if `config.proposer` runs one.
        config: settings for these models.
        tokenizer: for texts and stop strings.
        script: what the `oracle` proposer replays, or what replaces ids of a draft.
        make_runner: what runs rounds on the device, in place of captured graphs.
        costs: what draft counts are chosen by where `config.length_mode` chooses, or where that
            is kept.
        forced: decides in the target's place what rounds accept (benchmarks only).
        on_diagnostic: gets SD838 and SD839 about the cost table, SD841 about graphs.
        caches: the pool and the proposer over it; None makes them.
        line: the stages before the target's, which get a pool of this engine's; None: there are
            none in other processes.
        prefill_costs: decide whether prompts that came at once run by graphs; None: measured where
            the eager path is warmed up, which is on CUDA in one process.

    Raises:
        DiagnosticError: SD807, the proposer lacks its parts; SD836 and SD837, there is no cost
            table that fits.
    """
    if caches is None:
        caches = make_caches(models, config, script=script)
    target_kv, proposer = caches.target_kv, caches.proposer
    rounds = make_device_rounds(
        models.target, target_kv, proposer, config, make_runner=make_runner, forced=forced
    )
    if rounds is not None and on_diagnostic is not None:
        for problem in rounds.report.problems():
            on_diagnostic(problem)
    forwards = None
    if line is not None:
        forwards = line.open(num_kv_blocks=config.num_kv_blocks, kv_block_size=config.kv_block_size)
    lengths = None
    if config.length_mode != "static":
        if not isinstance(costs, CostTable):
            parts = TimedParts(
                target=models.target, target_kv=target_kv, proposer=proposer, rounds=rounds
            )
            costs = engine_costs(parts, config, costs, on_diagnostic=on_diagnostic)
        lengths = AdaptiveLengths(costs, round_menu(config))
    if config.device.type == "cuda" and line is None and config.tensor_parallel == 1:
        plain = replace(config, enable_prefix_cache=False, length_mode="static")
        eager = Engine(target=models.target, target_kv=target_kv, proposer=proposer, config=plain)
        warmed = warm_up(eager, models, caches)
        rounds, measured = _told_of(rounds, warmed)
        prefill_costs = prefill_costs or measured
    return Engine(
        target=models.target,
        target_kv=target_kv,
        proposer=proposer,
        config=config,
        tokenizer=tokenizer,
        rounds=rounds,
        lengths=lengths,
        forced=forced,
        forwards=forwards,
        prefill_costs=prefill_costs,
    )


def _told_of(
    rounds: DeviceRounds | None, warmed: WarmUp
) -> tuple[DeviceRounds | None, PrefillCosts | None]:
    """Return the rounds with what the warm-up cost in their report, and the costs of prefills."""
    report = GraphReport() if rounds is None else rounds.report
    report = replace(report, num_warm_steps=warmed.num_steps, warm_up_s=warmed.seconds)
    logger.info(
        "captured %d graphs in %.1f s (%.0f MB); ran %d eager steps in %.1f s to compile kernels",
        report.num_graphs,
        report.capture_s,
        report.memory_bytes / 1e6,
        report.num_warm_steps,
        report.warm_up_s,
    )
    if rounds is None:
        return None, None
    return replace(rounds, report=report), measured_costs(rounds.prefill_s, warmed.prefill_s)
