"""`calibrate_best` keeps its promise among candidates whose risk is just above ε."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import binomtest

import swiftsure as ss
from swiftsure.certify.best_of import calibrate_best

EPSILON, DELTA, N, K, TRIALS = 0.05, 0.1, 200, 8, 300
RISK = EPSILON + 1e-4


def candidates(rng):
    """K pairs whose small model disagrees a little too often; exits save much."""
    wrong = rng.random((K, N)) < RISK
    return [
        ss.ExitRecord(
            np.ones((N, 1)),
            inconsistencies={"zero_one": np.column_stack([row, np.zeros(N)])},
            costs={"usd": [0.1 + 0.01 * k, 1.1]},
            full_costs={"usd": 1.0},
        )
        for k, row in enumerate(wrong)
    ]


REQUEST = ss.Calibration(ss.Promise(risk="consistency", epsilon=EPSILON), delta=DELTA, path=[0.5])
GAP = ss.Promise(epsilon=0.05)


def uncorrected(records):
    """The broken way: calibrate all of them at δ and keep the cheapest."""
    made = [REQUEST.run(record) for record in records]
    return min(made, key=lambda policy: policy.certificate.costs.means["usd"][1])


def pilot_reused(records):
    """The broken way: choose on some samples and calibrate on all of them."""
    risks = [record.inconsistencies["zero_one"][:, 0].mean() for record in records]
    return REQUEST.run(records[int(np.argmin(risks))])


def violations(choose):
    """How often a setting is chosen although its risk is above ε."""
    rng = np.random.default_rng(0)
    chosen = [choose(candidates(rng)) for _ in range(TRIALS)]
    return sum(not policy.runs_full_model for policy in chosen)


@pytest.mark.parametrize(
    "how", [{"correction": "bonferroni"}, {"split": 0.3}], ids=["bonferroni", "pilot"]
)
def test_the_choice_keeps_the_promise(how):
    found = violations(lambda records: calibrate_best(records, REQUEST, **how))
    assert binomtest(found, TRIALS, DELTA, alternative="greater").pvalue > 1e-6


@pytest.mark.parametrize("broken", [uncorrected, pilot_reused])
def test_that_test_fails_without_a_correction(broken):
    found = violations(broken)
    assert binomtest(found, TRIALS, DELTA, alternative="greater").pvalue < 1e-6


def thrice(records):
    """The samples of each record three times, in groups of the same."""
    rows = np.repeat(np.arange(N), 3)
    return [each.resampled(rows, rows) for each in records]


def test_whole_groups_are_the_pilot():
    found = violations(lambda records: calibrate_best(thrice(records), REQUEST, split=0.3))
    assert binomtest(found, TRIALS, DELTA, alternative="greater").pvalue > 1e-6
    made = calibrate_best(thrice(candidates(np.random.default_rng(0))), REQUEST, split=0.3)
    assert (made.certificate.selection.n_pilot, made.certificate.samples.n) == (60, 140)
    assert "on 60 pilot groups that were not used to calibrate" in str(made)


def test_that_test_fails_if_groups_are_not_whole():
    """The pilot is of samples, whose groups then calibrate too, as if they were independent."""

    def broken(records):
        alone = [dataclasses.replace(each, groups=None) for each in thrice(records)]
        return calibrate_best(alone, REQUEST, split=0.3)

    assert binomtest(violations(broken), TRIALS, DELTA, alternative="greater").pvalue < 1e-6


def test_candidates_share_a_budget_of_labels():
    record, asked = good(), []
    bare = dataclasses.replace(
        record,
        losses={"zero_one": np.full((1000, 2), np.nan)},
        inconsistencies={"zero_one": np.abs(record.losses["zero_one"])},
    )

    def labeller(ids):
        asked.extend(ids.tolist())
        return {"zero_one": record.losses["zero_one"][ids]}

    request = ss.Calibration(
        ss.Promise("zero_one", epsilon=0.05), missing=ss.Ask(labeller, budget=150)
    )
    policy = calibrate_best(bare, request, correction="bonferroni")
    assert (policy.score, policy.runs_full_model) == ("a", False)
    assert 50 < len(asked) <= 150


def good(seed=0, n=1000):
    rng = np.random.default_rng(seed)
    sure = {"a": rng.random((n, 1)), "b": rng.random((n, 1))}
    wrong = (sure["a"][:, 0] < 0.5) & (rng.random(n) < 0.4)
    return ss.ExitRecord(
        sure,
        losses={"zero_one": np.column_stack([wrong, np.zeros(n)])},
        costs={"usd": [0.1, 1.1]},
        full_costs={"usd": 1.0},
    )


def test_the_certificate_says_how_it_was_chosen(tmp_path):
    record = good()
    policy = calibrate_best(record, GAP, correction="bonferroni")
    selection = policy.certificate.selection
    assert (policy.score, selection.chosen, selection.candidates) == ("a", "a", ("a", "b"))
    assert policy.certificate.delta == 0.1
    alone = ss.Calibration(GAP, rule="a", delta=0.05).run(record)
    assert policy.threshold == alone.threshold
    assert "among 2 candidates, each tested at δ / 2, so that all their promises hold" in str(
        policy
    )
    policy.save(tmp_path / "policy.json")
    assert ss.Policy.load(tmp_path / "policy.json") == policy
    pilot = calibrate_best(record, GAP, split=300)
    assert (pilot.certificate.samples.n, pilot.certificate.selection.n_pilot) == (700, 300)
    assert "on 300 pilot samples that were not used to calibrate" in str(pilot)
    assert calibrate_best(record, GAP, split=300).threshold == pilot.threshold
    named = calibrate_best({"x": (record, "b"), "y": (record, "a")}, GAP, split=0.3)
    assert named.certificate.selection.chosen == "y"
    assert ss.calibrate_best is calibrate_best


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`split` or `correction` must be given"),
        ({"split": 0.5, "correction": "bonferroni"}, "and not both"),
        ({"correction": "bonferroni", "request": ss.Calibration(GAP, control="crc")}, "`control`"),
        ({"correction": "bonferroni", "request": ss.Calibration(GAP, cost="eur")}, "`cost`"),
        (
            {"split": 0.5, "request": ss.Calibration(GAP, missing=ss.Ask(None, 9))},
            "`missing=Ask",
        ),
        ({"split": 1000}, "leave samples to calibrate"),
    ],
)
def test_what_it_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        calibrate_best(good(), **{"request": GAP, **options})


@pytest.mark.parametrize("drawn", [True, False])
def test_the_certificate_says_what_the_split_rests_on(drawn):
    """The binomial test does not depend on the order, but which samples it sees does."""
    rng = np.random.default_rng(0)
    records = candidates(rng)
    if not drawn:
        records = [dataclasses.replace(each, order=0) for each in records]
    request = dataclasses.replace(REQUEST, promises=ss.Promise(risk="consistency", epsilon=0.2))
    made = calibrate_best(records, request, split=0.2)
    assert made.certificate.provenance.seed is None
    stated = "split by a seed drawn at random" if drawn else "came in random order"
    assert stated in str(made)


def test_a_split_needs_the_same_samples():
    other = good(1).take(np.arange(999))
    with pytest.raises(ValueError, match="same samples"):
        calibrate_best([good(), other], GAP, split=0.3)
    assert calibrate_best([good(), other], GAP, correction="bonferroni").score


@pytest.mark.parametrize(
    "promise",
    [
        ss.Promise(epsilon=0.1, among="exits"),
        ss.Promise(epsilon=0.1, within="slices"),
        ss.Promise(epsilon=0.3, worst=0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", [{"correction": "bonferroni"}, {"split": 0.3}], ids=str)
def test_any_promise_can_choose(promise, how):
    record = good().sliced(np.arange(1000) % 2)
    policy = calibrate_best(record, promise, **how)
    assert policy.score == "a"
    request = policy.calibration
    assert request.rule.score == "a"
    part = record.split(300, record.order)[1] if "split" in how else record
    assert request.run(part).threshold == policy.threshold
