"""Settles every setting in the order in which they depend on each other.

Precedence: given > manifest > default; a *derived* value follows from other settings or memory.
Nothing is clamped: a value outside its range is SD832, one without effect SD805.
"""

from __future__ import annotations

from typing import get_args

import torch

from runtime.config.devices import settle_device, settle_dtype
from runtime.config.ledger import Ledger
from runtime.config.load_format import settle_load_format
from runtime.config.memory import affordable_blocks, memory_budget, settle_lengths
from runtime.config.parallel import refuse_over_ranks, settle_ranks
from runtime.config.reduced_head import settle_dynamic_rows
from runtime.config.speculation import (
    check_draft_context,
    draft_width,
    refuse_wide_rounds,
    settle_length_mode,
    settle_proposer,
)
from runtime.config.stages import settle_rank_timeout, settle_staged_graphs, settle_stages
from runtime.config.values import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_GRAPHS,
    DEFAULT_KV_BLOCK_SIZE,
    DEFAULT_MAX_NGRAM,
    DEFAULT_MAX_NUM_REQUESTS,
    DEFAULT_MAX_NUM_WAITING,
    DEFAULT_PREFILL_BUCKETS,
    DRAFT_PROPOSERS,
    GraphsMode,
    Overrides,
    RuntimeConfig,
)
from specctl.contract.manifest import Manifest, VerificationMode


def resolve_config(
    manifest: Manifest, overrides: Overrides | None = None, *, free_bytes: int | None = None
) -> RuntimeConfig:
    """Settle every setting.

    Args:
        manifest: facts of target and draft.
        overrides: what the user gave.
        free_bytes: memory free on the device before loading; None asks the device.

    Raises:
        DiagnosticError: SD804 (KV budget), SD806 and SD807 (proposer and its width), SD809 (dtype),
            SD830 (device), SD832 (range), SD850 to SD852 (stages, ranks), SD857 (load format), all
            findings together.
    """
    ledger = Ledger(overrides or Overrides())
    device = settle_device(ledger)
    dtype = settle_dtype(ledger, manifest, device)
    proposer, gamma = settle_proposer(ledger, manifest)
    tensor_parallel, draft_tensor_parallel = settle_ranks(ledger, manifest, proposer)
    refuse_over_ranks(ledger, tensor_parallel)
    staged = settle_stages(ledger, manifest, device, tensor_parallel=tensor_parallel)
    load_format = settle_load_format(ledger)
    ledger.raise_errors()
    max_num_requests = ledger.pick("max_num_requests", DEFAULT_MAX_NUM_REQUESTS)
    num_rows = _settle_rows(ledger, device, max_num_requests, gamma)
    kv_block_size = ledger.pick("kv_block_size", DEFAULT_KV_BLOCK_SIZE)
    num_affordable_blocks = affordable_blocks(
        manifest,
        dtype,
        kv_block_size=kv_block_size,
        with_draft=proposer in DRAFT_PROPOSERS,
        budget_bytes=memory_budget(ledger, device, free_bytes),
        num_ranks=tensor_parallel,
        shares_memory=device.type == "cpu",
        stages=() if device.type == "cpu" or staged.mode != "processes" else staged.stages,
    )
    max_model_len, num_kv_blocks = settle_lengths(
        ledger,
        manifest,
        kv_block_size=kv_block_size,
        max_num_requests=max_num_requests,
        num_affordable_blocks=num_affordable_blocks,
    )
    refuse_wide_rounds(ledger, gamma, max_model_len)
    graphs = settle_staged_graphs(ledger, _settle_graphs(ledger), staged.mode)
    verification = _settle_verification(ledger, manifest)
    dynamic_rows, dynamic_rank = settle_dynamic_rows(ledger, manifest, proposer)
    length_mode = settle_length_mode(ledger, gamma)
    ledger.raise_errors()
    check_draft_context(ledger, manifest, proposer, max_model_len)
    target, buckets = manifest.target, manifest.graphs.batch_buckets
    return RuntimeConfig(
        device=device,
        dtype=dtype,
        kv_block_size=kv_block_size,
        num_kv_blocks=num_kv_blocks,
        max_num_requests=max_num_requests,
        max_num_waiting=ledger.pick("max_num_waiting", DEFAULT_MAX_NUM_WAITING),
        max_num_batched_tokens=num_rows,
        prefill_chunk_size=ledger.pick("prefill_chunk_size", num_rows, origin="derived"),
        max_model_len=max_model_len,
        num_speculative_tokens=gamma,
        draft_width=ledger.note("draft_width", draft_width(manifest, proposer, gamma), "derived"),
        proposer=proposer,
        max_ngram=ledger.pick("max_ngram", DEFAULT_MAX_NGRAM),
        batch_buckets=_settle_batches(ledger, buckets, max_num_requests),
        prefill_buckets=_settle_prefills(ledger, graphs),
        enable_prefix_cache=ledger.pick("enable_prefix_cache", True),
        graphs=graphs,
        verification=verification,
        length_mode=length_mode,
        cost_table=ledger.pick("cost_table", manifest.graphs.cost_table, origin="manifest"),
        dynamic_rows=dynamic_rows,
        dynamic_rank=dynamic_rank,
        tensor_parallel=tensor_parallel,
        draft_tensor_parallel=draft_tensor_parallel,
        pipeline_parallel=len(staged.stages),
        stage_layers=staged.layers,
        stage_mode=staged.mode,
        load_format=load_format,
        rank_timeout_s=settle_rank_timeout(ledger, staged.mode),
        target_vocab_size=ledger.note("target_vocab_size", target.vocab_size, "manifest"),
        eos_ids_target=ledger.note("eos_ids_target", target.eos_token_ids, "manifest"),
        origins=ledger.origins,
        diagnostics=tuple(ledger.found),
    )


def _settle_graphs(ledger: Ledger) -> GraphsMode:
    """Return whether rounds are captured where that is possible."""
    given = ledger.pick("graphs", DEFAULT_GRAPHS)
    modes: tuple[GraphsMode, ...] = get_args(GraphsMode)
    mode = next((item for item in modes if item == given), None)
    if mode is None:
        expected = " or ".join(modes)
        ledger.refuse("SD832", "graphs", f"`graphs` is {given}", expected=expected, found=given)
        return "off"
    return mode


def _settle_batches(
    ledger: Ledger, buckets: tuple[int, ...], max_num_requests: int
) -> tuple[int, ...]:
    """Return the batch sizes that have a round shape beside that of all requests."""
    if ledger.given.batch_buckets and min(ledger.given.batch_buckets) >= max_num_requests:
        ledger.idle("batch_buckets", f"a round has {max_num_requests} requests at most")
    return ledger.pick("batch_buckets", buckets, origin="manifest")


def _settle_prefills(ledger: Ledger, graphs: GraphsMode) -> tuple[int, ...]:
    """Return the row counts of prefills that are captured."""
    if graphs == "auto":
        return ledger.pick("prefill_buckets", DEFAULT_PREFILL_BUCKETS)
    if ledger.given.prefill_buckets:
        ledger.idle("prefill_buckets", f"`graphs` is {graphs}")
    return ledger.note("prefill_buckets", (), "derived")


def _settle_verification(ledger: Ledger, manifest: Manifest) -> VerificationMode:
    """Return how drafts of sampled requests are decided about."""
    given = ledger.pick("verification", manifest.sampling.verification, origin="manifest")
    modes: tuple[VerificationMode, ...] = get_args(VerificationMode)
    mode = next((item for item in modes if item == given), None)
    if mode is None:
        expected = " or ".join(modes)
        message = f"`verification` is {given}"
        ledger.refuse("SD832", "verification", message, expected=expected, found=given)
        return "seeded"
    return mode


def _settle_rows(ledger: Ledger, device: torch.device, max_num_requests: int, gamma: int) -> int:
    """Return `max_num_batched_tokens`; by default one full round of every request fits."""
    full_round = max_num_requests * (gamma + 1)
    num_rows = ledger.pick(
        "max_num_batched_tokens", max(DEFAULT_BATCHED_TOKENS[device.type], full_round)
    )
    if num_rows < max_num_requests:
        ledger.refuse(
            "SD832",
            "max_num_batched_tokens",
            f"{num_rows} rows cannot hold one row of each of {max_num_requests} requests",
            expected=f"at least `max_num_requests`, {max_num_requests}",
            found=num_rows,
        )
    chunk = ledger.given.prefill_chunk_size
    if chunk is not None and chunk > num_rows:
        ledger.idle("prefill_chunk_size", f"a step has {num_rows} rows")
    return num_rows
