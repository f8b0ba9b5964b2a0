"""Building: makes a policy and its certificate from what a control chose."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from swiftsure.certify import bounds
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.certificate import (
    Certificate,
    Costs,
    PromiseResult,
    Provenance,
    Samples,
)
from swiftsure.certify.control import Control, ControlResult
from swiftsure.certify.policy import Metadata, Policy
from swiftsure.certify.promise import Promise
from swiftsure.curves.costs import price_of
from swiftsure.curves.curve import RiskCurve
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord

__all__ = ["Findings", "counted_costs", "curves_fingerprint", "make_policy"]


@dataclass(frozen=True)
class Findings:
    """What the tests of a calibration found.

    Attributes
    ----------
    curves, results : list
        One for each promise about a risk.
    chosen : ControlResult
        The setting that keeps all of them.
    data : str or None
        Hash of the losses, if already computed.
    upper : float or None
        The upper bound of the risk, if already computed.
    population : int or None
        Size of the finite population that the promise is about.
    horizon : int or None
        That of a calibration that grows.
    slices, small_slices : mapping
        The slices that the promise is about, with their numbers of samples; and those that are too
        small for any promise, with the numbers they need.
    """

    curves: list[RiskCurve]
    results: list[ControlResult]
    chosen: ControlResult
    data: str | None = None
    upper: float | None = None
    population: int | None = None
    horizon: int | None = None
    slices: Mapping[str, int] = field(default_factory=dict)
    small_slices: Mapping[str, int] = field(default_factory=dict)


def make_policy(
    request: Calibration,
    record: ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve,
    found: Findings,
    metadata: Metadata | Mapping[str, str] | None = None,
) -> Policy:
    """Return the policy for what was found on a record."""
    rule, cost = request.control, request.cost
    curves, results, chosen = found.curves, found.results, found.chosen
    curve = curves[0]
    full = {name: curve.full_cost(name) for name in curve.costs}
    here = full
    shares = curve.exit_shares_at(chosen.index or 0) if curve.has_exits else None
    if chosen.index is not None:
        here = {name: curve.mean_cost_at(name, chosen.index, shares) for name in curve.costs}
    deciding = curve.deciding_costs(cost)
    # Only the full model may run instead: a first setting that is another one is not it.
    not_worth = curve.full_model_first and bool(deciding)
    not_worth = not_worth and all(here[name] > full[name] for name in deciding)
    dearer = {name: here[name] for name in deciding} if not_worth else {}
    if not_worth:  # The setting is certified, and so is the full model: either may be chosen.
        chosen, here = replace(chosen, index=None, threshold=None), full
        shares = curve.exit_shares_at(0) if curve.has_exits else None
    full = {name: full[name] for name in counted_costs(curve, cost)}
    certificate = Certificate(
        guarantee=rule.guarantee,
        delta=chosen.delta,
        promises=tuple(
            _promise(rule, *each, chosen.index, found)
            for each in zip(request.risks, curves, results, strict=True)
        ),
        control=chosen.control,
        options=rule.options(),
        path=curve.path_kind,
        n_settings=curve.n_path,
        index=chosen.index,
        conditions=tuple(dict.fromkeys(each for r in results for each in r.conditions)),
        stopped_at=None if curve.cut_from is None else curve.n_settings,
        max_costs=request.limits,
        samples=Samples(
            n=chosen.n,
            unit=curve.units.name,
            average=curve.units.average,
            n_samples=curve.units.n_samples or curve.n,
            max_group_size=curve.units.max_size,
            population=found.population,
            max_weight=curve.units.max_weight,
            slices=dict(found.slices) or None,
            small_slices=dict(found.small_slices) or None,
            labels=max((c.n_labels for c in curves if c.n_labels is not None), default=None),
            pilot=curve.n_pilot,
            horizon=found.horizon,
        ),
        costs=Costs(
            means={name: (full[name], here[name]) for name in full},
            baseline="full model" if curve.full_model_first else "first setting",
            exit_shares=None if shares is None else tuple(shares.tolist()),
            deciding=cost,
            dearer=dearer,
        ),
        provenance=Provenance(
            data=found.data or curves_fingerprint(curves),
            model=None if isinstance(record, RiskCurve) else record.fingerprint,
            seed=next((r.seed for r in results if r.seed is not None), None),
            seed_drawn=next((r.seed_drawn for r in results if r.seed_drawn is not None), None),
        ),
    )
    exits = record if isinstance(record, ExitRecord | ShardedRecord) else None
    known = record.first if isinstance(record, ShardedRecord) else exits
    threshold = chosen.threshold
    settings: dict[str, Any] = {
        "threshold": list(threshold) if isinstance(threshold, tuple) else threshold
    }
    if isinstance(record, ThresholdRecord):
        if threshold is None:
            settings = record.setting(0)
        elif record.dials:  # thresholds number the settings
            settings = record.setting(int(threshold))  # type: ignore[arg-type]
        else:
            settings = {record.dial: threshold}
    settings |= getattr(record, "settings", {})
    return Policy(
        threshold=threshold,
        score=None if known is None else known.score_of(request.rule),
        n_exits=None if exits is None else exits.n_exits,
        strict=curve.rule.strict,
        min_exit=curve.rule.min_exit,
        temperatures=None if exits is None else exits.temperatures,
        dtype=None if exits is None else exits.dtype,
        settings=settings,
        dials=tuple(record.dials) or None if isinstance(record, ThresholdRecord) else None,
        certificate=certificate,
        calibration=request,
        metadata=metadata if isinstance(metadata, Metadata) else Metadata(**dict(metadata or {})),
    )


def counted_costs(curve: RiskCurve, cost: str | None) -> list[str]:
    """Return the costs that a certificate states; the number of models of a cascade is not one."""
    priced = price_of(curve.full_costs) is not None and cost != "exit"
    return [name for name in curve.costs if not (priced and name == "exit")]


def _promise(
    rule: Control,
    asked: Promise,
    curve: RiskCurve,
    result: ControlResult,
    index: int | None,
    found: Findings,
) -> PromiseResult:
    upper = found.upper
    first_tested = 1 if curve.full_model_first else 0
    if (
        upper is None
        and not curve.statistic.selective
        and result.bound is not None
        and result.delta is not None
        and result.tested is not None
        and index is not None
        and index >= first_tested
    ):
        bound, delta = bounds.BOUNDS[result.bound], result.delta
        if rule.correction == "bonferroni":
            delta /= max(1, curve.n_settings - first_tested)
        upper = bound.upper(*result.tested, index, delta, found.population or 0)
    # If nothing is certified, the full model runs, and loses nothing against itself.
    full_model = index is None and curve.statistic.relative
    return PromiseResult(
        risk=curve.statistic.risk,
        loss=curve.statistic.loss,
        epsilon=result.epsilon,
        loss_range=(curve.loss_range.low, curve.loss_range.high),
        bound=result.bound,
        calibration_risk=0.0 if full_model else curve.risk_at(index or 0),
        upper_bound=upper,
        relative=curve.statistic.relative,
        among=asked.among,
        within=asked.within,
        **curve.statistic.measure_values,
    )


def curves_fingerprint(curves: list[RiskCurve]) -> str:
    """Return a hash of the losses of several risks."""
    return " ".join(curve.fingerprint() for curve in curves)
