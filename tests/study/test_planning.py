"""Planning: sample sizes against brute force, budgets against populations of known risk."""

import ast
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.special import bdtr
from scipy.stats import binom, binomtest

import swiftsure as ss
from swiftsure.certify import bounds
from swiftsure.curves.sample_order import SHUFFLE_STREAM
from swiftsure.study.planning import (
    Budget,
    GainPlan,
    gain_by_samples,
    lowest_epsilon,
    samples_needed,
)
from swiftsure.study.simulate import Population

GRID = [0.999, 0.99, 0.97, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.3]
REQUEST = ss.Calibration(ss.Promise("zero_one", epsilon=0.1), path=GRID)
STRICT = ss.ExitRule(strict=True)


def make_record(n=800, seed=0, **arguments):
    sample = Population(n_exits=4, overconfidence=1.5).sample(n, seed)
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=["zero_one"], **arguments)


@pytest.fixture(scope="module")
def record():
    return make_record()


# -------------------------------------------------------------------------------- samples_needed


def brute_force(epsilon, delta, risk, power, bound=1.0):
    """The smallest n at which the exact test certifies a true risk with the wanted power."""
    n = 1
    while True:
        allowed = np.flatnonzero(binom.cdf(np.arange(n + 1), n, epsilon / bound) <= delta)
        if allowed.size and binom.cdf(allowed[-1], n, risk / bound) >= power:
            return n
        n += 1


@pytest.mark.parametrize(
    ("epsilon", "delta", "risk", "power", "bound"),
    [
        (0.05, 0.1, 0.0, 0.9, 1.0),
        (0.05, 0.1, 0.01, 0.9, 1.0),
        (0.05, 0.1, 0.02, 0.9, 1.0),
        (0.05, 0.1, 0.03, 0.5, 1.0),
        (0.1, 0.05, 0.05, 0.8, 1.0),
        (0.2, 0.01, 0.1, 0.95, 1.0),
        (0.3, 0.3, 0.2, 0.99, 1.0),
        (0.9, 0.5, 0.1, 0.9, 1.0),
    ],
)
def test_samples_needed_are_the_fewest(epsilon, delta, risk, power, bound):
    plan = samples_needed(epsilon, delta, risk=risk, power=power)
    assert plan.n == brute_force(epsilon, delta, risk, power, bound)
    assert plan.floor == math.ceil(math.log(delta) / math.log(1 - epsilon / bound))
    assert plan.floor <= plan.n
    assert (plan.epsilon, plan.delta, plan.risk, plan.power) == (epsilon, delta, risk, power)
    assert (plan.bound, plan.disagreement) == ("binomial", None)


GAP = ss.LossRange(-1, 1, whole=True)


@pytest.mark.parametrize(
    ("epsilon", "risk", "loss_range", "disagreement"),
    [
        (0.05, 0.025, (-1, 1), 0.05),
        (0.05, 0.025, (-1, 1), 0.2),
        (0.05, 0.025, GAP, 0.05),
        (0.05, 0.025, GAP, 0.2),
        (0.05, 0.0, GAP, 0.02),
        (0.05, -0.02, GAP, 0.1),
        (0.1, 0.02, (-2, 2), 0.05),
        (0.05, 0.01, (0, 1), None),
        (0.1, 0.02, (0, 2), None),
    ],
)
def test_the_planned_power_is_that_of_the_test_that_runs(epsilon, risk, loss_range, disagreement):
    """Drawn anew and certified by the library with the same declared range."""
    plan = samples_needed(epsilon, risk=risk, loss_range=loss_range, disagreement=disagreement)
    assert plan.bound == bounds.auto(ss.LossRange.of(loss_range), plan.n).name
    high = ss.LossRange.of(loss_range).high
    share = risk / high
    both = share if disagreement is None else disagreement
    weights = [0.5 * (both + share), 0.5 * (both - share), 1 - both]
    rng = np.random.default_rng(7)
    draws = 400
    certified = sum(
        bounds.certify(
            rng.choice([high, -high, 0.0], plan.n, p=weights), epsilon, 0.1, loss_range=loss_range
        )
        for _ in range(draws)
    )
    assert binomtest(certified, draws, 0.9, alternative="less").pvalue > 1e-6
    assert certified < draws or plan.n < 60  # not more samples than it takes


def test_losses_of_both_signs_need_the_rate_of_disagreement():
    """Gaps cancel in the risk and still vary: .025 of 377 samples has a power of .47 to .79."""
    with pytest.raises(ValueError, match="`disagreement` must be given for losses that can be"):
        samples_needed(0.05, risk=0.025, loss_range=(-1, 1))
    needed = [
        samples_needed(0.05, risk=0.025, loss_range=GAP, disagreement=rate).n
        for rate in (0.025, 0.05, 0.1, 0.2)
    ]
    assert needed == sorted(set(needed))
    assert needed[0] >= 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"disagreement": 0.5}, "`disagreement` is for losses that can be negative"),
        ({"loss_range": GAP, "disagreement": 0.01, "risk": 0.02}, "`disagreement` must be in"),
        ({"loss_range": GAP, "disagreement": 1.5}, "`disagreement` must be in"),
        ({"loss_range": GAP, "disagreement": 0.1, "risk": -0.2}, "`risk` must be in"),
        ({"loss_range": GAP, "disagreement": 0.1, "bound": "binomial"}, "`bound` 'binomial' needs"),
    ],
)
def test_disagreements_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        samples_needed(0.05, **arguments)


@pytest.mark.parametrize(("risk", "disagreement"), [(0.0, 0.0), (-0.02, 0.02)])
def test_settings_that_never_do_worse_need_few_samples(risk, disagreement):
    plan = samples_needed(0.05, risk=risk, loss_range=GAP, disagreement=disagreement)
    assert (plan.n, plan.bound) == (45, "trinomial")


def test_losses_that_gain_less_than_they_lose_have_the_risk_asked_for():
    plan = samples_needed(0.2, risk=0.1, loss_range=(-0.5, 1), disagreement=0.3, bound="hoeffding")
    assert plan.risk == pytest.approx(0.1)
    assert plan.disagreement == pytest.approx(0.3)


def test_a_risk_next_to_the_level_is_refused():
    with pytest.raises(ValueError, match="too close to epsilon"):
        samples_needed(0.05, risk=0.0499999, loss_range=GAP, disagreement=0.3)


def test_a_pilot_that_averages_over_samples_of_groups_is_refused():
    """Its losses are parts of the largest group, so their mean is far below the risk."""
    losses = np.zeros((40, 2))
    groups = np.arange(40) // 4
    pilot = ss.RiskCurve.from_losses([None, 1], losses, loss_range=(0, 1)).grouped(
        groups, average="sample", max_size=50
    )
    with pytest.raises(ValueError, match="use `gain_by_samples`"):
        samples_needed(0.05, pilot=pilot)


def test_the_level_of_a_budget_rests_on_a_budget_fixed_beforehand(record):
    policy = lowest_epsilon(record, saving=0.3, loss="zero_one").policy
    fixed = "path, losses, budget and method were fixed before the calibration losses were seen"
    assert fixed in policy.certificate.assumptions


def test_a_pilot_tells_the_rate_of_disagreement(record):
    curve = record.curve(loss="zero_one", path=GRID)
    plan = samples_needed(0.05, risk=0.02, pilot=curve)
    setting = np.flatnonzero(curve.risk() <= 0.02)[-1]
    losses = curve.loss_at(int(setting))
    assert plan.risk == pytest.approx(losses.mean())
    assert plan.disagreement == pytest.approx((losses != 0).mean())
    assert plan.bound == "trinomial"
    same = samples_needed(
        0.05, risk=losses.mean(), loss_range=GAP, disagreement=(losses != 0).mean()
    )
    assert plan.n == same.n
    with pytest.raises(ValueError, match="`pilot` has its own"):
        samples_needed(0.05, pilot=curve, disagreement=0.1)
    with pytest.raises(ValueError, match="`pilot` has no setting with a risk of at most -1"):
        samples_needed(0.05, pilot=curve, risk=-1)


def test_a_pilot_of_other_losses_is_drawn_from(record):
    plan = samples_needed(0.1, pilot=record, loss="zero_one", bound="star")
    assert plan.bound == "star"
    assert plan.n > 20


@pytest.mark.parametrize(("epsilon", "delta"), [(0.01, 0.1), (0.05, 0.05), (0.5, 0.5), (0.1, 0.01)])
def test_the_floor_is_where_lossless_samples_begin_to_certify(epsilon, delta):
    floor = samples_needed(epsilon, delta).floor
    whole = ss.LossRange(0, 1, whole=True)
    assert bounds.certify(np.zeros(floor), epsilon, delta, loss_range=whole)
    if floor > 1:
        assert not bounds.certify(np.zeros(floor - 1), epsilon, delta, loss_range=whole)


def test_losses_below_zero_have_no_floor():
    assert samples_needed(0.05, loss_range=GAP, disagreement=0.02).floor is None


def fewest(epsilon, delta, risk, power):
    """The same as `brute_force`, by the number of losses: fast enough for large n.

    While as many losses are allowed, more samples only lower the power; so it is highest at the
    first size that certifies c losses, for c = 0, 1, 2, …
    """
    losses = 0
    while True:
        few, n = losses, losses + 1
        while bdtr(losses, n, epsilon) > delta:
            few, n = n, 2 * n
        while n - few > 1:
            middle = (few + n) // 2
            few, n = (few, middle) if bdtr(losses, middle, epsilon) <= delta else (middle, n)
        if bdtr(losses, n, risk) >= power:
            return n
        losses += 1


EDGES = [
    (0.05, 0.1, 0.0495, 0.1),  # power below one half: the least size
    (0.05, 0.9, 0.0499, 0.5),  # δ above one half
    (1e-5, 0.05, 1e-6, 0.7),  # so few losses expected that nothing is normal: the least size
    (0.05, 0.1, 0.0495, 0.13),  # power below one half, some way above the least size
    (0.05, 0.1, 0.0495, 0.2),
    (1e-5, 0.05, 3.4e-6, 0.5),  # a single loss is allowed
    (1e-5, 0.05, 4.2e-6, 0.5),  # two are
    (1e-5, 0.1, 6.2e-6, 0.3),
]


def test_counting_losses_is_counting_samples():
    rng = np.random.default_rng(0)
    for _ in range(40):
        epsilon = rng.uniform(0.05, 0.9)
        case = (
            epsilon,
            rng.uniform(0.01, 0.9),
            epsilon * rng.uniform(0, 0.7),
            rng.uniform(0.05, 0.9),
        )
        assert fewest(*case) == brute_force(*case)


@pytest.mark.filterwarnings("ignore:`delta` is the probability")
@pytest.mark.parametrize("case", EDGES)
def test_samples_needed_are_the_fewest_at_the_edges(case):
    epsilon, delta, risk, power = case
    assert samples_needed(epsilon, delta, risk=risk, power=power).n == fewest(*case)


def test_tiny_levels_are_answered_or_refused_at_once():
    assert samples_needed(1e-10).n == math.ceil(math.log(0.1) / math.log1p(-1e-10))
    with pytest.raises(ValueError, match="more samples would be"):
        samples_needed(1e-10, risk=1e-11)


def test_strict_breakpoints_are_refused(record):
    """The samples that bound the risk would choose the setting too, and void the bound."""
    budget = Budget(saving=0.4, cost="exit")
    curve = record.curve(path="breakpoints", rule=STRICT)
    with pytest.raises(ValueError, match="`path` must not be the breakpoints"):
        lowest_epsilon(curve, budget)
    assert lowest_epsilon(record.curve(path="breakpoints"), budget).epsilon < 1
    grouped = make_record(800).grouped(np.arange(800) // 4)
    grouped = grouped.curve(path="breakpoints", rule=STRICT)
    with pytest.raises(ValueError, match="`path` must not be the breakpoints"):
        lowest_epsilon(grouped, budget)


def test_closer_risks_need_more_samples():
    needed = [samples_needed(0.05, risk=risk).n for risk in (0.0, 0.01, 0.02, 0.03, 0.04)]
    assert needed == sorted(set(needed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0.0}, r"`epsilon` must be in \(0, 1\)"),
        ({"epsilon": 1.0}, r"`epsilon` must be in \(0, 1\)"),
        ({"epsilon": 2.0, "loss_range": (0, 2)}, r"`epsilon` must be in \(0, 2\)"),
        ({"epsilon": 0.1, "delta": 0.0}, "`delta`"),
        ({"epsilon": 0.1, "delta": 1.0}, "`delta`"),
        ({"epsilon": 0.1, "power": 1.0}, "`power`"),
        ({"epsilon": 0.1, "risk": 0.1}, r"`risk` must be in \[0, epsilon\), but got 0.1"),
        ({"epsilon": 0.1, "risk": -0.01}, r"`risk` must be in \[0, epsilon\)"),
        ({"epsilon": 0.1, "risk": float("nan")}, r"`risk` must be in \[0, epsilon\)"),
    ],
)
def test_errors_of_samples_needed(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        samples_needed(**arguments)


def test_a_risk_too_close_to_the_level_is_refused_at_once():
    with pytest.raises(ValueError, match=r"`risk` of 0\.0499 is too close to"):
        samples_needed(0.05, risk=0.0499)


# -------------------------------------------------------------------------------- gain_by_samples


def test_gains_agree_with_drawing_by_hand(record):
    plan = gain_by_samples(
        record, replace(REQUEST, delta=0.2), target=30.0, sizes=(40, 150), draws=25, seed=4
    )
    rng = np.random.default_rng(4)
    confidences, losses = record.confidences["top1"], record.losses["zero_one"]
    exit_costs = record.curve(path=GRID).mean_cost("exit")
    for i, size in enumerate((40, 150)):
        gains, certified = [], []
        for _ in range(25):
            rows = rng.integers(0, record.n, size)
            drawn = ss.ExitRecord(confidences[rows], losses={"zero_one": losses[rows]})
            index = ss.Control("ucb").indices(drawn.curve(path=GRID), np.array([0.1]), 0.2)[0]
            gains.append(100 * (1 - exit_costs[max(index, 0)] / 4))
            certified.append(index >= 0)
        assert plan.gain[i] == pytest.approx(np.mean(gains))
        assert plan.certified[i] == np.mean(certified)
        assert plan.reached[i] == np.mean(np.array(gains) >= 30.0)
    assert 0 < plan.reached[0] <= plan.reached[1]


def test_more_samples_buy_more(record):
    request = ss.Calibration(ss.Promise("zero_one", epsilon=0.05), path=GRID)
    plan = gain_by_samples(record, request, sizes=(30, 60, 150, 500, 2000))
    assert (np.diff(plan.gain) > -1).all()
    assert plan.gain[-1] > plan.gain[1] + 10
    np.testing.assert_array_equal(plan.sizes, [30, 60, 150, 500, 2000])


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ([0.0, 0.5, 0.9, 1.0], 300),
        ([0.95, 0.5, 0.89, 1.0], 400),  # "from which on": the lucky first size does not count
        ([1.0, 1.0, 1.0, 1.0], 100),
        ([1.0, 1.0, 1.0, 0.8], None),
        ([0.0, 0.0, 0.0, 0.0], None),
    ],
)
def test_the_size_that_reaches_the_target(reached, expected):
    sizes = np.array([100, 200, 300, 400])
    plan = GainPlan(sizes, np.zeros(4), np.ones(4), np.array(reached), target=20.0, power=0.9)
    assert plan.n == expected


def test_the_size_that_reaches_the_target_whatever_the_order():
    sizes, reached = np.array([1000, 100]), np.array([1.0, 0.2])
    plan = GainPlan(sizes, np.zeros(2), np.ones(2), reached, target=20.0, power=0.9)
    assert plan.n == 1000


def test_gains_of_the_cost_that_is_named():
    record = make_record(300, costs={"flops": [1.0, 10.0, 10.0, 10.0], "money": [5, 6, 7, 8]})
    arguments = {"sizes": (200,), "draws": 20}
    found = {
        name: gain_by_samples(record, replace(REQUEST, cost=name), **arguments).gain[0]
        for name in ("exit", "flops", "money")
    }
    assert found["flops"] > found["exit"] > found["money"] > 0
    assert gain_by_samples(record, REQUEST, **arguments).gain[0] == found["flops"]
    curve = ss.RiskCurve.from_losses([1.0, 0.5], np.zeros((300, 2)))
    with pytest.raises(ValueError, match="`record` must have costs"):
        gain_by_samples(curve, ss.Promise(epsilon=0.1), sizes=(200,), draws=2)
    with pytest.raises(ValueError, match="Did you mean 'flops'"):
        gain_by_samples(record, replace(REQUEST, cost="flop"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"request": ss.Promise(epsilon=1.0)}, "`epsilon`"),
        ({"sizes": (0,)}, "`sizes` must be at least 1"),
        ({"sizes": (1.5,)}, "`sizes` must be a whole number"),
        ({"request": ss.Promise("brier", epsilon=0.1)}, "`loss` must be one of: zero_one"),
        ({"request": replace(REQUEST, path=ss.Path.learn(9))}, "`request.evaluate` learns one"),
    ],
)
def test_errors_of_gain_by_samples(record, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        gain_by_samples(record, **{"request": REQUEST, "draws": 2, **arguments})


@pytest.mark.parametrize("arguments", [{"draws": 0}, {"power": 2.0}, {"sizes": ()}])
def test_draws_power_and_sizes_are_checked(record, arguments):
    with pytest.raises(ValueError, match=f"`{next(iter(arguments))}`"):
        gain_by_samples(record, REQUEST, **{"sizes": (50,), "draws": 2, **arguments})


# --------------------------------------------------------------------------------- lowest_epsilon


@pytest.mark.parametrize("bound", ["auto", "wsr", "empirical_bernstein"])
def test_one_part_chooses_and_the_rest_bounds(record, bound):
    budget = Budget(saving=0.4, choice=0.3)
    plan = lowest_epsilon(replace(record, order=7), budget, delta=0.15, bound=bound, path=GRID)
    order = np.random.default_rng([7, SHUFFLE_STREAM]).permutation(record.n)
    part, rest = record.take(order[:240]), record.take(order[240:])
    assert (plan.n_choice, plan.n_bound) == (240, 560)
    curve = part.curve(path=GRID)
    index = int(np.flatnonzero(curve.mean_cost("exit") <= 4 * 0.6)[0])
    assert plan.threshold == curve.thresholds[index]
    losses = rest.curve(path=GRID).loss_at(index)
    upper = bounds.upper_bound(losses, 0.15, bound=bound, loss_range=ss.LossRange(-1, 1, True))
    assert plan.epsilon == pytest.approx(upper, abs=1e-8)
    assert plan.budget == pytest.approx(2.4)
    assert plan.cost == pytest.approx(rest.curve(path=GRID).mean_cost("exit")[index])
    assert plan.full_cost == 4.0


def test_a_budget_is_a_saving_in_other_words(record):
    by_saving = lowest_epsilon(record, saving=0.25)
    by_budget = lowest_epsilon(record, 3.0)
    assert by_saving == by_budget


def test_more_saving_costs_more_risk(record):
    levels = [lowest_epsilon(record, saving=saving).epsilon for saving in (0.4, 0.6, 0.7)]
    assert 0 < levels[0] < levels[1] < levels[2] < 1


def threshold_record(n=400, K=6, per_sample=False):
    rng = np.random.default_rng(1)
    losses = np.clip(0.3 + np.linspace(0, 0.15, K) + 0.1 * rng.normal(size=(n, K)), 0, 1)
    layers = np.linspace(12, 2, K)
    return ss.ThresholdRecord(
        np.linspace(1, 0.5, K),
        losses={"rouge_l": losses},
        costs={"layers": np.tile(layers, (n, 1)) if per_sample else layers},
        dial="confidence",
    )


def test_known_costs_leave_every_sample_for_the_bound():
    record = replace(threshold_record(), order=5)
    plan = lowest_epsilon(record, 6.0)
    assert (plan.n_choice, plan.n_bound) == (0, 400)
    assert plan.threshold == pytest.approx(0.7)  # 12, 10, 8, then 6 layers
    order = np.random.default_rng([5, SHUFFLE_STREAM]).permutation(400)
    losses = record.losses["rouge_l"][:, 3] - record.losses["rouge_l"][:, 0]
    upper = bounds.upper_bound(losses[order], 0.1, bound="star", loss_range=(-1, 1))
    assert plan.epsilon == pytest.approx(upper, abs=1e-8)
    assert (plan.cost, plan.full_cost) == (6.0, 12.0)
    assert plan.policy.settings == {"confidence": pytest.approx(0.7)}


def test_costs_of_each_sample_are_not_known_beforehand():
    assert lowest_epsilon(threshold_record(per_sample=True), 6.0).n_choice == 100


def test_of_several_affordable_settings_the_safest_is_taken():
    plan = lowest_epsilon(threshold_record(), 11.0)
    assert plan.threshold == pytest.approx(0.9)
    assert plan.cost == 10.0


def test_groups_are_the_units_of_a_budget():
    record = make_record(800).grouped(np.arange(800) // 4)
    plan = lowest_epsilon(record, saving=0.4, path=GRID)
    assert (plan.n_choice, plan.n_bound) == (50, 150)
    assert plan.policy.certificate.samples.unit == "groups"


def test_curves_have_budgets_too():
    record = threshold_record()
    of_curve, of_record = (lowest_epsilon(each, 6.0) for each in (record.curve(), record))
    assert of_curve.epsilon == of_record.epsilon


def test_a_budget_for_the_full_model_needs_no_bound(record):
    plan = lowest_epsilon(record, 4.0)
    assert (plan.epsilon, plan.threshold) == (0.0, None)
    assert plan.policy.runs_full_model


def test_nothing_certified_is_none_and_the_full_model():
    plan = lowest_epsilon(make_record(12), saving=0.4, bound="empirical_bernstein")
    assert plan.epsilon is None
    assert plan.threshold is None
    assert plan.policy.runs_full_model
    assert str(plan.policy).startswith("Always runs the full model")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "`budget` or `saving` must be given, and not both"),
        ({"budget": 3.0, "saving": 0.2}, "`budget` or `saving` must be given, and not both"),
        ({"budget": 0.5}, "`budget` must be at least 1, the cost of the fastest setting"),
        ({"budget": 0.0}, "`budget`"),
        (
            {"saving": 0.9},
            "`saving` must be at most 0.75, since the fastest setting saves 75 % of exits",
        ),
        ({"saving": 0.0}, r"`saving` must be in \(0, 1\)"),
        ({"saving": 1.0}, r"`saving` must be in \(0, 1\)"),
        ({"saving": 40}, r"`saving` must be in \(0, 1\)"),
        ({"saving": 0.4, "delta": 1.0}, "`delta`"),
        ({"budget": {"saving": 0.4, "choice": 0.0}}, "`choice`"),
        ({"budget": {"saving": 0.4, "choice": 0.9999}}, "must hold more than 800 samples"),
        ({"budget": {"saving": 0.4, "cost": "layer"}}, "`cost` must be one of: exit"),
        ({"saving": 0.4, "bound": "bentkus"}, "'bentkus' needs losses of at least 0"),
        ({"saving": 0.4, "bound": "stars"}, "Did you mean 'star'"),
    ],
)
def test_errors_of_lowest_epsilon(record, arguments, message):
    def plan(budget=None, **options):
        budget = Budget(**budget) if isinstance(budget, dict) else budget
        return lowest_epsilon(record, budget, **options)

    with pytest.raises((ValueError, TypeError), match=message):
        plan(**arguments)


def test_budgets_need_losses_relative_to_the_full_model():
    losses = np.full((50, 2), 0.1)
    curve = ss.RiskCurve.from_losses([1.0, 0.5], losses, [2.0, 1.0], relative=False)
    with pytest.raises(ValueError, match="relative to the full model"):
        lowest_epsilon(curve, 1.0)


def test_a_first_setting_that_is_not_the_full_model_has_a_level_of_its_own():
    losses = np.tile([0.1, 0.3], (400, 1))
    curve = ss.RiskCurve.from_losses([1.0, 0.5], losses, [2.0, 1.0])
    plan = lowest_epsilon(curve, 2.0)
    assert plan.threshold == 1.0
    assert 0.1 < plan.epsilon < 0.3


# -------------------------------------------------------------------- the policy of a budget plan


@pytest.fixture(scope="module")
def plans(record):
    return {
        "exits": lowest_epsilon(replace(record, order=3), saving=0.4),
        "thresholds": lowest_epsilon(replace(threshold_record(), order=0), 6.0),
    }


@pytest.mark.parametrize("kind", ["exits", "thresholds"])
def test_the_policy_of_a_budget_goes_through_a_file(plans, kind, tmp_path):
    policy = plans[kind].policy
    policy.save(tmp_path / "policy.json")
    assert ss.Policy.load(tmp_path / "policy.json") == policy
    assert policy.threshold == plans[kind].threshold
    assert policy.certificate.promises[0].epsilon == plans[kind].epsilon
    assert policy.certificate.guarantee == "probability"


@pytest.mark.parametrize("kind", ["exits", "thresholds"])
def test_the_sentence_names_level_and_choice(plans, kind):
    plan = plans[kind]
    text = str(plan.policy)
    exact = text.partition("In exact terms:")[2]
    (level,) = re.findall(r"is at most (\S*\d)", exact)
    assert plan.epsilon <= float(level) <= plan.epsilon + 1e-5 * abs(plan.epsilon)  # rounded up
    assert "With probability at least 90 %" in exact
    assert "chose the setting" in text
    assert "path, losses, budget and method were fixed before" in text  # the level was not
    assert "\n" not in plan.policy.sentence


def test_the_sentence_of_thresholds_names_their_dial(plans):
    assert "It runs at confidence = 0.7" in plans["thresholds"].policy.sentence


def test_the_policy_of_a_budget_names_its_score(plans):
    assert plans["exits"].policy.score == "top1"
    assert "None" not in str(plans["exits"].policy)


@pytest.mark.parametrize("kind", ["exits", "thresholds"])
def test_the_upper_bound_of_a_budget_is_its_level(plans, kind):
    promise = plans[kind].policy.certificate.promises[0]
    assert promise.upper_bound == pytest.approx(promise.epsilon, abs=1e-8)


@pytest.mark.parametrize(("kind", "seed"), [("exits", 3), ("thresholds", 0)])
def test_the_certificate_of_a_budget_records_its_seed(plans, kind, seed):
    assert plans[kind].policy.certificate.provenance.seed == seed


def test_the_sentence_of_a_budget_for_the_full_model(record):
    for held, budget in ((record, 4.0), (record, 50.0), (threshold_record(), 12.0)):
        plan = lowest_epsilon(held, budget)
        assert str(plan.policy) == "Always runs the full model: the budget allows it."
        assert plan.threshold is None


def test_the_sentence_of_a_budget_that_nothing_is_certified_for():
    plan = lowest_epsilon(make_record(12), saving=0.4, bound="empirical_bernstein")
    assert str(plan.policy) == (
        "Always runs the full model: for the setting that meets the budget, no level of the"
        " zero_one gap to the full model below 1 was certified with probability at least 90 % on 9"
        " calibration samples."
    )


@pytest.mark.parametrize("kind", ["exits", "thresholds"])
def test_the_certificate_says_that_a_budget_chose(plans, kind, record):
    assert plans[kind].policy.certificate.control == "budget"
    assert plans[kind].policy.certificate.by_budget
    assert not ss.calibrate(record, epsilon=0.05).certificate.by_budget


# ------------------------------------------------------------------ the guarantee of a budget plan


def broken_promises(truths, levels, delta):
    """P-value of "the true risk is above the level no more often than δ"."""
    failures = int(np.sum(np.asarray(truths) > np.asarray(levels)))
    return binomtest(failures, len(truths), delta, alternative="greater").pvalue


@pytest.mark.parametrize("risk", ["gap", "consistency"])
def test_the_level_holds_as_often_as_promised(risk):
    """On a population whose risk is known at every threshold."""
    population = Population(n_exits=3, overconfidence=2.0)
    rng = np.random.default_rng(12)
    path = ss.Path.grid(GRID)
    true_risk = dict(zip(path.thresholds, population.risk(path.thresholds, risk), strict=True))
    shares = population.exit_probabilities(path.thresholds)
    true_cost = dict(zip(path.thresholds, shares @ [1.0, 2.0, 3.0], strict=True))
    plans = []
    for _ in range(600):
        sample = population.sample(300, rng)
        record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=["zero_one"])
        plans.append(lowest_epsilon(record, 1.8, risk, delta=0.2, path=path))
    chosen = [np.float32(plan.threshold) for plan in plans]
    levels = [plan.epsilon for plan in plans]
    assert broken_promises([true_risk[t] for t in chosen], levels, 0.2) > 1e-6

    # The cost is unbiased: the samples that estimate it did not choose the setting.
    errors = np.array([plan.cost - true_cost[t] for plan, t in zip(plans, chosen, strict=True)])
    assert abs(errors.mean()) < 4.5 * errors.std() / np.sqrt(len(errors))
    assert np.mean([true_cost[t] for t in chosen]) < 1.8 + 0.03


def lucky_curve(rng, n=300, K=25, risk=0.1):
    """Settings of one and the same risk, whose costs follow their losses."""
    losses = (rng.random((n, K + 1)) < risk).astype(float)
    losses[:, 0] = 0.0
    costs = 1.0 + losses
    costs[:, 0] = 9.0
    costs[:, -1] = 0.5  # always affordable
    return ss.RiskCurve.from_losses(np.arange(K + 1), losses, costs, binary=True)


def level_of_luck(curve, budget, delta, choice):
    return lowest_epsilon(curve, Budget(budget, choice=choice), delta=delta).epsilon


def level_on_the_same_samples(curve, budget, delta, _):
    """Broken: the samples that chose the setting also bound its risk."""
    index = int(np.flatnonzero(curve.mean_cost("cost") <= budget)[0])
    return bounds.upper_bound(
        curve.loss_at(index), delta, bound="binomial", loss_range=ss.LossRange(0, 1, True)
    )


def best_level_of_all(curve, budget, delta, _):
    """Broken: the lowest bound of all affordable settings, on the same samples."""
    affordable = np.flatnonzero(curve.mean_cost("cost") <= budget)
    declared = ss.LossRange(0, 1, True)
    return min(
        bounds.upper_bound(curve.loss_at(int(k)), delta, bound="binomial", loss_range=declared)
        for k in affordable
    )


def luck(rule, budget, delta=0.1, repetitions=400):
    rng = np.random.default_rng(99)
    levels = [rule(lucky_curve(rng), budget, delta, 0.5) for _ in range(repetitions)]
    return broken_promises(np.full(repetitions, 0.1), levels, delta)


@pytest.mark.parametrize("budget", [1.07, 1.2])
def test_luck_in_the_choice_does_not_reach_the_bound(budget):
    assert luck(level_of_luck, budget) > 1e-6


def test_choosing_and_bounding_on_the_same_samples_is_noticed():
    assert luck(level_on_the_same_samples, 1.07) < 1e-6


def test_taking_the_best_of_all_settings_is_noticed():
    assert luck(best_level_of_all, 1.2, repetitions=100) < 1e-6


# --------------------------------------------------------------------------------------- the guide


def rows_of_the_guide():
    """The first cells of the table of controls in docs/concepts/choosing.md."""
    guide = Path(__file__).parents[2] / "docs" / "concepts" / "choosing.md"
    return re.findall(r'^\| `("[a-z]+".*?)` \|', guide.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("row", rows_of_the_guide())
def test_every_row_of_the_guide_runs_on_a_gap(record, row):
    call = ast.parse(f"Control({row})", mode="eval").body
    options = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    control = ss.Control(ast.literal_eval(call.args[0]), **options)
    policy = ss.calibrate(record, epsilon=0.1, control=control, path=GRID)
    assert policy.certificate.control == control.name


def test_the_guide_has_its_rows():
    assert len(rows_of_the_guide()) == 7


def test_budgets_and_pilots_of_groups_per_sample():
    groups = np.repeat(np.arange(400), np.tile([1, 3], 200))
    record = make_record(800).grouped(groups, average="sample", max_size=3)
    plan = lowest_epsilon(record, Budget(saving=0.4, cost="exit"))
    certificate = plan.policy.certificate
    assert (certificate.samples.average, certificate.samples.max_group_size) == ("sample", 3)
    assert plan.n_choice + plan.n_bound == 400
    assert any("other groups" in text for text in certificate.assumptions)
    request = ss.Calibration(ss.Promise(epsilon=0.1), cost="exit")
    pilot = gain_by_samples(record, request, sizes=(100,), draws=5)
    assert (pilot.unit, pilot.average) == ("groups", "sample")
