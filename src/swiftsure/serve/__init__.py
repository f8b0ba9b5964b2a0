"""Serve a certified model over HTTP, audit it, and fall back to the full model on an alarm."""

try:
    import prometheus_client as _prometheus_client  # noqa: F401
    import starlette as _starlette  # noqa: F401
    import uvicorn as _uvicorn  # noqa: F401
except ImportError:
    raise ImportError(
        "swiftsure.serve needs a web server: pip install 'swiftsure[serve]'."
    ) from None

from swiftsure.serve.app import create_app
from swiftsure.serve.audit_log import AuditLog, audit_monitor
from swiftsure.serve.batching import Batcher
from swiftsure.serve.drill import DrillResult, drill
from swiftsure.serve.engine import (
    Answer,
    Comparison,
    Description,
    Engine,
    EngineOptions,
    ExitCosts,
    Inputs,
    InvalidRequestError,
    Part,
    StreamEngine,
)
from swiftsure.serve.lifecycle import start
from swiftsure.serve.limits import Limits
from swiftsure.serve.loading import engine_of, load_engine
from swiftsure.serve.policy_manager import PolicyManager, PolicyStore
from swiftsure.serve.queueing import BusyError
from swiftsure.serve.workers import WorkerEngine

__all__ = [
    "Answer",
    "AuditLog",
    "Batcher",
    "BusyError",
    "Comparison",
    "Description",
    "DrillResult",
    "Engine",
    "EngineOptions",
    "ExitCosts",
    "Inputs",
    "InvalidRequestError",
    "Limits",
    "Part",
    "PolicyManager",
    "PolicyStore",
    "StreamEngine",
    "WorkerEngine",
    "audit_monitor",
    "create_app",
    "drill",
    "engine_of",
    "load_engine",
    "start",
]
