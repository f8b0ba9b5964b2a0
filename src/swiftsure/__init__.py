"""Swiftsure: fast inference with a guarantee.

To read the code, follow the data: `records` (losses at every exit), `curves` (losses and costs
along a path of settings), `control` (chooses the fastest safe setting) and `policy` (the setting
and its certificate).

Modules are imported on first use, so `import swiftsure` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swiftsure._version import __version__

if TYPE_CHECKING:
    import swiftsure.planning as planning
    import swiftsure.report as report
    from swiftsure import bounds, control, exits, losses, monitor, paths, scores, simulate
    from swiftsure.calibration import calibrate
    from swiftsure.cascade import Answer, Cascade, Endpoint
    from swiftsure.cascade.estimator import CertifiedCascade
    from swiftsure.choosing import calibrate_best
    from swiftsure.control import Control, ControlResult
    from swiftsure.curves import RiskCurve
    from swiftsure.evaluation import Study, evaluate
    from swiftsure.growing import GrowingCalibration
    from swiftsure.losses import Loss, LossRange
    from swiftsure.monitor import Monitor
    from swiftsure.paths import Path
    from swiftsure.policy import Certificate, Policy
    from swiftsure.records import ExitRecord, ThresholdRecord, load_record
    from swiftsure.risks import Risk
    from swiftsure.slices import SlicedPolicy, calibrate_slices

__all__ = [
    "Answer",
    "Cascade",
    "Certificate",
    "CertifiedCascade",
    "Control",
    "ControlResult",
    "Endpoint",
    "ExitRecord",
    "GrowingCalibration",
    "Loss",
    "LossRange",
    "Monitor",
    "Path",
    "Policy",
    "Risk",
    "RiskCurve",
    "SlicedPolicy",
    "Study",
    "ThresholdRecord",
    "__version__",
    "bounds",
    "calibrate",
    "calibrate_best",
    "calibrate_slices",
    "control",
    "evaluate",
    "exits",
    "load_record",
    "losses",
    "monitor",
    "paths",
    "planning",
    "report",
    "scores",
    "simulate",
]

_HOMES = {
    "Answer": "cascade",
    "Cascade": "cascade",
    "Certificate": "policy",
    "CertifiedCascade": "cascade.estimator",
    "Control": "control",
    "ControlResult": "control",
    "Endpoint": "cascade",
    "ExitRecord": "records",
    "GrowingCalibration": "growing",
    "Loss": "losses",
    "LossRange": "losses",
    "Monitor": "monitor",
    "Path": "paths",
    "Policy": "policy",
    "Risk": "risks",
    "RiskCurve": "curves",
    "SlicedPolicy": "slices",
    "Study": "evaluation",
    "ThresholdRecord": "records",
    "calibrate": "calibration",
    "calibrate_best": "choosing",
    "calibrate_slices": "slices",
    "evaluate": "evaluation",
    "load_record": "records",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _HOMES:
        value = getattr(import_module(f"swiftsure.{_HOMES[name]}"), name)
    elif name in __all__:
        value = import_module(f"swiftsure.{name}")
    else:
        raise AttributeError(f"module 'swiftsure' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
