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
    import swiftsure.report as report
    import swiftsure.study.planning as planning
    from swiftsure import exits, losses, monitor, scores
    from swiftsure.cascade import Answer, Cascade, Endpoint, Router
    from swiftsure.cascade.estimator import CertifiedCascade
    from swiftsure.certify import bounds
    from swiftsure.certify import controls as control
    from swiftsure.certify.anytime.calibration import GrowingCalibration
    from swiftsure.certify.best_of import calibrate_best
    from swiftsure.certify.calibration import Ask, Calibration, calibrate
    from swiftsure.certify.certificate import Certificate
    from swiftsure.certify.control import Control, ControlResult
    from swiftsure.certify.policy import Policy
    from swiftsure.certify.promise import CostPromise, Promise
    from swiftsure.certify.slices import SlicedPolicy, joined_datasets
    from swiftsure.comparing import compare
    from swiftsure.curves import paths
    from swiftsure.curves.curve import RiskCurve
    from swiftsure.curves.dials import dial_grid
    from swiftsure.curves.paths import Path
    from swiftsure.exits import ExitRule
    from swiftsure.losses import Loss, LossRange
    from swiftsure.monitor import Monitor
    from swiftsure.reasoning import TraceRecord, VoteRecord
    from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord, load_record
    from swiftsure.run import RunOptions
    from swiftsure.scores import LearnedScore
    from swiftsure.study import simulate
    from swiftsure.study.evaluation import evaluate
    from swiftsure.study.pools import Repeats
    from swiftsure.study.results import Study

__all__ = [
    "Answer",
    "Ask",
    "Calibration",
    "Cascade",
    "Certificate",
    "CertifiedCascade",
    "Control",
    "ControlResult",
    "CostPromise",
    "Endpoint",
    "ExitRecord",
    "ExitRule",
    "GrowingCalibration",
    "LearnedScore",
    "Loss",
    "LossRange",
    "Monitor",
    "Path",
    "Policy",
    "Promise",
    "Repeats",
    "RiskCurve",
    "Router",
    "RunOptions",
    "ShardedRecord",
    "SlicedPolicy",
    "Study",
    "ThresholdRecord",
    "TraceRecord",
    "VoteRecord",
    "__version__",
    "bounds",
    "calibrate",
    "calibrate_best",
    "compare",
    "control",
    "dial_grid",
    "evaluate",
    "exits",
    "joined_datasets",
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
    "Ask": "certify.calibration",
    "Calibration": "certify.calibration",
    "CostPromise": "certify.promise",
    "ExitRule": "exits",
    "Promise": "certify.promise",
    "joined_datasets": "certify.slices",
    "Answer": "cascade",
    "Cascade": "cascade",
    "Certificate": "certify.policy",
    "CertifiedCascade": "cascade.estimator",
    "Control": "certify.control",
    "ControlResult": "certify.control",
    "Endpoint": "cascade",
    "ExitRecord": "records",
    "GrowingCalibration": "certify.anytime.calibration",
    "LearnedScore": "scores",
    "Loss": "losses",
    "LossRange": "losses",
    "Monitor": "monitor",
    "Path": "curves.paths",
    "Policy": "certify.policy",
    "Repeats": "study.pools",
    "Router": "cascade",
    "RiskCurve": "curves.curve",
    "RunOptions": "run.options",
    "ShardedRecord": "records",
    "SlicedPolicy": "certify.slices",
    "Study": "study.results",
    "ThresholdRecord": "records",
    "TraceRecord": "reasoning",
    "VoteRecord": "reasoning",
    "calibrate": "certify.calibration",
    "calibrate_best": "certify.best_of",
    "compare": "comparing",
    "dial_grid": "curves.dials",
    "evaluate": "study.evaluation",
    "load_record": "records",
}


_MODULES = {
    "bounds": "certify.bounds",
    "control": "certify.controls",
    "paths": "curves.paths",
    "planning": "study.planning",
    "simulate": "study.simulate",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name in _HOMES:
        value = getattr(import_module(f"swiftsure.{_HOMES[name]}"), name)
    elif name in __all__:
        value = import_module(f"swiftsure.{_MODULES.get(name, name)}")
    else:
        raise AttributeError(f"module 'swiftsure' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
