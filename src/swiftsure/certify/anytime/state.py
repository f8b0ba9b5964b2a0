"""Growth: the samples of a calibration that grows, and its bets, which pass each of them once."""

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from swiftsure._lib import kernels as _kernels
from swiftsure.certify.bounds import _bets
from swiftsure.curves.curve import RiskCurve
from swiftsure.records import ExitRecord, ThresholdRecord

__all__ = ["Growth", "UpdateFacts", "known_again", "packed_update", "record_key"]

Array = NDArray[Any]


class UpdateFacts(BaseModel):
    """What is kept of an update besides its rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n: int = Field(ge=1)
    """Number of rows: samples, or groups."""
    n_samples: int = Field(ge=1)
    labels: list[int | None]
    """How many samples have a label, for each risk."""
    conditions: list[list[str]]
    """Conditions of the promise, for each risk."""
    drawn: bool
    """Whether the order within the update was drawn at random."""
    key: str | None
    ids: list[int | str]
    groups: list[int | str]


class Growth:
    """Losses, confidences and costs of all samples so far, and the bets on the settings.

    Only the first setting that is not certified yet is bet on; a later one is caught up when its
    turn comes, so each bet passes each sample at most once.
    """

    def __init__(
        self, curves: list[RiskCurve], epsilons: list[float], delta: float, horizon: int
    ) -> None:
        self.templates = curves
        self.epsilons = epsilons
        self.horizon = horizon
        self.n = 0
        self.n_samples = 0
        self.n_labels: list[int | None] = [0 if c.n_labels is not None else None for c in curves]
        self.tables = [_Rows(np.float64, curve.data.values.shape[1]) for curve in curves]
        self.confidences = _Rows(np.float32, curves[0].confidences.shape[1])
        self.costs = {
            name: _Rows(np.float64, values.shape[1])
            for name, values in curves[0].costs.items()
            if values.ndim == 2
        }
        self.drawn = True
        self.conditions: list[tuple[str, ...]] = [()] * len(curves)
        self.start = 1 if curves[0].full_model_first else 0
        self.last = self.start - 1
        self._inclusive = _kernels.inclusive_thresholds(curves[0].data)
        self._fresh = [(-np.log(delta), 0.0, 0.25 * c.loss_range.high**2) for c in curves]
        self._bets = list(self._fresh)
        self._seen = [0] * len(curves)

    @property
    def index(self) -> int | None:
        """The last certified setting; None if there is none."""
        return self.last if self.last >= self.start else None

    @property
    def _parts(self) -> tuple["_Rows", ...]:
        return (self.confidences, *self.tables, *self.costs.values())

    def refuse(self, facts: UpdateFacts, data: bytes) -> None:
        """Raise if an update cannot be added to these samples."""
        if len(data) != facts.n * sum(rows.row_bytes for rows in self._parts):
            raise ValueError(f"an update of {facts.n:,} rows does not have their size")
        if not len(facts.labels) == len(facts.conditions) == len(self.tables):
            raise ValueError("an update has other risks")

    def add(self, facts: UpdateFacts, data: bytes) -> None:
        """Add the samples of an update, as `packed_update` returns them."""
        self.refuse(facts, data)
        position = 0
        for rows in self._parts:
            position = rows.append(data, position, facts.n)
        self.n += facts.n
        self.n_samples += facts.n_samples
        self.drawn &= facts.drawn
        for k, added in enumerate(facts.labels):
            if added is not None:
                self.n_labels[k] = (self.n_labels[k] or 0) + added
            both = (*self.conditions[k], *facts.conditions[k])
            self.conditions[k] = tuple(dict.fromkeys(both))
        self._advance()

    def _advance(self) -> None:
        """Carry on the bets on the next setting, and on those after it while they are certified."""
        if len(self.templates) == 1:
            settled, self._bets[0] = _bets.walk_on(
                self._data(0),
                self._inclusive,
                self.last + 1,
                self._seen[0],
                self.n,
                self._bets[0],
                self._fresh[0],
                self.epsilons[0],
                self.templates[0].loss_range.high,
                self.horizon,
            )
            self.last, self._seen[0] = settled - 1, self.n
            return
        while self.last + 1 < self.templates[0].n_settings:
            setting = self.last + 1
            for k, curve in enumerate(self.templates):
                if self._bets[k][0] > 0.0:
                    self._bets[k] = _bets.grow(
                        self._data(k),
                        self._inclusive,
                        setting,
                        self._seen[k],
                        self.n,
                        self._bets[k],
                        self.epsilons[k],
                        curve.loss_range.high,
                        self.horizon,
                    )
                self._seen[k] = self.n
            if any(bet[0] > 0.0 for bet in self._bets):
                return
            self.last = setting
            self._bets, self._seen = list(self._fresh), [0] * len(self.templates)

    def _data(self, k: int) -> _kernels.Losses:
        return self.templates[k].data._replace(
            values=self.tables[k].values, confidences=self.confidences.values
        )

    def curves(self) -> list[RiskCurve]:
        """Return the curves of all samples so far."""
        costs = dict(self.templates[0].costs) | {k: v.values for k, v in self.costs.items()}
        return [
            replace(
                curve,
                costs=costs,
                n_samples=self.n_samples if curve.grouped else None,
                n_labels=self.n_labels[k],
                conditions=self.conditions[k],
                data=self._data(k),
            )
            for k, curve in enumerate(self.templates)
        ]


class _Rows:
    """A matrix that grows by rows."""

    def __init__(self, dtype: Any, columns: int) -> None:
        self._all = np.empty((64, columns), dtype)
        self._n = 0

    @property
    def values(self) -> Array:
        return self._all[: self._n]

    @property
    def row_bytes(self) -> int:
        return int(self._all.shape[1] * self._all.itemsize)

    def append(self, data: bytes, position: int, n: int) -> int:
        """Append n rows from bytes, and return the position behind them."""
        size = n * self._all.shape[1]
        new = np.frombuffer(data, self._all.dtype, size, position)
        if self._n + n > len(self._all):
            larger = np.empty((2 * (self._n + n), self._all.shape[1]), self._all.dtype)
            larger[: self._n] = self.values
            self._all = larger
        self._all[self._n : self._n + n] = new.reshape(n, -1)
        self._n += n
        return position + new.nbytes


def packed_update(
    record: ExitRecord | ThresholdRecord, curves: list[RiskCurve], key: str | None
) -> tuple[UpdateFacts, bytes]:
    """Return what is kept of an update: facts, and the rows in the order of the test."""
    order = curves[0].rows_in_order(record.order.seed)
    costs = [values for values in curves[0].costs.values() if values.ndim == 2]
    tables = [curves[0].confidences, *(curve.data.values for curve in curves), *costs]
    unit = "groups" if curves[0].grouped else "samples"
    facts = UpdateFacts(
        n=curves[0].n,
        n_samples=record.n,
        labels=[curve.n_labels for curve in curves],
        conditions=[[*curve.conditions, *curve.order.split_conditions(unit)] for curve in curves],
        drawn=record.order.drawn,
        key=key,
        ids=_names(record),
        groups=[] if record.groups is None else np.unique(record.groups).tolist(),
    )
    return facts, b"".join(np.ascontiguousarray(table[order]).tobytes() for table in tables)


def _names(record: ExitRecord | ThresholdRecord) -> list[int | str]:
    """Return what identifies the samples of a record; nothing if nothing does.

    Without ids, that is their numbers in the record that they are parts of, by its drawn seed.
    """
    if record.has_ids:
        return list(record.ids.tolist())
    if record.order.drawn:
        return [f"{number} of the record with seed {record.order.seed}" for number in record.ids]
    return []


def known_again(record: ExitRecord | ThresholdRecord) -> bool:
    """Return whether adding a record twice is noticed: by its drawn seed, or by its ids."""
    return record.order.drawn or bool(record.has_ids)


def record_key(record: ExitRecord | ThresholdRecord) -> str | None:
    """Return a name of this very record; None if its seed was given, so others may share it."""
    if not record.order.drawn:
        return None
    found = hashlib.sha256(f"{record.order.seed} {record.n} {record.ids.dtype}".encode())
    first = next(table for name in record.tables for table in getattr(record, name).values())
    for values in (record.ids, first):
        found.update(np.ascontiguousarray(values).view(np.uint8).data)
    return found.hexdigest()
