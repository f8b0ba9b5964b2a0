"""Control in expectation, by listing every calibration set."""

import numpy as np
import pytest

from tests.guarantees.checkers import RefutedError, Task, check_mean_risk_exactly
from tests.guarantees.rules import rule
from tests.guarantees.sources import Types

VALID = {"monotone": {}, "ucb": {"method": "ucb"}}


def problems(vectors, count, seed):
    """Random distributions over given loss vectors, some of them near a corner."""
    rng = np.random.default_rng(seed)
    for concentration in np.resize([0.2, 1.0, 5.0], count):
        yield Types(np.asarray(vectors, float), rng.dirichlet(np.full(len(vectors), concentration)))


@pytest.mark.parametrize("options", VALID.values(), ids=VALID)
@pytest.mark.parametrize("high", [1.0, 2.0])
def test_two_settings_keep_the_mean_risk(options, high):
    """One setting with gaps of −B, 0 or B."""
    for source in problems(high * np.asarray([[0, -1], [0, 0], [0, 1]]), 12, seed=0):
        for share in (0.1, 0.3, 0.6):
            for n in (1, 4, 12):
                task = Task(share * high, low=-high, high=high)
                check_mean_risk_exactly(rule("crc", **options), source, task, n)


@pytest.mark.parametrize("options", VALID.values(), ids=VALID)
def test_three_settings_that_are_not_monotone_keep_the_mean_risk(options):
    """Two settings of which the second may undo the first."""
    vectors = [[0, 0, 0], [0, 1, -1], [0, -1, 1], [0, 0, 1]]
    for source in problems(vectors, 8, seed=1):
        for epsilon in (0.15, 0.4):
            task = Task(epsilon, low=-1, high=1)
            check_mean_risk_exactly(rule("crc", **options), source, task, n=9)


def test_the_exact_check_is_not_passed_by_caution_alone():
    """With monotone losses the valid form spends more than half of ε, on so coarse a path."""
    vectors = [[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1]]
    source = Types(np.asarray(vectors, float), np.asarray([0.1, 0.3, 0.3, 0.3]))
    task = Task(0.35, low=-1, high=1)
    used = check_mean_risk_exactly(rule("crc"), source, task, n=20)
    assert used > 0.5 * task.epsilon


CONTIGUOUS = Types(np.asarray([[0, -1], [0, 0], [0, 1]], float), np.asarray([0.4575, 0.01, 0.5325]))
"""One setting beside the full model, so that the paper's Eq. 10 and a contiguous choice agree."""


@pytest.mark.parametrize("selection", ["contiguous", "paper"])
def test_selection_on_the_losses_as_they_are_exceeds_epsilon(selection):
    """The paper's Proposition 1 fails for two settings: mean risk 0.0182 where ε = 0.015."""
    task = Task(0.015, low=-1, high=1)
    choose = rule("crc", selection=selection)
    with pytest.raises(RefutedError, match=r"mean risk 0\.0182"):
        check_mean_risk_exactly(choose, CONTIGUOUS, task, n=100)


@pytest.mark.parametrize("options", VALID.values(), ids=VALID)
def test_the_valid_forms_keep_epsilon_where_the_paper_exceeds_it(options):
    """The same two settings, with running maxima and with the high-probability test."""
    task = Task(0.015, low=-1, high=1)
    check_mean_risk_exactly(rule("crc", **options), CONTIGUOUS, task, n=100)


def test_the_paper_s_rule_promises_nothing():
    """Results of the selection rules say that they carry no guarantee."""
    from swiftsure.certify.control import Control

    assert Control("crc").guarantee == "expectation"
    assert Control("crc", method="ucb").guarantee == "expectation"
    for selection in ("paper", "contiguous"):
        assert Control("crc", selection=selection).guarantee == "none"
