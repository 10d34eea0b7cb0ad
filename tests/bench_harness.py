"""Benchmarks of tiny pairs on a CPU: settings with small defaults, and what comes out of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime import main
from runtime.bench.raw import RequestRecord

ROOT = Path(__file__).parents[1]
QUESTIONS = ROOT / "fixtures" / "prompts" / "mt_bench_first8.jsonl"
CPU = main.EngineOptions(device="cpu")
PROMPTS = [[5, 6, 7, 8], [40, 41], [90, 3, 3, 17, 20], [33] * 9]
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "max_position_embeddings": 256,
    "vocab_size": 90,
    "tie_word_embeddings": False,
}


def records(
    manifest: Path | None,
    engine: main.EngineOptions = CPU,
    *,
    on_point: Callable[[main.RawBench], None] = lambda raw: None,
    **settings: Any,
) -> main.RawBench:
    given: dict[str, Any] = {"max_tokens": 12, "step_samples": 0, "concurrency": (1,)} | settings
    return main.bench(
        manifest,
        engine,
        main.BenchSettings(**given),
        on_progress=lambda label, done, total: None,
        on_diagnostic=lambda diagnostic: None,
        on_point=on_point,
    )


def bench(
    manifest: Path | None, engine: main.EngineOptions = CPU, **settings: Any
) -> main.BenchReport:
    return main.summarise(records(manifest, engine, **settings))


def requests_of(raw: main.RawBench) -> list[RequestRecord]:
    return [record for record in raw.records if isinstance(record, RequestRecord)]
