"""ThresholdRecord: losses and costs of a system that is run once per setting of its dials."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.curves.checks import cost_array, dial_array
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.dials import dial_table, setting_key, settings_digest
from swiftsure.curves.paths import Path, PathLike
from swiftsure.curves.risks import RISKS
from swiftsure.exits import ExitRule
from swiftsure.records import checks as record_checks
from swiftsure.records import files as record_files
from swiftsure.records.base import Record
from swiftsure.records.checks import chosen_loss, declared_ranges, replace_fields

__all__ = ["ThresholdRecord"]

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class ThresholdRecord(Record):
    """Losses and costs of n samples at K settings, from one run of the system per setting.

    For systems whose whole run depends on its setting: generation, diffusion, drafting. The setting
    is one threshold, or one value of each of several dials.

    Parameters
    ----------
    thresholds : (K,), optional
        Safest first; the first is the full model, whatever its value. Without it, `dials`.
    losses : mapping of (n, K)
        Losses against labels; the gap risk subtracts column 0.
    inconsistencies : mapping of (n, K)
        Losses against the full model's output; column 0 is 0.
    costs : mapping of (K,) or (n, K)
    loss_ranges, inconsistency_ranges, ids, groups, slices, fingerprint
        As in `ExitRecord`; ranges are (0, 1) by default.
    dial : str
        Name of the threshold in `policy.settings`.
    settings : mapping
        Other settings of the system, held fixed, that belong to the policy.
    order : SampleOrder or int, optional
        As in `ExitRecord`.
    dials : mapping of (K,), optional
        Several dials instead of `thresholds`: the value of each at each setting, a list of
        settings or a grid (`dial_grid`). The first setting is the full model. Values are numbers,
        texts, lists of them, or None. `thresholds` then number the settings from 0 on, and
        `policy.settings` has the value of each dial. Settings are tested in the order given here
        unless `calibrate` has a `path`, such as `Path.pareto(pilot)`.
    has_ids : bool, optional
        As in `ExitRecord`.

    Examples
    --------
    >>> record = ThresholdRecord([1.0, 0.5], losses={"rouge_l": [[0.2, 0.3], [0.5, 0.4]]})
    >>> record.curve(loss="rouge_l").risk().round(3)
    array([0., 0.])
    """

    tables = ("losses", "inconsistencies")
    identity = (
        "thresholds",
        "loss_ranges",
        "inconsistency_ranges",
        "fingerprint",
        "dial",
        "settings",
        "dials",
    )

    thresholds: Array = None  # type: ignore[assignment]
    losses: Mapping[str, Array] = field(default_factory=dict)
    inconsistencies: Mapping[str, Array] = field(default_factory=dict)
    costs: Mapping[str, Array] = field(default_factory=dict)
    dial: str = field(default="threshold", kw_only=True)
    dials: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def __post_init__(self) -> None:
        """Check every array and store its checked form."""
        dials = dial_table(self.dials)
        thresholds = self._numbers(dials) if dials else dial_array(self.thresholds)
        for dial in dials or (self.dial,):
            if dial in self.settings:
                raise ValueError(f"`settings` must not hold the dial itself, {dial!r}.")
        n = checks.numbers("losses", next(iter((self.losses or self.inconsistencies).values()), []))
        axes = {"n": n.shape[0] if n.ndim else 0, "K": len(thresholds)}
        ranges, soft = declared_ranges(self)
        losses = {
            name: record_checks.loss_array(f"losses['{name}']", values, axes, ranges[name])
            for name, values in self.losses.items()
        }
        record_checks.warn_of_accuracies(losses, full=0, fastest=-1)
        replace_fields(
            self,
            thresholds=thresholds,
            dials=dials,
            losses=losses,
            inconsistencies={
                name: record_checks.inconsistency_array(
                    f"inconsistencies['{name}']", values, axes, soft[name], full=0
                )
                for name, values in self.inconsistencies.items()
            },
            costs={k: cost_array(k, v, tuple(axes.values()), "K") for k, v in self.costs.items()},
            loss_ranges=ranges,
            inconsistency_ranges=soft,
            **self._checked_draw(axes["n"]),
            settings={
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in self.settings.items()
            },
        )

    def _numbers(self, dials: Mapping[str, Any]) -> Array:
        """Return the numbers of the settings of several dials, which stand for thresholds."""
        numbers = np.arange(len(next(iter(dials.values()))), dtype=np.float64)
        given: Any = self.thresholds
        if given is not None and not np.array_equal(np.asarray(given, object), numbers):
            raise ValueError(
                "`thresholds` must be left out where `dials` are given: one of the dials may be"
                " named threshold."
            )
        if self.dial != "threshold":
            raise ValueError("`dial` names a single dial; `dials` have their own names.")
        return numbers

    @property
    def n_settings(self) -> int:
        """Number of settings, K."""
        return len(self.thresholds)

    def setting(self, number: int) -> dict[str, Any]:
        """Return the value of each dial at a setting, None for never.

        Examples
        --------
        >>> record = ThresholdRecord(dials={"a": [0, 1], "b": [9, 5]}, losses={"mse": [[0, 0]]})
        >>> record.setting(1)
        {'a': 1, 'b': 5}
        """
        if self.dials:
            return {name: values[number] for name, values in self.dials.items()}
        value = float(self.thresholds[number])
        return {self.dial: None if np.isinf(value) else value}

    def number_of(self, settings: Mapping[str, Any]) -> int:
        """Return the number of the setting with these values of the dials; raise if none has."""
        wanted = {name: settings.get(name) for name in self.setting(0)}
        key = setting_key(wanted.values())
        for number in range(self.n_settings):
            if setting_key(self.setting(number).values()) == key:
                return number
        listed = ", ".join(f"{name} = {value}" for name, value in wanted.items())
        raise ValueError(f"`record` must hold the setting {listed}, but does not.")

    def settings_digest(self) -> str:
        """Return a hash of the settings, which a path of them is made for."""
        if self.dials:
            return settings_digest(self.dials)
        return settings_digest(
            {self.dial: [self.setting(k)[self.dial] for k in range(self.n_settings)]}
        )

    def branches(self, along: str) -> list[list[int]]:
        """Return the settings in branches along one dial, for `Path.branching`.

        A branch has all settings with the same values of the other dials, in recorded order. The
        full model is in none.

        Examples
        --------
        >>> from swiftsure.curves.dials import dial_grid
        >>> dials = dial_grid({"a": [1, 2], "b": [1, 2]}, full={"a": 0, "b": 0})
        >>> ThresholdRecord(dials=dials, losses={"mse": [[0.0] * 5]}).branches(along="b")
        [[1, 3], [2, 4]]
        """
        checks.choice("along", along, self.setting(0))
        found: dict[str, list[int]] = {}
        for number in range(1, self.n_settings):
            others = [v for k, v in self.setting(number).items() if k != along]
            found.setdefault(setting_key(others), []).append(number)
        return list(found.values())

    def __repr__(self) -> str:
        """Return a one-line summary of the record."""
        held = [
            f"{part}={list(getattr(self, part))}" for part in ("losses", "inconsistencies", "costs")
        ]
        dials = [f"dials={list(self.dials)}"] if self.dials else []
        return f"ThresholdRecord({', '.join([f'n={self.n}, K={self.n_settings}', *dials, *held])})"

    def curve(
        self,
        risk: str = "gap",
        loss: str | None = None,
        score: str | None = None,
        path: PathLike = None,
    ) -> RiskCurve:
        """Return the losses and costs along the recorded settings, the input to every control.

        `score` was fixed by the recorded run: another one is refused. A `path` is one of recorded
        settings (`Path.pareto`, `Path.settings`, `Path.branching`); by default all of them, in
        recorded order.
        """
        return self.sampling.applied(
            self.plain_curve(risk, loss, ExitRule(score), path), self.groups
        )

    def plain_curve(
        self,
        risk: str,
        loss: str | None,
        rule: ExitRule,
        path: PathLike = None,
        missing: str = "raise",
    ) -> RiskCurve:
        """Return `curve` with every sample counted alike, without groups and weights."""
        if rule.strict or rule.min_exit or missing != "raise":
            raise ValueError("`strict`, `min_exit` and `missing` are for an ExitRecord.")
        score = rule.score
        own = self.settings.get("score")
        route = path if isinstance(path, Path) and path.columns is not None else None
        if (path is not None and route is None) or score not in (None, own):
            raise ValueError(
                "`score` and `path` of a ThresholdRecord are those it was recorded with"
                f" (score = {own}); leave them out, record other thresholds, or take a path of"
                " recorded settings (Path.pareto)."
            )
        loss = chosen_loss(self, risk, loss)
        values, declared = RISKS[risk].relative_losses(self, loss, full=0)
        thresholds, costs = self.thresholds, self.costs
        if route is not None:
            columns = self._columns(route)
            thresholds, values = thresholds[columns], values[:, columns]
            costs = {name: cost[..., columns] for name, cost in costs.items()}
        curve = RiskCurve.from_losses(
            thresholds,
            values,
            costs,
            declared,
            relative=True,
            risk=risk,
            loss=loss,
            order=self.order,
        )
        return replace(curve, path=route)

    def _columns(self, path: Path) -> NDArray[np.int64]:
        """Return a path's settings; raise if it is for others, or learned on these samples."""
        if path.made_for != self.settings_digest():
            raise ValueError(
                "`path` must be of this record's settings, but was made for others: record the"
                " pilot at the same settings, in the same order."
            )
        path.refuse(self)
        return np.asarray(path.columns, np.int64)

    @classmethod
    def across(cls, records: Sequence["ThresholdRecord"]) -> "ThresholdRecord":
        """Return one record of several dials from records of one dial, of the same samples.

        Sweep the system's threshold once per value of its other settings. Every setting in which
        the records differ becomes a dial; a record without it has None there. Their full model must
        be one and the same: its losses and costs are compared, and it is kept once.

        Raises
        ------
        ValueError
            If the records differ in samples, model, dial or full model, or in no setting.

        Examples
        --------
        >>> records = [
        ...     ThresholdRecord(
        ...         [0.0, 2.0], losses={"bleu": [[0.4, 0.5]]}, settings={"fallback": each}
        ...     )
        ...     for each in (0.5, 0.2)
        ... ]
        >>> ThresholdRecord.across(records).dials
        {'threshold': (0.0, 2.0, 2.0), 'fallback': (0.5, 0.5, 0.2)}
        """
        first = records[0]
        names = dict.fromkeys(name for each in records for name in each.settings)
        differ = [
            name
            for name in names
            if len({setting_key([each.settings.get(name)]) for each in records}) > 1
        ]
        if not differ or any(each.dials for each in records):
            raise ValueError("`records` must be of one dial each, and differ in a setting.")
        for other in records[1:]:
            first._refuse_other(other)
        kept = [slice(None), *[slice(1, None)] * (len(records) - 1)]  # the full model once
        parts = list(zip(records, kept, strict=True))
        rows = [
            each.setting(k) | {name: each.settings.get(name) for name in differ}
            for each, part in parts
            for k in range(each.n_settings)[part]
        ]

        def joined(table: str) -> dict[str, Array]:
            return {
                name: np.concatenate([getattr(r, table)[name][..., part] for r, part in parts], -1)
                for name in getattr(first, table)
            }

        return cls(
            dials={name: [row[name] for row in rows] for name in rows[0]},
            losses=joined("losses"),
            inconsistencies=joined("inconsistencies"),
            costs=joined("costs"),
            loss_ranges=first.loss_ranges,
            inconsistency_ranges=first.inconsistency_ranges,
            ids=first.ids,
            has_ids=any(each.has_ids for each in records),
            groups=first.groups,
            slices=first.slices,
            fingerprint=first.fingerprint,
            settings={k: v for k, v in first.settings.items() if k not in differ},
            order=first.order,
            sampling=first.sampling,
        )

    def _refuse_other(self, other: "ThresholdRecord") -> None:
        """Raise if another record is of other samples, or of another full model."""
        for name in ("dial", "fingerprint", "loss_ranges", "inconsistency_ranges"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(f"`records` must agree in `{name}`, but they do not.")
        for name in ("ids", "groups", "slices"):
            if not np.array_equal(getattr(self, name), getattr(other, name)):
                raise ValueError(f"`records` must be of the same samples, but differ in `{name}`.")
        for table in (*self.tables, "costs"):
            ours, theirs = getattr(self, table), getattr(other, table)
            same = set(ours) == set(theirs) and all(
                np.allclose(ours[name][..., 0], theirs[name][..., 0]) for name in ours
            )
            if not same:
                raise ValueError(
                    f"`records` must have one full model, but differ in the {table} of their first"
                    " setting."
                )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, losses: Iterable[str] | None = None
    ) -> "ThresholdRecord":
        """Read a record from Parquet or npz, with all losses or only those named."""
        with record_files.reading(path):
            return cls(**record_files.load(path, "thresholds", {"losses": losses}))
