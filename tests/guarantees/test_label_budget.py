"""Budgets of labels: the promise holds whatever decided which labels exist.

The number of samples must not depend on labels, nor on what the model did with them:
the last test here and `test_growing.py` show why.
"""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.guarantees.checkers import RefutedError, check_rate

EPSILON, DELTA, N, DRAWS = 0.1, 0.1, 60, 150
LEVELS = np.float32([0.9, 0.7, 0.5, 0.3])
PATH = ss.Path.grid(LEVELS)
WORSE, BETTER = [0.0, 0.05, 0.10, 0.05], [0.0, 0.02, 0.029999, 0.0]
"""Probability of gaps of +1 and −1 that each setting adds; the risk of the third is ε + 1e-6."""
RISKS = np.concatenate([[0.0], np.cumsum(np.subtract(WORSE, BETTER))])


def draw(rng):
    """Return a record of N samples with all labels, and the gap of each at the first exit."""
    setting = rng.integers(4, size=N)
    u = 0.25 * rng.random(N)
    gap = np.where(u < np.take(WORSE, setting), 1, 0)
    better = (u >= np.take(WORSE, setting)) & (u < np.add(WORSE, BETTER)[setting])
    gap = np.where(better, -1, gap)
    return LEVELS[setting][:, None], gap


def record_of(confidences, gap, labelled):
    """Return the record with only some of its labels."""
    losses = np.column_stack([gap == 1, gap == -1]).astype(float)
    losses[~labelled] = np.nan
    apart = np.column_stack([gap != 0, np.zeros(len(gap))]).astype(float)
    return ss.ExitRecord(
        confidences, losses={"zero_one": losses}, inconsistencies={"zero_one": apart}
    )


ADVERSARIES = {
    "all labels": lambda gap, confidences, rng: np.ones(len(gap), bool),
    "only where the exit is right": lambda gap, confidences, rng: gap <= 0,
    "none of the safe settings": lambda gap, confidences, rng: confidences[:, 0] < 0.6,
    "none of the fast settings if they look good": lambda gap, confidences, rng: (
        (confidences[:, 0] > 0.4) | (gap.mean() > 0.05)
    ),
    "until the walk would fail": lambda gap, confidences, rng: (
        confidences[:, 0] >= LEVELS[min(3, int(np.argmax(np.cumsum(gap) > 3)) % 4)]
    ),
    "at random": lambda gap, confidences, rng: rng.random(len(gap)) < 0.7,
}


def stopping(record):
    """The library's rule."""
    return ss.calibrate(
        record, loss="zero_one", epsilon=EPSILON, delta=DELTA, path=PATH, missing="stop"
    ).certificate.index


def counting(record):
    """The library's rule for tests that only certify less if a loss is larger."""
    return ss.calibrate(
        record, loss="zero_one", epsilon=EPSILON, delta=DELTA, path=PATH, missing="worst"
    ).certificate.index


def counting_half(record):
    """Broken: a missing label counts for half of the worst loss."""
    losses = record.losses["zero_one"].copy()
    unknown = np.isnan(losses) & (record.inconsistencies["zero_one"] > 0)
    losses[np.isnan(losses)] = 0.0
    rng = np.random.default_rng(0)
    losses[unknown & (rng.random(losses.shape) < 0.5)] = 1.0
    return ss.calibrate(
        ss.ExitRecord(record.confidences, losses={"zero_one": losses}),
        epsilon=EPSILON,
        delta=DELTA,
        path=PATH,
    ).certificate.index


def dropping(record):
    """Broken: calibrates on the samples that have a label, or need none."""
    needed = np.isnan(record.losses["zero_one"]).any(axis=1) & (
        record.inconsistencies["zero_one"] > 0
    ).any(axis=1)
    return stopping(record.take(np.flatnonzero(~needed)))


def taking_missing_labels_for_agreement(record):
    """Broken: a gap without a label counts as 0."""
    losses = np.nan_to_num(record.losses["zero_one"])
    return ss.calibrate(
        ss.ExitRecord(record.confidences, losses={"zero_one": losses}),
        epsilon=EPSILON,
        delta=DELTA,
        path=PATH,
    ).certificate.index


def check(rule, adversary, draws=DRAWS):
    rng = np.random.default_rng(0)
    violations = 0
    for _ in range(draws):
        confidences, gap = draw(rng)
        index = rule(record_of(confidences, gap, adversary(gap, confidences, rng)))
        violations += RISKS[index or 0] > EPSILON
    check_rate(violations, draws, DELTA)
    return violations


@pytest.mark.parametrize("rule", [stopping, counting])
@pytest.mark.parametrize("adversary", ADVERSARIES.values(), ids=ADVERSARIES)
def test_whatever_decides_which_labels_exist_the_promise_holds(rule, adversary):
    """Adversaries that know every label choose which of them the calibration gets."""
    check(rule, adversary)


def test_counting_missing_labels_certifies_at_least_as_much_as_stopping():
    rng, further = np.random.default_rng(0), 0
    for _ in range(30):
        confidences, gap = draw(rng)
        gap[rng.random(N) < 0.7] = 0  # a risk of less than half of ε
        record = record_of(confidences, gap, ADVERSARIES["at random"](gap, confidences, rng))
        found = [rule(record) or 0 for rule in (stopping, counting)]
        assert found[0] <= found[1]
        further += found[0] < found[1]
    assert further > 0.3 * 30


@pytest.mark.parametrize("broken", [dropping, taking_missing_labels_for_agreement, counting_half])
def test_errors_with_missing_labels_are_noticed(broken):
    """The same check refutes rules that do not stop at a missing label."""
    with pytest.raises(RefutedError):
        check(broken, ADVERSARIES["only where the exit is right"], draws=60)


@pytest.mark.parametrize("epsilon", [0.03, 0.06])
def test_budgets_keep_the_failure_probability_on_networks(epsilon):
    """The rates that `evaluate` finds, on a network whose exits are overconfident."""
    sample = Population(n_exits=4, overconfidence=2.5).sample(4000, seed=0)
    record = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses="zero_one")
    study = ss.evaluate(
        record,
        risk=ss.Calibration(ss.Promise(epsilon=epsilon), missing=ss.Ask(None, budget=60)),
        controls=["ucb", ss.Control("ucb", "star")],
        n_calibration=300,
        splits=ss.Repeats(1, draws=200),
    )
    assert len(study.labels) == 6
    for label in study.labels:
        check_rate(int((study.pool_risk[label] > epsilon).sum()), 200, DELTA)


def test_labels_asked_for_as_the_walk_goes_on_keep_the_promise():
    """An adversary answers, and stops answering where it pleases."""
    rng = np.random.default_rng(0)
    violations = 0
    for _ in range(DRAWS):
        confidences, gap = draw(rng)
        record = record_of(confidences, gap, np.zeros(N, bool))
        losses = np.column_stack([gap == 1, gap == -1]).astype(float)
        for row in record.needs_label("zero_one", path=PATH).tolist():
            if gap[row] == 1 and rng.random() < 0.1:  # tired of bad news
                break
            record = record.with_labels([row], losses={"zero_one": losses[[row]]})
        violations += RISKS[stopping(record) or 0] > EPSILON
    check_rate(violations, DRAWS, DELTA)


def certified_when(few, draws=150):
    """How often a risk just above ε is certified on a pool that grows until disagreements are few.

    No label is seen: `few` is how many standard deviations their number is below what is expected.
    The full model is right wherever the exit disagrees, so the gap is 1 there.
    """
    rng, sizes, found = np.random.default_rng(0), np.arange(100, 2001, 10), 0
    for _ in range(draws):
        apart = (rng.random(2000) < 0.05 + 1e-6).astype(float)
        counts = np.cumsum(apart)[sizes - 1]
        stopped = sizes[counts < 0.05 * sizes - few * np.sqrt(0.05 * sizes)]
        n = next(iter(stopped), 2000)
        found += ss.bounds.certify(apart[:n], 0.05, bound="trinomial", loss_range=(-1, 1))
    return found


def test_stopping_at_few_disagreements_is_refuted():
    """Why the number of samples must be fixed before the model is run on them."""
    with pytest.raises(RefutedError):
        check_rate(certified_when(few=1.6), 150, 0.1)
    check_rate(certified_when(few=np.inf), 150, 0.1)  # always 2,000
