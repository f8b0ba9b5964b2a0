"""What a record says of its draw, in the numbers of certificates: costs, populations, budgets."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss

N = 300
PATH = (0.9, 0.5)
MEAN = ss.Promise(epsilon=0.2)
EXITS = ss.Promise(epsilon=0.3, among="exits")


@pytest.fixture(scope="module")
def record():
    rng = np.random.default_rng(0)
    losses = np.column_stack([rng.random((N, 2)) < 0.02, np.zeros(N)]).astype(float)
    made = ss.ExitRecord(
        rng.random((N, 2)),
        losses={"loss": losses},
        loss_ranges={"loss": (0, 1)},
        costs={"flops": [1.0, 2.0, 3.0]},
        full_costs={"flops": 2.5},
    )
    return made.sliced(np.where(np.arange(N) % 2, "a", "b"))


def weighted(record):
    return record.weighted({"a": 1.6, "b": 0.4}, max_weight=1.6)


def grouped(record):
    return record.grouped(np.arange(N) // 2, average="sample", max_size=4)


@pytest.mark.parametrize("known", [grouped, weighted, lambda record: weighted(grouped(record))])
def test_costs_are_means_over_all_samples_whatever_is_promised(record, known):
    """The samples that exit early are promised something; all of them cost something."""
    made = known(record)
    one = ss.Path.family([[0.5, 0.5]])
    exits, mean = (ss.calibrate(made, each, path=one) for each in (EXITS, MEAN))
    assert not exits.runs_full_model
    assert exits.certificate.costs.means["flops"] == pytest.approx(
        mean.certificate.costs.means["flops"]
    )


def test_a_population_of_groups_is_a_number_of_groups(record):
    groups = np.arange(N) // 2
    drawn = record.grouped(groups).drawn_from(160)  # fewer than there are samples
    assert ss.calibrate(drawn, MEAN, path=PATH).certificate.samples.population == 160
    with pytest.raises(ValueError, match=r"number of groups"):
        record.drawn_from(1000).grouped(groups)
    with pytest.raises(ValueError, match=r"population"):
        record.grouped(groups).drawn_from(140)


def test_the_slices_of_a_finite_population_have_unknown_sizes(record):
    with pytest.raises(ValueError, match="without replacement"):
        ss.calibrate(record.drawn_from(1000), replace(MEAN, within="each slice"), path=PATH)


def test_worst_shares_from_a_point_on_go_with_weights(record, tmp_path):
    """Weights may be 0, so weighted losses of at least t may be below t."""
    promise = ss.Promise(epsilon=0.5, worst=0.5, above=0.1)
    for known in (weighted, lambda each: weighted(grouped(each))):
        policy = ss.calibrate(known(record), promise, path=PATH)
        policy.save(tmp_path / "policy.json")
        assert ss.Policy.load(tmp_path / "policy.json") == policy


def test_one_budget_of_labels_is_for_all_slices():
    rng = np.random.default_rng(0)
    predictions = (rng.random((N, 1)) < 0.1) * np.array([1, 0])
    apart = (predictions != 0).astype(float)
    losses = np.where(apart.any(axis=1)[:, None], np.nan, 0.0) * np.ones(2)
    record = ss.ExitRecord(
        np.full((N, 1), 0.9),
        losses={"zero_one": losses},
        inconsistencies={"zero_one": apart},
        predictions=predictions,
    ).sliced(np.where(np.arange(N) % 2, "a", "b"))
    needed = np.bincount(np.arange(N)[apart.any(axis=1)] % 2)
    asked = []

    def labeller(ids):
        asked.extend(ids)
        return np.zeros(len(ids), int)

    budget = int(needed.max())  # enough for one slice
    promise = ss.Promise("zero_one", epsilon=0.3, within="each slice")
    ss.calibrate(record, promise, path=(0.5,), missing=ss.Ask(labeller, budget))
    assert 0 < len(asked) <= budget


def test_savings_of_a_growing_calibration_are_those_of_all_its_samples(record):
    request = ss.Calibration(MEAN, path=PATH)
    made = weighted(record)
    calibration = request.start(horizon=N)
    for rows in np.array_split(np.arange(N), 3):
        calibration.update(made.take(rows))
    grown, at_once = (
        each.certificate.costs.means["flops"] for each in (calibration.policy(), request.run(made))
    )
    assert grown == pytest.approx(at_once)
