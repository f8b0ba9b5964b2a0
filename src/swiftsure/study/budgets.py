"""Compute budgets: the lowest ε that can be certified within a mean cost."""

from dataclasses import dataclass, replace
from math import floor

import numpy as np

from swiftsure._lib import checks
from swiftsure.certify import bounds
from swiftsure.certify.building import Findings, make_policy
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.certificate import BUDGET
from swiftsure.certify.control import ControlResult
from swiftsure.certify.policy import Policy
from swiftsure.certify.promise import Promise
from swiftsure.certify.wording import percent
from swiftsure.curves.conditions import Condition, replaced
from swiftsure.curves.curve import RiskCurve
from swiftsure.curves.paths import BREAKPOINTS, PathLike
from swiftsure.exits import ExitRule
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.study.pools import cost_name, pool_curve

__all__ = ["Budget", "BudgetPlan", "budget_policy", "lowest_epsilon"]

Record = ExitRecord | ThresholdRecord | ShardedRecord | RiskCurve

ANY = 0.5
"""The level of the request until one is found; nothing is tested at it."""


@dataclass(frozen=True)
class Budget:
    """How much a setting may cost, for `lowest_epsilon`.

    Parameters
    ----------
    at_most : float, optional
        Largest mean cost, in the unit of `cost`.
    saving : float, optional
        Instead: the smallest fraction of the full model's cost to save, in (0, 1).
    cost : str, optional
        Which cost; by default the one that `policy.evaluate` reports.
    choice : float
        Fraction of the samples, or groups, used to choose the setting.
    """

    at_most: float | None = None
    saving: float | None = None
    cost: str | None = None
    choice: float = 0.25

    def __post_init__(self) -> None:
        """Raise unless there is one limit."""
        if (self.at_most is None) == (self.saving is None):
            raise ValueError("`budget` or `saving` must be given, and not both.")
        if self.at_most is not None:
            checks.between("budget", self.at_most, 0.0, np.inf)
        if self.saving is not None:
            checks.between("saving", self.saving, 0.0, 1.0)
        checks.between("choice", self.choice, 0.0, 1.0)


@dataclass(frozen=True)
class BudgetPlan:
    """The lowest ε that can be certified within a compute budget.

    Attributes
    ----------
    epsilon : float or None
        The level; None if none below the largest loss is certified.
    threshold
        The setting that meets the budget; None for the full model.
    cost, full_cost : float
        Mean cost at that setting and of the full model, on the samples not used to choose it.
    policy : Policy
        Ready to run, with `epsilon` in its certificate.
    """

    epsilon: float | None
    threshold: float | tuple[float | None, ...] | None
    budget: float
    cost: float
    full_cost: float
    n_choice: int
    n_bound: int
    policy: Policy


def lowest_epsilon(
    record: Record,
    budget: float | Budget | None = None,
    risk: str | None = None,
    loss: str | None = None,
    *,
    saving: float | None = None,
    delta: float = 0.1,
    bound: str = "auto",
    path: PathLike = None,
    rule: ExitRule | None = None,
) -> BudgetPlan:
    """Return the lowest ε that can be certified within a compute budget.

    The setting is the safest one whose mean cost on a random part of the record meets the budget;
    ε is the upper bound of its risk on the rest. If the cost of each setting is known beforehand,
    no part is needed for the choice.

    **Guarantee**: P(risk of the setting ≤ ε) ≥ 1 − δ over the draw of the record, for the ε that is
    returned. Choosing the setting and bounding its risk on the same samples would void it. The
    budget holds for the mean cost as estimated; `cost` is an unbiased estimate.

    Parameters
    ----------
    record : record or RiskCurve
        Its order fixes which samples choose the setting, and the order of the others for betting
        bounds.
    budget : float or Budget
        Largest mean cost; a Budget also says of which cost.
    saving : float
        Instead of `budget`: the smallest fraction of the full model's cost to save, in (0, 1).
    risk, loss, delta, bound, path, rule
        As in `Calibration`.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> sample = Population().sample(4000, seed=0)
    >>> record = ExitRecord.from_logits(sample.logits, sample.labels)
    >>> plan = lowest_epsilon(record, saving=0.5, loss="zero_one")
    >>> plan.epsilon < 0.01
    True
    """
    if isinstance(budget, Budget) and saving is not None:
        raise ValueError("`budget` or `saving` must be given, and not both.")
    if not isinstance(budget, Budget):
        budget = Budget(budget, saving)
    request = Calibration(
        Promise(loss, epsilon=ANY, risk=risk or "gap"),  # type: ignore[arg-type]
        delta=delta,
        bound=bound,
        path=path,  # type: ignore[arg-type]
        rule=rule or ExitRule(),
        cost=budget.cost,
    )
    curve = pool_curve(record, request)
    if not curve.statistic.relative:
        raise ValueError("`lowest_epsilon` needs losses relative to the full model.")
    if curve.statistic.selective:
        raise ValueError("`lowest_epsilon` does not know the risk of the samples that exit.")
    if curve.branches is not None:
        raise ValueError("`lowest_epsilon` needs a path without branches.")
    if curve.path_kind == BREAKPOINTS and curve.rule.strict:
        raise ValueError(
            "`path` must not be the breakpoints where exits are strict: the samples that bound the"
            " risk would then choose the setting too. Give a grid of thresholds."
        )
    name = cost_name(curve, budget.cost)
    unit = curve.units.name
    order = curve.order
    ordered = curve.shuffled(order.seed)
    known = not curve.has_exits and curve.costs[name].ndim == 1
    size = 0 if known else max(1, round(budget.choice * curve.n))
    if size >= curve.n:
        raise ValueError(f"`record` must hold more than {size} {unit} for this `choice`.")
    part, rest = np.split(np.arange(curve.n), [size])
    mean_cost = curve.mean_cost(name) if known else ordered.mean_cost(name, part)
    full = ordered.full_cost(name, None if known else part)
    limit = full * (1 - (budget.saving or 0.0)) if budget.at_most is None else budget.at_most
    affordable = np.flatnonzero(mean_cost <= limit)
    if not affordable.size:
        fastest = float(mean_cost.min())
        if budget.saving is not None:
            most = floor(1000 * (1 - fastest / full) + 1e-6) / 1000
            raise ValueError(
                f"`saving` must be at most {most:g}, since the fastest setting saves"
                f" {percent(most)} of {'exits' if name == 'exit' else name}, but got"
                f" {budget.saving:g}."
            )
        raise ValueError(
            f"`budget` must be at least {fastest:g}, the cost of the fastest setting, but got"
            f" {limit:g}."
        )
    index = int(affordable[0])
    policy = budget_policy(record, request, index, size)
    level = policy.certificate.promises[0].epsilon
    outcome = ordered.mean_cost(name, rest)
    return BudgetPlan(
        epsilon=level if level < curve.loss_range.high else None,
        threshold=policy.threshold,
        budget=limit,
        cost=float(outcome[index]),
        full_cost=ordered.full_cost(name, rest),
        n_choice=size,
        n_bound=len(rest),
        policy=policy,
    )


def budget_policy(record: Record, request: Calibration, index: int | None, n_choice: int) -> Policy:
    """Return the policy of a setting that a compute budget chose; its level bounds the risk there.

    Parameters
    ----------
    index : int or None
        The setting; None if no level below the largest loss is certified.
    n_choice : int
        How many samples, or groups, chose it; the others bound its risk.
    """
    curve, control = pool_curve(record, request), request.control
    order, high = curve.order, curve.loss_range.high
    prepared = control.prepare(curve.shuffled(order.seed))
    rest = np.arange(n_choice, curve.n)
    bound = bounds.resolve(request.bound, prepared.loss_range, len(rest))
    tested = index is None or index > 0 or not curve.full_model_first
    level = high if index is None else 0.0
    if tested and index is not None:
        level = bound.upper(prepared, rest, index, request.delta, 0)
    certified = tested and level < high
    used = order if n_choice or bound.uses_order else None
    unit = curve.units.name
    chosen = Condition.of(
        "chosen by budget", cost=cost_name(curve, request.cost), n=n_choice, unit=unit
    )
    conditions = (chosen, *control.conditions(curve, bound, order=used))
    conditions = replaced(conditions, Condition.of("fixed beforehand", what="budget"))
    result = ControlResult(
        index=index if certified else None,
        threshold=curve.threshold_at(index) if certified and index is not None else None,
        guarantee="probability",
        epsilon=level,
        delta=request.delta,
        control=BUDGET,
        bound=bound.name,
        n=len(rest),
        seed=None if used is None else used.seed,
        seed_drawn=None if used is None else used.drawn,
        conditions=conditions,
    )
    promised = replace(request.risks[0], epsilon=level)
    found = Findings([curve], [result], result, upper=level if tested else None)
    return make_policy(replace(request, promises=(promised,)), record, found)
