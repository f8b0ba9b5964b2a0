"""A split draws its samples at random: files sorted by outcome are as safe as any.

The exact test needs no order of the samples, but which samples it sees is decided by the split.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.curves.sample_order import SampleOrder
from tests.guarantees.checkers import RefutedError, check_rate

RISK, EPSILON, DELTA, N, SIZE = 0.051, 0.05, 0.1, 1500, 300
PROMISE = {"risk": "consistency", "epsilon": EPSILON, "delta": DELTA, "path": [0.5]}
DRAWN = "split by a seed drawn at random from the operating system"
GIVEN = "came in random order before they were split by seed"


def sorted_record(rng, n=N, descending=False, **fields):
    """A record whose early exit is wrong too often, sorted by whether it is."""
    wrong = np.sort(rng.random(n) < RISK)[:: -1 if descending else 1]
    return ss.ExitRecord(
        np.ones((n, 1)),
        inconsistencies={"zero_one": np.column_stack([wrong, np.zeros(n)])},
        costs={"flops": [1.0, 2.0]},
        **fields,
    )


def check_splits(draw, draws, **fields):
    """Raise if a setting with too high a risk is certified too often."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(draws):
        policy = ss.calibrate(draw(sorted_record(rng, **fields)), **PROMISE)
        found += not policy.runs_full_model
    return check_rate(found, draws, DELTA)


def sampled(folder, record, **seed):
    """A sample of the record in a folder of two files."""
    for number, rows in enumerate(np.array_split(np.arange(record.n), 2)):
        record.take(rows).save(folder / f"{number}.parquet", durable=False)
    return ss.ShardedRecord(folder).sample(SIZE, **seed)


def unluckiest_seed():
    """The seed, of some, that draws the fewest samples from the end of the file."""
    rows = [SampleOrder(seed, drawn=False).draw_units(N, SIZE) for seed in range(40)]
    return int(np.argmin([(each >= N * (1 - RISK)).sum() for each in rows]))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("groups", [None, np.arange(N)], ids=["samples", "groups"])
def test_a_split_of_a_sorted_file_keeps_delta(descending, groups):
    check_splits(lambda r: r.split(SIZE)[0], 100, descending=descending, groups=groups)


def test_a_sample_of_a_sorted_folder_keeps_delta(tmp_path):
    check_splits(partial(sampled, tmp_path), 60, n=1700)


def test_one_seed_for_every_sorted_file_is_refuted():
    with pytest.raises(RefutedError):
        check_splits(lambda record: record.split(SIZE, seed=unluckiest_seed())[0], 100)


class Sure:
    """A classifier that is always sure of what a column of its input says."""

    def __init__(self, column):
        self.column = column

    def get_params(self, deep=True):
        return {"column": self.column}

    def set_params(self, **_):
        return self

    def fit(self, X, y):
        self.classes_ = np.unique(y)
        return self

    def predict_proba(self, X):
        return np.eye(2)[np.asarray(X)[:, self.column].astype(int)]


def cascade(rng, random_state=None, epsilon=EPSILON, n=N):
    """A cascade whose small model errs too often, fitted on a file sorted by that."""
    pytest.importorskip("sklearn")
    y = rng.integers(0, 2, n)
    wrong = np.sort(rng.random(n) < RISK)
    X = np.column_stack([np.where(wrong, 1 - y, y), y]).astype(float)
    found = ss.CertifiedCascade(
        [Sure(0), Sure(1)], epsilon=epsilon, calibration_size=0.2, random_state=random_state
    )
    return found.fit(X, y)


def test_a_cascade_fitted_on_sorted_data_keeps_delta():
    """Also where scikit-learn's own generator was seeded."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(60):
        np.random.seed(30)  # noqa: NPY002
        found += not cascade(rng).policy_.runs_full_model
    check_rate(found, 60, DELTA)


def calibrated(draw):
    """A policy of the samples that are drawn from a sorted record, certified at a high level."""
    record = sorted_record(np.random.default_rng(0))
    return ss.calibrate(draw(record), **PROMISE | {"epsilon": 0.2})


def through_a_file(folder, record):
    record.save(folder / "part.parquet")
    return ss.load_record(folder / "part.parquet")


def grown(record):
    promise = ss.Promise(risk="consistency", epsilon=0.2)
    calibration = ss.Calibration(promise, delta=DELTA, path=[0.5]).start()
    for part in record.split(200, seed=record.order.splits[-1]):
        calibration.update(part)
    return calibration.policy()


DOORS = {
    "the first part": lambda seed, _: calibrated(lambda r: r.split(SIZE, seed=seed)[0]),
    "the rest": lambda seed, _: calibrated(lambda r: r.split(SIZE, seed=seed)[1]),
    "a file": lambda seed, path: calibrated(
        lambda r: through_a_file(path, r.split(SIZE, seed=seed)[0])
    ),
    "some of a part": lambda seed, _: calibrated(
        lambda r: r.split(SIZE, seed=seed)[0].take(np.arange(200))
    ),
    "joined to others": lambda seed, _: calibrated(
        lambda r: ss.ExitRecord.concatenate(
            [r.take([N - 1]), r.take(np.arange(N - 1)).split(SIZE, seed=seed)[0]]
        )
    ),
    "a folder": lambda seed, path: calibrated(lambda r: sampled(path, r, seed=seed)),
    "a folder of parts": lambda seed, path: calibrated(
        lambda r: sampled(path, r.split(SIZE, seed=seed)[0])
    ),
    "a folder on disk": lambda seed, path: calibrated(
        lambda r: (r.split(SIZE, seed=seed)[0].save(path / "a.parquet"), ss.ShardedRecord(path))[1]
    ),
    "growing": lambda seed, _: grown(
        sorted_record(np.random.default_rng(0)).split(SIZE, seed=seed)[0]
    ),
    "each slice": lambda seed, _: ss.calibrate(
        sorted_record(np.random.default_rng(0), slices=np.arange(N) % 2).split(SIZE, seed=seed)[0],
        ss.Promise(risk="consistency", epsilon=0.2, within="each slice"),
        path=[0.5],
    )["0"],
    "all slices": lambda seed, _: ss.calibrate(
        sorted_record(np.random.default_rng(0), slices=np.arange(N) % 2).split(SIZE, seed=seed)[0],
        ss.Promise(risk="consistency", epsilon=0.2, within="slices"),
        path=[0.5],
    ),
    "a budget": lambda seed, _: (
        ss.planning.lowest_epsilon(
            sorted_record(np.random.default_rng(0)).split(SIZE, seed=seed)[0],
            saving=0.3,
            risk="consistency",
            bound="binomial",
        ).policy
    ),
    "a pilot": lambda seed, _: ss.calibrate(
        sorted_record(np.random.default_rng(0), order=seed),
        **PROMISE | {"epsilon": 0.2, "path": ss.Path.learn(200)},
    ),
    "the best of several": lambda seed, _: ss.calibrate_best(
        [sorted_record(np.random.default_rng(0), order=seed)],
        ss.Calibration(ss.Promise(risk="consistency", epsilon=0.2), delta=DELTA, path=[0.5]),
        split=200,
    ),
    "a cascade": lambda seed, _: cascade(np.random.default_rng(0), seed, 0.2).policy_,
}


@pytest.mark.parametrize("door", DOORS)
def test_certificates_say_what_a_split_rests_on(door, tmp_path):
    """Whatever tests the samples: the exact test here needs no order of them."""
    given, drawn = (str(DOORS[door](seed, _new(tmp_path, seed))) for seed in (0, None))
    assert GIVEN in given
    assert GIVEN not in drawn
    assert DRAWN in drawn


def _new(folder, seed):
    found = folder / str(seed)
    found.mkdir()
    return found


def test_a_record_that_was_not_split_says_nothing():
    stated = str(calibrated(lambda record: record))
    assert GIVEN not in stated
    assert DRAWN not in stated


def test_the_seed_of_a_split_is_recorded_and_draws_the_same_again(tmp_path):
    record = sorted_record(np.random.default_rng(0))
    part, rest = record.split(SIZE)
    (seed,) = part.order.splits
    assert seed.drawn
    assert rest.order.splits == (seed,) == through_a_file(tmp_path, part).order.splits
    assert np.array_equal(record.split(SIZE, seed=seed)[0].ids, part.ids)
    assert record.split(SIZE)[0].order.splits != (seed,)
    assert part.order.seed == record.order.seed
    twice = part.split(100, seed=3)[0].order.splits
    assert twice == (seed, SampleOrder(3, drawn=False))


def test_a_given_seed_does_not_pass_for_a_drawn_one():
    record = replace(sorted_record(np.random.default_rng(0)), order=5)
    assert record.split(SIZE)[0].order.splits[0].drawn
    assert not record.split(SIZE, seed=5)[0].order.splits[0].drawn
