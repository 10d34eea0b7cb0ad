"""Seconds of rounds that run kernel by kernel, timed on made-up requests before real ones come.

All made-up requests hold the same blocks, the pool's first ones: what they write there is
overwritten by whoever gets the blocks. Each has a short prompt, so an entry is the cost of rows and
not of long contexts. Nothing is committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from runtime.config import RuntimeConfig
from runtime.config.round_sizes import RoundSize
from runtime.graphs.timing import median
from runtime.kv import KVLayer
from runtime.models import TargetModel
from runtime.spec.packing import Row, pack_rows
from runtime.spec.types import Observation, Proposer, RequestView, SamplingParams

_NUM_WARM_RUNS = 1
_MOST_PROMPT_TOKENS = 16


class EagerTimer:
    """Times the draft and the target's forward of eager rounds."""

    def __init__(
        self,
        target: TargetModel,
        target_kv: Sequence[KVLayer],
        proposer: Proposer,
        config: RuntimeConfig,
        *,
        num_timings: int,
    ) -> None:
        """Compute the made-up prompts; no request runs yet.

        Args:
            target: the model that verifies.
            target_kv: its layers of the pool.
            proposer: who drafts; it has forgotten the made-up requests after `close`.
            config: settings.
            num_timings: timings of each size.
        """
        self._target = target
        self._target_kv = target_kv
        self._proposer = proposer
        self._config = config
        self._num_timings = num_timings
        room = config.max_model_len - config.num_speculative_tokens - 1
        kv_block_size = config.kv_block_size
        self._num_tokens = max(2, min(_MOST_PROMPT_TOKENS, room))
        num_blocks = -(-(self._num_tokens + config.num_speculative_tokens) // kv_block_size)
        self._blocks = tuple(1 + i % (config.num_kv_blocks - 1) for i in range(num_blocks))
        num_ids = config.target_vocab_size
        self._ids = [(7 + 3 * i * i) % num_ids for i in range(self._num_tokens)]
        self._prefill()

    def close(self) -> None:
        """Let the proposer forget the made-up requests."""
        for slot in range(self._config.max_num_requests):
            self._proposer.release(slot)

    def draft_s(self, size: RoundSize) -> float:
        """Return the median seconds of proposing.

        Sync: waits for the device.
        """
        views = [self._view(slot, size.num_drafts) for slot in range(self._real(size))]
        return self._seconds(lambda: self._proposer.propose(views))

    def verify_s(self, size: RoundSize) -> float:
        """Return the median seconds of the target's forward and its choices.

        Sync: waits for the device.
        """
        count = self._real(size)
        left = min(size.num_rows, count * (size.num_drafts + 1)) - count
        rows: list[Row] = []
        for index in range(count):
            num_drafts = min(left, size.num_drafts)
            left -= num_drafts
            start = self._num_tokens - 1
            rows.extend(Row(index, start + j, self._ids[0]) for j in range(num_drafts + 1))
        views = [self._view(slot, size.num_drafts) for slot in range(count)]
        batch = pack_rows(
            rows, views, kv_block_size=self._config.kv_block_size, device=self._config.device
        )

        def run() -> None:
            output = self._target.forward(batch, self._target_kv, self._proposer.aux_layer_ids)
            self._target.greedy_ids(output.hidden_ND)

        return self._seconds(run)

    def _real(self, size: RoundSize) -> int:
        return min(size.batch, self._config.max_num_requests)

    def _view(self, slot: int, num_drafts: int) -> RequestView:
        return RequestView(
            request_id=f"timing-{slot}",
            slot=slot,
            ids_target=self._ids,
            num_prompt_tokens=self._num_tokens,
            params=SamplingParams(),
            block_table=self._blocks,
            num_drafts=num_drafts,
        )

    @torch.inference_mode()
    def _prefill(self) -> None:
        """Show the proposer a state of every made-up request, one request after the other."""
        num_known = self._num_tokens - 1
        for slot in range(self._config.max_num_requests):
            view = self._view(slot, 0)
            batch = pack_rows(
                [Row(0, position, self._ids[position]) for position in range(num_known)],
                [view],
                kv_block_size=self._config.kv_block_size,
                device=self._config.device,
            )
            output = self._target.forward(batch, self._target_kv, self._proposer.aux_layer_ids)
            self._proposer.observe(
                Observation(
                    batch=batch,
                    next_ids_target_N=torch.tensor(self._ids[1:], device=self._config.device),
                    aux_hidden_N=output.aux_hidden_NA,
                    final_hidden_NH=(
                        self._target.final_states(output.hidden_ND)
                        if self._proposer.needs_final_hidden
                        else None
                    ),
                    views=(view,),
                    last_row=(num_known - 1,),
                )
            )

    @torch.inference_mode()
    def _seconds(self, run: Callable[[], object]) -> float:
        device = self._config.device
        timings: list[float] = []
        for index in range(_NUM_WARM_RUNS + self._num_timings):
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if index >= _NUM_WARM_RUNS:
                timings.append(time.perf_counter() - start)
        return max(median(timings), 1e-9)
