"""Certification: makes a policy and its certificate from what a control chose."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swiftsure._lib import checks
from swiftsure.certify import bounds
from swiftsure.certify.control import Control, ControlResult
from swiftsure.certify.policy import Certificate, Metadata, Policy, Promise
from swiftsure.curves.costs import price_of
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.risks import Risk
from swiftsure.curves.sample_order import SampleOrder
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord

__all__ = ["counted_costs", "curves_fingerprint", "make_policy", "wanted_risks", "within_costs"]


def make_policy(
    record: ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve,
    rule: Control,
    curves: list[RiskCurve],
    results: list[ControlResult],
    chosen: ControlResult,
    *,
    data: str | None = None,
    score: str | None = None,
    pool: int | None = None,
    upper: float | None = None,
    horizon: int | None = None,
    slices: Mapping[str, int] | None = None,
    max_costs: Mapping[str, float] | None = None,
    cost: str | None = None,
    metadata: Metadata | Mapping[str, str] | None = None,
) -> Policy:
    """Return the policy for a chosen setting.

    `upper` is its upper bound if already computed; `horizon` is that of a calibration that grows;
    `slices` are those that the promise is about, with their numbers of samples; `cost` is the one
    of which the setting must not need more than the full model.
    """
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
            _promise(rule, c, r, chosen.index, pool, upper)
            for c, r in zip(curves, results, strict=True)
        ),
        control=chosen.control,
        options=rule.options(),
        n=chosen.n,
        unit="groups" if curve.grouped else "samples",
        average=curve.average,
        max_group_size=curve.max_group_size,
        n_samples=curve.n_samples or curve.n,
        path=curve.path_kind,
        n_settings=curve.n_path,
        index=chosen.index,
        seed=next((r.seed for r in results if r.seed is not None), None),
        seed_drawn=next((r.seed_drawn for r in results if r.seed_drawn is not None), None),
        pool=pool,
        assumptions=tuple(dict.fromkeys(text for r in results for text in r.assumptions)),
        costs={name: (full[name], here[name]) for name in full},
        baseline="full model" if curve.full_model_first else "first setting",
        labels=max((c.n_labels for c in curves if c.n_labels is not None), default=None),
        stopped_at=None if curve.cut_from is None else curve.n_settings,
        horizon=horizon,
        max_weight=curve.max_weight,
        pilot=curve.n_pilot,
        slices=None if slices is None else dict(slices),
        max_costs={} if max_costs is None else dict(max_costs),
        not_worth=not_worth,
        dearer_costs=dearer,
        cost=cost,
        exit_shares=None if shares is None else tuple(shares.tolist()),
        data=data or curves_fingerprint(curves),
        model=None if isinstance(record, RiskCurve) else record.fingerprint,
    )
    exits = record if isinstance(record, ExitRecord | ShardedRecord) else None
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
        score=score,
        n_exits=None if exits is None else exits.n_exits,
        strict=curve.strict,
        min_exit=curve.min_exit,
        temperatures=None if exits is None else exits.temperatures,
        dtype=None if exits is None else exits.dtype,
        settings=settings,
        dials=tuple(record.dials) or None if isinstance(record, ThresholdRecord) else None,
        certificate=certificate,
        metadata=metadata if isinstance(metadata, Metadata) else Metadata(**dict(metadata or {})),
    )


def counted_costs(curve: RiskCurve, cost: str | None) -> list[str]:
    """Return the costs that a certificate states; the number of models of a cascade is not one."""
    priced = price_of(curve.full_costs) is not None and cost != "exit"
    return [name for name in curve.costs if not (priced and name == "exit")]


def _promise(
    rule: Control,
    curve: RiskCurve,
    result: ControlResult,
    index: int | None,
    pool: int | None,
    upper: float | None,
) -> Promise:
    first_tested = 1 if curve.full_model_first else 0
    if (
        upper is None
        and not curve.selective
        and result.bound is not None
        and result.delta is not None
        and result.tested is not None
        and index is not None
        and index >= first_tested
    ):
        bound, delta = bounds.BOUNDS[result.bound], result.delta
        if rule.correction == "bonferroni":
            delta /= max(1, curve.n_settings - first_tested)
        upper = bound.upper(*result.tested, index, delta, pool or 0)
    # If nothing is certified, the full model runs, and loses nothing against itself.
    full_model = index is None and curve.relative
    return Promise(
        risk=curve.risk_name,
        loss=curve.loss_name,
        epsilon=result.epsilon,
        loss_range=(curve.loss_range.low, curve.loss_range.high),
        bound=result.bound,
        calibration_risk=0.0 if full_model else curve.risk_at(index or 0),
        upper_bound=upper,
        relative=curve.relative,
        above=curve.above,
        worst=curve.worst,
    )


def within_costs(
    chosen: ControlResult,
    curve: RiskCurve,
    max_costs: Mapping[str, float],
    delta: float,
    order: SampleOrder,
) -> ControlResult:
    """Return the chosen setting if its mean costs are certified too, and none otherwise.

    Costs are tested with half of δ, from the fast end of the path to the first failure: the first
    setting there whose mean cost is too high is certified with probability at most δ / 2.
    """
    if curve.branches is not None:
        raise ValueError("`max_costs` does not go with a path that has branches.")
    if chosen.guarantee != "probability" or not max_costs or curve.grouped:
        raise ValueError("`max_costs` needs ucb or ltt, and samples without groups.")
    if curve.cut_from is not None or curve.max_weight is not None:
        raise ValueError("`max_costs` does not go with weights, or with a path cut by labels.")
    rows, one_by_one = curve.rows_in_order(order.seed), curve.storage.arange(curve.n)
    star = bounds.BOUNDS["star"]
    first = curve.n_settings
    levels = {name: _cost_level(curve, name, limit) for name, limit in max_costs.items()}
    tables = {name: curve.cost_curve(name, most) for name, (most, _) in levels.items()}
    while first > 0 and first > (chosen.index or 0):
        passed = all(
            star.passes(tables[name].only(first - 1, rows), one_by_one, level, delta / 2)[0]
            for name, (_, level) in levels.items()
        )
        if not passed:
            break
        first -= 1
    certified = chosen.index is not None and first <= chosen.index
    return replace(
        chosen,
        index=chosen.index if certified else None,
        threshold=chosen.threshold if certified else None,
        delta=delta,
    )


def _cost_level(curve: RiskCurve, name: str, limit: float) -> tuple[float, float]:
    """Return the largest possible cost, and the limit relative to it."""
    values = curve.costs[checks.choice("max_costs", name, curve.costs)]
    if values.ndim != 1:
        raise ValueError(
            f"`max_costs` needs a cost per exit or setting, but {name!r} differs between samples:"
            " its largest possible value is not known."
        )
    most = float(values.max())
    return most, checks.between("max_costs", limit, 0.0, most) / most


def wanted_risks(
    epsilon: float | None,
    risk: str | None,
    loss: str | None,
    risks: Sequence[Risk] | None,
    above: float | None = None,
    worst: float | None = None,
) -> list[Risk]:
    """Return the risks to control, from `risks` or the single arguments; refuse both."""
    if risks is None:
        return [Risk(risk or "gap", loss, epsilon, above, worst)]  # type: ignore[arg-type]
    given = {"epsilon": epsilon, "risk": risk, "loss": loss, "above": above, "worst": worst}
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"`{name}` is each Risk's own where `risks` are given; leave it out.")
    if not risks:
        raise ValueError("`risks` must hold at least one risk.")
    return list(risks)


def curves_fingerprint(curves: list[RiskCurve]) -> str:
    """Return a hash of the losses of several risks."""
    return " ".join(curve.fingerprint() for curve in curves)
