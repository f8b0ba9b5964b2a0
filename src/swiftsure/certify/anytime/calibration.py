"""GrowingCalibration: a calibration to which samples are added, valid at every moment.

Each setting has a bet against "the risk is at least ε", whose wealth is carried along as samples
come. Once it reaches 1/δ, the setting is certified for good.
"""

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from swiftsure._lib import checks
from swiftsure._lib.files import shortened
from swiftsure.certify import bounds
from swiftsure.certify.anytime.log import GrowthLog
from swiftsure.certify.anytime.state import Growth, UpdateFacts, packed_update, record_key
from swiftsure.certify.building import Findings, make_policy
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.control import Control, ControlResult
from swiftsure.certify.policy import Metadata, Policy
from swiftsure.certify.selection import Cell, cells, walk_delta
from swiftsure.curves.conditions import Condition, dropped, replaced
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.pilots import PilotPath
from swiftsure.records import ExitRecord, ThresholdRecord, load_record
from swiftsure.records import files as record_files
from swiftsure.records.base import differing

__all__ = ["GrowingCalibration"]

Record = ExitRecord | ThresholdRecord

HORIZON = 1000
"""Default number of samples that the bets are tuned for."""

RULE = Control("ucb", "star")


class GrowingCalibration:
    """A calibration that grows: samples are added with `update`, and `policy()` may be read always.

    **Guarantee**: with probability at least 1 − δ over the draw of all samples, the risk of every
    policy that `policy()` ever returns is at most ε, however often and whenever one looks, also if
    one stops because the result pleases. It holds provided that samples are independent draws of
    one distribution, added in an order that does not depend on their losses, and that everything
    given here was fixed before any loss was seen.

    Parameters
    ----------
    request : Calibration
        What is promised. The path must be fixed beforehand, so it cannot be "breakpoints", and
        `missing` must be "raise" or "worst".
    horizon : int
        The number of samples that the bets are tuned for, fixed beforehand. Calibration may be read
        before, and goes on after it: the bets then aim at twice as many, and so on. Choose the
        number of samples after which you expect to read the first policy.
    state : path, optional
        A file that holds everything. It is created by the first update, and every update is on the
        disk when it returns; a process that is killed loses at most the update it was in. If the
        file exists, the calibration goes on from there.

    Examples
    --------
    >>> from swiftsure.certify.promise import Promise
    >>> from swiftsure.study.simulate import Population
    >>> request = Calibration(Promise("zero_one", epsilon=0.05))
    >>> calibration = request.start(horizon=400)
    >>> for seed in range(4):
    ...     sample = Population().sample(100, seed=seed)
    ...     calibration.update(ExitRecord.from_logits(sample.logits, sample.labels))
    >>> calibration.n, calibration.policy().threshold is not None
    (400, True)
    """

    def __init__(
        self,
        request: Calibration,
        *,
        horizon: int = HORIZON,
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        if request.path == "breakpoints" or isinstance(request.path, PilotPath):
            raise ValueError(
                "`path` must be fixed before any sample comes, so it can be neither the breakpoints"
                " nor learned on a part of them."
            )
        if request.missing not in ("raise", "worst"):
            raise ValueError(
                "`missing` must be 'raise' or 'worst' for a calibration that grows: which labels"
                f" are missing must not stop its bets; but got {request.missing!r}."
            )
        if request.control not in (Control("ucb"), RULE):
            raise ValueError(
                "`control` must be ucb with the bound star, or auto, for a calibration that grows:"
                f" only bets are valid at every moment; but got {request.control.label}."
            )
        if request.limits:
            raise ValueError(
                "A CostPromise has no test here that is valid at every moment: its walk begins at"
                " the fast end, whose bets were not kept. Promise it in a calibration at the end."
            )
        if any(each.within == "each slice" for each in request.risks):
            raise ValueError("`within='each slice'` needs a calibration of its own in each slice.")
        self.request = request
        self.delta = walk_delta(request)
        self.horizon = checks.count("horizon", horizon)
        self._template: Record | None = None
        self._grown: Growth | None = None
        self._ids: set[Any] = set()
        self._groups: set[Any] = set()
        self._keys: set[str] = set()
        self._log: GrowthLog | None = None
        if state is not None:
            self._log = GrowthLog(state)
            self._restore(self._log)

    @property
    def n(self) -> int:
        """Number of samples, or groups, added so far."""
        return 0 if self._grown is None else self._grown.n

    @property
    def index(self) -> int | None:
        """Position of the fastest certified setting on the path; None if there is none."""
        return None if self._grown is None else self._grown.index

    def __repr__(self) -> str:
        """Return a one-line summary."""
        return f"GrowingCalibration(n={self.n}, index={self.index}, delta={self.delta:g})"

    def update(self, record: Record) -> None:
        """Add samples, and carry the bets on.

        Parameters
        ----------
        record : ExitRecord or ThresholdRecord
            New samples of the same model. Within the record they are tested in its own random
            order; whole groups must be in one record.

        Raises
        ------
        ValueError
            If a sample or group was added before, or the record is of another model or settings.
            Nothing is added then.
        """
        if not isinstance(record, ExitRecord | ThresholdRecord):
            raise TypeError(
                f"`record` must be an ExitRecord or a ThresholdRecord, but got"
                f" {type(record).__name__}."
            )
        key = record_key(record)
        if key in self._keys:
            raise ValueError(
                "`record` was added before: a sample counted twice voids the guarantee."
            )
        if self._template is not None:
            different = differing(self._template, record)
            if different:
                raise ValueError(
                    f"`record` must agree with those added before in `{different[0]}`, but does"
                    " not."
                )
        found = self._cells(record)
        facts, data = packed_update(record, found, key)
        self._refuse_known(facts)
        if self._grown is not None:
            self._refuse_other(found, self._grown)
            self._grown.refuse(facts, data)
        if self._template is None:
            template = record.take(_one_of_each_slice(record))
            if self._log is not None:
                self._log.append({"settings": self._settings(found)}, _parquet(template))
            self._template = template
        if self._log is not None:
            self._log.append(facts.model_dump(), data)
        self._add(found, facts, data)

    def has(self, record: Record) -> bool:
        """Return whether this very record was added before."""
        return record_key(record) in self._keys

    def policy(self, metadata: Metadata | Mapping[str, str] | None = None) -> Policy:
        """Return the policy that is certified now.

        **Guarantee**: that of the class, for all policies that this ever returns together.
        """
        if self._grown is None or self._template is None:
            raise ValueError("`policy` needs samples: call `update` first.")
        index = self._grown.index
        curves = self._grown.curves()
        whole = [_joined(own) for own in self._by_promise(curves)]
        pairs = zip(whole, self.request.risks, strict=True)
        results = [self._result(curve, each.epsilon, index) for curve, each in pairs]
        slices = {
            each.cell.slice_name: each.n
            for each in self._grown.tested
            if each.cell.slice_name is not None
        }
        found = Findings(whole, results, results[0], horizon=self.horizon, slices=slices)
        return make_policy(self.request, self._template, found, metadata)

    def _by_promise(self, curves: list[RiskCurve]) -> list[list[RiskCurve]]:
        """Return the curves of each promise: one, or one for each slice."""
        tested = self._grown.tested if self._grown is not None else []
        return [
            [
                curve
                for curve, each in zip(curves, tested, strict=True)
                if each.cell.promise == promise
            ]
            for promise in self.request.risks
        ]

    def _result(self, curve: RiskCurve, epsilon: float, index: int | None) -> ControlResult:
        unit = curve.units.name
        drawn = self._grown is not None and self._grown.drawn
        conditions = RULE.conditions(curve, bounds.BOUNDS["star"])
        # The bets are valid for any number of samples, at every moment.
        conditions = dropped(conditions, "number of samples")
        for condition in (
            Condition.of("fixed beforehand", what="growing"),
            Condition.of("order", how="added in drawn order" if drawn else "added", unit=unit),
        ):
            conditions = replaced(conditions, condition)
        return ControlResult(
            index=index,
            threshold=None if index is None else curve.threshold_at(index),
            guarantee="probability",
            epsilon=epsilon,
            delta=self.request.delta,
            control=RULE.name,
            bound="star",
            n=curve.n,
            seed=None,
            conditions=conditions,
        )

    def _cells(self, record: Record) -> list[Cell]:
        found = cells(self.request, record)
        for each in found:
            if each.curve.branches is not None:
                raise ValueError(
                    "`path` of a calibration that grows must be one sequence: bets would have to"
                    " pass on δ between branches at every moment, for which no proof is here."
                )
            checks.between("epsilon", each.promise.epsilon, 0.0, each.curve.loss_range.high)
        if record.sampling.population is not None:
            raise ValueError(
                "Samples `drawn_from` a finite population cannot grow: bets without replacement"
                " need their number beforehand."
            )
        return found

    def _refuse_other(self, found: list[Cell], grown: Growth) -> None:
        """Raise if an update has other slices, groups or weights than those before it."""
        before = [each.cell for each in grown.tested]
        if [each.slice_name for each in found] != [each.slice_name for each in before]:
            raise ValueError("`record` must have samples of every slice that was there at first.")
        if any(
            one.curve.units.grouped != other.curve.units.grouped
            for one, other in zip(found, before, strict=True)
        ):
            raise ValueError("`record` must have groups if those added before have, only then.")

    def _add(self, found: list[Cell], facts: UpdateFacts, data: bytes) -> None:
        if self._grown is None:
            self._grown = Growth(found, self.delta, self.horizon)
        self._grown.add(facts, data)
        self._ids |= set(facts.ids)
        self._groups |= set(facts.groups)
        if facts.key is not None:
            self._keys.add(facts.key)

    def _refuse_known(self, facts: UpdateFacts) -> None:
        for name, known in (("ids", self._ids), ("groups", self._groups)):
            again = known.intersection(getattr(facts, name))
            if again:
                raise ValueError(
                    f"`record` must hold new {'samples' if name == 'ids' else name}, but"
                    f" {next(iter(again))!s} was added before: a sample counted twice voids the"
                    " guarantee."
                )

    def _settings(self, found: list[Cell]) -> dict[str, Any]:
        """Return everything that was fixed beforehand, as JSON."""
        return {
            "request": self.request.to_json(),
            "horizon": self.horizon,
            "slices": [each.slice_name for each in found],
            "path": hashlib.sha256(
                np.ascontiguousarray(found[0].curve.thresholds).data
            ).hexdigest(),
        }

    def _restore(self, log: GrowthLog) -> None:
        """Go on from a file: its settings must be these, and its updates are added again."""
        entries = log.read()
        if not entries:
            return
        try:
            settings = dict(entries[0].facts["settings"])
            with tempfile.TemporaryDirectory() as folder:
                file = FilePath(folder) / "template.parquet"
                file.write_bytes(entries[0].data)
                self._template = load_record(file)
            updates = [UpdateFacts.model_validate_json(json.dumps(e.facts)) for e in entries[1:]]
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(log, shortened(error)) from None
        found = self._cells(self._template)
        for name, value in self._settings(found).items():
            if settings.get(name) != value:
                raise ValueError(
                    f"{log.path} was started with {name} = {settings.get(name)!r}, but got"
                    f" {value!r}: what is promised must not change. Give the same, or start with"
                    " another file and new samples."
                )
        for facts, entry in zip(updates, entries[1:], strict=True):
            try:
                self._refuse_known(facts)
                self._add(found, facts, entry.data)
            except ValueError as error:
                raise _damaged(log, shortened(error)) from None


def _one_of_each_slice(record: Record) -> list[int]:
    """Return a sample of every slice, which show what later samples must have."""
    if record.slices is None:
        return [0]
    rows: list[int] = np.unique(record.slices, return_index=True)[1].tolist()
    return rows


def _joined(curves: list[RiskCurve]) -> RiskCurve:
    """Return one curve of the samples of several slices."""
    first = curves[0]
    if len(curves) == 1:
        return first

    def stacked(parts: list[Any]) -> Any:
        return None if parts[0] is None else np.concatenate(parts)

    return replace(
        first,
        costs={
            name: values if values.ndim == 1 else stacked([each.costs[name] for each in curves])
            for name, values in first.costs.items()
        },
        full_costs={
            name: alone if np.ndim(alone) == 0 else stacked([c.full_costs[name] for c in curves])
            for name, alone in first.full_costs.items()
        },
        units=replace(
            first.units,
            weights=stacked([each.units.weights for each in curves]),
            sizes=stacked([each.units.sizes for each in curves]),
        ),
        data=first.data._replace(
            values=stacked([each.data.values for each in curves]),
            confidences=stacked([each.confidences for each in curves]),
        ),
    )


def _damaged(log: GrowthLog, why: str) -> ValueError:
    return ValueError(f"{log.path} is a damaged calibration state: {why}.")


def _parquet(record: Record) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(record_files.packed(record), sink)
    return sink.getvalue()
