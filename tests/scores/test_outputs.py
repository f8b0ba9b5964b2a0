"""Scores against their definitions, told naively."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import special, stats

from swiftsure import scores
from tests.builders import refused

STEP = 2.0**-24
"""Scores are rounded to multiples of this."""


def distributions(shape=(6, 3), n_classes=7, seed=0):
    return np.random.default_rng(seed).dirichlet(np.full(n_classes, 0.3), size=shape)


def test_probabilities_are_the_softmax():
    logits = np.random.default_rng(0).normal(size=(5, 3, 4), scale=5)
    np.testing.assert_allclose(scores.probabilities(logits), special.softmax(logits, axis=-1))


def test_probabilities_are_tempered():
    logits = np.random.default_rng(0).normal(size=(5, 3, 4))
    scale = np.asarray([0.5, 1.0, 2.0])[:, None]
    np.testing.assert_allclose(
        scores.probabilities(logits, scale), special.softmax(logits / scale, axis=-1)
    )


def test_probabilities_do_not_overflow():
    result = scores.probabilities(np.asarray([[1e5, 0.0], [-1e5, -1e5]], np.float32))
    assert result.dtype == np.float64
    assert result.tolist() == [[1.0, 0.0], [0.5, 0.5]]


@pytest.mark.parametrize("bad", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_probabilities_refuse_what_is_not_finite(bad):
    with refused("logits"):
        scores.probabilities([[0.0, 1.0], bad])


def test_masked_classes_have_probability_zero():
    result = scores.probabilities([[0.0, -math.inf, 0.0], [-math.inf, 3.0, -math.inf]], 2.0)
    assert result.tolist() == [[0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]


def test_top1_is_the_largest():
    p = distributions()
    expected = [[max(row) for row in rows] for rows in p.tolist()]
    np.testing.assert_allclose(scores.top1(p), expected, rtol=0, atol=STEP)


def test_top_diff_is_first_less_second():
    p = distributions()
    expected = [[np.subtract(*sorted(row)[:-3:-1]) for row in rows] for rows in p.tolist()]
    np.testing.assert_allclose(scores.top_diff(p), expected, rtol=0, atol=STEP)


def test_top_diff_of_equal_leaders_is_zero():
    assert scores.top_diff([[0.4, 0.2, 0.4]]).tolist() == [0.0]


@pytest.mark.parametrize("n_classes", [2, 7, 100])
def test_entropy_is_one_less_its_share_of_the_largest(n_classes):
    p = distributions(n_classes=n_classes)
    expected = 1 - stats.entropy(p, axis=-1) / math.log(n_classes)
    np.testing.assert_allclose(scores.entropy(p), expected, atol=1e-7)


@pytest.mark.parametrize("n_classes", [2, 5, 1000])
def test_one_hot_is_sure(n_classes):
    one_hot = np.eye(n_classes)
    for name in scores.SCORES:
        assert (scores.SCORES[name](one_hot) == 1.0).all(), name


@pytest.mark.parametrize("n_classes", [2, 5, 1000])
def test_uniform_is_least_sure(n_classes):
    uniform = np.full((1, n_classes), 1 / n_classes)
    assert scores.top1(uniform)[0] == pytest.approx(1 / n_classes, rel=0, abs=STEP)
    assert scores.top_diff(uniform)[0] == 0.0
    assert scores.entropy(uniform)[0] == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("name", list(scores.SCORES))
def test_scores_are_float32_in_the_unit_interval_without_the_class_axis(name):
    score = scores.SCORES[name](
        scores.probabilities(np.random.default_rng(0).normal(size=(50, 4, 3)))
    )
    assert score.dtype == np.float32
    assert score.shape == (50, 4)
    assert score.min() >= 0.0
    assert score.max() <= 1.0


@pytest.mark.parametrize("name", list(scores.SCORES))
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 20.0])
def test_scores_are_multiples_of_a_step(name, scale):
    """So that errors of 1e-15 do not show, also near 0, where float32 is finer."""
    logits = scale * np.random.default_rng(0).normal(size=(500, 10))
    steps = scores.SCORES[name](scores.probabilities(logits)) / STEP
    assert np.array_equal(steps, np.round(steps))


def test_the_largest_logit_is_the_most_probable_class():
    """Also where softmax cannot tell it from the next."""
    logits = np.asarray([[0.0, 1e-20, -3.0], [0.0, 0.0, 5e-324], [1.0, np.nextafter(1, 2), 1.0]])
    for temperature in (1.0, 20.0):
        found = scores.probabilities(logits, temperature)
        assert found.argmax(axis=-1).tolist() == [1, 2, 1]
        np.testing.assert_allclose(found, special.softmax(logits / temperature, axis=-1))


@pytest.mark.parametrize("score", [scores.top_diff, scores.entropy])
def test_one_class_is_refused(score):
    with refused("probabilities"):
        score([[1.0]])


# Images


def smallest_patch_mean(image, rows, columns):
    """Slide the window over every place, cut to the image where it is larger."""
    rows, columns = min(rows, image.shape[0]), min(columns, image.shape[1])
    return min(
        image[top : top + rows, left : left + columns].mean()
        for top in range(image.shape[0] - rows + 1)
        for left in range(image.shape[1] - columns + 1)
    )


@given(
    hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=3, max_dims=3, max_side=7),
        elements=st.floats(0, 1),
    ),
    st.integers(1, 9) | st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_patch_is_the_least_mean_of_a_sliding_window(images, size):
    rows, columns = (size, size) if isinstance(size, int) else size
    expected = [smallest_patch_mean(image, rows, columns) for image in images]
    np.testing.assert_allclose(scores.patch(images, size), expected, atol=1e-6)


def test_patch_of_one_pixel_is_the_minimum_and_of_all_pixels_the_mean():
    images = np.random.default_rng(0).random((2, 3, 8, 5))
    np.testing.assert_allclose(scores.patch(images, 1), images.min(axis=(2, 3)), atol=1e-6)
    np.testing.assert_allclose(scores.patch(images, 100), images.mean(axis=(2, 3)), rtol=1e-6)
    np.testing.assert_allclose(scores.patch(images), scores.mean(images), rtol=1e-6)


def test_patch_finds_the_dark_corner_of_a_large_image():
    image = np.ones((200, 300))
    image[-50:, -50:] = 0.25
    assert scores.patch(image).tolist() == pytest.approx(0.25, abs=1e-6)
    assert scores.patch(image, (100, 50)).tolist() == pytest.approx(0.625, abs=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 0.5, 0.99, 1.0])
def test_quantile_interpolates_between_sorted_pixels(q):
    images = np.random.default_rng(1).random((4, 3, 5))
    expected = []
    for image in images:
        pixels = sorted(image.ravel().tolist())
        place = q * (len(pixels) - 1)
        below = math.floor(place)
        above = min(below + 1, len(pixels) - 1)
        expected.append(pixels[below] + (place - below) * (pixels[above] - pixels[below]))
    np.testing.assert_allclose(scores.quantile(images, q), expected, rtol=1e-6)


def test_quantile_is_by_default_the_lower_quartile():
    images = np.random.default_rng(1).random((4, 3, 5))
    assert np.array_equal(scores.quantile(images), scores.quantile(images, 0.25))


def test_mean_of_pixels():
    images = np.random.default_rng(1).random((2, 4, 3, 5))
    expected = [[image.ravel().sum() / 15 for image in row] for row in images]
    np.testing.assert_allclose(scores.mean(images), expected, rtol=1e-6)


@pytest.mark.parametrize("name", list(scores.AGGREGATES))
def test_aggregates_keep_the_leading_axes(name):
    score = scores.AGGREGATES[name](np.full((2, 3, 4, 5), 0.5))
    assert score.shape == (2, 3)
    assert score.dtype == np.float32
    np.testing.assert_allclose(score, 0.5)


@pytest.mark.parametrize("name", list(scores.AGGREGATES))
@pytest.mark.parametrize("pixels", [[0.5, 0.5], np.empty((2, 0, 3)), [["a"]]])
def test_aggregates_refuse_what_is_no_image(name, pixels):
    with refused("pixels"):
        scores.AGGREGATES[name](pixels)


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_quantile_refuses_a_level_outside_its_range(q):
    with refused("q"):
        scores.quantile([[0.5]], q)


@pytest.mark.parametrize("size", [0, -1, (2, 0), (2.0, 2), True, 2.5])
def test_patch_refuses_sizes_that_are_none(size):
    with refused("size"):
        scores.patch([[0.5]], size)


@pytest.mark.parametrize("name", list(scores.IMAGE_SCORES))
def test_image_scores_are_an_aggregate_of_the_pixels_scores(name):
    aggregate, _, score = name.partition("_")
    p = distributions(shape=(2, 3, 60, 55), n_classes=4)
    found = scores.IMAGE_SCORES[name](p)
    assert found.shape == (2, 3)
    assert found.dtype == np.float32
    for place in np.ndindex(2, 3):
        pixels = np.asarray([[scores.SCORES[score](one) for one in row] for row in p[place]])
        expected = {
            "mean": pixels.mean(),
            "quantile": np.quantile(pixels, 0.25),
            "patch": smallest_patch_mean(pixels, 50, 50),
        }
        assert found[place] == pytest.approx(expected[aggregate], abs=1e-6)


def test_image_scores_are_named_by_what_they_are():
    assert len(scores.IMAGE_SCORES) == 9
    assert set(scores.IMAGE_SCORES) == {
        f"{aggregate}_{score}" for aggregate in scores.AGGREGATES for score in scores.SCORES
    }
