"""Each check lets good values pass and names argument, expected and got otherwise."""

import numpy as np
import pytest

from swiftsure._lib import checks


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), np.asarray(0.5)])
def test_between_returns_a_float(value):
    number = checks.between("epsilon", value, 0, 1)
    assert type(number) is float
    assert number == 0.5


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.3, np.nan, np.inf, -np.inf])
def test_between_refuses_the_ends_and_what_lies_past_them(value):
    with pytest.raises(ValueError, match=r"`epsilon` must be in \(0, 1\), but got"):
        checks.between("epsilon", value, 0, 1)


def test_between_says_what_it_got():
    with pytest.raises(ValueError, match=r"^`epsilon` must be in \(0, 1\), but got 1\.3\.$"):
        checks.between("epsilon", 1.3, 0, 1)


@pytest.mark.parametrize("value", ["much", None, [0.1, 0.2], {}])
def test_between_refuses_what_is_no_number(value):
    with pytest.raises(TypeError, match="`epsilon` must be a number, but got"):
        checks.between("epsilon", value, 0, 1)


def test_between_refuses_text_that_reads_like_a_number():
    with pytest.raises(TypeError, match="`epsilon`"):
        checks.between("epsilon", "0.05", 0, 1)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_count_returns_an_int(value):
    number = checks.count("splits", value)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize("value", [3.0, "3", None, True, np.float64(3)])
def test_count_refuses_what_is_no_whole_number(value):
    with pytest.raises(TypeError, match="`splits` must be a whole number"):
        checks.count("splits", value)


@pytest.mark.parametrize(("value", "least"), [(0, 1), (-1, 0), (4, 5)])
def test_count_refuses_too_few(value, least):
    with pytest.raises(ValueError, match=f"`splits` must be at least {least}, but got {value}"):
        checks.count("splits", value, least)


def test_count_admits_the_least():
    assert checks.count("min_exit", 0, 0) == 0


def test_choice_lists_the_options_and_the_nearest():
    assert checks.choice("bound", "star", ["star", "wsr"]) == "star"
    with pytest.raises(
        ValueError,
        match=r"^`bound` must be one of: star, wsr; but got 'stra'\. Did you mean 'star'\?$",
    ):
        checks.choice("bound", "stra", ["star", "wsr"])


def test_choice_guesses_only_where_something_is_near():
    with pytest.raises(ValueError, match=r"but got 'hoeffding'\.$"):
        checks.choice("bound", "hoeffding", ["star", "wsr"])


@pytest.mark.parametrize("value", [None, 3, ["star"]])
def test_choice_refuses_other_types(value):
    with pytest.raises(ValueError, match="`bound` must be one of: star, wsr"):
        checks.choice("bound", value, ["star", "wsr"])


def test_choice_says_none_where_there_is_nothing():
    with pytest.raises(ValueError, match="`loss` must be one of: none"):
        checks.choice("loss", "brier", {})


@pytest.mark.parametrize("values", [[[1, 2]], [True], np.ones(3, np.float32), 1.5, range(3)])
def test_numbers_keeps_real_numbers(values):
    assert np.array_equal(checks.numbers("losses", values), np.asarray(values))


def test_numbers_converts_only_when_asked_and_copies_only_then():
    values = np.ones(3, np.float32)
    assert checks.numbers("losses", values) is values
    assert checks.numbers("losses", values, np.float32) is values
    assert checks.numbers("losses", values, np.float64).dtype == np.float64


@pytest.mark.parametrize("values", [["a"], [None, 1.0], [1j], object(), {"a": 1}])
def test_numbers_refuses_anything_else(values):
    with pytest.raises(TypeError, match="`losses` must hold real numbers, but its dtype is"):
        checks.numbers("losses", values)


def test_numbers_refuses_ragged_rows():
    with pytest.raises(ValueError, match="`losses` must be a rectangular array of numbers"):
        checks.numbers("losses", [[1, 2], [3]])


@pytest.mark.parametrize(
    ("shape", "text"), [((), "()"), ((3,), "(3,)"), ((3, 4), "(3, 4)"), (("n", "K=2"), "(n, K=2)")]
)
def test_shape_text(shape, text):
    assert checks.shape_text(shape) == text


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 2, 1), ()])
def test_of_shape_prints_both_shapes_with_axis_names(shape):
    with pytest.raises(ValueError, match="must have shape") as caught:
        checks.of_shape("losses", np.zeros(shape), {"n": 3, "K": None})
    assert str(caught.value) == (
        f"`losses` must have shape (n=3, K), but got {checks.shape_text(shape)}."
    )


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_of_shape_refuses_empty_arrays(shape):
    with pytest.raises(ValueError, match="`losses` must not be empty, but got shape"):
        checks.of_shape("losses", np.zeros(shape), {"n": None, "K": None})


def test_of_shape_passes_what_fits():
    array = np.zeros((3, 2))
    assert checks.of_shape("losses", array, {"n": 3, "K": None}) is array


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_finite_says_where_the_first_is(bad, dtype):
    array = np.zeros((3, 2), dtype)
    array[1, 1] = bad
    with pytest.raises(
        ValueError,
        match=rf"`losses` must be finite, but got {bad} at index \(1, 1\) \(1 such value\)",
    ):
        checks.finite("losses", array)


def test_finite_meets_both_infinities():
    with pytest.raises(ValueError, match="2 such values"):
        checks.finite("losses", np.asarray([np.inf, -np.inf]))


@pytest.mark.parametrize("array", [np.full(9, 1e300), np.arange(3), np.full(9, 3e38, np.float32)])
def test_finite_passes_whatever_is_finite(array):
    assert checks.finite("losses", array) is array


def test_within_returns_the_array_itself_where_nothing_is_to_mend():
    array = np.asarray([0.0, 0.5, 1.0])
    assert checks.within("losses", array, 0, 1) is array


def test_within_mends_what_lies_out_by_no_more_than_the_slack():
    array = np.asarray([-1e-7, 0.5, 1 + 1e-7])
    mended = checks.within("losses", array, 0, 1, slack=1e-6)
    assert mended.tolist() == [0.0, 0.5, 1.0]
    assert array[0] < 0  # the user's own array stays what it was


@pytest.mark.parametrize(("value", "slack"), [(1 + 1e-9, 0.0), (1 + 2e-6, 1e-6), (-2e-6, 1e-6)])
def test_within_refuses_more(value, slack):
    with pytest.raises(
        ValueError, match=r"`losses` must lie in \[0, 1\], but got .* at index \(1,\)"
    ):
        checks.within("losses", np.asarray([0.5, value]), 0, 1, slack)
