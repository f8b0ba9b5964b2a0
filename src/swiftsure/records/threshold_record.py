"""ThresholdRecord: what happened at every threshold of a system that runs anew at each."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.curves import Average, RiskCurve, cost_array, dial_array
from swiftsure.losses import LossRange
from swiftsure.paths import PathLike
from swiftsure.records import checks as record_checks
from swiftsure.records import files as record_files
from swiftsure.records.checks import (
    Ranges,
    chosen_loss,
    concatenated,
    declared_ranges,
    replace_fields,
)
from swiftsure.sample_order import SampleOrder

__all__ = ["ThresholdRecord"]

Array = NDArray[Any]

IDENTITY = ("fingerprint", "dial", "settings", "loss_ranges", "inconsistency_ranges")
TABLES = ("losses", "inconsistencies", "costs")


@dataclass(frozen=True, eq=False)
class ThresholdRecord:
    """Losses and costs of n samples at K thresholds of a system that runs anew at each.

    For systems whose whole run depends on the threshold: generation, diffusion, drafting.

    Parameters
    ----------
    thresholds : (K,)
        Safest first; the first is the full model, whatever number the dial has there.
    losses : mapping of (n, K)
        Losses against labels; the gap risk subtracts column 0.
    inconsistencies : mapping of (n, K)
        Losses against the full model's output; column 0 is 0.
    costs : mapping of (K,) or (n, K)
    loss_ranges, inconsistency_ranges, ids, groups, fingerprint
        As in `ExitRecord`; losses lie in (0, 1) if nothing else is said.
    dial : str
        What the threshold is called in `policy.settings`.
    settings : mapping
        Other dials, held fixed, that belong to the policy.
    order : SampleOrder or int, optional
        As in `ExitRecord`.

    Examples
    --------
    >>> record = ThresholdRecord([1.0, 0.5], losses={"rouge_l": [[0.2, 0.3], [0.5, 0.4]]})
    >>> record.curve(loss="rouge_l").risk().round(3)
    array([0., 0.])
    """

    thresholds: Array
    losses: Mapping[str, Array] = field(default_factory=dict)
    inconsistencies: Mapping[str, Array] = field(default_factory=dict)
    costs: Mapping[str, Array] = field(default_factory=dict)
    loss_ranges: Ranges = field(default_factory=dict)
    inconsistency_ranges: Ranges = field(default_factory=dict)
    ids: Array = None  # type: ignore[assignment]
    groups: Array | None = None
    fingerprint: str | None = None
    dial: str = "threshold"
    settings: Mapping[str, Any] = field(default_factory=dict)
    order: SampleOrder = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check every array; what is stored is ready for use."""
        thresholds = dial_array(self.thresholds)
        if self.dial in self.settings:
            raise ValueError(f"`settings` must not hold the dial itself, {self.dial!r}.")
        n = checks.numbers("losses", next(iter((self.losses or self.inconsistencies).values()), []))
        axes = {"n": n.shape[0] if n.ndim else 0, "K": len(thresholds)}
        ranges, soft = declared_ranges(self)
        replace_fields(
            self,
            thresholds=thresholds,
            losses={
                name: record_checks.loss_array(f"losses['{name}']", values, axes, ranges[name])
                for name, values in self.losses.items()
            },
            inconsistencies={
                name: record_checks.inconsistency_array(
                    f"inconsistencies['{name}']", values, axes, soft[name], full=0
                )
                for name, values in self.inconsistencies.items()
            },
            costs={k: cost_array(k, v, tuple(axes.values()), "K") for k, v in self.costs.items()},
            loss_ranges=ranges,
            inconsistency_ranges=soft,
            ids=record_checks.id_array(self.ids, axes["n"]),
            groups=record_checks.group_array(self.groups, axes["n"]),
            settings={
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in self.settings.items()
            },
            order=SampleOrder.of(self.order, "order"),
        )

    def __repr__(self) -> str:
        """Say what the record holds, in one line."""
        held = [
            f"{part}={list(getattr(self, part))}" for part in ("losses", "inconsistencies", "costs")
        ]
        return f"ThresholdRecord({', '.join([f'n={self.n}, K={len(self.thresholds)}', *held])})"

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(next(iter((self.losses or self.inconsistencies).values())))

    def curve(
        self,
        risk: str = "gap",
        loss: str | None = None,
        score: str | None = None,
        path: PathLike = None,
        *,
        zero_bounded: bool = False,
        average: Average | None = None,
        max_group_size: int | None = None,
    ) -> RiskCurve:
        """Return losses and costs along the recorded thresholds: the one thing controls see.

        `score` and `path` are those of the recorded run and cannot be chosen here. A score is
        refused where the record says that it was another. `average` and `max_group_size` are those
        of `ExitRecord.curve`.
        """
        own = self.settings.get("score", score)
        if path is not None or score not in (None, own):
            raise ValueError(
                "`score` and `path` of a ThresholdRecord are those it was recorded with; leave them"
                " out, or record other thresholds."
            )
        loss = chosen_loss(self, risk, loss)
        tables = self.losses if risk == "gap" else self.inconsistencies
        if risk == "gap":
            values = np.subtract(tables[loss], tables[loss][:, :1], dtype=np.float64)
            declared = LossRange.of(self.loss_ranges[loss]).gap()
        else:
            values = tables[loss]
            declared = LossRange.of(self.inconsistency_ranges[loss])
        curve = RiskCurve.from_losses(
            self.thresholds,
            values,
            self.costs,
            declared,
            relative=True,
            risk=risk,
            loss=loss,
            order=self.order,
        )
        if zero_bounded:
            curve = curve.zero_bounded()
        return curve.averaged(self.groups, average, max_group_size)

    def take(self, rows: ArrayLike) -> "ThresholdRecord":
        """Return the record of some samples, by position."""
        index = np.asarray(rows)
        if index.size == 0:
            raise ValueError("`rows` must not be empty.")
        return ThresholdRecord(
            self.thresholds,
            losses={k: v[index] for k, v in self.losses.items()},
            inconsistencies={k: v[index] for k, v in self.inconsistencies.items()},
            costs={k: v if v.ndim == 1 else v[index] for k, v in self.costs.items()},
            loss_ranges=self.loss_ranges,
            inconsistency_ranges=self.inconsistency_ranges,
            ids=self.ids[index],
            groups=None if self.groups is None else self.groups[index],
            fingerprint=self.fingerprint,
            dial=self.dial,
            settings=self.settings,
            order=self.order,
        )

    @classmethod
    def concatenate(cls, records: Sequence["ThresholdRecord"]) -> "ThresholdRecord":
        """Return the record of all samples of several records of one system; ids must differ."""
        return concatenated(records, ("thresholds", *IDENTITY), TABLES)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a Parquet file, whole or not at all."""
        record_files.save(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, losses: Iterable[str] | None = None
    ) -> "ThresholdRecord":
        """Read a record from Parquet or npz; only the losses named, if any are."""
        return cls(**record_files.load(path, "thresholds", {"losses": losses}))
