"""The settings as values: what a user may give, what an engine runs with, and the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.manifest import VerificationMode

ProposerName = Literal[
    "none",
    "eagle",
    "eagle3",
    "peagle",
    "mtp",
    "dflash",
    "dflash2",
    "dspark",
    "ngram",
    "oracle",
]
GraphsMode = Literal["auto", "rounds", "off"]
LengthMode = Literal["static", "cap-accept", "compact"]
StageMode = Literal["whole", "processes", "in-process"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
"""`auto` takes each file as it is; `safetensors` refuses other files; `dummy` reads no weight."""
ConfigOrigin = Literal["given", "manifest", "default", "derived"]

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DEVICE_DTYPES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("float32", "bfloat16"),
    "cuda": ("bfloat16", "float16"),
}
DRAFT_PROPOSERS: frozenset[ProposerName] = frozenset(
    {"eagle", "eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark"}
)
"""Proposers that run a draft model."""

DEFAULT_KV_BLOCK_SIZE = 16
DEFAULT_MAX_NUM_REQUESTS = 32
DEFAULT_MAX_NUM_WAITING = 1024
DEFAULT_NUM_SPECULATIVE_TOKENS = 4
DEFAULT_MAX_NGRAM = 4
DEFAULT_GRAPHS: GraphsMode = "auto"
DEFAULT_PREFILL_BUCKETS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DEFAULT_LENGTH_MODE: LengthMode = "static"
DEFAULT_RANK_TIMEOUT_S = 120.0
DEFAULT_BATCHED_TOKENS: Mapping[str, int] = {"cpu": 512, "cuda": 4096}
DEFAULT_MEMORY_FRACTION: Mapping[str, float] = {"cpu": 0.4, "cuda": 0.85}


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, as in `DTYPES`: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """What the user gave; None: not given. Meanings and units are those of `RuntimeConfig`.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:<index>`.
        dtype: a key of `DTYPES`.
        kv_memory_fraction: share of the device memory that is free before loading which weights
            and KV may take, above 0 and at most 1.
        force_anchor_layout: `sampled` or `conditioning`: reads slot 0 of a block draft as that,
            whatever the manifest says; for diagnosis.
        stages_in_process: run every stage in this process; None: where they share one GPU.
    """

    device: str | None = None
    dtype: str | None = None
    kv_block_size: int | None = None
    num_kv_blocks: int | None = None
    kv_memory_fraction: float | None = None
    max_num_requests: int | None = None
    max_num_waiting: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk_size: int | None = None
    max_model_len: int | None = None
    num_speculative_tokens: int | None = None
    proposer: str | None = None
    max_ngram: int | None = None
    batch_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    enable_prefix_cache: bool | None = None
    graphs: str | None = None
    verification: str | None = None
    length_mode: str | None = None
    cost_table: str | None = None
    dynamic_rows: int | None = None
    dynamic_rank: int | None = None
    force_anchor_layout: str | None = None
    tensor_parallel: int | None = None
    draft_tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    stage_layers: tuple[int, ...] | None = None
    stages_in_process: bool | None = None
    load_format: str | None = None
    rank_timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeConfig:
    """Every setting of an engine.

    Args:
        dtype: of weights, activations and KV.
        kv_block_size: tokens of a KV block.
        num_kv_blocks: blocks of the pool, the padding block included.
        max_num_requests: requests that run at once.
        max_num_waiting: requests that wait at once; more are refused.
        max_num_batched_tokens: rows of one target forward; a decoding request takes one more
            than it has drafts.
        prefill_chunk_size: prompt tokens that one request computes in one step at most.
        max_model_len: tokens of a request, prompt and output together.
        num_speculative_tokens: drafts per round and request.
        draft_width: slots in one draft forward of that many drafts; 0 without a draft model.
        proposer: who makes drafts.
        max_ngram: longest suffix that the ngram proposer looks up.
        batch_buckets: batch sizes that have their own round shape.
        prefill_buckets: row counts of prefills that are captured beside the rounds: the prompts of
            greedy requests that fit, alone in their step; empty: every prefill is eager.
            More rows than a step may have are left out, and sizes that memory does not hold.
        enable_prefix_cache: whether prompts reuse KV of earlier ones.
        graphs: `auto` captures whole rounds and prefills as CUDA graphs where device and proposer
            allow it, `rounds` the rounds only, `off` runs everything kernel by kernel; the tokens
            are the same.
        length_mode: `static` gives every request `num_speculative_tokens` drafts; `compact` chooses
            a number for each from measured acceptance and costs, and packs the rows to verify;
            `cap-accept` chooses the same but drafts and verifies all, and only accepts no more
            than chosen: what the choice costs in accept length, without what it saves.
        cost_table: file of measured costs; None: next to the manifest. Read by the modes that
            choose only.
        dynamic_rows: ids outside a token map that each request's own text brings back into the
            draft's choice, the newest so many; greedy drafts of a head shared with the target only.
        dynamic_rank: dimensions of the projection of the head that brings back further ids; 0: none
            are.
        tensor_parallel: ranks that the target is split over; KV heads and blocks are those of one.
        draft_tensor_parallel: the same number, or 1: the draft is whole on every rank.
        pipeline_parallel: stages that the target's layers are spread over.
        stage_layers: target layers of each stage; empty when there is one.
        stage_mode: `whole`: one stage; `processes`: a process for each, this one the last;
            `in-process`: one after the other in this process.
        load_format: `auto`, `safetensors`, or `dummy`, which reads no weight.
        rank_timeout_s: that a stage or rank waits for the next word of another one.
        verification: how drafts of sampled requests are decided about.
        target_vocab_size: rows of the target's embedding.
        eos_ids_target: target ids that end a request.
        origins: field -> where its value comes from.
        diagnostics: warnings and infos about the settings.
    """

    device: torch.device
    dtype: torch.dtype
    kv_block_size: int
    num_kv_blocks: int
    max_num_requests: int
    max_num_waiting: int
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_model_len: int
    num_speculative_tokens: int
    draft_width: int
    proposer: ProposerName
    max_ngram: int
    batch_buckets: tuple[int, ...]
    enable_prefix_cache: bool
    graphs: GraphsMode
    verification: VerificationMode
    target_vocab_size: int
    eos_ids_target: tuple[int, ...]
    origins: Mapping[str, ConfigOrigin]
    diagnostics: tuple[Diagnostic, ...]
    prefill_buckets: tuple[int, ...] = DEFAULT_PREFILL_BUCKETS
    length_mode: LengthMode = DEFAULT_LENGTH_MODE
    cost_table: str | None = None
    dynamic_rows: int = 0
    dynamic_rank: int = 0
    tensor_parallel: int = 1
    draft_tensor_parallel: int = 1
    pipeline_parallel: int = 1
    stage_layers: tuple[int, ...] = ()
    stage_mode: StageMode = "whole"
    load_format: LoadFormat = "auto"
    rank_timeout_s: float = DEFAULT_RANK_TIMEOUT_S

    def draft_width_of(self, num_drafts: int) -> int:
        """Return the slots in the draft forward of a round with fewer drafts, 0 without drafts."""
        if num_drafts == 0:
            return 0
        fewer = self.num_speculative_tokens - num_drafts
        return min(self.draft_width, max(1, self.draft_width - fewer))
