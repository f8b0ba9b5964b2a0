"""What a certificate shows beside its promise: true as well."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import check_rate

SETTINGS = {
    "fixed sequence": ({}, [0.0334, 0.0405, 0.09]),
    "bonferroni": ({"correction": "bonferroni"}, [0.03] * 40),
}


@pytest.mark.parametrize(("options", "risks"), SETTINGS.values(), ids=SETTINGS)
def test_the_upper_bound_of_the_chosen_setting_covers_its_risk(options, risks):
    """The setting was chosen by its losses; the bound shown for it must allow for that."""
    rng = np.random.default_rng(0)
    misses, draws = 0, 300
    for _ in range(draws):
        losses = np.zeros((500, len(risks) + 1))
        losses[:, 1:] = rng.random((500, len(risks))) < risks
        settings = np.arange(len(risks) + 1)[::-1]
        curve = ss.RiskCurve.from_losses(settings, losses, binary=True, relative=True)
        control = ss.Control("ltt", **options)
        certificate = ss.calibrate(curve, epsilon=0.05, control=control).certificate
        if certificate.index is not None:
            upper = certificate.promises[0].upper_bound
            misses += upper is not None and risks[certificate.index - 1] > upper
    check_rate(misses, draws, 0.1)


@pytest.mark.parametrize("bound", ["star", "wsr", "binomial", "hoeffding_bentkus"])
def test_the_upper_bound_of_a_certified_setting_is_at_most_epsilon(bound):
    """Test and bound say the same: what was certified at ε has a bound of ε or less."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        losses = np.zeros((400, 12))
        losses[:, 1:] = rng.random((400, 11)) < np.arange(1, 12) * 0.01
        settings = np.arange(12)[::-1]
        curve = ss.RiskCurve.from_losses(settings, losses, loss_range=(0, 1), order=seed)
        policy = ss.calibrate(curve, epsilon=0.08, bound=bound)
        assert policy.threshold is not None
        assert policy.certificate.promises[0].upper_bound <= 0.08 + 1e-8


@pytest.mark.parametrize(
    ("control", "options", "promise"),
    [
        ("ucb", {}, "probability"),
        ("ltt", {}, "probability"),
        ("crc", {}, "expectation"),
        ("crc", {"method": "ucb"}, "expectation"),
        ("crc", {"selection": "paper"}, "none"),
        ("crc", {"selection": "contiguous"}, "none"),
        ("crc", {"monotone": False}, "none"),
        ("empirical", {}, "none"),
    ],
)
def test_a_policy_promises_what_its_control_does(control, options, promise):
    """And says in its sentence where it promises nothing."""
    curve = ss.RiskCurve.from_losses([1.0, 0.5], np.zeros((500, 2)))
    policy = ss.calibrate(curve, epsilon=0.05, control=ss.Control(control, **options))
    assert policy.certificate.guarantee == promise
    assert ("Nothing is promised" in str(policy)) == (promise == "none")


def partly_labelled():
    """Return a record of 400 samples; every fourth label is missing."""
    sample = Population(n_exits=3).sample(400, seed=0)
    labels = np.where(np.arange(400) % 4 == 0, -1, sample.labels)
    return ss.ExitRecord.from_logits(sample.logits, labels)


def test_labels_assumed_to_be_the_worst_are_a_condition():
    """Bets are valid if a label is missing for reasons of its own sample alone."""
    condition = "whether a sample's label is missing depends on that sample alone"
    record = partly_labelled()
    bets = {"bound": "star", "missing": "worst"}
    filled = ss.calibrate(record, loss="zero_one", epsilon=0.3, **bets)
    assert condition in filled.certificate.assumptions
    assert condition in str(filled)
    without = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=0.3, **bets)
    assert condition not in without.certificate.assumptions  # needs no label
    where_it_matters = np.isin(record.ids, record.needs_label())
    rest = record.take(np.flatnonzero(~where_it_matters))
    agreeing = ss.calibrate(rest, loss="zero_one", epsilon=0.3, **bets)
    assert np.isnan(rest.losses["zero_one"]).any()
    assert condition not in agreeing.certificate.assumptions  # nothing was filled in


ZERO_BOUNDED = ss.Control("ucb", zero_bounded=True)


@pytest.mark.parametrize(
    ("above", "options"),
    [
        (None, {}),
        (None, {"bound": "hoeffding"}),
        (None, {"control": "crc"}),
        (None, {"control": ZERO_BOUNDED}),
        (0.5, {}),
    ],
    ids=str,
)
def test_tests_that_larger_losses_never_help_need_no_condition_of_labels(above, options):
    """They certify less with the worst losses, whatever decided which labels are missing."""
    promise = ss.Promise("zero_one", above=above, epsilon=0.3)
    policy = ss.calibrate(partly_labelled(), promise, missing="worst", **options)
    assert not any("label is missing" in text for text in policy.certificate.assumptions)


@pytest.mark.parametrize(
    ("options", "unit"),
    [
        ({}, "samples"),
        ({"control": "ltt", "bound": "star"}, "samples"),
        ({"control": "crc"}, "samples"),
        ({"control": ss.Control("crc", method="ucb")}, "samples"),
        ({"drawn_from": 1000}, "samples"),
        ({"missing": "worst"}, "samples"),
        ({"missing": "stop"}, "samples"),
        ({"among": "exits"}, "samples"),
        ({"within": "slices"}, "samples"),
        ({"grouped": {}}, "groups"),
        ({"grouped": {"average": "sample", "max_size": 2}}, "groups"),
        ({"grouped": {"average": "sample", "max_size": 2}, "among": "exits"}, "groups"),
    ],
    ids=str,
)
def test_the_number_of_samples_is_a_condition(options, unit):
    """Many numbers would be many tests; see `test_stopping_at_few_disagreements_is_refuted`."""
    record = partly_labelled()
    known = ~np.isnan(record.losses["zero_one"][:, 0])
    options = dict(options)
    if "missing" not in options:
        record = record.take(np.flatnonzero(known))
    if "grouped" in options:
        record = record.grouped(np.arange(record.n) // 2, **options.pop("grouped"))
    if "drawn_from" in options:
        record = record.drawn_from(options.pop("drawn_from"))
    what = {name: options.pop(name) for name in ("among", "within") if name in options}
    if "within" in what:
        record = record.sliced(np.arange(record.n) % 2)
    promise = ss.Promise("zero_one", epsilon=0.4, **what)
    certificate = ss.calibrate(record, promise, **options).certificate
    condition = f"the number of calibration {unit} was fixed before the model was run on them"
    assert condition in certificate.assumptions


def test_a_budget_fixes_the_number_of_samples_too():
    record = partly_labelled()
    plan = ss.planning.lowest_epsilon(record, saving=0.1, risk="consistency", loss="zero_one")
    assert "was fixed before the model was run on them" in str(plan.policy)


def test_zero_bounded_losses_are_said_to_be_what_they_are():
    """A 0-1 gap may be −1; what the exact test needs is that max(0, gap) is 0 or 1."""
    sample = Population(n_exits=3).sample(400, seed=0)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels)
    assert (record.losses["zero_one"] - record.losses["zero_one"][:, -1:]).min() == -1
    options = {"loss": "zero_one", "epsilon": 0.3}
    bounded = ss.calibrate(record, control=ZERO_BOUNDED, **options).certificate
    assert bounded.promises[0].bound == "binomial"
    assert "every zero_one gap above 0 is 1" in bounded.assumptions
    assert not any("is 0 or 1" in text for text in bounded.assumptions)
    plain = ss.calibrate(record, **options).certificate
    assert "every zero_one gap is -1, 0 or 1" in plain.assumptions
    risk = ss.calibrate(record, risk="zero-bounded gap", **options).certificate
    assert any(text.endswith("is 0 or 1") for text in risk.assumptions)


def test_temperatures_are_a_condition():
    """Temperatures that were fitted on the calibration samples would void the promise."""
    condition = "the temperatures were fitted on other samples than the calibration's"
    sample = Population(n_exits=3).sample(400, seed=0)
    for temperatures, expected in [(1.0, False), ([1.5, 1.2, 1.0], True)]:
        record = ss.ExitRecord.from_logits(
            sample.logits, sample.labels, temperatures=temperatures
        ).grouped(np.arange(400) // 2)
        policy = ss.calibrate(record, loss="brier", epsilon=0.5, control=ZERO_BOUNDED)
        assert (condition in policy.certificate.assumptions) == expected
        assert (condition in str(policy)) == expected
