"""From a manifest to a running server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from runtime.config import Overrides, RuntimeConfig
from runtime.engine.llm import LLM
from runtime.engine.text import TemplateRenderer
from runtime.server.app import Services
from runtime.server.front import Front
from runtime.server.info import info_object
from runtime.server.loop import EngineLoop
from runtime.server.prepare import ServedModel
from runtime.server.run import check_address, serve_http
from runtime.server.settings import ServeOptions, settle
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
    target = load_manifest(path).target
    directory = resolve_source(target.source, path.parent).resolve()
    settings = settle(options, target_name=directory.name)
    check_address(settings.host, settings.port)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    logger.info("loading %s", path)
    llm = LLM.from_manifest(path, overrides, needs_tokenizer=target.tokenizer_digest is not None)
    for diagnostic in llm.diagnostics:
        on_diagnostic(diagnostic)
    services = make_services(
        llm,
        directory,
        model_name=settings.model_name,
        server_info=settings.described(options),
    )
    logger.info(
        "%s on %s, proposer %s, %s, verification %s",
        settings.model_name,
        llm.config.device,
        llm.config.proposer,
        drafts_text(llm.config),
        services.verification,
    )
    serve_http(services, settings)


def drafts_text(config: RuntimeConfig) -> str:
    """Say how many drafts a round has."""
    count = config.num_speculative_tokens
    if config.length_mode == "static":
        return f"{count} drafts a round"
    return f"up to {count} drafts a round as costs say ({config.length_mode})"


def make_services(
    llm: LLM, target_dir: Path, *, model_name: str, server_info: dict[str, dict[str, object]]
) -> Services:
    """Join an engine to what the routes use; the chat template is loaded now, not at first use."""
    config, manifest = llm.config, llm.manifest
    chat = TemplateRenderer(target_dir)
    chat.warm()
    served = ServedModel(
        name=model_name,
        vocab_size=config.target_vocab_size,
        max_model_len=config.max_model_len,
        num_speculative_tokens=config.num_speculative_tokens,
        fingerprint=f"fp_{manifest.fingerprint.removeprefix('sha256:')[:16]}",
        created=int(time.time()),
        tokenizer=llm.tokenizer,
        chat=chat,
    )
    front = Front(
        EngineLoop(llm.engine),
        max_num_requests=config.max_num_requests,
        max_queue=config.max_num_waiting,
    )
    return Services(
        front=front,
        served=served,
        info=lambda: info_object(config, manifest, server_info, graphs=llm.engine.graph_report),
        verification=config.verification,
        proposer=config.proposer,
    )
