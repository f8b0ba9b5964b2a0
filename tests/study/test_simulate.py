"""The exact values of the simulated population against plain Monte Carlo, and its properties."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftsure.study.simulate import Population, SimulatedSample

N = 400_000
POPULATIONS = {
    "plain": Population(n_exits=4, n_classes=3),
    "overconfident": Population(n_exits=4, n_classes=3, overconfidence=3.0),
    "overthinking": Population(n_exits=4, n_classes=3, overthinking=0.3),
    "both": Population(
        n_exits=3, n_classes=5, difficulty=0.55, overconfidence=1.5, overthinking=0.2
    ),
    "binary": Population(n_exits=2, n_classes=2, overthinking=0.1),
}
SHARED = [math.inf, 0.999, 0.95, 0.8, 0.6, 0.0]
PER_EXIT = {  # for n_exits - 1 = 1, 2, 3
    1: [[0.9], [math.inf]],
    2: [[0.95, 0.7], [0.7, 0.95], [math.inf, 0.8], [0.8, math.inf]],
    3: [[0.95, 0.9, 0.7], [0.7, 0.9, 0.95], [math.inf, 0.9, 0.6], [0.9, math.inf, 0.8]],
}
RISKS = [
    ("gap", "zero_one"),
    ("zero-bounded gap", "zero_one"),
    ("gap", "brier"),
    ("consistency", "zero_one"),
    ("consistency", "brier"),
]


@dataclasses.dataclass
class Drawn:
    """A large sample, evaluated at every exit."""

    confidences: np.ndarray  # (n, exits)
    right: np.ndarray  # (n, exits)
    losses: dict[str, np.ndarray]  # against the labels, each (n, exits)
    inconsistencies: dict[str, np.ndarray]  # against the last exit, each (n, exits)


@functools.cache
def drawn(name):
    sample = POPULATIONS[name].sample(N, seed=20240607)
    exps = np.exp(sample.logits.astype(np.float64))
    probabilities = exps / exps.sum(axis=2, keepdims=True)
    predictions = probabilities.argmax(axis=2)
    targets = np.eye(POPULATIONS[name].n_classes)[sample.labels]
    right = predictions == sample.labels[:, None]
    return Drawn(
        probabilities.max(axis=2),
        right,
        {
            "zero_one": np.where(right, 0.0, 1.0),
            "brier": ((probabilities - targets[:, None]) ** 2).sum(axis=2),
        },
        {
            "zero_one": np.where(predictions == predictions[:, -1:], 0.0, 1.0),
            "brier": ((probabilities - probabilities[:, -1:]) ** 2).sum(axis=2),
        },
    )


def leave(confidences, row):
    """Exit of each sample, by the rule in words: the first exit that is confident enough."""
    exits = np.full(len(confidences), confidences.shape[1] - 1)
    for exit_ in reversed(range(confidences.shape[1] - 1)):
        exits[confidences[:, exit_] >= row[exit_]] = exit_
    return exits


def observed(name, row, risk, loss):
    sample = drawn(name)
    if risk.endswith("gap"):
        relative = sample.losses[loss] - sample.losses[loss][:, -1:]
    else:
        relative = sample.inconsistencies[loss]
    values = relative[np.arange(N), leave(sample.confidences, row)]
    return np.maximum(values, 0) if risk.startswith("zero-bounded") else values


def assert_mean(values, exact):
    """The mean of `values` lies within 5 standard errors, and some rounding, of `exact`."""
    error = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - exact) <= 5 * error + 1e-6


def as_rows(population, thresholds):
    rows = np.asarray(thresholds, dtype=float)
    return np.repeat(rows[:, None], population.n_exits - 1, axis=1) if rows.ndim == 1 else rows


@pytest.mark.parametrize("kind", ["shared", "per_exit"])
@pytest.mark.parametrize(("risk", "loss"), RISKS)
@pytest.mark.parametrize("name", POPULATIONS)
def test_risk_is_the_mean_over_samples(name, risk, loss, kind):
    population = POPULATIONS[name]
    thresholds = SHARED if kind == "shared" else PER_EXIT[population.n_exits - 1]
    exact = population.risk(thresholds, risk=risk, loss=loss)
    assert exact.shape == (len(thresholds),)
    for row, value in zip(as_rows(population, thresholds), exact, strict=True):
        assert_mean(observed(name, row, risk, loss), value)


@pytest.mark.parametrize("kind", ["shared", "per_exit"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_exit_probabilities_are_the_share_of_samples(name, kind):
    population = POPULATIONS[name]
    thresholds = SHARED if kind == "shared" else PER_EXIT[population.n_exits - 1]
    exact = population.exit_probabilities(thresholds)
    assert exact.shape == (len(thresholds), population.n_exits)
    for row, shares in zip(as_rows(population, thresholds), exact, strict=True):
        exits = leave(drawn(name).confidences, row)
        for exit_, share in enumerate(shares):
            assert_mean((exits == exit_).astype(float), share)


@pytest.mark.parametrize("loss", ["zero_one", "brier"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_mean_losses_are_the_mean_over_samples(name, loss):
    exact = POPULATIONS[name].mean_losses(loss)
    assert exact.shape == (POPULATIONS[name].n_exits,)
    for exit_, value in enumerate(exact):
        assert_mean(drawn(name).losses[loss][:, exit_], value)


@pytest.mark.parametrize("name", ["plain", "overconfident"])
def test_confidences_are_calibrated_unless_overconfident(name):
    for exit_ in range(POPULATIONS[name].n_exits):
        confidences = drawn(name).confidences[:, exit_]
        excess = confidences - drawn(name).right[:, exit_]
        order = np.argsort(confidences)
        for part in np.array_split(order, 10):
            error = excess[part].std() / math.sqrt(len(part))
            # The last exit stays calibrated; the others claim too much at every level.
            if name == "plain" or exit_ == POPULATIONS[name].n_exits - 1:
                assert abs(excess[part].mean()) <= 5 * error
            else:
                assert excess[part].mean() > 5 * error


def test_defaults_look_like_a_trained_classifier():
    population = Population()
    accuracies = population.accuracies
    assert accuracies[0] == pytest.approx(0.75, abs=0.01)
    assert accuracies[-1] == pytest.approx(0.92, abs=0.01)
    assert np.all(np.diff(accuracies) > 0)

    sample = population.sample(50_000, seed=1)
    confidences = np.exp(sample.logits.max(axis=2))
    predictions = sample.logits.argmax(axis=2)
    assert np.median(confidences[:, -1]) > 0.97  # easy samples crowd near 1
    differ = predictions[:, 0] != predictions[:, -1]
    hard, easy = np.quantile(confidences[:, 0], [0.25, 0.5])
    assert differ[confidences[:, 0] <= hard].mean() > 0.5
    assert differ[confidences[:, 0] >= easy].mean() < 0.05
    wrong = (predictions != sample.labels[:, None]).astype(int)
    shares = [np.mean(wrong[:, 0] - wrong[:, -1] == value) for value in (-1, 0, 1)]
    assert min(shares) > 0.01


@pytest.mark.parametrize("n_classes", [2, 10, 100])
def test_accuracy_grows_with_the_exit_and_falls_with_the_difficulty(n_classes):
    difficulties = [0.05, 0.2, 0.4, 0.6, 0.8, 0.95]
    accuracies = np.array(
        [Population(n_classes=n_classes, difficulty=d).accuracies for d in difficulties]
    )
    assert np.all(np.diff(accuracies, axis=1) > 0)
    assert np.all(np.diff(accuracies, axis=0) < 0)
    assert np.all((accuracies > 1 / n_classes) & (accuracies < 1))


def test_overconfidence_raises_confidences_and_leaves_accuracies():
    plain, sure = Population(), Population(overconfidence=2.0)
    np.testing.assert_allclose(sure.accuracies, plain.accuracies, rtol=1e-12)
    leaving, leaving_sure = (p.exit_probabilities([0.8, 0.95])[:, 0] for p in (plain, sure))
    assert np.all(leaving_sure > leaving + 0.05)


def test_trusting_overconfident_exits_fails():
    assert Population().risk([0.95])[0] < 0.05
    assert Population(overconfidence=3.0).risk([0.95])[0] > 0.05


def test_overthinking_lowers_later_accuracies_in_proportion():
    plain, astray = Population(n_exits=5).accuracies, Population(overthinking=0.2).accuracies
    np.testing.assert_allclose(astray, plain * [1, 0.95, 0.9, 0.85, 0.8], rtol=1e-12)


def test_overthinking_lasts():
    sample = Population(n_exits=4, n_classes=3, overthinking=1.0).sample(5_000, seed=2)
    right = sample.logits.argmax(axis=2) == sample.labels[:, None]
    assert not right[:, -1].any()
    assert right[:, 2].mean() == pytest.approx(0.3, abs=0.05)


@settings(max_examples=40, deadline=None)
@given(
    n_exits=st.integers(2, 5),
    n_classes=st.sampled_from([2, 3, 10, 1000]),
    difficulty=st.floats(0.01, 0.99),
    overconfidence=st.floats(0, 5),
    overthinking=st.floats(0, 1),
    thresholds=st.lists(st.floats(-0.5, 1.5) | st.just(math.inf), min_size=1, max_size=6),
)
def test_properties(n_exits, n_classes, difficulty, overconfidence, overthinking, thresholds):
    population = Population(n_exits, n_classes, difficulty, overconfidence, overthinking)
    probabilities = population.exit_probabilities(thresholds)
    assert np.all(probabilities >= 0)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-12)

    gap = population.risk(thresholds)
    bounded = population.risk(thresholds, "zero-bounded gap")
    differ = population.risk(thresholds, risk="consistency")
    tiny = 1e-12
    assert np.all(gap <= bounded + tiny)
    assert np.all(bounded >= -tiny)
    assert np.all(bounded <= differ + tiny)  # a wrong answer for a right one is another answer
    assert np.all(differ <= 1 - probabilities[:, -1] + tiny)
    assert np.all(np.abs(gap) <= differ + tiny)
    brier = population.risk(thresholds, risk="consistency", loss="brier")
    assert np.all((brier >= -tiny) & (brier <= 2 + tiny))
    assert np.all(np.abs(population.risk(thresholds, loss="brier")) <= 2)


@pytest.mark.parametrize("never", [None, math.inf, 1.0, 1.5])
@pytest.mark.parametrize(("risk", "loss"), RISKS)
def test_never_exiting_risks_nothing(never, risk, loss):
    population = Population(n_exits=3, overconfidence=5.0, overthinking=0.5)
    for thresholds in ([never], [[never, never]]):
        assert population.risk(thresholds, risk, loss).tolist() == [0.0]
        assert population.exit_probabilities(thresholds).tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.parametrize("loss", ["zero_one", "brier"])
def test_exiting_always_has_the_first_exits_loss(loss):
    population = Population(overconfidence=1.0, overthinking=0.1)
    means = population.mean_losses(loss)
    for threshold in (0.0, 1 / population.n_classes, -math.inf):
        gap = population.risk([threshold], loss=loss)
        np.testing.assert_allclose(gap, means[0] - means[-1], rtol=1e-12)


def test_shared_thresholds_are_equal_per_exit_thresholds():
    population = Population(n_exits=3, overthinking=0.1)
    rows = [[0.9, 0.9], [None, None], [0.5, 0.5]]
    np.testing.assert_array_equal(population.risk([0.9, None, 0.5]), population.risk(rows))
    np.testing.assert_array_equal(
        population.risk([[0.9, None]]), population.risk(np.array([[0.9, np.inf]]))
    )
    assert population.risk([]).shape == (0,)


def test_sample_has_the_promised_form():
    sample = Population(n_exits=3, n_classes=4).sample(1000, seed=3)
    assert isinstance(sample, SimulatedSample)
    assert sample.logits.shape == (1000, 3, 4)
    assert sample.logits.dtype == np.float32
    assert sample.labels.shape == (1000,)
    assert sample.labels.dtype == np.int64
    assert set(sample.labels.tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(np.exp(sample.logits).sum(axis=2), 1, rtol=1e-5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample.labels = sample.labels


@pytest.mark.parametrize("n_classes", [2, 10, 1000])
def test_extreme_confidences_survive_float32(n_classes):
    population = Population(n_classes=n_classes, difficulty=0.5, overconfidence=5.0)
    logits = population.sample(20_000 if n_classes < 1000 else 2_000, seed=4).logits
    assert np.isfinite(logits).all()
    exps = np.exp(logits - logits.max(axis=2, keepdims=True))
    confidences = 1 / exps.sum(axis=2)
    assert confidences.dtype == np.float32
    assert confidences.max() < 1  # so that a threshold of 1 never exits, as `risk` has it
    two = np.partition(logits, -2, axis=2)[:, :, -2:]
    assert np.all(two[:, :, 1] > two[:, :, 0])


def test_seed_decides_the_sample():
    population = Population()
    first, again, other = (population.sample(50, seed=seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first.logits, again.logits)
    np.testing.assert_array_equal(first.labels, again.labels)
    assert not np.array_equal(first.logits, other.logits)

    rng = np.random.default_rng(7)
    np.testing.assert_array_equal(population.sample(50, rng).logits, first.logits)
    assert not np.array_equal(population.sample(50, rng).logits, first.logits)


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"n_exits": 1}, ValueError, "`n_exits` must be at least 2, but got 1."),
        ({"n_exits": 2.5}, TypeError, "`n_exits` must be a whole number, but got 2.5."),
        ({"n_classes": 1}, ValueError, "`n_classes` must be at least 2, but got 1."),
        ({"n_classes": True}, TypeError, "`n_classes` must be a whole number, but got True."),
        ({"difficulty": 0.0}, ValueError, "`difficulty` must be in (0, 1), but got 0.0."),
        ({"difficulty": 1.0}, ValueError, "`difficulty` must be in (0, 1), but got 1.0."),
        ({"difficulty": math.nan}, ValueError, "`difficulty` must be in (0, 1), but got nan."),
        ({"overconfidence": -0.1}, ValueError, "`overconfidence` must be in [0, 5], but got -0.1."),
        ({"overconfidence": 5.1}, ValueError, "`overconfidence` must be in [0, 5], but got 5.1."),
        ({"overthinking": -0.1}, ValueError, "`overthinking` must be in [0, 1], but got -0.1."),
        ({"overthinking": 1.1}, ValueError, "`overthinking` must be in [0, 1], but got 1.1."),
    ],
)
def test_population_refuses(parameters, error, message):
    with pytest.raises(error) as caught:
        Population(**parameters)
    assert str(caught.value) == message


def test_sample_refuses():
    with pytest.raises(ValueError, match="`n` must be at least 1, but got 0"):
        Population().sample(0, seed=0)
    with pytest.raises(TypeError, match=r"`n` must be a whole number, but got 10\.0"):
        Population().sample(10.0, seed=0)


@pytest.mark.parametrize("thresholds", [0.5, None, [[0.5, 0.5]], [[[0.5, 0.5, 0.5]]]])
def test_shapes_of_thresholds_are_checked(thresholds):
    population = Population(n_exits=4)
    shape = np.shape(np.asarray(thresholds, dtype=object))
    expected = f"`thresholds` must have shape (K,) or (K, n_exits - 1) = (K, 3), but got {shape}."
    for method in (population.risk, population.exit_probabilities):
        with pytest.raises(ValueError, match="must have shape") as caught:
            method(thresholds)
        assert str(caught.value) == expected


def test_risk_refuses():
    population = Population()
    with pytest.raises(ValueError, match="must not hold NaN"):
        population.risk([0.5, math.nan])
    with pytest.raises(
        ValueError, match="`risk` must be one of: gap, zero-bounded gap, consistency; but got 'x'"
    ):
        population.risk([0.5], risk="x")
    with pytest.raises(ValueError, match="`loss` must be one of: zero_one, brier; but got 'x'"):
        population.risk([0.5], loss="x")
    with pytest.raises(ValueError, match="`loss` must be one of: zero_one, brier; but got 'x'"):
        population.mean_losses("x")
    with pytest.raises(ValueError, match="`loss` must be one of: zero_one; but got 'brier'"):
        population.risk([0.5], "zero-bounded gap", "brier")
