"""The monitor's alarm: false with probability at most α over all time, and no later than need be.

Broken monitors, each with one error, must fail the very checks that the library's passes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from swiftsure.monitor import Monitor, RequestOrder, StreamFaultError, Watch, _evidence
from tests.guarantees.checkers import ROUNDING, RefutedError, check_rate

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Watched:
    """What a monitor is asked to watch."""

    epsilon: float
    alpha: float = 0.1
    low: float = 0.0
    high: float = 1.0


Process = Callable[[Floats, Watched], Floats]
"""(streams (draws, n), what is watched) -> evidence after each loss, (draws, n)."""


def library(streams: Floats, watched: Watched) -> Floats:
    """The library's evidence, loss by loss."""
    found = np.empty(streams.shape)
    for row, stream in enumerate(streams):
        monitor = Monitor(watched.epsilon, watched.alpha, (watched.low, watched.high))
        for t, loss in enumerate(stream.tolist()):
            monitor.update(loss)
            found[row, t] = monitor.evidence
    return found


def by_hand(
    streams: Floats,
    watched: Watched,
    *,
    stakes: Floats | None = None,
    gain: Callable[[Floats, float], Floats] = lambda losses, epsilon: losses - epsilon,
    pays: bool = True,
    share: float = 1 / _evidence.BETS,
    combine: Callable[..., Floats] = np.sum,
) -> Floats:
    """The same, written plainly, with a place for each error."""
    nu = _evidence.stakes(watched.epsilon, watched.low) if stakes is None else stakes
    wealth = np.zeros((len(streams), len(nu)))
    found = np.empty(streams.shape)
    before = 1.0
    for t in range(streams.shape[1]):
        left = 0.5 / np.sqrt(1 + (t + 1) / 1000)
        fresh = (before - left if pays else 1.0) * share
        wealth = (wealth + fresh) * (1 + nu * gain(streams[:, t, None], watched.epsilon))
        found[:, t] = combine(wealth, axis=1) + left
        before = left
    return found


def bets_not_shared(streams: Floats, watched: Watched) -> Floats:
    """Drops the mixture's weights: every bet gets the whole budget."""
    return by_hand(streams, watched, share=1.0)


def best_bet(streams: Floats, watched: Watched) -> Floats:
    """Takes the bet that did best, which is known only afterwards."""
    return by_hand(
        streams, watched, combine=lambda wealth, axis: _evidence.BETS * wealth.max(axis=axis)
    )


def free_restarts(streams: Floats, watched: Watched) -> Floats:
    """Starts again at every loss without paying for it, like a detector of Shiryaev-Roberts."""
    return by_hand(streams, watched, pays=False)


def forgotten_level(streams: Floats, watched: Watched) -> Floats:
    """Bets on the loss, not on the loss less ε."""
    return by_hand(streams, watched, gain=lambda losses, epsilon: losses)


def flipped(streams: Floats, watched: Watched) -> Floats:
    """Bets as in calibration, that the risk is low."""
    return by_hand(streams, watched, gain=lambda losses, epsilon: epsilon - losses)


def stakes_for_one_sign(streams: Floats, watched: Watched) -> Floats:
    """Stakes for losses of 0 or more, though gaps may be negative."""
    return by_hand(streams, watched, stakes=_evidence.stakes(watched.epsilon, 0.0))


def level_of_the_mean(streams: Floats, watched: Watched) -> Floats:
    """No e-process: a one-sided test of the mean, looked at after every loss."""
    n = np.arange(1, streams.shape[1] + 1)
    mean = np.cumsum(streams, axis=1) / n
    spread = np.sqrt(watched.epsilon * (1 - watched.epsilon) / n)
    z = np.where(n > 30, (mean - watched.epsilon) / spread, 0.0)
    return np.where(z > 1.2816, 1 / watched.alpha, 0.0)  # the normal quantile of α = 0.1


# --------------------------------------------------------------------------- exact, short streams


def outcomes(values: list[float], chances: Callable[[tuple[float, ...]], list[float]], n: int):
    """Every stream of n losses with its probability, which may depend on the past."""
    streams = list(product(values, repeat=n))
    weights = []
    for stream in streams:
        weight = 1.0
        for t in range(n):
            weight *= chances(stream[:t])[values.index(stream[t])]
        weights.append(weight)
    return np.asarray(streams), np.asarray(weights)


def check_evidence_exactly(process: Process, streams: Floats, weights: Floats, watched: Watched):
    """Evidence is never negative, its mean never above 1, and it reaches 1/α at most α often."""
    found = process(streams, watched)
    if found.min() < 0:
        raise RefutedError(f"the evidence falls to {found.min():.3g}")
    means = weights @ found
    if means.max() > 1 + ROUNDING:
        raise RefutedError(f"the evidence has mean {means.max():.6f} although the risk is fine")
    alarms = weights @ (found.max(axis=1) >= 1 / watched.alpha)
    if alarms > watched.alpha + ROUNDING:
        raise RefutedError(f"a false alarm has probability {alarms:.4f}")
    return means


def fixed(*chances: float):
    return lambda past: list(chances)


def after_a_loss(past: tuple[float, ...]) -> list[float]:
    """Gaps of mean 0.2 whatever came before, wild after a positive one and tame otherwise."""
    return [0.4, 0.0, 0.6] if past and past[-1] > 0 else [0.0, 0.8, 0.2]


EXACT = {
    "0/1": (outcomes([0.0, 1.0], fixed(0.7, 0.3), 10), Watched(0.3, 0.3)),
    "gaps": (outcomes([-1.0, 0.0, 1.0], fixed(0.1, 0.6, 0.3), 7), Watched(0.2, 0.4, -1.0)),
    "two far points": (outcomes([0.0, 2.0], fixed(0.95, 0.05), 10), Watched(0.1, 0.2, 0.0, 2.0)),
    "ends": (outcomes([-1.0, 1.0], fixed(0.4, 0.6), 10), Watched(0.2, 0.3, -1.0)),
    "dependent": (outcomes([-1.0, 0.0, 1.0], after_a_loss, 7), Watched(0.2, 0.4, -1.0)),
}


@pytest.mark.parametrize(("case", "watched"), EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("process", [library, by_hand])
def test_evidence_has_mean_one_at_the_level_exactly(process, case, watched):
    """Where the risk is exactly ε the mean is 1, neither more (invalid) nor less (wasteful)."""
    streams, weights = case
    assert weights.sum() == pytest.approx(1.0)
    means = check_evidence_exactly(process, streams, weights, watched)
    np.testing.assert_allclose(means, 1.0, rtol=1e-12)


@pytest.mark.parametrize("risk", [0.0, 0.1, 0.25])
def test_evidence_falls_below_the_level(risk):
    streams, weights = outcomes([0.0, 1.0], fixed(1 - risk, risk), 10)
    means = check_evidence_exactly(library, streams, weights, Watched(0.3, 0.3))
    assert (np.diff(means) < 0).all()


def test_the_plain_process_is_the_library():
    streams = np.random.default_rng(0).choice([-1.0, 0.0, 1.0], size=(20, 300), p=[0.1, 0.7, 0.2])
    watched = Watched(0.05, low=-1.0)
    np.testing.assert_allclose(by_hand(streams, watched), library(streams, watched), rtol=1e-10)


BROKEN = {
    "bets not shared": (bets_not_shared, "0/1"),
    "best bet": (best_bet, "0/1"),
    "free restarts": (free_restarts, "0/1"),
    "level forgotten": (forgotten_level, "0/1"),
    "stakes for one sign": (stakes_for_one_sign, "gaps"),
}


@pytest.mark.parametrize(("wrong", "name"), BROKEN.values(), ids=BROKEN)
def test_errors_are_noticed_exactly(wrong, name):
    (streams, weights), watched = EXACT[name]
    check_evidence_exactly(library, streams, weights, watched)
    with pytest.raises(RefutedError):
        check_evidence_exactly(wrong, streams, weights, watched)


def test_a_flipped_bet_is_noticed_below_the_level():
    streams, weights = outcomes([0.0, 1.0], fixed(0.9, 0.1), 10)
    check_evidence_exactly(library, streams, weights, Watched(0.3, 0.3))
    with pytest.raises(RefutedError):
        check_evidence_exactly(flipped, streams, weights, Watched(0.3, 0.3))


# -------------------------------------------------------------------------- sampled, long streams


def bernoulli(epsilon: float, high: float = 1.0):
    return lambda rng, n: high * (rng.random(n) < epsilon / high)


def gaps(epsilon: float):
    """Rare ones, of both signs."""
    return lambda rng, n: rng.choice(
        [-1.0, 0.0, 1.0], n, p=[0.02, 0.98 - 0.02 - epsilon, 0.02 + epsilon]
    )


def bursts(epsilon: float):
    """Mean ε given the past at every step, but in wild and tame periods that losses bring about."""

    def draw(rng: np.random.Generator, n: int) -> Floats:
        coins, losses, wild = rng.random(n), np.empty(n), False
        for t, coin in enumerate(coins):
            size = 1.0 if wild else 0.2
            losses[t] = size * (coin < epsilon / size)
            wild = wild != (losses[t] > 0)
        return losses

    return draw


def at_ends(epsilon: float):
    """Gaps at their bounds, the most that they can vary."""
    return lambda rng, n: np.where(rng.random(n) < (1 + epsilon) / 2, 1.0, -1.0)


NULLS = {
    "0/1": (bernoulli(0.05), Watched(0.05)),
    "rare": (bernoulli(0.002), Watched(0.002)),
    "two far points": (bernoulli(0.05, high=2.0), Watched(0.05, high=2.0)),
    "gaps": (gaps(0.01), Watched(0.01, low=-1.0)),
    "ends": (at_ends(0.05), Watched(0.05, low=-1.0)),
    "dependent": (bursts(0.05), Watched(0.05)),
    "0/1, α = 0.01": (bernoulli(0.05), Watched(0.05, alpha=0.01)),
}


def check_false_alarms(draw, watched: Watched, n: int, draws: int, seed: int = 0) -> float:
    """P(an alarm within n losses) ≤ α where the risk is exactly ε. Returns the rate."""
    rng = np.random.default_rng(seed)
    alarms = 0
    for _ in range(draws):
        monitor = Monitor(watched.epsilon, watched.alpha, (watched.low, watched.high))
        alarms += monitor.update_many(draw(rng, n))
    return check_rate(alarms, draws, watched.alpha)


@pytest.mark.parametrize(("draw", "watched"), NULLS.values(), ids=NULLS)
def test_false_alarms_are_rare(draw, watched):
    check_false_alarms(draw, watched, n=5_000, draws=200)


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "watched"), NULLS.values(), ids=NULLS)
def test_false_alarms_are_rare_over_long_streams(draw, watched):
    n, draws = (20_000, 300) if draw is NULLS["dependent"][0] else (300_000, 1_000)
    check_false_alarms(draw, watched, n, draws)


def check_process(process: Process, draw, watched: Watched, n: int = 1_000, draws: int = 400):
    """The same check for a process by hand."""
    rng = np.random.default_rng(0)
    streams = np.stack([draw(rng, n) for _ in range(draws)])
    alarms = (process(streams, watched).max(axis=1) >= 1 / watched.alpha).sum()
    return check_rate(int(alarms), draws, watched.alpha)


@pytest.mark.parametrize(
    "wrong", [bets_not_shared, free_restarts, forgotten_level, level_of_the_mean]
)
def test_errors_are_noticed_by_their_false_alarms(wrong):
    check_process(by_hand, *NULLS["0/1"])
    with pytest.raises(RefutedError):
        check_process(wrong, *NULLS["0/1"])


# ------------------------------------------------------------------------------- late and missing


def reported(order: RequestOrder, rng: np.random.Generator, n: int, delay: int, risk: float):
    """Requests with 0/1 losses, of which wrong answers are reported at once and right ones late."""
    losses = (rng.random(n) < risk).astype(float)
    arrival = np.arange(n) + np.where(losses > 0, 0, delay)
    for request in range(n):
        order.expect(request)
        for late in (request, request - delay) if delay else (request,):
            if late >= 0 and arrival[late] == request:
                order.arrive(late, losses[late])


def folded_as_they_come(rng: np.random.Generator, n: int, delay: int, risk: float) -> bool:
    losses = (rng.random(n) < risk).astype(float)
    arrival = np.arange(n) + np.where(losses > 0, 0, delay)
    there = np.argsort(arrival, kind="stable")
    return Monitor(risk, 0.1).update_many(losses[there][: n - delay])


def test_request_order_keeps_the_guarantee_where_arrival_order_does_not():
    """At the start only wrong answers have arrived: folded as they come, they raise an alarm."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(100):
        order = RequestOrder(Monitor(0.05, 0.1))
        reported(order, rng, 600, 200, 0.05)
        alarms += order.monitor.alarm
    check_rate(alarms, 100, 0.1)
    careless = sum(folded_as_they_come(rng, 600, 200, 0.05) for _ in range(100))
    with pytest.raises(RefutedError):
        check_rate(careless, 100, 0.1)


def test_missing_losses_count_as_the_lowest_whatever_the_reason():
    """Half of the right answers are never confirmed."""
    rng = np.random.default_rng(0)
    alarms = {"lowest": 0, "skip": 0}
    for missing in alarms:
        for _ in range(100):
            order = RequestOrder(Monitor(0.05, 0.1), patience=50, missing=missing)
            for request in range(1_500):
                loss = float(rng.random() < 0.05)
                if loss or rng.random() < 0.5:
                    order.arrive(request, loss)
                else:
                    order.expect(request)
            alarms[missing] += order.monitor.alarm
    check_rate(alarms["lowest"], 100, 0.1)
    with pytest.raises(RefutedError):
        check_rate(alarms["skip"], 100, 0.1)


def errors_first(rng: np.random.Generator, n: int = 6_000, delay: int = 80, risk: float = 0.02):
    """Lines of a stream that announces only its first request, whose loss never comes.

    The losses of 1,000 requests come in order. After that errors are still reported at once, but
    successes `delay` requests later. Returns the lines, and which is the first late one.
    """
    requests = np.arange(1, n + 1)
    losses = (rng.random(n) < risk).astype(float)
    arrival = requests + np.where((losses > 0) | (requests <= 1_000), 0, delay)
    there = np.argsort(arrival, kind="stable")
    requests, losses = requests[there], losses[there]
    late = np.flatnonzero(requests < np.maximum.accumulate(requests))
    found = [f'{{"id": {k}, "loss": {x}}}' for k, x in zip(requests, losses, strict=True)]
    return ['{"id": 0}', *found], int(late[0]) + 1


@dataclass(frozen=True)
class Reported:
    """The line at which a stream was refused, or None, and whether an alarm was raised."""

    fault: int | None
    alarm: bool


def read(lines: list[str], order: Callable[..., RequestOrder], missing: str) -> Reported:
    watch = Watch(Monitor(0.05, 0.01), patience=1, missing=missing)
    watch.order = order(watch.monitor, patience=1, missing=missing)
    try:
        watch.feed("".join(line + "\n" for line in lines).encode())
    except StreamFaultError:
        return Reported(watch.lines, watch.monitor.alarm)
    return Reported(None, watch.monitor.alarm)


def check_faults(order: Callable[..., RequestOrder], missing: str, draws: int) -> None:
    """A stream that reports errors first is refused at its first late loss, without an alarm."""
    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(draws):
        lines, fault = errors_first(rng)
        found = read(lines, order, missing)
        if found.alarm and found.fault is None:
            raise RefutedError("a false alarm was raised, and no error")
        if found.fault != fault:
            raise RefutedError(f"line {fault} was let through")
        alarms += found.alarm
    check_rate(alarms, draws, 0.01)


class DropsAllThatIsLate(RequestOrder):
    """Once a request was given up, takes any late loss for that of such a request."""

    def arrive(self, request: int, loss: float) -> bool:
        if self.given_up and not self.waits_for(request) and request <= self._last:
            self.too_late += 1
            return self.monitor.alarm
        return super().arrive(request, loss)


@pytest.mark.parametrize("missing", ["lowest", "skip"])
def test_errors_that_are_reported_first_are_a_fault_and_not_a_false_alarm(missing):
    """The risk is 2 %, the level 5 %. One request was given up before, which must not matter."""
    check_faults(RequestOrder, missing, draws=200)
    with pytest.raises(RefutedError, match="a false alarm was raised, and no error"):
        check_faults(DropsAllThatIsLate, missing, draws=3)


# ------------------------------------------------------------------------------------------ power


def delays(change: int, before: float, after: float, draws: int = 41) -> Floats:
    """How long after a change the alarm comes, at ε = 0.05; infinite where it does not."""
    rng = np.random.default_rng(0)
    found = np.full(draws, np.inf)
    for j in range(draws):
        monitor = Monitor(0.05, 0.01)
        monitor.update_many(rng.random(change) < before)
        if not monitor.alarm:
            monitor.update_many(rng.random(20_000) < after)
        found[j] = np.inf if monitor.alarm_at is None else monitor.alarm_at - change
    return found


@pytest.mark.parametrize(
    ("change", "after", "most"), [(0, 0.10, 500), (20_000, 0.10, 1_200), (200_000, 0.2, 300)]
)
def test_late_changes_are_found_about_as_soon_as_early_ones(change, after, most):
    assert np.median(delays(change, 0.04, after)) < most


def test_a_single_start_is_late():
    """What restarts are for: good days eat up the wealth that was there at the start."""
    rng = np.random.default_rng(1)
    streams = np.concatenate([rng.random((20, 20_000)) < 0.04, rng.random((20, 3_000)) < 0.1], 1)
    single = np.zeros(20)
    stakes = _evidence.stakes(0.05, 0.0)
    wealth = np.zeros((20, len(stakes)))
    for t in range(streams.shape[1]):
        wealth += np.log1p(stakes * (streams[:, t, None] - 0.05))
        grown = np.logaddexp.reduce(wealth, axis=1) - np.log(len(stakes))
        single[(grown >= np.log(100)) & (single == 0)] = t + 1
    assert (single == 0).mean() > 0.9
    for stream in streams:
        assert Monitor(0.05, 0.01).update_many(stream)
