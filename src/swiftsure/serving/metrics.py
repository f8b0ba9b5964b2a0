"""Metrics in Prometheus' format."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from swiftsure.serving.batching import Batcher
from swiftsure.serving.guarding import Guard

__all__ = ["Metrics"]

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """Counts requests and reads the state of a batcher and a watcher when asked."""

    def __init__(self, batcher: Batcher, guard: Guard) -> None:
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
        self.registry.register(_State(batcher, guard))
        self._by_status: dict[int, Counter] = {}
        self._by_exit: dict[int, Histogram] = {}

    def count(self, status: int) -> None:
        """Count a request."""
        found = self._by_status.get(status)
        if found is None:  # looking a label up takes longer than counting
            found = self._by_status[status] = self.requests.labels(status)
        found.inc()

    def observe(self, exit_index: int, seconds: float) -> None:
        """Note how long an answer took."""
        found = self._by_exit.get(exit_index)
        if found is None:
            found = self._by_exit[exit_index] = self.seconds.labels(exit_index)
        found.observe(seconds)

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self.registry)


class _State(Collector):
    def __init__(self, batcher: Batcher, guard: Guard) -> None:
        self._batcher, self._guard = batcher, guard

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        batcher, guard = self._batcher, self._guard
        watcher = guard.watcher
        info = GaugeMetricFamily("swiftsure_policy_info", "The policy.", labels=["version"])
        info.add_metric([guard.version], 1)
        yield info
        yield GaugeMetricFamily(
            "swiftsure_policy_number", "Number of the installed policy.", guard.number
        )
        yield GaugeMetricFamily("swiftsure_queue_depth", "Requests that wait.", batcher.depth)
        yield GaugeMetricFamily(
            "swiftsure_full_model", "Whether the full model answers all.", int(batcher.mode.full)
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
