"""A tensor-parallel rank of the last stage other than the first: it does what that one says.

It holds its shards of target and draft, an engine for each that the first rank opens, and its own
line to the stages before, whose rank it is the neighbour of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from runtime.disagg.role_plan import RankCard, RolePlan
from runtime.engine.build import build_engine
from runtime.engine.caches import Caches, make_caches
from runtime.engine.engine import Engine
from runtime.engine.lockstep import EngineOrder, follow
from runtime.engine.peers import BEATS_PER_TIMEOUT, RankPlan, line_of
from runtime.engine.role_rank import RoleRank
from runtime.engine.role_site import (
    RoleSite,
    follow_role,
    pool_allocator,
    publish_card,
    rank_transport,
)
from runtime.engine.stages import StageLine
from runtime.loading import LoadedModels
from runtime.parallel.groups import ProcessGroups
from runtime.parallel.ranks import Ranks
from specctl.contract.diagnostics import DiagnosticError
from specctl.contract.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """What such a rank runs.

    Args:
        models: its shards.
        control: what the first rank says comes this way.
        tokenizer: for stop strings, which end a request on every rank at the same token.
        line: to the stages before; None when there are none.
        groups: all processes.
        manifest: that is served.
        plan: what every process was told.
    """

    models: LoadedModels
    control: Ranks
    tokenizer: Tokenizer | None
    line: StageLine | None
    groups: ProcessGroups
    manifest: Manifest
    plan: RankPlan

    @classmethod
    def join(
        cls,
        models: LoadedModels,
        control: Ranks,
        groups: ProcessGroups,
        *,
        tokenizer: Tokenizer | None,
        manifest: Manifest,
        plan: RankPlan,
    ) -> Follower:
        """Return the rank of this process."""
        has_line = groups.layout.pipeline_parallel > 1
        line = line_of(groups, models.target) if has_line else None
        return cls(
            models=models,
            control=control,
            tokenizer=tokenizer,
            line=line,
            groups=groups,
            manifest=manifest,
            plan=plan,
        )

    def run(self) -> None:
        """Follow the first rank until it ends.

        Raises:
            DiagnosticError: SD853 to SD856 (a stage), SD855, SD859 (a rank).
        """
        with _beating(self.line, self.plan.rank_timeout_s / BEATS_PER_TIMEOUT):
            follow(self.control, self._build)

    def _build(self, order: EngineOrder) -> Engine | RoleRank:
        if self.plan.role is None:
            return self._engine(order, None)
        try:
            return self._role(order, self.plan.role)
        except DiagnosticError as error:
            publish_card(self.groups, RankCard(problems=error.diagnostics))
            raise

    def _engine(self, order: EngineOrder, caches: Caches | None) -> Engine:
        config = replace(order.config, device=self.models.target.device)
        return build_engine(
            self.models,
            config,
            tokenizer=self.tokenizer,
            script=order.script,
            caches=caches,
            line=self.line,
        )

    def _role(self, order: EngineOrder, plan: RolePlan) -> RoleRank:
        config = replace(order.config, device=self.models.target.device)
        transport = rank_transport(plan, self.groups.launch)
        caches = make_caches(
            self.models, config, script=order.script, allocate=pool_allocator(plan, transport)
        )
        site = RoleSite(
            plan=plan,
            manifest=self.manifest,
            config=config,
            layout=self.plan.layout(self.manifest),
            transport=transport,
            engine=self._engine(order, caches),
            caches=caches,
            control=self.control,
            groups=self.groups,
            line=self.line,
        )
        return follow_role(site)


@contextmanager
def _beating(line: StageLine | None, beat_s: float) -> Iterator[None]:
    """Let the stages before know that this rank lives; at the end, that they are to stop."""
    if line is None:
        yield
        return
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(beat_s / 4):
            try:
                line.beat(beat_s)
            except DiagnosticError:
                return  # the line remembers it, and the next step raises it

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        line.stop()
