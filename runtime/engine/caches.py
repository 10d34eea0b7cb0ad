"""The KV pool of an engine, and the proposer that drafts over it."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config import DRAFT_PROPOSERS, RuntimeConfig
from runtime.kv import Allocate, KVLayer, KVPool
from runtime.loading import LoadedModels
from runtime.spec.dynamic_rows import DynamicRowSettings
from runtime.spec.factory import DraftParts, make_proposer
from runtime.spec.oracle import OracleScript
from runtime.spec.script_table import Room
from runtime.spec.types import Proposer


@dataclass(frozen=True, kw_only=True, slots=True)
class Caches:
    """The KV pool of an engine and who drafts over it.

    Args:
        pool: the target's layers, then the draft's.
        num_target_layers: of the pool.
        proposer: holds the draft's layers.
    """

    pool: KVPool
    num_target_layers: int
    proposer: Proposer

    @property
    def target_kv(self) -> tuple[KVLayer, ...]:
        """The target's layers."""
        return self.pool.layers[: self.num_target_layers]

    @property
    def draft_kv(self) -> tuple[KVLayer, ...]:
        """The draft's layers; none where no draft runs."""
        return self.pool.layers[self.num_target_layers :]


def make_caches_and_proposer(
    models: LoadedModels, config: RuntimeConfig, *, script: OracleScript | None = None
) -> tuple[tuple[KVLayer, ...], Proposer]:
    """Return the target's layers of a new pool and the proposer with the draft's.

    Raises:
        DiagnosticError: SD807, the proposer lacks its parts.
    """
    made = make_caches(models, config, script=script)
    return made.target_kv, made.proposer


def make_caches(
    models: LoadedModels,
    config: RuntimeConfig,
    *,
    script: OracleScript | None = None,
    allocate: Allocate | None = None,
) -> Caches:
    """Allocate the KV pool and make the proposer over it.

    Args:
        models: target and, where `config.proposer` runs one, draft.
        config: settings.
        script: for the `oracle` proposer.
        allocate: makes the pool's tensors, where a transport must reach them.

    Raises:
        DiagnosticError: SD807, the proposer lacks its parts.
    """
    draft = models.draft if config.proposer in DRAFT_PROPOSERS else None
    target_specs = models.target.kv_specs
    pool = KVPool(
        (*target_specs, *(draft.kv_specs if draft is not None else ())),
        num_blocks=config.num_kv_blocks,
        kv_block_size=config.kv_block_size,
        dtype=config.dtype,
        device=config.device,
        allocate=allocate,
    )
    parts = None
    if draft is not None:
        parts = DraftParts(
            model=draft,
            kv=pool.layers[len(target_specs) :],
            kv_block_size=config.kv_block_size,
            num_slots=config.max_num_requests + 1,  # the last one for padding
            dynamic_rows=dynamic_row_settings(models, config),
        )
    proposer = make_proposer(
        config.proposer,
        device=config.device,
        draft=parts,
        script=script,
        max_ngram=config.max_ngram,
        room=Room(
            num_slots=config.max_num_requests + 1,
            max_length=config.max_model_len,
            max_drafts=config.num_speculative_tokens,
        ),
    )
    return Caches(pool=pool, num_target_layers=len(target_specs), proposer=proposer)


def dynamic_row_settings(models: LoadedModels, config: RuntimeConfig) -> DynamicRowSettings | None:
    """Return which rows may join the draft's reduced head; None: none may."""
    if not config.dynamic_rows and not config.dynamic_rank:
        return None
    return DynamicRowSettings(
        full_head_VH=models.target.reachable_head,
        num_rows=config.dynamic_rows,
        rank=config.dynamic_rank,
    )
