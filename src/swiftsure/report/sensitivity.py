"""The risk along a path, and how the choice depends on ε, δ and the number of samples."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swiftsure.certify.wording import setting_words
from swiftsure.curves.costs import default_cost
from swiftsure.exits import exit_indices
from swiftsure.records import ExitRecord, ThresholdRecord
from swiftsure.report.recalibration import Recalibration

__all__ = [
    "ByDelta",
    "ByEpsilon",
    "BySize",
    "RiskAlong",
    "Setting",
    "by_delta",
    "by_epsilon",
    "by_size",
    "main_cost",
    "risk_along",
    "savings",
    "setting_at",
    "shown_settings",
]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Threshold = float | tuple[float | None, ...] | str | None
"""A threshold, those of several exits, or the values of several dials; None is the full model."""

STEPS, FEW_STEPS = 30, 5
"""Levels on either side of the policy's own; fewer if each is slow."""
REACH = 10.0
"""The lowest level is this many times below the policy's, and the highest as far above it."""
SHOWN = 160
"""Points of a line along the path."""
FLAT = 0.005
"""A line counts as flat while it stays within this fraction of its whole range."""
DELTAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001, 0.0001)
FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)
"""Sizes of calibration sets to try, relative to the policy's."""
LARGEST = 200_000
"""Larger calibration sets are not drawn, because it would be slow."""
LONGEST = 2000
"""Along longer paths each set takes a second or more, so none are drawn."""
ROWS = 400_000
"""Samples to draw for each size, in all its calibration sets together."""
DRAWS_SEED = 0


@dataclass(frozen=True)
class Setting:
    """One setting of the path, and its effect on the calibration samples.

    Attributes
    ----------
    threshold : float, tuple, str or None
        A text names the values of several dials; None is the full model.
    risks : tuple
        Mean loss of each promise.
    saved : dict
        Share of each cost that is saved.
    shares : tuple or None
        Share of the samples that take each exit; None for records without exits.
    """

    index: int
    threshold: Threshold
    risks: tuple[float, ...]
    saved: dict[str, float]
    shares: tuple[float, ...] | None


@dataclass(frozen=True)
class RiskAlong:
    """The risk of one promise along the path.

    Attributes
    ----------
    upper, upper_settings
        The value that the control compares with `tested_at`, at some settings; None for the mean.
    upper_name : str
        Its name in the legend.
    """

    risk: tuple[float, ...]
    settings: tuple[int, ...]
    upper: tuple[float, ...] | None
    upper_settings: tuple[int, ...]
    upper_name: str
    tested_at: float


@dataclass(frozen=True)
class ByEpsilon:
    """The setting that one promise alone would allow at each of several levels."""

    epsilons: tuple[float, ...]
    settings: tuple[int, ...]
    own: int
    """Position of the policy's own level."""


@dataclass(frozen=True)
class ByDelta:
    """The settings chosen at other failure probabilities."""

    deltas: tuple[float, ...]
    settings: tuple[int, ...]


@dataclass(frozen=True)
class BySize:
    """Results for calibration sets of other sizes, drawn from the record with replacement."""

    sizes: tuple[int, ...]
    settings: tuple[int, ...]
    """The median choice."""
    saved: tuple[float, ...] | None
    """Mean share of the cost that is saved."""
    certified: tuple[float, ...]
    """Share of the sets that certify anything."""


def savings(calibration: Recalibration) -> dict[str, Floats]:
    """Return the share of each cost that is saved, at each setting."""
    curve = calibration.curves[0]
    return {name: curve.saving(name) for name in curve.costs if curve.full_cost(name) > 0}


def main_cost(
    calibration: Recalibration, saved: dict[str, Floats], wanted: str | None = None
) -> str | None:
    """Return the cost to show: `wanted`, or the one that is meant where none is named."""
    return default_cost(saved, calibration.curves[0].full_costs, wanted)


def setting_at(calibration: Recalibration, saved: dict[str, Floats], index: int) -> Setting:
    """Return the effect of one setting on the calibration samples."""
    curve = calibration.curves[0]
    return Setting(
        index=index,
        threshold=None if index == 0 else threshold_of(calibration, index),
        risks=tuple(each.risk_at(index) for each in calibration.curves),
        saved={name: float(share[index]) for name, share in saved.items()},
        shares=_exit_shares(calibration, curve.thresholds[index]),
    )


def threshold_of(calibration: Recalibration, index: int) -> Threshold:
    """Return the threshold of a setting, or the values of its dials."""
    found = calibration.curves[0].threshold_at(index)
    record = calibration.record
    if isinstance(record, ThresholdRecord) and record.dials and isinstance(found, float):
        return setting_words(record.setting(int(found)))
    return found


def _exit_shares(calibration: Recalibration, thresholds: Floats) -> tuple[float, ...] | None:
    """Return the share of samples at each exit, also if groups were calibrated."""
    record, policy = calibration.record, calibration.policy
    if not isinstance(record, ExitRecord) or policy.score is None:
        return None
    confidences = record.confidences_of(policy.rule)
    exits = exit_indices(confidences, thresholds, strict=policy.strict, min_exit=policy.min_exit)
    counts = np.bincount(exits, minlength=record.n_exits)
    return tuple((counts / record.n).tolist())


def shown_settings(calibration: Recalibration, saved: Floats | None) -> Indices:
    """Return a subsample of the settings where something changes, including the policy's."""
    measured = [curve.risk() for curve in calibration.curves]
    ends = [_changing_range(values) for values in (*measured, *([] if saved is None else [saved]))]
    first = min(start for start, _ in ends)
    own = max(calibration.index, first)  # earlier settings equal the full model
    last = max(own, *(stop for _, stop in ends))
    return _subsample(np.arange(first, last + 1), SHOWN, own)


def _changing_range(values: Floats) -> tuple[int, int]:
    """Return the first and last setting of the part that is not flat."""
    flat = FLAT * float(np.ptp(values))
    moved = np.flatnonzero(np.abs(values - values[0]) > flat)
    moving = np.flatnonzero(np.abs(values - values[-1]) > flat)
    if not moved.size or not moving.size:
        return 0, len(values) - 1
    return int(moved[0]) - 1, int(moving[-1]) + 1


def _subsample(settings: Indices, most: int, kept: int) -> Indices:
    some = np.linspace(settings[0], settings[-1], min(most, len(settings))).round().astype(np.int64)
    return np.union1d(some, [kept])


def risk_along(calibration: Recalibration, promise: int, settings: Indices) -> RiskAlong:
    """Return the risk of a promise along the path, with the bound that its control uses."""
    rule, curve = calibration.request.control, calibration.curves[promise]
    certificate = calibration.policy.certificate
    epsilon = certificate.promises[promise].epsilon
    upper: Floats | None = None
    name, tested_at, where = "", epsilon, settings
    # Of slices, of the samples that exit, and at every moment, other means are tested.
    one_mean = certificate.samples.slices is None or len(certificate.samples.slices) == 1
    one_mean = one_mean and not curve.statistic.selective and certificate.samples.horizon is None
    if rule.uses_bound and one_mean:
        # Each upper bound takes dozens of passes over the samples.
        own = max(calibration.index, int(settings[0]))
        where = _subsample(settings, int(np.clip(2_000_000 // curve.n, 16, 80)), own)
        upper, name, tested_at = _upper_bounds(calibration, promise, where)
    elif rule.name == "crc" and one_mean:
        sums, _ = rule.prepare(curve).totals(monotone=rule.is_monotone)
        upper = ((sums + curve.loss_range.high) / (curve.weight() + 1))[where]
        name = "what CRC compares with ε"
    return RiskAlong(
        risk=tuple(curve.risk()[settings].tolist()),
        settings=tuple(settings.tolist()),
        upper=None if upper is None else tuple(upper.tolist()),
        upper_settings=() if upper is None else tuple(where.tolist()),
        upper_name=name,
        tested_at=tested_at,
    )


def _upper_bounds(
    calibration: Recalibration, promise: int, settings: Indices
) -> tuple[Floats, str, float]:
    """Return upper bounds, their name, and the level they are compared with."""
    rule, curve = calibration.request.control, calibration.in_order(calibration.curves[promise])
    certificate, pool = calibration.policy.certificate, calibration.population
    epsilon = certificate.promises[promise].epsilon
    delta = calibration.delta if certificate.delta is not None else 0.5
    if rule.name == "crc":
        epsilon, delta = rule.split_epsilon(epsilon, curve.loss_range.high, curve.n)
    elif rule.correction == "bonferroni":
        delta /= max(1, curve.n_settings - (1 if curve.full_model_first else 0))
    bound = rule.bound_for(curve, certificate.samples.n, pool)
    first = 1 if curve.full_model_first else 0
    rows = calibration.rows
    upper = [
        bound.upper(curve, rows, int(k), delta, pool or 0) if k >= first else 0.0 for k in settings
    ]
    return np.asarray(upper), f"{100 * (1 - delta):.4g} % upper bound", epsilon


def by_epsilon(calibration: Recalibration, promise: int) -> ByEpsilon:
    """Return the settings that one promise allows at levels around its own."""
    kept = calibration.policy.certificate.promises[promise]
    highest = calibration.largest_loss(promise)
    top = max(kept.epsilon, min(REACH * kept.epsilon, 0.95 * highest))
    steps = FEW_STEPS if calibration.slow else STEPS
    below = np.geomspace(kept.epsilon / REACH, kept.epsilon, steps + 1)[:-1]
    above = np.geomspace(kept.epsilon, top, steps + 1)[1:]
    # Calibrate at the rounded levels that are shown.
    rounded = [float(f"{value:.3g}") for value in (*below, *above)]
    epsilons = np.unique([kept.epsilon, *(e for e in rounded if 0 < e < highest)])
    return ByEpsilon(
        epsilons=tuple(epsilons.tolist()),
        settings=tuple(calibration.choices(promise, epsilons).tolist()),
        own=int(np.searchsorted(epsilons, kept.epsilon)),
    )


def by_delta(calibration: Recalibration) -> ByDelta | None:
    """Return the settings chosen at other δ; None for controls without δ."""
    own = calibration.policy.certificate.delta
    if own is None:
        return None
    deltas = sorted({own, *DELTAS}, reverse=True)
    return ByDelta(tuple(deltas), tuple(calibration.choice_at(delta) for delta in deltas))


def by_size(calibration: Recalibration, saved: Floats | None) -> BySize | None:
    """Return the effect of more or fewer samples; None if that is too slow to draw or for a pool.

    This is an estimate, only as good as the record represents the population. Sets drawn with
    replacement say nothing about a finite pool.
    """
    n, pool = calibration.curves[0].n, calibration.population
    long = calibration.slow or calibration.curves[0].n_settings > LONGEST
    if pool is not None or n > LARGEST or long:
        return None
    sizes = sorted({max(1, round(factor * n)) for factor in FACTORS if factor * n <= LARGEST})
    rng = np.random.default_rng(DRAWS_SEED)
    chosen = []
    for size in sizes:
        drawn = (rng.integers(0, n, size) for _ in range(int(np.clip(ROWS // size, 10, 100))))
        chosen.append(np.asarray([calibration.choice_on(rows) for rows in drawn]))
    return BySize(
        sizes=tuple(sizes),
        settings=tuple(int(np.quantile(each, 0.5, method="lower")) for each in chosen),
        saved=None if saved is None else tuple(float(saved[each].mean()) for each in chosen),
        certified=tuple(float((each > 0).mean()) for each in chosen),
    )
