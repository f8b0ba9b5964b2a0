"""The exact test for losses of −1, 0 and 1: every outcome is listed, nothing is sampled."""

import itertools

import numpy as np
import pytest
from scipy.stats import binom, multinomial

import swiftsure as ss
from swiftsure.certify.bounds import BOUNDS, trinomial
from tests.guarantees.checkers import RefutedError

ROUNDING = 1e-10
GAP = ss.LossRange(-1, 1, whole=True)

LEVELS = [(0.02, 0.1), (0.05, 0.1), (0.05, 0.01), (0.2, 0.2), (0.6, 0.05)]
"""Pairs of ε and δ."""


def in_region(region):
    """Counts (b, c), (m, 2), that a test certifies."""
    n = len(region) - 1
    b, c = (each.ravel() for each in np.meshgrid(np.arange(n + 1), np.arange(n + 1)))
    fits = b + c <= n
    b, c = b[fits], c[fits]
    return np.stack([b, c], axis=1)[b <= np.asarray(region)[b + c]]


def largest_probability(region, epsilon, points=400):
    """Largest probability of a region over distributions with a mean of ε or more, on a grid.

    Not only at means of exactly ε: also above it, so that a region that is not a staircase shows.
    """
    n = len(region) - 1
    chosen = in_region(region)
    if not len(chosen):
        return 0.0
    counts = np.column_stack([chosen, n - chosen.sum(axis=1)])
    largest = 0.0
    for excess in (0.0, 0.01, 0.1):
        mean = epsilon + excess
        if mean >= 1:
            continue
        for minus in np.linspace(0, (1 - mean) / 2, points if excess == 0 else 40):
            plus = min(minus + mean, 1.0 - minus)
            weights = [plus, minus, max(0.0, 1 - plus - minus)]
            largest = max(largest, float(multinomial.pmf(counts, n, weights).sum()))
    return largest


def check_region(region, epsilon, delta):
    found = largest_probability(region, epsilon)
    if found > delta + ROUNDING:
        raise RefutedError(f"certified with probability {found:.4f}; promised: {delta:g}")
    return found


@pytest.mark.parametrize(("epsilon", "delta"), LEVELS)
def test_no_distribution_with_a_mean_of_epsilon_is_certified_too_often(epsilon, delta):
    """P(certified) ≤ δ, all counts listed, over a fine grid of distributions."""
    used = [
        check_region(trinomial.certified_counts(n, epsilon, delta), epsilon, delta)
        for n in (1, 2, 7, 20, 45)
    ]
    assert max(used) > 0.3 * delta or epsilon < 0.05  # it is not passed by never certifying


@pytest.mark.slow
@pytest.mark.parametrize("n", range(1, 61))
def test_no_size_is_certified_too_often(n):
    """The same for every n up to 60, ε and δ on grids, at more points."""
    for epsilon in (0.01, 0.03, 0.1, 0.25, 0.5, 0.9):
        for delta in (0.01, 0.05, 0.1, 0.3):
            region = trinomial.certified_counts(n, epsilon, delta)
            check_region(region, epsilon, delta)
            factorials = trinomial._log_factorials(n)
            bound = trinomial.supremum(region, factorials, epsilon, delta, 1e-4)
            assert bound <= delta
            assert largest_probability(region, epsilon, points=50) <= bound + ROUNDING


def test_a_cut_off_taken_from_the_normal_distribution_is_refuted():
    """Tango's own cut-off certifies too often: the exact one is needed."""
    with pytest.raises(RefutedError):
        check_region(trinomial.staircase(30, 0.1, -1.2815), 0.1, 0.1)


def test_one_more_count_is_refuted():
    """A region that is larger by one in each row is not let through."""
    region = trinomial.certified_counts(45, 0.1, 0.1)
    wider = np.minimum(region + 1, np.arange(46))
    with pytest.raises(RefutedError):
        check_region(wider, 0.1, 0.1)


def test_conditioning_on_the_number_of_disagreements_is_refuted():
    """Given b + c = d, a binomial test of b at (1 + ε)/2 is not valid for ε > 0."""
    n, epsilon, delta = 40, 0.1, 0.1
    region = np.full(n + 1, -1)
    for d in range(1, n + 1):
        rate = min(1.0, 0.5 * (1 + n * epsilon / d))
        certified = np.flatnonzero(binom.cdf(np.arange(d + 1), d, rate) <= delta)
        region[d] = certified[-1] if certified.size else -1
    with pytest.raises(RefutedError):
        check_region(region, epsilon, delta)


@pytest.mark.parametrize("n", [1, 3, 17, 60, 400])
@pytest.mark.parametrize(("epsilon", "delta"), LEVELS)
def test_regions_are_staircases(n, epsilon, delta):
    """Counts stay certified when b falls or c grows: then the worst mean is ε itself."""
    region = trinomial.certified_counts(n, epsilon, delta)
    assert set(np.diff(region).tolist()) <= {0, 1}
    assert region[0] in (-1, 0)


@pytest.mark.parametrize("n", [5, 40, 300])
def test_a_smaller_delta_certifies_no_more(n):
    regions = [trinomial.certified_counts(n, 0.1, delta) for delta in (1e-4, 0.01, 0.1, 0.5, 0.9)]
    for smaller, larger in itertools.pairwise(regions):
        assert (smaller <= larger).all()


@pytest.mark.parametrize("n", [1, 6, 25, 60])
def test_probabilities_are_those_of_the_trinomial_distribution(n):
    """Against scipy, cell by cell, corners included."""
    rng = np.random.default_rng(0)
    factorials = trinomial._log_factorials(n)
    for epsilon, delta in LEVELS:
        region = trinomial.certified_counts(n, epsilon, delta)
        chosen = in_region(region)
        counts = np.column_stack([chosen, n - chosen.sum(axis=1)])
        random = [tuple(w) for w in rng.dirichlet([1, 1, 1], 20)]
        corners = [(0.3, 0, 0.7), (0.6, 0.4, 0), (1, 0, 0), (0, 0.4, 0.6), (0, 1, 0), (0, 0, 1)]
        rare = [(1e-9, 0.5, 0.5), (0.35 + 0.3, 0.35, 0)]  # the last sums to 1 − 1.1e-16
        for plus, minus, _ in [*random, *corners, *rare]:
            expected = multinomial.pmf(counts, n, [plus, minus, 1 - plus - minus]).sum()
            found = trinomial.probability(region, factorials, plus, minus)
            assert found == pytest.approx(float(expected), abs=1e-11)


@pytest.mark.parametrize(("n", "epsilon"), [(300, 0.02), (2000, 0.01), (20_000, 0.01)])
def test_a_finer_grid_finds_nothing_above_the_proven_bound(n, epsilon):
    """The bound over all q holds at points that the proof did not look at."""
    region = trinomial.certified_counts(n, epsilon, 0.1)
    factorials = trinomial._log_factorials(n)
    near = np.geomspace(1e-7, 0.5 * (1 - epsilon), 400)
    for q in np.concatenate([[0.0], near, np.linspace(0, 0.5 * (1 - epsilon), 600)]):
        assert trinomial.probability(region, factorials, q + epsilon, q) <= 0.1


@pytest.mark.parametrize(
    ("n", "epsilon", "plus", "minus", "power", "ceiling"),
    [
        (300, 0.02, 0.010, 0.005, 0.68, 0.71),
        (1000, 0.01, 0.006, 0.004, 0.84, 0.85),
        (300, 0.05, 0.040, 0.020, 0.75, 0.77),
    ],
)
def test_its_power_comes_close_to_what_any_test_can_have(n, epsilon, plus, minus, power, ceiling):
    """The ceiling: the best test of one mean-ε alternative against this distribution."""
    found = trinomial.power(n, epsilon, 0.1, plus, minus)
    assert power - 0.005 <= found <= ceiling + 0.005
    star = np.mean(
        [
            ss.bounds.certify(losses, epsilon, 0.1, bound="star", loss_range=(-1, 1))
            for losses in np.random.default_rng(0).choice(
                [1.0, -1.0, 0.0], (300, n), p=[plus, minus, 1 - plus - minus]
            )
        ]
    )
    assert found > star + 0.05


@pytest.mark.parametrize("n", [1, 4, 13])
@pytest.mark.parametrize("epsilon", [0.05, 0.3])
def test_p_values_match_the_test(n, epsilon):
    """A p-value plainly below δ is certified, one plainly above is not."""
    for b in range(n + 1):
        for c in range(n + 1 - b):
            p = trinomial.p_value(b, c, n, epsilon)
            for delta in (0.01, 0.1, 0.4):
                if abs(p - delta) > 0.01 * delta:
                    region = trinomial.certified_counts(n, epsilon, delta)
                    assert (b <= region[b + c]) == (p < delta), (b, c, p, delta)


def test_upper_bounds_are_ordered_as_the_counts_are():
    """More losses of +1 or fewer of −1 never lower the bound: what its validity rests on."""
    n = 25
    upper = np.full((n + 1, n + 1), np.nan)
    for b in range(n + 1):
        for c in range(n + 1 - b):
            upper[b, c] = trinomial.upper_bound(b, c, n, 0.1)
    for b in range(n):
        for c in range(n - b):
            assert upper[b + 1, c] >= upper[b, c] - 1e-3
            assert upper[b, c + 1] <= upper[b, c] + 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("delta", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("n", [6, 20, 50])
def test_upper_bounds_cover_every_mean(n, delta):
    """P(mean ≤ bound) ≥ 1 − δ, summed over all counts, for means of either sign."""
    counts = np.asarray([(b, c, n - b - c) for b in range(n + 1) for c in range(n + 1 - b)])
    upper = np.asarray([trinomial.upper_bound(int(b), int(c), n, delta) for b, c, _ in counts])
    for plus in np.linspace(0, 1, 41):
        for minus in np.linspace(0, 1 - plus, 41):
            weights = [plus, minus, max(0.0, 1 - plus - minus)]
            missed = upper < plus - minus - 1e-9
            assert multinomial.pmf(counts[missed], n, weights).sum() <= delta + ROUNDING


@pytest.mark.parametrize("n", [1000, 20_000, 50_000])
@pytest.mark.parametrize("delta", [0.001, 0.01, 0.1])
def test_upper_bounds_of_rare_losses_stay_above_what_was_seen(n, delta):
    """A mean below all that the interval of P(−1) allows must not pass for a bound."""
    for b, c in [(0, 0), (0, 1), (1, 0), (1, 1), (3, 3), (5, 5), (0, 10)]:
        assert trinomial.upper_bound(b, c, n, delta) > (b - c) / n
    # If P(+1) is just above the bound and P(−1) is 0, no loss occurs with probability (1 − p)ⁿ.
    assert trinomial.upper_bound(0, 0, n, delta) >= 1 - delta ** (1 / n)


@pytest.mark.parametrize("delta", [0.1, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("n", [2, 8, 20])
def test_upper_bounds_cover_means_just_above_them(n, delta):
    """The hardest means are those just above a bound, without any loss of +1 too."""
    counts = np.asarray([(b, c, n - b - c) for b in range(n + 1) for c in range(n + 1 - b)])
    upper = np.asarray([trinomial.upper_bound(int(b), int(c), n, delta) for b, c, _ in counts])
    for mean in np.unique(upper[upper < 1]) + 1e-9:
        missed = counts[upper < mean]
        for share in (0.0, 0.1, 0.5, 1.0):
            least = max(0.0, -mean)
            minus = least + share * (0.5 * (1 - mean) - least)
            plus = max(0.0, minus + mean)
            weights = [plus, minus, max(0.0, 1 - plus - minus)]
            assert multinomial.pmf(missed, n, weights).sum() <= delta + ROUNDING


def test_a_failure_probability_below_rounding_errors_certifies_nothing():
    for delta in (1e-13, 1e-300):
        assert (trinomial.certified_counts(50, 0.5, delta) == -1).all()
        assert trinomial.upper_bound(0, 50, 50, delta) == 1.0


def test_upper_bounds_are_close_to_the_levels_that_are_certified():
    """The two order counts differently, and by little."""
    for n, b, c in [(300, 4, 2), (1000, 30, 20), (100, 0, 0), (2000, 5, 40)]:
        upper = trinomial.upper_bound(b, c, n, 0.1)
        error = np.sqrt((b + c + 1) / n / n)
        for level in (upper - error, upper + error):
            if level > 0:
                region = trinomial.certified_counts(n, float(level), 0.1)
                assert (b <= region[b + c]) == (level > upper), (n, b, c)


# ------------------------------------------------------------------------------- in the library


def gap_record(n, plus, minus, rng):
    """Two exits; the first is wrong where the last is right, or the reverse, at random."""
    gap = rng.choice([1.0, -1.0, 0.0], n, p=[plus, minus, 1 - plus - minus])
    losses = np.stack([np.maximum(gap, 0), np.maximum(-gap, 0)], axis=1)
    return ss.ExitRecord(np.full((n, 1), 0.9), losses={"zero_one": losses})


def test_zero_one_gaps_are_tested_exactly_by_default():
    policy = ss.calibrate(gap_record(400, 0.01, 0.01, np.random.default_rng(0)), epsilon=0.05)
    certificate = policy.certificate
    assert certificate.promises[0].bound == "trinomial"
    assert certificate.provenance.seed is None  # the order plays no part
    assert "every zero_one gap is -1, 0 or 1" in certificate.assumptions


def test_the_order_of_the_file_changes_nothing():
    record = gap_record(300, 0.03, 0.02, np.random.default_rng(1))
    gaps = record.losses["zero_one"][:, 0] - record.losses["zero_one"][:, 1]
    found = {
        ss.calibrate(record.take(order), epsilon=0.05).threshold
        for order in (np.arange(300), np.argsort(gaps), np.argsort(-gaps))
    }
    assert len(found) == 1


def test_asking_for_the_test_declares_and_checks_whole_losses():
    assert ss.bounds.certify([-1.0] * 9 + [0.0] * 40, 0.1, bound="trinomial", loss_range=(-1, 1))
    with pytest.raises(ValueError, match="declared whole"):
        ss.bounds.certify([0.5, 0.0], 0.1, bound="trinomial", loss_range=(-1, 1))
    with pytest.raises(ValueError, match="needs losses declared to be -1, 0 or 1"):
        ss.bounds.certify([0.5, 0.0], 0.1, bound="trinomial", loss_range=(0, 1))


def test_bonferroni_tests_each_setting_at_its_share():
    rng = np.random.default_rng(3)
    losses = rng.choice([1.0, -1.0, 0.0], (300, 4), p=[0.01, 0.02, 0.97])
    losses[:, 0] = 0
    curve = ss.RiskCurve.from_losses([None, 3, 2, 1], losses, loss_range=GAP, relative=True)
    result = ss.control.ltt(curve, 0.05, 0.1, correction="bonferroni")
    assert result.bound == "trinomial"
    rows = np.arange(300)
    passes = BOUNDS["trinomial"].passes(curve, rows, 0.05, 0.1 / 3)
    assert result.index == np.flatnonzero(passes)[-1]


# --------------------------------------------------------------------------- cut-offs on disk


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trinomial.certified_counts.cache_clear()
    yield tmp_path
    trinomial.certified_counts.cache_clear()


def again():
    trinomial.certified_counts.cache_clear()
    return trinomial.certified_counts(1500, 0.05, 0.1)


def test_a_cut_off_is_found_once(cache, monkeypatch):
    first = again()
    monkeypatch.setattr(trinomial, "_proven_cut", None)  # would fail if it were called
    np.testing.assert_array_equal(first, again())
    assert len(list(cache.rglob("*_*"))) == 1


@pytest.mark.parametrize("content", ["", "nan", "-0.5", "no number", "inf"])
def test_a_damaged_cut_off_is_found_again(cache, content):
    first = again()
    (file,) = cache.rglob("*_*")
    file.write_text(content)
    np.testing.assert_array_equal(first, again())


def test_without_a_place_to_write_all_works(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert again()[1500] > 0
