"""Engines over tiny models, driven step by step, and a target-only reference without an engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from runtime.config import DRAFT_PROPOSERS, Overrides, RuntimeConfig, resolve_config
from runtime.engine.caches import dynamic_row_settings
from runtime.engine.engine import Engine
from runtime.engine.request import FinishReason, RequestDelta, RequestInput, Usage
from runtime.engine.text import load_tokenizer
from runtime.kv import KVLayer, KVPool
from runtime.loading import LoadedModels
from runtime.spec.factory import DraftParts, make_proposer
from runtime.spec.masks import MaskWish, allowed_rows
from runtime.spec.oracle import OracleScript
from runtime.spec.packing import pack_rows
from runtime.spec.types import (
    Observation,
    Proposal,
    Proposer,
    RequestView,
    SamplingParams,
    SlotTensor,
)
from runtime.spec.verify import VerifyRows, verify
from specctl.contract.manifest import Manifest
from tests.tiny import EOS_ID, TOKENIZER_SIZE, write_tiny_eagle3, write_tiny_target
from tests.tiny_manifest import CPU, load_tiny, tiny_manifest

KV_BLOCK_SIZE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """A tiny target and draft on one device."""

    manifest: Manifest
    models: LoadedModels
    tokenizer: Tokenizer


def make_world(
    directory: Path,
    *,
    draft_positions: int = 512,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> World:
    """Write and load a two-layer target and its draft."""
    target_dir = write_tiny_target(directory / "target", num_layers=2)
    draft_dir = write_tiny_eagle3(
        directory / "draft",
        target_dir,
        boundary_ids=(0, 1, 2),
        max_position_embeddings=draft_positions,
    )
    manifest = tiny_manifest(target_dir, draft_dir)
    return World(
        manifest=manifest,
        models=load_tiny(manifest, device=device, dtype=dtype),
        tokenizer=load_tokenizer(target_dir),
    )


class Recorder:
    """A proposer that notes what passes through another one."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.name = inner.name
        self.aux_layer_ids = inner.aux_layer_ids
        self.needs_final_hidden = inner.needs_final_hidden
        self.num_lookahead_tokens = inner.num_lookahead_tokens
        self.proposals: list[tuple[tuple[str, int, tuple[int, ...]], ...]] = []
        self.observations: list[Observation] = []
        self.released: list[int] = []

    def max_drafts(self, view: RequestView) -> int:
        return self.inner.max_drafts(view)

    def propose(self, views: Sequence[RequestView]) -> Proposal:
        proposal = self.inner.propose(views)
        rows = proposal.ids_target_BG.tolist()
        self.proposals.append(
            tuple(
                (view.request_id, len(view.ids_target), tuple(row[:count]))
                for view, row, count in zip(views, rows, proposal.num_drafts, strict=True)
            )
        )
        return proposal

    def observe(self, observation: Observation) -> None:
        self.observations.append(observation)
        self.inner.observe(observation)

    def release(self, slot: int) -> None:
        self.released.append(slot)
        self.inner.release(slot)

    @property
    def slot_state(self) -> tuple[SlotTensor, ...]:
        return self.inner.slot_state

    def export_slot(self, slot: int) -> Mapping[str, torch.Tensor]:
        return self.inner.export_slot(slot)

    def import_slot(self, view: RequestView, state: Mapping[str, torch.Tensor]) -> None:
        self.inner.import_slot(view, state)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rig:
    """An engine with its parts in reach."""

    engine: Engine
    proposer: Recorder
    draft_kv: tuple[KVLayer, ...]
    config: RuntimeConfig


def make_rig(
    world: World,
    overrides: Overrides,
    *,
    script: OracleScript | None = None,
    proposer: Proposer | None = None,
    with_tokenizer: bool = True,
) -> Rig:
    """Build an engine; small defaults keep pools and batches tiny.

    Args:
        proposer: used instead of the one that the settings name.
    """
    defaults = Overrides(
        device=str(world.models.target.device),
        kv_block_size=KV_BLOCK_SIZE,
        max_num_requests=4,
        max_model_len=128,
    )
    given = {
        name: value for name in _names(Overrides) if (value := getattr(overrides, name)) is not None
    }
    config = resolve_config(world.manifest, replace(defaults, **given))
    models = world.models
    draft = models.draft
    assert draft is not None
    pool = KVPool(
        (*models.target.kv_specs, *draft.kv_specs),
        num_blocks=config.num_kv_blocks,
        kv_block_size=config.kv_block_size,
        dtype=models.target.dtype,
        device=models.target.device,
    )
    draft_kv = pool.layers[len(models.target.kv_specs) :]
    inner = proposer or make_proposer(
        config.proposer,
        device=config.device,
        draft=DraftParts(
            model=draft,
            kv=draft_kv,
            kv_block_size=config.kv_block_size,
            num_slots=config.max_num_requests,
            dynamic_rows=dynamic_row_settings(models, config),
        ),
        script=script if config.proposer == "oracle" else None,
        max_ngram=config.max_ngram,
    )
    recorder = Recorder(inner)
    engine = Engine(
        target=models.target,
        target_kv=pool.layers[: len(models.target.kv_specs)],
        proposer=recorder,
        config=config,
        tokenizer=world.tokenizer if with_tokenizer else None,
    )
    return Rig(engine=engine, proposer=recorder, draft_kv=draft_kv, config=config)


def _names(cls: type[Overrides]) -> Iterator[str]:
    return iter(cls.__dataclass_fields__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """All deltas of one request put together."""

    ids_target: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    usage: Usage
    num_deltas: int


def drive(
    rig: Rig, requests: Sequence[RequestInput], *, arrivals: Mapping[int, int] | None = None
) -> dict[str, Answer]:
    """Run requests to their ends, checking the engine's invariants after every step.

    Args:
        arrivals: index of a request -> step before which it is added; default 0.
    """
    waiting = sorted(range(len(requests)), key=lambda i: (arrivals or {}).get(i, 0))
    deltas: dict[str, list[RequestDelta]] = {request.request_id: [] for request in requests}
    step = 0
    while waiting or rig.engine.has_work:
        while waiting and (arrivals or {}).get(waiting[0], 0) <= step:
            rig.engine.add_request(requests[waiting.pop(0)])
        num_rows = rig.engine.stats().num_rows
        for delta in rig.engine.step():
            assert not deltas[delta.request_id] or (
                deltas[delta.request_id][-1].finish_reason is None
            ), "a delta followed the last one"
            deltas[delta.request_id].append(delta)
        num_rows = rig.engine.stats().num_rows - num_rows
        assert num_rows <= rig.config.max_num_batched_tokens, "the row budget was exceeded"
        rig.engine.check()
        step += 1
        assert step < 5000, "the engine makes no progress"
    return {request_id: join_deltas(parts) for request_id, parts in deltas.items()}


def join_deltas(parts: Sequence[RequestDelta]) -> Answer:
    reason = parts[-1].finish_reason
    assert reason is not None
    return Answer(
        ids_target=tuple(token for part in parts for token in part.ids_target),
        text="".join(part.text for part in parts),
        finish_reason=reason,
        usage=parts[-1].usage,
        num_deltas=len(parts),
    )


def reference_ids(
    world: World, request: RequestInput, *, max_model_len: int = 128
) -> tuple[int, ...]:
    """Decode one request alone, one row at a time after its prefill, with no engine."""
    target = world.models.target
    ids = list(request.prompt_ids_target)
    num_prompt = len(ids)
    end_ids = tuple({*request.stop_ids, *(() if request.ignore_eos else (EOS_ID,))})
    params = replace(request.params, end_ids_target=end_ids)
    limit = max_model_len
    if request.max_tokens is not None:
        limit = min(limit, num_prompt + request.max_tokens)
    kv = fresh_kv(target.kv_specs, num_tokens=limit, like=target.embedding_VD)
    computed = 0
    with torch.inference_mode():
        while len(ids) < limit:
            view = _view(ids, num_prompt, params, limit)
            rows = [(0, position, ids[position]) for position in range(computed, len(ids))]
            batch = pack_rows(rows, [view], kv_block_size=limit, device=target.device)
            hidden = target.forward(batch, kv).hidden_ND
            computed = len(ids)
            no_drafts = Proposal(
                ids_target_BG=torch.zeros((1, 0), dtype=torch.int64, device=target.device),
                num_drafts=(0,),
            )
            allowed: tuple[torch.Tensor, ...] = ()
            if request.masks is not None:
                wish = MaskWish(
                    provider=request.masks,
                    output_ids_target=tuple(ids[num_prompt:]),
                    drafts_target=(),
                )
                allowed = (allowed_rows(wish, target.facts.vocab_size, target.device),)
            last = VerifyRows(views=(view,), first_row=(len(rows) - 1,), allowed=allowed)
            ids.append(verify(target, hidden, last, no_drafts).committed[0][0])
            if ids[-1] in end_ids:
                break
    return tuple(ids[num_prompt:])


def draft_kv_from_scratch(
    world: World, ids_target: Sequence[int], num_positions: int
) -> tuple[KVLayer, ...]:
    """Compute the draft's KV of positions 0..num_positions - 1 in one block, in one pass.

    Args:
        ids_target: all known tokens, one more than positions at least.
    """
    target, draft = world.models.target, world.models.draft
    assert draft is not None
    view = _view(ids_target, len(ids_target), SamplingParams(), num_positions)
    batch = pack_rows(
        [(0, position, ids_target[position]) for position in range(num_positions)],
        [view],
        kv_block_size=num_positions,
        device=target.device,
    )
    kv = fresh_kv(draft.kv_specs, num_tokens=num_positions, like=target.embedding_VD)
    parts = DraftParts(model=draft, kv=kv, kv_block_size=num_positions, num_slots=1)
    name = next(item for item in DRAFT_PROPOSERS if item == draft.facts.algorithm)
    proposer = make_proposer(name, device=target.device, draft=parts)
    target_kv = fresh_kv(target.kv_specs, num_tokens=num_positions, like=target.embedding_VD)
    with torch.inference_mode():
        output = target.forward(batch, target_kv, proposer.aux_layer_ids)
        proposer.observe(
            Observation(
                batch=batch,
                next_ids_target_N=torch.tensor(
                    list(ids_target[1 : num_positions + 1]), device=target.device
                ),
                aux_hidden_N=output.aux_hidden_NA,
                final_hidden_NH=target.final_states(output.hidden_ND),
                views=(view,),
                last_row=(num_positions - 1,),
            )
        )
    return kv


def kv_rows(layer: KVLayer, blocks: Sequence[int], num_positions: int) -> torch.Tensor:
    """Return keys and values of positions 0..num_positions - 1, [2, positions, heads, head_dim]."""
    block_size = layer.k.shape[2]
    slots = [(blocks[p // block_size], p % block_size) for p in range(num_positions)]
    rows = [torch.stack([pool[block, :, at] for block, at in slots]) for pool in (layer.k, layer.v)]
    return torch.stack(rows)


def fresh_kv(specs, *, num_tokens: int, like: torch.Tensor) -> tuple[KVLayer, ...]:  # type: ignore[no-untyped-def]
    """Return cache layers of one block that holds `num_tokens`."""
    pool = KVPool(
        specs, num_blocks=1, kv_block_size=num_tokens, dtype=like.dtype, device=like.device
    )
    return pool.layers


def _view(ids: Sequence[int], num_prompt: int, params: SamplingParams, _length: int) -> RequestView:
    return RequestView(
        request_id="reference",
        slot=0,
        ids_target=ids,
        num_prompt_tokens=num_prompt,
        params=params,
        block_table=(0,),
        num_drafts=0,
    )


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    """Return a prompt without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, TOKENIZER_SIZE, (length,), generator=generator).tolist())
