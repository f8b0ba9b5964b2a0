"""ThresholdRecord: losses and costs of a system that is run once per threshold."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.curves import Average, RiskCurve, cost_array, dial_array
from swiftsure.paths import PathLike
from swiftsure.records import checks as record_checks
from swiftsure.records import files as record_files
from swiftsure.records.base import Record
from swiftsure.records.checks import Ranges, chosen_loss, declared_ranges, replace_fields
from swiftsure.risks import RISKS
from swiftsure.sample_order import SampleOrder

__all__ = ["ThresholdRecord"]

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class ThresholdRecord(Record):
    """Losses and costs of n samples at K thresholds, from one run of the system per threshold.

    For systems whose whole run depends on the threshold: generation, diffusion, drafting.

    Parameters
    ----------
    thresholds : (K,)
        Safest first; the first is the full model, whatever its value.
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
    )

    thresholds: Array
    losses: Mapping[str, Array] = field(default_factory=dict)
    inconsistencies: Mapping[str, Array] = field(default_factory=dict)
    costs: Mapping[str, Array] = field(default_factory=dict)
    loss_ranges: Ranges = field(default_factory=dict)
    inconsistency_ranges: Ranges = field(default_factory=dict)
    ids: Array = None  # type: ignore[assignment]
    groups: Array | None = None
    slices: Array | None = None
    fingerprint: str | None = None
    dial: str = "threshold"
    settings: Mapping[str, Any] = field(default_factory=dict)
    order: SampleOrder = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Check every array and store its checked form."""
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
            slices=record_checks.group_array(self.slices, axes["n"], "slices"),
            settings={
                name: value.item() if isinstance(value, np.generic) else value
                for name, value in self.settings.items()
            },
            order=SampleOrder.of(self.order, "order"),
        )

    def __repr__(self) -> str:
        """Return a one-line summary of the record."""
        held = [
            f"{part}={list(getattr(self, part))}" for part in ("losses", "inconsistencies", "costs")
        ]
        return f"ThresholdRecord({', '.join([f'n={self.n}, K={len(self.thresholds)}', *held])})"

    def curve(
        self,
        risk: str = "gap",
        loss: str | None = None,
        score: str | None = None,
        path: PathLike = None,
        *,
        average: Average | None = None,
        max_group_size: int | None = None,
    ) -> RiskCurve:
        """Return the losses and costs along the recorded thresholds, the input to every control.

        `score` and `path` were fixed by the recorded run: a `path`, or a `score` that differs from
        the recorded one, is refused. `average` and `max_group_size` are as in `ExitRecord.curve`.
        """
        own = self.settings.get("score", score)
        if path is not None or score not in (None, own):
            raise ValueError(
                "`score` and `path` of a ThresholdRecord are those it was recorded with; leave them"
                " out, or record other thresholds."
            )
        loss = chosen_loss(self, risk, loss)
        if RISKS[risk].selective:
            raise ValueError("`risk` of the samples that exit needs a record of exits.")
        values, declared = RISKS[risk].relative_losses(self, loss, full=0)
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
        return curve.averaged(self.groups, average, max_group_size)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, losses: Iterable[str] | None = None
    ) -> "ThresholdRecord":
        """Read a record from Parquet or npz, with all losses or only those named."""
        with record_files.reading(path):
            return cls(**record_files.load(path, "thresholds", {"losses": losses}))
