"""Risk curves against the (n, K) matrix that they avoid."""

import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import swiftsure as ss
from swiftsure.curves.transforms import zero_bounded
from tests.builders import LEVELS, along_path, exit_cases, random_record, refused


def curve_of(confidences, losses, path, costs, rule):
    return ss.RiskCurve.from_exits(
        confidences,
        losses,
        path,
        ss.LossRange(-2, 2),
        rule=ss.ExitRule(**rule),
        costs={"shared": np.arange(1.0, losses.shape[1] + 1), "own": costs},
    )


def matrices(case):
    """Losses and both kinds of costs as full matrices."""
    confidences, losses, path, costs, rule = case
    settings = path.per_exit(losses.shape[1]).tolist()
    shared = np.broadcast_to(np.arange(1.0, losses.shape[1] + 1), losses.shape)
    exits = np.broadcast_to(np.arange(losses.shape[1]), losses.shape)
    return [
        along_path(values, confidences, settings, **rule)
        for values in (losses, shared, costs, exits)
    ]


@given(exit_cases())
def test_exit_form_equals_the_matrix(case):
    curve = curve_of(*case)
    losses, shared, own, exits = matrices(case)
    assert (curve.n, curve.n_settings) == losses.shape
    assert curve.has_exits
    assert curve.statistic.relative
    assert np.array_equal(curve.losses(), losses)
    np.testing.assert_allclose(curve.risk(), losses.mean(axis=0), atol=1e-12)
    for k in range(curve.n_settings):
        assert np.array_equal(curve.loss_at(k), losses[:, k])
    np.testing.assert_allclose(curve.mean_cost("shared"), shared.mean(axis=0))
    np.testing.assert_allclose(curve.mean_cost("own"), own.mean(axis=0))
    n_exits = case[1].shape[1]
    shares = [[np.mean(column == exit_) for exit_ in range(n_exits)] for column in exits.T]
    np.testing.assert_allclose(curve.exit_shares(), shares)


@given(exit_cases(), st.booleans())
def test_totals_equal_those_of_the_matrix(case, monotone):
    losses = matrices(case)[0]
    if monotone:
        losses = np.maximum.accumulate(losses, axis=1)  # from the full model's 0
    sums, squares = curve_of(*case).totals(monotone=monotone)
    np.testing.assert_allclose(sums, losses.sum(axis=0), atol=1e-12)
    np.testing.assert_allclose(squares, (losses**2).sum(axis=0), atol=1e-12)


@pytest.mark.parametrize("rule", [{}, {"strict": True}, {"min_exit": 1}])
@pytest.mark.parametrize("path", [ss.Path.grid(LEVELS), ss.Path.family([LEVELS[:4], LEVELS[1:5]])])
def test_totals_of_many_samples_equal_those_of_the_matrix(path, rule):
    rng = np.random.default_rng(0)
    confidences = rng.choice(np.float32(LEVELS), size=(500, 4))
    losses = np.column_stack([rng.integers(-2, 3, size=(500, 4)), np.zeros(500)])
    curve = ss.RiskCurve.from_exits(
        confidences, losses, path, ss.LossRange(-2, 2), rule=ss.ExitRule(**rule)
    )
    matrix = along_path(losses, confidences, path.per_exit(5).tolist(), **rule)
    for table in (matrix, np.maximum.accumulate(matrix, axis=1)):
        sums, squares = curve.totals(monotone=table is not matrix)
        np.testing.assert_allclose(sums, table.sum(axis=0), atol=1e-9)
        np.testing.assert_allclose(squares, (table**2).sum(axis=0), atol=1e-9)


@given(exit_cases(), st.data())
def test_rows_select_samples_with_repeats(case, data):
    curve = curve_of(*case)
    losses, shared, own, exits = matrices(case)
    rows = np.asarray(data.draw(st.lists(st.integers(0, curve.n - 1), min_size=1, max_size=9)))
    assert np.array_equal(curve.losses(rows), losses[rows])
    np.testing.assert_allclose(curve.risk(rows), losses[rows].mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(curve.mean_cost("shared", rows), shared[rows].mean(axis=0))
    np.testing.assert_allclose(curve.mean_cost("own", rows), own[rows].mean(axis=0))
    np.testing.assert_allclose(curve.exit_shares(rows)[:, 0], (exits[rows] == 0).mean(axis=0))


@given(exit_cases())
def test_zero_bounded_is_the_positive_part(case):
    curve = curve_of(*case)
    bounded = zero_bounded(curve)
    assert np.array_equal(bounded.losses(), np.maximum(curve.losses(), 0.0))
    assert bounded.loss_range == ss.LossRange(0, 2)
    assert bounded.statistic.risk == "zero-bounded gap"
    assert zero_bounded(bounded) is bounded
    np.testing.assert_allclose(bounded.mean_cost("own"), curve.mean_cost("own"))


@given(exit_cases(), st.data())
def test_group_means_by_hand(case, data):
    curve = curve_of(*case)
    groups = data.draw(st.lists(st.sampled_from("abc"), min_size=curve.n, max_size=curve.n))
    grouped = curve.grouped(groups)
    losses, shared, own, _ = matrices(case)

    def means(matrix):
        members = [[g == name for g in groups] for name in sorted(set(groups))]
        return np.asarray([matrix[rows].mean(axis=0) for rows in members])

    assert grouped.units.grouped
    assert grouped.n == len(set(groups))
    np.testing.assert_allclose(grouped.losses(), means(losses), atol=1e-12)
    np.testing.assert_allclose(grouped.risk(), means(losses).mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(grouped.mean_cost("shared"), means(shared).mean(axis=0))
    np.testing.assert_allclose(grouped.mean_cost("own"), means(own).mean(axis=0))


def test_group_means_are_no_longer_whole():
    curve = ss.RiskCurve.from_losses([1, 0], [[0, 1], [0, 0], [0, 1]], binary=True)
    grouped = curve.grouped([7, 7, 8])
    assert grouped.losses().tolist() == [[0, 0.5], [0, 1]]
    assert curve.loss_range.binary
    assert grouped.loss_range == ss.LossRange(0, 1)
    assert curve.grouped([3, 1, 2]).losses()[:, 1].tolist() == [0, 1, 1]  # by label


@pytest.mark.parametrize("groups", [[1, 2], [[1], [2], [3]], []])
def test_groups_of_another_length_are_refused(groups):
    curve = ss.RiskCurve.from_losses([1, 0], [[0, 1], [0, 0], [0, 1]])
    with refused("groups"):
        curve.grouped(groups)


def test_groups_are_not_mixed_up_by_a_shuffle():
    losses = np.zeros((8, 2))
    losses[::2, 1] = 1.0
    curve = ss.RiskCurve.from_losses([1, 0], losses).shuffled(0)
    try:
        grouped = curve.grouped([0, 1] * 4)
    except ValueError:
        return
    assert grouped.losses()[:, 1].tolist() == [1.0, 0.0]


# Order


def test_shuffled_is_a_permutation_that_moves_losses_confidences_and_costs_together():
    rng = np.random.default_rng(0)
    marks = np.arange(50.0)
    record = ss.ExitRecord(
        rng.random((50, 1)),
        losses={"mark": np.column_stack([marks / 100, np.zeros(50)])},
        costs={"own": np.column_stack([marks, marks])},
    )
    curve = record.curve(path=[0.5])
    moved = curve.shuffled(3)
    order = moved.data.values[:, 0] * 100
    assert sorted(order.tolist()) == pytest.approx(marks.tolist())
    order = np.rint(order).astype(int)
    assert order.tolist() != sorted(order)
    assert np.array_equal(moved.losses(), curve.losses()[order])
    assert np.array_equal(moved.costs["own"], curve.costs["own"][order])
    assert np.array_equal(moved.costs["exit"], curve.costs["exit"])
    np.testing.assert_allclose(moved.risk(), curve.risk())
    np.testing.assert_allclose(moved.mean_cost("own"), curve.mean_cost("own"))


def test_one_seed_gives_one_order():
    curve = random_record().curve(loss="brier", path=[0.5])
    assert np.array_equal(curve.shuffled(1).losses(), curve.shuffled(1).losses())
    assert not np.array_equal(curve.shuffled(1).losses(), curve.shuffled(2).losses())
    assert curve.shuffled(1).shuffled_with == 1
    assert curve.shuffled_with is None


def test_a_second_shuffle_is_refused_unless_it_is_the_same():
    curve = random_record().curve(loss="brier", path=[0.5]).shuffled(1)
    assert curve.shuffled(1) is curve
    with pytest.raises(
        ValueError, match="was shuffled with seed 1; start from the record for seed 2"
    ):
        curve.shuffled(2)


def test_a_shuffle_without_a_seed_is_refused():
    curve = random_record().curve(loss="brier", path=[0.5])
    with refused("seed"):
        curve.shuffled(None)


def test_the_order_is_not_that_in_which_the_same_seed_draws_samples():
    losses = np.column_stack([np.zeros(50), np.arange(50) / 50])
    order = ss.RiskCurve.from_losses([1, 0], losses).shuffled(7).loss_at(1) * 50
    assert np.rint(order).tolist() != np.random.default_rng(7).permutation(50).tolist()


# Another path


@given(exit_cases())
def test_along_another_path_is_what_a_record_gives_there(case):
    confidences, losses, path, costs, rule = case
    other = ss.Path.grid([0.75, 0.25])
    curve = curve_of(confidences, losses, other, costs, rule).shuffled(1).along(path)
    expected = curve_of(confidences, losses, path, costs, rule).shuffled(1)
    assert curve.fingerprint() == expected.fingerprint()
    assert np.array_equal(curve.thresholds, expected.thresholds)
    assert curve.path_kind == expected.path_kind
    assert np.array_equal(curve.losses(), expected.losses())
    np.testing.assert_allclose(curve.risk(), expected.risk(), atol=1e-12)
    assert np.array_equal(curve.exit_shares(), expected.exit_shares())


def test_a_table_has_no_other_path():
    with pytest.raises(ValueError, match="has no other path"):
        ss.RiskCurve.from_losses([1, 0], [[0, 1]]).along(ss.Path.grid([0.5]))


# From losses at each setting


LOSSES = np.asarray([[0.0, 0.5, -0.25], [0.0, 0.0, 1.0]])


def test_from_losses_keeps_what_it_is_given():
    curve = ss.RiskCurve.from_losses([None, 0.9, 0.5], LOSSES)
    assert curve.thresholds.tolist() == [math.inf, 0.9, 0.5]
    assert np.array_equal(curve.losses(), LOSSES)
    assert curve.risk().tolist() == [0.0, 0.25, 0.375]
    assert curve.loss_at(2).tolist() == [-0.25, 1.0]
    assert (curve.n, curve.n_settings, curve.has_exits) == (2, 3, False)
    assert curve.loss_range == ss.LossRange(-1, 1)
    sums, squares = curve.totals(monotone=True)
    assert sums.tolist() == [0.0, 0.5, 1.5]
    assert squares.tolist() == [0.0, 0.25, 1.25]


def test_the_running_maximum_starts_at_zero_even_without_a_full_model():
    curve = ss.RiskCurve.from_losses([1, 0], [[-0.5, -0.25], [-0.5, 0.25]])
    assert curve.totals(monotone=True)[0].tolist() == [0.0, 0.25]


def test_the_order_of_settings_is_the_users():
    assert ss.RiskCurve.from_losses([0, 3, 7], LOSSES).thresholds.tolist() == [0, 3, 7]


@pytest.mark.parametrize(
    ("first", "relative", "expected"),
    [
        (1.0, None, (True, False)),
        (None, None, (True, True)),
        (np.inf, None, (True, True)),
        (1.0, True, (True, True)),
        (None, False, (False, False)),
        (1.0, False, (False, False)),
    ],
)
def test_what_setting_0_is_is_declared_and_not_seen_from_the_losses(first, relative, expected):
    for losses in (LOSSES, LOSSES[:, [1, 1, 2]]):
        if expected[1] and losses[:, 0].any():
            with pytest.raises(ValueError, match="`losses` must be 0 in column 0, the full model"):
                ss.RiskCurve.from_losses([first, 0.9, 0.5], losses, relative=relative)
            continue
        curve = ss.RiskCurve.from_losses([first, 0.9, 0.5], losses, relative=relative)
        assert (curve.statistic.relative, curve.full_model_first) == expected


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([3.0, 2.0, 1.0], {"cost": [3.0, 2.0, 1.0]}),
        ([[3.0, 2.0, 1.0], [5.0, 2.0, 0.0]], {"cost": [4.0, 2.0, 0.5]}),
        ({"ms": [9, 8, 7], "euro": [[3, 2, 1], [5, 2, 0]]}, {"ms": [9, 8, 7], "euro": [4, 2, 0.5]}),
        (None, {}),
    ],
)
def test_costs_are_one_a_setting_or_one_a_sample_and_setting(costs, expected):
    curve = ss.RiskCurve.from_losses([1, 0.9, 0.5], LOSSES, costs)
    assert {name: curve.mean_cost(name).tolist() for name in curve.costs} == expected


def test_an_unknown_cost_is_refused_with_the_known():
    curve = ss.RiskCurve.from_losses([1, 0.9, 0.5], LOSSES, {"flops": [3, 2, 1]})
    with pytest.raises(ValueError, match=r"`cost` must be one of: flops; .* Did you mean 'flops'"):
        curve.mean_cost("flop")


def test_settings_and_rows_that_do_not_exist_are_refused():
    curve = ss.RiskCurve.from_losses([1, 0.9, 0.5], LOSSES)
    with pytest.raises((IndexError, ValueError)):
        curve.loss_at(3)
    with pytest.raises((IndexError, ValueError)):
        curve.risk(np.asarray([2]))


def test_exit_shares_need_exits():
    with pytest.raises(ValueError, match="has no exits"):
        ss.RiskCurve.from_losses([1, 0.9, 0.5], LOSSES).exit_shares()


def test_binary_losses_are_declared_and_checked():
    curve = ss.RiskCurve.from_losses([1, 0], [[0, 1], [0, 0]], binary=True)
    assert curve.loss_range.binary
    with refused("losses"):
        ss.RiskCurve.from_losses([1, 0], [[0, 0.5]], binary=True)
    with refused("losses"):
        ss.RiskCurve.from_losses([1, 0], [[0, -1]], binary=True)
    with refused("loss_range"):
        ss.RiskCurve.from_losses([1, 0], [[0, 1]], binary=True, loss_range=(0, 2))


@pytest.mark.parametrize(("high", "excess"), [(1.0, 0.9e-6), (2.0, 1.8e-6), (100.0, 0.9e-4)])
def test_rounding_past_the_bound_is_clipped(high, excess):
    curve = ss.RiskCurve.from_losses([1, 0], [[0, high + excess]], loss_range=(0, high))
    assert curve.losses()[0, 1] == high
    curve = ss.RiskCurve.from_losses([1, 0], [[0, -high - excess]], loss_range=(-high, high))
    assert curve.losses()[0, 1] == -high


@pytest.mark.parametrize(("high", "excess"), [(1.0, 1.1e-6), (2.0, 2.2e-6), (100.0, 1.1e-4)])
def test_more_than_rounding_is_refused(high, excess):
    for value in (high + excess, -high - excess):
        with pytest.raises(ValueError, match=r"`losses` must lie in .* at index \(1, 1\)"):
            ss.RiskCurve.from_losses([1, 0], [[0, 0], [0, value]], loss_range=(-high, high))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"losses": [0.0, 1.0, 0.0]}, "losses"),
        ({"losses": LOSSES[:, :2]}, "losses"),
        ({"losses": LOSSES[None]}, "losses"),
        ({"losses": LOSSES[:0]}, "losses"),
        ({"losses": [[0, math.nan, 0]]}, "losses"),
        ({"losses": [[0, math.inf, 0]]}, "losses"),
        ({"losses": [[0, "a", 0]]}, "losses"),
        ({"losses": [[0, 1, 0], [0, 1]]}, "losses"),
        ({"losses": [[0, 1.5, 0]]}, "losses"),
        ({"thresholds": []}, "thresholds"),
        ({"thresholds": [1, math.nan, 0]}, "thresholds"),
        ({"thresholds": ["a", "b", "c"]}, "thresholds"),
        ({"loss_range": (1, 0)}, "loss_range"),
        ({"loss_range": 3}, "loss_range"),
        ({"costs": [1.0, 2.0]}, "costs"),
        ({"costs": [1.0, 2.0, -1.0]}, "costs"),
        ({"costs": [1.0, 2.0, math.nan]}, "costs"),
        ({"costs": {"flops": [["a"]]}}, "costs"),
        ({"costs": {"flops": np.ones((3, 3))}}, "costs"),
    ],
)
def test_bad_input_is_refused_by_name(changes, name):
    with refused(name):
        ss.RiskCurve.from_losses(**{"thresholds": [1, 0.9, 0.5], "losses": LOSSES, **changes})


def test_shape_errors_print_both_shapes_with_axis_names():
    with pytest.raises(ValueError, match=r"\(n, K=3\), but got \(2, 2\)"):
        ss.RiskCurve.from_losses([1, 0.9, 0.5], LOSSES[:, :2])
    with pytest.raises(ValueError, match=r"`costs\['flops'\]` .*\(K=3,\), but got \(2,\)"):
        ss.RiskCurve.from_losses([1, 0.9, 0.5], LOSSES, {"flops": [1, 2]})
    with pytest.raises(ValueError, match=r"`costs\['flops'\]` .*\(n=2, K=3\), but got \(3, 2\)"):
        ss.RiskCurve.from_losses([1, 0.9, 0.5], LOSSES, {"flops": np.ones((3, 2))})


# Fingerprints


def test_a_fingerprint_changes_with_all_that_a_control_sees():
    def fingerprint(c=0.5, loss=1.0, t=0.5, high=1.0, **rule):
        record = ss.ExitRecord(
            [[c], [0.2]], {"a": [[loss, 0], [0, 0]]}, loss_ranges={"a": (0, high)}
        )
        return record.curve(path=[t], rule=ss.ExitRule(**rule)).fingerprint()

    same = fingerprint()
    assert same == fingerprint()
    assert same.startswith("sha256:")
    changed = [
        fingerprint(c=0.6),
        fingerprint(loss=0.9),
        fingerprint(t=0.4),
        fingerprint(high=2.0),
        fingerprint(strict=True),
        fingerprint(min_exit=1),
    ]
    assert len({same, *changed}) == 7


# Memory

PEAK = r"""
import json, pathlib, re
import numpy as np
import swiftsure as ss

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])

def work(record):
    curve = record.curve(loss="brier")
    chosen = ss.control.ucb(curve, epsilon=0.5)
    ss.control.crc(curve, epsilon=0.5)
    ss.calibrate(record, loss="brier", epsilon=0.5)
    return curve, chosen

def record(n):
    rng = np.random.default_rng(0)
    return ss.ExitRecord(rng.random((n, 4), np.float32), losses={"brier": rng.random((n, 5))})

work(record(100))  # load and compile everything
work(record(50_000))  # long records are walked by a kernel of their own
large = record(200_000)
size = sum(a.nbytes for a in (large.confidences["top1"], large.losses["brier"]))
before = peak()
curve, chosen = work(large)
after = peak()
curve.losses(np.arange(100_000))  # a matrix is seen when there is one
matrix = 8 * curve.n * curve.n_settings
print(json.dumps([size, after - before, peak() - before, matrix, chosen.index]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_matrix_of_samples_by_settings_is_ever_made():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    size, used, with_half_a_matrix, matrix, index = json.loads(done.stdout)
    assert index is not None  # settings were tested to the end or nearly
    assert used < 4 * size < 0.1 * matrix
    assert with_half_a_matrix > 0.4 * matrix


def test_a_shuffle_keeps_sizes_with_their_groups():
    losses = np.column_stack([np.zeros(10), np.repeat([0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4])])
    curve = ss.RiskCurve.from_losses(
        [1.0, 0.5],
        losses,
        {"ms": losses + 1},
        loss_range=(0, 1),
    ).grouped(np.repeat(np.arange(4), [1, 2, 3, 4]), average="sample", max_size=5)
    shuffled = curve.shuffled(3)
    assert curve.units.weights.tolist() == [0.2, 0.4, 0.6, 0.8]
    assert shuffled.units.weights.tolist() != curve.units.weights.tolist()
    np.testing.assert_allclose(
        shuffled.loss_at(1) / shuffled.units.weights, shuffled.units.weights / 2
    )
    rows = np.asarray([0, 2])
    mine = np.isin(np.repeat(np.arange(4), [1, 2, 3, 4]), rows)
    np.testing.assert_allclose(curve.risk(rows), losses[mine].mean(axis=0))
    np.testing.assert_allclose(curve.mean_cost("ms", rows), 1 + losses[mine].mean(axis=0))
    assert curve.risk_at(1) == pytest.approx(losses[:, 1].mean())
    other = replace(curve, units=replace(curve.units, weights=curve.units.weights / 2))
    assert other.fingerprint() != curve.fingerprint()
