"""Serve a certified model over HTTP, audit it, and fall back to the full model on an alarm."""

try:
    import prometheus_client as _prometheus_client  # noqa: F401
    import starlette as _starlette  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ImportError:
    raise ImportError(
        "swiftsure.serving needs a web server: pip install 'swiftsure[serve]'."
    ) from None

from swiftsure.serving.app import Limits, create_app
from swiftsure.serving.batching import Batcher, BusyError
from swiftsure.serving.drill import DrillResult, drill
from swiftsure.serving.engine import Answer, Engine, ExitCosts, InvalidRequestError
from swiftsure.serving.running import start
from swiftsure.serving.watching import Watcher, watched_monitor

__all__ = [
    "Answer",
    "Batcher",
    "BusyError",
    "DrillResult",
    "Engine",
    "ExitCosts",
    "InvalidRequestError",
    "Limits",
    "Watcher",
    "create_app",
    "drill",
    "start",
    "watched_monitor",
]
