"""Labels that are missing: only where they cannot matter, or counted as the worst loss."""

from itertools import product

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import check_rate

POPULATION = Population(n_exits=4, overconfidence=2.5)
PATH = ss.Path.logit_grid(step=0.2)


def logits_and_labels(n, rng):
    sample = POPULATION.sample(n, rng)
    return sample.logits, sample.labels.astype(float)


@pytest.mark.parametrize("mechanism", ["at random", "where the first exit errs"])
@pytest.mark.parametrize("bound", ["star", "wsr", "hoeffding"])
def test_the_worst_loss_for_missing_labels_keeps_the_failure_probability(mechanism, bound):
    """Half of the labels missing, at random or where they would have told of a loss."""
    true = POPULATION.risk(PATH.thresholds, "gap", "zero_one")
    rng = np.random.default_rng(0)
    epsilon, count, draws = 0.06, 0, 100
    for draw in range(draws):
        logits, labels = logits_and_labels(300, rng)
        gone = rng.random(300) < 0.5
        if mechanism != "at random":
            gone &= logits[:, 0].argmax(axis=-1) != labels
        labels[gone] = np.nan
        record = ss.ExitRecord.from_logits(logits, labels, losses=("zero_one",))
        curve = record.curve("gap", path=PATH, missing="worst")
        index = ss.control.ucb(curve, epsilon, 0.1, bound, seed=draw).index
        count += index is not None and true[index] > epsilon
    check_rate(count, draws, 0.1)


def test_a_missing_label_never_counts_for_less_than_the_label_would():
    """At every setting the loss of an unlabelled sample is at least its true loss."""
    logits, labels = logits_and_labels(400, np.random.default_rng(0))
    full = ss.ExitRecord.from_logits(logits, labels, losses=("zero_one",))
    labels[::3] = np.nan
    part = ss.ExitRecord.from_logits(logits, labels, losses=("zero_one",))
    known = full.curve("gap", path=PATH).losses()
    assumed = part.curve("gap", path=PATH, missing="worst").losses()
    assert (assumed >= known).all()


def test_labels_that_cannot_matter_change_nothing():
    """With the labels that `needs_label` asks for, the curve is that of all labels."""
    logits, labels = logits_and_labels(500, np.random.default_rng(0))
    full = ss.ExitRecord.from_logits(logits, labels, losses=("zero_one",))
    none = ss.ExitRecord.from_logits(logits, np.full(500, -1), losses=("zero_one",))
    needed = none.needs_label("zero_one", path=PATH)
    assert 0 < len(needed) < 250
    some = np.full(500, -1)
    some[needed] = labels[needed]
    part = ss.ExitRecord.from_logits(logits, some, losses=("zero_one",))
    np.testing.assert_array_equal(
        part.curve("gap", path=PATH).losses(), full.curve("gap", path=PATH).losses()
    )


def test_a_missing_label_that_matters_is_refused_unless_the_worst_is_asked_for():
    """The default is to raise."""
    logits, labels = logits_and_labels(100, np.random.default_rng(0))
    labels[:] = np.nan
    record = ss.ExitRecord.from_logits(logits, labels, losses=("zero_one",))
    with pytest.raises(ValueError, match="missing label"):
        record.curve("gap", path=PATH)


def certified(losses, bound, low=0.0, epsilon=0.45):
    options = {"bound": bound, "loss_range": (low, 1.0)}
    return ss.bounds.certify(np.asarray(losses, float), epsilon, 0.2, **options)


@pytest.mark.parametrize(
    "bound", [name for name, each in ss.bounds.BOUNDS.items() if each.monotone]
)
def test_a_larger_loss_never_helps_a_monotone_test(bound):
    """So an adversary who sees all losses and hides some cannot make it certify more."""
    low = -1.0 if bound == "trinomial" else 0.0
    values = (low, 0.0, 1.0) if low else (0.0, 1.0) if bound == "binomial" else (0.0, 0.5, 1.0)
    for losses in product(values, repeat=6):
        if not certified(losses, bound, low):
            for row in range(6):
                worse = [*losses[:row], 1.0, *losses[row + 1 :]]
                assert not certified(worse, bound, low), losses


@pytest.mark.parametrize("bound", ["star", "wsr"])
def test_a_larger_loss_may_help_a_bet(bound):
    """Its stake falls after a loss, so that a later loss costs less: the condition is needed."""
    rng = np.random.default_rng(0)
    for _ in range(20_000):
        losses = (rng.random(100) < 0.05).astype(float)
        worse = losses.copy()
        worse[rng.integers(20)] = 1.0
        if certified(worse, bound, 0.0, 0.1) and not certified(losses, bound, 0.0, 0.1):
            return
    pytest.fail("no example was found")


@pytest.mark.parametrize("control", ["crc", "ucb"])
def test_the_memory_layout_of_the_losses_does_not_matter(control):
    """Columns stored one after another, as data frames do, are no excuse for losing the worst."""
    losses = np.column_stack([np.ones(300), np.zeros(300)])
    losses[:] = np.nan
    apart = np.column_stack([np.ones(300), np.zeros(300)])
    for layout in (np.ascontiguousarray, np.asfortranarray):
        record = ss.ExitRecord(
            np.full((300, 1), 0.9),
            losses={"zero_one": layout(losses)},
            inconsistencies={"zero_one": layout(apart)},
        )
        curve = record.curve("gap", path=[0.5], missing="worst")
        np.testing.assert_array_equal(curve.losses(), apart[:, ::-1])
        assert ss.Control(control).run(curve, 0.05).index is None
