"""Studies of many records: the options that every experiment takes, and tables of their results."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from swiftsure import Calibration, ExitRule, Promise, Repeats
from swiftsure._lib.progress import steps
from swiftsure.study.evaluation import Study, evaluate

__all__ = [
    "DATA_FOLDER",
    "StudyOptions",
    "column",
    "evaluate_all",
    "labelled",
    "layers_table",
    "summary",
]

DATA_FOLDER = Path(os.environ.get("SWIFTSURE_DATA", Path(__file__).parents[2] / "shared" / "data"))
"""Folder of data that we may not distribute; by default beside the repository."""

Rows = list[dict[str, Any]]


class StudyOptions(TypedDict, total=False):
    """Options of `swiftsure.evaluate` that every experiment takes."""

    epsilons: ArrayLike
    """Levels to study."""
    delta: float
    """Failure probability; 0.1 by default, as in the paper."""
    splits: int
    """Random splits into calibration and test samples; 100 by default."""
    draws: int
    """Calibration sets drawn with replacement, to measure how often a promise is broken."""
    seed: int
    progress: bool | None


def studied(
    record: Any,
    *,
    risk: str = "gap",
    loss: str | None = None,
    score: str | None = None,
    cost: str | None = None,
    splits: int = 100,
    draws: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> Study:
    """Return `swiftsure.evaluate` of one risk, with `score`, `cost` and `draws` as plain options.

    `options` must have `epsilons`.
    """
    promise = Promise(loss, epsilon=min(options["epsilons"]), risk=risk)
    path = options.pop("path", None)
    request = Calibration(promise, rule=ExitRule(score), path=path, cost=cost)  # type: ignore[arg-type]
    return evaluate(record, risk=request, splits=Repeats(splits, draws, progress), **options)


def evaluate_all(
    cases: Mapping[tuple[Any, ...], Mapping[str, Any]], progress: bool | None = None, **options: Any
) -> dict[Any, Any]:
    """Return `studied(**case, **options)` for every case, nested by the parts of its key."""
    studies: dict[Any, Any] = {}
    with steps("evaluating", len(cases), progress) as advance:
        for (*outer, last), case in cases.items():
            place = studies
            for key in outer:
                place = place.setdefault(key, {})
            place[last] = studied(**case, **options, progress=False)
            advance()
    return studies


def labelled(studies: Any, *names: str) -> Iterator[tuple[dict[str, Any], Study]]:
    """Yield each study of a nested mapping with its keys, under these names."""
    if not names:
        yield {}, studies
        return
    for key, inner in studies.items():
        for labels, study in labelled(inner, *names[1:]):
            yield {names[0]: key} | labels, study


def summary(studies: Any, *names: str) -> Rows:
    """Return every number of a nested mapping of studies: one row per study, control and ε."""
    return [labels | row for labels, study in labelled(studies, *names) for row in study.summary()]


def column(study: Study, epsilon: float) -> int:
    """Return the index of the ε of a study that is nearest to `epsilon`."""
    return int(np.argmin(np.abs(study.epsilons - epsilon)))


def layers_table(studies: Any, *names: str, epsilons: Sequence[float]) -> Rows:
    """Return mean decoder layers per token: one row per study and control, one column per ε.

    If the record counts FLOPs, "saved, ε=…" are the FLOPs of generation saved, in %, including the
    cost of the confidences.
    """
    rows = []
    for labels, study in labelled(studies, *names):
        columns = [column(study, epsilon) for epsilon in epsilons]
        for control in study.labels:
            layers = study.mean_cost[control].mean(axis=0)
            row = labels | {"control": control}
            row |= {f"ε={study.epsilons[j]:g}": float(layers[j]) for j in columns}
            saved = study.flops_gain[control].mean(axis=0)
            if np.isfinite(saved).all():
                row |= {f"saved, ε={study.epsilons[j]:g}": float(saved[j]) for j in columns}
            rows.append(row)
    return rows
