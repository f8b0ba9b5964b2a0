"""Thinking and voting stopped early keep the promise; counting seeds as questions breaks it."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cascade import Answer
from swiftsure.reasoning import Probe, Trace, TraceRecord, VoteRecord, giving_up
from tests.guarantees.checkers import RefutedError, check_rate
from tests.reasoning.builders import questions

SEEDS = 8


def traps(n, rng, risk):
    """Questions with several seeds, all of which are wrong at the checkpoint in a share `risk`."""
    found = []
    for question in range(n):
        early = Answer("wrong" if rng.random() < risk else "right", 0.9)
        found += [
            Trace(question, [Probe(100, early)], 200, Answer("right"), "right", seed)
            for seed in range(SEEDS)
        ]
    return TraceRecord(found).exits([100])


def violations(draws, grouped):
    """How often the checkpoint is certified, though it loses just more than ε."""
    rng, count = np.random.default_rng(0), 0
    for _ in range(draws):
        record = traps(30, rng, 0.1 + 1e-6)
        record = record if grouped else replace(record, groups=None)
        count += (
            ss.calibrate(
                record, loss="zero_one", epsilon=0.1, score="confidence", path=ss.Path.grid([0.5])
            ).threshold
            is not None
        )
    return count


def test_seeds_of_a_question_are_one_draw():
    check_rate(violations(60, grouped=True), 60, 0.1)


def test_seeds_taken_for_questions_break_the_promise():
    with pytest.raises(RefutedError):
        check_rate(violations(40, grouped=False), 40, 0.1)


@pytest.mark.parametrize("dials", [1, 2])
def test_thinking_keeps_the_failure_probability(dials):
    """Questions are drawn with replacement from a pool, whose risk is known."""
    pool = questions(600, np.random.default_rng(0), seeds=2).exits(200)
    if dials == 2:
        pool = giving_up(
            pool, sure=[0.9, 0.6, 0.4, 0.2], hopeless=[0, 0.1], patience=2, score="confidence"
        )
    groups = pool.groups.reshape(-1, 2)[:, 0]
    rows = np.arange(pool.n).reshape(-1, 2)
    rng, failures, fast = np.random.default_rng(1), 0, 0
    options = {"score": "confidence"} if dials == 1 else {}
    for _ in range(60):
        drawn = rng.integers(0, len(groups), 100)
        sample = pool.resampled(rows[drawn].ravel(), groups=np.repeat(np.arange(100), 2))
        policy = ss.calibrate(sample, loss="zero_one", epsilon=0.1, **options)
        fast += not policy.runs_full_model
        failures += policy.evaluate(pool).risk > 0.1
    check_rate(failures, 60, 0.1)
    assert fast > 20


def test_voting_keeps_the_failure_probability():
    rng = np.random.default_rng(0)

    def votes(n):
        sure = rng.beta(3, 1, n)[:, None]
        return VoteRecord(np.where(rng.random((n, 9)) < sure, "A", "B"), labels=["A"] * n).exits()

    truth = votes(2000)
    failures = fast = 0
    for _ in range(40):
        policy = ss.calibrate(votes(120), loss="zero_one", epsilon=0.05, score="lead")
        fast += not policy.runs_full_model
        failures += policy.evaluate(truth).risk > 0.05
    check_rate(failures, 40, 0.1)
    assert fast > 15
