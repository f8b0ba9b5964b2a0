"""`calibrate`: from record to policy, its certificate recomputed by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify import bounds, controls
from swiftsure.curves.transforms import zero_bounded
from tests.builders import (
    first_exits,
    random_logits,
    random_record,
    refused,
    request_of,
    table_curve,
)
from tests.guarantees.rules import UP_TO_ONE

RECORD = random_record(n=600)


def records():
    """One of each kind of exit record: plain, with own costs, with groups."""
    rng = np.random.default_rng(0)
    logits, labels = random_logits(n=600)
    costs = {"flops": [1.0, 3.0, 4.0, 8.0], "ms": rng.random((600, 4)).cumsum(axis=1)}
    return {
        "plain": RECORD,
        "costs": ss.ExitRecord.from_logits(logits, labels, costs=costs),
        "groups": ss.ExitRecord.from_logits(logits, labels).grouped(np.arange(600) // 2),
    }


@pytest.mark.parametrize("name", ["plain", "costs"])
@pytest.mark.parametrize("rule", [{}, {"strict": True}, {"min_exit": 1}])
def test_the_certificate_by_hand(name, rule):
    record = records()[name]
    request = request_of(loss="brier", epsilon=0.1, rule=ss.ExitRule(**rule))
    policy = request.run(record)
    assert policy.calibration == request
    certificate, promise = policy.certificate, policy.certificate.promises[0]
    exits = first_exits(record.confidences["top1"], [policy.threshold] * 3, **rule)
    at = np.arange(600), np.asarray(exits)
    losses = record.losses["brier"]
    gap = losses[at] - losses[:, -1]
    assert promise.calibration_risk == pytest.approx(gap.mean())
    assert promise.calibration_risk <= promise.upper_bound <= promise.epsilon == 0.1
    assert certificate.costs.exit_shares == pytest.approx(np.bincount(exits, minlength=4) / 600)
    expected = {"exit": (4.0, np.mean(at[1] + 1))}
    for cost, values in record.costs.items():
        table = np.broadcast_to(values, (600, 4))
        expected[cost] = (table[:, -1].mean(), table[at].mean())
    assert certificate.costs.means == {k: pytest.approx(v) for k, v in expected.items()}
    assert (promise.risk, promise.loss, promise.loss_range) == ("gap", "brier", (-2.0, 2.0))
    assert (certificate.samples.n, certificate.samples.n_samples, certificate.samples.unit) == (
        600,
        600,
        "samples",
    )
    assert (certificate.guarantee, certificate.delta, certificate.control) == (
        "probability",
        0.1,
        "ucb",
    )
    assert (promise.bound, certificate.samples.population) == ("star", None)
    assert (certificate.provenance.seed, certificate.provenance.seed_drawn) == (
        record.order.seed,
        True,
    )
    assert (certificate.path, certificate.n_settings) == ("logit grid", len(ss.Path.logit_grid()))
    assert ss.Path.logit_grid().thresholds[certificate.index] == policy.threshold
    assert (policy.strict, policy.min_exit) == (rule.get("strict", False), rule.get("min_exit", 0))
    assert policy.settings == {"threshold": policy.threshold}
    assert (policy.score, policy.n_exits) == ("top1", 4)


@pytest.mark.parametrize("rule", [{"strict": True}, {"min_exit": 2}])
def test_a_policy_of_groups_exits_as_it_was_certified(rule):
    record = records()["groups"]
    policy = request_of(loss="brier", epsilon=0.3, rule=ss.ExitRule(**rule)).run(record)
    assert (policy.strict, policy.min_exit) == (rule.get("strict", False), rule.get("min_exit", 0))
    exits = policy.exits(record.confidences["top1"])
    assert exits.min() >= policy.min_exit
    losses = record.losses["brier"]
    gap = losses[np.arange(600), exits] - losses[:, -1]
    assert policy.certificate.promises[0].calibration_risk == pytest.approx(gap.mean())


def test_the_certificate_of_groups():
    record = records()["groups"]
    policy = ss.calibrate(record, loss="brier", epsilon=0.15)
    certificate = policy.certificate
    assert (certificate.samples.n, certificate.samples.n_samples, certificate.samples.unit) == (
        300,
        600,
        "groups",
    )
    assert certificate.costs.exit_shares is None
    curve = record.curve(loss="brier")
    assert certificate.index == controls.ucb(curve, 0.15).index is not None
    assert certificate.promises[0].calibration_risk == pytest.approx(
        curve.risk()[certificate.index]
    )
    assert "300 calibration groups" in str(policy)


def test_the_upper_bound_is_that_of_the_bound_on_the_shuffled_losses():
    for bound in UP_TO_ONE:
        policy = ss.calibrate(
            replace(RECORD, order=4),
            risk="zero-bounded gap",
            loss="zero_one",
            epsilon=0.3,
            bound=bound,
        )
        curve = RECORD.curve("zero-bounded gap", "zero_one")
        curve = curve.shuffled(4) if bounds.BOUNDS[bound].uses_order else curve
        losses = curve.loss_at(policy.certificate.index)
        upper = bounds.upper_bound(losses, 0.1, bound=bound, loss_range=curve.loss_range)
        assert policy.certificate.promises[0].upper_bound == pytest.approx(upper), bound
        assert policy.certificate.provenance.seed == (
            4 if bounds.BOUNDS[bound].uses_order else None
        )


@pytest.mark.parametrize("name", ["empirical", "crc", "ucb", "ltt"])
def test_calibrate_chooses_what_the_control_does(name):
    policy = ss.calibrate(replace(RECORD, order=3), loss="brier", epsilon=0.05, control=name)
    run = ss.Control(name).run(RECORD.curve(loss="brier"), 0.05, seed=3)
    assert policy.certificate.index == run.index is not None
    assert policy.threshold == run.threshold
    assert policy.certificate.control == name
    assert policy.certificate.guarantee == run.guarantee
    assert policy.certificate.delta == run.delta
    assert policy.certificate.conditions == run.conditions
    assert (policy.certificate.promises[0].upper_bound is None) == (run.guarantee != "probability")


def test_arguments_reach_the_curve_and_the_control():
    record = random_record(n=600, score=["top1", "entropy"])
    policy = request_of(
        risk="consistency",
        loss="brier",
        control=ss.Control("crc", "wsr", method="ucb", delta_prime=0.001),
        epsilon=0.2,
        path=[0.9, 0.8, 0.5, 0.2],
        rule="entropy",
    ).run(record)
    curve = record.curve("consistency", "brier", "entropy", [0.9, 0.8, 0.5, 0.2])
    expected = controls.crc(curve, 0.2, method="ucb", delta_prime=0.001, bound="wsr")
    assert policy.certificate.index == expected.index is not None
    assert policy.score == "entropy"
    assert policy.certificate.options == {"method": "ucb", "delta_prime": 0.001}
    assert policy.certificate.promises[0].bound == "wsr"
    assert policy.certificate.n_settings == 5


def test_a_control_object_will_do():
    rule = ss.Control("ltt", bound="hoeffding")
    policy = ss.calibrate(RECORD, loss="brier", epsilon=0.3, control=rule)
    assert policy == ss.calibrate(
        RECORD, loss="brier", epsilon=0.3, control="ltt", bound="hoeffding"
    )


def test_a_control_object_has_its_own_bound():
    rule = ss.Control("ucb", "wsr")
    with refused("bound"):
        ss.calibrate(RECORD, loss="brier", control=rule, epsilon=0.05, bound="hoeffding")
    taken = request_of(loss="brier", epsilon=0.05, control=ss.Control("ltt"), bound="hoeffding")
    assert taken.control == ss.Control("ltt", "hoeffding")
    assert replace(request_of(loss="brier", epsilon=0.05), bound="wsr").control.bound == "wsr"


def test_the_only_score_and_loss_need_not_be_named():
    record = ss.ExitRecord({"saturation": [[0.9]] * 100}, losses={"mine": [[0.0, 0.0]] * 100})
    policy = ss.calibrate(record, epsilon=0.1)
    assert policy.score == "saturation"
    assert policy.certificate.promises[0].loss == "mine"


def test_the_models_fingerprint_is_carried_along():
    record = ss.ExitRecord([[0.9]] * 100, losses={"mine": [[0.0, 0.0]] * 100}, fingerprint="abc")
    policy = ss.calibrate(record, epsilon=0.1)
    assert policy.certificate.provenance.model == "abc"
    assert "not bound to a particular model" not in str(policy)
    assert ss.calibrate(RECORD, loss="brier", epsilon=0.05).certificate.provenance.model is None


def test_what_the_model_ran_with_is_carried_along():
    record = ss.ExitRecord(
        [[0.9]] * 100,
        losses={"mine": [[0.0, 0.0]] * 100},
        temperatures=[1.5, 2.0],
        dtype="bfloat16",
    )
    policy = ss.calibrate(record, epsilon=0.1)
    assert (policy.temperatures, policy.dtype) == ((1.5, 2.0), "bfloat16")
    plain = ss.calibrate(RECORD, loss="brier", epsilon=0.05)
    assert (plain.temperatures, plain.dtype) == (None, None)


# Several risks


def test_several_risks_are_all_held():
    risks = [
        ss.Promise("zero_one", epsilon=0.05),
        ss.Promise("brier", risk="consistency", epsilon=0.2),
        ss.Promise("brier", risk="zero-bounded gap", epsilon=0.1),
    ]
    policy = ss.calibrate(RECORD, risks)
    alone = [ss.calibrate(RECORD, risk=r.risk, loss=r.loss, epsilon=r.epsilon) for r in risks]
    indices = [p.certificate.index for p in alone]
    assert len(set(indices)) > 1
    assert policy.certificate.index == min(indices)
    promises = policy.certificate.promises
    assert [(p.risk, p.loss, p.epsilon) for p in promises] == [
        ("gap", "zero_one", 0.05),
        ("consistency", "brier", 0.2),
        ("zero-bounded gap", "brier", 0.1),
    ]
    for promise, risk in zip(promises, risks, strict=True):
        curve = RECORD.curve(risk.risk, risk.loss)
        assert promise.calibration_risk == pytest.approx(curve.risk()[min(indices)])
        assert promise.upper_bound <= promise.epsilon


def test_several_risks_with_one_that_fails_run_the_full_model():
    risks = [
        ss.Promise("brier", risk="consistency", epsilon=0.5),
        ss.Promise("zero_one", epsilon=1e-4),
    ]
    policy = ss.calibrate(RECORD, risks)
    assert policy.threshold is None
    assert policy.certificate.costs.exit_shares == (0.0, 0.0, 0.0, 1.0)
    assert [p.upper_bound for p in policy.certificate.promises] == [None, None]
    assert [p.calibration_risk for p in policy.certificate.promises] == [0.0, 0.0]


def test_several_risks_need_a_rule_that_can_hold_them():
    risks = [
        ss.Promise("brier", risk="consistency", epsilon=0.5),
        ss.Promise("zero_one", epsilon=0.3),
    ]
    assert ss.calibrate(RECORD, risks, control="crc").threshold is not None
    with refused("crc"):
        ss.calibrate(RECORD, risks, control=ss.Control("crc", selection="paper"))
    with refused("ltt"):
        ss.calibrate(RECORD, risks, control=ss.Control("ltt", correction="bonferroni"))
    with refused("promises"):
        ss.calibrate(RECORD, [])
    with refused("promises"):
        ss.calibrate(RECORD, [ss.CostPromise("exit", at_most=3)])
    with refused("promises"):
        ss.calibrate(RECORD, ["zero_one"])


# Systems that run anew at each threshold


def runs(thresholds, **changes):
    losses = np.zeros((300, len(thresholds)))
    losses[:150, -1] = 1.0
    losses[:10, 1] = 1.0
    costs = {"layers": np.linspace(8, 2, len(thresholds)), "ms": np.ones((300, len(thresholds)))}
    return ss.ThresholdRecord(thresholds, losses={"bleu": losses}, costs=costs, **changes)


def test_a_threshold_record_sets_its_dials():
    record = runs([0, 2, 4], dial="rollback", settings={"fallback": 0.4, "draft": "small"})
    policy = ss.calibrate(record, epsilon=0.1)
    assert policy.threshold == 2.0
    assert policy.settings == {"rollback": 2.0, "fallback": 0.4, "draft": "small"}
    assert (policy.n_exits, policy.score, policy.thresholds) == (None, None, None)
    certificate = policy.certificate
    assert certificate.index == 1
    assert certificate.promises[0].calibration_risk == pytest.approx(10 / 300)
    assert certificate.costs.means == {"layers": (8.0, 5.0), "ms": (1.0, 1.0)}
    assert certificate.costs.exit_shares is None
    assert certificate.path == "given settings"


@pytest.mark.parametrize(
    ("safe", "written"), [(0.0, 0.0), (1.0, 1.0), (None, None), (math.inf, None)]
)
def test_a_dial_stands_at_its_safe_end_where_nothing_is_certified(safe, written):
    record = runs([safe, 2, 4], dial="rollback", settings={"fallback": 0.4})
    policy = ss.calibrate(record, epsilon=0.001)
    assert policy.threshold is None
    assert policy.settings == {"rollback": written, "fallback": 0.4}
    assert policy.certificate.costs.means == {"layers": (8.0, 8.0), "ms": (1.0, 1.0)}


def test_a_fixed_setting_may_not_bear_the_name_of_the_dial():
    with refused("settings"):
        runs([0, 2, 4], dial="rollback", settings={"rollback": 9})


def test_a_threshold_record_has_its_own_score_and_path():
    with refused("path"):
        ss.calibrate(runs([0, 2, 4]), path=[0.5], epsilon=0.05)
    known = runs([0, 2, 4], settings={"score": "softmax"})
    with refused("score"):
        request_of(rule="top1", epsilon=0.05).run(known)
    named = request_of(rule="softmax", epsilon=0.05).run(known)
    plain = ss.calibrate(known, epsilon=0.05)
    assert named.certificate == plain.certificate
    assert named.settings == plain.settings
    with refused("score"):
        request_of(rule="softmax", epsilon=0.05).run(runs([0, 2, 4]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"control": "crc", "delta": 0.05}, r"`delta` is not used by crc.* leave it out"),
        ({"control": "empirical", "delta": 0.05}, "`delta` is not used by empirical"),
        ({"control": "crc", "bound": "wsr"}, r'`bound` is not used by crc.*method="ucb"'),
        ({"control": ss.Control("crc"), "delta": 0.2}, "`delta` is not used by crc"),
        ({"control": "empirical", "bound": "wsr"}, r'`bound` is not used.*control="ucb" or "ltt"'),
        ({"eps": 0.1}, r"`calibrate` has no argument `eps`. Did you mean `epsilon`"),
        ({"loss": "accuracy"}, r"'accuracy'. Did you mean 'zero_one'"),
        ({"epsilon": 1}, "Did you mean 0.01, which is 1 %"),
        ({"epsilon": 5}, "Did you mean 0.05, which is 5 %"),
    ],
)
def test_what_would_be_ignored_or_is_not_known_is_refused(arguments, message):
    record = random_record(losses="zero_one")
    with pytest.raises((ValueError, TypeError), match=message):
        ss.calibrate(record, **{"epsilon": 0.3, **arguments})


def test_a_failure_probability_above_a_half_warns():
    with pytest.warns(UserWarning, match=r"of 5 % only. Did you mean 0.05\?") as seen:
        ss.calibrate(random_record(losses="zero_one"), epsilon=0.3, delta=0.95)
    assert len(seen) == 1


# Curves


def test_a_curve_is_calibrated_as_it_is():
    curve = table_curve([0, 1, 90])
    policy = ss.calibrate(curve, epsilon=0.1)
    assert policy.threshold == 0.5
    assert policy.settings == {"threshold": 0.5}
    assert (policy.n_exits, policy.certificate.samples.n_samples) == (None, 200)
    gap = ss.RiskCurve.from_losses([None, 0], [[0, 1], [0, -1]] * 100)
    bounded = ss.calibrate(gap, epsilon=0.2, control=ss.Control("ucb", zero_bounded=True))
    assert bounded.threshold is None
    assert bounded.certificate.promises[0].risk == "gap"
    assert bounded.certificate.options == {"zero_bounded": True}
    bounded = ss.calibrate(zero_bounded(gap), epsilon=0.2)
    assert bounded.threshold is None
    assert bounded.certificate.promises[0].risk == "zero-bounded gap"


def test_a_first_setting_that_is_not_the_full_model_is_bounded_too():
    losses = np.tile([0.1, 0.3], (400, 1))
    curve = ss.RiskCurve.from_losses([1.0, 0.5], losses, loss_range=(0, 1))
    for options in ({}, {"control": ss.Control("ltt", correction="bonferroni")}):
        policy = ss.calibrate(curve, epsilon=0.2, **options)
        promise = policy.certificate.promises[0]
        assert (policy.threshold, policy.certificate.index) == (1.0, 0)
        delta = 0.05 if options else 0.1
        upper = bounds.upper_bound(losses[:, 0], delta, loss_range=(0, 1))
        assert promise.upper_bound == pytest.approx(upper)
        assert promise.calibration_risk == pytest.approx(0.1)
    nothing = ss.calibrate(curve, epsilon=0.05)
    assert nothing.threshold is None
    assert nothing.certificate.promises[0].calibration_risk == 0  # the full model against itself


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("score", {"rule": "top1"}),
        ("path", {"path": [0.5]}),
        ("strict", {"rule": ss.ExitRule(strict=True)}),
        ("min_exit", {"rule": ss.ExitRule(min_exit=1)}),
        ("missing", {"missing": "stop"}),
    ],
)
def test_a_curve_has_its_score_and_path_already(name, extra):
    with pytest.raises(ValueError, match=f"`{name}` is the RiskCurve's own"):
        request_of(epsilon=0.05, **extra).run(table_curve([0, 1]))


def test_promises_stand_alone():
    """What would be ignored beside promises is refused."""
    promises = [ss.Promise("zero_one", epsilon=0.1)]
    for extra in ({"epsilon": 0.1}, {"risk": "gap"}):
        with pytest.raises(ValueError, match=f"`{next(iter(extra))}` is each Promise's own"):
            ss.calibrate(RECORD, promises, **extra)


def test_several_promises_about_one_curve():
    curve = ss.RiskCurve.from_losses([None, 0.5], [[0, 0]] * 150 + [[0, 0.3]] * 50)
    both = [ss.Promise(epsilon=0.12), ss.Promise(above=0.1, epsilon=0.4)]
    policy = ss.calibrate(curve, both)
    assert policy.threshold == 0.5
    assert [p.calibration_risk for p in policy.certificate.promises] == pytest.approx([0.075, 0.25])
    assert ss.calibrate(curve, [*both, ss.Promise(above=0.1, epsilon=0.2)]).threshold is None


def test_epsilon_is_required_and_arguments_have_names():
    for loss in ({"loss": "brier"}, {}):
        with pytest.raises(TypeError, match="`epsilon` must be given"):
            ss.calibrate(RECORD, **loss)
    with pytest.raises(TypeError, match="`epsilon` must be given"):
        ss.Promise("brier")
    with pytest.raises(TypeError, match="positional"):
        ss.calibrate(RECORD, "gap", "brier")
    with pytest.raises(TypeError, match=r"`promises` must be Promise .* got 'zero_one'"):
        ss.Calibration("zero_one")


@pytest.mark.parametrize("risk", ["gap", "zero-bounded gap"])
def test_a_curve_may_be_called_by_its_own_names_alone(risk):
    record = random_record(200)
    curve = record.curve(risk, "zero_one")
    plain = ss.calibrate(curve, epsilon=0.1)
    named = ss.calibrate(curve, risk=risk, loss="zero_one", epsilon=0.1)
    assert named.certificate == plain.certificate
    for wrong in ({"risk": "consistency"}, {"loss": "brier"}):
        with refused(next(iter(wrong))):
            ss.calibrate(curve, **wrong, epsilon=0.1)
    unnamed = ss.calibrate(table_curve([0, 1]), loss="brier", epsilon=0.1)
    assert unnamed.certificate.promises[0].loss == "brier"


def test_a_pool_is_what_the_promise_rests_on():
    told = str(ss.calibrate(random_record(200).drawn_from(5000), loss="zero_one", epsilon=0.2))
    assert "drawn from the finite population without replacement" in told
    assert "independent draws" not in told


@pytest.mark.parametrize("record", [None, [[0.5]], "record.parquet", np.zeros((3, 3))])
def test_anything_else_is_refused(record):
    with pytest.raises(
        TypeError, match="`record` must be an ExitRecord, a ThresholdRecord or a RiskCurve"
    ):
        ss.calibrate(record, epsilon=0.05)


# Pools


def test_a_pool_is_passed_on():
    losses = np.zeros((200, 2))
    losses[:10, 1] = 1.0
    record = ss.ThresholdRecord([None, 0.0], inconsistencies={"zero_one": losses})
    promise = {"risk": "consistency", "epsilon": 0.07, "bound": "binomial"}
    assert ss.calibrate(record, **promise).threshold is None
    policy = ss.calibrate(record.drawn_from(210), **promise)
    assert policy.threshold == 0.0
    assert policy.certificate.samples.population == 210
    upper = bounds.upper_bound(losses[:, 1], 0.1, bound="binomial", pool=210)
    assert policy.certificate.promises[0].upper_bound == pytest.approx(upper)


@pytest.mark.parametrize("name", ["crc", "empirical"])
def test_a_pool_is_refused_where_it_is_not_used(name):
    with refused("pool"):
        ss.calibrate(RECORD.drawn_from(9999), loss="brier", epsilon=0.1, control=name)


def test_a_pool_holds_all_samples():
    with refused("population"):
        RECORD.drawn_from(599)


# Determinism


def test_one_record_gives_one_policy():
    record = random_record()
    for name in ("ucb", "crc"):
        first, second = (
            ss.calibrate(record, loss="brier", control=name, epsilon=0.05) for _ in range(2)
        )
        assert first == second


@pytest.mark.parametrize("bound", UP_TO_ONE)
def test_the_seed_matters_to_bets_only(bound):
    arguments = {"loss": "zero_one", "epsilon": 0.1, "bound": bound, "risk": "zero-bounded gap"}
    policies = [ss.calibrate(replace(RECORD, order=seed), **arguments) for seed in range(3)]
    upper = {policy.certificate.promises[0].upper_bound for policy in policies}
    if bounds.BOUNDS[bound].uses_order:
        assert len(upper) > 1
        assert [policy.certificate.provenance.seed for policy in policies] == [0, 1, 2]
    else:
        assert policies[0] == policies[1] == policies[2]


def test_the_data_is_part_of_the_certificate():
    first = ss.calibrate(RECORD, loss="brier", epsilon=0.05).certificate.provenance.data
    assert first == RECORD.curve(loss="brier").fingerprint()
    assert (
        first
        != ss.calibrate(
            RECORD.take(np.arange(599)), loss="brier", epsilon=0.05
        ).certificate.provenance.data
    )


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epsilon": 0}, r"`epsilon` must be in \(0, 2\), but got 0"),
        ({"epsilon": 2.0}, r"`epsilon` must be in \(0, 2\), but got 2"),
        ({"epsilon": math.nan}, r"`epsilon` must be in \(0, 2\), but got nan"),
        ({"epsilon": "much"}, "`epsilon` must be a number, but got 'much'"),
        ({"delta": 0}, r"`delta` must be in \(0, 1\), but got 0"),
        ({"delta": 1}, r"`delta` must be in \(0, 1\), but got 1"),
        ({"delta": math.nan}, "`delta` must be in"),
        ({"risk": "gep"}, "`risk` must be one of: gap, consistency, .* Did you mean 'gap'"),
        ({"loss": "brierr"}, "`loss` must be one of: zero_one, brier; .* Did you mean 'brier'"),
        ({"loss": None}, "`loss` must be given; this record has: zero_one, brier"),
        ({"rule": "top2"}, "`score` must be one of: top1; .* Did you mean 'top1'"),
        ({"rule": ss.ExitRule(threshold=0.5)}, "`rule` must be an ExitRule without a threshold"),
        ({"control": "ucbs"}, "`control` must be one of: .* Did you mean 'ucb'"),
        ({"bound": "stars"}, "`bound` must be one of: .* Did you mean 'star'"),
        ({"bound": "binomial"}, "`bound` 'binomial' needs losses declared to be 0 or 1"),
        ({"bound": "hoeffding_bentkus"}, "`bound` 'hoeffding_bentkus' needs losses of at least 0"),
        ({"path": "breakpoint"}, "`path` must be one of: .* Did you mean 'breakpoints'"),
        ({"path": [[0.5]]}, "`path` must have shape"),
        ({"control": 3}, "`control` must be a name or a Control, but got 3"),
        ({"missing": "drop"}, "`missing` must be one of: raise, worst, stop; .*'drop'"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        request_of(**{"loss": "brier", "epsilon": 0.05, **arguments}).run(RECORD)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ss.ExitRule(min_exit=-1), "`min_exit` must be at least 0"),
        (lambda: ss.Control("crc", selection="all"), "`selection` must be one of: contiguous"),
        (lambda: ss.Promise("brier", epsilon=0.1, among="leavers"), "`among` must be one of: all"),
        (lambda: ss.Promise("brier", epsilon=0.1, within="slice"), "`within` must be one of"),
        (lambda: ss.CostPromise("flops", at_most=0), "`at_most` must be in"),
        (lambda: ss.Ask(3), "`labeller` must be a function"),
        (lambda: ss.Ask(len, budget=-1), "`budget` must be at least 0"),
    ],
)
def test_bad_values_are_refused_when_they_are_made(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_a_pool_needs_a_bound_that_uses_it():
    with pytest.raises(ValueError, match="`pool` must go with one of the bounds"):
        ss.calibrate(RECORD.drawn_from(9999), loss="brier", epsilon=0.05, bound="hoeffding")
