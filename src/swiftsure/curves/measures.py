"""Measures: what of a loss a promise averages, such as whether it is above a limit.

| `Promise(...)` | a loss ℓ is read as | the mean is, or bounds |
|---|---|---|
| plain | ℓ | the mean loss |
| `above=0.1` | 1 if ℓ > 0.1, else 0 | P(ℓ > 0.1) |
| `worst=0.1` | t + (ℓ − t)⁺ / 0.1 | the mean loss of the worst tenth |

A new kind of promise is a field of `Measure` and its `Reading` here, and its words in
`swiftsure.certify.wording.measures`. Promises, certificates, studies, monitors, reports and the
command line take both from there.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.losses import LossRange

if TYPE_CHECKING:
    from swiftsure.curves.curve import RiskCurve

__all__ = ["READINGS", "Measure", "Reading", "measured"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """What of a loss is averaged; the mean loss, unless a field is given.

    Attributes
    ----------
    above : float or None
        A loss counts as 1 if it is above this, else as 0. With `worst`, the point from which losses
        count; by default, the losses of earlier samples decide it.
    worst : float or None
        Only this share of the losses counts, the worst.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    above: float | None = None
    worst: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is not a number; limits are checked against the losses later."""
        for name, value in self.measure_values.items():
            object.__setattr__(self, name, checks.number(name, value))

    @property
    def measure_values(self) -> dict[str, float]:
        """The fields that are given."""
        values = {each.name: getattr(self, each.name) for each in fields(Measure)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def measure(self) -> "Measure":
        """The measure alone, of a promise or statistic that holds one."""
        return Measure(**self.measure_values)

    @property
    def kind(self) -> str:
        """The field that decides, a key of `READINGS`; "" for the mean loss."""
        return next((name for name in READINGS if name in self.measure_values), "")

    @property
    def reading(self) -> "Reading":
        """How losses are read."""
        return READINGS[self.kind]


def _largest(measure: Measure, read: LossRange) -> float:  # noqa: ARG001 (of a Reading)
    return read.high


@dataclass(frozen=True)
class Reading:
    """How a kind of measure reads losses.

    Attributes
    ----------
    read : callable
        (measure, losses) -> losses as they count.
    range : callable
        (measure, declared range of the losses) -> range of what they count as. Raises if the
        measure does not fit the losses.
    largest : callable
        (measure, range of what losses count as) -> a loss that counts as the largest.
    fits : callable
        (measure, range of what losses count as, largest weight or None) -> whether a file can be
        right that says so.
    any_loss : bool
        Whether what losses count as is in its range whatever they are.
    additive : bool
        Whether the risk is the mean of what single losses count as. The cut of a worst share
        depends on other samples, so it is not, and there is no test of it without replacement, nor
        one of production losses.
    """

    read: Callable[[Measure, Floats], Floats]
    range: Callable[[Measure, LossRange], LossRange]
    largest: Callable[[Measure, LossRange], float] = _largest
    fits: Callable[[Measure, tuple[float, float], float | None], bool] = lambda *_: True
    any_loss: bool = False
    additive: bool = True


def measured(curve: "RiskCurve", measure: Measure) -> "RiskCurve":
    """Return the curve of what losses count as, of single samples with plain losses."""
    if not measure.kind:
        return curve
    reading, kind, held = measure.reading, measure.kind, curve.statistic.kind
    declared = reading.range(measure, curve.loss_range)
    if curve.units.grouped or curve.units.max_weight is not None:
        raise ValueError(f"`{kind}` must be asked for before samples are grouped or weighted.")
    if held:
        raise ValueError(f"`{kind}` cannot be asked of losses that `{held}` was asked of.")
    values: dict[str, Any] = dict(measure.measure_values)
    return replace(
        curve,
        loss_range=declared,
        statistic=replace(curve.statistic, **values),
        data=curve.mapped(lambda losses: reading.read(measure, losses)),
    )


def _limit(measure: Measure, declared: LossRange) -> float:
    limit = measure.above or 0.0
    if not 0 <= limit < declared.high:
        raise ValueError(f"`above` must be in [0, {declared.high:g}), but got {limit:g}.")
    return limit


def _tail_range(measure: Measure, declared: LossRange) -> LossRange:
    _limit(measure, declared)
    return LossRange(0, 1, whole=True)


def _counted_loss(measure: Measure, read: LossRange) -> float:
    """Return a loss above the limit; losses are compared with it, and may be any numbers."""
    return max(read.high, math.nextafter(measure.above or 0.0, math.inf))


def _worst_range(measure: Measure, declared: LossRange) -> LossRange:
    share = checks.between("worst", measure.worst or 0.0, 0.0, 1.0)
    limit = _limit(measure, declared)
    return LossRange(limit, limit + (declared.high - limit) / share)


def _from_limit(measure: Measure, losses: Floats) -> Floats:
    limit = measure.above or 0.0
    counted: Floats = limit + np.maximum(losses - limit, 0.0) / (measure.worst or 1.0)
    return counted


def _worst_fits(measure: Measure, ends: tuple[float, float], weight: float | None) -> bool:
    lowest = ends[0] == (measure.above or 0.0)
    return 0.0 < (measure.worst or 0.0) < 1.0 and (
        lowest or (ends[0] == 0.0 and weight is not None)  # weighted losses may be 0
    )


READINGS = {
    "worst": Reading(
        _from_limit,
        _worst_range,
        largest=lambda measure, read: read.low + (measure.worst or 1.0) * (read.high - read.low),
        fits=_worst_fits,
        additive=False,
    ),
    "above": Reading(
        lambda measure, losses: (losses > (measure.above or 0.0)).astype(np.float64),
        _tail_range,
        largest=_counted_loss,
        fits=lambda measure, ends, weight: (
            (measure.above or 0.0) >= 0.0 and ends in ((0.0, weight or 1.0), (0.0, 1.0))
        ),
        any_loss=True,
    ),
    "": Reading(lambda _, losses: losses, lambda _, declared: declared),
}
"""Readings by the field of `Measure` that asks for them; the first that is given decides."""
