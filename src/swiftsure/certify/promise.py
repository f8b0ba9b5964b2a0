"""Promises: what is to hold, as small values that compose.

| value | statement |
|---|---|
| `Promise("zero_one", epsilon=0.01)` | the mean gap to the full model is at most ε |
| `Promise("brier", risk="consistency", epsilon=0.05)` | the mean inconsistency with it |
| `Promise("brier", above=0.1, epsilon=0.05)` | P(gap > 0.1) |
| `Promise("brier", worst=0.1, epsilon=0.3)` | the mean gap of the worst tenth |
| `Promise("zero_one", among="exits", epsilon=0.08)` | the mean gap of the samples that exit early |
| `Promise("zero_one", within="slices", epsilon=0.05)` | the mean gap in every slice |
| `CostPromise("flops", at_most=3e9)` | the mean cost |

Every promise is a mean of what losses count as, so one test certifies any of them; see
`swiftsure.curves.measures`. How samples were drawn (groups, weights, slices) is the record's to
say.
"""

from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.certify.wording.measures import WORDS
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.measures import Measure, measured
from swiftsure.curves.paths import PathLike
from swiftsure.curves.risks import RISKS
from swiftsure.curves.statistic import UNNAMED
from swiftsure.curves.transforms import among_exits
from swiftsure.exits import ExitRule

__all__ = ["CostPromise", "Promise", "slice_rows"]

AMONG = ("all", "exits")
WITHIN = ("slices", "each slice")


@checks.suggesting
@dataclass(frozen=True, repr=False)
class Promise(Measure):
    """One statement: a risk is at most ε.

    Parameters
    ----------
    loss : str, optional
        You may omit it if the record has just one.
    epsilon : float
        The largest risk allowed, in (0, B) for losses of at most B.
    risk : {"gap", "consistency", "zero-bounded …"}
        Against labels, relative to the full model; or against the full model's output.
    above : float, optional
        Bound the probability that the loss is above this, instead of its mean. With `worst`, it is
        the point from which losses count; by default, earlier samples decide it.
    worst : float, optional
        Bound the mean loss of this share of the samples, the worst, instead of the mean of all.
    among : {"all", "exits"}
        Whose loss counts: that of all samples, or of those that exit early.
    within : {None, "slices", "each slice"}
        Where it holds: over all samples; in every slice at once, with one setting; or in every
        slice, each with a setting of its own.

    Examples
    --------
    >>> print(Promise("miou", above=0.1, epsilon=0.05))
    P(miou gap > 0.1) ≤ 0.05
    """

    loss: str | None = None
    _: KW_ONLY
    epsilon: float = None  # type: ignore[assignment]
    risk: str = "gap"
    among: Literal["all", "exits"] = "all"
    within: Literal["slices", "each slice"] | None = None

    def __post_init__(self) -> None:
        """Refuse unknown words; the loss and ε are checked against the record later."""
        super().__post_init__()
        if not isinstance(self.loss, str | None):
            raise TypeError(f"`loss` must be the name of a loss, but got {self.loss!r}.")
        if self.epsilon is None:
            raise TypeError("`epsilon` must be given: the largest risk that is allowed, like 0.01.")
        object.__setattr__(self, "epsilon", checks.number("epsilon", self.epsilon))
        RISKS.choose(self.risk)
        checks.choice("among", self.among, AMONG)
        if self.within is not None:
            checks.choice("within", self.within, WITHIN)

    def curve(
        self,
        record: Any,
        rule: ExitRule,
        path: PathLike = None,
        missing: str = "raise",
        rows: NDArray[np.int64] | None = None,
    ) -> RiskCurve:
        """Return what this promise is about, for each unit of a record and setting of a path.

        `rows` are the samples of one slice. The loss is transformed first, then restricted,
        weighted and summed over groups.
        """
        if isinstance(record, RiskCurve):
            return self._of_curve(record)
        plain = record.plain_curve(self.risk, self.loss, rule, path, missing)
        return record.sampling.applied(self._transformed(plain), record.groups, rows)  # type: ignore[no-any-return]

    def uncut(self, record: Any, rule: ExitRule, path: PathLike = None) -> RiskCurve:
        """Return the curve of single samples along the whole path, whatever labels are missing.

        Where they are, its losses mean nothing; its costs do.
        """
        # Counting missing labels as the worst loss keeps the whole path.
        missing = "worst" if hasattr(record, "with_labels") else "raise"
        plain: RiskCurve = record.plain_curve(self.risk, self.loss, rule, path, missing)
        return plain

    def _of_curve(self, curve: RiskCurve) -> RiskCurve:
        if self.within is not None:
            raise ValueError("`within` needs a record with slices; a RiskCurve has none.")
        held = curve.statistic
        if self.risk not in ("gap", held.risk):
            raise ValueError(f"`risk` must be the curve's own, {held.risk}, but got {self.risk!r}.")
        if self.loss not in (None, held.loss) and held.loss != UNNAMED:
            raise ValueError(f"`loss` must be the curve's own, {held.loss}, but got {self.loss!r}.")
        named = replace(curve, statistic=replace(held, loss=self.loss or held.loss))
        return self._transformed(named)

    def _transformed(self, curve: RiskCurve) -> RiskCurve:
        return measured(among_exits(curve) if self.among == "exits" else curve, self)

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults, as they are written."""
        own = [name for name in ("loss",) if self.loss is not None]
        own += [
            e.name for e in fields(self) if getattr(self, e.name) != e.default and e.name not in own
        ]
        return f"Promise({', '.join(f'{name}={getattr(self, name)!r}' for name in own)})"

    def __str__(self) -> str:
        """Return the statement in short."""
        text = WORDS[self.kind].short(self, f"{self.loss or 'loss'} {RISKS[self.risk].noun}")
        text += " of samples that exit early" * (self.among == "exits")
        where = "" if self.within is None else f" in {self.within.replace('slices', 'all slices')}"
        return f"{text}{where} ≤ {self.epsilon:g}"


@checks.suggesting
@dataclass(frozen=True)
class CostPromise:
    """One statement: a mean cost is at most a limit.

    Parameters
    ----------
    cost : str
        Name of one of the record's costs.
    at_most : float

    Examples
    --------
    >>> print(CostPromise("flops", at_most=3e9))
    mean flops ≤ 3e+09
    """

    cost: str
    _: KW_ONLY
    at_most: float

    def __post_init__(self) -> None:
        """Refuse a limit that is not positive."""
        if not isinstance(self.cost, str):
            raise TypeError(f"`cost` must be the name of a cost, but got {self.cost!r}.")
        limit = checks.between("at_most", self.at_most, 0.0, np.inf)
        object.__setattr__(self, "at_most", limit)

    def __str__(self) -> str:
        """Return the statement in short."""
        return f"mean {self.cost} ≤ {self.at_most:g}"


def slice_rows(record: Any) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each slice of a record, by name."""
    labels = getattr(record, "slices", None)
    if labels is None:
        raise ValueError("`within` needs a record with slices: `record.sliced(names)` adds them.")
    names, codes = np.unique(np.asarray(labels).astype(str), return_inverse=True)
    return {str(name): np.flatnonzero(codes == k) for k, name in enumerate(names)}
