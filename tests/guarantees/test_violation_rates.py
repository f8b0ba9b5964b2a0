"""Violation rates on simulated early-exit classifiers whose true risks are known."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import check_rate
from tests.guarantees.rules import ANY_LOSS, GAPS, NON_NEGATIVE, UP_TO_ONE

POPULATIONS = {
    "calibrated": Population(n_exits=4, difficulty=0.45),
    "overconfident": Population(n_exits=4, difficulty=0.4, overconfidence=2.5),
    "overthinking": Population(n_exits=5, difficulty=0.4, overconfidence=3.0, overthinking=0.05),
}

LEVELS = {
    ("gap", "zero_one"): 0.03,
    ("gap", "brier"): 0.04,
    ("consistency", "zero_one"): 0.08,
    ("consistency", "brier"): 0.06,
}
"""Risks within reach of n = 300, and passed somewhere on the path."""

DELTA = 0.1


BOUNDS = {
    ("gap", "zero_one"): GAPS,
    ("gap", "brier"): ANY_LOSS,
    ("consistency", "zero_one"): UP_TO_ONE,
    ("consistency", "brier"): NON_NEGATIVE,
}
"""The bounds that are valid for each risk and loss."""


def controls(risk, loss):
    """Every control of a risk with high probability, by a name."""
    for bound in [*BOUNDS[risk, loss], "auto"]:
        yield f"ucb {bound}", ss.Control("ucb", bound)
    if risk == "gap":
        for bound in BOUNDS["consistency", loss]:
            yield f"zero-bounded {bound}", ss.Control("ltt", bound, zero_bounded=True)
    yield "bonferroni", ss.Control("ltt", "hoeffding", correction="bonferroni")


def draw(population, loss, n, rng):
    """Draw a calibration record."""
    sample = population.sample(n, rng)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=(loss,))


def check(population, risk, loss, n, draws, path=None, seed=0):
    """Count violations of every control on the same draws, and hold each to δ."""
    rng = np.random.default_rng(seed)
    epsilon = LEVELS[risk, loss]
    rules = dict(controls(risk, loss))
    if path == "breakpoints":
        del rules["bonferroni"]  # only a fixed sequence may follow a path that was seen
    grid = ss.Path.logit_grid(step=0.2) if path is None else path
    true = None if path == "breakpoints" else population.risk(grid.thresholds, risk, loss)
    violations = dict.fromkeys(rules, 0)
    chosen = dict.fromkeys(rules, 0)
    for seed in range(draws):
        curve = draw(population, loss, n, rng).curve(risk, path=grid)
        for name, rule in rules.items():
            result = rule.run(curve, epsilon, DELTA, seed)
            if result.index is not None:
                chosen[name] += 1
                actual = (
                    population.risk([result.threshold], risk, loss)[0]
                    if true is None
                    else true[result.index]
                )
                violations[name] += actual > epsilon
    for name, count in violations.items():
        check_rate(count, draws, DELTA)
        assert "auto" not in name or chosen[name] > draws / 2, f"{name} hardly ever chose"
    return violations


@pytest.mark.parametrize("population", POPULATIONS.values(), ids=POPULATIONS)
@pytest.mark.parametrize(("risk", "loss"), LEVELS)
def test_every_control_keeps_its_failure_probability(population, risk, loss):
    """P(true risk > ε) ≤ δ for every control and bound, gap and consistency, 0-1 and Brier."""
    check(population, risk, loss, n=300, draws=100)


@pytest.mark.slow
@pytest.mark.parametrize("population", POPULATIONS.values(), ids=POPULATIONS)
@pytest.mark.parametrize(("risk", "loss"), LEVELS)
def test_every_control_keeps_its_failure_probability_in_many_draws(population, risk, loss):
    """The same with enough draws to notice a rate of 0.13 in place of 0.1."""
    check(population, risk, loss, n=300, draws=2500, seed=1)


@pytest.mark.parametrize(("risk", "loss"), LEVELS)
def test_every_breakpoint_as_a_path_keeps_the_failure_probability(risk, loss):
    """The path may hold every confidence of the calibration samples, though it is seen."""
    check(POPULATIONS["overconfident"], risk, loss, n=250, draws=40, path="breakpoints")


@pytest.mark.slow
@pytest.mark.parametrize(("risk", "loss"), LEVELS)
def test_every_breakpoint_as_a_path_keeps_the_failure_probability_in_many_draws(risk, loss):
    """The same with more draws."""
    check(POPULATIONS["overthinking"], risk, loss, n=250, draws=800, path="breakpoints", seed=1)


def test_the_plug_in_rule_would_be_noticed():
    """The paper's naive rule (Eq. 9) violates about half of the time on these populations."""
    population, rng = POPULATIONS["overconfident"], np.random.default_rng(0)
    grid = ss.Path.logit_grid(step=0.2)
    true = population.risk(grid.thresholds, "consistency", "zero_one")
    violations = 0
    for _ in range(100):
        curve = draw(population, "zero_one", 300, rng).curve("consistency", path=grid)
        index = ss.control.empirical(curve, 0.08).index
        violations += index is not None and true[index] > 0.08
    with pytest.raises(AssertionError):
        check_rate(violations, 100, DELTA)
