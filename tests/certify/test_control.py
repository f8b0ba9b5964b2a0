"""Controls: which setting they choose, by hand, and what they refuse."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import swiftsure as ss
from swiftsure.certify import bounds, controls
from swiftsure.certify.control import Control
from swiftsure.certify.together import certified_together
from swiftsure.curves.conditions import Condition
from swiftsure.curves.transforms import zero_bounded
from tests.builders import exit_cases, random_record, refused, table_curve
from tests.guarantees.rules import UP_TO_ONE

EPSILON, DELTA = 0.1, 0.1


def passing(n, epsilon=EPSILON, delta=DELTA):
    """The largest number of ones among n that the binomial test certifies."""
    return max(k for k in range(n) if stats.binom.cdf(k, n, epsilon) <= delta)


MOST = passing(200)

WALKS = [  # ones at each setting, and the setting chosen
    ([0, 0, 0, 0], 3),
    ([0, MOST, MOST, 100], 2),
    ([0, MOST + 1, 0, 0], None),
    ([0, 0, MOST + 1, 0], 1),  # a failure is final, whatever lies beyond it
    ([0, MOST], 1),
    ([0], None),
]


@pytest.mark.parametrize(("ones", "index"), WALKS)
@pytest.mark.parametrize("choose", [controls.ucb, controls.ltt])
def test_the_last_setting_before_the_first_failure_is_chosen(choose, ones, index):
    result = choose(table_curve(ones, binary=True), EPSILON, DELTA)
    assert result.index == index
    expected = None if index is None else np.linspace(1, 0, len(ones))[index]
    assert result.threshold == expected


def test_where_setting_0_is_not_the_full_model_it_is_tested_too():
    good = table_curve([1, 1], binary=True)
    assert not good.full_model_first
    assert controls.ucb(good, EPSILON).index == 1
    assert controls.ucb(table_curve([1, 50], binary=True), EPSILON).index == 0
    assert controls.ucb(table_curve([50, 1], binary=True), EPSILON).index is None
    chance = table_curve([0, 50], binary=True, relative=False)
    assert controls.ucb(chance, EPSILON).index == 0


@given(exit_cases(), st.sampled_from(UP_TO_ONE), st.sampled_from([0.1, 0.5, 1.0, 1.9]))
def test_the_walk_agrees_with_a_test_of_each_setting(case, bound, epsilon):
    confidences, losses, path, _, rule = case
    times = 40
    curve = ss.RiskCurve.from_exits(
        np.repeat(confidences, times, axis=0),
        np.clip(np.abs(np.repeat(losses, times, axis=0)), 0, 1 if bound == "binomial" else 2),
        path,
        ss.LossRange(0, 1 if bound == "binomial" else 2),
        rule=ss.ExitRule(**rule),
    )
    epsilon = epsilon * curve.loss_range.high / 2
    result = controls.ucb(curve, epsilon, DELTA, bound)
    seen = curve.shuffled(curve.order.seed) if bounds.BOUNDS[bound].uses_order else curve
    expected = None
    for k in range(1, curve.n_settings):
        column = seen.loss_at(k)
        if not bounds.certify(column, epsilon, DELTA, bound=bound, loss_range=curve.loss_range):
            break
        expected = k
    assert result.index == expected


def test_levels_are_walked_together_as_they_are_alone():
    record = random_record(n=600)
    levels = np.asarray([0.01, 0.03, 0.1, 0.1, 0.3])
    for name in ("empirical", "crc", "ucb", "ltt"):
        curve = record.curve(loss="brier")
        together = Control(name).indices(curve, levels, DELTA)
        alone = [Control(name).indices(curve, levels[j : j + 1], DELTA)[0] for j in range(5)]
        assert together.tolist() == alone, name
        assert (np.diff(together) >= 0).all()


def test_rows_are_the_calibration_samples_in_their_order():
    curve = random_record(n=600).curve(loss="brier")
    rows = np.random.default_rng(0).permutation(600)[:300]
    part = random_record(n=600).take(rows).curve(loss="brier")
    for name in ("empirical", "crc", "ucb"):
        chosen = Control(name).indices(curve, np.asarray([0.1]), DELTA, rows)
        assert chosen == Control(name).indices(part, np.asarray([0.1]), DELTA), name


@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_ltt_in_fixed_sequence_chooses_what_ucb_does(bound):
    curve = random_record(n=600).curve("zero-bounded gap", "zero_one")
    results = [choose(curve, 0.15, DELTA, bound) for choose in (controls.ucb, controls.ltt)]
    assert results[0].index == results[1].index is not None
    assert [r.control for r in results] == ["ucb", "ltt"]


def test_bonferroni_tests_each_setting_at_its_share_and_skips_gaps():
    each = passing(200, delta=DELTA / 4)
    assert each < MOST
    for ones, index in [
        ([0, 0, 90, each, 90], 3),
        ([0, 0, 90, each + 1, 90], 1),
        ([0] + [90] * 4, None),
    ]:
        result = controls.ltt(
            table_curve(ones, binary=True), EPSILON, DELTA, correction="bonferroni"
        )
        assert result.index == index
    assert result.options == {"correction": "bonferroni"}


def test_bonferroni_takes_bets_too():
    curve = table_curve([0, 0, 90, 0])
    for bound in ("star", "wsr"):
        assert controls.ltt(curve, EPSILON, bound=bound, correction="bonferroni").index == 3


def test_zero_bounded_selects_on_the_positive_part():
    losses = np.zeros((200, 2))
    losses[::4, 1], losses[1::4, 1] = 1.0, -1.0  # better as often as worse
    curve = ss.RiskCurve.from_losses([None, 0], losses)
    assert controls.ucb(curve, 0.2).index == 1
    assert controls.ucb(curve, 0.2, zero_bounded=True).index is None
    assert controls.ucb(zero_bounded(curve), 0.2).index is None
    assert controls.ucb(curve, 0.2, zero_bounded=True).options == {"zero_bounded": True}


def test_a_pool_certifies_more():
    curve = table_curve([0, MOST + 1], binary=True)
    assert controls.ucb(curve, EPSILON).index is None
    assert controls.ucb(curve, EPSILON, pool=220).index == 1
    with refused("pool"):
        controls.ucb(curve, EPSILON, pool=199)
    with refused("pool"):
        controls.ltt(curve, EPSILON, bound="hoeffding", pool=500)


# The naive rule and conformal risk control


def test_empirical_is_the_fastest_setting_whose_mean_is_small_enough():
    result = controls.empirical(table_curve([0, 30, 20, 21]), EPSILON)
    assert (result.index, result.guarantee, result.delta, result.bound) == (2, "none", None, None)
    assert controls.empirical(table_curve([0, 30, 30, 21]), EPSILON).index is None
    assert controls.empirical(table_curve([30, 20]), EPSILON).index == 1


N = 99
CRC = (EPSILON - 1 / (N + 1)) * (N + 1)  # so many losses pass: (sum + B) / (n + 1) <= epsilon


@pytest.mark.parametrize(
    ("ones", "options", "index"),
    [
        ([0, 9, 10], {}, 1),
        ([0, 10, 0], {}, None),
        ([0, 10, 9], {"selection": "contiguous"}, None),
        ([0, 10, 9], {"selection": "paper"}, 2),
        ([0, 9, 10, 9, 10], {"selection": "contiguous"}, 1),
        ([0, 9, 10, 9, 10], {"selection": "paper"}, 3),
        ([0, 9, 10, 9, 10], {"monotone": False}, 1),
        ([0, 10, 10], {"selection": "paper"}, None),
        ([0, 9, 9], {"monotone": True}, 2),  # the same samples lose
    ],
)
def test_crc_by_hand(ones, options, index):
    assert pytest.approx(9) == CRC
    assert controls.crc(table_curve(ones, n=N), EPSILON + 1e-9, **options).index == index


def test_crc_takes_the_running_maximum_of_each_sample():
    losses = np.zeros((99, 3))
    losses[:6, 1] = 1.0
    losses[6:12, 2] = 1.0  # other samples lose, so the running maximum sums to 12
    curve = ss.RiskCurve.from_losses([1, 0.5, 0], losses, loss_range=(0, 1))
    assert controls.crc(curve, EPSILON).index == 1
    assert controls.crc(curve, EPSILON, selection="contiguous").index == 2
    assert controls.crc(curve, 0.13).index == 2


def test_crc_starts_the_running_maximum_at_the_full_models_zero():
    losses = np.zeros((99, 2))
    losses[:10, 1], losses[10:60, 1] = 1.0, -1.0
    curve = ss.RiskCurve.from_losses([None, 0], losses)
    assert controls.crc(curve, EPSILON).index is None  # gains do not make up for losses
    assert controls.crc(curve, EPSILON, selection="contiguous").index == 1


def test_crc_takes_relative_losses_of_a_path_without_the_full_model():
    for ones, index in [([9, 9], 1), ([9, 10], 0), ([10, 0], None), ([0, 10], 0)]:
        curve = table_curve(ones, n=N, relative=None)
        assert (curve.statistic.relative, curve.full_model_first) == (True, False)
        assert controls.crc(curve, EPSILON + 1e-9).index == index


def test_crc_inflates_by_the_bound_of_the_loss():
    losses = np.zeros((99, 2))
    for high, epsilon in [(1, 0.01), (2, 0.02), (10, 0.1)]:
        curve = ss.RiskCurve.from_losses([1, 0], losses, loss_range=(0, high))
        assert controls.crc(curve, epsilon + 1e-9).index == 1
        assert controls.crc(curve, epsilon - 1e-9).index is None


@pytest.mark.parametrize(
    ("options", "guarantee"),
    [
        ({}, "expectation"),
        ({"monotone": True}, "expectation"),
        ({"method": "ucb"}, "expectation"),
        ({"monotone": False}, "none"),
        ({"selection": "contiguous"}, "none"),
        ({"selection": "paper"}, "none"),
        ({"selection": "paper", "monotone": True}, "expectation"),
    ],
)
def test_crc_promises_only_what_holds(options, guarantee):
    result = controls.crc(table_curve([0, 1]), EPSILON, **options)
    assert result.guarantee == guarantee
    assert result.delta is None
    assert (result.conditions == ()) == (guarantee == "none")


@pytest.mark.parametrize("options", [{}, {"method": "ucb"}, {"selection": "paper"}])
def test_crc_refuses_losses_that_are_not_relative(options):
    with pytest.raises(ValueError, match="`crc` needs losses relative to the full model"):
        controls.crc(table_curve([1, 2], relative=False), EPSILON, **options)


@pytest.mark.parametrize("high", [1.0, 2.0])
@pytest.mark.parametrize("delta_prime", [0.01, 0.04, None])
def test_crc_by_tests_is_a_test_at_the_split_level(high, delta_prime):
    curve = random_record(n=800).curve("consistency", "brier")
    curve = ss.RiskCurve.from_losses(
        curve.thresholds, curve.losses() * high / 2, loss_range=(0, high)
    )
    chosen = controls.crc(curve, EPSILON, method="ucb", delta_prime=delta_prime)
    d = min(0.1, 3 / math.sqrt(800)) * EPSILON / high if delta_prime is None else delta_prime
    level = (EPSILON - d * high) / (1 - d)
    assert (1 - d) * level + d * high == pytest.approx(EPSILON)
    assert chosen.index == controls.ucb(curve, level, d).index is not None
    assert (chosen.bound, chosen.seed) == ("star", curve.order.seed)
    assert chosen.guarantee == "expectation"


def test_crc_by_tests_certifies_nothing_where_no_level_is_left():
    curve = table_curve([0, 0], n=5000)
    assert controls.crc(curve, EPSILON, method="ucb", delta_prime=0.11).index is None
    assert controls.crc(curve, EPSILON, method="ucb", delta_prime=0.09).index == 1


# Results


def test_a_result_says_what_was_done():
    curve = random_record(n=600).curve(loss="brier", path=[0.9, 0.5])
    result = controls.ucb(curve, 0.2, 0.05, seed=7)
    assert result == ss.ControlResult(
        index=result.index,
        threshold=float(np.float32([np.inf, 0.9, 0.5])[result.index]),
        guarantee="probability",
        epsilon=0.2,
        delta=0.05,
        control="ucb",
        bound="star",
        n=600,
        seed=7,
        conditions=result.conditions,
        seed_drawn=False,
        options={},
    )
    assert result.index is not None
    assert result.conditions == (
        Condition.of("draws", kind="same", unit="samples"),
        Condition.of("fixed beforehand", what="calibration"),
        Condition.of("loss", loss="brier", risk="gap", kind="at most", most=2.0),
        Condition.of("number of samples", unit="samples"),
        Condition.of("order", how="given", unit="samples"),
    )


def test_conditions_name_groups_and_binary_losses():
    grouped = table_curve([0, 1]).grouped(np.arange(200) // 2)
    assert controls.ucb(grouped, EPSILON).conditions[0]["unit"] == "groups"
    binary = controls.ucb(table_curve([0, 1], binary=True), EPSILON)
    assert "0 or 1" in [dict(each.facts).get("kind") for each in binary.conditions]
    assert binary.seed is None


def test_results_cannot_be_changed():
    result = controls.ucb(table_curve([0, 1]), EPSILON)
    with pytest.raises(AttributeError):
        result.index = 5


def test_thresholds_of_a_family_are_tuples():
    record = random_record(n=600)
    curve = record.curve("consistency", "brier", path=[[0.99, 0.9, 0.9], [0.9, 0.5, 0.5]])
    result = controls.ucb(curve, 0.5)
    assert result.index == 2
    assert result.threshold == tuple(np.float32([0.9, 0.5, 0.5]).tolist())


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_the_seed_orders_the_samples_of_bets(bound):
    losses = np.zeros((400, 2))
    losses[:40, 1] = 1.0
    curve = ss.RiskCurve.from_losses([1, 0], losses, loss_range=(0, 1))
    levels = np.linspace(0.11, 0.2, 91)

    def certified(seed):
        return [controls.ucb(curve, e, bound=bound, seed=seed).index for e in levels]

    assert certified(1) == certified(1)
    assert len({tuple(certified(seed)) for seed in range(5)}) > 1
    moved = curve.shuffled(3)
    assert controls.ucb(moved, 0.2, bound=bound, seed=3).index == 1
    with pytest.raises(ValueError, match="was shuffled with seed 3"):
        controls.ucb(moved, 0.2, bound=bound, seed=4)


@pytest.mark.parametrize("bound", [b for b in UP_TO_ONE if not bounds.BOUNDS[b].uses_order])
def test_the_seed_changes_nothing_for_other_bounds(bound):
    curve = table_curve([0, 3, 9, 15, 20, 30])
    first, second = (controls.ucb(curve, EPSILON, bound=bound, seed=seed) for seed in (0, 1))
    assert first == second
    assert first.seed is None


def test_auto_is_exact_only_where_losses_are_declared_whole():
    assert controls.ucb(table_curve([0, 1], binary=True), EPSILON).bound == "binomial"
    assert controls.ucb(table_curve([0, 1]), EPSILON).bound == "star"
    gap = ss.RiskCurve.from_losses([1, 0], [[0, 1]], loss_range=ss.LossRange(-1, 1, whole=True))
    assert controls.ucb(gap, EPSILON).bound == "trinomial"
    assert controls.ucb(gap, EPSILON, zero_bounded=True).bound == "binomial"
    with refused("bound"):
        controls.ucb(gap, EPSILON, bound="binomial")
    with refused("bound"):
        controls.ltt(gap, EPSILON, bound="hoeffding_bentkus")


def test_asking_for_the_binomial_test_checks_the_losses():
    assert controls.ucb(table_curve([0, 1]), EPSILON, bound="binomial").index == 1
    with pytest.raises(ValueError, match="`losses` is declared whole"):
        controls.ucb(table_curve([0, 1]).grouped(np.arange(200) // 2), EPSILON, bound="binomial")


# Bad input

CONTROLS = {
    "empirical": controls.empirical,
    "crc": controls.crc,
    "ucb": controls.ucb,
    "ltt": controls.ltt,
}


@pytest.mark.parametrize("name", list(CONTROLS))
@pytest.mark.parametrize("epsilon", [0, 1, -0.1, 1.3, math.nan, math.inf, "much", None, [0.1]])
def test_epsilon_lies_between_zero_and_the_bound(name, epsilon):
    with refused("epsilon"):
        CONTROLS[name](table_curve([0, 1]), epsilon)


@pytest.mark.parametrize("choose", [controls.ucb, controls.ltt])
@pytest.mark.parametrize(
    "delta",
    [
        0,
        1,
        -0.1,
        math.nan,
        "little",
        None,
    ],
)
def test_delta_lies_between_zero_and_one(choose, delta):
    with refused("delta"):
        choose(table_curve([0, 1]), EPSILON, delta)


@pytest.mark.parametrize("seed", ["1", 1.5, -1, True])
def test_a_seed_is_a_whole_number(seed):
    with refused("seed"):
        controls.ucb(table_curve([0, 1]), EPSILON, seed=seed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "usb"},
            "`control` must be one of: empirical, crc, ucb, ltt; .* Did you mean 'ucb'",
        ),
        ({"bound": "wrs"}, "`bound` must be one of: auto, .* Did you mean 'wsr'"),
        ({"correction": "holm"}, "`correction` must be one of: fixed_sequence, bonferroni"),
        ({"method": "ucbs"}, "`method` must be one of: crc, ucb; .* Did you mean 'ucb'"),
        ({"selection": "papers"}, "`selection` must be one of: contiguous, paper; .*'paper'"),
        ({"delta_prime": 0.0}, "`delta_prime` must be in"),
        ({"delta_prime": 1.0}, "`delta_prime` must be in"),
        ({"method": "ucb", "monotone": True}, "`method='ucb'` of crc takes neither"),
        ({"method": "ucb", "selection": "paper"}, "`method='ucb'` of crc takes neither"),
    ],
)
def test_options_of_a_control_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Control(**{"name": "crc", **arguments})


def test_a_control_lists_its_options_and_has_a_label():
    plain = Control("ucb")
    assert (plain.options(), plain.label, plain.guarantee) == ({}, "ucb", "probability")
    other = Control("crc", bound="wsr", method="ucb", delta_prime=0.01)
    assert other.options() == {"method": "ucb", "delta_prime": 0.01}
    assert other.label == "crc (wsr, method=ucb, delta_prime=0.01)"


# Several risks at once


def test_several_risks_take_the_safest_choice():
    rule = Control("ucb")
    curves = [
        table_curve(ones, binary=True) for ones in ([0, 0, 0, 90], [0, 0, 90, 0], [0, 0, 0, 0])
    ]
    results = [rule.run(curve, EPSILON) for curve in curves]
    assert [r.index for r in results] == [2, 1, 3]
    together = certified_together(rule, curves, results, 0.1)
    assert together.tolist() == [False, True, False, False]
    none = table_curve([0, 90, 0, 0], binary=True)
    results.append(rule.run(none, EPSILON))
    assert not certified_together(rule, [*curves, none], results, 0.1).any()


def test_several_risks_share_one_path():
    rule = Control("ucb")
    curves = [table_curve([0, 0]), table_curve([0, 0, 0])]
    with refused("promises"):
        results = [rule.run(curve, EPSILON) for curve in curves]
        certified_together(rule, curves, results, 0.1)


@pytest.mark.parametrize(
    "rule",
    [
        Control("crc", method="ucb"),
        Control("crc", selection="paper"),
        Control("crc", monotone=False),
        Control("ltt", correction="bonferroni"),
    ],
)
def test_rules_that_cannot_hold_several_risks_say_so(rule):
    curves = [table_curve([0, 0])] * 2
    results = [rule.run(curve, EPSILON) for curve in curves]
    with refused(rule.name):
        certified_together(rule, curves, results, 0.1)
    alone = certified_together(rule, curves[:1], results[:1], 0.1)
    assert np.flatnonzero(alone)[-1] == results[0].index


def test_controls_can_stand_in_for_each_other():
    curve = table_curve([0, 1, 90])
    for name in controls.__all__:
        choose = getattr(controls, name)
        assert choose(curve, epsilon=0.1, delta=0.1, bound="wsr").threshold == 0.5
        assert choose(curve, 0.1, 0.1, "wsr").threshold == 0.5


def test_a_curve_is_needed():
    with pytest.raises(TypeError, match=r"`curve` must be a RiskCurve, .* but got ndarray"):
        controls.ucb(np.zeros((9, 2)), 0.1)
