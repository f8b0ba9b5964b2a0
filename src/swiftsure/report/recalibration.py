"""Rebuild what a policy was calibrated on from its record, and check that the two match."""

from dataclasses import dataclass
from functools import cached_property
from math import isclose
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._version import __version__
from swiftsure.certify import bounds
from swiftsure.certify.certificate import counted_costs, make_policy
from swiftsure.certify.control import Control, ControlResult, joint
from swiftsure.certify.labels import shortest
from swiftsure.certify.policy import BUDGET, Policy
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import BREAKPOINTS, Path, PathLike
from swiftsure.curves.risks import RISKS
from swiftsure.records import ExitRecord, ThresholdRecord

__all__ = ["Recalibration", "recalibrate"]

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

REMEDY = "Give the record that the policy was calibrated on, or calibrate again on this one."
EDITED = "Was the file edited? Calibrate again."

RELATIVE_TOLERANCE = 1e-6
"""Allowed relative difference of numbers, because machines round differently."""
ABSOLUTE_TOLERANCE = 1e-8


@dataclass(frozen=True)
class Recalibration:
    """A policy, its calibration record, and a curve and a control for each of its promises."""

    record: ExitRecord | ThresholdRecord
    policy: Policy
    curves: tuple[RiskCurve, ...]
    rules: tuple[Control, ...]

    @property
    def rows(self) -> Indices:
        """The samples behind the bounds; with a budget, earlier samples chose the setting."""
        n = self.curves[0].n
        return np.arange(n - self.policy.certificate.n, n)

    @property
    def delta(self) -> float:
        """The failure probability; controls without one ignore it."""
        return self.policy.certificate.delta or 0.5

    @cached_property
    def tested(self) -> tuple[RiskCurve, ...]:
        """The curves as the controls saw them: the same losses in the same order."""
        seed = self.policy.certificate.seed
        pairs = zip(self.rules, self.curves, strict=True)
        prepared = (rule.prepare(curve) for rule, curve in pairs)
        return tuple(curve if seed is None else curve.shuffled(seed) for curve in prepared)

    def choices(
        self,
        promise: int,
        epsilons: Floats,
        delta: float | None = None,
        rows: Indices | None = None,
    ) -> Indices:
        """Return the setting that one promise alone allows at each level; 0 is the full model."""
        indices = self.rules[promise].indices(
            self.tested[promise],
            epsilons,
            self.delta if delta is None else delta,
            rows,
            pool=self.policy.certificate.pool,
        )
        return np.maximum(indices, 0)

    def choice(self, delta: float | None = None, rows: Indices | None = None) -> int:
        """Return the setting that all promises allow at their levels: the safest of theirs."""
        levels = [np.asarray([promise.epsilon]) for promise in self.policy.certificate.promises]
        return min(int(self.choices(i, e, delta, rows)[0]) for i, e in enumerate(levels))

    @property
    def index(self) -> int:
        """The policy's setting along the path; 0, the full model, if nothing was certified."""
        return self.policy.certificate.index or 0

    @property
    def slow(self) -> bool:
        """Whether a choice is slow: betting on every setting, without stopping early."""
        return any(
            rule.correction == "bonferroni"
            and bounds.resolve(
                rule.bound, curve.loss_range, curve.n, self.policy.certificate.pool
            ).uses_order
            for rule, curve in zip(self.rules, self.tested, strict=True)
        )


def recalibrate(
    record: ExitRecord | ThresholdRecord, policy: Policy, path: PathLike = None
) -> Recalibration:
    """Rebuild the calibration behind a policy from its record; check that it gives the policy.

    Parameters
    ----------
    record : ExitRecord or ThresholdRecord
        The calibration samples.
    policy : Policy
    path : as in `calibrate`
        Needed only if the policy was calibrated along thresholds of your own, which its file does
        not hold.

    Raises
    ------
    ValueError
        If record and policy do not belong together, or recalibrating gives another promise; the
        message says what differs.
    """
    if not isinstance(record, ExitRecord | ThresholdRecord):
        raise TypeError(
            f"`record` must be an ExitRecord or a ThresholdRecord, but got {type(record).__name__}."
        )
    promised = policy.certificate
    for what, given in {
        "a calibration that grows": promised.horizon,
        "weighted samples": promised.max_weight,
        "slices": promised.slices,
        "tails": next((p for p in promised.promises if p.above is not None), None),
        "the samples that exit": next((p for p in promised.promises if p.selective), None),
        "a limit of a cost": promised.max_costs or None,
        "the best of several candidates": promised.selection,
        "several dials": policy.dials,
    }.items():
        if given is not None:
            raise ValueError(
                f"`policy` promises something about {what}, which reports do not show."
            )
    _check_system(record, policy)
    _check_losses(record, policy)
    certificate = policy.certificate
    route = _path(record, policy, path)
    curves = tuple(
        shortest([_curve(record, policy, p.risk, p.loss, route) for p in certificate.promises])
    )
    _check_data(policy, curves)
    _check_costs(policy, curves[0])
    name = "ucb" if certificate.by_budget else certificate.control
    rules = tuple(
        Control(name, promise.bound or "auto", **certificate.options)
        for promise in certificate.promises
    )
    calibration = Recalibration(record, policy, curves, rules)
    _check_promise(calibration)
    return calibration


def _mismatch(what: str, of_policy: object, of_record: object, remedy: str = REMEDY) -> ValueError:
    return ValueError(
        f"`record` and `policy` do not belong together: {what} is {of_policy} in the policy, but"
        f" {of_record} in the record. {remedy}"
    )


def _check_system(record: ExitRecord | ThresholdRecord, policy: Policy) -> None:
    """Raise if record and policy are about different models."""
    kinds = {True: "a network with exits", False: "a dial of a whole run"}
    has_exits = isinstance(record, ExitRecord)
    if has_exits != (policy.n_exits is not None):
        raise _mismatch("what it is about", kinds[not has_exits], kinds[has_exits])
    if isinstance(record, ExitRecord):
        if policy.score not in record.confidences:
            raise _mismatch("the score", policy.score, " or ".join(record.confidences))
        names = {"n_exits": "the number of exits"}
        for name in ("n_exits", "temperatures", "dtype"):
            if getattr(policy, name) != getattr(record, name):
                what = names.get(name, f"`{name}`")
                raise _mismatch(what, getattr(policy, name), getattr(record, name))
    elif record.dial not in policy.settings:
        raise _mismatch("the dial", " or ".join(policy.settings), record.dial)
    model = policy.certificate.model
    if model != record.fingerprint:
        raise _mismatch("the model's fingerprint", _short(model), _short(record.fingerprint))


def _check_losses(record: ExitRecord | ThresholdRecord, policy: Policy) -> None:
    for promise in policy.certificate.promises:
        tables = getattr(record, RISKS.choose(promise.risk).table)
        if promise.loss not in tables:
            in_policy = " or ".join(tables) or "not there"
            raise _mismatch(f"the loss of the {promise.risk} risk", promise.loss, in_policy)
    n_samples = policy.certificate.n_samples
    if record.n != n_samples:
        remedy = REMEDY
        if n_samples < record.n:
            remedy += " A policy made with `split` cannot be shown: use the figure of `calibrate`."
        raise _mismatch("the number of samples", f"{n_samples:,}", f"{record.n:,}", remedy)
    grouped = policy.certificate.unit == "groups"
    if grouped != (record.groups is not None):
        words = {True: "in groups", False: "one by one"}
        raise _mismatch("how samples count", words[grouped], words[not grouped])


def _path(record: ExitRecord | ThresholdRecord, policy: Policy, given: PathLike) -> PathLike:
    """Return the path that the policy was calibrated along."""
    certificate = policy.certificate
    if isinstance(record, ThresholdRecord) or given is not None:
        return given
    if certificate.path == BREAKPOINTS:
        return "breakpoints"
    default = Path.logit_grid()
    if (certificate.path, certificate.n_settings) == (default.kind, len(default)):
        return default
    raise ValueError(
        f"`path` must be given: the policy was calibrated along a {certificate.path} of"
        f" {certificate.n_settings:,} settings, which its file does not hold."
    )


def _curve(
    record: ExitRecord | ThresholdRecord, policy: Policy, risk: str, loss: str, path: PathLike
) -> RiskCurve:
    counted: dict[str, Any] = {
        "average": policy.certificate.average,
        "max_group_size": policy.certificate.max_group_size,
    }
    if isinstance(record, ThresholdRecord):
        return record.curve(risk, loss, path=path, **counted)
    return record.curve(
        risk,
        loss,
        policy.score,
        path,
        **counted,
        # "worst" is the same curve as "raise" wherever that does not raise.
        missing="worst" if policy.certificate.stopped_at is None else "stop",
        strict=policy.strict,
        min_exit=policy.min_exit,
    )


def _check_data(policy: Policy, curves: tuple[RiskCurve, ...]) -> None:
    certificate = policy.certificate
    if curves[0].n_path != certificate.n_settings:
        raise _mismatch(
            "the number of settings", f"{certificate.n_settings:,}", f"{curves[0].n_path:,}"
        )
    data = " ".join(curve.fingerprint() for curve in curves)
    if data != certificate.data:
        which = "the fingerprint of the calibration data"
        raise _mismatch(which, _short(certificate.data), _short(data))
    index = certificate.index
    if policy.threshold != (None if index is None else curves[0].threshold_at(index)):
        raise ValueError(
            "`policy` contradicts itself: its threshold is not the one that its certificate speaks"
            f" of. {EDITED}"
        )


def _check_costs(policy: Policy, curve: RiskCurve) -> None:
    costs = policy.certificate.costs
    counted = counted_costs(curve, policy.certificate.cost)
    if costs.keys() != set(counted):
        names = (" and ".join(each) or "none" for each in (costs, counted))
        raise _mismatch("what is counted as costs", *names)
    for name, in_policy in costs.items():
        full, index = curve.full_cost(name), policy.certificate.index
        seen = full, full if index is None else float(curve.mean_cost(name)[index])
        if not all(
            isclose(*pair, rel_tol=RELATIVE_TOLERANCE) for pair in zip(in_policy, seen, strict=True)
        ):
            what = f"the mean {name} cost of the full model and of the policy's setting"
            raise _mismatch(
                what, *(f"{full:.8g} and {here:.8g}" for full, here in (in_policy, seen))
            )


def _check_promise(calibration: Recalibration) -> None:
    """Raise if recalibrating gives a policy that differs in any field."""
    policy = calibration.policy
    again = _recomputed_budget if policy.certificate.by_budget else _recalibrated_policy
    ignored = {"seed_drawn"}  # cannot be recomputed
    if policy.certificate.by_budget or policy.metadata.swiftsure != __version__:
        ignored.add("assumptions")  # not computed here; worded differently by other versions
    in_policy, seen = (
        each.model_dump(mode="json", exclude={"certificate": ignored})
        for each in (policy, again(calibration))
    )
    found = _difference(in_policy, seen)
    if found is not None:
        where, of_policy, of_record = found
        raise ValueError(
            f"`policy` is not what this record gives: `{where}` is {of_policy} in the policy, but"
            f" {of_record} when calibrated again in the same way. Was the file edited? Calibrate"
            " again, or plan again if it was made for a budget."
        )


def _recalibrated_policy(calibration: Recalibration) -> Policy:
    """Return the result of `calibrate` at the policy's levels."""
    policy, certificate = calibration.policy, calibration.policy.certificate
    curves = list(calibration.curves)
    results = [
        rule.run(curve, promise.epsilon, calibration.delta, certificate.seed, certificate.pool)
        for rule, curve, promise in zip(
            calibration.rules, curves, certificate.promises, strict=True
        )
    ]
    rule = calibration.rules[0]
    if any(each != rule for each in calibration.rules):  # "auto" gave different bounds
        rule = Control(rule.name, **certificate.options)
    chosen = joint(rule, curves, results)
    return make_policy(
        calibration.record,
        rule,
        curves,
        results,
        chosen,
        score=policy.score,
        pool=certificate.pool,
        cost=certificate.cost,
    )


def _recomputed_budget(calibration: Recalibration) -> Policy:
    """Return the result of `lowest_epsilon` for the setting that the policy's budget chose."""
    policy, certificate = calibration.policy, calibration.policy.certificate
    rule, curve = calibration.rules[0], calibration.tested[0]
    most = curve.n - 1 if curve.has_exits else curve.n  # exits need separate samples for costs
    if not 1 <= certificate.n <= most:
        raise _mismatch("the number behind the bound", f"{certificate.n:,}", f"at most {most:,}")
    bound = bounds.resolve(rule.bound, curve.loss_range, certificate.n)
    if calibration.index:
        level = bound.upper(curve, calibration.rows, calibration.index, calibration.delta, 0)
    else:  # the budget allows the full model, or no level below the largest loss was certified
        level = 0.0 if certificate.promises[0].upper_bound is None else curve.loss_range.high
    result = ControlResult(
        index=certificate.index,
        threshold=policy.threshold,
        guarantee=rule.guarantee,
        epsilon=level,
        delta=calibration.delta,
        control=BUDGET,
        bound=bound.name,
        n=certificate.n,
        seed=certificate.seed,
    )
    return make_policy(
        calibration.record,
        rule,
        [calibration.curves[0]],
        [result],
        result,
        score=policy.score,
        upper=level if calibration.index or level else None,
    )


def _difference(in_policy: Any, seen: Any, where: str = "") -> tuple[str, object, object] | None:
    """Return the path of the first difference between two nested values, and both values."""
    if isinstance(in_policy, dict) and isinstance(seen, dict) and in_policy.keys() == seen.keys():
        pairs = [(f"{where}.{key}", in_policy[key], seen[key]) for key in in_policy]
    elif isinstance(in_policy, list) and isinstance(seen, list) and len(in_policy) == len(seen):
        pairs = [(f"{where}[{k}]", in_policy[k], seen[k]) for k in range(len(in_policy))]
    elif isinstance(in_policy, float) and isinstance(seen, float):
        same = isclose(in_policy, seen, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
        return None if same else (where[1:], f"{in_policy:.8g}", f"{seen:.8g}")
    else:
        return None if in_policy == seen else (where[1:], in_policy, seen)
    differences = (_difference(of_held, of_seen, place) for place, of_held, of_seen in pairs)
    return next((each for each in differences if each is not None), None)


def _short(fingerprint: str | None) -> str:
    """Return the start of a fingerprint, for messages."""
    if fingerprint is None:
        return "none"
    return " ".join(part[: len("sha256:") + 12] + "…" for part in fingerprint.split())
