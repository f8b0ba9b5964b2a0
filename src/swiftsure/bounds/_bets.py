"""Compiled bets against "the risk is at least ε": WSR and STaR, one by one or side by side.

Losses come as in `_kernels.Losses`, their thresholds also as `_kernels.firing_levels`.
"""

from typing import NamedTuple

import numpy as np

from swiftsure._compile import compiled

__all__ = [
    "LONG",
    "log_deficit",
    "log_deficit_weighted",
    "select_by_betting",
    "select_side_by_side",
]

ROUNDING = 1e-12
"""Relative error that a few operations may add up to."""

EPSILON = 2.0**-52
"""Relative error of one operation."""

FAR = 1e100
"""Wealth beyond this, or below its inverse, is put into its logarithm, long before it overflows."""

SMALL = 0.0625
"""Gains below this have their logarithm from a series."""


@compiled
def log_series(square):  # type: ignore[no-untyped-def]
    """Of a small gain g, from g²: (odd, even) such that log(1 + g) = g · odd - g² · even."""
    fourth = square * square
    odd = (1 / 5 + square * (1 / 7)) + fourth * (1 / 9 + square * (1 / 11))
    even = (1 / 6 + square * (1 / 8)) + fourth * (1 / 10)
    return (1.0 + square * (1 / 3)) + fourth * odd, (1 / 2 + square * (1 / 4)) + fourth * even


@compiled
def log_growth(wish, largest_stake, below):  # type: ignore[no-untyped-def]
    """log(1 + stake · below), the stake being √wish, but no more than the largest."""
    stake_squared = min(largest_stake * largest_stake, wish)
    square = stake_squared * (below * below)
    if square < SMALL * SMALL:  # all of the series but one product is done before the root is
        odd, even = log_series(square)
        return np.sqrt(stake_squared) * (below * odd) - square * even
    gain = min(largest_stake, np.sqrt(wish)) * below
    # Where all is lost, rounding must not leave a crumb to start again from.
    return np.log1p(gain) if gain > -1.0 + ROUNDING else -np.inf


@compiled
def bet(losses, levels, rows, setting, first, stop, state, epsilon, delta, bound, star, pool):  # type: ignore[no-untyped-def]
    """Go on with a bet against "the risk is at least ε", from sample `first` to before `stop`.

    `state` is (what the wealth lacks to its goal, in logs; the least that this ever was; sum of
    the losses; B²/4 and the sum of their squared deviations). Stops once the goal is reached.
    """
    n = rows.size
    missing, least, total, deviations = state
    urge = -np.log(delta)  # WSR's log(1/δ); STaR replaces it by what is missing
    level = epsilon
    largest_stake = 1.0 / (bound - epsilon if star else max(bound, bound - epsilon))
    n_early = losses.thresholds.shape[1]
    wealth, best, needed = 1.0, 1.0, np.exp(missing)
    for i in range(first, stop):
        row = rows[i]
        # Exits that do not fire are counted, rather than the first that does sought: which one
        # that is, no processor foresees.
        exit_ = 0
        stays = True
        for e in range(n_early):
            stays &= losses.confidences[row, e] < levels[e, setting]
            exit_ += stays
        loss = losses.values[row, exit_ if n_early > 0 else setting]
        if pool > 0:
            level = (pool * epsilon - total) / (pool - i)
            # A sum of i numbers is off by so much at most, and few that remain make much of it.
            off = EPSILON * i * (abs(total) + pool * abs(epsilon)) / (pool - i)
            if level > bound * (1.0 + ROUNDING) + off:
                # The rest of the pool cannot bring the risk up to ε any more.
                return -np.inf, -np.inf, total, deviations
            room = max(bound - level, 0.0) if star else max(bound, bound - level)
            largest_stake = 1.0 / room if room > bound * ROUNDING else 0.0
        horizon = n - i if star else n
        urge = missing if star else urge
        scale = 2.0 * (i + 1) / (horizon * deviations)  # 2 / (horizon · variance)
        if star:
            missing -= log_growth(scale * urge, largest_stake, level - loss)
            if not missing < np.inf:
                return np.inf, least, total, deviations
            least = min(least, missing)
            if least <= 0.0:
                break
        else:  # WSR's stakes do not look at the wealth, so its logarithm can wait
            gain = min(largest_stake, np.sqrt(scale * urge)) * (level - loss)
            if not gain > -1.0 + ROUNDING:
                return np.inf, min(least, missing - np.log(best)), total, deviations
            grown = wealth * (1.0 + gain)
            if 1.0 / FAR < grown < FAR:
                wealth = grown
                best = max(best, wealth)
                if best >= needed:
                    return 0.0, 0.0, total, deviations
            else:
                least = min(least, missing - np.log(best))
                missing -= np.log(wealth) + np.log1p(gain)
                least = min(least, missing)
                wealth, best, needed = 1.0, 1.0, np.exp(missing)
        total += loss
        mean = (0.5 * bound + total) / (i + 2)
        deviations += (loss - mean) * (loss - mean)
    if not star:
        least = min(least, missing - np.log(best))
        missing -= np.log(wealth)
    return missing, least, total, deviations


@compiled
def log_deficit(losses, levels, rows, setting, epsilon, delta, goal, bound, star, pool):  # type: ignore[no-untyped-def]
    """What the best wealth of a bet against "the risk is at least ε" lacks to `goal`, in logs.

    0 or less: the wealth reached `goal`, so the risk at `setting` is certified to be below ε with
    failure probability 1/goal. The stakes are tuned for failure probability `delta`: WSR's, or
    STaR's, which aims at what is still missing. Stops as soon as the goal is reached, and once the
    wealth is 0, which is final. With `pool` > 0 the rows are a sample without replacement from a
    pool of that size, and ε is replaced at each step by the mean that the rest of it would need.
    """
    state = (np.log(goal), np.log(goal), 0.0, 0.25 * bound * bound)
    state = bet(
        losses, levels, rows, setting, 0, rows.size, state, epsilon, delta, bound, star, pool
    )
    return state[1]


@compiled
def log_deficit_weighted(sums, weights, rows, setting, epsilon, delta, goal, bound, star):  # type: ignore[no-untyped-def]
    """What `log_deficit` returns for the risk Σ sums / Σ weights: groups that differ in size.

    `sums` is (n_groups, K): the losses of a group over the largest size M. `weights` are the sizes
    over M. Each bet is on ε · weight − sum, whose mean is at most 0 wherever the risk is ε or more.
    Its variance is estimated around the risk so far, not around ε: stakes that know ε only by their
    cap keep the test monotone in ε, as that of samples is. With weights of 1 it is that test.
    """
    n = rows.size
    missing = np.log(goal)
    least = missing
    urge = -np.log(delta)
    largest_stake = 1.0 / (bound - epsilon if star else max(bound, bound - epsilon))
    total, weight, deviations = 0.0, 1.0, 0.25 * bound * bound
    for i in range(n):
        loss = sums[rows[i], setting]
        own = weights[rows[i]]
        scale = 2.0 * (i + 1) / ((n - i if star else n) * deviations)
        urge = missing if star else urge
        missing -= log_growth(scale * urge, largest_stake, epsilon * own - loss)
        if not missing < np.inf:
            break
        least = min(least, missing)
        if least <= 0.0:
            break
        total += loss
        weight += own
        deviation = loss - (0.5 * bound + total) / weight * own
        deviations += deviation * deviation
    return least


@compiled
def select_by_betting(losses, levels, rows, epsilons, delta, bound, star, pool, start):  # type: ignore[no-untyped-def]
    """Fixed sequence of betting tests from setting `start`, for rising levels.

    Returns for each level the last certified setting (`start - 1` if none). What is certified at a
    level is certified at any higher one, so each level goes on where the one before it stopped.
    """
    selected = np.empty(epsilons.size, np.int64)
    goal = 1.0 / delta
    last = start - 1
    for j in range(epsilons.size):
        while last + 1 < losses.thresholds.shape[0]:
            deficit = log_deficit(
                losses, levels, rows, last + 1, epsilons[j], delta, goal, bound, star, pool
            )
            if not deficit <= 0.0:
                break
            last += 1
        selected[j] = last
    return selected


LANES = 8
"""Settings that are tested side by side: the numbers in a wide vector register."""

BLOCK = 128
"""Samples between two looks at how tests side by side stand."""

LONG = 50_000
"""Samples from which tests side by side are faster than one after the other."""


class Front(NamedTuple):
    """`LANES` neighbouring settings, and where the bets on them stand."""

    levels: np.ndarray  # (n_early, LANES)
    lowest: np.ndarray  # (n_early,), over the lanes
    highest: np.ndarray  # (n_early,)
    state: np.ndarray  # (4, LANES): missing; square of the largest gain; the rest as in `bet`
    loss: np.ndarray  # (LANES,), of the sample at hand


@compiled
def aligned(n_rows):  # type: ignore[no-untyped-def]
    """Zeros, (n_rows, LANES), of which no row lies across two cache lines."""
    raw = np.zeros((n_rows + 1) * LANES)
    offset = -(raw.ctypes.data // 8) % LANES
    return raw[offset : offset + n_rows * LANES].reshape(n_rows, LANES)


@compiled
def new_front(levels, start, delta, bound):  # type: ignore[no-untyped-def]
    """Bets on the settings from `start` on, before the first sample.

    Past the end of the path its last setting is repeated.
    """
    n_early, last = levels.shape[0], levels.shape[1] - 1
    own = np.empty((n_early, LANES), np.float32)
    lowest = levels[:, start].copy()
    highest = levels[:, start].copy()
    state = aligned(4)
    for lane in range(LANES):
        state[0, lane] = -np.log(delta)
        state[3, lane] = 0.25 * bound * bound
        for exit_ in range(n_early):
            level = levels[exit_, min(start + lane, last)]
            own[exit_, lane] = level
            lowest[exit_] = min(lowest[exit_], level)
            highest[exit_] = max(highest[exit_], level)
    return Front(own, lowest, highest, state, aligned(1)[0])


@compiled
def bet_side_by_side(front, losses, rows, first, stop, epsilon, delta, bound, star):  # type: ignore[no-untyped-def]
    """What `bet` does, in all lanes at once and for small gains only; the largest is noted.

    Loops over lanes become vector instructions as long as nothing in them branches. A lane whose
    goal is reached stands still.
    """
    n, lanes, n_early = rows.size, front.loss.size, front.levels.shape[0]
    state = front.state
    missing, widest, total, deviations = state[0], state[1], state[2], state[3]
    loss = front.loss
    goal = -np.log(delta)
    largest_stake = 1.0 / (bound - epsilon if star else max(bound, bound - epsilon))
    cap = largest_stake * largest_stake
    half = 0.5 * bound
    for i in range(first, stop):
        row = rows[i]
        some, every = 0, 0  # the exit that some lane takes, and the one by which every lane is out
        none_left, not_all = True, True
        for exit_ in range(n_early):
            confidence = losses.confidences[row, exit_]
            none_left &= confidence < front.lowest[exit_]
            not_all &= confidence < front.highest[exit_]
            some += none_left
            every += not_all
        value = losses.values[row, every]
        for lane in range(lanes):
            loss[lane] = value
        if some < every:  # rare: neighbouring settings mostly agree
            for exit_ in range(every - 1, some - 1, -1):
                value = losses.values[row, exit_]
                confidence = losses.confidences[row, exit_]
                for lane in range(lanes):
                    loss[lane] = value if confidence >= front.levels[exit_, lane] else loss[lane]
        horizon = n - i if star else n
        factor = 2.0 * (i + 1) / horizon
        share = 1.0 / (i + 2)
        for lane in range(lanes):
            before = missing[lane]
            below = epsilon - loss[lane]
            urge = before if star else goal
            stake_squared = min(cap, factor / deviations[lane] * urge)
            square = stake_squared * (below * below)
            widest[lane] = max(widest[lane], square)
            odd, even = log_series(square)
            after = before - (np.sqrt(stake_squared) * (below * odd) - square * even)
            missing[lane] = after if before > 0.0 else before
            total[lane] += loss[lane]
            deviation = loss[lane] - (half + total[lane]) * share
            deviations[lane] += deviation * deviation


@compiled
def count_certified(losses, levels, rows, start, epsilon, delta, bound, star):  # type: ignore[no-untyped-def]
    """How many settings from `start` on are certified, of at most `LANES`, and if the next failed.

    A setting that stands badly behind two undecided ones is set aside, which is neither.
    """
    n, last = rows.size, losses.thresholds.shape[0] - 1
    front = new_front(levels, start, delta, bound)
    state, kept = front.state, np.empty((4, LANES))
    for first in range(0, n, BLOCK):
        stop = min(n, first + BLOCK)
        for part in range(4):
            for lane in range(LANES):
                kept[part, lane] = state[part, lane]
        bet_side_by_side(front, losses, rows, first, stop, epsilon, delta, bound, star)
        undecided = 0
        for lane in range(LANES):
            if state[1, lane] >= SMALL * SMALL:  # the series was not good enough
                if kept[0, lane] > 0.0:
                    held = (kept[0, lane], kept[0, lane], kept[2, lane], kept[3, lane])
                    setting = min(start + lane, last)
                    state[0, lane], _, state[2, lane], state[3, lane] = bet(
                        losses,
                        levels,
                        rows,
                        setting,
                        first,
                        stop,
                        held,
                        epsilon,
                        delta,
                        bound,
                        star,
                        0,
                    )
                state[1, lane] = 0.0
            if undecided >= 2 and state[0, lane] > -4.0 * np.log(delta):
                state[0, lane] = np.nan
            undecided += state[0, lane] > 0.0
        if undecided == 0:
            break
    certified = 0
    while certified < min(LANES, last + 1 - start) and state[0, certified] <= 0.0:
        certified += 1
    # The first lane is never set aside, so without a success it has failed, whatever it holds.
    return certified, certified == 0 or (certified < LANES and state[0, certified] > 0.0)


@compiled
def select_side_by_side(losses, levels, rows, epsilons, delta, bound, star, start):  # type: ignore[no-untyped-def]
    """What `select_by_betting` returns, faster from `LONG` samples on: exit form, no pool."""
    selected = np.empty(epsilons.size, np.int64)
    last = start - 1
    for j in range(epsilons.size):
        failed = False
        while last + 1 < losses.thresholds.shape[0] and not failed:
            certified, failed = count_certified(
                losses, levels, rows, last + 1, epsilons[j], delta, bound, star
            )
            last += certified
        selected[j] = last
    return selected
