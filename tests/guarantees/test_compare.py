"""`compare` keeps its promise among models whose scores are a little too low."""

import numpy as np
import pytest
from scipy.stats import binomtest

import swiftsure as ss

EPSILON, DELTA, N, K, TRIALS = 0.05, 0.1, 200, 8, 300
RISK = EPSILON + 1e-4
PROMISE = ss.Promise("exact_match", epsilon=EPSILON)
COSTS = {"full": 10.0, **{str(k): 9.0 - k for k in range(K)}}


def models(rng):
    """K models that each answer a little too many questions wrong, independently."""
    wrong = {str(k): 1.0 - (rng.random(N) < RISK) for k in range(K)}
    return {"full": np.ones(N), **wrong}


def violations(choose):
    """How often a model is chosen although it loses more than ε: each of them does."""
    rng = np.random.default_rng(0)
    return sum(choose(models(rng)) for _ in range(TRIALS))


def ordered(columns):
    return not ss.compare(columns, PROMISE, costs=COSTS).runs_full_model


def corrected(columns):
    policy = ss.compare(columns, PROMISE, costs=COSTS, correction="bonferroni")
    return not policy.runs_full_model


def best_mean(columns):
    """The broken way: the cheapest whose mean score on these samples is good enough."""
    return any(columns[str(k)].mean() >= 1 - EPSILON for k in range(K))


def each_alone(columns):
    """The broken way: test each model at δ, and take the cheapest that passes."""
    pairs = ({"full": columns["full"], str(k): columns[str(k)]} for k in range(K))
    return any(not ss.compare(pair, PROMISE).runs_full_model for pair in pairs)


def ordered_by_score(columns):
    """The broken way: put the models in the order of their scores on the same samples."""
    best = sorted(columns, key=lambda name: -columns[name].mean())
    return not ss.compare({name: columns[name] for name in best}, PROMISE).runs_full_model


@pytest.mark.parametrize("choose", [ordered, corrected])
def test_the_choice_keeps_the_promise(choose):
    assert binomtest(violations(choose), TRIALS, DELTA, alternative="greater").pvalue > 1e-6


@pytest.mark.parametrize("broken", [best_mean, each_alone, ordered_by_score])
def test_that_test_fails_for_broken_ways(broken):
    assert binomtest(violations(broken), TRIALS, DELTA, alternative="greater").pvalue < 1e-6
