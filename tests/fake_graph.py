"""Captured rounds without CUDA: the round runs eagerly, its outcome is kept until it is read.

A buffer is poisoned once it was read, and so are the padding slot and block 0 before every round,
so that a stale read or a padding row that reaches a request changes an answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.batch import PreparedBatch
from runtime.config import DRAFT_PROPOSERS, Overrides, RuntimeConfig, dtype_name, resolve_config
from runtime.config.cost_table import CostTable
from runtime.config.round_sizes import packed_row_counts
from runtime.engine.build import build_engine
from runtime.engine.caches import make_caches
from runtime.engine.device_rounds import MakeRunner, is_ragged, round_menu
from runtime.engine.engine import Engine
from runtime.engine.llm import LLM
from runtime.engine.prefill_costs import PrefillCosts
from runtime.engine.text import load_tokenizer
from runtime.graphs.prefill import PrefillShape
from runtime.graphs.round import SPLIT_BUFFER, DeviceRound, context_buckets
from runtime.graphs.state import RoundShape
from runtime.kernels import attention
from runtime.spec.entries import Entries
from runtime.spec.oracle import OracleScript
from tests.engine_harness import KV_BLOCK_SIZE, World
from tests.linear_costs import linear_costs
from tests.tiny_agreeing import write_agreeing_pair
from tests.tiny_manifest import CPU, load_tiny

FIRST_CONTEXT = 32
BUCKETS = (8, 24, 40)  # rows of prefills


class FakeGraph:
    """A `RoundRunner` that notes the shapes it ran; of a split round the second half."""

    def __init__(self, round_: DeviceRound, config: RuntimeConfig) -> None:
        menu = round_menu(config)
        self.batches = menu.batches
        self.is_ragged = is_ragged(config)
        self.draft_counts = menu.draft_counts if self.is_ragged else menu.draft_counts[-1:]
        self.contexts = context_buckets(config.max_model_len, first=FIRST_CONTEXT)
        self.round = round_
        self.shapes: list[RoundShape] = []
        self.ready: set[RoundShape] = set()
        self.num_unread_at_launch: list[int] = []
        self.prefills: list[tuple[PrefillShape, int, int]] = []  # of a prompt: shape, start, rows
        self.num_prefills = 0
        self.num_unread_at_prefill: list[int] = []
        self.prefill_shapes = () if round_.prefill is None else round_.prefill.shapes
        self._tokens: list[int] | None = None
        self._outcomes: list[list[list[int]] | None] = [None] * (SPLIT_BUFFER + 1)
        self.num_settled = 0
        self._chances: list[list[list[float]]] = [[]] * (SPLIT_BUFFER + 1)
        self._drafts: list[list[int]] | None = None
        self._counts: list[list[int]] = [[]] * (SPLIT_BUFFER + 1)

    def packed_row_counts(self, batch: int, num_drafts: int) -> tuple[int, ...]:
        return packed_row_counts(batch, num_drafts) if self.is_ragged else ()

    def launch(self, shape: RoundShape, buffer: int) -> None:
        assert shape.batch in self.batches
        assert shape.num_packed_rows is None or (
            shape.num_packed_rows in self.packed_row_counts(shape.batch, shape.num_drafts)
        )
        assert shape.num_drafts in self.draft_counts
        assert shape.context in self.contexts
        assert shape.is_split == (buffer == SPLIT_BUFFER) == (shape in self.ready)
        if not shape.is_split:
            unread = self._outcomes[:SPLIT_BUFFER]
            self.num_unread_at_launch.append(sum(item is not None for item in unread))
        self.shapes.append(shape)
        poison_padding(self.round)
        with contiguous_batches():
            self.round.run(shape)
        self._outcomes[buffer] = self.round.state.output_BX[
            : shape.batch, : shape.width + 1
        ].tolist()
        self._chances[buffer] = self.round.state.confidence_BG[: shape.batch].tolist()
        self._counts[buffer] = self.round.state.num_counted_B[: shape.batch].tolist()
        self.round.state.output_BX.fill_(-7)
        self.round.state.num_counted_B.fill_(10**6)
        self.round.state.confidence_BG.fill_(float("nan"))
        if shape.is_split:
            self.spoil_split()

    def launch_prefill(self, shape: PrefillShape) -> None:
        assert shape in self.prefill_shapes
        assert self._tokens is None, "a prefill was not read"
        prefill = self.round.prefill
        assert prefill is not None
        scalars = prefill.inputs_X[: 4 * shape.num_places].view(4, -1)
        for slot, start, num_rows, _ in scalars.T.tolist():
            if slot != self.round.state.padding_slot:
                self.prefills.append((shape, start, num_rows))
        self.num_prefills += 1
        unread = self._outcomes[:SPLIT_BUFFER]
        self.num_unread_at_prefill.append(sum(item is not None for item in unread))
        poison_padding(self.round)
        with contiguous_batches():
            self.round.run_prefill(shape)
        self._tokens = prefill.output_R[: shape.num_places].tolist()
        prefill.inputs_X.fill_(10**6)  # no later prefill may read them
        prefill.output_R.fill_(-7)

    def read_prefill(self, num_prompts: int) -> list[int]:
        tokens, self._tokens = self._tokens, None
        assert tokens is not None, "a prefill was read twice"
        return tokens[:num_prompts]

    def make_ready(self, shape: RoundShape) -> None:
        assert shape.is_split
        assert self.round.split is not None
        self.ready.add(shape)
        self.round.split.write_batch((), ())

    def launch_drafts(self, shape: RoundShape) -> None:
        assert shape in self.ready, "a split round was not made ready"
        assert shape.is_split
        assert shape.batch in self.batches
        assert (shape.num_drafts, shape.context) == (self.draft_counts[-1], self.contexts[-1])
        assert self._drafts is None, "drafts were not read"
        poison_padding(self.round)
        with contiguous_batches():
            self.round.run_drafts(shape)
        assert self.round.split is not None
        kept = self.round.split.drafts_BG[: shape.batch, : shape.num_drafts]
        self._drafts = kept.tolist()

    def read_drafts(self, num_requests: int) -> list[list[int]]:
        drafts, self._drafts = self._drafts, None
        assert drafts is not None, "drafts were read twice"
        return drafts[:num_requests]

    def spoil_split(self) -> None:
        """Forbid every id and change every draft: what a second half left is of no use."""
        assert self.round.split is not None
        self.round.split.words_BWX.fill_(0)
        self.round.split.host_words_BWX.fill_(0)
        self.round.split.drafts_BG.fill_(1)

    def settle(self) -> None:
        self.num_settled += 1

    def read(self, buffer: int, num_requests: int) -> list[list[int]]:
        outcome, self._outcomes[buffer] = self._outcomes[buffer], None
        assert outcome is not None, "a buffer was read twice"
        return outcome[:num_requests]

    def counted(self, buffer: int, num_requests: int) -> list[int] | None:
        return self._counts[buffer][:num_requests] if self.round.is_sparse else None

    def confidence(self, buffer: int, num_requests: int) -> list[list[float]]:
        if not self.round.has_confidence:
            return [[]] * num_requests
        return self._chances[buffer][:num_requests]


@contextmanager
def contiguous_batches() -> Iterator[None]:
    """Check what kernels take for granted: they read a batch by address, whatever its strides."""

    def checked(*args: Any, **kwargs: Any) -> torch.Tensor:
        batch = next(item for item in args if isinstance(item, PreparedBatch))
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, torch.Tensor):
                assert value.is_contiguous(), f"{field.name} has strides {value.stride()}"
                assert value.dim() != 1 or value.stride() == (1,), f"{field.name}: a stride"
        return twin(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        twin = attention.paged_attention_twin
        patch.setattr(attention, "paged_attention_twin", checked)
        yield


def poison_padding(round_: DeviceRound) -> None:
    """Put NaN wherever only padding may look: block 0 and the padding slot's feedback."""
    draft_kv = getattr(round_.draft, "_kv", ())
    for layer in (*round_.target_kv, *draft_kv):
        layer.k[0].fill_(float("nan"))
        layer.v[0].fill_(float("nan"))
    entries = getattr(round_.draft, "_entries", None)
    if isinstance(entries, Entries):
        entries._feedback_SH[-1] = float("nan")
        entries._head_input_SH[-1] = float("nan")


def make_agreeing_world(
    directory: Path, *, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> World:
    """Load a draft that is often right, so that every count of accepted drafts occurs."""
    pair = write_agreeing_pair(directory)
    manifest = pair.manifest()
    return World(
        manifest=manifest,
        models=load_tiny(manifest, device=device, dtype=dtype),
        tokenizer=load_tokenizer(pair.target),
    )


def eager_twin(llm: LLM) -> Engine:
    """Return an eager engine over the same models and caches, as one is warmed up with."""
    caches = llm.caches
    assert caches is not None
    return Engine(
        target=llm.models.target,
        target_kv=caches.target_kv,
        proposer=caches.proposer,
        config=replace(llm.config, enable_prefix_cache=False),
    )


def make_llm(
    world: World,
    *,
    is_eager: bool = False,
    make_runner: MakeRunner | None = None,
    script: OracleScript | None = None,
    costs: CostTable | None = None,
    prefill_costs: PrefillCosts | None = None,
    **overrides: Any,
) -> tuple[LLM, list[FakeGraph]]:
    """Return an LLM over the world's models.

    Args:
        is_eager: runs every round eagerly on a CPU, and as `graphs` says on CUDA.
        make_runner: used instead of a fake graph.
        script: of the oracle, or beside a draft.
        costs: what draft counts are chosen by; None: a row costs the same everywhere.
        prefill_costs: decide how prompts that came at once run.
    """
    given = Overrides(
        device=str(world.models.target.device),
        dtype=dtype_name(world.models.target.dtype),
        kv_block_size=KV_BLOCK_SIZE,
        max_num_requests=4,
        max_model_len=128,
        graphs="auto",
        prefill_buckets=BUCKETS,
    )
    config = resolve_config(world.manifest, replace(given, **overrides))
    made: list[FakeGraph] = []

    def make_fake(round_: DeviceRound, config: RuntimeConfig) -> FakeGraph:
        made.append(FakeGraph(round_, config))
        return made[-1]

    draft = world.models.draft if config.proposer in DRAFT_PROPOSERS else None
    models = replace(world.models, draft=draft)
    caches = make_caches(models, config, script=script)
    engine = build_engine(
        models,
        config,
        tokenizer=world.tokenizer,
        caches=caches,
        make_runner=None if is_eager else make_runner or make_fake,
        costs=costs or linear_costs(round_menu(config)),
        prefill_costs=prefill_costs,
    )
    llm = LLM(
        engine=engine,
        caches=caches,
        models=world.models,
        manifest=world.manifest,
        tokenizer=world.tokenizer,
        diagnostics=(),
    )
    return llm, made


def ids_of(answers: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """Return the ids of completions by request."""
    return {answer.request_id: answer.ids_target for answer in answers}
