"""GrowingCalibration: a calibration to which samples are added, valid at every moment.

Each setting has a bet against "the risk is at least ε", whose wealth is carried along as samples
come. Once it reaches 1/δ, the setting is certified for good.
"""

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from swiftsure._lib import checks
from swiftsure._lib.files import shortened
from swiftsure.certify import bounds
from swiftsure.certify.anytime.log import GrowthLog
from swiftsure.certify.anytime.state import Growth, UpdateFacts, packed_update, record_key
from swiftsure.certify.certificate import make_policy, wanted_risks
from swiftsure.certify.control import Control, ControlResult, sample_number
from swiftsure.certify.policy import Metadata, Policy
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import Path, PathLike
from swiftsure.curves.risks import Risk
from swiftsure.records import ExitRecord, ThresholdRecord, load_record
from swiftsure.records import files as record_files
from swiftsure.records.base import differing
from swiftsure.records.checks import choose
from swiftsure.records.exit_record import Missing

__all__ = ["GrowingCalibration"]

Record = ExitRecord | ThresholdRecord

HORIZON = 1000
"""Default number of samples that the bets are tuned for."""

RULE = Control("ucb", "star")

ADDED = "{} were added in an order that does not depend on their losses"
DRAWN = ADDED + ", each update in an order drawn at random"
"""What the order of samples rests on; `DRAWN` if the seeds of all updates were drawn."""


class GrowingCalibration:
    """A calibration that grows: samples are added with `update`, and `policy()` may be read always.

    **Guarantee**: with probability at least 1 − δ over the draw of all samples, the risk of every
    policy that `policy()` ever returns is at most ε, however often and whenever one looks, also if
    one stops because the result pleases. It holds provided that samples are independent draws of
    one distribution, added in an order that does not depend on their losses, and that everything
    given here was fixed before any loss was seen.

    Parameters
    ----------
    epsilon, risk, loss, risks, delta, path, score, missing, strict, min_exit
        As in `calibrate`. The path must be fixed beforehand, so it cannot be "breakpoints", and
        `missing` cannot be "stop".
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
    >>> from swiftsure.study.simulate import Population
    >>> calibration = GrowingCalibration(epsilon=0.05, loss="zero_one", horizon=400)
    >>> for seed in range(4):
    ...     sample = Population().sample(100, seed=seed)
    ...     calibration.update(ExitRecord.from_logits(sample.logits, sample.labels))
    >>> calibration.n, calibration.policy().threshold is not None
    (400, True)
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        risk: str | None = None,
        loss: str | None = None,
        risks: Sequence[Risk] | None = None,
        delta: float = 0.1,
        horizon: int = HORIZON,
        path: PathLike = None,
        score: str | None = None,
        missing: Missing = "raise",
        strict: bool = False,
        min_exit: int = 0,
        state: str | os.PathLike[str] | None = None,
    ) -> None:
        self.risks = wanted_risks(epsilon, risk, loss, risks)
        self.delta = checks.failure_probability(delta)
        self.horizon = checks.count("horizon", horizon)
        if isinstance(path, str) and path == "breakpoints":
            raise ValueError("`path` must be fixed beforehand, so it cannot be the breakpoints.")
        if missing == "stop":
            raise ValueError(
                "`missing` must be 'raise' or 'worst' for a calibration that grows, but got 'stop'."
            )
        self.path = None if path is None else Path.of(path, np.empty((0, 0)))
        self.score = score
        self._options: dict[str, Any] = {
            "missing": missing,
            "strict": bool(strict),
            "min_exit": checks.count("min_exit", min_exit, 0),
        }
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
        curves = self._curves(record)
        if len({len(curve.thresholds) for curve in curves}) > 1:
            raise ValueError("`risks` must share one path.")
        facts, data = packed_update(record, curves, key)
        self._refuse_known(facts)
        if self._grown is not None:
            if curves[0].grouped != self._grown.templates[0].grouped:
                raise ValueError("`record` must have groups if those added before have, only then.")
            self._grown.refuse(facts, data)
        if self._template is None:
            template = record.take([0])
            if self._log is not None:
                self._log.append({"settings": self._settings(curves)}, _parquet(template))
            self._template = template
        if self._log is not None:
            self._log.append(facts.model_dump(), data)
        self._add(curves, facts, data)

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
        results = [self._result(curve, risk.epsilon, index) for curve, risk in self._pairs(curves)]
        score = self.score
        if isinstance(self._template, ExitRecord):
            score = choose("score", score, self._template.confidences, preferred="top1")
        return make_policy(
            self._template,
            RULE,
            curves,
            results,
            results[0],
            score=score if isinstance(self._template, ExitRecord) else None,
            horizon=self.horizon,
            metadata=metadata,
        )

    def _pairs(self, curves: list[RiskCurve]) -> list[tuple[RiskCurve, Risk]]:
        return list(zip(curves, self.risks, strict=True))

    def _result(self, curve: RiskCurve, epsilon: float, index: int | None) -> ControlResult:
        unit = "groups" if curve.grouped else "samples"
        found = list(RULE.assumptions(curve, bounds.BOUNDS["star"]))
        found[1] = (
            "path, losses, ε, δ, horizon and method were fixed before any calibration loss was seen"
        )
        found.remove(sample_number(unit))  # the bets are valid for any number, at every moment
        drawn = self._grown is not None and self._grown.drawn
        found.append((DRAWN if drawn else ADDED).format(unit))
        return ControlResult(
            index=index,
            threshold=None if index is None else curve.threshold_at(index),
            guarantee="probability",
            epsilon=epsilon,
            delta=self.delta,
            control=RULE.name,
            bound="star",
            n=curve.n,
            seed=None,
            assumptions=tuple(found),
        )

    def _curves(self, record: Record) -> list[RiskCurve]:
        options: dict[str, Any] = {}
        if isinstance(record, ExitRecord):
            options = self._options
            if self.path is None:
                self.path = Path.logit_grid()
        curves = [
            record.curve(each.risk, each.loss, self.score, self.path, **options)
            for each in self.risks
        ]
        curves = [curve.transformed(each.above, each.worst) for curve, each in self._pairs(curves)]
        for curve, each in self._pairs(curves):
            if curve.selective:
                raise ValueError("`risk` of the samples that exit cannot be controlled by growing.")
            if curve.branches is not None:
                raise ValueError("`path` of a growing calibration must not have branches.")
            checks.between("epsilon", each.epsilon, 0.0, curve.loss_range.high)
        return curves

    def _add(self, curves: list[RiskCurve], facts: UpdateFacts, data: bytes) -> None:
        if self._grown is None:
            levels = [each.epsilon for each in self.risks]
            self._grown = Growth(curves, levels, self.delta, self.horizon)
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

    def _settings(self, curves: list[RiskCurve]) -> dict[str, Any]:
        """Return everything that was fixed beforehand, as JSON."""
        return {
            "risks": [
                [curve.risk_name, curve.loss_name, risk.epsilon, risk.above, risk.worst]
                for curve, risk in self._pairs(curves)
            ],
            "delta": self.delta,
            "horizon": self.horizon,
            "score": self.score,
            "path": hashlib.sha256(np.ascontiguousarray(curves[0].thresholds).data).hexdigest(),
            **self._options,
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
        curves = self._curves(self._template)
        for name, value in self._settings(curves).items():
            if settings.get(name) != value:
                raise ValueError(
                    f"{log.path} was started with {name} = {settings.get(name)!r}, but got"
                    f" {value!r}: what is promised must not change. Give the same, or start with"
                    " another file and new samples."
                )
        for facts, entry in zip(updates, entries[1:], strict=True):
            try:
                self._refuse_known(facts)
                self._add(curves, facts, entry.data)
            except ValueError as error:
                raise _damaged(log, shortened(error)) from None


def _damaged(log: GrowthLog, why: str) -> ValueError:
    return ValueError(f"{log.path} is a damaged calibration state: {why}.")


def _parquet(record: Record) -> bytes:
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(record_files.packed(record), sink)
    return sink.getvalue()
