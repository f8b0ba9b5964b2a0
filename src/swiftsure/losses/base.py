"""The classes `Loss`, `TensorFunctions` and `LossRange`, and the registry of losses."""

from collections.abc import Callable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.registry import Registry

__all__ = ["LOSSES", "Loss", "LossRange", "TensorFunctions"]

Array = NDArray[Any]


@dataclass(frozen=True)
class LossRange:
    """The declared range of a loss; bounds use this, never the observed range.

    Parameters
    ----------
    low, high : float
        Smallest and largest possible loss.
    whole : bool
        Whether losses are whole numbers; whole numbers in [0, 1] admit the exact binomial test, and
        those in [-1, 1] the exact trinomial test.

    Examples
    --------
    >>> LossRange(0, 1, whole=True).gap()
    LossRange(low=-1.0, high=1.0, whole=True)
    """

    low: float = 0.0
    high: float = 1.0
    whole: bool = False

    def __post_init__(self) -> None:
        """Refuse ranges that are empty, infinite, or not above 0."""
        object.__setattr__(self, "low", checks.number("loss_range", self.low))
        object.__setattr__(self, "high", checks.number("loss_range", self.high))
        if not (np.isfinite(self.low) and np.isfinite(self.high) and self.low < self.high):
            raise ValueError(
                f"`loss_range` must be (low, high) with low < high, but got"
                f" ({self.low:g}, {self.high:g})."
            )
        if not self.high > 0:
            raise ValueError(f"`loss_range` must reach above 0, but got high = {self.high:g}.")

    @property
    def binary(self) -> bool:
        """Whether every loss is 0 or 1."""
        return self.whole and (self.low, self.high) == (0.0, 1.0)

    @property
    def ternary(self) -> bool:
        """Whether every loss is −1, 0 or 1, like a 0-1 gap."""
        return self.whole and (self.low, self.high) == (-1.0, 1.0)

    @classmethod
    def of(cls, value: "LossRange | tuple[float, float]") -> "LossRange":
        """Return a range, or a pair (low, high), as a LossRange."""
        if isinstance(value, LossRange):
            return value
        try:
            low, high = (checks.number("loss_range", each) for each in value)
        except (TypeError, ValueError):
            raise TypeError(
                f"`loss_range` must be a pair (low, high), but got {value!r}."
            ) from None
        return cls(low, high)

    def gap(self) -> "LossRange":
        """Return the range of the difference of two such losses."""
        width = self.high - self.low
        return LossRange(-width, width, self.whole)

    def zero_bounded(self) -> "LossRange":
        """Return the range of max(0, loss), Eq. 16 of the paper."""
        return LossRange(max(0.0, self.low), self.high, self.whole)


class TensorFunctions(NamedTuple):
    """How a loss is computed on tensors; its functions get a list with the output of every exit.

    Attributes
    ----------
    against_labels : callable
        (outputs, labels) -> (n, n_exits). Missing labels are negative, and their rows are ignored.
        If it is an `nn.Module`, such as a network that compares images, its weights identify the
        shards of a sweep.
    against_last : callable
        outputs -> (n, n_exits), 0 in the last column.
    check_labels : callable
        (outputs, labels); raises if labels are invalid. It is called before they are moved to the
        device, where a check would wait for the network.
    """

    against_labels: Callable[[list[Any], Any], Any] | None = None
    against_last: Callable[[list[Any]], Any] | None = None
    check_labels: Callable[[list[Any], Any], None] | None = None


@dataclass(frozen=True)
class Loss:
    """A named loss: its range, its input, and the functions that compute it.

    Only the functions that are used need to be set: records of arrays and sweeps over texts call
    `against_labels` and `against_last`; `collect`, audits and sweeps over images call `tensors`.

    Parameters
    ----------
    name : str
        The name that users pass.
    range : LossRange
        Range of the loss against labels.
    of : {"prediction", "distribution"}
        What it is computed from. A prediction loss is the same for equal predictions, so its gap is
        0, whatever the label, if an exit agrees with the full model.
    against_labels : callable, optional
        (probabilities (n, n_exits, n_classes), labels (n,)) -> losses (n, n_exits).
    against_last : callable, optional
        probabilities (n, n_exits, n_classes) -> inconsistencies (n, n_exits) with the last exit.
    tensors : TensorFunctions or str, optional
        The same on tensors; a string "module:attribute" is imported when it is needed.

    Notes
    -----
    Segmentation has a distribution and a label at every pixel: probabilities are then of shape
    (n, n_exits, height, width, n_classes) and labels (n, height, width). Losses that compare texts,
    (n, n_exits), or images, (n, n_exits, channels, height, width), get these instead of
    probabilities; for a pair, one is the exit's and the other the label.
    """

    name: str
    range: LossRange
    of: Literal["prediction", "distribution"]
    against_labels: Callable[[Array, Any], Array] | None = None
    against_last: Callable[[Array], Array] | None = None
    tensors: TensorFunctions | str | None = None

    def gap_needs_no_label(self) -> bool:
        """Return whether labels may be missing, because equal predictions have equal losses.

        Raises
        ------
        ValueError
            If the loss is not registered: a record knows its losses by name only.
        """
        if self.of == "prediction" and LOSSES.get(self.name) is not self:
            raise ValueError(
                f"`losses`: labels are missing, which {self.name!r} allows only once it is known by"
                " name: pass it to swiftsure.losses.LOSSES.register first."
            )
        return self.of == "prediction"

    def on_tensors(self) -> TensorFunctions:
        """Return the functions on tensors, importing them if they are given by name."""
        found: TensorFunctions | None
        found = resolve_name(self.tensors) if isinstance(self.tensors, str) else self.tensors
        return found or TensorFunctions()

    def function(self, *fields: str) -> Callable[..., Any]:
        """Return the first of some functions that is set, such as "tensors.against_last".

        Raises
        ------
        ValueError
            If none is set; the error names the fields.
        """
        for field in fields:
            holder, _, name = field.rpartition(".")
            found = getattr(self.on_tensors() if holder else self, name)
            if found is not None:
                function: Callable[..., Any] = found
                return function
        raise ValueError(
            f"`loss` {self.name!r} cannot be computed here: set the field"
            f" {' or '.join(f'`{field}`' for field in fields)} of its Loss."
        )


LOSSES: Registry[Loss] = Registry("loss")
"""Losses by name; `LOSSES.register(loss)` adds one."""
