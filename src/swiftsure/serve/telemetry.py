"""Traces and metrics of a server or a proxy through OpenTelemetry, named as for Prometheus."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import Metric
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["COUNTERS", "GAUGES", "SECONDS", "instrument"]

SECONDS = "swiftsure_request_seconds"

COUNTERS = ("swiftsure_requests", "swiftsure_answers", "swiftsure_audits", "swiftsure_reasons")

GAUGES = (
    *("swiftsure_policy_info", "swiftsure_policy_number", "swiftsure_queue_depth"),
    *("swiftsure_full_model", "swiftsure_monitor_fault", "swiftsure_alarm", "swiftsure_losses"),
    *("swiftsure_cost", "swiftsure_cost_saved", "swiftsure_cost_audits"),
    *("swiftsure_evidence", "swiftsure_evidence_needed"),
    *("swiftsure_risk", "swiftsure_risk_low", "swiftsure_risk_high"),
    *("swiftsure_risk_recent", "swiftsure_risk_allowed"),
)


def instrument(
    app: Starlette, *, tracer_provider: Any = None, meter_provider: Any = None
) -> Starlette:
    """Send a span for each request, and all metrics, through OpenTelemetry.

    A span continues the trace that the client's headers name. It has the exit that answered and
    whether the full model did. Call this before the application starts.

    Parameters
    ----------
    app : Starlette
        From `create_app` or `create_proxy`.
    tracer_provider, meter_provider : optional
        By default OpenTelemetry's global ones, which `opentelemetry-instrument` sets.

    Returns
    -------
    app : Starlette
        The same application.
    """
    try:
        from opentelemetry import metrics, trace
    except ImportError:
        raise ImportError("Telemetry needs OpenTelemetry: pip install 'swiftsure[otel]'.") from None
    from swiftsure import __version__

    tracer = trace.get_tracer("swiftsure", __version__, tracer_provider)
    meter = metrics.get_meter("swiftsure", __version__, meter_provider)
    service = app.state.service
    seconds = meter.create_histogram(SECONDS, "s", "Time from request to answer, by exit.")

    def answered(exit_: int, full: bool, took: float) -> None:
        trace.get_current_span().set_attributes(
            {"swiftsure.exit": exit_, "swiftsure.full_model": full}
        )
        seconds.record(took, {"exit": str(exit_)})

    def families() -> Iterable[Metric]:
        running = getattr(service, "metrics", None)
        return () if running is None else running.registry.collect()

    for name in COUNTERS:
        meter.create_observable_counter(name, [_reader(name, f"{name}_total", families)])
    for name in GAUGES:
        meter.create_observable_gauge(name, [_reader(name, name, families)])
    paths = {getattr(route, "path", "") for route in app.routes}
    app.add_middleware(_Traced, tracer=tracer, service=service, answered=answered, paths=paths)
    return app


def _reader(family: str, sample: str, families: Callable[[], Iterable[Metric]]) -> Any:
    """Return what OpenTelemetry calls for the values of a metric."""
    from opentelemetry.metrics import Observation

    def read(_options: Any) -> Iterable[Any]:
        return [
            Observation(each.value, dict(each.labels))
            for found in families()
            if found.name == family
            for each in found.samples
            if each.name == sample
        ]

    return read


class _Traced:
    """Middleware that makes a span for each HTTP request."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        tracer: Any,
        service: Any,
        answered: Callable[..., None],
        paths: set[str],
    ) -> None:
        self._app, self._tracer, self._paths = app, tracer, paths
        self._service, self._answered = service, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request within its span."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        self._service.metrics.on_answer = self._answered
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        method, path = scope["method"], scope["path"]
        told = {"http.request.method": method, "url.path": path}
        name = (
            f"{method} {path}" if path in self._paths else method
        )  # few names: they are grouped by
        with self._tracer.start_as_current_span(
            name, extract(headers), SpanKind.SERVER, told
        ) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, noting)
