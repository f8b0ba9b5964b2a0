"""The library's rules and tests in the form that the checkers take."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import swiftsure as ss
from swiftsure.certify.bounds import BOUNDS
from tests.guarantees.checkers import Rule, Task, Test

__all__ = [
    "ANY_LOSS",
    "GAPS",
    "NON_NEGATIVE",
    "ORDER_FREE",
    "POOLS",
    "UP_TO_ONE",
    "certifies",
    "curve_of",
    "p_value",
    "rule",
    "upper_bound",
]

UP_TO_ONE = [name for name, bound in BOUNDS.items() if bound.needs != "ternary"]
"""Bounds for losses of 0 or 1."""

NON_NEGATIVE = [name for name in UP_TO_ONE if BOUNDS[name].needs != "binary"]
"""Bounds for losses in [0, B]."""

ANY_LOSS = [name for name, bound in BOUNDS.items() if bound.needs == "any"]
"""Bounds for losses that may be negative."""

GAPS = [name for name, bound in BOUNDS.items() if bound.needs in ("any", "ternary")]
"""Bounds for losses of -1, 0 or 1."""

ORDER_FREE = [name for name in UP_TO_ONE if not BOUNDS[name].uses_order]
"""Bounds for losses of 0 or 1 that do not depend on the order of the samples."""

POOLS = [name for name, bound in BOUNDS.items() if bound.pools]
"""Bounds for samples drawn without replacement from a finite pool."""

Floats = NDArray[np.float64]


def curve_of(losses: Floats, task: Task) -> ss.RiskCurve:
    """Return the curve of relative losses (n, K)."""
    return ss.RiskCurve.from_losses(
        np.arange(losses.shape[1])[::-1],
        losses,
        loss_range=(task.low, task.high),
        binary=task.binary,
        relative=True,
    )


def rule(control: str, **options: Any) -> Rule:
    """Return one of the library's controls with its options."""

    def choose(losses: Floats, task: Task, seed: int) -> int | None:
        curve = curve_of(losses, task)
        if control == "empirical":
            return ss.control.empirical(curve, task.epsilon).index
        if control == "crc":
            return ss.control.crc(curve, task.epsilon, seed=seed, **options).index
        run = getattr(ss.control, control)
        return run(curve, task.epsilon, task.delta, seed=seed, **options).index

    return choose


def certifies(bound: str, pool: int | None = None) -> Test:
    """Return one of the library's tests."""
    return lambda losses, task: ss.bounds.certify(
        losses, task.epsilon, task.delta, bound=bound, loss_range=(task.low, task.high), pool=pool
    )


def p_value(bound: str, pool: int | None = None) -> Callable[[Floats, Task], float]:
    """Return one of the library's p-values."""
    return lambda losses, task: ss.bounds.p_value(
        losses, task.epsilon, bound=bound, loss_range=(task.low, task.high), pool=pool
    )


def upper_bound(bound: str, pool: int | None = None) -> Callable[[Floats, Task], float]:
    """Return one of the library's upper bounds."""
    return lambda losses, task: ss.bounds.upper_bound(
        losses, task.delta, bound=bound, loss_range=(task.low, task.high), pool=pool
    )
