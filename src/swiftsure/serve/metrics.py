"""Metrics in Prometheus' format."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from swiftsure.monitor import Monitor
from swiftsure.serve.bill import Bill
from swiftsure.serve.live import LiveStatus, Load
from swiftsure.serve.policy_manager import PolicyManager

__all__ = ["Metrics"]

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
Family = GaugeMetricFamily | CounterMetricFamily


class Metrics:
    """Counts requests, and reads the state of all else when asked."""

    def __init__(self, load: Load, manager: PolicyManager, live: LiveStatus) -> None:
        self.registry = CollectorRegistry()
        self.on_answer: Callable[[int, bool, float], None] | None = None
        self.requests = Counter(
            "swiftsure_requests", "Requests by HTTP status.", ["status"], registry=self.registry
        )
        self.answers = Counter(
            "swiftsure_answers",
            "Answers by exit (0-based), and by the policy or the full model.",
            ["exit", "by"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "swiftsure_request_seconds",
            "Time from request to answer, by exit (0-based).",
            ["exit"],
            buckets=BUCKETS,
            registry=self.registry,
        )
        self._by_status: dict[int, Counter] = {}
        self._children: dict[tuple[int, bool], tuple[Counter, Histogram]] = {}
        self.registry.register(_State(load, manager, live))

    def answered(self, exit_: int, *, full: bool, seconds: float) -> None:
        """Count an answer."""
        known = self._children.get((exit_, full))
        if known is None:  # looking labels up takes longer than counting
            by = "full model" if full else "policy"
            known = self.answers.labels(exit_, by), self.seconds.labels(exit_)
            self._children[exit_, full] = known
        known[0].inc()
        known[1].observe(seconds)
        if self.on_answer is not None:
            self.on_answer(exit_, full, seconds)

    def count(self, status: int) -> None:
        """Count a request."""
        found = self._by_status.get(status)
        if found is None:
            found = self._by_status[status] = self.requests.labels(status)
        found.inc()

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self.registry)


class _State(Collector):
    def __init__(self, load: Load, manager: PolicyManager, live: LiveStatus) -> None:
        self._load, self._manager, self._live = load, manager, live

    def collect(self) -> Iterator[Family]:
        load, manager = self._load, self._manager
        audit_log = manager.audit_log
        info = GaugeMetricFamily("swiftsure_policy_info", "The policy.", labels=["version"])
        info.add_metric([manager.version or ""], 1)
        yield info
        yield GaugeMetricFamily(
            "swiftsure_policy_number", "Number of the installed policy.", manager.number
        )
        yield GaugeMetricFamily("swiftsure_queue_depth", "Requests that wait.", load.depth)
        yield GaugeMetricFamily(
            "swiftsure_full_model", "Whether the full model answers all.", int(manager.mode.full)
        )
        yield from _cost_families(self._live.bill)
        if self._live.reasons:
            yield _reasons(dict(self._live.reasons))
        if audit_log is None:
            return
        counts = {"made": audit_log.made, "failed": audit_log.failed, "dropped": load.dropped}
        audits = CounterMetricFamily("swiftsure_audits", "Audits by result.", labels=["result"])
        for result, count in counts.items():
            audits.add_metric([result], count)
        yield audits
        yield GaugeMetricFamily(
            "swiftsure_monitor_fault",
            "Whether the monitor does not work.",
            int(bool(manager.fault)),
        )
        if audit_log.monitor is not None:
            yield from _risk_families(audit_log.monitor)


def _cost_families(bill: Bill) -> Iterator[Family]:
    # Gauges: a saving may also fall, where an answer cost more than the full model's.
    spent = GaugeMetricFamily("swiftsure_cost", "Cost of all answers.", labels=["unit"])
    saved = GaugeMetricFamily(
        "swiftsure_cost_saved",
        "Cost saved against the full model alone, after the cost of audits where that is counted."
        " Seconds are an estimate: they were measured for"
        " each exit and the full model when the server started, one request at a time.",
        labels=["unit"],
    )
    audits = GaugeMetricFamily(
        "swiftsure_cost_audits", "Cost of audits; 0 where it is not counted.", labels=["unit"]
    )
    for family, by_unit in ((spent, bill.spent), (saved, bill.saved), (audits, bill.audits)):
        for unit in bill.saved:  # of all units, also those of which one is 0
            family.add_metric([unit], by_unit[unit])
    yield from (spent, saved, audits)


def _reasons(counts: Mapping[str, int]) -> CounterMetricFamily:
    reasons = CounterMetricFamily(
        "swiftsure_reasons",
        "Requests by why the small or the large model had to answer.",
        labels=["reason"],
    )
    for reason, count in counts.items():
        reasons.add_metric([reason], count)
    return reasons


def _risk_families(monitor: Monitor) -> Iterator[Family]:
    low, high = monitor.interval(0.05)
    values = {
        "evidence": ("Evidence that the promise is broken.", monitor.evidence),
        "evidence_needed": ("Evidence at which the alarm comes.", 1 / monitor.alpha),
        "risk": ("Mean audited loss so far.", monitor.mean),
        "risk_low": ("Lower end of a 95 % interval, valid at every moment.", low),
        "risk_high": (
            "Upper end of a 95 % interval, valid at every moment; failed audits count as the"
            " largest loss.",
            high,
        ),
        "risk_recent": ("Mean of about the last 1,000 audited losses.", monitor.recent_mean),
        "risk_allowed": ("Largest risk allowed.", monitor.epsilon),
        "losses": ("Audited losses in the monitor.", monitor.n),
        "alarm": ("Whether there was an alarm.", int(monitor.alarm)),
    }
    for name, (text, value) in values.items():
        yield GaugeMetricFamily(f"swiftsure_{name}", text, value)
