"""The names and calls that users rely on, as the documentation writes them."""

import ast
import inspect
import math
from pathlib import Path

import numpy as np
import pytest

import swiftsure as ss

N, EXITS, CLASSES, K = 400, 4, 3, 5
RNG = np.random.default_rng(0)
LABELS = RNG.integers(CLASSES, size=N)
LOGITS = RNG.normal(size=(N, EXITS, CLASSES)) + 4 * np.eye(CLASSES)[LABELS][:, None]
CONFIDENCES = RNG.random((N, EXITS - 1))
BRIER = 2 * RNG.random((N, EXITS))
DISTANCE = np.column_stack([0.2 * RNG.random((N, EXITS - 1)), np.zeros(N)])
GAPS = np.column_stack([np.zeros(N), RNG.choice([-1, 0, 1], size=(N, K - 1), p=[0.05, 0.9, 0.05])])
THRESHOLDS = [None, 0.9, 0.8, 0.7, 0.6]


@pytest.mark.parametrize("name", ss.__all__)
def test_every_public_name_resolves(name):
    value = getattr(ss, name)
    assert name in dir(ss)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__doc__


def test_type_checkers_see_every_public_name():
    tree = ast.parse(Path(ss.__file__).read_text("utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [each for block in blocks for each in block.body]
    seen = {alias.asname or alias.name for each in imports for alias in each.names}
    assert seen == set(ss.__all__) - {"__version__"}


def test_other_names_do_not():
    with pytest.raises(AttributeError, match="module 'swiftsure' has no attribute 'nonsense'"):
        _ = ss.nonsense


@pytest.fixture
def record():
    return ss.ExitRecord.from_logits(LOGITS, labels=LABELS, score="top1")


def test_a_record_from_logits():
    record = ss.ExitRecord.from_logits(LOGITS, labels=None, score="top1")
    assert (record.n, record.n_exits) == (N, EXITS)
    assert record.losses == {}


def test_a_record_from_arrays(tmp_path):
    record = ss.ExitRecord(
        CONFIDENCES,
        losses={"brier": BRIER},
        inconsistencies={"brier": DISTANCE},
        costs={"layers": np.arange(EXITS), "flops": RNG.random((N, EXITS))},
    )
    record.save(tmp_path / "record.parquet")
    loaded = ss.ExitRecord.load(tmp_path / "record.parquet")
    assert np.array_equal(loaded.losses["brier"], BRIER)
    several = ss.ExitRecord({"top1": CONFIDENCES, "entropy": CONFIDENCES}, losses={"brier": BRIER})
    assert set(several.confidences) == {"top1", "entropy"}


@pytest.mark.parametrize("costs", [np.arange(K), RNG.random((N, K))])
def test_a_threshold_record(costs):
    record = ss.ThresholdRecord(
        THRESHOLDS, losses={"rouge": RNG.random((N, K))}, costs={"flops": costs}
    )
    curve = record.curve(risk="gap", loss="rouge")
    assert curve.n_settings == K


def test_a_curve_of_a_record(record):
    curve = record.curve(risk="gap", loss="brier", score="top1", path=None)
    assert isinstance(curve, ss.RiskCurve)
    assert curve.n == N


def test_calibrate_and_the_policy(record, tmp_path):
    policy = ss.calibrate(
        record,
        risk="gap",
        loss="brier",
        control="ucb",
        bound="auto",
        epsilon=0.05,
        delta=0.1,
        path=None,
    )
    assert isinstance(policy.threshold, float)
    assert policy.thresholds.shape == (EXITS - 1,)
    assert policy.settings == {"threshold": policy.threshold}
    assert isinstance(policy.certificate, ss.Certificate)
    assert "0.05" in str(policy)
    policy.save(tmp_path / "policy.json")
    assert ss.Policy.load(tmp_path / "policy.json") == policy


def test_calibrate_several_risks(record):
    policy = ss.calibrate(
        record,
        [
            ss.Promise("zero_one", epsilon=0.01),
            ss.Promise("brier", risk="consistency", epsilon=0.05),
        ],
    )
    assert [promise.epsilon for promise in policy.certificate.promises] == [0.01, 0.05]


def test_a_policy_that_certifies_nothing(record):
    policy = ss.calibrate(record, loss="brier", epsilon=1e-6)
    assert policy.threshold is None
    assert policy.thresholds.tolist() == [math.inf] * (EXITS - 1)


def test_controls_of_a_curve_from_losses():
    curve = ss.RiskCurve.from_losses(THRESHOLDS, GAPS, costs=None, loss_range=(-1, 1))
    result = ss.control.ucb(curve, epsilon=0.05, delta=0.1, bound="wsr", seed=0)
    assert result.index is not None
    assert result.threshold == THRESHOLDS[result.index]
    for choose in (ss.control.empirical, ss.control.crc):
        assert isinstance(choose(curve, epsilon=0.5), ss.ControlResult)
    assert ss.control.ltt(curve, epsilon=0.05, delta=0.1, seed=0).index is not None
    nothing = ss.control.ucb(curve, epsilon=1e-6, delta=0.1, bound="wsr")
    assert (nothing.index, nothing.threshold) == (None, None)
