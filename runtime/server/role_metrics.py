"""Metrics of prefill and decode servers, beside those of every server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from runtime.disagg.listen import DecodePeers
from runtime.disagg.peers import PrefillPeers
from runtime.engine.handover import Handover

_OUTCOMES = (
    "Prompts by what became of them: prefilled, failed, retried (asked of another prefill server; "
    "counted on decode servers), released (dropped for a decode server that had no use for them; "
    "counted on prefill servers)."
)


class DecodeCollector(Collector):
    """Families of a decode server."""

    def __init__(self, peers: PrefillPeers, handover: Handover) -> None:
        """Read from connections and engine; a scrape waits for neither."""
        self._peers = peers
        self._handover = handover

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        counts = self._peers.counts
        outcomes = {
            "prefilled": counts.num_prefilled,
            "failed": counts.failures.total(),
            "retried": counts.num_retried,
        }
        yield from _common(outcomes, counts.failures, counts.num_kv_bytes, self._peers.states())
        yield HistogramMetricFamily(
            "specctl_handover_seconds",
            "From asking a prefill server until all KV of the prompt is here.",
            buckets=counts.durations.cumulative,
            sum_value=counts.durations.total_s,
        )
        yield GaugeMetricFamily(
            "specctl_handover_open", "Prompts that wait for KV.", value=self._peers.num_rooms
        )
        yield GaugeMetricFamily(
            "specctl_handover_fenced",
            "Of these, prompts of lost servers or dropped requests: their blocks wait until "
            "nothing writes into them.",
            value=self._peers.num_fenced,
        )
        yield _quarantined(self._handover)


class PrefillCollector(Collector):
    """Families of a prefill server."""

    def __init__(self, peers: DecodePeers, handover: Handover) -> None:
        """Read from connections and engine; a scrape waits for neither."""
        self._peers = peers
        self._handover = handover

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        counts = self._peers.counts
        outcomes = {
            "prefilled": counts.num_prefilled,
            "failed": counts.failures.total(),
            "released": counts.num_released,
        }
        yield from _common(outcomes, counts.failures, counts.num_kv_bytes, self._peers.states())
        yield _quarantined(self._handover)


def _common(
    outcomes: Mapping[str, int],
    failures: Mapping[str, int],
    num_kv_bytes: int,
    states: Mapping[str, str],
) -> Iterator[Metric]:
    prompts = CounterMetricFamily("specctl_handover_prompts", _OUTCOMES, labels=["outcome"])
    for outcome, count in outcomes.items():
        prompts.add_metric([outcome], count)
    yield prompts
    codes = CounterMetricFamily(
        "specctl_handover_failures", "Prompts that failed, by code.", labels=["code"]
    )
    for code, count in sorted(failures.items()):
        codes.add_metric([code], count)
    yield codes
    yield CounterMetricFamily(
        "specctl_handover_kv_bytes", "Bytes of KV that the carrier brought.", value=num_kv_bytes
    )
    peers = GaugeMetricFamily(
        "specctl_peer_ready", "Whether a peer is connected and fits.", labels=["peer"]
    )
    for peer, state in states.items():
        peers.add_metric([peer], float(state == "ready"))
    yield peers


def _quarantined(handover: Handover) -> Metric:
    tables = list(handover.held_tables)  # a copy: the engine's thread goes on
    return GaugeMetricFamily(
        "specctl_kv_quarantined_blocks",
        "KV blocks of requests that are gone, held while another process may read or write them.",
        value=sum(len(table.blocks) for table in tables),
    )
