"""What must change nothing: order, scale, repeated settings, the form of a curve."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import swiftsure as ss
from swiftsure._lib import kernels as _kernels
from swiftsure.certify.bounds import BOUNDS
from swiftsure.curves.transforms import zero_bounded
from tests.guarantees.checkers import Task
from tests.guarantees.rules import NON_NEGATIVE, ORDER_FREE, curve_of
from tests.guarantees.strategies import ANY_DELTA, deltas, exit_records, levels, properties, tables

pytestmark = ANY_DELTA

SUMMARY = [name for name in ORDER_FREE if name != "binomial"]

ORDER_FREE_RULES = {
    **{f"ucb {bound}": ss.Control("ucb", bound) for bound in SUMMARY},
    "ltt bonferroni": ss.Control("ltt", "hoeffding_bentkus", correction="bonferroni"),
    "crc": ss.Control("crc"),
    "crc paper": ss.Control("crc", selection="paper"),
    "crc contiguous": ss.Control("crc", selection="contiguous"),
    "empirical": ss.Control("empirical"),
}

FIXED_SEQUENCE = {
    **{f"ucb {bound}": ss.Control("ucb", bound) for bound in NON_NEGATIVE},
    "crc": ss.Control("crc"),
    "crc by test": ss.Control("crc", method="ucb"),
    "empirical": ss.Control("empirical"),
}

ALL_RULES = {**ORDER_FREE_RULES, **FIXED_SEQUENCE, "zero-bounded": ss.Control("ucb", "star", True)}


@pytest.mark.parametrize("rule", ORDER_FREE_RULES.values(), ids=ORDER_FREE_RULES)
@given(losses=tables(), epsilon=levels, delta=deltas, seed=st.integers(0, 9))
@properties()
def test_the_order_of_samples_changes_nothing_for_rules_that_see_sums(
    rule, losses, epsilon, delta, seed
):
    """Permuted samples, another seed: the same choice."""
    order = np.random.default_rng(seed).permutation(len(losses))
    here = rule.run(curve_of(losses, Task(0.5)), epsilon, delta, seed=0)
    there = rule.run(curve_of(losses[order], Task(0.5)), epsilon, delta, seed=seed)
    assert here.index == there.index


@pytest.mark.parametrize("rule", FIXED_SEQUENCE.values(), ids=FIXED_SEQUENCE)
@given(losses=tables(), epsilon=levels, delta=deltas, scale=st.sampled_from([0.125, 0.5, 2, 64]))
@properties()
def test_the_unit_of_the_loss_changes_nothing(rule, losses, epsilon, delta, scale):
    """Losses, bound and level multiplied by a constant: the same choice."""
    here = rule.run(curve_of(losses, Task(0.5)), epsilon, delta, seed=0)
    scaled = curve_of(scale * losses, Task(0.5, high=scale))
    assert rule.run(scaled, scale * epsilon, delta, seed=0).index == here.index


@pytest.mark.parametrize("bound", ["hoeffding", "empirical_bernstein", "star", "wsr"])
@given(losses=tables(low=-1.0), epsilon=levels, delta=deltas)
@properties()
def test_gaps_up_to_two_are_gaps_up_to_one_in_another_unit(bound, losses, epsilon, delta):
    """B = 2 is no special case, nor are negative losses."""
    here = ss.control.ucb(curve_of(losses, Task(0.5, low=-1)), epsilon, delta, bound, seed=0)
    wide = curve_of(2 * losses, Task(0.5, low=-2, high=2))
    assert ss.control.ucb(wide, 2 * epsilon, delta, bound, seed=0).index == here.index


@pytest.mark.parametrize("rule", FIXED_SEQUENCE.values(), ids=FIXED_SEQUENCE)
@given(losses=tables(), epsilon=levels, delta=deltas, times=st.integers(2, 4))
@properties()
def test_settings_that_stand_there_twice_change_nothing(rule, losses, epsilon, delta, times):
    """Each setting repeated: the last copy of the same setting is chosen."""
    once = rule.run(curve_of(losses, Task(0.5)), epsilon, delta, seed=0).index
    repeated = curve_of(np.repeat(losses, times, axis=1)[:, times - 1 :], Task(0.5))
    found = rule.run(repeated, epsilon, delta, seed=0).index
    assert found == (None if once is None else once * times)


@pytest.mark.parametrize("bound", NON_NEGATIVE)
@given(losses=tables(), epsilon=levels, delta=deltas)
@properties()
def test_ucb_and_ltt_in_fixed_sequence_choose_the_same(bound, losses, epsilon, delta):
    """The paper's difference between the two is one of bounds."""
    curve = curve_of(losses, Task(0.5))
    ucb = ss.control.ucb(curve, epsilon, delta, bound)
    assert ucb.index == ss.control.ltt(curve, epsilon, delta, bound).index


@pytest.mark.parametrize("bound", NON_NEGATIVE)
@given(losses=tables(), epsilon=levels, delta=deltas)
@properties()
def test_the_fixed_sequence_ends_at_the_first_setting_that_fails_alone(
    bound, losses, epsilon, delta
):
    """Walking the path gives what `certify` says of each setting by itself."""
    curve = curve_of(losses, Task(0.5))
    last = 0
    for index in range(1, losses.shape[1]):
        if not ss.bounds.certify(losses[:, index], epsilon, delta, bound=bound):
            break
        last = index
    levels_ = np.asarray([epsilon])
    assert max(0, ss.Control("ucb", bound).indices(curve, levels_, delta)[0]) == last


@pytest.mark.parametrize("bound", ["hoeffding", "bentkus", "hoeffding_bentkus"])
@given(losses=tables(), epsilon=levels)
@properties()
def test_one_more_sample_of_the_largest_loss_never_helps(bound, losses, epsilon):
    """p-values of sums only rise with it."""
    more = np.vstack([losses, np.ones(losses.shape[1])])
    here = BOUNDS[bound].p_values(curve_of(losses, Task(0.5)), np.arange(len(losses)), epsilon)
    tested = ss.RiskCurve.from_losses(
        np.arange(losses.shape[1]), more, loss_range=(0, 1), relative=False
    )
    there = BOUNDS[bound].p_values(tested, np.arange(len(more)), epsilon)
    assert (there >= here - 1e-12).all()


# --------------------------------------------------------------------- exit form, table form

PATHS = st.one_of(
    st.none(),
    st.just("breakpoints"),
    st.lists(st.sampled_from([0.0, 0.25, 0.4, 0.5, 0.75, 0.9, 1.0]), min_size=1, max_size=6),
)


def along(record, path, exits=None):
    """Return the curve in exit form, and as a table."""
    curve = record.curve("gap", path=path, rule=exits)
    table = ss.RiskCurve.from_losses(
        np.arange(curve.n_settings), curve.losses(), loss_range=curve.loss_range, relative=True
    )
    return curve, table


@pytest.mark.parametrize("rule", ALL_RULES.values(), ids=ALL_RULES)
@given(
    record=exit_records(),
    path=PATHS,
    epsilon=levels,
    delta=deltas,
    strict=st.booleans(),
    min_exit=st.integers(0, 2),
)
@properties()
def test_exit_form_and_table_form_choose_the_same(
    rule, record, path, epsilon, delta, strict, min_exit
):
    """Looking up losses by exit is a way to store the table, not another method."""
    # A path of breakpoints was not fixed beforehand, which Bonferroni's correction needs.
    assume(path != "breakpoints" or rule.correction != "bonferroni")
    curve, table = along(record, path, ss.ExitRule(strict=strict, min_exit=min_exit))
    if rule.bound in ("bentkus", "hoeffding_bentkus"):
        curve, table = zero_bounded(curve), zero_bounded(table)
    here, there = (rule.run(each, epsilon, delta, seed=0) for each in (curve, table))
    assert here.index == there.index


@given(
    record=exit_records(),
    path=PATHS,
    strict=st.booleans(),
    min_exit=st.integers(0, 4),
    monotone=st.booleans(),
)
@properties(200)
def test_totals_by_steps_are_totals_by_scanning(record, path, strict, min_exit, monotone):
    """Sums along a falling path, by binary search and by looking at every setting."""
    curve, table = along(record, path, ss.ExitRule(strict=strict, min_exit=min_exit))
    rows = np.arange(record.n)
    assert curve._nested
    steps = _kernels.totals_nested(curve.data, rows, monotone)
    scan = _kernels.totals_scan(curve.data, rows, monotone)
    np.testing.assert_array_equal(steps, scan)
    np.testing.assert_array_equal(scan, table.totals(rows, monotone))
    if monotone:
        highest = np.maximum.accumulate(np.maximum(curve.losses(), 0), axis=1)
        np.testing.assert_array_equal(steps[0], highest.sum(axis=0))


@given(record=exit_records(), data=st.data(), epsilon=levels)
@properties()
def test_a_family_that_rises_and_falls_is_scanned_right(record, data, epsilon):
    """Per-exit thresholds in any order: exits as the rule says, choices as the table says."""
    grades = st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0, None])
    rows = st.lists(grades, min_size=record.n_exits - 1, max_size=record.n_exits - 1)
    family = data.draw(st.lists(rows, min_size=1, max_size=5))
    curve, table = along(record, family)
    gap = record.losses["some"] - record.losses["some"][:, -1:]
    for index, levels_ in enumerate(curve.thresholds):
        exits = ss.exits.exit_indices(record.confidences["top1"], levels_)
        np.testing.assert_array_equal(curve.loss_at(index), gap[np.arange(record.n), exits])
    for rule in (ss.Control("ucb", "star"), ss.Control("crc"), ss.Control("ltt", "hoeffding")):
        here, there = (rule.run(each, epsilon, seed=0) for each in (curve, table))
        assert here.index == there.index
