"""Checkers of guarantees: each takes a rule or a test, and raises where its promise is broken.

The library's rules must pass them, and the broken rules of `broken.py` must not: whatever a checker
lets through would go unnoticed in the library too.

Two kinds. The exact ones list every outcome and sum its probability, so nothing about them is
random. The sampled ones draw from a source whose risks are known, with a seed; they raise only if
the promise is refuted with p ≤ 1e-6, so that a promise that is kept is as good as never refuted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, norm

from tests.guarantees.sources import Columns, Sequences, Types

__all__ = [
    "RefutedError",
    "Task",
    "check_coverage",
    "check_mean_risk",
    "check_mean_risk_exactly",
    "check_not_above",
    "check_p_values",
    "check_rate",
    "check_test",
    "check_violations",
    "check_violations_exactly",
]

Floats = NDArray[np.float64]

ALMOST_SURE = 1e-6
"""How unlikely an outcome must be under a promise to refute it."""

ROUNDING = 1e-9
"""What exact sums of probabilities may be off by."""


class RefutedError(AssertionError):
    """A promise was not kept."""


@dataclass(frozen=True)
class Task:
    """What a rule is asked for: a level, a failure probability, and where losses lie."""

    epsilon: float
    delta: float = 0.1
    low: float = 0.0
    high: float = 1.0
    binary: bool = False


Rule = Callable[[Floats, Task, int], int | None]
"""(losses (n, K) with zeros in column 0, task, seed) -> chosen setting, None for the full model."""

Test = Callable[[Floats, Task], bool]
"""(losses (n,), task) -> whether the risk is certified to be at most ε."""


# ------------------------------------------------------------------------------ rules, sampled


def check_violations(
    rule: Rule,
    source: Types | Columns,
    task: Task,
    n: int,
    draws: int,
    *,
    seed: int = 0,
    arrange: Callable[[Floats], Floats] | None = None,
) -> float:
    """P(risk of the chosen setting > ε) ≤ δ. Returns the rate of violations.

    `arrange` may put the samples of each draw in any order: the rule then has to bring its own
    randomness, for which it is given another seed each time.
    """
    rng = np.random.default_rng(seed)
    violations = 0
    for draw in range(draws):
        losses = source.sample(n, rng)
        if arrange is not None:
            losses = arrange(losses)
        chosen = rule(losses, task, draw)
        violations += chosen is not None and source.risk[chosen] > task.epsilon
    return check_rate(violations, draws, task.delta)


def check_rate(violations: int, draws: int, delta: float) -> float:
    """Raise if so many violations refute a failure probability of δ; return their rate."""
    p = binomtest(int(violations), draws, delta, alternative="greater").pvalue
    if p <= ALMOST_SURE:
        raise RefutedError(
            f"{violations} violations in {draws} draws; promised: {delta:g} (p = {p:.1e})"
        )
    return violations / draws


def check_mean_risk(
    rule: Rule, source: Types, task: Task, n: int, draws: int, *, seed: int = 0
) -> float:
    """E[risk of the chosen setting] ≤ ε. Returns the mean risk."""
    rng = np.random.default_rng(seed)
    chosen = [rule(source.sample(n, rng), task, draw) for draw in range(draws)]
    risks = np.asarray([0.0 if index is None else source.risk[index] for index in chosen])
    return check_not_above(risks, task.epsilon)


def check_not_above(risks: Floats, epsilon: float) -> float:
    """Raise if the mean of independent risks is above ε beyond doubt; return it."""
    mean, error = float(risks.mean()), float(risks.std() / np.sqrt(len(risks)))
    if mean > epsilon - norm.ppf(ALMOST_SURE) * error + ROUNDING:
        raise RefutedError(
            f"mean risk {mean:.4f} ± {error:.4f} in {len(risks)} draws; ε = {epsilon:g}"
        )
    return mean


# ------------------------------------------------------------------- rules that ignore the order


def check_violations_exactly(rule: Rule, source: Types, task: Task, n: int) -> float:
    """P(risk of the chosen setting > ε) ≤ δ, summed over every calibration set of n samples."""
    violation = 0.0
    for losses, probability in source.calibration_sets(n):
        chosen = rule(losses, task, 0)
        if chosen is not None and source.risk[chosen] > task.epsilon:
            violation += probability
    if violation > task.delta + ROUNDING:
        raise RefutedError(f"violated with probability {violation:.4f}; promised: {task.delta:g}")
    return violation


def check_mean_risk_exactly(rule: Rule, source: Types, task: Task, n: int) -> float:
    """E[risk of the chosen setting] ≤ ε, summed over every calibration set of n samples."""
    mean = 0.0
    for losses, probability in source.calibration_sets(n):
        chosen = rule(losses, task, 0)
        mean += 0.0 if chosen is None else probability * source.risk[chosen]
    if mean > task.epsilon + ROUNDING:
        raise RefutedError(f"mean risk {mean:.4f}; ε = {task.epsilon:g}")
    return mean


# ---------------------------------------------------------------------- tests of one setting


def check_test(test: Test, sequences: Sequences, task: Task) -> float:
    """P(certified) ≤ δ for every distribution with risk ≥ ε. Returns the largest probability."""
    certified = np.asarray([test(row, task) for row in sequences.rows])
    weights = sequences.weights_with_mean(at_least=task.epsilon)
    largest = float(sequences.probability(certified, weights).max())
    if largest > task.delta + ROUNDING:
        raise RefutedError(f"certified with probability {largest:.4f}; promised: {task.delta:g}")
    return largest


def check_p_values(p_value: Callable[[Floats, Task], float], sequences: Sequences, task: Task):
    """P(p ≤ u) ≤ u for every u, for every distribution with risk ≥ ε."""
    p = np.asarray([p_value(row, task) for row in sequences.rows])
    weights = sequences.weights_with_mean(at_least=task.epsilon)
    for u in np.unique(p):
        largest = float(sequences.probability(p <= u, weights).max())
        if largest > u + ROUNDING:
            raise RefutedError(f"P(p ≤ {u:.4g}) = {largest:.4g} although the risk is at least ε")


def check_coverage(upper: Callable[[Floats, Task], float], sequences: Sequences, task: Task):
    """P(risk ≤ upper bound) ≥ 1 − δ for every distribution. Returns the largest miss."""
    bounds = np.asarray([upper(row, task) for row in sequences.rows])
    worst = 0.0
    for weights in sequences.weights_with_mean():
        risk = weights @ sequences.support
        miss = float(sequences.probability(bounds < risk - ROUNDING, weights[None])[0])
        if miss > task.delta + ROUNDING:
            raise RefutedError(
                f"the risk {risk:.3f} exceeds its bound with probability {miss:.4f};"
                f" promised: {task.delta:g}"
            )
        worst = max(worst, miss)
    return worst
