"""Metrics for Prometheus, and the dashboard that uses them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swiftsure.serve import ExitCosts, Limits, create_app, start
from tests.serve.builders import Adder, Client, manager_of, policy_of
from tests.serve.test_audit_log import audit_log_of, wait_until

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """What /metrics says after nine answers at exit 0 and one bad request."""
    engine = Adder(policy_of())
    engine.costs = {"money": ExitCosts((1.0, 3.0, 7.0), 4.0)}
    audit_log = audit_log_of(engine, tmp_path_factory.mktemp("state"))
    app = create_app(engine, Limits(max_wait_ms=0), manager=manager_of(audit_log), audit_rate=1.0)
    with start(app) as address:
        client = Client(address)
        for _ in range(9):
            client.predict([1, 2, 3])
        client.predict("nothing")
        wait_until(lambda: audit_log.monitor.n == 9)
        _, text = client.get("/metrics")
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def value(samples, name, **labels):
    (found,) = [each.value for each in samples if (each.name, each.labels) == (name, labels)]
    return found


def test_the_metrics_say_what_happened(samples):
    assert value(samples, "swiftsure_requests_total", status="200") == 9
    assert value(samples, "swiftsure_requests_total", status="422") == 1
    assert value(samples, "swiftsure_answers_total", exit="0", by="policy") == 9
    assert value(samples, "swiftsure_request_seconds_count", exit="0") == 9
    assert value(samples, "swiftsure_cost", unit="money") == 9
    assert value(samples, "swiftsure_cost_saved", unit="money") == 27
    assert value(samples, "swiftsure_audits_total", result="made") == 9
    assert value(samples, "swiftsure_losses") == 9
    assert value(samples, "swiftsure_risk_low") == 0 == value(samples, "swiftsure_risk")
    assert 0.05 < value(samples, "swiftsure_risk_high") < 1
    assert value(samples, "swiftsure_alarm") == 0


def test_the_dashboard_uses_only_metrics_that_exist(samples):
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for query in queries for name in re.findall(r"\bswiftsure_\w+", query)}
    known = {sample.name for sample in samples}
    assert used <= known
    shown = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in used}
    hidden = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in known} - shown
    names = ("losses", "requests", "answers", "policy_number")
    assert hidden <= {f"swiftsure_{name}" for name in names}
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_dashboard_adds_up_servers():
    """Counts, costs and queues are sums over servers; states and evidence are the worst of them."""
    board = json.loads(DASHBOARD.read_text())
    form = re.compile(r"(sum|max|min) ?(?:by \([\w, ]+\) )?\((?:rate\()?swiftsure_(\w+)")
    for query in [target["expr"] for panel in board["panels"] for target in panel["targets"]]:
        found = form.findall(query)
        assert len(found) == query.count("swiftsure_"), query
        for how, name in found:
            added = name.endswith(("_total", "_bucket", "queue_depth")) or name.startswith("cost")
            assert how == ("sum" if added else "min" if name == "risk_low" else "max"), query
