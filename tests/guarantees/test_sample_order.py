"""The order of the samples: betting tests depend on it, so it comes from a seed alone."""

import numpy as np
import pytest

import swiftsure as ss
from guarantees.broken import unshuffled
from guarantees.checkers import RefutedError, Task, check_violations
from guarantees.rules import UP_TO_ONE, curve_of, rule
from guarantees.sources import Types, two_settings

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
