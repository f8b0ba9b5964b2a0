"""The exit rule against a plain loop, and the values at its edges."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swiftsure.exits import NEVER, calm_decay, exit_indices, threshold_array
from tests.builders import LEVELS, first_exits, refused

JUST_BELOW = np.nextafter(np.float32(0.7), np.float32(0))


@st.composite
def cases(draw):
    n, n_early = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    values = st.sampled_from(LEVELS) | st.floats(0, 1, width=32)
    confidences = draw(hnp.arrays(np.float32, (n, n_early), elements=values))
    levels = values | st.just(math.inf)
    thresholds = draw(levels | hnp.arrays(np.float32, n_early, elements=levels))
    return confidences, thresholds, draw(st.booleans()), draw(st.integers(0, 5))


@given(cases())
def test_equals_a_plain_loop(case):
    confidences, thresholds, strict, min_exit = case
    exits = exit_indices(confidences, thresholds, strict=strict, min_exit=min_exit)
    levels = np.broadcast_to(np.float32(thresholds), confidences.shape[1:]).tolist()
    assert exits.tolist() == first_exits(confidences, levels, strict, min_exit)
    assert exits.dtype == np.int64


@given(cases())
def test_equals_the_running_maximum_form_for_a_shared_threshold(case):
    confidences, _, strict, _ = case
    running = np.maximum.accumulate(confidences, axis=1)
    for threshold in LEVELS:
        reached = running > np.float32(threshold) if strict else running >= np.float32(threshold)
        exits = exit_indices(confidences, threshold, strict=strict)
        assert np.array_equal(exits, (~reached).sum(axis=1))


def test_an_equal_confidence_exits_unless_strict():
    assert exit_indices([[0.5, 0.9]], 0.5).tolist() == [0]
    assert exit_indices([[0.5, 0.9]], 0.5, strict=True).tolist() == [1]


@pytest.mark.parametrize(("min_exit", "exit_"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_exits_before_min_exit_are_never_taken(min_exit, exit_):
    assert exit_indices([[0.9, 0.9, 0.9]], 0.5, min_exit=min_exit).tolist() == [exit_]


def test_each_exit_may_have_its_own_threshold():
    confidences = [[0.8, 0.5], [0.95, 0.1], [0.2, 0.2]]
    assert exit_indices(confidences, [0.9, 0.4]).tolist() == [1, 0, 2]
    assert exit_indices(confidences, [None, 0.4]).tolist() == [1, 2, 2]
    assert exit_indices(confidences, [0.1, None]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("never", [None, math.inf, NEVER, [None, None], [math.inf, None]])
def test_never_means_that_no_confidence_is_enough(never):
    assert exit_indices([[1.0, 1.0]], never).tolist() == [2]


def test_a_threshold_of_one_is_not_never():
    logits = np.asarray([100.0, 0.0], np.float32)
    softmax = np.exp(logits - 100) / np.exp(logits - 100).sum()
    assert softmax[0] == 1.0
    assert exit_indices([[softmax[0]]], 1.0).tolist() == [0]
    assert exit_indices([[softmax[0]]], None).tolist() == [1]


@pytest.mark.parametrize("confidence", [np.float32(0.7), 0.7])
@pytest.mark.parametrize("threshold", [np.float32(0.7), 0.7])
def test_both_sides_are_float32(confidence, threshold):
    assert float(np.float32(0.7)) < 0.7  # so float64 on one side would not exit
    assert exit_indices(np.asarray([[confidence]]), threshold).tolist() == [0]
    assert exit_indices(np.asarray([[confidence]]), threshold, strict=True).tolist() == [1]


def test_the_next_smaller_float32_does_not_exit():
    assert exit_indices([[JUST_BELOW]], 0.7).tolist() == [1]
    assert exit_indices([[0.7]], JUST_BELOW, strict=True).tolist() == [0]


def test_any_memory_layout_will_do():
    confidences = np.random.default_rng(0).random((20, 3))
    expected = exit_indices(confidences, 0.5)
    assert np.array_equal(exit_indices(np.asfortranarray(confidences), 0.5), expected)
    assert np.array_equal(exit_indices(confidences[::2], 0.5), expected[::2])


def test_an_infinite_confidence_does_not_pass_never():
    try:
        exits = exit_indices([[math.inf]], None)
    except ValueError:
        return
    assert exits.tolist() == [1]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([0.5, 0.5], 0.5), "confidences"),
        (([[np.nan]], 0.5), "confidences"),
        ((np.empty((0, 2)), 0.5), "confidences"),
        ((np.empty((2, 0)), 0.5), "confidences"),
        (([["a"]], 0.5), "confidences"),
        (([[0.5]], np.nan), "thresholds"),
        (([[0.5]], [0.5, 0.5]), "thresholds"),
        (([[0.5, 0.5]], [[0.5, 0.5]]), "thresholds"),
        (([[0.5]], "high"), "thresholds"),
        (([[0.5, 0.5]], [None, "high"]), "thresholds"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, name):
    with refused(name):
        exit_indices(*arguments)


@pytest.mark.parametrize("min_exit", [-1, 1.0, None])
def test_bad_min_exit_is_refused(min_exit):
    with refused("min_exit"):
        exit_indices([[0.5]], 0.5, min_exit=min_exit)


def test_thresholds_of_another_length_print_both_shapes():
    with pytest.raises(ValueError, match=r"\(n_exits - 1=2,\), but got \(3,\)"):
        exit_indices([[0.5, 0.5]], [0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (None, math.inf),
        (0.5, 0.5),
        (1, 1.0),
        ([None, 0.5], [math.inf, 0.5]),
        ([[None, 0.5], [1, 0]], [[math.inf, 0.5], [1, 0]]),
        ([True, False], [1, 0]),
    ],
)
def test_threshold_array(given_, expected):
    array = threshold_array(given_)
    assert array.dtype == np.float32
    assert np.array_equal(array, np.float32(expected))


# CALM's threshold over the steps of decoding


@pytest.mark.parametrize("temperature", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.8, 1.0])
def test_calm_decay_is_the_formula(threshold, temperature):
    steps = [0, 1, 7, 49, 50]
    expected = [0.9 * threshold + 0.1 * math.exp(-temperature * t / 50) for t in steps]
    decayed = calm_decay(threshold, steps, length=50, temperature=temperature)
    assert decayed.dtype == np.float32
    np.testing.assert_allclose(decayed, expected, rtol=1e-6)


def test_calm_decay_stays_in_the_unit_interval():
    assert calm_decay([1.2, -0.5], 0, length=10).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("never", [None, math.inf])
def test_calm_decay_leaves_never_alone(never):
    assert calm_decay(never, [0, 5, 10], length=10).tolist() == [math.inf] * 3
    assert calm_decay([0.5, never], 0, length=10)[1] == math.inf


def test_calm_decay_broadcasts_and_has_a_temperature_of_four():
    both = calm_decay(np.asarray([[0.2], [0.9]]), [0, 3, 6], length=6)
    assert both.shape == (2, 3)
    assert both[1].tolist() == calm_decay(0.9, [0, 3, 6], length=6, temperature=4.0).tolist()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"length": 0}, "length"),
        ({"length": 2.5}, "length"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"threshold": math.nan}, "threshold"),
        ({"step": ["a"]}, "step"),
    ],
)
def test_calm_decay_refuses_bad_input_by_name(arguments, name):
    with refused(name):
        calm_decay(**{"threshold": 0.5, "step": 0, "length": 10, **arguments})
