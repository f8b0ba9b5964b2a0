"""Compiled WSR and STaR bets against "the risk is at least ε", for one or several settings.

`losses` is a `_kernels.Losses`; `thresholds` are those of `_kernels.inclusive_thresholds`.
"""

from typing import NamedTuple

import numpy as np

from swiftsure._lib.compile import compiled

__all__ = [
    "MIN_PARALLEL",
    "GrowingTest",
    "Test",
    "grow",
    "log_deficit",
    "log_deficit_weighted",
    "select_by_betting",
    "select_side_by_side",
    "walk_on",
]

ROUNDING = 1e-12
"""Relative error allowed for a few floating-point operations."""

MACHINE_EPSILON = 2.0**-52
"""Relative error of one floating-point operation."""

MAX_WEALTH = 1e100
"""Wealth above this, or below its inverse, is moved into the log deficit to avoid overflow."""

SERIES_MAX = 0.0625
"""Below this gain, log(1 + gain) is computed by a series."""


@compiled
def log_series(square):  # type: ignore[no-untyped-def]
    """Return (odd, even) with log(1 + g) = g · odd - g² · even, given the square of a small g."""
    fourth = square * square
    odd = (1 / 5 + square * (1 / 7)) + fourth * (1 / 9 + square * (1 / 11))
    even = (1 / 6 + square * (1 / 8)) + fourth * (1 / 10)
    return (1.0 + square * (1 / 3)) + fourth * odd, (1 / 2 + square * (1 / 4)) + fourth * even


@compiled
def log_growth(wish, largest_stake, margin):  # type: ignore[no-untyped-def]
    """Return log(1 + stake · margin), with stake = min(√wish, largest_stake)."""
    stake_squared = min(largest_stake * largest_stake, wish)
    square = stake_squared * (margin * margin)
    if square < SERIES_MAX * SERIES_MAX:  # the series runs in parallel with the square root
        odd, even = log_series(square)
        return np.sqrt(stake_squared) * (margin * odd) - square * even
    gain = min(largest_stake, np.sqrt(wish)) * margin
    # A total loss is final: rounding must not leave a trace of wealth.
    return np.log1p(gain) if gain > -1.0 + ROUNDING else -np.inf


class Test(NamedTuple):
    """What a bet is against, and how it stakes.

    Attributes
    ----------
    epsilon, delta
        The level, and the failure probability that stakes are tuned for.
    max_loss
        The largest possible loss, B.
    star
        Whether stakes are those of STaR, not of WSR.
    pool
        Size of the finite population, or 0.
    """

    epsilon: float
    delta: float
    max_loss: float
    star: bool
    pool: int


@compiled
def first_stake(test):  # type: ignore[no-untyped-def]
    """Return the largest stake that cannot lose more than the wealth."""
    room = test.max_loss - test.epsilon
    return 1.0 / (room if test.star else max(test.max_loss, room))


@compiled
def bet(losses, thresholds, rows, setting, first, stop, state, test):  # type: ignore[no-untyped-def]
    """Continue a bet against "the risk is at least ε" over the samples in [first, stop).

    Takes and returns the state (log(goal / wealth), its running minimum, sum of losses, B²/4 + sum
    of squared deviations). Stops once the goal is reached.
    """
    n, epsilon, max_loss, star, pool = rows.size, test.epsilon, test.max_loss, test.star, test.pool
    deficit, best_deficit, total, deviations = state
    log_target = -np.log(test.delta)  # log(1/δ) for WSR; STaR uses its current deficit instead
    level = epsilon
    largest_stake = first_stake(test)
    n_early = losses.thresholds.shape[1]
    wealth, best, needed = 1.0, 1.0, np.exp(deficit)
    for i in range(first, stop):
        row = rows[i]
        # Branchless: count the exits that do not fire. A search mispredicts.
        exit_ = 0
        stays = True
        for e in range(n_early):
            stays &= losses.confidences[row, e] < thresholds[e, setting]
            exit_ += stays
        loss = losses.values[row, exit_ if n_early > 0 else setting]
        if pool > 0:
            level = (pool * epsilon - total) / (pool - i)
            # Bound on the rounding error of a sum of i numbers, divided by the samples left.
            off = MACHINE_EPSILON * i * (abs(total) + pool * abs(epsilon)) / (pool - i)
            if level > max_loss * (1.0 + ROUNDING) + off:
                # The rest of the pool can no longer bring the risk up to ε.
                return -np.inf, -np.inf, total, deviations
            room = max(max_loss - level, 0.0) if star else max(max_loss, max_loss - level)
            largest_stake = 1.0 / room if room > max_loss * ROUNDING else 0.0
        horizon = n - i if star else n
        log_target = deficit if star else log_target
        scale = 2.0 * (i + 1) / (horizon * deviations)  # 2 / (horizon · variance)
        if star:
            deficit -= log_growth(scale * log_target, largest_stake, level - loss)
            if not deficit < np.inf:
                return np.inf, best_deficit, total, deviations
            best_deficit = min(best_deficit, deficit)
            if best_deficit <= 0.0:
                break
        else:  # WSR's stakes do not depend on the wealth, so its log is taken only at the end
            gain = min(largest_stake, np.sqrt(scale * log_target)) * (level - loss)
            if not gain > -1.0 + ROUNDING:
                return np.inf, min(best_deficit, deficit - np.log(best)), total, deviations
            grown = wealth * (1.0 + gain)
            if 1.0 / MAX_WEALTH < grown < MAX_WEALTH:
                wealth = grown
                best = max(best, wealth)
                if best >= needed:
                    return 0.0, 0.0, total, deviations
            else:
                best_deficit = min(best_deficit, deficit - np.log(best))
                deficit -= np.log(wealth) + np.log1p(gain)
                best_deficit = min(best_deficit, deficit)
                wealth, best, needed = 1.0, 1.0, np.exp(deficit)
        total += loss
        mean = (0.5 * max_loss + total) / (i + 2)
        deviations += (loss - mean) * (loss - mean)
    if not star:
        best_deficit = min(best_deficit, deficit - np.log(best))
        deficit -= np.log(wealth)
    return deficit, best_deficit, total, deviations


@compiled
def log_deficit(losses, thresholds, rows, setting, goal, test):  # type: ignore[no-untyped-def]
    """Return the minimum of log(goal / wealth) over a bet against "the risk is at least ε".

    If it is 0 or less, the wealth reached `goal`, so the risk at `setting` is certified to be below
    ε with failure probability 1/goal. The stakes are tuned for that of the test; STaR
    adapts them to the deficit that is left. Stops when the goal is reached or the wealth is 0.
    With `pool` > 0 the rows are drawn without replacement from a pool of that size, and ε is
    replaced at each step by the mean that the rest of the pool would need.
    """
    state = (np.log(goal), np.log(goal), 0.0, 0.25 * test.max_loss * test.max_loss)
    return bet(losses, thresholds, rows, setting, 0, rows.size, state, test)[1]


@compiled
def log_deficit_weighted(sums, weights, rows, setting, goal, test):  # type: ignore[no-untyped-def]
    """Return `log_deficit` of the risk Σ sums / Σ weights, for units that differ in size.

    `sums` is (n, K): each unit's total loss divided by the largest size M. `weights`, (n, K) or
    (n, 1), are the sizes divided by M. Each bet is on ε · weight − sum, whose mean is at most 0 if
    the risk is ε or more. Its variance is estimated around the risk so far, not around ε: the
    stakes then depend on ε only through their cap, which keeps the test monotone in ε. With weights
    of 1 this is the test of `log_deficit`.
    """
    n, epsilon, max_loss, star = rows.size, test.epsilon, test.max_loss, test.star
    deficit = np.log(goal)
    best_deficit = deficit
    log_target = -np.log(test.delta)
    largest_stake = first_stake(test)
    total, weight, deviations = 0.0, 1.0, 0.25 * max_loss * max_loss
    own_setting = min(setting, weights.shape[1] - 1)
    for i in range(n):
        loss = sums[rows[i], setting]
        own = weights[rows[i], own_setting]
        scale = 2.0 * (i + 1) / ((n - i if star else n) * deviations)
        log_target = deficit if star else log_target
        deficit -= log_growth(scale * log_target, largest_stake, epsilon * own - loss)
        if not deficit < np.inf:
            break
        best_deficit = min(best_deficit, deficit)
        if best_deficit <= 0.0:
            break
        total += loss
        weight += own
        deviation = loss - (0.5 * max_loss + total) / weight * own
        deviations += deviation * deviation
    return best_deficit


LARGEST_SHARE, SHORTEST_REST = 0.9, 0.1
"""Limits of bets that go on past their horizon: they never stake all, and never as if fewer samples
were left than this share of the horizon."""


class GrowingTest(NamedTuple):
    """What a bet that may go on for ever is against, and the horizon that its stakes aim at."""

    epsilon: float
    max_loss: float
    horizon: int


@compiled
def grow(losses, sizes, thresholds, setting, first, stop, state, test):  # type: ignore[no-untyped-def]
    """Continue a bet that may go on for ever over the samples in [first, stop).

    STaR's stakes, for a horizon that was fixed beforehand and doubles whenever it is reached.
    `sizes` say how much each row counts: (n, 0) if all count 1, (n, 1), or a column for each of the
    losses. Takes and returns the state (log(goal / wealth), sum of losses, 1 + sum of sizes, B²/4 +
    sum of squared deviations). Stops once the goal is reached.
    """
    epsilon, max_loss, horizon = test
    deficit, total, weight, deviations = state
    n_early, n_sizes = losses.thresholds.shape[1], sizes.shape[1]
    largest_stake = LARGEST_SHARE / (max_loss - epsilon)
    until = horizon
    for i in range(first, stop):
        while until <= i:
            until *= 2
        exit_ = 0
        stays = True
        for e in range(n_early):
            stays &= losses.confidences[i, e] < thresholds[e, setting]
            exit_ += stays
        column = exit_ if n_early > 0 else setting
        loss = losses.values[i, column]
        own = 1.0 if n_sizes == 0 else sizes[i, min(column, n_sizes - 1)]
        left = max(float(until - i), SHORTEST_REST * until)
        scale = 2.0 * (i + 1) / (left * deviations)
        deficit -= log_growth(scale * deficit, largest_stake, epsilon * own - loss)
        if deficit <= 0.0:
            break
        total += loss
        weight += own
        deviation = loss - (0.5 * max_loss + total) / weight * own
        deviations += deviation * deviation
    return deficit, total, weight, deviations


@compiled
def walk_on(losses, sizes, thresholds, setting, first, stop, state, fresh, test):  # type: ignore[no-untyped-def]
    """Continue the bet on a setting, and bets on those after it while they are certified.

    The first bet goes on from `first` with its state; later ones start with the state `fresh`.
    Returns the first setting that is not certified, and its state.
    """
    while setting < losses.thresholds.shape[0]:
        state = grow(losses, sizes, thresholds, setting, first, stop, state, test)
        if state[0] > 0.0:
            break
        setting, first, state = setting + 1, 0, fresh
    return setting, state


@compiled
def select_by_betting(losses, thresholds, rows, epsilons, test, start):  # type: ignore[no-untyped-def]
    """Return the last certified setting for each of some ascending ε; `start - 1` if none.

    A fixed sequence of betting tests from setting `start` on. What is certified at one ε is
    certified at any larger one, so each ε continues where the one before it stopped.
    """
    selected = np.empty(epsilons.size, np.int64)
    goal = 1.0 / test.delta
    last = start - 1
    for j in range(epsilons.size):
        at = Test(epsilons[j], test.delta, test.max_loss, test.star, test.pool)
        while last + 1 < losses.thresholds.shape[0]:
            if not log_deficit(losses, thresholds, rows, last + 1, goal, at) <= 0.0:
                break
            last += 1
        selected[j] = last
    return selected


LANES = 8
"""Settings tested in parallel: the float64 values in a 512-bit vector register."""

BLOCK = 128
"""Samples between two checks of whether parallel tests are decided."""

MIN_PARALLEL = 50_000
"""Number of samples from which parallel tests are faster than sequential ones."""


class Front(NamedTuple):
    """The state of the bets on `LANES` neighbouring settings."""

    thresholds: np.ndarray  # (n_early, LANES)
    lowest: np.ndarray  # (n_early,), minimum over the lanes
    highest: np.ndarray  # (n_early,), maximum over the lanes
    state: np.ndarray  # (4, LANES): as in `bet`, but row 1 is the largest squared gain
    loss: np.ndarray  # (LANES,), losses of the current sample


@compiled
def aligned(n_rows):  # type: ignore[no-untyped-def]
    """Return zeros, (n_rows, LANES), with every row aligned to a cache line."""
    raw = np.zeros((n_rows + 1) * LANES)
    offset = -(raw.ctypes.data // 8) % LANES
    return raw[offset : offset + n_rows * LANES].reshape(n_rows, LANES)


@compiled
def new_front(thresholds, start, delta, max_loss):  # type: ignore[no-untyped-def]
    """Return the initial bets on the `LANES` settings from `start` on.

    Lanes past the end of the path repeat its last setting.
    """
    n_early, last = thresholds.shape[0], thresholds.shape[1] - 1
    own = np.empty((n_early, LANES), np.float32)
    lowest = thresholds[:, start].copy()
    highest = thresholds[:, start].copy()
    state = aligned(4)
    for lane in range(LANES):
        state[0, lane] = -np.log(delta)
        state[3, lane] = 0.25 * max_loss * max_loss
        for exit_ in range(n_early):
            threshold = thresholds[exit_, min(start + lane, last)]
            own[exit_, lane] = threshold
            lowest[exit_] = min(lowest[exit_], threshold)
            highest[exit_] = max(highest[exit_], threshold)
    return Front(own, lowest, highest, state, aligned(1)[0])


@compiled
def bet_side_by_side(front, losses, rows, first, stop, test):  # type: ignore[no-untyped-def]
    """Advance the bets in all lanes, in place, like `bet` but accurate for small gains only.

    Records the largest squared gain of each lane, so that the caller can redo lanes where the
    series was too coarse. Loops over lanes are branchless, so that they compile to vector
    instructions. A lane that has reached its goal keeps its deficit.
    """
    n, lanes, n_early = rows.size, front.loss.size, front.thresholds.shape[0]
    epsilon, star = test.epsilon, test.star
    state = front.state
    deficit, max_square, total, deviations = state[0], state[1], state[2], state[3]
    loss = front.loss
    goal = -np.log(test.delta)
    cap = first_stake(test) ** 2
    half = 0.5 * test.max_loss
    for i in range(first, stop):
        row = rows[i]
        some, every = 0, 0  # first exit that any lane takes; exit by which all did
        no_lane_exited, some_lane_stays = True, True
        for exit_ in range(n_early):
            confidence = losses.confidences[row, exit_]
            no_lane_exited &= confidence < front.lowest[exit_]
            some_lane_stays &= confidence < front.highest[exit_]
            some += no_lane_exited
            every += some_lane_stays
        value = losses.values[row, every]
        for lane in range(lanes):
            loss[lane] = value
        if some < every:  # rare: neighbouring settings mostly take the same exit
            for exit_ in range(every - 1, some - 1, -1):
                value = losses.values[row, exit_]
                confidence = losses.confidences[row, exit_]
                for lane in range(lanes):
                    loss[lane] = (
                        value if confidence >= front.thresholds[exit_, lane] else loss[lane]
                    )
        horizon = n - i if star else n
        factor = 2.0 * (i + 1) / horizon
        share = 1.0 / (i + 2)
        for lane in range(lanes):
            before = deficit[lane]
            margin = epsilon - loss[lane]
            log_target = before if star else goal
            stake_squared = min(cap, factor / deviations[lane] * log_target)
            square = stake_squared * (margin * margin)
            max_square[lane] = max(max_square[lane], square)
            odd, even = log_series(square)
            after = before - (np.sqrt(stake_squared) * (margin * odd) - square * even)
            deficit[lane] = after if before > 0.0 else before
            total[lane] += loss[lane]
            deviation = loss[lane] - (half + total[lane]) * share
            deviations[lane] += deviation * deviation


@compiled
def count_certified(losses, thresholds, rows, start, test):  # type: ignore[no-untyped-def]
    """Return how many of the next `LANES` settings are certified, and whether the next one failed.

    A lane that is doing badly behind two undecided ones is dropped (NaN): neither certified nor
    failed.
    """
    n, last = rows.size, losses.thresholds.shape[0] - 1
    front = new_front(thresholds, start, test.delta, test.max_loss)
    state, kept = front.state, np.empty((4, LANES))
    for first in range(0, n, BLOCK):
        stop = min(n, first + BLOCK)
        for part in range(4):
            for lane in range(LANES):
                kept[part, lane] = state[part, lane]
        bet_side_by_side(front, losses, rows, first, stop, test)
        undecided = 0
        for lane in range(LANES):
            if state[1, lane] >= SERIES_MAX * SERIES_MAX:  # redo the block without the series
                if kept[0, lane] > 0.0:
                    held = (kept[0, lane], kept[0, lane], kept[2, lane], kept[3, lane])
                    setting = min(start + lane, last)
                    state[0, lane], _, state[2, lane], state[3, lane] = bet(
                        losses, thresholds, rows, setting, first, stop, held, test
                    )
                state[1, lane] = 0.0
            if undecided >= 2 and state[0, lane] > -4.0 * np.log(test.delta):
                state[0, lane] = np.nan
            undecided += state[0, lane] > 0.0
        if undecided == 0:
            break
    certified = 0
    while certified < min(LANES, last + 1 - start) and state[0, certified] <= 0.0:
        certified += 1
    # The first lane is never dropped, so if it is not certified it failed, even if it holds NaN.
    return certified, certified == 0 or (certified < LANES and state[0, certified] > 0.0)


@compiled
def select_side_by_side(losses, thresholds, rows, epsilons, test, start):  # type: ignore[no-untyped-def]
    """Do `select_by_betting` faster, from `MIN_PARALLEL` samples on; exit form only, no pool."""
    selected = np.empty(epsilons.size, np.int64)
    last = start - 1
    for j in range(epsilons.size):
        at = Test(epsilons[j], test.delta, test.max_loss, test.star, 0)
        failed = False
        while last + 1 < losses.thresholds.shape[0] and not failed:
            certified, failed = count_certified(losses, thresholds, rows, last + 1, at)
            last += certified
        selected[j] = last
    return selected
