"""CUDA graphs of rounds and prefills: capture at start-up, replay, and outcomes read a round late.

Lifecycle: graphs, their memory pool and every tensor that they read or write live as long as the
engine; `flush_cache` clears names only and never reaches them. Captures and warm-up runs have
padding requests only, so they alter nothing real. Graphs share one pool: they run one after the
other on one stream, and nothing in the pool outlives a replay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from runtime.batch import RoundKind
from runtime.config.round_sizes import packed_row_counts
from runtime.graphs.marks import new_mark
from runtime.graphs.outcomes import OutcomeBuffers
from runtime.graphs.prefill import PrefillShape
from runtime.graphs.recorder import Recorder, prefill_seconds
from runtime.graphs.round import NUM_BUFFERS, SPLIT_BUFFER, DeviceRound
from runtime.graphs.state import RoundShape
from runtime.kernels.outcomes import OutcomeTensors
from specctl.contract.diagnostics import Diagnostic, diagnose

logger = logging.getLogger(__name__)

KINDS: tuple[RoundKind, ...] = get_args(RoundKind)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphReport:
    """What captured graphs cost.

    Args:
        num_graphs: captured graphs; those of split rounds come later, when they are asked for.
        capture_s: seconds that capturing took, warm-up and kernel compilation included.
        memory_bytes: device memory that it took.
        skipped_batches: batch sizes whose graphs did not fit into device memory.
        skipped_prefill_rows: numbers of prefill rows whose graphs did not.
        num_warm_steps: eager steps that were run afterwards, so that no request waits for kernels.
        warm_up_s: seconds that the warm-up took, kernel compilation included.
    """

    num_graphs: int = 0
    capture_s: float = 0.0
    memory_bytes: int = 0
    skipped_batches: tuple[int, ...] = ()
    skipped_prefill_rows: tuple[int, ...] = ()
    num_warm_steps: int = 0
    warm_up_s: float = 0.0

    def problems(self) -> tuple[Diagnostic, ...]:
        """Return SD841 when not all sizes were captured."""
        skipped = (("batches", self.skipped_batches), ("prefill rows", self.skipped_prefill_rows))
        return tuple(
            diagnose(
                "SD841",
                where="--graphs",
                message=f"graphs for {what} of {', '.join(map(str, sizes))} do not fit into device "
                "memory",
                expected="memory for all sizes",
                found=f"memory for {self.num_graphs} graphs",
            )
            for what, sizes in skipped
            if sizes
        )


class GraphSet:
    """The captured rounds of one engine; a `RoundRunner`."""

    def __init__(
        self,
        round_: DeviceRound,
        *,
        batches: Sequence[int],
        draft_counts: Sequence[int],
        contexts: Sequence[int],
        is_ragged: bool = False,
        kinds: Sequence[RoundKind] = KINDS,
    ) -> None:
        """Capture every combination of sizes; batch sizes that do not fit are left out.

        Args:
            round_: what to capture; its state holds padding requests only.
            batches: requests, ascending.
            draft_counts: drafts of each request, ascending.
            contexts: bounds of positions, ascending.
            is_ragged: whether rounds with packed rows are captured beside the dense ones.
            kinds: ways to choose tokens; rounds of rejection mode are dense.
        """
        device = round_.state.device
        assert device.type == "cuda", "only CUDA captures graphs"
        self.draft_counts = tuple(draft_counts)
        self.contexts = tuple(contexts)
        self._is_ragged = is_ragged
        self._device = device
        self._split = round_.split
        self._prefill = round_.prefill
        num_places = 0 if self._prefill is None else self._prefill.output_R.shape[0]
        self._pinned_tokens = torch.zeros(num_places, dtype=torch.int64, pin_memory=True)
        self._tokens_mark = new_mark(device)
        num_buffers = NUM_BUFFERS if self._split is None else SPLIT_BUFFER + 1
        self._outcomes = OutcomeBuffers(
            OutcomeTensors(
                output_BX=round_.state.output_BX,
                num_counted_B=round_.state.num_counted_B if round_.is_sparse else None,
                confidence_BG=round_.state.confidence_BG if round_.has_confidence else None,
            ),
            num_buffers=num_buffers,
        )
        num_rows, max_drafts = round_.state.confidence_BG.shape
        self._pinned_drafts = torch.zeros(
            (num_rows, max(1, max_drafts)), dtype=torch.int64, pin_memory=True
        )
        self._drafts_mark, self._num_split_drafts = new_mark(device), 0
        shapes = [
            shape
            for batch in reversed(batches)  # the largest first: smaller ones reuse its memory
            for shape in self._shapes(batch, kinds)
        ]
        free_before, _ = torch.cuda.mem_get_info(device)
        start = time.perf_counter()
        self._recorder = Recorder(round_)
        prefill_shapes = () if self._prefill is None else self._prefill.shapes
        self._graphs, self._prefills = self._recorder.record(shapes, prefill_shapes)
        self.prefill_s = prefill_seconds(self._prefill, self._prefills, device)
        captured = {shape.batch for shape in self._graphs}
        self.batches = tuple(batch for batch in batches if batch in captured)
        free_after, _ = torch.cuda.mem_get_info(device)
        self.report = GraphReport(
            num_graphs=sum(len(halves) for halves in self._graphs.values()) + len(self._prefills),
            capture_s=time.perf_counter() - start,
            memory_bytes=max(0, free_before - free_after),
            skipped_batches=tuple(batch for batch in batches if batch not in captured),
            skipped_prefill_rows=self._skipped_prefill_rows(),
        )

    @property
    def prefill_shapes(self) -> tuple[PrefillShape, ...]:
        """Prefills that were captured; see `RoundRunner`."""
        return tuple(self._prefills)

    def launch_prefill(self, shape: PrefillShape) -> None:
        """Replay a prefill and copy its tokens to the host; see `RoundRunner`."""
        assert self._prefill is not None, "a prefill has a state of its own"
        self._prefills[shape].replay()
        self._pinned_tokens.copy_(self._prefill.output_R, non_blocking=True)
        self._tokens_mark.record()

    def read_prefill(self, num_prompts: int) -> list[int]:
        """Wait for the prefill's tokens; see `RoundRunner`."""
        self._tokens_mark.synchronize()
        tokens: list[int] = self._pinned_tokens[:num_prompts].tolist()
        return tokens

    def _skipped_prefill_rows(self) -> tuple[int, ...]:
        if self._prefill is None:
            return ()
        skipped = {shape.num_rows for shape in self._prefill.shapes if shape not in self._prefills}
        return tuple(sorted(skipped))

    def packed_row_counts(self, batch: int, num_drafts: int) -> tuple[int, ...]:
        """Return the row counts of its ragged rounds; see `RoundRunner`."""
        return packed_row_counts(batch, num_drafts) if self._is_ragged else ()

    def make_ready(self, shape: RoundShape) -> None:
        """Capture a split round that was never launched before; see `RoundRunner`.

        Without memory for its graphs its halves run kernel by kernel.
        """
        if shape in self._graphs:
            return
        assert self._split is not None, "a split round has a state of its own"
        start = time.perf_counter()
        self._split.write_batch((), ())
        graphs, _ = self._recorder.record([shape])
        self._graphs[shape] = graphs.get(shape, ())
        seconds = time.perf_counter() - start
        logger.info("captured %d graphs of a round with masks in %.2f s", len(graphs), seconds)

    def _run(self, shape: RoundShape, half: int) -> None:
        if self._graphs[shape]:
            self._graphs[shape][half].replay()
        else:
            self._recorder.run(shape, half)

    def launch(self, shape: RoundShape, buffer: int) -> None:
        """Replay a round and copy its outcome to the host; see `RoundRunner`."""
        self._run(shape, -1)
        self._outcomes.store(buffer, shape.batch, shape.width + 1)

    def launch_drafts(self, shape: RoundShape) -> None:
        """Replay the first half of a split round and copy its drafts; see `RoundRunner`."""
        assert self._split is not None, "a split round has a state of its own"
        self._run(shape, 0)
        drafts_BG = self._split.drafts_BG[: shape.batch]
        self._pinned_drafts[: shape.batch].copy_(drafts_BG, non_blocking=True)
        self._drafts_mark.record()
        self._num_split_drafts = shape.num_drafts

    def read_drafts(self, num_requests: int) -> list[list[int]]:
        """Wait for the drafts of a split round; see `RoundRunner`."""
        self._drafts_mark.synchronize()
        drafts_BG = self._pinned_drafts[:num_requests, : self._num_split_drafts]
        rows: list[list[int]] = drafts_BG.tolist()
        return rows

    def _shapes(self, batch: int, kinds: Sequence[RoundKind]) -> list[RoundShape]:
        """Return the whole rounds of a batch size; split ones are captured when they are asked for.

        Few engines ever see a grammar, and split rounds would be a third of all graphs.
        """
        return [
            RoundShape(
                batch=batch,
                num_drafts=num_drafts,
                context=context,
                num_packed_rows=num_rows,
                kind=kind,
            )
            for kind in kinds
            for num_drafts in reversed(self.draft_counts)
            for num_rows in (None, *reversed(self.packed_row_counts(batch, num_drafts)))
            if kind != "rejection" or num_rows is None
            for context in reversed(self.contexts if kind == "greedy" else self.contexts[-1:])
        ]

    def settle(self) -> None:
        """Wait until all that was launched has run; see `RoundRunner`."""
        torch.cuda.current_stream(self._device).synchronize()

    def read(self, buffer: int, num_requests: int) -> list[list[int]]:
        """Wait for a buffer's round and return its outcome; see `RoundRunner`."""
        return self._outcomes.read(buffer, num_requests)

    def counted(self, buffer: int, num_requests: int) -> list[int] | None:
        """Return the drafts that counted in a buffer that was read; see `RoundRunner`."""
        return self._outcomes.counted(buffer, num_requests)

    def confidence(self, buffer: int, num_requests: int) -> list[list[float]]:
        """Return the draft's chances in a buffer that was read; see `RoundRunner`."""
        return self._outcomes.confidence(buffer, num_requests)
