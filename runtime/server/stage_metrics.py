"""Metrics of a target that is spread over stages: what each holds, and whether all are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specctl.contract.diagnostics import Diagnostic
from specctl.contract.stage_split import Stage


class StageCollector(Collector):
    """Makes the families of one scrape."""

    def __init__(
        self, stages: Sequence[Stage], *, problem: Callable[[], Diagnostic | None]
    ) -> None:
        """Describe stages.

        Args:
            stages: first stage first.
            problem: what ended the pipeline; None while it runs.
        """
        self._stages = tuple(stages)
        self._problem = problem

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        layers = GaugeMetricFamily(
            "specctl_stage_layers", "Target layers of a pipeline stage.", labels=["stage"]
        )
        weights = GaugeMetricFamily(
            "specctl_stage_weight_bytes",
            "Stored bytes of what a pipeline stage holds, the draft on the last one included.",
            labels=["stage"],
        )
        for stage in self._stages:
            layers.add_metric([str(stage.index)], stage.num_layers)
            weights.add_metric([str(stage.index)], stage.num_bytes)
        yield layers
        yield weights
        yield GaugeMetricFamily(
            "specctl_pipeline_up",
            "1 while every pipeline stage answers, 0 once one is lost or has failed.",
            value=int(self._problem() is None),
        )
