"""A router and a threshold keep δ together; broken ways to choose the two dials do not."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cascade import Router
from tests.guarantees.checkers import RefutedError, check_rate

EPSILON, DELTA = 0.1, 0.1
HARM = 0.5
"""How often the small model differs where it answers, whatever the router and it say."""

SHARES = np.linspace(0.205, 1.0, 30)
PAIRS = np.column_stack([SHARES, 1 - (EPSILON + 0.001) / HARM / SHARES])
"""Dials under which the small model answers a little too often: the risk is ε + .001."""


def records(n, rng, ids):
    """A record whose confidences say nothing: no setting of the two dials is better than others."""
    apart = np.column_stack([rng.random(n) < HARM, np.zeros(n)])
    record = ss.ExitRecord(
        rng.random((n, 1)),
        inconsistencies={"zero_one": apart},
        costs={"usd": [0.1, 1.1]},
        full_costs={"usd": 1.0},
        ids=ids + np.arange(n),
        order=int(rng.integers(2**32)),
    )
    return record.routed(rng.random(n))


def true_risk(thresholds):
    if thresholds is None:
        return 0.0
    router, level = np.clip(thresholds, 0.0, 1.0)
    return HARM * router * (1 - level)


def chosen(record, path, delta=DELTA):
    request = ss.Calibration(
        ss.Promise("zero_one", risk="consistency", epsilon=EPSILON), delta=delta, path=path
    )
    policy = request.run(record)
    return None if policy.runs_full_model else policy.thresholds


def on_a_pilot(pilot, calibration):
    """The library's way."""
    return chosen(calibration, ss.Path.pareto(pilot, candidates=PAIRS))


def on_the_same_samples(pilot, calibration):
    """Broken: the path is learned on the samples that certify it."""
    front = ss.Path.pareto(calibration, candidates=PAIRS)
    return chosen(calibration, replace(front, pilot=None))


def each_pair_at_delta(pilot, calibration):
    """Broken: all pairs are tried, each with all of δ, and one that passes is taken."""
    for pair in PAIRS:
        found = chosen(calibration, ss.Path.family([pair]))
        if found is not None:
            return found
    return None


def violations(way, draws, n=150, n_pilot=60):
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(draws):
        pilot, calibration = records(n_pilot, rng, 10_000), records(n, rng, 0)
        found += true_risk(way(pilot, calibration)) > EPSILON
    return found


def test_two_dials_keep_delta():
    check_rate(violations(on_a_pilot, 300), 300, DELTA)


@pytest.mark.slow
def test_two_dials_keep_delta_in_5000_calibrations():
    check_rate(violations(on_a_pilot, 5000), 5000, DELTA)


@pytest.mark.parametrize("way", [on_the_same_samples, each_pair_at_delta])
def test_broken_ways_are_refuted(way):
    with pytest.raises(RefutedError):
        check_rate(violations(way, 120), 120, DELTA)


def overfit_risk(own_pilot, rng, n=150):
    """The risk behind a router that was learned on noise: on a pilot, or on the calibration."""
    points = rng.normal(size=(n, 8))
    apart = np.column_stack([rng.random(n) < HARM, np.zeros(n)])
    plain = ss.ExitRecord(
        np.ones((n, 1)),
        inconsistencies={"zero_one": apart},
        costs={"usd": [0.1, 1.1]},
        full_costs={"usd": 1.0},
        order=int(rng.integers(2**32)),
        ids=np.arange(n),
    )
    taught, inputs = plain, points
    if own_pilot:
        inputs = rng.normal(size=(n, 8))
        taught = replace(
            plain,
            ids=np.arange(n, 2 * n),
            inconsistencies={"zero_one": np.column_stack([rng.random(n) < HARM, np.zeros(n)])},
        )
    router = Router.fit(taught, inputs, np.asarray)
    record = plain.routed(router.hopeless(points), pilot=router.pilot if own_pilot else None)
    found = chosen(record, ss.Path.family([[level, 0.5] for level in np.linspace(0.02, 1, 50)]))
    if found is None:
        return 0.0
    return HARM * float((router.hopeless(rng.normal(size=(2000, 8))) < found[0]).mean())


def test_a_router_learned_on_a_pilot_keeps_delta():
    rng = np.random.default_rng(0)
    found = sum(overfit_risk(True, rng) > EPSILON for _ in range(60))
    check_rate(found, 60, DELTA)


def test_a_router_learned_on_the_calibration_samples_is_refuted():
    rng = np.random.default_rng(0)
    found = sum(overfit_risk(False, rng) > EPSILON for _ in range(60))
    with pytest.raises(RefutedError):
        check_rate(found, 60, DELTA)
