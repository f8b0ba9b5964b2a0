import numpy as np
import pytest

import swiftsure as ss
from swiftsure.reasoning import giving_up
from tests.reasoning.builders import questions

SURE = [None, 0.99, 0.95, 0.9, 0.8]
HOPELESS = [0, 0.05, 0.1, 0.3]


@pytest.fixture(scope="module")
def record():
    return questions(400, np.random.default_rng(0)).exits(200)


def test_one_dial_alone_is_the_exit_rule(record):
    both = giving_up(record, sure=SURE, hopeless=[0], patience=0, score="confidence")
    for number in range(1, both.n_settings):
        level = both.setting(number)["sure"]
        exits = ss.ExitRule(threshold=level).exits(record.confidences["confidence"])
        rows = np.arange(record.n)
        assert np.array_equal(
            both.losses["zero_one"][:, number], record.losses["zero_one"][rows, exits]
        )
        assert np.array_equal(both.costs["tokens"][:, number], record.costs["tokens"][rows, exits])
    assert np.array_equal(both.costs["tokens"][:, 0], record.full_costs["tokens"])


def test_giving_up_only_after_patience(record):
    both = giving_up(record, sure=[None], hopeless=[0, 1.0], patience=3, score="confidence")
    last = both.number_of({"sure": None, "hopeless": 1.0})
    assert np.array_equal(
        both.costs["tokens"][:, last],
        np.minimum(record.costs["tokens"][:, 3], record.costs["tokens"][:, -1]),
    )


def test_both_dials_are_certified_together(record):
    both = giving_up(record, sure=SURE, hopeless=HOPELESS, patience=2, score="confidence")
    pilot, calibration = both.split(100, seed=0)
    path = ss.Path.pareto(pilot, loss="zero_one", cost="tokens")
    policy = ss.calibrate(calibration, loss="zero_one", epsilon=0.1, path=path)
    assert set(policy.settings) >= {"sure", "hopeless", "patience", "score", "checkpoints"}
    assert policy.evaluate(calibration).saving > 0
    branching = ss.Path.branching(calibration.branches(along="sure"), calibration)
    assert ss.calibrate(calibration, loss="zero_one", epsilon=0.1, path=branching).dials


def test_bad_dials_are_refused(record):
    given = {"sure": SURE, "hopeless": HOPELESS, "score": "confidence"}
    with pytest.raises(ValueError, match="an exit before the last"):
        giving_up(record, **given, patience=99)
    with pytest.raises(TypeError, match="the name of a score"):
        giving_up(record, **(given | {"score": object()}), patience=1)
