"""Scores learned on a pilot keep the promise; a pilot that calibrates breaks it."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.scores import SCORES
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import RefutedError, check_rate

FEATURES = [f"f{k}" for k in range(60)]


def draw(n, rng):
    """One exit that differs from the full model in 30 % of samples, and features of pure noise."""
    apart = (rng.random((n, 1)) < 0.3).astype(float)
    return ss.ExitRecord(
        {name: rng.random((n, 1)) for name in FEATURES},
        inconsistencies={"zero_one": np.column_stack([apart, np.zeros(n)])},
    )


def violated(calibration, learned):
    """Whether the certified threshold loses more than .15 on average: if over half exit."""
    policy = ss.calibrate(
        calibration, risk="consistency", loss="zero_one", epsilon=0.15, score=learned
    )
    if policy.threshold is None:
        return False
    others = draw(2000, np.random.default_rng(0))
    return 0.3 * (policy.exits(learned.confidences(others.confidences)) == 0).mean() > 0.15


def test_a_pilot_that_calibrates_is_refused_and_would_break_the_promise():
    rng = np.random.default_rng(0)
    separate = leaking = 0
    for _ in range(60):
        pilot, calibration = draw(100, rng), draw(100, rng)
        learned = ss.LearnedScore.fit(pilot, FEATURES)
        separate += violated(calibration, learned)
        with pytest.raises(ValueError, match="score was learned on"):
            violated(pilot, learned)
        leaking += violated(pilot, replace(learned, pilot=None))  # the broken variant
    check_rate(separate, 60, 0.1)
    with pytest.raises(RefutedError):
        check_rate(leaking, 60, 0.1)


def test_learned_scores_keep_the_failure_probability_on_networks():
    """Exits that are overconfident to different degrees, with a new pilot for each calibration."""
    population, scale = Population(n_exits=4), np.array([4.0, 1.0, 3.0, 1.0])[:, None]
    rng = np.random.default_rng(0)

    def record(n):
        sample = population.sample(n, rng)
        return ss.ExitRecord.from_logits(
            sample.logits * scale, sample.labels, SCORES, losses="zero_one"
        )

    truth = record(20_000)
    violations, fast = 0, 0
    for _ in range(20):
        learned = ss.LearnedScore.fit(record(150))
        policy = ss.calibrate(record(200), loss="zero_one", epsilon=0.05, score=learned)
        fast += policy.threshold is not None
        violations += policy.evaluate(truth).risk > 0.05
    check_rate(violations, 20, 0.1)
    assert fast > 10
