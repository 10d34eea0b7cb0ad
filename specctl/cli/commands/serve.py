"""`specctl serve`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli import output
from specctl.cli.role_options import (
    FirstProposalOption,
    Listen,
    Peer,
    PeerSilence,
    PeerWait,
    PrefillTimeout,
    ReleaseTimeout,
    RoleFlags,
    RoleOption,
    TransferTimeout,
    TransportHost,
    TransportOption,
    check_role,
)
from specctl.cli.shared_options import (
    BatchBuckets,
    CostTable,
    Device,
    DraftTensorParallel,
    Dtype,
    DynamicRank,
    DynamicRows,
    Graphs,
    LengthModeOption,
    LoadFormat,
    LogLevel,
    MaxNgram,
    NumSpeculativeTokens,
    PipelineParallel,
    PrefillBuckets,
    Proposer,
    RankTimeout,
    StageLayers,
    StagesInProcess,
    TensorParallel,
    Verification,
    optional_integers,
    parse_draft_counts,
    split_addresses,
    value_of,
)

if TYPE_CHECKING:
    from runtime.main import RoleOptions


def serve(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="Manifest to serve.")],
    host: Annotated[
        str | None, typer.Option("--host", help="Address to listen on; default 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Port; default 8000, 0 takes a free one."),
    ] = None,
    model_name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="Model id; default: the target's directory."),
    ] = None,
    pipeline_parallel: PipelineParallel = None,
    tensor_parallel: TensorParallel = None,
    draft_tensor_parallel: DraftTensorParallel = None,
    stage_layers: StageLayers = None,
    stages_in_process: StagesInProcess = None,
    rank_timeout_s: RankTimeout = None,
    load_format: LoadFormat = None,
    device: Device = None,
    dtype: Dtype = None,
    graphs: Graphs = None,
    batch_buckets: BatchBuckets = None,
    prefill_buckets: PrefillBuckets = None,
    verification: Verification = None,
    dynamic_rows: DynamicRows = None,
    dynamic_rank: DynamicRank = None,
    proposer: Proposer = None,
    max_ngram: MaxNgram = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    length_mode: LengthModeOption = None,
    cost_table: CostTable = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", help="Prompt and answer tokens at most.")
    ] = None,
    max_num_requests: Annotated[
        int | None, typer.Option("--max-num-requests", help="Requests that run at once.")
    ] = None,
    max_num_waiting: Annotated[
        int | None, typer.Option("--max-num-waiting", help="Requests that wait; more get 429.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option("--max-num-batched-tokens", help="Rows of one target forward.")
    ] = None,
    prefill_chunk_size: Annotated[
        int | None,
        typer.Option(
            "--prefill-chunk-size",
            help="Prompt tokens of one request in one forward at most; default: all rows.",
        ),
    ] = None,
    kv_block_size: Annotated[
        int | None, typer.Option("--kv-block-size", help="Tokens of a KV block; default 16.")
    ] = None,
    num_kv_blocks: Annotated[
        int | None, typer.Option("--num-kv-blocks", help="Blocks of the KV pool.")
    ] = None,
    kv_memory_fraction: Annotated[
        float | None,
        typer.Option("--kv-memory-fraction", help="Share of free memory for weights and KV."),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option("--prefix-cache/--no-prefix-cache", help="Reuse KV of equal prefixes."),
    ] = None,
    grace_s: Annotated[
        float | None,
        typer.Option("--grace-s", min=0, help="Seconds for running requests after SIGTERM."),
    ] = None,
    log_level: Annotated[
        LogLevel | None,
        typer.Option("--log-level", help="What goes to stderr: debug, info, warning or error."),
    ] = None,
    role: RoleOption = None,
    listen: Listen = None,
    peer: Peer = None,
    transport: TransportOption = None,
    transport_host: TransportHost = None,
    first_proposal: FirstProposalOption = None,
    prefill_timeout_s: PrefillTimeout = None,
    release_timeout_s: ReleaseTimeout = None,
    transfer_timeout_s: TransferTimeout = None,
    peer_wait_s: PeerWait = None,
    peer_silence_s: PeerSilence = None,
) -> None:
    """Serve a manifest through an OpenAI-compatible HTTP interface.

    SIGTERM or Ctrl-C stops gracefully: running requests get the grace time (default 30 s), then
    exit 0.
    """
    from runtime import main
    from specctl.ops.hub_manifest import local_manifest

    given = RoleFlags(
        role=role,
        listen=listen,
        peer=peer,
        transport=transport,
        transport_host=transport_host,
        first_proposal=first_proposal,
        prefill_timeout_s=prefill_timeout_s,
        release_timeout_s=release_timeout_s,
        transfer_timeout_s=transfer_timeout_s,
        peer_wait_s=peer_wait_s,
        peer_silence_s=peer_silence_s,
    )
    check_role(given)
    drafts = parse_draft_counts(num_speculative_tokens, length_mode)
    with local_manifest(manifest) as local:
        main.serve(
            local.path,
            main.EngineOptions(
                pipeline_parallel=pipeline_parallel,
                tensor_parallel=tensor_parallel,
                draft_tensor_parallel=draft_tensor_parallel,
                stage_layers=optional_integers(stage_layers, "--stage-layers"),
                stages_in_process=stages_in_process,
                rank_timeout_s=rank_timeout_s,
                load_format=load_format,
                device=device,
                dtype=dtype,
                graphs=value_of(graphs),
                batch_buckets=optional_integers(batch_buckets, "--batch-buckets"),
                prefill_buckets=optional_integers(prefill_buckets, "--prefill-buckets"),
                verification=value_of(verification),
                dynamic_rows=dynamic_rows,
                dynamic_rank=dynamic_rank,
                proposer=proposer,
                max_ngram=max_ngram,
                num_speculative_tokens=drafts.num_speculative_tokens,
                length_mode=drafts.length_mode,
                cost_table=cost_table,
                max_model_len=max_model_len,
                max_num_requests=max_num_requests,
                max_num_waiting=max_num_waiting,
                max_num_batched_tokens=max_num_batched_tokens,
                prefill_chunk_size=prefill_chunk_size,
                kv_block_size=kv_block_size,
                num_kv_blocks=num_kv_blocks,
                kv_memory_fraction=kv_memory_fraction,
                enable_prefix_cache=prefix_cache,
            ),
            main.ServeOptions(
                host=host,
                port=port,
                model_name=model_name or local.target_name,
                grace_s=grace_s,
                log_level=value_of(log_level),
                role=_role_options(given),
            ),
            on_diagnostic=output.talk_diagnostic,
        )


def _role_options(given: RoleFlags) -> RoleOptions | None:
    """Return the role's settings; None: a server that does all of the work."""
    from runtime import main

    if given.role is None or given.role.value == "both":
        return None
    base, limits = main.RoleOptions(role=given.role.value), main.Limits()
    return main.RoleOptions(
        role=given.role.value,
        listen=given.listen,
        peers=() if given.peer is None else split_addresses(given.peer, "--peer"),
        transport=base.transport if given.transport is None else given.transport.value,
        transport_host=given.transport_host or base.transport_host,
        first_proposal=(
            base.first_proposal if given.first_proposal is None else given.first_proposal.value
        ),
        transfer_timeout_s=_or(given.transfer_timeout_s, base.transfer_timeout_s),
        limits=main.Limits(
            prefill_s=_or(given.prefill_timeout_s, limits.prefill_s),
            release_s=_or(given.release_timeout_s, limits.release_s),
            peer_wait_s=_or(given.peer_wait_s, limits.peer_wait_s),
            silence_s=_or(given.peer_silence_s, limits.silence_s),
        ),
    )


def _or(given: float | None, default: float) -> float:
    return default if given is None else given
