"""Which labels a calibration needs, in the order in which its walk needs them, and adding them.

The gap of a prediction loss is 0 where an exit agrees with the full model, so a label matters only
at settings at which its sample takes an exit that disagrees.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import Path
from swiftsure.exits import ExitRule
from swiftsure.losses import LOSSES, LossRange
from swiftsure.records.checks import gap_is_known_by_agreement, label_array

__all__ = [
    "MissingLabelsError",
    "class_numbers",
    "first_setting",
    "losses_with_labels",
    "positions",
    "prediction_array",
]

Array = NDArray[Any]


class MissingLabelsError(ValueError):
    """Labels are missing that a curve needs."""


def first_setting(
    confidences: Array, marked: Array, path: Path, rule: ExitRule
) -> NDArray[np.int64]:
    """Return the first setting at which each sample takes a marked exit, (n,); K for never.

    Parameters
    ----------
    marked : (n, n_exits)
        Exits at which a loss is unknown, or differs from the full model's.
    """
    first = np.full(len(marked), len(path))
    rows = np.flatnonzero(marked.any(axis=1))
    if rows.size:
        values = marked[rows].astype(np.float64)
        curve = RiskCurve.from_exits(confidences[rows], values, path, LossRange(0, 1), rule=rule)
        first[rows] = curve.first_loss()
    return first


def positions(ids: Array, rows: ArrayLike) -> NDArray[np.int64]:
    """Return the positions of some ids; unknown and repeated ones are refused."""
    wanted = np.asarray(rows)
    checks.of_shape("rows", wanted, {"m": None})
    order = np.argsort(ids, kind="stable")
    if wanted.dtype.kind != ids.dtype.kind and "U" in (wanted.dtype.kind, ids.dtype.kind):
        raise TypeError(
            f"`rows` must be ids of the record, of dtype {ids.dtype}, but their dtype is"
            f" {wanted.dtype}."
        )
    found = order[np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)]
    unknown = ids[found] != wanted
    if unknown.any():
        raise ValueError(
            f"`rows` must be ids of the record's samples, but {wanted[unknown][0]!s} is not one."
        )
    if len(np.unique(found)) < len(found):
        raise ValueError("`rows` must not name a sample twice.")
    return found


def prediction_array(values: ArrayLike | None, n: int, n_exits: int) -> Array | None:
    """Return predicted class numbers, (n, n_exits), or None."""
    if values is None:
        return None
    array = checks.numbers("predictions", values)
    checks.of_shape("predictions", array, {"n": n, "n_exits": n_exits})
    if (array != np.rint(array)).any() or array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise ValueError("`predictions` must be class numbers, from 0 on.")
    return np.ascontiguousarray(array, np.int32)


def class_numbers(labels: Any, classes: Sequence[Any] | None, m: int) -> Array:
    """Return class numbers of labels given as numbers or names; missing ones are −1."""
    listed = np.asarray(labels, dtype=object).ravel().tolist()
    if classes is not None:
        numbers = {name: number for number, name in enumerate(classes)}
        unknown = [name for name in listed if name is not None and name not in numbers]
        if unknown:
            raise ValueError(f"`labels` must be among `classes`, but got {unknown[0]!r}.")
        listed = [-1 if name is None else numbers[name] for name in listed]
    elif any(isinstance(name, str) for name in listed):
        raise ValueError("`classes` must be given where `labels` are names.")
    given = np.asarray([-1 if label is None else label for label in listed])
    if given.shape != (m,):
        raise ValueError(f"`labels` must be {m:,}, one for each of `rows`, but got {len(given):,}.")
    return label_array(given, m, np.iinfo(np.int32).max)


def losses_with_labels(record: Any, rows: NDArray[np.int64], labels: Array) -> dict[str, Array]:
    """Return a record's losses after labels were added; only those that labels alone determine.

    Class numbers determine the 0-1 loss. A loss that some samples still lack and that predictions
    do not determine is left out.
    """
    if record.predictions is None:
        raise ValueError(
            "`labels` need the record's `predictions`, which it does not hold: make it with"
            " `from_logits`, `from_probabilities` or `collect`, or pass `losses`."
        )
    added = (record.predictions[rows] != labels[:, None]).astype(np.float64)
    added[labels < 0] = np.nan
    return with_losses(record, rows, {"zero_one": added})


def with_losses(record: Any, rows: NDArray[np.int64], added: Mapping[str, Any]) -> dict[str, Array]:
    """Return a record's losses with rows filled in; a row that has a loss already is refused."""
    losses = dict(record.losses)
    for name, values in added.items():
        if name not in LOSSES or not gap_is_known_by_agreement(name):
            raise ValueError(
                f"`losses` must be prediction losses, whose gap is 0 where answers agree, but"
                f" {name!r} is not one."
            )
        if name not in record.inconsistencies:
            checks.choice("losses", name, record.inconsistencies)
        empty = np.full((record.n, record.n_exits), np.nan)
        table = np.array(losses.get(name, empty), np.float64)
        given = checks.numbers("losses", values, np.float64)
        checks.of_shape("losses", given, {"m": len(rows), "n_exits": record.n_exits})
        known = ~np.isnan(table[rows]).any(axis=1) & ~np.isnan(given).any(axis=1)
        if known.any():
            raise ValueError(
                f"`rows` must be samples without a label, but {record.ids[rows[known][0]]!s} has"
                " one: a label that is chosen among several voids the guarantee."
            )
        filled = ~np.isnan(given).any(axis=1)
        table[rows[filled]] = given[filled]
        losses[name] = table
    return losses
