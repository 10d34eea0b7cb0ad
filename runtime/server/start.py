"""From a manifest to a running server."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from runtime.config import Overrides, RuntimeConfig
from runtime.engine.llm import LLM
from runtime.engine.role_site import pool_allocator
from runtime.engine.staged import stages_of, stages_text
from runtime.engine.text import TemplateRenderer
from runtime.loading.weight_samples import weights_digest
from runtime.server.app import Services
from runtime.server.front import Front
from runtime.server.info import info_object
from runtime.server.loop import EngineLoop
from runtime.server.prepare import ServedModel
from runtime.server.role_settings import RoleOptions
from runtime.server.roles import DecodeRole, PrefillRole, make_role, role_plan, transport_of
from runtime.server.run import check_address, serve_http
from runtime.server.settings import ServeOptions, settle
from runtime.server.stage_metrics import StageCollector
from specctl.contract.codec import load_manifest, resolve_source
from specctl.contract.diagnostics import Diagnostic

logger = logging.getLogger(__name__)


def serve_manifest(
    path: Path,
    overrides: Overrides,
    options: ServeOptions,
    *,
    on_diagnostic: Callable[[Diagnostic], None],
) -> None:
    """Load a manifest and serve it; see `runtime.main.serve`.

    Raises:
        DiagnosticError: SD835 before anything is loaded, and what loading raises.
    """
    manifest = load_manifest(path)
    target = manifest.target
    directory = resolve_source(target.source, path.parent).resolve()
    settings = settle(options, target_name=directory.name)
    check_address(settings.host, settings.port)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    transport, plan = None, None
    if options.role is not None:
        transport = transport_of(options.role, manifest, overrides)
        plan = role_plan(options.role, weights=weights_digest(manifest, path.parent))
    logger.info("loading %s", path)
    with closing(
        LLM.from_manifest(
            path,
            overrides,
            needs_tokenizer=target.tokenizer_digest is not None,
            allocate=pool_allocator(plan, transport),
            role=plan,
        )
    ) as llm:
        for diagnostic in llm.diagnostics:
            on_diagnostic(diagnostic)
        role = None
        if options.role is not None and transport is not None and plan is not None:
            role = make_role(llm, plan, options.role, transport)
        services = make_services(
            llm,
            directory,
            model_name=settings.model_name,
            server_info=settings.described(options),
            role=role,
        )
        logger.info("%s: %s", settings.model_name, engine_text(llm))
        if options.role is not None and role is not None:
            logger.info("%s", role_text(options.role, role, llm))
        settle_heap()
        serve_http(services, settings)


def settle_heap() -> None:
    """Leave what the start made out of later garbage collections.

    A full one goes through every object of libraries, tokenizer and engine: requests would wait.
    """
    gc.collect()
    gc.freeze()


def engine_text(llm: LLM) -> str:
    """Say in one line what an engine runs on and with."""
    config = llm.config
    return (
        f"on {config.device}, {stages_text(llm.manifest, config, llm.transport)}, "
        f"proposer {config.proposer}, {drafts_text(config)}, verification {config.verification}"
    )


def role_text(options: RoleOptions, role: PrefillRole | DecodeRole, llm: LLM) -> str:
    """Say in one line what a role server is."""
    draft = llm.manifest.draft
    return (
        f"role {options.role}, {role.described()}, "
        f"transport {options.transport}, draft {'none' if draft is None else draft.algorithm}, "
        f"first proposal {options.first_proposal}, verification {llm.config.verification}"
    )


def drafts_text(config: RuntimeConfig) -> str:
    """Say how many drafts a round has."""
    count = config.num_speculative_tokens
    if config.length_mode == "static":
        return f"{count} drafts a round"
    return f"up to {count} drafts a round as costs say ({config.length_mode})"


def make_services(
    llm: LLM,
    target_dir: Path,
    *,
    model_name: str,
    server_info: dict[str, dict[str, object]],
    role: PrefillRole | DecodeRole | None = None,
) -> Services:
    """Join an engine to what the routes use; the chat template is loaded now, not at first use."""
    config, manifest = llm.config, llm.manifest
    stages = stages_of(manifest, config)
    chat = TemplateRenderer(target_dir)
    chat.warm()
    served = ServedModel(
        name=model_name,
        target_vocab_size=config.target_vocab_size,
        max_model_len=config.max_model_len,
        num_speculative_tokens=config.num_speculative_tokens,
        fingerprint=f"fp_{manifest.fingerprint.removeprefix('sha256:')[:16]}",
        created=int(time.time()),
        tokenizer=llm.tokenizer,
        chat=chat,
    )
    front = Front(
        EngineLoop(
            llm.engine if role is None else role.engine,
            fault=lambda: llm.problem,
            device=config.device,
        ),
        max_num_requests=config.max_num_requests,
        max_queue=config.max_num_waiting,
    )
    return Services(
        front=front,
        served=served,
        info=lambda: info_object(config, manifest, server_info, graphs=llm.engine.graph_report),
        verification=config.verification,
        proposer=config.proposer,
        role=role,
        collectors=()
        if len(stages) == 1
        else (StageCollector(stages, problem=lambda: llm.problem),),
    )
