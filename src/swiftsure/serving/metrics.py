"""Metrics in Prometheus' format."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from swiftsure.serving.batching import Batcher
from swiftsure.serving.watching import Watcher, policy_version

__all__ = ["Metrics"]

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counts requests and reads the state of a batcher and a watcher when asked."""

    def __init__(self, batcher: Batcher, watcher: Watcher | None) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "swiftsure_requests", "Requests by HTTP status.", ["status"], registry=self.registry
        )
        self.seconds = Histogram(
            "swiftsure_request_seconds",
            "Time from request to answer, by exit (0-based).",
            ["exit"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.registry.register(_State(batcher, watcher))

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self.registry)


class _State(Collector):
    def __init__(self, batcher: Batcher, watcher: Watcher | None) -> None:
        self._batcher, self._watcher = batcher, watcher

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        batcher, watcher = self._batcher, self._watcher
        version = policy_version(batcher.engine.policy)
        info = GaugeMetricFamily("swiftsure_policy_info", "The policy.", labels=["version"])
        info.add_metric([version], 1)
        yield info
        yield GaugeMetricFamily("swiftsure_queue_depth", "Requests that wait.", batcher.depth)
        yield GaugeMetricFamily(
            "swiftsure_full_model", "Whether the full model answers all.", int(batcher.full)
        )
        if watcher is None:
            return
        audits = CounterMetricFamily("swiftsure_audits", "Audits by result.", labels=["result"])
        counts = {"made": watcher.made, "failed": watcher.failed, "dropped": batcher.dropped}
        for result, count in counts.items():
            audits.add_metric([result], count)
        yield audits
        monitor = watcher.monitor
        values = {
            "evidence": ("Evidence that the promise is broken.", monitor.evidence),
            "evidence_needed": ("Evidence at which the alarm comes.", 1 / monitor.alpha),
            "risk": ("Mean audited loss so far.", monitor.mean),
            "risk_recent": ("Mean of about the last 1,000 audited losses.", monitor.recent_mean),
            "risk_allowed": ("Largest risk allowed.", monitor.epsilon),
            "losses": ("Audited losses in the monitor.", monitor.n),
            "alarm": ("Whether there was an alarm.", int(monitor.alarm)),
            "monitor_fault": ("Whether the monitor does not work.", int(bool(watcher.fault))),
        }
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(f"swiftsure_{name}", text, value)
