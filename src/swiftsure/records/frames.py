"""Reads tables, with a column for each exit, as the arguments of an `ExitRecord`."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.records.files import is_csv

__all__ = ["arguments", "column_names", "column_values", "is_csv", "read_csv"]

Array = NDArray[Any]
Columns = dict[int, Array]

PLURALS = {"loss": "losses", "inconsistency": "inconsistencies", "cost": "costs"}
KNOWN = (
    "confidence.K, confidence.SCORE.K, prediction.K, label, loss.NAME.K, inconsistency.NAME.K,"
    " cost.NAME.K, full_cost.NAME, id, group and slice, with exits K counted from 1"
)


def read_csv(path: str | os.PathLike[str]) -> Any:
    """Read a CSV file with a header."""
    import pyarrow as pa
    from pyarrow import csv

    try:
        return csv.read_csv(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"it is not a CSV file with a header: {error}") from None


def arguments(frame: Any) -> dict[str, Any]:
    """Return the arguments of an `ExitRecord`; see `ExitRecord.from_frame`."""
    found: dict[str, Any] = {}
    exits: dict[tuple[str, str], Columns] = {}
    labels = None
    for name in column_names(frame):
        kind, _, rest = name.partition(".")
        values = column_values(frame, name)
        if name in ("id", "group", "slice"):
            found[f"{name}s"] = values
        elif name == "label":
            labels = values
        elif kind == "full_cost" and rest:
            found.setdefault("full_costs", {})[rest] = values
        else:
            which, exit_number = _exit_column(name, kind, rest)
            exits.setdefault((kind, which), {})[exit_number] = values
    answers = exits.pop(("prediction", ""), None)
    for (kind, which), columns in exits.items():
        table = PLURALS.get(kind, "confidences")
        found.setdefault(table, {})[which or "top1"] = _stacked(f"{kind}.{which}", columns)
    if "confidences" not in found:
        raise ValueError(f"`frame` must have columns confidence.K; known are {KNOWN}.")
    if answers is not None:
        _add_answers(found, _stacked("prediction", answers), labels)
    elif labels is not None:
        raise ValueError("`frame` must have columns prediction.K where it has a label.")
    return found


def column_names(frame: Any) -> list[str]:
    """Return the names of the columns."""
    names = frame if isinstance(frame, Mapping) else getattr(frame, "column_names", None)
    names = getattr(frame, "columns", None) if names is None else names
    if names is None:
        raise TypeError(
            "`frame` must be a data frame, an Arrow table or a mapping of columns, but got"
            f" {type(frame).__name__}."
        )
    return [str(name) for name in names]


def column_values(frame: Any, name: str) -> Array:
    """Return one column of a data frame, an Arrow table or a mapping."""
    values = frame[name]
    return np.asarray(values.to_pylist() if hasattr(values, "to_pylist") else values)


def _exit_column(name: str, kind: str, rest: str) -> tuple[str, int]:
    """Return the score, loss or cost that a column is of, and its exit."""
    which, _, exit_number = rest.rpartition(".")
    counted = exit_number.isdigit() and int(exit_number) > 0
    named = bool(which) if kind in PLURALS else kind == "prediction" and not which
    if not counted or not (named or kind == "confidence"):
        raise ValueError(f"`frame` holds an unknown column {name!r}; known are {KNOWN}.")
    return which, int(exit_number)


def _stacked(title: str, columns: Columns) -> Array:
    """Return the columns of exits 1, 2, … side by side; raise if one is missing."""
    missing = set(range(1, max(columns) + 1)) - set(columns)
    if missing:
        raise ValueError(f"`frame` lacks the column {title.rstrip('.')}.{min(missing)}.")
    return np.column_stack([columns[k] for k in sorted(columns)])


def _add_answers(found: dict[str, Any], answers: Array, labels: Array | None) -> None:
    """Add the 0-1 losses of answers, which may be numbers or texts."""
    if answers.dtype.kind in "iu":
        found["predictions"] = answers
    else:
        codes = np.unique(answers.astype(str), return_inverse=True)[1]
        found["predictions"] = codes.reshape(answers.shape).astype(np.int32)
    apart = (answers != answers[:, -1:]).astype(np.float64)
    found.setdefault("inconsistencies", {})["zero_one"] = apart
    if labels is None:
        return
    missing = np.asarray([each is None or each == "" or each != each for each in labels.tolist()])
    right = labels.astype(object)[:, None]
    wrong = (answers.astype(object) != right).astype(np.float64)
    wrong[missing] = np.nan
    found.setdefault("losses", {})["zero_one"] = wrong
