"""One prompt, one streamed answer, and the same answer without a draft for comparison."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from runtime.bench.compare import first_difference
from runtime.bench.prompts import PromptEncoder
from runtime.bench.report import GenerateReport, Speed
from runtime.bench.settings import WARM_UP_TOKENS, GenerateOptions, draft_room
from runtime.config import Overrides
from runtime.engine.llm import LLM, Completion
from runtime.engine.request import RequestInput
from runtime.engine.text import TemplateRenderer, load_tokenizer
from runtime.spec.types import SamplingParams
from specctl.contract.codec import load_manifest, resolve_source
from specctl.contract.diagnostics import Diagnostic, DiagnosticError, diagnose
from specctl.contract.manifest import Manifest


def answer_one(
    manifest: Path,
    overrides: Overrides,
    options: GenerateOptions,
    *,
    on_text: Callable[[str], None],
    on_diagnostic: Callable[[Diagnostic], None],
) -> GenerateReport:
    """Answer one prompt; see `runtime.main.generate`."""
    facts = load_manifest(manifest)
    request = _request(facts, manifest.parent, options)
    room = draft_room(facts, overrides.num_speculative_tokens)
    num_tokens = len(request.prompt_ids_target) + options.max_tokens
    sized = replace(
        overrides,
        max_num_requests=1,
        max_model_len=min(num_tokens + room, facts.target.decoder.max_position_embeddings),
    )
    llm = LLM.from_manifest(manifest, sized)
    try:
        for diagnostic in llm.diagnostics:
            on_diagnostic(diagnostic)
        return _answer(llm, request, options, on_text)
    finally:
        llm.close()


def _answer(
    llm: LLM, request: RequestInput, options: GenerateOptions, on_text: Callable[[str], None]
) -> GenerateReport:
    if options.has_comparison:
        _warm_up(llm, request)
    answer, speed = _timed(llm, request, on_text)
    comparison = first = None
    if options.has_comparison:
        target_only = llm.sibling(proposer="none", num_speculative_tokens=0)
        _warm_up(target_only, request)
        plain, comparison = _timed(target_only, request, lambda _: None)
        first = first_difference(plain.ids_target, answer.ids_target)
    return GenerateReport(
        proposer=llm.config.proposer,
        num_speculative_tokens=llm.config.num_speculative_tokens,
        finish_reason=answer.finish_reason,
        rounds=answer.usage.num_rounds,
        accept_length=answer.usage.accept_length,
        speed=speed,
        comparison=comparison,
        first_divergence=first,
        claims_equality=llm.config.verification != "rejection" or options.temperature == 0,
    )


def _request(manifest: Manifest, directory: Path, options: GenerateOptions) -> RequestInput:
    source = resolve_source(manifest.target.source, directory)
    chat = TemplateRenderer(source)
    encoder = PromptEncoder(tokenizer=load_tokenizer(source), chat=chat)
    is_chat = chat.has_template if options.is_chat is None else options.is_chat
    if is_chat:
        ids = encoder.messages([{"role": "user", "content": options.prompt}], "PROMPT")
    else:
        ids = encoder.text(options.prompt, "PROMPT")
    known = manifest.target.decoder.max_position_embeddings
    if len(ids) + options.max_tokens > known:
        raise DiagnosticError(
            diagnose(
                "SD909",
                where="PROMPT",
                message=f"{len(ids)} prompt tokens and {options.max_tokens} new ones do not fit "
                f"into the context of {known}",
                expected=f"at most {known} tokens",
                found=f"{len(ids) + options.max_tokens} tokens",
            )
        )
    return RequestInput(
        request_id="answer",
        prompt_ids_target=ids,
        params=SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            seed=options.seed,
        ),
        max_tokens=options.max_tokens,
    )


def _warm_up(llm: LLM, request: RequestInput) -> None:
    """Run a few tokens untimed, so that neither arm pays for first use; then forget them."""
    llm.generate([replace(request, max_tokens=min(request.max_tokens or 1, WARM_UP_TOKENS))])
    llm.engine.flush_cache()


def _timed(
    llm: LLM, request: RequestInput, on_text: Callable[[str], None]
) -> tuple[Completion, Speed]:
    start = time.perf_counter()
    (answer,) = llm.generate([request], on_delta=lambda delta: on_text(delta.text))
    seconds = time.perf_counter() - start
    if answer.error is not None:
        raise DiagnosticError(answer.error)
    num_tokens = len(answer.ids_target)
    return answer, Speed(tokens=num_tokens, seconds=seconds, tokens_per_s=num_tokens / seconds)
