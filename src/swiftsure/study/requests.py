"""Requests on repeated samples: what a `Calibration` gives, how often it fails, how much it needs.

Each split, or draw, runs the request as it is, so whatever can be promised can be studied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.progress import steps
from swiftsure.certify.calibration import Ask, Calibration
from swiftsure.certify.policy import Policy, PolicyEvaluation
from swiftsure.certify.promise import CostPromise, Promise
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.curves.costs import default_cost
from swiftsure.curves.pilots import PilotPath
from swiftsure.records import ExitRecord, ShardedRecord, ThresholdRecord
from swiftsure.study.evaluation import LARGEST_POOL, calibration_size
from swiftsure.study.pools import without_pilot
from swiftsure.study.results import ROUNDING, Rates

__all__ = ["RequestPlan", "RequestStudy", "evaluate_request", "plan_request"]

Floats = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RequestStudy:
    """Results of `Calibration.evaluate`: arrays with axes (splits, promises).

    Attributes
    ----------
    request : Calibration
    n_calibration, n_pool : int
        Samples, or groups, in each calibration set and in the pool.
    unit : str
        "samples" or "groups".
    test_risk : (splits, promises)
        What is promised, on the test part: a risk or a mean cost, or the largest of the slices'.
    test_exceedance : (splits, promises)
        Whether it is above its limit. This is not the violation rate: it includes the test part's
        noise.
    pool_risk : (draws, promises)
        Its true value (the pool's) for the policy made on each set drawn with replacement. For
        samples `drawn_from` a finite population, each set is drawn without replacement from such a
        population, which is drawn from the pool with replacement, and the value is its own.
    violated : (draws, promises)
        Whether something was certified there and its true value is above the limit.
    savings : mapping of costs to (splits,)
        Share of the full model's cost that is saved on the test part.
    certified : (splits,)
        Whether anything faster than the full model was certified.
    """

    request: Calibration
    n_calibration: int
    n_pool: int
    unit: str
    test_risk: Floats = field(repr=False)
    test_exceedance: NDArray[np.bool_] = field(repr=False)
    pool_risk: Floats = field(repr=False)
    violated: NDArray[np.bool_] = field(repr=False)
    savings: dict[str, Floats] = field(repr=False)
    certified: NDArray[np.bool_] = field(repr=False)

    @property
    def violations(self) -> Rates:
        """How often each promise is violated, (promises,)."""
        return Rates.of(self.violated.sum(axis=0), max(len(self.violated), 1))

    @property
    def any_violation(self) -> Rates:
        """How often any promise is: at most δ, for promises with a probability."""
        return Rates.of(np.asarray(self.violated.any(axis=1).sum()), max(len(self.violated), 1))

    def summary(self) -> list[dict[str, Any]]:
        """Return one row per promise: mean risk on the test part, rates and their intervals."""
        rows = []
        for j, promise in enumerate(self.request.promises):
            exceeds = Rates.of(self.test_exceedance[:, j].sum(), len(self.test_exceedance))
            rows.append(
                {
                    "promise": str(promise),
                    "limit": _limit(promise),
                    "test_risk": float(self.test_risk[:, j].mean()),
                    "test_risk_sd": float(self.test_risk[:, j].std()),
                    "test_exceedance": float(exceeds),
                    "violations": float(self.violations[j]),
                    "violations_low": float(self.violations[j].low),
                    "violations_high": float(self.violations[j].high),
                    "certified": float(self.certified.mean()),
                    **{f"saved {k}": float(each.mean()) for k, each in self.savings.items()},
                }
            )
        return rows

    def __str__(self) -> str:
        """Return a summary in words."""
        saved = ", ".join(f"{100 * v.mean():.1f} % of {k}" for k, v in self.savings.items())
        lines = [
            f"{len(self.test_risk)} splits of {self.n_pool:,} {self.unit}, n ="
            f" {self.n_calibration:,}: {100 * self.certified.mean():.0f} % certified;"
            f" saved {saved}."
        ]
        lines += [
            f"{row['promise']}: {row['test_risk']:.4g} on average on the test part; violated in"
            f" {100 * row['violations']:.1f} % of draws."
            for row in self.summary()
        ]
        return "\n".join(lines)


def evaluate_request(
    request: Calibration,
    record: Any,
    *,
    n_calibration: int | float = 100,
    splits: int = 100,
    draws: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> RequestStudy:
    """Run a request on repeated splits of a record, and on sets drawn with replacement.

    With groups, whole groups are split and drawn. Labels must be known where they matter, except
    for `missing="stop"` and `"worst"`. A pilot of `Path.learn` is a part of each calibration set.
    """
    record, request = without_pilot(_in_memory(record, seed), request)
    sampler = _Sampler.of(request, record)
    n = calibration_size(n_calibration, sampler.n)
    checks.count("splits", splits)
    draws = splits if draws is None else checks.count("draws", draws, 0)
    rng = np.random.default_rng(seed)
    found: list[_Outcome] = []
    true: list[_Outcome] = []
    with steps("evaluating", splits + draws, progress) as advance:
        for _ in range(splits):
            order = rng.permutation(sampler.n)
            policy = request.run(sampler.take(order[:n]))
            found.append(_Outcome.of(policy, sampler.take(order[n:])))
            advance()
        for _ in range(draws):
            drawn, pool = sampler.draw(n, rng)
            true.append(_Outcome.of(request.run(drawn), pool))
            advance()
    limits = np.asarray([_limit(each) for each in request.promises]) + ROUNDING
    values = np.asarray([each.values for each in found])
    pool_values = np.asarray([each.values for each in true]).reshape(draws, len(limits))
    certified = np.asarray([each.certified for each in true], bool)
    return RequestStudy(
        request=request,
        n_calibration=n,
        n_pool=sampler.n,
        unit=sampler.record.unit,
        test_risk=values,
        test_exceedance=values > limits,
        pool_risk=pool_values,
        violated=(pool_values > limits) & certified[:, None],
        savings={
            name: np.asarray([each.savings.get(name, 0.0) for each in found])
            for name in found[0].savings
        },
        certified=np.asarray([each.certified for each in found]),
    )


def _in_memory(record: Any, seed: int) -> Any:
    """Return a record, or a sample of one on a disk."""
    return record.sample(LARGEST_POOL, seed) if isinstance(record, ShardedRecord) else record


def _limit(promise: Promise | CostPromise) -> float:
    return promise.epsilon if isinstance(promise, Promise) else promise.at_most


class _Sampler:
    """Takes samples, or whole groups, of a record by their number, with repetitions."""

    def __init__(self, record: Any) -> None:
        self.record = record
        self.codes: Rows | None = None
        self.n = record.n
        if record.groups is not None:
            names, self.codes = np.unique(record.groups, return_inverse=True)
            self.n = len(names)
            order = np.argsort(self.codes, kind="stable")
            self._members = np.split(order, np.cumsum(np.bincount(self.codes))[:-1])

    @classmethod
    def of(cls, request: Calibration, record: Any) -> "_Sampler":
        """Return the sampler of a record, for a request that can be run many times."""
        if isinstance(request.missing, Ask):
            raise ValueError(
                "`missing=Ask(...)` would ask again in each split; use missing='stop', or"
                " `swiftsure.evaluate`, which compares budgets of labels."
            )
        if not isinstance(record, ExitRecord | ThresholdRecord):
            raise TypeError(
                "`record` must be an ExitRecord or a ThresholdRecord, whose samples can be drawn"
                f" again, but got {type(record).__name__}; `swiftsure.evaluate` takes a RiskCurve."
            )
        return cls(record)

    def draw(self, n: int, rng: np.random.Generator) -> tuple[Any, Any]:
        """Return n units drawn as the record's were, and the record of which they are draws."""
        population = self.record.sampling.population
        if population is None:
            return self.take(rng.integers(0, self.n, n)), self.record
        units = rng.integers(0, self.n, population)  # its first n are drawn without replacement
        return self.take(units[: checks.count("n_calibration", n)]), self.take(units)

    def take(self, units: Rows) -> Any:
        """Return a record of these units; each repetition is a sample, or group, of its own."""
        if self.codes is None:
            return self.record.resampled(units)
        members = [self._members[k] for k in units]
        groups = np.repeat(np.arange(len(units)), [len(each) for each in members])
        return self.record.resampled(np.concatenate(members), groups)


@dataclass(frozen=True)
class _Outcome:
    """What a policy does on other samples: its value of each promise, and what it saves."""

    values: list[float]
    savings: dict[str, float]
    certified: bool

    @classmethod
    def of(cls, policy: Policy | SlicedPolicy, record: Any) -> "_Outcome":
        """Return what a policy does; of several policies by slice, the largest values."""
        if isinstance(policy, Policy):
            return cls(
                *_values(policy, record, policy.evaluate(record)), not policy.runs_full_model
            )
        parts = policy.evaluate(record)
        found = [_values(policy[name], record, each) for name, each in parts.items()]
        sizes = np.asarray([each.n for each in parts.values()], np.float64)
        savings = {
            name: float(sizes @ [each[name] for _, each in found] / sizes.sum())
            for name in found[0][1]
        }
        values = np.max([each for each, _ in found], axis=0).tolist()
        return cls(values, savings, not policy.runs_full_model)


def _values(
    policy: Policy, record: Any, result: PolicyEvaluation
) -> tuple[list[float], dict[str, float]]:
    """Return what a policy promised, on other samples; the full model promises nothing."""
    if policy.calibration is None or policy.runs_full_model:
        n = 0 if policy.calibration is None else len(policy.calibration.promises)
        return [0.0] * n, result.savings
    risks, values = iter(result.risks), []
    for each in policy.calibration.promises:
        if isinstance(each, Promise):
            values.append(next(risks))
        else:
            full = record.costs[each.cost][-1 if policy.n_exits is not None else 0]
            full = getattr(record, "full_costs", {}).get(each.cost, full)
            values.append(float(full * (1 - result.savings[each.cost])))
    return values, result.savings


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """How many samples a request needs, by resampling a pilot; an estimate, not a guarantee.

    Attributes
    ----------
    n : int or None
        The smallest size at which the share of calibrations that certify something faster than the
        full model reaches `power`; None if none of the sizes does.
    sizes, certified, saving : (m,)
        The sizes compared, the share that certify, and the mean saving.
    """

    n: int | None
    sizes: Rows
    certified: Floats
    saving: Floats
    cost: str | None
    power: float

    def __index__(self) -> int:
        """Return `n`, so that the plan can be used as a number of samples."""
        if self.n is None:
            raise ValueError(
                f"No size up to {self.sizes.max():,} certifies anything in {self.power:g} of the"
                " draws: allow a larger loss, or try larger sizes."
            )
        return self.n

    def __str__(self) -> str:
        """Return a table of sizes."""
        name = self.cost or "cost"
        rows = [
            f"{size:>8,} samples: certified {100 * share:3.0f} %, saves {100 * saved:5.1f} % of"
            f" {name}"
            for size, share, saved in zip(self.sizes, self.certified, self.saving, strict=True)
        ]
        return "\n".join(rows)


def plan_request(
    request: Calibration,
    pilot: Any,
    *,
    sizes: Sequence[int],
    power: float,
    draws: int,
    seed: int,
    progress: bool | None,
) -> RequestPlan:
    """Return how many samples (or groups) a request needs, by drawing a pilot with replacement.

    The number of calibration samples must be fixed before the model is run on them: take it from
    here, and calibrate on samples that are not in the pilot.
    """
    checks.between("power", power, 0.0, 1.0)
    if isinstance(request.path, PilotPath) and not isinstance(request.path.share, float):
        raise ValueError("`Path.learn` must be a share, like 0.3, to plan for several sizes.")
    pilot, request = without_pilot(_in_memory(pilot, seed), request)
    sampler, rng = _Sampler.of(request, pilot), np.random.default_rng(seed)
    certified, saving = np.zeros(len(sizes)), np.zeros(len(sizes))
    cost: str | None = None
    named = request.cost
    checks.count("draws", draws)
    if not sizes:
        raise ValueError("`sizes` must not be empty.")
    with steps("planning", len(sizes) * draws, progress) as advance:
        for i, size in enumerate(sizes):
            for _ in range(draws):
                drawn, pool = sampler.draw(checks.count("sizes", size), rng)
                found = _Outcome.of(request.run(drawn), pool)
                if cost is None:
                    cost = default_cost(found.savings, getattr(pilot, "full_costs", {}), named)
                certified[i] += found.certified
                saving[i] += found.savings.get(cost or "", 0.0)
                advance()
    certified, saving = certified / draws, saving / draws
    enough = np.flatnonzero(certified >= power)
    return RequestPlan(
        n=int(sizes[enough[0]]) if enough.size else None,
        sizes=np.asarray(sizes),
        certified=certified,
        saving=saving,
        cost=cost,
        power=power,
    )
