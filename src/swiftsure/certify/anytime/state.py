"""Growth: the samples of a calibration that grows, and its bets, which pass each of them once."""

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from swiftsure._lib import kernels as _kernels
from swiftsure.certify.bounds import _bets
from swiftsure.certify.control import walk_starts
from swiftsure.certify.selection import Cell
from swiftsure.certify.wording import KnownCondition
from swiftsure.curves.conditions import Condition
from swiftsure.curves.curve import RiskCurve
from swiftsure.records import ExitRecord, ThresholdRecord

__all__ = ["Growth", "UpdateFacts", "bet_sizes", "known_again", "packed_update", "record_key"]

Array = NDArray[Any]
Bet = tuple[float, float, float, float]


class UpdateFacts(BaseModel):
    """What is kept of an update besides its rows; lists have one entry for each tested curve."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n: list[int]
    """Number of rows: samples, or groups."""
    n_samples: int = Field(ge=1)
    labels: list[int | None]
    """How many samples have a label."""
    conditions: list[list[KnownCondition]]
    """Conditions of the promise."""
    drawn: bool
    """Whether the order within the update was drawn at random."""
    key: str | None
    ids: list[int | str]
    groups: list[int | str]


class TestedRows:
    """What is tested of one promise, for all samples so far: those of one slice, or all."""

    def __init__(self, cell: Cell) -> None:
        curve = cell.curve
        self.cell = cell
        self.values = _Rows(np.float64, curve.data.values.shape[1])
        self.confidences = _Rows(np.float32, curve.confidences.shape[1])
        counted = bet_sizes(curve)
        self.sizes = _Rows(np.float64, 0 if counted is None else counted.shape[1])
        self.weights = _Rows(np.float64, 0 if curve.units.weights is None else 1)
        self.costs = {
            name: _Rows(np.float64, values.shape[1])
            for name, values in curve.costs.items()
            if values.ndim == 2
        }
        self.full_costs = {
            name: _Rows(np.float64, 1) for name, alone in curve.full_costs.items() if np.ndim(alone)
        }
        self.n = 0
        self.n_samples = 0
        self.n_labels: int | None = None if curve.n_labels is None else 0
        self.conditions: tuple[Condition, ...] = ()

    @property
    def parts(self) -> tuple["_Rows", ...]:
        """The tables, in the order of an update's bytes."""
        costs = (*self.costs.values(), *self.full_costs.values())
        return (self.confidences, self.values, self.sizes, self.weights, *costs)

    def add(self, data: bytes, position: int, n: int) -> int:
        """Append n rows of every table; return the position behind them."""
        for rows in self.parts:
            position = rows.append(data, position, n)
        self.n += n
        return position

    @property
    def losses(self) -> _kernels.Losses:
        """The losses as the compiled kernels take them."""
        return self.cell.curve.data._replace(
            values=self.values.values, confidences=self.confidences.values
        )

    def curve(self) -> RiskCurve:
        """Return the curve of all samples so far."""
        template, units = self.cell.curve, self.cell.curve.units
        return replace(
            template,
            costs=dict(template.costs) | {k: v.values for k, v in self.costs.items()},
            full_costs=dict(template.full_costs)
            | {k: v.values[:, 0] for k, v in self.full_costs.items()},
            n_labels=self.n_labels,
            conditions=self.conditions,
            units=replace(
                units,
                n_samples=self.n_samples if units.grouped else None,
                weights=None if units.weights is None else self.weights.values[:, 0],
                sizes=None if units.sizes is None else self.sizes.values,
                members=None,
            ),
            data=self.losses,
        )


@dataclass
class _Walk:
    """Bets of several tested curves along the path, from one start: all must certify a setting."""

    tested: list[int]
    delta: float
    next: int
    bets: list[Bet]
    seen: list[int]


class Growth:
    """All samples so far, and the bets on the settings.

    Only the first setting of a walk that is not certified yet is bet on; a later one is caught up
    when its turn comes, so each bet passes each sample at most once. Promises about all samples
    share one walk; those about the samples that exit early share one from each of several starts.
    These keep their shares of δ: the bets on a setting aim at one level.
    """

    def __init__(self, cells: list[Cell], delta: float, horizon: int) -> None:
        self.tested = [TestedRows(cell) for cell in cells]
        self.drawn = True
        first = cells[0].curve
        self.start = 1 if first.full_model_first else 0
        self._fresh = [(0.0, 0.0, 1.0, 0.25 * cell.curve.loss_range.high**2) for cell in cells]
        self._thresholds = [_kernels.inclusive_thresholds(cell.curve.data) for cell in cells]
        self._tests = [
            _bets.GrowingTest(cell.promise.epsilon, float(cell.curve.loss_range.high), horizon)
            for cell in cells
        ]
        self._walks: list[_Walk] = []
        together = [k for k, cell in enumerate(cells) if not cell.curve.statistic.selective]
        if together:
            self._walks.append(self._new_walk(together, delta, self.start))
        exiting = [k for k, cell in enumerate(cells) if cell.curve.statistic.selective]
        if exiting:
            starts = walk_starts(first, self.start)
            self._walks += [self._new_walk(exiting, delta / len(starts), k) for k in starts]
        self._certified: list[list[int]] = [[] for _ in self._walks]

    def _new_walk(self, tested: list[int], delta: float, start: int) -> _Walk:
        goal = -np.log(delta)
        bets = [(goal, *self._fresh[k][1:]) for k in tested]
        return _Walk(tested, delta, start, bets, [0] * len(tested))

    @property
    def n(self) -> int:
        """Number of rows of all samples so far: the first curve's, or of all its slices."""
        promise = self.tested[0].cell.promise
        return sum(each.n for each in self.tested if each.cell.promise is promise)

    @property
    def n_samples(self) -> int:
        """Number of samples so far."""
        return self.tested[0].n_samples

    @property
    def index(self) -> int | None:
        """The last certified setting; None if there is none."""
        mask = np.ones(self.tested[0].cell.curve.n_settings, bool)
        mask[: self.start] = False
        for selective in {each.cell.curve.statistic.selective for each in self.tested}:
            alone = np.zeros_like(mask)
            for walk, certified in zip(self._walks, self._certified, strict=True):
                if self.tested[walk.tested[0]].cell.curve.statistic.selective == selective:
                    alone[certified] = True
            mask &= alone
        found = np.flatnonzero(mask)
        return int(found[-1]) if found.size else None

    def refuse(self, facts: UpdateFacts, data: bytes) -> None:
        """Raise if an update cannot be added to these samples."""
        lists = (facts.n, facts.labels, facts.conditions)
        if any(len(each) != len(self.tested) for each in lists):
            raise ValueError("an update has other risks")
        rows = sum(
            n * sum(part.row_bytes for part in each.parts)
            for each, n in zip(self.tested, facts.n, strict=True)
        )
        if len(data) != rows:
            raise ValueError(f"an update of {facts.n[0]:,} rows does not have their size")

    def add(self, facts: UpdateFacts, data: bytes) -> None:
        """Add the samples of an update, as `packed_update` returns them."""
        self.refuse(facts, data)
        position = 0
        self.drawn &= facts.drawn
        for each, n, labels, conditions in zip(
            self.tested, facts.n, facts.labels, facts.conditions, strict=True
        ):
            position = each.add(data, position, n)
            each.n_samples += facts.n_samples
            if labels is not None:
                each.n_labels = (each.n_labels or 0) + labels
            each.conditions = tuple(dict.fromkeys((*each.conditions, *conditions)))
        for walk, certified in zip(self._walks, self._certified, strict=True):
            self._advance(walk, certified)

    def _advance(self, walk: _Walk, certified: list[int]) -> None:
        """Carry on the bets on the next setting, and on those after it while they are certified."""
        n_settings = self.tested[0].cell.curve.n_settings
        fresh = self._new_walk(walk.tested, walk.delta, 0).bets
        if len(walk.tested) == 1:
            (k,) = walk.tested
            each = self.tested[k]
            settled, walk.bets[0] = _bets.walk_on(
                each.losses,
                each.sizes.values,
                self._thresholds[k],
                walk.next,
                walk.seen[0],
                each.n,
                walk.bets[0],
                fresh[0],
                self._tests[k],
            )
            certified += range(walk.next, settled)
            walk.next, walk.seen[0] = settled, each.n
            return
        while walk.next < n_settings:
            for j, k in enumerate(walk.tested):
                each = self.tested[k]
                if walk.bets[j][0] > 0.0:
                    walk.bets[j] = _bets.grow(
                        each.losses,
                        each.sizes.values,
                        self._thresholds[k],
                        walk.next,
                        walk.seen[j],
                        each.n,
                        walk.bets[j],
                        self._tests[k],
                    )
                walk.seen[j] = each.n
            if any(bet[0] > 0.0 for bet in walk.bets):
                return
            certified.append(walk.next)
            walk.next += 1
            walk.bets, walk.seen = list(fresh), [0] * len(walk.tested)

    def curves(self) -> list[RiskCurve]:
        """Return the tested curves of all samples so far."""
        return [each.curve() for each in self.tested]


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
        if size == 0:
            new = np.empty((n, 0), self._all.dtype)
        else:
            new = np.frombuffer(data, self._all.dtype, size, position)
        if self._n + n > len(self._all):
            larger = np.empty((2 * (self._n + n), self._all.shape[1]), self._all.dtype)
            larger[: self._n] = self.values
            self._all = larger
        self._all[self._n : self._n + n] = new.reshape(n, -1)
        self._n += n
        return position + new.nbytes


def bet_sizes(curve: RiskCurve) -> Array | None:
    """Return how much each row counts in a bet: at each exit or setting, or everywhere the same.

    Bets must pass all samples, so that of single samples those that reach the full model count 0.
    """
    if not curve.statistic.selective or curve.units.sizes is not None:
        return curve.units.in_tests
    counted = np.ones_like(curve.data.values)
    counted[:, -1] = 0.0
    return counted


def packed_update(
    record: ExitRecord | ThresholdRecord, cells: list[Cell], key: str | None
) -> tuple[UpdateFacts, bytes]:
    """Return what is kept of an update: facts, and the rows in the order of the test."""
    tables = []
    for curve in (cell.curve for cell in cells):
        order = curve.rows_in_order(record.order.seed)
        own = [curve.confidences, curve.data.values]
        counted = bet_sizes(curve)
        own += [] if counted is None else [counted]
        own += [] if curve.units.weights is None else [curve.units.weights]
        own += [values for values in curve.costs.values() if values.ndim == 2]
        own += [np.asarray(v) for v in curve.full_costs.values() if np.ndim(v)]
        tables += [np.ascontiguousarray(table[order]).tobytes() for table in own]
    facts = UpdateFacts(
        n=[cell.curve.n for cell in cells],
        n_samples=record.n,
        labels=[cell.curve.n_labels for cell in cells],
        conditions=[
            [*cell.curve.conditions, *cell.curve.order.split_conditions(record.unit)]
            for cell in cells
        ],
        drawn=record.order.drawn,
        key=key,
        ids=_names(record),
        groups=[] if record.groups is None else np.unique(record.groups).tolist(),
    )
    return facts, b"".join(tables)


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
