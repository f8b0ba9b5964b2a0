"""Metrics of who answered why, and of failures of the models."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from swiftsure.serve.proxy.health import ModelHealth

__all__ = ["RoutingMetrics"]


class RoutingMetrics(Collector):
    """Reads the counts of a proxy when asked."""

    def __init__(self, reasons: Mapping[str, int], health: Sequence[ModelHealth]) -> None:
        self._reasons, self._health = reasons, health

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield both families."""
        reasons = CounterMetricFamily(
            "swiftsure_reasons",
            "Requests by why the small or the large model had to answer.",
            labels=["reason"],
        )
        for reason, count in list(self._reasons.items()):
            reasons.add_metric([reason], count)
        yield reasons
        failures = CounterMetricFamily(
            "swiftsure_upstream_failures", "Failed requests to a model.", labels=["model"]
        )
        for each in self._health:
            failures.add_metric([each.name], each.failures)
        yield failures
