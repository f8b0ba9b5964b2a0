"""Bounds against independent formulas, and plain transcriptions of the bets."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import swiftsure as ss
from swiftsure._lib import kernels as _kernels
from swiftsure.certify import bounds
from swiftsure.certify.bounds import BOUNDS, _bets, certify, p_value, upper_bound
from tests.builders import refused
from tests.guarantees.rules import UP_TO_ONE

BINARY = ss.LossRange(0, 1, whole=True)
EPSILON, DELTA = 0.2, 0.1
BETS = ("wsr", "star")


def uniform(n, seed=0, low=0.0, high=1.0):
    return np.random.default_rng(seed).uniform(low, high, size=n)


# Bounds of sums


@pytest.mark.parametrize("delta", [0.01, 0.1, 0.5])
@pytest.mark.parametrize(("k", "n"), [(0, 50), (1, 50), (20, 50), (49, 50), (50, 50), (3, 3000)])
def test_binomial_inverts_to_clopper_pearson(k, n, delta):
    losses = [1] * k + [0] * (n - k)
    expected = stats.beta.ppf(1 - delta, k + 1, n - k) if k < n else 1.0
    assert upper_bound(losses, delta, loss_range=BINARY) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize(("k", "n"), [(0, 50), (3, 50), (50, 50)])
def test_binomial_p_is_the_tail(k, n):
    losses = [1] * k + [0] * (n - k)
    expected = sum(math.comb(n, j) * EPSILON**j * (1 - EPSILON) ** (n - j) for j in range(k + 1))
    assert p_value(losses, EPSILON, loss_range=BINARY) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (0, 2), (-2, 2)])
def test_hoeffding_in_closed_form(low, high):
    losses = uniform(80, low=low, high=high)
    width = high - low
    upper = losses.mean() + width * math.sqrt(math.log(1 / DELTA) / (2 * 80))
    arguments = {"bound": "hoeffding", "loss_range": (low, high)}
    assert upper_bound(losses, DELTA, **arguments) == pytest.approx(min(upper, high), abs=1e-8)
    level = 0.9 * high
    p = math.exp(-2 * 80 * max(0, level - losses.mean()) ** 2 / width**2)
    assert p_value(losses, level, **arguments) == pytest.approx(p)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (0, 2)])
@pytest.mark.parametrize("n", [30, 400])
def test_empirical_bernstein_in_closed_form(low, high, n):
    losses = low + 0.3 * (high - low) * uniform(n)
    t = math.log(2 / DELTA)
    slack = math.sqrt(2 * losses.var(ddof=1) * t / n) + 7 * (high - low) * t / (3 * (n - 1))
    expected = min(losses.mean() + slack, high)
    arguments = {"bound": "empirical_bernstein", "loss_range": (low, high)}
    assert upper_bound(losses, DELTA, **arguments) == pytest.approx(expected, abs=1e-7)
    if expected < high and expected > 0:
        assert p_value(losses, expected, **arguments) == pytest.approx(DELTA, rel=1e-6)


def test_empirical_bernstein_of_one_sample_says_nothing():
    assert p_value([0.0], 0.9, bound="empirical_bernstein") == 1.0
    assert upper_bound([0.0], bound="empirical_bernstein") == 1.0


def relative_entropy(a, b):
    return (a * math.log(a / b) if a > 0 else 0.0) + (
        (1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0
    )


@pytest.mark.parametrize("high", [1.0, 2.0])
@pytest.mark.parametrize("scale", [0.0, 0.1, 0.3, 0.7])
def test_bentkus_and_hoeffding_bentkus(high, scale):
    n = 60
    losses = high * scale * uniform(n, seed=4)
    epsilon, mean = EPSILON * high, losses.mean() / high
    bentkus = min(1, math.e * stats.binom.cdf(math.ceil(losses.sum() / high), n, EPSILON))
    hoeffding = math.exp(-n * relative_entropy(min(mean, EPSILON), EPSILON))
    arguments = {"loss_range": (0, high)}
    assert p_value(losses, epsilon, bound="bentkus", **arguments) == pytest.approx(bentkus)
    p = p_value(losses, epsilon, bound="hoeffding_bentkus", **arguments)
    assert p == pytest.approx(min(bentkus, hoeffding))


@pytest.mark.parametrize("epsilon", [0.01, 0.2, 0.9])
def test_hoeffding_bentkus_of_no_loss(epsilon):
    n = 7  # few enough that the relative entropy, h(0, ε) = -log(1 - ε), is the smaller
    p = p_value([0.0] * n, epsilon, bound="hoeffding_bentkus")
    assert p == pytest.approx((1 - epsilon) ** n)


@pytest.mark.parametrize("bound", ["bentkus", "hoeffding_bentkus"])
def test_counts_of_whole_losses_are_not_rounded_up(bound):
    for n, k in itertools.product([10, 49, 100, 1000], range(10)):
        losses = [1.0] * k + [0.0] * (n - k)
        bentkus = min(1, math.e * stats.binom.cdf(k, n, EPSILON))
        hoeffding = math.exp(-n * relative_entropy(min(k / n, EPSILON), EPSILON))
        expected = bentkus if bound == "bentkus" else min(bentkus, hoeffding)
        assert p_value(losses, EPSILON, bound=bound) == pytest.approx(expected), (n, k)


def test_sums_that_rounding_carried_past_a_whole_number_count_as_it():
    losses = [0.1] * 30 + [0.0] * 70
    assert sum(losses) > 3
    expected = math.e * stats.binom.cdf(3, 100, EPSILON)
    assert p_value(losses, EPSILON, bound="bentkus") == pytest.approx(expected)


@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_a_p_value_is_at_most_one(bound):
    assert p_value([1.0] * 20, EPSILON, bound=bound) == pytest.approx(1.0)
    assert p_value([1.0] * 20, EPSILON, bound=bound) <= 1.0


# Bets


def wealths(losses, epsilon, delta, B, star, pool=None):
    """The wealth after each sample, as the formulas have it; infinite once the null is impossible.

    i samples in: mean (B/2 + Σℓ)/(i + 1), variance (B²/4 + Σ(ℓ - mean)²)/(i + 1), both with the
    sample just seen in its mean.
    """
    n, wealth, path = len(losses), 1.0, []
    means = [(B / 2 + sum(losses[:i])) / (i + 1) for i in range(n + 1)]
    for i in range(1, n + 1):
        level = epsilon
        if pool is not None:
            level = (pool * epsilon - sum(losses[: i - 1])) / (pool - i + 1)
            if level > B * (1 + 1e-12):  # at B itself the rest of the pool can still reach ε
                return [*path, math.inf]
        seen = range(1, i)
        variance = (B * B / 4 + sum((losses[j - 1] - means[j]) ** 2 for j in seen)) / i
        if star:
            cap = 1 / (B - level) if B - level > 1e-12 * B else 0.0
            stake = math.sqrt(2 * math.log(1 / (delta * wealth)) / ((n - i + 1) * variance))
        else:
            cap = 1 / max(B, B - level)
            stake = math.sqrt(2 * math.log(1 / delta) / (n * variance))
        wealth *= 1 - min(cap, stake) * (losses[i - 1] - level)
        if wealth <= 1e-14:
            return path
        path.append(wealth)
        if star and wealth >= 1 / delta:
            return path
    return path


def bet_certifies(losses, epsilon, delta, B, star, pool=None):
    return max(wealths(losses, epsilon, delta, B, star, pool), default=0.0) >= 1 / delta


@st.composite
def bets(draw):
    B = draw(st.sampled_from([1.0, 2.0]))
    kinds = {
        "binary": st.sampled_from([0.0, B]),
        "rare": st.sampled_from([0.0] * 9 + [B]),
        "gap": st.sampled_from([-B, 0.0, 0.0, 0.0, B]),
        "real": st.floats(-B, B),
        "small": st.floats(0, B / 20),
    }
    losses = draw(st.lists(kinds[draw(st.sampled_from(list(kinds)))], min_size=1, max_size=60))
    epsilon = B * draw(st.sampled_from([0.01, 0.05, 0.2, 0.5, 0.9]))
    return losses, epsilon, draw(st.sampled_from([0.01, 0.1, 0.3])), B, draw(st.booleans())


@given(bets())
@settings(max_examples=300)
def test_bets_certify_as_the_formulas_say(case):
    losses, epsilon, delta, B, star = case
    arguments = {"bound": "star" if star else "wsr", "loss_range": (-B, B)}
    best = max(wealths(*case), default=0.0)
    if abs(best * delta - 1) > 1e-9:  # not on the edge, where rounding decides
        assert certify(losses, epsilon, delta, **arguments) == (best >= 1 / delta)


@given(bets(), st.integers(0, 40))
@settings(max_examples=300)
def test_bets_on_a_pool_certify_as_the_formulas_say(case, more):
    losses, epsilon, delta, B, star = case
    pool = len(losses) + more
    arguments = {"bound": "star" if star else "wsr", "loss_range": (-B, B), "pool": pool}
    best = max(wealths(*case, pool), default=0.0)
    if abs(best * delta - 1) > 1e-9:
        assert certify(losses, epsilon, delta, **arguments) == (best >= 1 / delta)


def test_the_stake_on_a_pool_that_needs_gains_is_capped():
    # The first losses put the mean that the rest would need below 0; gains then make up for them.
    losses = [0.0, 0.8, 0.9, -1.0, -1.0, -1.0, -1.0, 0.5]
    assert wealths(losses, 0.01, 0.1, 1.0, star=False, pool=8)[-1] == math.inf
    assert certify(losses, 0.01, 0.1, bound="wsr", loss_range=(-1, 1), pool=8)


def bisect(certified, low, high):
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if certified(middle) else (middle, high)
    return high


@pytest.mark.parametrize("bound", BETS)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-1, 1), (0, 2)])
def test_upper_bounds_of_bets_invert_the_test(bound, low, high):
    losses = np.clip(np.random.default_rng(3).normal(0.1, 0.3, size=60) * high, low, high).tolist()
    expected = bisect(
        lambda e: bet_certifies(losses, e, DELTA, high, bound == "star"), low, high - 1e-12
    )
    found = upper_bound(losses, DELTA, bound=bound, loss_range=(low, high))
    assert found == pytest.approx(expected, abs=1e-7)
    assert np.mean(losses) < found < high


@pytest.mark.parametrize("epsilon", [0.1, 0.2, 0.5])
def test_the_p_value_of_wsr_is_one_over_the_largest_wealth(epsilon):
    losses = (uniform(60, seed=2) < 0.05).astype(float).tolist()
    best = max(wealths(losses, epsilon, bounds.betting.WSR_DELTA, 1.0, star=False))
    assert best > 1
    p = p_value(losses, epsilon, bound="wsr")
    assert p == pytest.approx(1 / best)


@pytest.mark.parametrize("epsilon", [0.1, 0.2, 0.5])
def test_the_p_value_of_star_is_the_least_delta_that_certifies(epsilon):
    losses = (uniform(60, seed=2) < 0.05).astype(float).tolist()
    log_p = bisect(lambda d: bet_certifies(losses, epsilon, math.exp(d), 1.0, True), -50.0, 0.0)
    assert p_value(losses, epsilon, bound="star") == pytest.approx(math.exp(log_p), rel=1e-6)


@pytest.mark.parametrize("bound", BETS)
def test_a_wealth_of_nothing_is_final(bound):
    B, epsilon = 1.0, 0.5
    losses = [0.0] * 3 + [B] * 40 + [0.0] * 400
    assert certify(losses, epsilon, bound=bound) == bet_certifies(
        losses, epsilon, 0.1, B, bound == "star"
    )


def test_star_stakes_no_more_than_makes_wealth_nothing():
    # With one sample left STaR stakes all it may, so a full loss leaves exactly nothing.
    assert not certify([1.0], 0.5, 0.9, bound="star")
    assert p_value([1.0], 0.5, bound="star") == pytest.approx(1.0)


@pytest.mark.parametrize("bound", BETS)
def test_bets_need_no_lower_bound(bound):
    losses = uniform(60, seed=5) - 0.4
    found = [upper_bound(losses, bound=bound, loss_range=(low, 1)) for low in (-0.5, -1.0, -1000.0)]
    assert found[0] == pytest.approx(found[1], abs=1e-6) == pytest.approx(found[2], abs=2e-6)


# Finite pools


@pytest.mark.parametrize(
    ("pool", "n", "k", "epsilon"), [(20, 8, 0, 0.2), (20, 8, 1, 0.25), (50, 49, 3, 0.1)]
)
def test_a_pool_of_binary_losses_is_hypergeometric(pool, n, k, epsilon):
    bad = math.ceil(pool * epsilon - 1e-9)
    ways = sum(math.comb(bad, j) * math.comb(pool - bad, n - j) for j in range(k + 1))
    p = p_value([1] * k + [0] * (n - k), epsilon, loss_range=BINARY, pool=pool)
    assert p == pytest.approx(ways / math.comb(pool, n))


@pytest.mark.parametrize("bound", ["binomial", *BETS])
def test_a_pool_of_which_enough_is_seen_is_known_for_sure(bound):
    losses = [0] * 9  # of 10: after the eighth, the other two cannot bring the risk above 0.2
    assert certify(losses, 0.21, 1e-9, bound=bound, pool=10)
    assert not certify(losses, 0.1, 1e-9, bound=bound, pool=10)
    assert not certify(losses, 0.21, 1e-9, bound=bound)


def test_a_pool_seen_to_the_end_is_known_exactly():
    losses = [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert certify(losses, 0.11, 1e-9, bound="binomial", pool=10)
    assert not certify(losses, 0.1, 0.9, bound="binomial", pool=10)


@pytest.mark.parametrize("bound", ["binomial", *BETS])
def test_a_large_pool_is_like_none(bound):
    losses = (uniform(60, seed=2) < 0.05).astype(float)
    alone = p_value(losses, EPSILON, bound=bound)
    assert p_value(losses, EPSILON, bound=bound, pool=10**9) == pytest.approx(alone, rel=1e-4)
    assert p_value(losses, EPSILON, bound=bound, pool=100) < alone


@pytest.mark.parametrize("bound", [b for b in UP_TO_ONE if not BOUNDS[b].pools])
def test_other_bounds_refuse_a_pool(bound):
    with pytest.raises(ValueError, match=f"`pool` .*wsr, star, binomial, but got '{bound}'"):
        certify([0.0] * 10, EPSILON, bound=bound, pool=20)


@pytest.mark.parametrize("pool", [9, 0, 10.0, "all"])
def test_a_pool_is_at_least_the_sample(pool):
    with refused("pool"):
        certify([0.0] * 10, EPSILON, pool=pool)


# What all bounds share


@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_a_test_certifies_just_above_the_upper_bound_and_not_below(bound):
    losses = (uniform(200, seed=6) < 0.1).astype(float)
    upper = upper_bound(losses, DELTA, bound=bound)
    assert losses.mean() < upper < 0.4
    assert certify(losses, upper + 1e-6, DELTA, bound=bound)
    assert not certify(losses, upper - 1e-6, DELTA, bound=bound)


@pytest.mark.parametrize(
    "bound", [b for b in UP_TO_ONE if b != "wsr"]
)  # whose p-value has other bets
@pytest.mark.parametrize("epsilon", [0.12, 0.15, 0.2, 0.3])
def test_a_test_certifies_where_the_p_value_is_small(bound, epsilon):
    losses = (uniform(200, seed=6) < 0.1).astype(float)
    p = p_value(losses, epsilon, bound=bound)
    assert certify(losses, epsilon, p * 1.001, bound=bound)
    assert not certify(losses, epsilon, p * 0.999, bound=bound)


@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_no_bound_certifies_what_no_method_can(bound):
    n = bounds.minimum_samples(0.05, DELTA, ss.LossRange(0, 1))
    assert not certify([0.0] * (n - 1), 0.05, DELTA, bound=bound)


@pytest.mark.parametrize("bound", ["binomial", "hoeffding_bentkus"])
def test_the_tightest_bounds_certify_as_soon_as_any_method_can(bound):
    n = bounds.minimum_samples(0.05, DELTA, ss.LossRange(0, 1))
    assert certify([0.0] * n, 0.05, DELTA, bound=bound)


@pytest.mark.parametrize(
    ("epsilon", "delta", "high", "n"),
    [
        (0.01, 0.1, 1, 230),
        (0.05, 0.1, 1, 45),
        (0.02, 0.1, 2, 230),
        (0.5, 0.25, 1, 2),
        (0.5, 0.5, 1, 1),
    ],
)
def test_minimum_samples(epsilon, delta, high, n):
    declared = ss.LossRange(0, high)
    assert bounds.minimum_samples(epsilon, delta, declared) == n
    assert (1 - epsilon / high) ** n <= delta * (1 + 1e-12)
    assert (1 - epsilon / high) ** (n - 1) > delta


def test_losses_that_may_be_negative_have_no_such_floor():
    assert bounds.minimum_samples(0.01, 0.1, ss.LossRange(-1, 1)) is None
    assert certify([-1.0] * 20, 0.01, loss_range=(-1, 1))


def test_auto_follows_what_is_declared_and_not_what_is_seen():
    assert bounds.auto(BINARY).name == "binomial"
    assert bounds.auto(BINARY.gap()).name == "trinomial"
    assert bounds.auto(ss.LossRange(-1, 1)).name == "star"
    assert bounds.auto(ss.LossRange(-2, 2, whole=True)).name == "star"
    assert bounds.auto(BINARY.gap(), n=50_000).name == "trinomial"
    assert bounds.auto(BINARY.gap(), n=50_001).name == "star"
    assert bounds.auto(BINARY.gap(), n=100, pool=200).name == "star"
    assert bounds.auto(ss.LossRange(0, 1)).name == "star"
    losses = [0, 1] * 20
    assert p_value(losses, 0.6) == p_value(losses, 0.6, bound="star")
    assert p_value(losses, 0.6, loss_range=BINARY) == p_value(losses, 0.6, bound="binomial")
    assert p_value(losses, 0.6) != p_value(losses, 0.6, bound="binomial")


def test_only_bets_depend_on_order():
    losses = (uniform(100, seed=6) < 0.1).astype(float)
    for name in UP_TO_ONE:
        same = p_value(np.sort(losses), EPSILON, bound=name) == p_value(losses, EPSILON, bound=name)
        assert same is not BOUNDS[name].uses_order, name


@pytest.mark.parametrize("bound", ["bentkus", "hoeffding_bentkus"])
def test_bounds_of_non_negative_losses_refuse_others(bound):
    with pytest.raises(
        ValueError, match=f"`bound` '{bound}' needs losses of at least 0.*zero_bounded"
    ):
        certify([0.0] * 10, EPSILON, bound=bound, loss_range=(-1, 1))


@pytest.mark.parametrize(
    "loss_range", [(-1, 1), (0, 2), ss.LossRange(-1, 1, whole=True), ss.LossRange(0, 2, whole=True)]
)
def test_binomial_refuses_losses_that_are_not_binary(loss_range):
    with pytest.raises(ValueError, match="`bound` 'binomial' needs losses declared to be 0 or 1"):
        certify([0.0] * 10, EPSILON, bound="binomial", loss_range=loss_range)


def test_asking_for_the_binomial_test_declares_and_checks_binary_losses():
    assert certify([0.0] * 50, EPSILON, bound="binomial")
    with pytest.raises(ValueError, match="`losses` is declared whole"):
        certify([0.0, 0.5], EPSILON, bound="binomial")


CALLS = {
    "certify": lambda losses, **a: certify(losses, **{"epsilon": EPSILON, **a}),
    "p_value": lambda losses, **a: p_value(losses, **{"epsilon": EPSILON, **a}),
    "upper_bound": upper_bound,
}


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize(
    ("losses", "changes", "name"),
    [
        ([], {}, "losses"),
        ([[0.0]], {}, "losses"),
        ([0.0, math.nan], {}, "losses"),
        ([0.0, 1.1], {}, "losses"),
        ([0.0, -0.1], {}, "losses"),
        (["a"], {}, "losses"),
        ([0.0], {"bound": "hoefding"}, "bound"),
        ([0.0], {"bound": None}, "bound"),
        ([0.0], {"loss_range": (1, 0)}, "loss_range"),
    ],
)
def test_bad_input_is_refused_by_name(call, losses, changes, name):
    with refused(name):
        CALLS[call](losses, **changes)


@pytest.mark.parametrize("epsilon", [0, 1, -0.1, 1.3, math.nan, math.inf, "much", None])
def test_epsilon_lies_between_zero_and_the_bound(epsilon):
    for call in (certify, p_value):
        with refused("epsilon"):
            call([0.0] * 10, epsilon)


def test_epsilon_reaches_up_to_the_bound_of_the_loss():
    certify([0.0] * 10, 1.9, loss_range=(0, 2))
    with pytest.raises(ValueError, match=r"`epsilon` must be in \(0, 2\), but got 2"):
        certify([0.0] * 10, 2.0, loss_range=(0, 2))


@pytest.mark.parametrize("delta", [0, 1, -0.1, 1.3, math.nan, "little", None])
def test_delta_lies_between_zero_and_one(delta):
    with refused("delta"):
        certify([0.0] * 10, EPSILON, delta)
    with refused("delta"):
        upper_bound([0.0] * 10, delta)


def test_an_unknown_bound_is_answered_with_all_and_the_nearest():
    with pytest.raises(
        ValueError, match=r"auto, wsr, star, binomial, .*; .* Did you mean 'hoeffding'"
    ):
        certify([0.0] * 10, EPSILON, bound="hoefding")


def test_long_bets_keep_their_accuracy():
    n = 20_000
    losses = (uniform(n, seed=8) < 0.045).astype(float)
    total, deviations, log_wealth, best = 0.0, 0.25, 0.0, 0.0
    for i, loss in enumerate(losses, start=1):
        urge = math.log(1 / bounds.betting.WSR_DELTA)
        stake = min(1.0, math.sqrt(2 * urge * i / (n * deviations)))
        log_wealth += math.log1p(-stake * (loss - 0.05))
        best = max(best, log_wealth)
        total += loss
        deviations += (loss - (0.5 + total) / (i + 1)) ** 2
    assert best > 3
    assert -math.log(p_value(losses, 0.05, bound="wsr")) == pytest.approx(best, abs=1e-8)


def test_a_fortune_lost_is_not_regained_by_overflow():
    """Wealth that fell by e^-2149 and rose by e^1390 is below one, not infinite."""
    n, epsilon, delta = 400_000, 0.5, 0.1
    losses = np.where(np.arange(n) < 60_000, 0.54, 0.46)
    moves = losses_in_logs(losses, epsilon, delta)
    assert moves[-1] - moves.min() > 1000 > 709  # which is where a float overflows
    assert moves.max() < 0
    curve = ss.RiskCurve.from_losses([1.0, 0.5], np.stack([0 * losses, losses], axis=1))
    rows = np.arange(n)
    thresholds = _kernels.inclusive_thresholds(curve.data)
    test = _bets.Test(epsilon, delta, 1.0, False, 0)
    least = _bets.log_deficit(curve.data, thresholds, rows, 1, 1 / delta, test)
    assert least == pytest.approx(-math.log(delta))


def test_one_enormous_win_is_counted_for_what_it_is():
    losses = np.r_[np.full(900, 0.9), np.full(3000, -1.0), [-1e300]]
    assert not certify(losses, 0.1, 0.1, bound="wsr", loss_range=(-1e300, 1))


@pytest.mark.parametrize("bound", BETS)
def test_a_pool_seen_whole_is_not_certified_below_its_risk_by_rounding(bound):
    rng = np.random.default_rng(0)
    pool = rng.choice([0.1, 0.3, 0.7, 1 / 3, 1.0], 5000)
    risk = sum(Fraction(x) for x in pool.tolist()) / len(pool)
    level = float(risk)
    level = level if Fraction(level) < risk else math.nextafter(level, 0)
    wrong = [
        certify(rng.permutation(pool), level, 0.01, bound=bound, loss_range=(0, 1), pool=5000)
        for _ in range(60)
    ]
    assert np.mean(wrong) <= 0.05


def losses_in_logs(losses, epsilon, delta):
    """WSR's wealth after each loss, in logs, from its definition; B = 1."""
    n = len(losses)
    count = np.arange(1, n + 1)
    mean = (0.5 + np.cumsum(losses)) / (count + 1)
    spread = 0.25 + np.concatenate([[0.0], np.cumsum((losses - mean) ** 2)[:-1]])
    stake = np.minimum(1.0, np.sqrt(2 * count * math.log(1 / delta) / (n * spread)))
    return np.cumsum(np.log1p(stake * (epsilon - losses)))


@pytest.mark.parametrize("bound", ["wsr", "star"])
@pytest.mark.parametrize("kind", ["brier", "zero_one"])
def test_walking_side_by_side_ends_where_walking_alone_does(monkeypatch, bound, kind):
    """Long records are walked eight settings at a time; the answers are those of single walks."""
    levels = np.asarray([0.01, 0.03, 0.1, 0.3])
    seen = set()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        n_exits = int(rng.integers(2, 6))
        confidences = rng.random((3_000, n_exits - 1), np.float32).round(int(rng.integers(2, 6)))
        wrong = rng.random((3_000, n_exits)) < np.linspace(0.4, 0.05, n_exits)
        losses = wrong * (2 * rng.random(wrong.shape) if kind == "brier" else 1.0)
        record = ss.ExitRecord(
            confidences,
            losses={kind: losses},
            loss_ranges={kind: (0, 2) if kind == "brier" else (0, 1)},
        )
        curve = record.curve(
            loss=kind,
            path=ss.Path.grid(np.linspace(1, 0, int(rng.integers(2, 90)))),
            rule=ss.ExitRule(strict=bool(seed % 2), min_exit=seed % min(3, n_exits)),
        )
        rule = ss.Control("ucb", bound=bound)
        alone = rule.indices(curve.shuffled(seed), levels, 0.1).tolist()
        with monkeypatch.context() as patch:
            patch.setattr(_bets, "MIN_PARALLEL", 1)
            assert rule.indices(curve.shuffled(seed), levels, 0.1).tolist() == alone
        seen.update(alone)
    assert len(seen) > 10  # walks of many lengths
