"""Monitoring: an alarm when the risk in production exceeds what was promised.

`Monitor` raises the alarm, with a guarantee. `RequestOrder` puts late losses in order before it.
`Drift` warns of falling savings and drifting confidences, without one. `Watch` reads all of this
from JSON lines and keeps it in a file.
"""

from swiftsure.monitor.drift import Drift
from swiftsure.monitor.order import RequestOrder
from swiftsure.monitor.risk import Monitor
from swiftsure.monitor.watch import StreamFaultError, Watch

__all__ = ["Drift", "Monitor", "RequestOrder", "StreamFaultError", "Watch"]
