"""Monitoring: an alarm when the risk in production exceeds what was promised.

`Monitor` raises the alarm, with a guarantee. `RequestOrder` adds late losses to it in request
order. `audit_rate` chooses how many requests to audit. `Drift` warns of falling savings and
drifting confidences, without a guarantee. `Watch` reads requests from JSON lines and saves the
state of all three in a file.
"""

from swiftsure.monitor.drift import Drift
from swiftsure.monitor.ids import request_ids
from swiftsure.monitor.order import RequestOrder
from swiftsure.monitor.rate import audit_rate
from swiftsure.monitor.risk import Monitor
from swiftsure.monitor.watch import StreamFaultError, Watch

__all__ = [
    "Drift",
    "Monitor",
    "RequestOrder",
    "StreamFaultError",
    "Watch",
    "audit_rate",
    "request_ids",
]
