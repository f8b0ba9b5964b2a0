"""Units: what was drawn independently, samples or groups of them, and how much each counts."""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from swiftsure.curves.conditions import Condition
from swiftsure.curves.worst_share import Members

__all__ = ["Average", "Units"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]
Average = Literal["group", "sample"]
"""What a risk weights equally: every group, or every sample."""


@dataclass(frozen=True, eq=False)
class Units:
    """How the rows of a curve were drawn; `swiftsure.curves.sampling.drawn` makes them.

    Attributes
    ----------
    grouped : bool
        Whether rows are groups of samples.
    average : {"sample", "group"}
        What risks and mean costs weight equally: every sample, or every group.
    max_size : int or None
        The declared largest group size, M, if the risk of groups is an average over samples.
    n_samples : int or None
        Number of samples in the groups.
    weights : (n,) or None
        The size of each row: how much it counts in a mean over samples, at most 1; None if all
        rows count the same. For groups it is their number of samples divided by M.
    sizes : (n, K) or None
        The same at each setting, if only the samples that exit there count.
    max_weight : float or None
        The largest weight, if losses are weighted.
    drawn_as : Condition or None
        What calibration and production samples are, if not draws of one distribution.
    members : Members or None
        The samples that rows were made of, if a worst share has to look at each of them.
    """

    grouped: bool = False
    average: Average = "sample"
    max_size: int | None = None
    n_samples: int | None = None
    weights: Floats | None = field(repr=False, default=None)
    sizes: Floats | None = field(repr=False, default=None)
    max_weight: float | None = None
    drawn_as: Condition | None = None
    members: Members | None = field(repr=False, default=None)

    @property
    def name(self) -> Literal["samples", "groups"]:
        """What was drawn independently: "samples", or "groups" of them."""
        return "groups" if self.grouped else "samples"

    @property
    def draws(self) -> Condition:
        """What calibration and production samples are."""
        return self.drawn_as or Condition.of("draws", kind="same", unit=self.name)

    @property
    def in_tests(self) -> Floats | None:
        """The size of each row at each setting, (n, K) or (n, 1); None if all rows count 1."""
        if self.sizes is not None:
            return self.sizes
        return None if self.weights is None else self.weights[:, None]

    def take(self, rows: Rows, settings: slice = slice(None)) -> "Units":
        """Return the units of some rows, in that order, at some settings."""
        if self.weights is None and self.sizes is None and self.members is None:
            return self
        return replace(
            self,
            weights=None if self.weights is None else self.weights[rows],
            sizes=None if self.sizes is None else self.sizes[rows, settings],
            members=None if self.members is None else self.members.take(rows, settings),
        )

    def along(self, thresholds: NDArray[np.float32]) -> "Units":
        """Return the units along another path."""
        if self.members is None:
            return self
        return replace(self, members=self.members.along(thresholds))
