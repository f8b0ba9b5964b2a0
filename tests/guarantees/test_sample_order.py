"""The order of the samples: betting tests depend on it, so it comes from a seed alone."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from tests.guarantees.broken import unshuffled
from tests.guarantees.checkers import RefutedError, Task, check_rate, check_violations
from tests.guarantees.rules import UP_TO_ONE, curve_of, rule
from tests.guarantees.sources import Types, two_settings

ARRANGEMENTS = {
    "ascending": lambda losses: losses[np.argsort(losses[:, -1], kind="stable")],
    "descending": lambda losses: losses[np.argsort(-losses[:, -1], kind="stable")],
}

TASK = Task(0.1, 0.1)
UNSAFE = two_settings(0.1 + 1e-6)
GAPS = Types(np.asarray([[0, -1.0], [0, 0], [0, 1]]), np.asarray([0.3, 0.3 - 1e-6, 0.4 + 1e-6]))


@pytest.mark.parametrize("arrange", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
@pytest.mark.parametrize("bound", [name for name in UP_TO_ONE if name != "binomial"])
def test_sorted_samples_are_as_safe_as_any(bound, arrange):
    """Samples sorted by their loss, and another seed for each draw: P(violation) ≤ δ."""
    check_violations(rule("ucb", bound=bound), UNSAFE, TASK, n=100, draws=800, arrange=arrange)


@pytest.mark.parametrize("arrange", ARRANGEMENTS.values(), ids=ARRANGEMENTS)
@pytest.mark.parametrize("bound", ["star", "wsr", "hoeffding"])
def test_sorted_gaps_are_as_safe_as_any(bound, arrange):
    """The same for gaps of both signs."""
    task = Task(0.1, 0.1, -1, 1)
    check_violations(rule("ucb", bound=bound), GAPS, task, n=100, draws=800, arrange=arrange)


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_betting_on_samples_as_they_come_is_refuted_by_ascending_losses(bound):
    """Without the shuffle, the gains come first and the goal is reached before the losses."""
    with pytest.raises(RefutedError):
        check_violations(
            unshuffled(bound), UNSAFE, TASK, 100, 300, arrange=ARRANGEMENTS["ascending"]
        )


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_betting_on_gaps_as_they_come_is_refuted_by_ascending_losses(bound):
    """The same for gaps of both signs."""
    with pytest.raises(RefutedError):
        check_violations(
            unshuffled(bound),
            GAPS,
            Task(0.1, 0.1, -1, 1),
            100,
            300,
            arrange=ARRANGEMENTS["ascending"],
        )


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_the_result_tells_the_seed_of_the_order(bound):
    """Whoever reads a result can repeat it; bounds that ignore the order name no seed."""
    curve = curve_of(UNSAFE.sample(100, np.random.default_rng(0)), TASK)
    assert ss.control.ucb(curve, 0.2, bound=bound, seed=7).seed == 7
    assert ss.control.ucb(curve, 0.2, bound="hoeffding", seed=7).seed is None


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_the_order_comes_from_the_seed(bound):
    """A seed tests the samples of `shuffled(seed)` one after another: all of them, each once."""
    losses = np.zeros((80, 6))
    losses[:, 1:] = np.random.default_rng(0).random((80, 5)) < np.arange(1, 6) * 0.03
    losses[:, -1] = np.arange(80) / 80  # tells samples apart
    curve = curve_of(losses, TASK)
    orders = []
    for seed in range(5):
        shuffled = curve.shuffled(seed)
        orders.append(np.rint(80 * shuffled.losses()[:, -1]).astype(int))
        np.testing.assert_array_equal(shuffled.losses(), losses[orders[-1]])
        assert sorted(orders[-1]) == list(range(80))
        expected = ss.Control("ucb", bound).indices(shuffled, np.asarray([0.1]), 0.1)[0]
        found = ss.control.ucb(curve, 0.1, 0.1, bound, seed=seed).index
        assert (-1 if found is None else found) == expected
    assert len({tuple(order) for order in orders}) == 5


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_losses_that_are_all_alike_leave_nothing_to_the_order(bound):
    """Where all losses of a setting are equal, every seed chooses the same."""
    curve = curve_of(np.tile([0.0, 0.01, 0.05, 0.09, 0.3], (150, 1)), TASK)
    assert len({ss.control.ucb(curve, 0.1, 0.1, bound, seed=s).index for s in range(10)}) == 1


BETTER = {30: 0.3, 50: 0.2}
"""How often the early exit does better, by the number of samples: where seed 0 does most harm."""


def sorted_gaps(n, rng, descending):
    """Return n gaps of −1, 0 or 1 whose risk is 0.051, sorted as a file may be."""
    better = BETTER[n]
    gaps = np.sort(rng.choice([-1.0, 0, 1], n, p=[better, 0.949 - 2 * better, 0.051 + better]))
    return gaps[::-1] if descending else gaps


def record_of(losses):
    """Return a record with one early exit that every sample takes, and that has these losses."""
    early = np.column_stack([losses, np.zeros(len(losses))])
    return ss.ExitRecord(
        np.full((len(losses), 1), 0.9),
        inconsistencies={"change": early},
        inconsistency_ranges={"change": (-1, 1)},
    )


def curve_of_gaps(losses):
    """Return the curve of the full model and of one setting that has these losses."""
    return ss.RiskCurve.from_losses([None, 0.5], np.column_stack([np.zeros(len(losses)), losses]))


@pytest.mark.parametrize("make", [record_of, curve_of_gaps])
@pytest.mark.parametrize("bound", ["star", "wsr"])
@pytest.mark.parametrize("descending", [False, True], ids=["ascending", "descending"])
@pytest.mark.parametrize("n", [30, 50])
def test_sorted_samples_are_safe_with_defaults(n, descending, bound, make):
    """Nothing is said about the order, and each record draws its own: P(violation) ≤ δ.

    A constant seed certifies sorted outcomes far more often than δ, since it puts the same places
    of the file at the same places of the bets every time.
    """
    rng = np.random.default_rng(0)
    draws, count = 400, 0
    where = {"risk": "consistency", "path": [0.5]} if make is record_of else {}
    for _ in range(draws):
        calibration = make(sorted_gaps(n, rng, descending))
        policy = ss.calibrate(calibration, epsilon=0.05, delta=0.1, bound=bound, **where)
        count += policy.threshold is not None
    check_rate(count, draws, 0.1)


@pytest.mark.parametrize("kind", ["exits", "thresholds"])
def test_a_record_is_tested_in_one_order_and_so_is_its_file(tmp_path, kind):
    """Calibrating again, also from a saved file or a copy, gives the same policy."""
    losses = np.random.default_rng(0).random((300, 2)) * [0.3, 0]
    if kind == "exits":
        record = ss.ExitRecord(np.full((300, 1), 0.9), inconsistencies={"cost": losses})
    else:
        record = ss.ThresholdRecord([1, 0.5], inconsistencies={"cost": losses[:, ::-1]})
    record.save(tmp_path / "record.parquet")
    loaded = ss.load_record(tmp_path / "record.parquet")
    copies = [record, loaded, record.take(np.arange(300)), replace(record, fingerprint=None)]
    policies = [ss.calibrate(each, risk="consistency", epsilon=0.2) for each in [record, *copies]]
    assert all(policy == policies[0] for policy in policies)
    certificate = policies[0].certificate
    assert (certificate.provenance.seed, certificate.provenance.seed_drawn) == (
        record.order.seed,
        True,
    )
    assert 0 <= record.order.seed < 2**53  # JSON readers that use doubles keep it


def test_records_draw_different_orders_from_the_operating_system(monkeypatch):
    """Each new record asks the operating system, once."""
    asked = []
    monkeypatch.setattr(
        "swiftsure.curves.sample_order.randbits", lambda bits: asked.append(bits) or 5
    )
    record = record_of(np.zeros(10))
    assert (record.order.seed, record.order.drawn, asked) == (5, True, [53])
    curve = record.curve("consistency")
    both = ss.ExitRecord.concatenate([record, replace(record, ids=np.arange(10, 20))])
    assert curve.order == record.take([1, 2]).order == both.order == record.order
    assert asked == [53]


def test_an_order_given_to_a_record_is_not_called_drawn(tmp_path):
    """Neither by the record, nor by its file, nor by its certificate."""
    record = replace(record_of(np.zeros(100)), order=3)
    record.save(tmp_path / "record.parquet")
    policy = ss.calibrate(
        ss.load_record(tmp_path / "record.parquet"), risk="consistency", epsilon=0.05
    )
    assert (policy.certificate.provenance.seed, policy.certificate.provenance.seed_drawn) == (
        3,
        False,
    )


DRAWN = "the samples were tested in an order drawn at random from the operating system"
GIVEN = "the calibration samples came in random order, or the seed was itself drawn at random, once"


@pytest.mark.parametrize("control", ["ucb", "ltt", "crc"])
def test_the_certificate_names_what_the_order_rests_on(control):
    """A drawn seed needs nothing of the file; one that is given needs a file in random order."""
    record = record_of(np.zeros(400))
    options = {"method": "ucb"} if control == "crc" else {}
    drawn, given, free = (
        ss.calibrate(
            record if seed is None else replace(record, order=seed),
            risk="consistency",
            epsilon=0.05,
            control=ss.Control(control, bound, **options),
        )
        for bound, seed in [("star", None), ("star", 0), ("hoeffding", 0)]
    )
    assert DRAWN in str(drawn)
    assert GIVEN not in str(drawn)
    assert drawn.certificate.provenance.seed_drawn is True
    assert GIVEN in given.certificate.assumptions
    assert GIVEN in str(given)
    assert given.certificate.provenance.seed_drawn is False
    assert not any("order" in text for text in free.certificate.assumptions)
    assert (free.certificate.provenance.seed, free.certificate.provenance.seed_drawn) == (
        None,
        None,
    )


@pytest.mark.parametrize(("seed", "said"), [(None, DRAWN), (2, GIVEN)])
def test_a_budget_names_what_its_split_rests_on(seed, said):
    """Which samples choose the setting depends on the order, whatever the bound."""
    record = record_of(np.zeros(200))
    if seed is not None:
        record = replace(record, order=seed)
    split = "the samples that chose the setting were drawn at random, whatever the data"
    for bound in ("star", "hoeffding"):
        if bound == "hoeffding" and seed is None:
            said = split  # the order only decided which samples chose the setting
        plan = ss.planning.lowest_epsilon(record, saving=0.3, risk="consistency", bound=bound)
        certificate = plan.policy.certificate
        assert any(text.startswith(said) for text in certificate.assumptions)
        assert certificate.provenance.seed == record.order.seed
        assert certificate.provenance.seed_drawn is (seed is None)
