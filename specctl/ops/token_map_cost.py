"""Find the numbers of the cost model: manifest first, then the target's config, then assumptions.

Invariants: each number has an origin that the report prints; nothing is guessed without saying so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specctl.checkpoint.config_sections import stated
from specctl.checkpoint.json_text import read_object
from specctl.checkpoint.sources import LocalStore
from specctl.checkpoint.tensor_entry import DTYPE_BITS
from specctl.contract.codec import load_manifest
from specctl.contract.file_names import CONFIG
from specctl.contract.findings import Findings
from specctl.contract.manifest import BLOCK_DRAFTS, PARALLEL_DRAFTS, Draft, Manifest
from specctl.tokenmap.bench_outputs import MeasuredDrafts
from specctl.tokenmap.cost import CostFacts, Fact

ASSUMED = "assumed"
BANDWIDTH = 4.3e12
ACCEPTANCE = 0.7
LOST_RATIO = 1.0
NUM_DRAFTS = 3
LAYER_OVERHEAD_S = 10e-6
_HIDDEN, _LAYERS = 4096, 32
_NOT_READ = ("embedding", "head", "d2t", "t2d")


@dataclass(frozen=True, kw_only=True, slots=True)
class CostOptions:
    """What the user states about serving; None: find it, else assume it.

    Args:
        manifest: manifest file of the draft that will use the map.
        acceptance: probability of acceptance at a position that is reached, 0..1.
        lost_ratio: acceptance at tokens that the map loses, over that at all tokens, 0..1.
        num_speculative_tokens: drafts of a round.
        bandwidth: bytes for each second.
    """

    manifest: Path | None = None
    acceptance: float | None = None
    lost_ratio: float | None = None
    num_speculative_tokens: int | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """Sizes of a decoder, from a config or a manifest."""

    row_bytes: float
    layer_bytes: float
    num_layers: int
    origin: str


def cost_facts(
    options: CostOptions,
    *,
    directory: Path,
    target_vocab_size: int,
    measured: MeasuredDrafts | None,
) -> CostFacts:
    """Return the numbers and their origins.

    Args:
        options: as the user gave them.
        directory: of the target's tokenizer, with config.json when it has one.
        target_vocab_size: rows of the full head.
        measured: acceptance that a bench report of this target measured; of one with a reduced
            head only its number of drafts is taken, since the model asks for the full head's.

    Raises:
        DiagnosticError: family 7 codes of a manifest that cannot be read.
    """
    facts = _from_config(directory, target_vocab_size)
    if options.manifest is not None:
        facts = _from_manifest(facts, load_manifest(options.manifest), options.manifest.name)
    if measured is not None:
        facts = _set_drafts(facts, measured.num_speculative_tokens, "benchmark")
    if measured is not None and measured.reduced is None:
        origin = f"benchmark, accept length {measured.accept_length:.3f}"
        facts = replace(
            facts,
            acceptance=measured.acceptance,
            origins={**facts.origins, "acceptance": origin},
        )
    return _with_given(facts, options)


def _with_given(facts: CostFacts, options: CostOptions) -> CostFacts:
    if options.num_speculative_tokens is not None:
        facts = _set_drafts(facts, options.num_speculative_tokens, "--gamma")
    origins = dict(facts.origins)
    if options.acceptance is not None:
        origins["acceptance"] = "--acceptance"
    if options.lost_ratio is not None:
        origins["lost_ratio"] = "--lost-ratio"
    if options.bandwidth is not None:
        origins["bandwidth"] = "--bandwidth"
    return replace(
        facts,
        acceptance=facts.acceptance if options.acceptance is None else options.acceptance,
        lost_ratio=facts.lost_ratio if options.lost_ratio is None else options.lost_ratio,
        bandwidth=facts.bandwidth if options.bandwidth is None else options.bandwidth,
        origins=origins,
    )


def _set_drafts(facts: CostFacts, number: int, origin: str) -> CostFacts:
    origins: dict[Fact, str] = {**facts.origins, "num_speculative_tokens": origin}
    return replace(facts, num_speculative_tokens=number, origins=origins)


def _from_config(directory: Path, target_vocab_size: int) -> CostFacts:
    """Return the facts that a target's config.json gives, the rest assumed."""
    table: Mapping[str, Any] = {}
    store = LocalStore(directory)
    if store.has(CONFIG):
        table = read_object(store, CONFIG, Findings())[0] or {}
    model = _model(table)
    head_bytes = target_vocab_size * model.row_bytes
    origins: dict[Fact, str] = {
        "head_row_bytes": model.origin,
        "draft_bytes": f"{ASSUMED}: one layer of the target ({model.origin})",
        "draft_layers": ASSUMED,
        "target_bytes": model.origin,
        "target_layers": model.origin,
        "num_speculative_tokens": ASSUMED,
        "is_block": f"{ASSUMED}: a chain, one pass for each draft",
        "acceptance": ASSUMED,
        "lost_ratio": f"{ASSUMED}: the bound; below 1 where rare tokens are drafted worse",
        "bandwidth": f"{ASSUMED}: what one H200 copies",
        "layer_overhead_s": ASSUMED,
    }
    return CostFacts(
        target_vocab_size=target_vocab_size,
        head_row_bytes=model.row_bytes,
        draft_bytes=model.layer_bytes,
        draft_layers=1,
        target_bytes=model.num_layers * model.layer_bytes + head_bytes,
        target_layers=model.num_layers,
        num_speculative_tokens=NUM_DRAFTS,
        is_block=False,
        acceptance=ACCEPTANCE,
        lost_ratio=LOST_RATIO,
        bandwidth=BANDWIDTH,
        layer_overhead_s=LAYER_OVERHEAD_S,
        origins=origins,
    )


def _model(table: Mapping[str, Any]) -> _Model:
    """Return the sizes of a dense decoder; of a mixture, what one token reads."""

    def number(key: str, otherwise: int) -> int:
        value = stated(table, key)
        return value if type(value) is int and value > 0 else otherwise

    hidden = number("hidden_size", 0)
    origin = CONFIG if hidden else f"{ASSUMED}: hidden {_HIDDEN}, {_LAYERS} layers, bf16"
    hidden = hidden or _HIDDEN
    heads = number("num_attention_heads", max(1, hidden // 128))
    head_dim = number("head_dim", max(1, hidden // heads))
    kv_heads = number("num_key_value_heads", heads)
    width = number("intermediate_size", 3 * hidden)
    width = number("moe_intermediate_size", width) * number("num_experts_per_tok", 1)
    attention = 2 * hidden * head_dim * (heads + kv_heads)
    weight_bytes = _weight_bytes(stated(table, "torch_dtype") or stated(table, "dtype"))
    return _Model(
        row_bytes=hidden * weight_bytes,
        layer_bytes=(attention + 3 * hidden * width) * weight_bytes,
        num_layers=number("num_hidden_layers", _LAYERS),
        origin=origin,
    )


def _weight_bytes(dtype: object) -> float:
    return 4.0 if dtype in ("float32", "float") else 2.0


def _from_manifest(facts: CostFacts, manifest: Manifest, name: str) -> CostFacts:
    """Return the facts with those that a manifest states."""
    row_bytes = manifest.target.decoder.hidden_size * DTYPE_BITS[manifest.target.head.dtype] / 8
    parallel, draft = manifest.parallel, manifest.draft
    origins: dict[Fact, str] = {
        **facts.origins,
        "head_row_bytes": name,
        "target_bytes": name,
        "target_layers": name,
    }
    facts = replace(
        facts,
        head_row_bytes=row_bytes,
        target_bytes=float(sum(parallel.layer_bytes) + facts.target_vocab_size * row_bytes),
        target_layers=manifest.target.decoder.num_layers,
    )
    if draft is None:
        return replace(facts, origins=origins)
    from_draft: tuple[Fact, ...] = (
        "draft_bytes", "draft_layers", "num_speculative_tokens", "is_block"
    )  # fmt: skip
    origins |= dict.fromkeys(from_draft, name)
    return replace(
        facts,
        draft_bytes=float(_draft_bytes(draft)),
        draft_layers=draft.decoder.num_layers,
        num_speculative_tokens=manifest.geometry.num_speculative_tokens,
        is_block=draft.algorithm in (*BLOCK_DRAFTS, *PARALLEL_DRAFTS),
        origins=origins,
    )


def _draft_bytes(draft: Draft) -> int:
    """Return the bytes of a draft that one pass reads: all but embedding, head and map."""
    return sum(
        ref.end - ref.begin
        for role, ref in draft.tensors.items()
        if role.partition(".")[0] not in _NOT_READ
    )
