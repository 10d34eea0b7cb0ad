"""The engine with everything it needs, built from one manifest; blocking generation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from runtime.config import (
    Overrides,
    ProposerName,
    RuntimeConfig,
    draft_width,
    force_anchor,
    resolve_config,
)
from runtime.disagg.role_plan import RolePlan
from runtime.engine.build import build_engine
from runtime.engine.caches import Caches, make_caches
from runtime.engine.costs import CostPlace, cost_path
from runtime.engine.engine import Engine
from runtime.engine.lockstep import EngineOrder, LockstepLeader, own_engine
from runtime.engine.probe import invariance_problems
from runtime.engine.request import FinishReason, RequestDelta, RequestInput, Usage
from runtime.engine.staged import StagedModels, load_staged
from runtime.engine.text import load_tokenizer
from runtime.kv import Allocate
from runtime.loading import LoadedModels
from runtime.spec.oracle import OracleScript
from runtime.spec.types import TokenLogprobs
from specctl.contract.codec import load_manifest, resolve_source
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, has_errors
from specctl.contract.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The whole answer to one request.

    Args:
        ids_target: output ids, end token included.
        text: decoded output; empty without a tokenizer.
        seed: the one that was used.
        error: why, when the reason is `error`.
        logprobs: one entry for each id where they were asked for, else none.
    """

    request_id: str
    ids_target: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    seed: int
    error: Diagnostic | None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(kw_only=True, slots=True)
class _Partial:
    seed: int
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    ids_target: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)


class LLM:
    """A served manifest: engine, settings and tokenizer."""

    def __init__(
        self,
        *,
        engine: Engine | LockstepLeader,
        models: LoadedModels,
        manifest: Manifest,
        tokenizer: Tokenizer | None,
        diagnostics: tuple[Diagnostic, ...],
        staged: StagedModels | None = None,
        caches: Caches | None = None,
    ) -> None:
        """Hold the parts, start-up warnings among them; `from_manifest` makes them.

        `caches` are those of the engine, for roles that hand KV over.
        """
        self._staged = staged or StagedModels(models=models)
        self.engine = engine
        self.caches = caches
        self.models = models
        self.config = engine.config
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.diagnostics = diagnostics

    @classmethod
    def from_manifest(
        cls,
        path: str | Path,
        overrides: Overrides | None = None,
        *,
        script: OracleScript | None = None,
        needs_tokenizer: bool = True,
        allocate: Allocate | None = None,
        role: RolePlan | None = None,
    ) -> LLM:
        """Load what a manifest points to.

        Args:
            path: the manifest file.
            overrides: settings that were given.
            script: what the `oracle` proposer replays.
            needs_tokenizer: False serves ids only, without text and stop strings.
            allocate: makes the KV pool's tensors, where a transport must reach them.
            role: what other processes do of a prefill or decode server; `runtime.server.roles`
                does the part of this one.

        Raises:
            DiagnosticError: what `load_manifest`, `resolve_config`, `load_models`,
                `load_tokenizer` and `build_engine` raise; SD831 when rows are not invariant;
                SD853, SD855 when stages in other processes do not start.
        """
        path = Path(path)
        manifest, forced = force_anchor(load_manifest(path), overrides)
        config = resolve_config(manifest, overrides)
        tokenizer = None
        if needs_tokenizer:
            tokenizer = load_tokenizer(resolve_source(manifest.target.source, path.parent))
        with ExitStack() as guard:
            staged = load_staged(path, manifest, config, has_tokenizer=needs_tokenizer, role=role)
            guard.callback(staged.close)
            llm = cls._over(
                staged,
                path,
                manifest,
                config,
                tokenizer=tokenizer,
                script=script,
                forced=forced,
                allocate=allocate,
            )
            guard.pop_all()
        return llm

    @classmethod
    def _over(
        cls,
        staged: StagedModels,
        path: Path,
        manifest: Manifest,
        config: RuntimeConfig,
        *,
        tokenizer: Tokenizer | None,
        script: OracleScript | None,
        forced: tuple[Diagnostic, ...],
        allocate: Allocate | None,
    ) -> LLM:
        """Build the engine over loaded models; `forced` are findings so far."""
        models = staged.models
        found = (
            forced + config.diagnostics + models.diagnostics + invariance_problems(models, config)
        )
        if has_errors(found):
            raise DiagnosticError(found)
        later: list[Diagnostic] = []
        caches = make_caches(models, config, script=script, allocate=allocate)
        costs = CostPlace(path=cost_path(path, config.cost_table), fingerprint=manifest.fingerprint)

        def build(order: EngineOrder) -> Engine:
            return build_engine(
                models,
                order.config,
                tokenizer=tokenizer,
                script=order.script,
                costs=costs,
                on_diagnostic=later.append,
                caches=caches,
                line=staged.line,
            )

        return cls(
            engine=staged.open(EngineOrder(config=config, script=script), build),
            models=models,
            manifest=manifest,
            tokenizer=tokenizer,
            diagnostics=(*found, *later),
            staged=staged,
            caches=caches,
        )

    @property
    def own_engine(self) -> Engine:
        """The engine of this process; other ranks may run in step with it, then `engine` leads."""
        return own_engine(self.engine)

    @property
    def staged(self) -> StagedModels:
        """Models of this process, and the other processes."""
        return self._staged

    @property
    def problem(self) -> Diagnostic | None:
        """What ended the stages in other processes; None while they run, or without any."""
        return None if self._staged.peers is None else self._staged.peers.problem

    @property
    def transport(self) -> str | None:
        """How states travel between processes; None where there is one process."""
        return None if self._staged.peers is None else self._staged.peers.groups.transport

    def close(self) -> None:
        """Stop the stages in other processes and the engine's thread; nobody uses it afterwards."""
        if self._staged.peers is None:
            self.engine.close()
        self._staged.close()

    def sibling(
        self,
        *,
        proposer: ProposerName,
        num_speculative_tokens: int,
        script: OracleScript | None = None,
    ) -> LLM:
        """Return a second engine over the same weights, with a KV pool of its own.

        Args:
            proposer: `none` for a target-only engine, which pays for no draft at all.
            num_speculative_tokens: drafts per round, 0 with `none`.
            script: what the `oracle` proposer replays.

        Raises:
            DiagnosticError: SD807, the proposer lacks its parts.
        """
        config = replace(
            self.config,
            proposer=proposer,
            num_speculative_tokens=num_speculative_tokens,
            draft_width=draft_width(self.manifest, proposer, num_speculative_tokens),
            length_mode="static",
        )

        def build(order: EngineOrder) -> Engine:
            return build_engine(
                self.models,
                order.config,
                tokenizer=self.tokenizer,
                script=order.script,
                line=self._staged.line,
            )

        return LLM(
            engine=self._staged.open(EngineOrder(config=config, script=script), build),
            models=self.models,
            manifest=self.manifest,
            tokenizer=self.tokenizer,
            diagnostics=self.diagnostics,
            staged=self._staged,
        )

    def generate(
        self,
        requests: Sequence[RequestInput],
        *,
        on_delta: Callable[[RequestDelta], None] | None = None,
        logprobs: int | None = None,
    ) -> tuple[Completion, ...]:
        """Run requests to their ends; answers come in the order of the requests.

        Args:
            requests: more than the queue holds are handed over as places become free.
            on_delta: called with every delta as it is made.
            logprobs: likeliest ids to report with each token's log probability, for all requests;
                None leaves that to each request's parameters.

        Raises:
            DiagnosticError: a request cannot run (see `Engine.add_request`).
        """
        if logprobs is not None:
            requests = [
                replace(item, params=replace(item.params, num_logprobs=logprobs))
                for item in requests
            ]
        pending = deque(requests)
        partials: dict[str, _Partial] = {}
        done: dict[str, Completion] = {}
        try:
            while pending or self.engine.has_work:
                while pending and self.engine.num_free_places:
                    admission = self.engine.add_request(pending.popleft())
                    partials[admission.request_id] = _Partial(seed=admission.seed)
                for delta in self.engine.step():
                    if on_delta is not None:
                        on_delta(delta)
                    completion = _extend(partials[delta.request_id], delta)
                    if completion is not None:
                        done[delta.request_id] = completion
        finally:
            for request_id in partials.keys() - done.keys():
                self.engine.abort(request_id)
        return tuple(done[request.request_id] for request in requests)


def _extend(partial: _Partial, delta: RequestDelta) -> Completion | None:
    """Add a delta; return the answer if it was the last."""
    partial.ids_target.extend(delta.ids_target)
    partial.texts.append(delta.text)
    partial.logprobs.extend(delta.logprobs)
    if delta.finish_reason is None:
        return None
    return Completion(
        request_id=delta.request_id,
        ids_target=tuple(partial.ids_target),
        text="".join(partial.texts),
        finish_reason=delta.finish_reason,
        usage=delta.usage,
        seed=partial.seed,
        error=delta.error,
        logprobs=tuple(partial.logprobs),
    )
