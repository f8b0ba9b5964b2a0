"""Tests of the tests: each known error is noticed by a checker that the library passes."""

import numpy as np
import pytest
from scipy.special import bdtr

from swiftsure.certify.bounds import p_value
from tests.guarantees import broken
from tests.guarantees.checkers import (
    RefutedError,
    Task,
    check_coverage,
    check_mean_risk,
    check_test,
    check_violations,
)
from tests.guarantees.rules import certifies, rule, upper_bound
from tests.guarantees.sources import Sequences, Types, independent_columns, two_settings

TINY = 1e-6
TASK = Task(0.1, 0.1)
UNSAFE = two_settings(0.1 + TINY)
MANY_UNSAFE = independent_columns(0.0, *[0.1 + TINY] * 60)

STAR = rule("ucb", bound="star")
HB = rule("ltt", bound="hoeffding_bentkus")

SELECTIONS = {
    "plug-in": (broken.plug_in, STAR, UNSAFE),
    "first failure returned": (broken.first_failure, STAR, UNSAFE),
    "last success across failures": (broken.last_success, HB, MANY_UNSAFE),
    "tested from the fast end": (broken.first_reversed, STAR, MANY_UNSAFE),
    "best of many seeds": (broken.best_of_seeds, STAR, UNSAFE),
}


@pytest.mark.parametrize(("wrong", "right", "source"), SELECTIONS.values(), ids=SELECTIONS)
def test_errors_of_selection_are_noticed(wrong, right, source):
    """The same sampled check refutes the broken rule and passes the library's."""
    check_violations(right, source, TASK, n=60, draws=300)
    with pytest.raises(RefutedError):
        check_violations(wrong, source, TASK, n=60, draws=300)


BINARY = Sequences([0, 1], 9)
GAP = Sequences([-1, 0, 1], 6)
ENDS = Sequences([-1, 1], 9)
WIDE = Sequences([0, 2], 9)
WIDE_ENDS = Sequences([-2, 2], 6)

TESTS = {
    "binomial, one loss short": (broken.binomial_short_of_one, "binomial", BINARY, Task(0.3, 0.1)),
    "binomial on net gaps": (broken.binomial_on_net_gaps, "star", GAP, Task(0.5, 0.1, -1, 1)),
    "Hoeffding for one sign": (
        broken.hoeffding_for_one_sign,
        "hoeffding",
        ENDS,
        Task(0.4, 0.02, -1, 1),
    ),
    "LTT ignoring B": (
        broken.ltt_ignoring_the_bound,
        "hoeffding_bentkus",
        WIDE,
        Task(0.4, 0.02, 0, 2),
    ),
    "root sought in (0, 1)": (broken.root_in_the_unit_interval, "wsr", WIDE, Task(1.2, 0.1, 0, 2)),
    "stakes that peek": (broken.star_that_peeks, "star", ENDS, Task(0.3, 0.02, -1, 1)),
    "stakes for B = 1": (
        broken.star_with_the_cap_of_one,
        "star",
        WIDE_ENDS,
        Task(0.2, 0.02, -2, 2),
    ),
}


@pytest.mark.parametrize(("wrong", "right", "sequences", "task"), TESTS.values(), ids=TESTS)
def test_errors_of_tests_are_noticed(wrong, right, sequences, task):
    """The same exact check refutes the broken test and passes the library's."""
    check_test(certifies(right), sequences, task)
    with pytest.raises(RefutedError):
        check_test(wrong, sequences, task)


def test_the_plain_betting_test_is_sound():
    """What the broken bets were made from passes, so it is their error that is noticed."""
    for sequences, task in (
        (BINARY, Task(0.3, 0.1)),
        (GAP, Task(0.5, 0.1, -1, 1)),
        (ENDS, Task(0.3, 0.02, -1, 1)),
        (WIDE_ENDS, Task(0.2, 0.02, -2, 2)),
    ):
        check_test(broken.star_by_hand, sequences, task)


def test_a_bernstein_bound_without_its_price_is_noticed():
    """Rare losses are not seen in small samples, and the sample variance is then 0."""
    task = Task(0.5, 0.1)
    check_coverage(upper_bound("empirical_bernstein"), BINARY, task)
    with pytest.raises(RefutedError):
        check_coverage(broken.bernstein_of_the_observed_variance, BINARY, task)


EXPECTATIONS = {
    "without B": (broken.crc_without_the_bound, 1.0),
    "with B = 1 for losses up to 2": (broken.crc_with_bound_one, 2.0),
}


@pytest.mark.parametrize(("wrong", "high"), EXPECTATIONS.values(), ids=EXPECTATIONS)
def test_errors_of_control_in_expectation_are_noticed(wrong, high):
    """A staircase of monotone losses."""
    steps = np.vstack([np.zeros(50), np.triu(np.ones((50, 50)))[1:]])
    source = Types(high * steps, np.full(50, 1 / 50))
    task = Task(0.3 * high, low=-high, high=high)
    check_mean_risk(rule("crc"), source, task, n=8, draws=4000)
    with pytest.raises(RefutedError):
        check_mean_risk(wrong, source, task, n=8, draws=4000)


def bentkus_of_counts(p_value):
    """Raise unless p-values of whole counts are those of the count itself, for every n ≤ 60."""
    for n in range(1, 61):
        for count in range(n + 1):
            exact = min(1.0, np.e * bdtr(count, n, 0.5))
            if p_value(count, n, 0.5) > exact + 1e-12:
                raise RefutedError(f"{count} of {n} losses are taken for more")


def test_counts_are_not_rounded_up_past_themselves():
    """⌈n · mean⌉ in floating point is off by one for 7 losses of 25, say, and loses power there."""

    def library(count, n, epsilon):
        return p_value(np.arange(n) < count, epsilon, bound="hoeffding_bentkus")

    bentkus_of_counts(library)
    with pytest.raises(RefutedError):
        bentkus_of_counts(broken.hoeffding_bentkus_of_float_mean)
