"""Run a policy's own request again on its record, and check that it gives the policy."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isclose
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.certify.best_of import with_selection
from swiftsure.certify.calibration import Ask, Calibration
from swiftsure.certify.policy import Policy
from swiftsure.certify.selection import (
    Cell,
    cells,
    fastest,
    overall,
    prepared,
    small_slices,
    walk_delta,
    within_costs,
)
from swiftsure.certify.slices import about_slice, slice_by_slice
from swiftsure.curves.curve import RiskCurve
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.study.budgets import budget_policy

__all__ = ["Recalibration", "recalibrate"]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]

RELATIVE_TOLERANCE = 1e-6
"""Allowed relative difference of numbers, because machines round differently."""
ABSOLUTE_TOLERANCE = 1e-8

ANOTHER = (
    "Give the record that the policy was calibrated on, with the same groups, weights, population"
    " and order, or calibrate again on this one."
)
EDITED = "Was the file edited? Calibrate again."

IDENTITY = ("score", "n_exits", "temperatures", "dtype", "dials", "certificate.provenance.model")
"""Fields that say what a policy is about; a difference in them is named first."""

DATA = tuple(
    f"certificate.{name}"
    for name in (
        *(f"samples.{name}" for name in ("n_samples", "unit", "average")),
        *(f"samples.{name}" for name in ("max_group_size", "max_weight", "population")),
        *("n_settings", "provenance.data", "provenance.seed"),
    )
)
"""Fields that say what it was calibrated on, and how these samples were drawn."""


@dataclass(frozen=True, eq=False)
class Recalibration:
    """A policy, the samples that calibrated it, and what its request tests on them.

    Attributes
    ----------
    record : ExitRecord or ThresholdRecord
        The samples that calibrated, without a pilot.
    request : Calibration
        What was run on them.
    tested : tuple of Cell
        What each promise tests, in each slice.
    curves : tuple of RiskCurve
        One for each promise, of the samples of all slices.
    """

    policy: Policy
    record: ExitRecord | ThresholdRecord
    request: Calibration
    tested: tuple[Cell, ...]
    curves: tuple[RiskCurve, ...]
    _costs: dict[float, Mask] = field(default_factory=dict, repr=False)

    @property
    def rows(self) -> Indices:
        """The samples behind the bounds; with a budget, earlier samples chose the setting."""
        n = self.curves[0].n
        return np.arange(n - self.policy.certificate.samples.n, n)

    @property
    def population(self) -> int | None:
        """Size of the finite population, if the samples are from one."""
        found: int | None = self.record.sampling.population
        return found

    @property
    def index(self) -> int:
        """The policy's setting along the path; 0, the full model, if nothing was certified."""
        return self.policy.certificate.index or 0

    @property
    def delta(self) -> float:
        """The failure probability of each walk; controls without one ignore it."""
        return walk_delta(self.request)

    def in_order(self, curve: RiskCurve) -> RiskCurve:
        """Return a curve as its control sees it: the same losses in the same order."""
        control, certificate = self.request.control, self.policy.certificate
        known = control.prepare(curve)
        if certificate.by_budget:
            return (
                known
                if certificate.provenance.seed is None
                else known.shuffled(certificate.provenance.seed)
            )
        if not control.uses_bound:
            return known
        ordered = control.bound_for(known, known.n, self.population).uses_order
        return known.shuffled(known.order.seed) if ordered else known

    @cached_property
    def ordered(self) -> tuple[RiskCurve, ...]:
        """The tested curves, as their control sees them."""
        return tuple(self.in_order(each.curve) for each in self.tested)

    @property
    def plain(self) -> bool:
        """Whether one walk over all samples decides, so that it can be drawn from."""
        return (
            not self.request.limits
            and self.policy.certificate.samples.horizon is None
            and self.curves[0].branches is None
            and all(each.slice_name is None for each in self.tested)
            and not any(curve.statistic.selective for curve in self.curves)
        )

    @property
    def separable(self) -> bool:
        """Whether the safest of the settings that each promise allows alone keeps them all."""
        exits = any(each.among == "exits" for each in self.request.risks)
        one_walk = not exits and not self.request.limits and self.curves[0].branches is None
        return len(self.request.risks) == 1 or one_walk

    @property
    def slow(self) -> bool:
        """Whether a choice is slow: other than one walk that stops early."""
        control = self.request.control
        if not self.plain:
            return True
        return control.correction == "bonferroni" and any(
            control.bound_for(curve, curve.n, self.population).uses_order for curve in self.ordered
        )

    def choices(self, promise: int, epsilons: Floats) -> Indices:
        """Return the setting that a promise allows at each level; 0 is the full model.

        If `separable`, that is what it allows alone; else the others are at their own levels.
        """
        if self.plain:
            return np.maximum(self._indices(promise, epsilons, self.delta), 0)
        kept = range(len(self.request.risks)) if not self.separable else [promise]
        own = [each.epsilon for each in self.request.risks]
        found = []
        for level in epsilons.tolist():
            levels = [level if k == promise else own[k] for k in range(len(own))]
            found.append(self._choice(levels, self.request.delta, kept))
        return np.asarray(found, np.int64)

    def choice_at(self, delta: float) -> int:
        """Return the setting that the promises allow together at another δ."""
        # That of the certificate is shared among several candidates, if there were any.
        share = self.request.delta * delta / (self.policy.certificate.delta or delta)
        own = [each.epsilon for each in self.request.risks]
        return self._choice(own, share, range(len(own)))

    def choice_on(self, rows: Indices) -> int:
        """Return the setting that the promises allow on some of the samples, if `plain`."""
        levels = [np.asarray([each.promise.epsilon]) for each in self.tested]
        chosen = [self._indices(k, each, self.delta, rows)[0] for k, each in enumerate(levels)]
        return max(0, int(min(chosen)))

    def largest_loss(self, promise: int) -> float:
        """Return the largest loss of a promise that every slice can have, weighted or not."""
        risk = self.request.risks[promise]
        return min(each.curve.loss_range.high for each in self.tested if each.promise is risk)

    def _number(self, cell: int) -> int:
        """Return which promise a cell tests."""
        return next(
            k for k, each in enumerate(self.request.risks) if each is self.tested[cell].promise
        )

    def _indices(
        self, cell: int, epsilons: Floats, share: float, rows: Indices | None = None
    ) -> Indices:
        return self.request.control.indices(
            self.ordered[cell], epsilons, share, rows, self.population
        )

    def _choice(self, levels: Sequence[float], delta: float, kept: Sequence[int]) -> int:
        """Return the setting that some of the promises allow together."""
        changed = tuple(
            replace(each, epsilon=level)
            for each, level in zip(self.request.risks, levels, strict=True)
        )
        limits = tuple(each for each in self.request.promises if each not in self.request.risks)
        has_delta = self.request.control.guarantee == "probability"
        request = replace(
            self.request,
            promises=(*changed, *limits),
            delta=delta if has_delta else self.request.delta,
        )
        horizon = self.policy.certificate.samples.horizon
        if horizon is not None:
            alone = replace(request, promises=tuple(changed[k] for k in kept))
            growing = alone.start(horizon)
            growing.update(self.record)
            return growing.index or 0
        numbers = [k for k in range(len(self.tested)) if self._number(k) in kept]
        tested = [replace(self.tested[k], promise=changed[self._number(k)]) for k in numbers]
        if small_slices(request, tested):
            return 0
        share, curve = walk_delta(request), self.curves[0]
        mask = np.ones(curve.n_settings, bool)
        mask[: 1 if curve.full_model_first else 0] = False
        along: list[tuple[RiskCurve, float]] = []
        exiting: list[tuple[RiskCurve, float]] = []
        for k, each in zip(numbers, tested, strict=True):
            level, ordered = each.promise.epsilon, self.ordered[k]
            if each.curve.statistic.selective:
                exiting.append((ordered, level))
            elif curve.branches is not None:
                along.append((each.curve, level))
            else:
                index = int(self._indices(k, np.asarray([level]), share)[0])
                mask &= np.arange(len(mask)) <= index
        control = self.request.control
        for walk, found in ((control.on_branches, along), (control.among_exits, exiting)):
            if found:
                curves, epsilons = zip(*found, strict=True)
                passed = walk(curves, epsilons, share, self.population)
                mask &= np.isin(np.arange(len(mask)), passed)
        if request.limits:
            if share not in self._costs:
                self._costs[share] = within_costs(request, self.record, len(mask), share)
            mask &= self._costs[share]
        return fastest(curve, mask) or 0


def recalibrate(record: Any, policy: Policy) -> Recalibration:
    """Run a policy's request again on its record; check that it gives the policy.

    Parameters
    ----------
    record : ExitRecord, ThresholdRecord or ShardedRecord
        The samples that the policy was calibrated on, with those of its pilot if it had one.
    policy : Policy

    Raises
    ------
    ValueError
        If calibrating again gives another policy; the message says what differs.
    """
    if isinstance(record, ShardedRecord):
        record = record.load()
    if not isinstance(record, ExitRecord | ThresholdRecord):
        raise TypeError(
            f"`record` must be an ExitRecord or a ThresholdRecord, but got {type(record).__name__}."
        )
    kinds = {True: "a network with exits", False: "a dial of a whole run"}
    has_exits = isinstance(record, ExitRecord)
    if has_exits != (policy.n_exits is not None):
        raise _mismatch("what it is about", kinds[not has_exits], kinds[has_exits], ANOTHER)
    request = policy.calibration
    if request is None:
        raise ValueError(
            "`policy` does not say how it was calibrated, so nothing here can be checked:"
            " calibrate again."
        )
    certificate = policy.certificate
    if isinstance(request.missing, Ask):
        # A report asks nobody: the labels that were asked for are those that the record has.
        request = replace(request, missing=Ask(lambda _: [], budget=0))
    best = certificate.selection
    if best is not None and best.n_pilot is not None:
        record = record.split(best.n_pilot, record.order)[1]
    slice_name: str | None = None
    if any(each.within == "each slice" for each in request.risks):
        slice_name, record, request = _of_one_slice(record, request, policy)
    again = _calibrated(record, request, policy)
    if slice_name is not None:
        again = about_slice(again, slice_name, record.n, request)
    if best is not None:
        k = len(best.candidates) if best.method == "bonferroni" else 1
        again = with_selection(again, best, request.delta * k)
    _compare(policy, again.model_copy(update={"calibration": policy.calibration}))
    if not certificate.by_budget and certificate.samples.horizon is None:
        record, request = prepared(request, record)
    tested = cells(request, record)
    return Recalibration(
        policy, record, request, tuple(tested), tuple(overall(request, record, tested))
    )


def _of_one_slice(
    record: Any, request: Calibration, policy: Policy
) -> tuple[str, Any, Calibration]:
    """Return the slice that a policy is about, its samples, and the request that they run."""
    certificate = policy.certificate
    name = next(iter(certificate.samples.slices or {"": 0}))
    # All slices shared δ, also those whose samples the record does not have.
    shares = round(request.delta / (certificate.delta or request.delta))
    request, parts = slice_by_slice(request, record, shares)
    if name not in parts:
        raise _mismatch("the slice", name, " and ".join(parts), ANOTHER)
    return name, parts[name], request


def _calibrated(record: Any, request: Calibration, policy: Policy) -> Policy:
    """Return the policy that the request makes of the record, as it made this one."""
    certificate = policy.certificate
    if certificate.by_budget:
        n_choice = record.n_units - certificate.samples.n
        if not 0 <= n_choice < record.n_units:
            raise _mismatch(
                "the number behind the bound", certificate.samples.n, record.n_units, EDITED
            )
        chosen = certificate.index
        if chosen is None and certificate.promises[0].upper_bound is None:
            chosen = 0  # the budget allows the full model
        return budget_policy(record, request, chosen, n_choice)
    if certificate.samples.horizon is not None:
        growing = request.start(certificate.samples.horizon)
        growing.update(record)
        return growing.policy()
    return request.run(record)  # type: ignore[return-value]


def _compare(policy: Policy, again: Policy) -> None:
    """Raise if a policy differs from what calibrating again gives; dates do not count."""
    hidden: dict[str, Any] = {"metadata": True}
    ours, theirs = (each.model_dump(mode="json", exclude=hidden) for each in (policy, again))
    different = {where: (one, other) for where, one, other in _differences(ours, theirs)}
    if not different:
        return
    first = next((name for name in (*IDENTITY, *DATA) if name in different), None)
    where = first or next(iter(different))
    remedy = ANOTHER if first is not None else EDITED
    if policy.certificate.samples.horizon is not None:
        remedy += (
            " Bets are made in the order of the updates: a calibration that grew in several of them"
            " cannot be made again from one record."
        )
    if policy.calibration is not None and isinstance(policy.calibration.missing, Ask):
        remedy += (
            " Labels were asked for as the walk went on: give the record with just these labels."
        )
    of_policy, of_record = different[where]
    raise _mismatch(f"`{where}`", of_policy, of_record, remedy)


def _mismatch(what: str, of_policy: object, of_record: object, remedy: str) -> ValueError:
    return ValueError(
        f"`policy` is not what this record gives: {what} is {_short(of_policy)} in the policy, but"
        f" {_short(of_record)} when calibrated again in the same way. {remedy}"
    )


def _differences(ours: Any, theirs: Any, where: str = "") -> list[tuple[str, object, object]]:
    """Return the place of each difference between two nested values, and both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict) and ours.keys() == theirs.keys():
        pairs = [(f"{where}.{key}", ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{where}[{k}]", ours[k], theirs[k]) for k in range(len(ours))]
    elif isinstance(ours, float | int) and isinstance(theirs, float | int):
        same = isclose(ours, theirs, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
        return [] if same else [(where[1:], ours, theirs)]
    else:
        return [] if ours == theirs else [(where[1:], ours, theirs)]
    return [each for place, one, other in pairs for each in _differences(one, other, place)]


def _short(value: object) -> str:
    """Return a value for messages: numbers briefly, and the start of a fingerprint."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.8g}"
    parts = str(value).split()
    long = len("sha256:") + 12
    return " ".join(f"{part[:long]}…" if part.startswith("sha256:") else part for part in parts)
