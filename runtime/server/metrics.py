"""Prometheus text of `/metrics`, made from the engine's snapshot and the front's counts.

Invariants: a scrape never waits for the engine; counters of the engine start again at a cache
flush, which Prometheus treats as a restart; every definition stands in the HELP line of its metric.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from runtime.engine.stats import EngineStats
from runtime.server.front import Front

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = (
    ("requests_running", "Requests that hold a slot.", "num_running"),
    ("queue_depth", "Requests in the engine that wait for a slot.", "num_waiting"),
    ("kv_usage_ratio", "Share of KV blocks held by running requests, 0 to 1.", "kv_usage"),
    ("kv_blocks", "KV blocks that requests can hold.", "num_kv_blocks"),
    (
        "kv_cached_blocks",
        "KV blocks that a later prompt with the same prefix could use.",
        "num_cached_kv_blocks",
    ),
)
_COUNTERS = (
    ("preemptions", "Running requests put back into the queue for KV blocks.", "num_preemptions"),
    ("steps", "Target forwards.", "num_steps"),
    ("rows", "Rows (tokens) of target forwards.", "num_rows"),
    ("prompt_tokens", "Prompt tokens of admitted requests.", "num_prompt_tokens"),
    (
        "prefix_hit_tokens",
        "Prompt tokens whose KV came from the prefix cache.",
        "num_cached_tokens",
    ),
    ("output_tokens", "Tokens kept in answers, end token included.", "num_output_tokens"),
    ("rounds", "Verify rounds; the token that a prefill yields belongs to none.", "num_rounds"),
    (
        "proposed_drafts",
        "Draft tokens verified, before any stop or length cut.",
        "num_drafts",
    ),
    (
        "accepted_drafts",
        "Draft tokens accepted, before any stop or length cut.",
        "num_accepted_drafts",
    ),
)


class MetricsCollector(Collector):
    """Makes the metric families of one scrape."""

    def __init__(self, front: Front, *, verification: str, proposer: str, model: str) -> None:
        """Read from `front`; the rest labels the information metric."""
        self._front = front
        self._labels = {"verification": verification, "proposer": proposer, "model": model}

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        stats = self._front.engine.stats
        for name, text, attribute in _GAUGES:
            yield GaugeMetricFamily(f"specctl_{name}", text, value=getattr(stats, attribute))
        for name, text, attribute in _COUNTERS:
            yield CounterMetricFamily(f"specctl_{name}", text, value=getattr(stats, attribute))
        yield from _acceptance(stats)
        yield _draft_counts(stats)
        yield self._requests()
        yield GaugeMetricFamily(
            "specctl_requests_open",
            "Requests taken over HTTP and not finished, choices counted one by one.",
            value=self._front.num_open,
        )
        info = InfoMetricFamily(
            "specctl_engine",
            "How drafts of sampled requests are verified: `seeded` keeps the tokens of target-only "
            "decoding, `rejection` their distribution.",
        )
        info.add_metric([], self._labels)
        yield info

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            "specctl_requests",
            "Requests by outcome, choices counted one by one: stop, length, error, disconnected "
            "(aborted because the client went), rejected (429 or 503).",
            labels=["outcome"],
        )
        for outcome in ("stop", "length", "error", "disconnected", "rejected"):
            family.add_metric([outcome], self._front.outcomes[outcome])
        return family


def _acceptance(stats: EngineStats) -> Iterator[Metric]:
    length = GaugeMetricFamily(
        "specctl_accept_length",
        "1 + accepted drafts / verify rounds since start or flush: drafts are counted before any "
        "stop or length cut, the token that a prefill yields belongs to no round. Absent before "
        "the first round.",
    )
    if stats.accept_length is not None:
        length.add_metric([], stats.accept_length)
    yield length
    positions = CounterMetricFamily(
        "specctl_accepted_drafts_at_position",
        "Verify rounds in which the draft at this position (1 is the first) was accepted.",
        labels=["position"],
    )
    for index, count in enumerate(stats.num_accepted_at):
        positions.add_metric([str(index + 1)], count)
    yield positions


def _draft_counts(stats: EngineStats) -> Metric:
    family = CounterMetricFamily(
        "specctl_rounds_by_drafts",
        "Verify rounds of requests by how many drafts counted in them; with draft counts that are "
        "chosen for each request, this is what was chosen.",
        labels=["drafts"],
    )
    for count, num_rounds in stats.rounds_by_drafts.items():
        family.add_metric([str(count)], num_rounds)
    return family


def make_registry(collector: MetricsCollector) -> CollectorRegistry:
    """Return a registry with this collector alone (no process-wide default metrics)."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def metrics_text(registry: CollectorRegistry) -> bytes:
    """Return one scrape in the text format."""
    return generate_latest(registry)
