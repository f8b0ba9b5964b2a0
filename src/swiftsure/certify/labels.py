"""Labels as the walk needs them: asking for them, and what a budget of labels reaches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.certify.control import Control
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import BREAKPOINTS, Path
from swiftsure.curves.risks import RISKS
from swiftsure.exits import ExitRule
from swiftsure.records import ExitRecord
from swiftsure.records.checks import gap_is_known_by_agreement
from swiftsure.records.labels import first_setting

__all__ = ["LabelBudget", "label_along", "shortest"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


def label_along(
    record: ExitRecord,
    losses: Sequence[str],
    path: Path,
    rule: ExitRule,
    walk: Callable[[ExitRecord], tuple[int, int, bool]],
    labeller: Callable[[NDArray[Any]], Any],
    budget: int | None = None,
) -> ExitRecord:
    """Return the record with the labels that a walk along a path needs.

    The walk goes on while settings are certified. Where the next one lacks labels, the labeller is
    asked for these. The walk ends where a setting fails, where a label stays unknown, or where the
    budget is spent. What it certifies is what it would certify with all labels, or less.

    Parameters
    ----------
    losses : names
        The losses that need labels.
    walk : callable
        Record -> (first setting that lacks a label, how far the walk goes, whether it is done).
    budget : int, optional
        The largest number of labels to ask for.
    """
    left = record.n if budget is None else checks.count("budget", budget, 0)
    record = record.with_labels([])

    def lacking(stop: int) -> NDArray[Any]:
        """Return the ids of the samples whose labels are missing at setting `stop` or before."""
        until = Path(path.thresholds[: stop + 1], path.kind)
        found = [record.needs_label(loss, path=until, rule=rule) for loss in losses]
        return np.asarray(list(dict.fromkeys(np.concatenate(found).tolist())))

    while True:
        stop, reached, done = walk(record)
        if done or reached < stop:
            return record
        wanted = lacking(stop)[:left]
        if not len(wanted):
            return record
        found = labeller(wanted)
        given = {"losses" if isinstance(found, Mapping) else "labels": found}
        record = record.with_labels(wanted, **given)
        left -= len(wanted)
        if len(lacking(stop)):
            return record


def shortest(curves: list[RiskCurve]) -> list[RiskCurve]:
    """Return the curves of several risks, each cut where the first of them lacks a label."""
    if len({curve.n_path for curve in curves}) > 1:
        return curves  # not of one path, which `certified_together` refuses
    return [curve.cut(min(each.n_settings for each in curves)) for curve in curves]


@dataclass(frozen=True)
class LabelBudget:
    """A number of labels for each calibration set, and which setting needs which of them first.

    Attributes
    ----------
    labels : int
    first : (n,)
        The first setting at which each sample's label matters; K if it never does.
    differs : (n, n_exits)
        The exits at which it does.
    """

    labels: int
    first: Rows
    differs: NDArray[np.bool_]

    RANDOM = ", random labels"
    ALL = ", all labels"

    @classmethod
    def of(cls, record: Any, curve: RiskCurve, labels: int, rule: ExitRule) -> "LabelBudget":
        """Return the budget for samples drawn from a record, whose curve this is."""
        fixed = isinstance(record, ExitRecord) and curve.path_kind != BREAKPOINTS
        if not fixed or curve.units.grouped:
            raise ValueError(
                "A budget of labels in `missing` needs an ExitRecord without groups, and a path"
                " that is fixed beforehand."
            )
        if RISKS[curve.statistic.risk].table != "losses":
            raise ValueError("`missing` needs a risk against labels, such as the gap.")
        differs = np.ones((record.n, record.n_exits), bool)
        differs[:, -1] = False
        if gap_is_known_by_agreement(
            curve.statistic.loss
        ):  # else every sample that exits needs a label
            checks.choice("loss", curve.statistic.loss, record.inconsistencies)
            differs = record.inconsistencies[curve.statistic.loss] != 0
        path = Path(curve.thresholds, curve.path_kind)
        first = first_setting(record.confidences_of(rule), differs, path, curve.rule)
        return cls(checks.count("budget", labels, 0), first, differs)

    def compared(self, controls: Mapping[str, Control]) -> dict[str, Control]:
        """Return each control three times: with the budget, with random labels, with all."""
        for control in controls.values():
            if not control.can_stop:
                raise ValueError(
                    "A budget of labels in `missing` needs controls that may stop, but got"
                    f" {control.label}."
                )
        return {
            label + way: control
            for label, control in controls.items()
            for way in ("", self.RANDOM, self.ALL)
        }

    def rows(self, label: str, rows: Rows) -> Rows:
        """Return the samples that a control calibrates on."""
        return rows[: self.labels] if label.endswith(self.RANDOM) else rows

    def indices(
        self,
        label: str,
        control: Control,
        curve: RiskCurve,
        levels: Floats,
        delta: float,
        rows: Rows,
    ) -> Rows:
        """Return what a control chooses at each level, on the samples that it calibrates on."""
        tested = self.rows(label, rows)
        if label.endswith((self.RANDOM, self.ALL)) or self.labels >= len(rows):
            return control.indices(curve, levels, delta, tested)
        if control.counts_missing(curve):
            return control.indices(self.counted(curve, rows), levels, delta)
        return self.stop(rows, control.indices(curve, levels, delta, rows))

    def counted(self, curve: RiskCurve, rows: Rows) -> RiskCurve:
        """Return the curve of some rows, with the worst loss where a label is missing."""
        part = curve.take(rows)
        first = self.first[rows]
        missing = np.argsort(first, kind="stable")[self.labels :]
        values = part.data.values.copy()
        values[missing] = np.where(
            self.differs[rows[missing]], curve.loss_range.high, values[missing]
        )
        return replace(part, data=part.data._replace(values=values))

    def stop(self, rows: Rows, index: Rows) -> Rows:
        """Return the last settings of walks that stop where these rows lack a label."""
        last = int(np.partition(self.first[rows], self.labels)[self.labels]) - 1
        stopped = np.minimum(index, last)
        return np.where(stopped > 0, stopped, -1)
