"""How many unlabelled samples to take for a budget of labels."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.certify.calibration import Calibration
from swiftsure.certify.labels import LabelBudget
from swiftsure.certify.promise import Promise
from swiftsure.records import ExitRecord
from swiftsure.study.pools import as_request, pool_curve

__all__ = ["PoolPlan", "unlabelled_pool"]

SIZES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)
"""Pools to compare, in multiples of the budget."""

FULL_RIGHT, EXIT_RIGHT = 0.5, 0.25
"""How often the full model, or the exit, is right where they disagree, if a pilot has no labels.

On five networks, at levels of .005 to .05, they were right in 31 to 65 % and 16 to 36 % of these
cases; otherwise both are wrong.
"""

CLOSE = 0.5
"""Savings that differ by less than this, in per cent, count as equal; the smaller pool is taken."""


@dataclass(frozen=True)
class PoolPlan:
    """Estimated savings for pools of several sizes with one budget of labels.

    Attributes
    ----------
    n : int
        How many unlabelled samples to take.
    sizes : (m,)
        The pools that were compared.
    gain : (m,)
        Mean percentage saved.
    certified : (m,)
        Fraction of calibration sets that certify any setting.
    labelled_pilot : bool
        Whether the pilot had labels; otherwise it is assumed how often each answer is right.
    """

    n: int
    sizes: NDArray[np.int64]
    gain: NDArray[np.float64]
    certified: NDArray[np.float64]
    budget: int
    epsilon: float
    delta: float
    labelled_pilot: bool

    def __index__(self) -> int:
        """Return `n`, so that the plan can be used as a number of samples."""
        return self.n


def unlabelled_pool(
    budget: int,
    request: Promise | Calibration,
    pilot: ExitRecord,
    *,
    sizes: tuple[int, ...] | None = None,
    draws: int = 200,
    seed: int = 0,
) -> PoolPlan:
    """Return how many unlabelled samples to take, to spend a budget of labels well.

    With few samples the test has little power; with many, the budget is spent at settings that are
    safer than necessary. This is an estimate, by resampling a pilot with replacement, and not a
    guarantee. The number of calibration samples must not depend on their labels: take it from this
    plan, or fix it beforehand, and calibrate on samples that are not in the pilot.

    Parameters
    ----------
    budget : int
        Number of labels.
    request : Promise or Calibration
        What is to be promised, of one loss whose gap is 0 where answers agree ("zero_one" by
        default); a request also says δ, control, path, exit rule and the cost to save.
    pilot : ExitRecord
        Other samples. Labels may be missing: it is then assumed that where an exit and the full
        model disagree, the full model is right in half of the cases and the exit in a quarter.
    sizes : tuple of int, optional
        Pools to compare; by default 1 to 24 times the budget.

    Examples
    --------
    >>> from swiftsure.study.simulate import Population
    >>> pilot = ExitRecord.from_logits(Population().sample(500, seed=0).logits)
    >>> promise = Promise("zero_one", epsilon=0.05)
    >>> plan = unlabelled_pool(50, promise, pilot, sizes=(50, 200), draws=20)
    >>> plan.n
    200
    """
    if not isinstance(pilot, ExitRecord):
        raise TypeError(f"`pilot` must be an ExitRecord, but got {type(pilot).__name__}.")
    checks.count("budget", budget)
    checks.count("draws", draws)
    compared = sizes if sizes is not None else tuple(round(budget * each) for each in SIZES)
    if not compared:
        raise ValueError("`sizes` must not be empty.")
    request = as_request(request)
    promise, rule = request.risks[0], request.control
    loss = promise.loss or "zero_one"
    labelled = loss in pilot.losses and not np.isnan(pilot.losses[loss]).any()
    rng = np.random.default_rng(seed)
    known = pilot if labelled else _with_assumed_labels(pilot, loss, rng)
    request = replace(request, promises=(replace(promise, loss=loss),), missing="raise")
    curve = pool_curve(known, request)
    if curve.statistic.selective:
        raise ValueError(
            "`among='exits'` has several walks, each of which may lack a label elsewhere: plan the"
            " number of samples with `request.plan`."
        )
    level = np.asarray([checks.between("epsilon", promise.epsilon, 0.0, curve.loss_range.high)])
    name = str(curve.default_cost(request.cost))  # a record of exits has at least their numbers
    spent = LabelBudget.of(known, curve, budget, request.rule)
    saved = 100 * (1 - curve.mean_cost(name) / curve.full_cost(name))
    gains = np.zeros((len(compared), draws))
    certified = np.zeros((len(compared), draws), bool)
    for i, size in enumerate(compared):
        for j in range(draws):
            rows = rng.integers(0, curve.n, checks.count("sizes", size))
            index = int(spent.indices("", rule, curve, level, request.delta, rows)[0])
            gains[i, j] = saved[max(index, 0)]
            certified[i, j] = index > 0
    gain = gains.mean(axis=1)
    order = np.argsort(compared, kind="stable")
    best = next(int(i) for i in order if gain[i] >= gain.max() - CLOSE)
    return PoolPlan(
        n=int(compared[best]),
        sizes=np.asarray(compared),
        gain=gain,
        certified=certified.mean(axis=1),
        budget=int(budget),
        epsilon=float(level[0]),
        delta=request.delta,
        labelled_pilot=labelled,
    )


def _with_assumed_labels(pilot: ExitRecord, loss: str, rng: np.random.Generator) -> ExitRecord:
    """Return the pilot with losses drawn as if the full model, the exit or neither were right."""
    checks.choice("loss", loss, pilot.inconsistencies)
    apart = pilot.inconsistencies[loss]
    fate = rng.random((pilot.n, 1))
    full_right, both_wrong = fate < FULL_RIGHT, fate >= FULL_RIGHT + EXIT_RIGHT
    exit_losses = np.where(full_right, apart, apart.max(axis=1, keepdims=True) - apart)
    losses = np.where(both_wrong, apart.max(axis=1, keepdims=True), exit_losses)
    return replace(pilot, losses={loss: losses})
