"""Traces and metrics through OpenTelemetry."""

import json
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from swiftsure.serve import ExitCosts, Limits, create_app, start
from swiftsure.serve.telemetry import COUNTERS, GAUGES, SECONDS, instrument
from tests.serve.builders import Adder, Client, manager_of, policy_of
from tests.serve.test_audit_log import audit_log_of, wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Spans, and metrics of both kinds, after two answers and a bad request."""
    spans, reader, providers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    providers.add_span_processor(SimpleSpanProcessor(spans))
    engine = Adder(policy_of())
    engine.costs = {"money": ExitCosts((1.0, 3.0, 7.0), 4.0)}
    audit_log = audit_log_of(engine, tmp_path_factory.mktemp("state"))
    app = create_app(engine, Limits(max_wait_ms=0), manager=manager_of(audit_log), audit_rate=1.0)
    meters = MeterProvider([reader])
    assert instrument(app, tracer_provider=providers, meter_provider=meters) is app
    with start(app) as address:
        client = Client(address)
        client.predict([1, 2, 3])
        client.predict("nothing")
        headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-{'b' * 16}-01"}
        body = json.dumps({"inputs": [1, 2, 3]}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{address}/predict", body, headers)).close()
        wait_until(lambda: audit_log.monitor.n == 2)
        _, text = client.get("/metrics")
        read = reader.get_metrics_data()
    families = [
        family
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    ]
    found = {
        metric.name: metric.data.data_points
        for resource in read.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    return spans.get_finished_spans(), found, families


def test_a_span_says_who_answered(seen):
    spans = [each for each in seen[0] if each.name == "POST /predict"]
    assert [each.attributes["http.response.status_code"] for each in spans] == [200, 422, 200]
    answered = [each for each in spans if "swiftsure.exit" in each.attributes]
    assert [each.attributes["swiftsure.exit"] for each in answered] == [0, 0]
    assert not answered[0].attributes["swiftsure.full_model"]


def test_a_span_continues_the_clients_trace(seen):
    spans = [each for each in seen[0] if each.name == "POST /predict"]
    assert f"{spans[-1].context.trace_id:032x}" == TRACE
    assert spans[-1].parent.span_id == int("b" * 16, 16)
    assert spans[0].parent is None


def test_metrics_agree_with_those_of_prometheus(seen):
    _, found, families = seen
    for family in families:
        if family.type == "histogram":
            assert sum(point.count for point in found[family.name]) == 2
            continue
        told = {tuple(sorted(sample.labels.items())): sample.value for sample in family.samples}
        mirrored = {
            tuple(sorted(point.attributes.items())): point.value for point in found[family.name]
        }
        assert mirrored == told, family.name


def test_every_metric_of_the_server_is_mirrored(seen):
    assert {family.name for family in seen[2]} <= {SECONDS, *COUNTERS, *GAUGES}


def test_the_reference_lists_every_metric():
    page = Path(__file__).parents[2] / "docs" / "reference" / "server.md"
    text = page.read_text(encoding="utf-8")
    missing = [name for name in (SECONDS, *COUNTERS, *GAUGES) if name not in text]
    assert not missing


def test_other_addresses_share_a_name():
    spans, providers = InMemorySpanExporter(), TracerProvider()
    providers.add_span_processor(SimpleSpanProcessor(spans))
    app = instrument(create_app(Adder(policy_of())), tracer_provider=providers)
    with start(app) as address:
        Client(address).get("/nothing/here")
    (span,) = spans.get_finished_spans()
    assert span.name == "GET"
