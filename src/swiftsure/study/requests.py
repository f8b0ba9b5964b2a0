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
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.curves.pilots import PilotPath
from swiftsure.study.evaluation import ROUNDING, Rates, calibration_size

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
    test_risk : (splits, promises)
        What is promised, on the test part: the risk, or for slices the largest of theirs.
    test_exceedance : (splits, promises)
        Whether it is above ε. This is not the violation rate: it includes the test part's noise.
    pool_risk : (draws, promises)
        True risk (the pool's) of the policy made on each set drawn with replacement.
    violations : Rates of (promises,)
        How often the true risk is above ε.
    any_violation : Rates of ()
        How often any of them is: at most δ, for promises with a probability.
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
    violations: Rates = field(repr=False)
    any_violation: Rates = field(repr=False)
    savings: dict[str, Floats] = field(repr=False)
    certified: NDArray[np.bool_] = field(repr=False)

    def summary(self) -> list[dict[str, Any]]:
        """Return one row per promise: mean risk on the test part, rates and their intervals."""
        rows = []
        for j, promise in enumerate(self.request.risks):
            exceeds = Rates.of(self.test_exceedance[:, j].sum(), len(self.test_exceedance))
            rows.append(
                {
                    "promise": str(promise),
                    "epsilon": promise.epsilon,
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
            f"{row['promise']}: {row['test_risk']:.4g} on average on the test part; true risk"
            f" above ε in {100 * row['violations']:.1f} % of draws."
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
    if isinstance(request.missing, Ask):
        raise ValueError("`missing=Ask(...)` would ask again in each split; use missing='stop'.")
    sampler = _Sampler(record)
    n = calibration_size(n_calibration, sampler.n)
    draws = checks.count("splits", splits) if draws is None else checks.count("draws", draws, 0)
    rng = np.random.default_rng(seed)
    found: list[tuple[list[float], dict[str, float], bool]] = []
    pool_risk = []
    with steps("evaluating", splits + draws, progress) as advance:
        for _ in range(splits):
            order = rng.permutation(sampler.n)
            policy = request.run(sampler.take(order[:n]))
            found.append(_outcome(policy, sampler.take(order[n:])))
            advance()
        for _ in range(draws):
            policy = request.run(sampler.take(rng.integers(0, sampler.n, n)))
            pool_risk.append(_outcome(policy, record)[0])
            advance()
    risks = np.asarray([each[0] for each in found])
    levels = np.asarray([each.epsilon for each in request.risks]) + ROUNDING
    true = np.asarray(pool_risk).reshape(draws, len(levels))
    above = true > levels
    return RequestStudy(
        request=request,
        n_calibration=n,
        n_pool=sampler.n,
        unit="samples" if sampler.codes is None else "groups",
        test_risk=risks,
        test_exceedance=risks > levels,
        pool_risk=true,
        violations=Rates.of(above.sum(axis=0), max(draws, 1)),
        any_violation=Rates.of(np.asarray(above.any(axis=1).sum()), max(draws, 1)),
        savings={
            name: np.asarray([each[1].get(name, 0.0) for each in found]) for name in found[0][1]
        },
        certified=np.asarray([each[2] for each in found]),
    )


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

    def take(self, units: Rows) -> Any:
        """Return a record of these units; each repetition is a sample, or group, of its own."""
        if self.codes is None:
            return self.record.resampled(units)
        members = [self._members[k] for k in units]
        groups = np.repeat(np.arange(len(units)), [len(each) for each in members])
        return self.record.resampled(np.concatenate(members), groups)


def _outcome(
    policy: Policy | SlicedPolicy, record: Any
) -> tuple[list[float], dict[str, float], bool]:
    """Return risks, savings, and whether anything was certified, on other samples."""
    if isinstance(policy, SlicedPolicy):
        parts = policy.evaluate(record)
        sizes = np.asarray([each.n for each in parts.values()], np.float64)
        risks = np.max([each.risks for each in parts.values()], axis=0)
        savings = {
            name: float(sizes @ [each.savings[name] for each in parts.values()] / sizes.sum())
            for name in next(iter(parts.values())).savings
        }
        return risks.tolist(), savings, not policy.runs_full_model
    result: PolicyEvaluation = policy.evaluate(record)
    return list(result.risks), result.savings, not policy.runs_full_model


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
    sizes: Sequence[int] = (100, 200, 300, 500, 1000, 2000, 5000),
    power: float = 0.8,
    draws: int = 50,
    seed: int = 0,
    progress: bool | None = None,
) -> RequestPlan:
    """Return how many samples (or groups) a request needs, by drawing a pilot with replacement.

    The number of calibration samples must be fixed before the model is run on them: take it from
    here, and calibrate on samples that are not in the pilot.
    """
    if isinstance(request.missing, Ask):
        raise ValueError("`missing=Ask(...)` cannot be planned; plan with missing='stop'.")
    checks.between("power", power, 0.0, 1.0)
    if isinstance(request.path, PilotPath) and not isinstance(request.path.share, float):
        raise ValueError("`Path.learn` must be a share, like 0.3, to plan for several sizes.")
    sampler, rng = _Sampler(pilot), np.random.default_rng(seed)
    certified, saving = np.zeros(len(sizes)), np.zeros(len(sizes))
    cost: str | None = None
    with steps("planning", len(sizes) * draws, progress) as advance:
        for i, size in enumerate(sizes):
            for _ in range(draws):
                drawn = sampler.take(rng.integers(0, sampler.n, checks.count("sizes", size)))
                policy = request.run(drawn)
                _, savings, some = _outcome(policy, pilot)
                cost = next(iter(savings), None) if cost is None else cost
                certified[i] += some / draws
                saving[i] += savings.get(cost or "", 0.0) / draws
                advance()
    enough = np.flatnonzero(certified >= power - ROUNDING)
    return RequestPlan(
        n=int(sizes[enough[0]]) if enough.size else None,
        sizes=np.asarray(sizes),
        certified=certified,
        saving=saving,
        cost=cost,
        power=power,
    )
