"""Risks: how the losses of a record are turned into the losses that a control bounds.

| risk | loss of a sample at an exit or setting | needs |
|---|---|---|
| `gap` | its loss against the label minus the full model's (Eq. 6 of the paper) | labels |
| `consistency` | its loss against the full model's output (Eq. 8) | no labels |
| `zero-bounded gap` or `… consistency` | the same, or 0 if that is negative (Eq. 16) | as above |
| `selective gap` or `… consistency` | the same; its mean is over samples that exit | as above |

To add one, write a `RiskKind` and pass it to `RISKS.register`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib.registry import Registry
from swiftsure.curves.curve import ZERO_BOUNDED
from swiftsure.losses import LossRange

__all__ = ["RISKS", "Risk", "RiskKind", "risk_noun"]

Array = NDArray[Any]

SELECTIVE = "selective "
"""The prefix of a risk whose mean is over the samples that exit early."""


@dataclass(frozen=True)
class RiskKind:
    """How one kind of risk is computed from a record.

    Parameters
    ----------
    name : str
    table : {"losses", "inconsistencies"}
        Which losses of a record it is computed from.
    needs : str
        Description of that table, for error messages.
    noun : str
        Name of the quantity, put after the name of the loss in sentences.
    phrase : str
        The same, with the full model.
    relative : callable
        (losses (n, columns), column of the full model) -> losses relative to the full model.
    range : callable
        Declared range of the losses in the table -> range of the relative losses.
    selective : bool
        Whether the mean is over the samples that exit early, and not over all.
    """

    name: str
    table: Literal["losses", "inconsistencies"]
    needs: str
    noun: str
    phrase: str
    relative: Callable[[Array, int], Array]
    range: Callable[[LossRange], LossRange]
    selective: bool = False

    def relative_losses(self, record: Any, loss: str, full: int) -> tuple[Array, LossRange]:
        """Return relative losses in float64, (n, columns), and their declared range.

        `full` is the full model's column: the last exit, or the first threshold.
        """
        ranges = {"losses": record.loss_ranges, "inconsistencies": record.inconsistency_ranges}
        declared = LossRange.of(ranges[self.table][loss])
        return self.relative(getattr(record, self.table)[loss], full), self.range(declared)

    def zero_bounded(self) -> "RiskKind":
        """Return the risk of max(0, loss), Eq. 16 of the paper: an upper bound of this one."""
        return replace(
            self,
            name=ZERO_BOUNDED + self.name,
            noun=ZERO_BOUNDED + self.noun,
            phrase=ZERO_BOUNDED + self.phrase,
            relative=lambda losses, full: np.maximum(self.relative(losses, full), 0.0),
            range=lambda declared: self.range(declared).zero_bounded(),
        )

    def of_exits(self) -> "RiskKind":
        """Return the risk of the samples that exit early: E[loss | exits early]."""
        return replace(
            self,
            name=SELECTIVE + self.name,
            phrase=f"{self.phrase} of the samples that exit early",
            noun=f"{self.noun} of exits",
            selective=True,
        )


def _less_full_model(losses: Array, full: int) -> Array:
    return np.subtract(losses, losses[:, full : full + 1 or None], dtype=np.float64, order="C")


def _as_it_is(losses: Array, _: int) -> Array:
    return np.array(losses, np.float64, order="C")


RISKS: Registry[RiskKind] = Registry("risk")
"""Risks by name."""

GAP = RiskKind(
    "gap",
    "losses",
    needs="losses against labels",
    noun="gap",
    phrase="gap to the full model",
    relative=_less_full_model,
    range=LossRange.gap,
)
CONSISTENCY = RiskKind(
    "consistency",
    "inconsistencies",
    needs="inconsistencies",
    noun="inconsistency",
    phrase="inconsistency with the full model",
    relative=_as_it_is,
    range=lambda declared: declared,
)
for _kind in (
    *(GAP, CONSISTENCY),
    *(GAP.zero_bounded(), CONSISTENCY.zero_bounded()),
    *(GAP.of_exits(), CONSISTENCY.of_exits()),
):
    RISKS.register(_kind)


def risk_noun(name: str) -> str:
    """Return the noun of a risk for sentences; names that are not registered are kept.

    Examples
    --------
    >>> risk_noun("consistency"), risk_noun("zero-bounded gap")
    ('inconsistency', 'zero-bounded gap')
    """
    return RISKS[name].noun if name in RISKS else name


@dataclass(frozen=True)
class Risk:
    """A risk to control: which kind, of which loss, at which level ε.

    With `above`, the risk is the probability that the loss is above that limit, and not its mean.
    With `worst`, it is the mean loss of that share of the samples, the worst; `above` is then the
    point where losses begin to count, 0 by default.

    Examples
    --------
    >>> Risk("gap", "zero_one", epsilon=0.01).epsilon
    0.01
    >>> Risk("gap", "miou", epsilon=0.05, above=0.1).above  # at most 5 % lose more than 0.1 mIoU
    0.1
    """

    risk: str = "gap"
    loss: str | None = None
    epsilon: float = None  # type: ignore[assignment]
    above: float | None = None
    worst: float | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown kind; the loss and ε are checked against the record later."""
        RISKS.choose(self.risk)
        if self.epsilon is None:
            raise TypeError("`epsilon` must be given: the largest risk that is allowed.")
