"""Risks: how the losses of a record are turned into the losses that a control bounds.

| risk | loss of a sample at an exit or setting | needs |
|---|---|---|
| `gap` | its loss against the label minus the full model's (Eq. 6 of the paper) | labels |
| `consistency` | its loss against the full model's output (Eq. 8) | no labels |
| `zero-bounded gap` or `… consistency` | the same, or 0 if that is negative (Eq. 16) | as above |

To add one, write a `RiskKind` and pass it to `RISKS.register`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib.registry import Registry
from swiftsure.curves.statistic import ZERO_BOUNDED
from swiftsure.losses import LossRange

__all__ = ["RISKS", "RiskKind", "risk_noun"]

Array = NDArray[Any]


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
    """

    name: str
    table: Literal["losses", "inconsistencies"]
    needs: str
    noun: str
    phrase: str
    relative: Callable[[Array, int], Array]
    range: Callable[[LossRange], LossRange]

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
