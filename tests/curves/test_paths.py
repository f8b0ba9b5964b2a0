"""Paths: safest first, beginning with the full model."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swiftsure.curves.paths import Path
from tests.builders import LEVELS, first_exits, refused


def test_the_default_grid_is_fixed():
    path = Path.logit_grid()
    thresholds = path.thresholds
    assert thresholds.dtype == np.float32
    assert len(path) == len(thresholds) > 400
    assert thresholds[0] == math.inf
    assert thresholds[1] == 1.0
    assert thresholds[-1] == 0.0
    assert (np.diff(thresholds[1:]) < 0).all()


def test_the_default_grid_is_even_in_the_logit():
    inner = Path.logit_grid().thresholds[1:-1].astype(np.float64)
    inner = inner[inner < 0.999]  # nearer to 1 float32 itself is coarse
    logits = np.log(inner / (1 - inner))
    np.testing.assert_allclose(np.diff(logits), -0.05, atol=1e-3)
    assert logits[-1] == pytest.approx(-8.0, abs=1e-4)


def test_the_grid_follows_its_step_and_ends():
    thresholds = Path.logit_grid(step=1.0, high=2.0, low=-1.0).thresholds
    expected = [math.inf, 1.0, *(1 / (1 + math.exp(-x)) for x in (2, 1, 0, -1)), 0.0]
    np.testing.assert_allclose(thresholds, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments", [{"step": 0.0}, {"step": -1.0}, {"step": math.nan}, {"high": -9.0}]
)
def test_the_grid_refuses_a_step_or_ends_that_give_none(arguments):
    with refused("step"):
        Path.logit_grid(**arguments)


@given(hnp.arrays(np.float64, st.integers(1, 8), elements=st.sampled_from([*LEVELS, math.inf])))
def test_grid_sorts_drops_repeats_and_begins_with_never(values):
    thresholds = Path.grid(values).thresholds
    assert thresholds[0] == math.inf
    finite = sorted({float(np.float32(v)) for v in values if v < math.inf}, reverse=True)
    assert thresholds[1:].tolist() == finite


def test_grid_takes_none_for_never():
    assert (
        Path.grid([0.5, None, 0.9]).thresholds.tolist() == np.float32([math.inf, 0.9, 0.5]).tolist()
    )


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=5),
        elements=st.sampled_from(LEVELS) | st.floats(0, 1, width=32),
    )
)
def test_breakpoints_are_all_the_places_where_an_exit_changes(confidences):
    path = Path.breakpoints(confidences)
    assert path.thresholds[0] == math.inf
    largest = confidences.max()
    nobody = [] if largest == 1 else [np.nextafter(largest, np.float32(2))]
    breakpoints = sorted(set(confidences.ravel().tolist()), reverse=True)
    assert path.thresholds[1:].tolist() == [*nobody, *breakpoints]
    n_early = confidences.shape[1]
    settings = {tuple(first_exits(confidences, [t] * n_early)) for t in path.thresholds}
    between = (path.thresholds[1:] + path.thresholds[:-1]) / 2  # nothing new happens there
    others = {tuple(first_exits(confidences, [t] * n_early)) for t in [*between, 0.0, 2.0]}
    assert others <= settings


def test_family_keeps_its_order_and_gets_the_full_model_first():
    rows = [[0.9, 0.2], [0.5, 0.8], [0.9, 0.1]]
    path = Path.family(rows)
    assert path.thresholds.dtype == np.float32
    assert np.array_equal(path.thresholds[0], [math.inf, math.inf])
    assert np.array_equal(path.thresholds[1:], np.float32(rows))


@pytest.mark.parametrize("never", [None, math.inf])
def test_family_is_not_given_a_second_full_model(never):
    path = Path.family([[never, never], [never, 0.5]])
    assert path.thresholds.tolist() == [[math.inf, math.inf], [math.inf, 0.5]]


def test_family_with_a_half_open_first_row_still_gets_the_full_model():
    assert len(Path.family([[None, 0.5]])) == 2


def test_per_exit_repeats_a_shared_threshold():
    levels = Path.grid([0.9, 0.5]).per_exit(4)
    assert levels.shape == (3, 3)
    assert levels.flags.c_contiguous
    assert levels[1].tolist() == [np.float32(0.9)] * 3


def test_per_exit_passes_a_family_through_and_checks_its_width():
    path = Path.family([[0.9, 0.8]])
    assert np.array_equal(path.per_exit(3), path.thresholds)
    with pytest.raises(ValueError, match=r"`path` .*\(K, n_exits - 1=3\), but got \(2, 2\)"):
        path.per_exit(4)


CONFIDENCES = np.float32([[0.1, 0.6], [0.3, 0.6]])


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (None, Path.logit_grid()),
        ("logit", Path.logit_grid()),
        ("breakpoints", Path.breakpoints(CONFIDENCES)),
        ([0.5, 0.9], Path.grid([0.9, 0.5])),
        ([[0.5, None]], Path.family([[0.5, None]])),
        (Path.grid([0.4]), Path.grid([0.4])),
    ],
)
def test_of_takes_what_users_write(given_, expected):
    path = Path.of(given_, CONFIDENCES)
    assert np.array_equal(path.thresholds, expected.thresholds)
    assert path.kind == expected.kind


@pytest.mark.parametrize("thresholds", [np.asarray([math.inf, 0.7]), np.float32([0.7, 0.5])])
def test_a_path_made_by_hand_is_float32_and_begins_with_never(thresholds):
    try:
        path = Path(thresholds, "mine")
    except (ValueError, TypeError):
        return
    assert path.thresholds.dtype == np.float32
    assert path.thresholds[0] == math.inf


def test_kinds_tell_paths_apart():
    paths = [
        Path.logit_grid(),
        Path.grid([0.5]),
        Path.breakpoints(CONFIDENCES),
        Path.family([[0.5]]),
    ]
    assert len({path.kind for path in paths}) == len(paths)


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [math.nan],
        ["a"],
        [[0.5, math.nan]],
        0.5,
        [[[0.5]]],
        [[0.5], [0.5, 0.4]],
    ],
)
def test_bad_paths_are_refused_by_name(bad):
    with refused("path"):
        Path.of(bad, CONFIDENCES)


def test_an_unknown_path_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"logit, breakpoints; .* Did you mean 'breakpoints'"):
        Path.of("breakpoint", CONFIDENCES)
