"""Paths learned on pilot samples: which way wins, and what they are."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.curves.path_learning import Pilot, learned_thresholds
from swiftsure.study.simulate import Population
from tests.builders import refused

UNEVEN = np.array([4.0, 1.0, 3.0, 1.0, 1.0])
"""How much more confident than they should be the exits are."""


def draw(n, seed, scale=UNEVEN, **arguments):
    sample = Population(n_exits=5, overconfidence=1.0).sample(n, seed)
    costs = {"flops": [1, 2, 3, 4, 6]}
    return ss.ExitRecord.from_logits(
        sample.logits * scale[:, None], sample.labels, costs=costs, **arguments
    )


def test_it_pays_where_exits_are_overconfident_to_different_degrees():
    pilot = replace(draw(500, 1), losses={})  # no labels
    path = ss.Path.learned(pilot, "brier")
    assert path.kind == "learned on a pilot: a threshold for each exit"
    assert np.isposinf(path.thresholds[0]).all()
    calibration, rest = draw(1000, 2), draw(3000, 3)
    saved = [
        ss.calibrate(calibration, loss="brier", epsilon=0.03, path=each).evaluate(rest).saving
        for each in (None, path)
    ]
    assert saved[1] > saved[0] + 0.1


def test_elsewhere_it_is_the_default_path():
    pilot = replace(draw(500, 1, np.ones(5)), losses={})
    path = ss.Path.learned(pilot, "zero_one")
    assert path.kind == "learned on a pilot: one shared threshold"
    assert np.array_equal(path.thresholds, ss.Path.logit_grid().thresholds)


def test_the_certificate_states_where_the_path_was_learned():
    path = ss.Path.learned(draw(400, 1))
    policy = ss.calibrate(draw(600, 2), loss="zero_one", epsilon=0.1, path=path)
    assert "no sample of the pilot that the path was learned on also calibrates" in str(policy)
    assert policy.certificate.path == path.kind


def test_temperatures_scale_a_shared_threshold():
    """An exit whose logits are doubled has its threshold's logit doubled."""
    rng = np.random.default_rng(0)
    logits = 1.5 * rng.normal(size=(20_000, 2)) + 2
    right = rng.random((20_000, 2)) < 1 / (1 + np.exp(-logits))
    confidences = 1 / (1 + np.exp(-logits * [1.0, 2.0]))
    losses = np.column_stack([~right, np.zeros(20_000)]).astype(float)
    from swiftsure.curves.path_learning import _by_temperature

    shared = np.array([np.inf, 0.9, 0.6])
    found = _by_temperature(Pilot(confidences, losses, np.array([1.0, 2.0, 3.0])), shared)
    assert np.isposinf(found[0]).all()
    odds = np.log(found[1:] / (1 - found[1:]))
    expected = np.log(shared[1:] / (1 - shared[1:]))
    assert odds[:, 0] == pytest.approx(expected, rel=0.1)
    assert odds[:, 1] == pytest.approx(2 * expected, rel=0.1)


def test_what_is_learned_depends_on_the_pilot_alone():
    pilot = draw(300, 1)
    values = pilot.losses["brier"] - pilot.losses["brier"][:, -1:]
    arrays = Pilot(pilot.confidences["top1"].astype(float), values, pilot.costs["flops"])
    shared = ss.Path.logit_grid().thresholds.astype(float)
    rows, way = learned_thresholds(arrays, shared, (0.01, 0.02, 0.05))
    path = ss.Path.learned(pilot, "brier")
    assert path.kind.endswith(way)
    assert np.array_equal(path.thresholds, rows.astype(np.float32))


def test_pilots_are_checked():
    pilot = draw(50, 1)
    with refused("loss"):
        ss.Path.learned(pilot, "hinge")
    with refused("score"):
        ss.Path.learned(pilot, score="top2")
    with refused("cost"):
        ss.Path.learned(pilot, cost="seconds")
    with refused("pilot"):
        ss.Path.learned(pilot.curve(loss="zero_one"))
