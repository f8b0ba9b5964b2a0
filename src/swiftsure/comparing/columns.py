"""`Columns`: the score of each sample under each of several models."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from swiftsure._lib import checks
from swiftsure.certify.wording import LOSS_WORDS
from swiftsure.losses import LossRange
from swiftsure.records import ThresholdRecord
from swiftsure.records.frames import column_names, column_values

__all__ = ["BINARY", "MODEL", "Columns", "loss_name", "score_range"]

BINARY = ("acc", "accuracy", "acc_norm", "exact_match")
"""Measures that are 0 or 1 by definition, so that exact tests apply."""

MODEL = "model"
"""Name of the dial: which column runs."""

DESCRIPTIONS = {"id": "ids", "group": "groups", "slice": "slices"}


@dataclass(frozen=True, eq=False)
class Columns:
    """Scores of n samples under K models; higher is better.

    Parameters
    ----------
    scores : mapping of names to (n,)
        One column per model.
    ids, groups, slices : (n,), optional
        As in `ExitRecord`.

    Examples
    --------
    >>> Columns.of({"full": [1, 0, 1], "small": [1, 0, 0], "id": ["a", "b", "c"]}).names
    ('full', 'small')
    """

    scores: Mapping[str, Any]
    ids: Any = None
    groups: Any = None
    slices: Any = None

    def __post_init__(self) -> None:
        """Check that all columns are numbers of the same samples."""
        columns = {
            name: checks.numbers(f"columns[{name!r}]", each) for name, each in self.scores.items()
        }
        if len(columns) < 2:
            raise ValueError(f"`columns` must have two models at least, but got {len(columns)}.")
        n = len(next(iter(columns.values())))
        for name, values in columns.items():
            checks.finite(f"columns[{name!r}]", checks.of_shape(name, values, {"n": n}))
        object.__setattr__(self, "scores", columns)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models."""
        return tuple(self.scores)

    @classmethod
    def of(cls, table: Any) -> "Columns":
        """Return the columns of a data frame, an Arrow table or a mapping.

        Columns named `id`, `group` and `slice` describe the samples; all others are models.
        """
        if isinstance(table, cls):
            return table
        found = {name: column_values(table, name) for name in column_names(table)}
        described = {to: found.pop(name, None) for name, to in DESCRIPTIONS.items()}
        return cls(found, **described)

    def record(
        self,
        measure: str,
        *,
        full: str | None = None,
        costs: Mapping[str, float] | None = None,
        values: LossRange | tuple[float, float] | None = None,
        order: int | None = None,
    ) -> ThresholdRecord:
        """Return a record whose settings are the models, with 1 − score as the loss.

        Parameters
        ----------
        measure : str
            Name of what the scores measure, such as "f1"; see `loss_name`.
        full : str, optional
            The model to compare with; the first by default.
        costs : mapping of names to numbers, optional
            What each model costs, in any unit, declared and not measured on these samples. Models
            are then tested from the dearest to the cheapest; without costs, as they stand.
        values : LossRange or (low, high), optional
            The smallest and the largest possible score; (0, 1) by default, and whole numbers for
            measures such as "exact_match". `LossRange(0, 1, whole=True)` says that scores are 0
            or 1.
        order : int, optional
            Seed of the order in which samples are tested; drawn at random by default.
        """
        full = self.names[0] if full is None else checks.choice("full", full, self.names)
        possible = score_range(measure, values)
        loss = loss_name(measure, possible)
        names = [full, *(name for name in self.names if name != full)]
        prices = None if costs is None else _prices(costs, self.names)
        if prices is not None:
            names[1:] = sorted(names[1:], key=lambda name: -prices[name])
        scores = np.column_stack([np.asarray(self.scores[name], np.float64) for name in names])
        checks.within("columns", scores, possible.low, possible.high)
        width = possible.high - possible.low
        return ThresholdRecord(
            dials={MODEL: names},
            losses={loss: possible.high - scores},
            loss_ranges={loss: LossRange(0, width, possible.whole)},
            costs={} if prices is None else {"cost": np.array([prices[name] for name in names])},
            ids=self.ids,
            groups=self.groups,
            slices=self.slices,
            order=order,  # type: ignore[arg-type]
        )


def score_range(measure: str, values: LossRange | tuple[float, float] | None) -> LossRange:
    """Return the smallest and the largest possible score: as declared, or by its name."""
    return LossRange(0, 1, whole=measure in BINARY) if values is None else LossRange.of(values)


def loss_name(measure: str, possible: LossRange) -> str:
    """Return the name of the loss: the measure's own if certificates have words for it.

    Examples
    --------
    >>> loss_name("f1", LossRange(0, 1)), loss_name("judge", LossRange(0, 10))
    ('f1', '10 - judge')
    """
    known = measure in LOSS_WORDS and (possible.low, possible.high) == (0, 1)
    return measure if known else f"{possible.high:g} - {measure}"


def _prices(costs: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    """Return a declared cost for every model."""
    for name in costs:
        checks.choice("costs", name, names)
    missing = [name for name in names if name not in costs]
    if missing:
        raise ValueError(f"`costs` must name every model, but lacks {', '.join(missing)}.")
    return {name: checks.number(f"costs[{name!r}]", costs[name]) for name in names}
