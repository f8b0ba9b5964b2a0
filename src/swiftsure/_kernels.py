"""Every compiled loop: the exit rule, losses along a path, totals, bets."""

from typing import NamedTuple

import numpy as np

from swiftsure._compile import compiled

__all__ = [
    "Losses",
    "exit_counts",
    "exit_indices",
    "gather",
    "group_means",
    "log_deficit",
    "select_by_betting",
    "totals_nested",
    "totals_scan",
]


ROUNDING = 1e-12
"""Relative error that a few operations may add up to."""


class Losses(NamedTuple):
    """Loss of every sample at every setting of a path, in one of two forms.

    Exit form: `values` is (n, n_exits), and a sample's loss at setting k stands in the column of
    the exit it takes under `thresholds[k]`. Table form: `values` is (n, K) and column k is the
    loss at setting k; `confidences` and `thresholds` then have no columns.
    """

    values: np.ndarray  # (n, n_exits) or (n, K), float64
    confidences: np.ndarray  # (n, n_exits - 1) or (n, 0), float32
    thresholds: np.ndarray  # (K, n_exits - 1) or (K, 0), float32
    strict: bool
    min_exit: int


@compiled
def first_exit(confidences, thresholds, strict, min_exit):  # type: ignore[no-untyped-def]
    """Exit of one sample (Eq. 1 of the paper): the definition that everything else uses."""
    for exit_ in range(min_exit, confidences.shape[0]):
        if confidences[exit_] > thresholds[exit_]:
            return exit_
        if not strict and confidences[exit_] == thresholds[exit_]:
            return exit_
    return confidences.shape[0]


@compiled
def exit_indices(confidences, thresholds, strict, min_exit):  # type: ignore[no-untyped-def]
    """Exit of each sample under one setting."""
    exits = np.empty(confidences.shape[0], np.int64)
    for i in range(exits.size):
        exits[i] = first_exit(confidences[i], thresholds, strict, min_exit)
    return exits


@compiled
def column(losses, row, setting):  # type: ignore[no-untyped-def]
    """Column of `losses.values` that holds a sample's loss at a setting."""
    if losses.thresholds.shape[1] == 0:
        return setting
    return first_exit(
        losses.confidences[row], losses.thresholds[setting], losses.strict, losses.min_exit
    )


@compiled
def gather(losses, rows, start, stop):  # type: ignore[no-untyped-def]
    """Dense (rows, stop - start) block of the losses."""
    out = np.empty((rows.size, stop - start), np.float64)
    for i in range(rows.size):
        for k in range(start, stop):
            out[i, k - start] = losses.values[rows[i], column(losses, rows[i], k)]
    return out


@compiled
def group_means(losses, codes, sizes):  # type: ignore[no-untyped-def]
    """Mean loss of each group at each setting: (n_groups, K)."""
    out = np.zeros((sizes.size, losses.thresholds.shape[0]), np.float64)
    for i in range(codes.size):
        for k in range(out.shape[1]):
            out[codes[i], k] += losses.values[i, column(losses, i, k)]
    for g in range(sizes.size):
        out[g] /= sizes[g]
    return out


@compiled
def totals_scan(losses, rows, monotone):  # type: ignore[no-untyped-def]
    """Sum and sum of squares of the losses at each setting, for any path."""
    n_settings = losses.thresholds.shape[0]
    sums = np.zeros(n_settings)
    squares = np.zeros(n_settings)
    for row in rows:
        largest = 0.0
        for k in range(n_settings):
            value = losses.values[row, column(losses, row, k)]
            if monotone:
                largest = max(largest, value)
                value = largest
            sums[k] += value
            squares[k] += value * value
    return sums, squares


@compiled
def entry(threshold_column, confidence, strict):  # type: ignore[no-untyped-def]
    """First setting at which an exit fires, thresholds falling along the path; K if none."""
    start, width = 0, threshold_column.shape[0]
    while width > 0:  # the branch-free form of a binary search
        half = (width + 1) // 2
        threshold = threshold_column[start + half - 1]
        fires = confidence > threshold or (not strict and confidence == threshold)
        start += 0 if fires else half
        width = half - 1 if fires else width - half
    return start


@compiled
def fill_entries(losses, row, entries):  # type: ignore[no-untyped-def]
    """Write into `entries[l]` the first setting at which a sample leaves at exit l or before."""
    earliest = losses.thresholds.shape[0]
    for exit_ in range(losses.confidences.shape[1]):
        if exit_ >= losses.min_exit:
            confidence = losses.confidences[row, exit_]
            earliest = min(earliest, entry(losses.thresholds[:, exit_], confidence, losses.strict))
        entries[exit_] = earliest


@compiled
def totals_nested(losses, rows, monotone):  # type: ignore[no-untyped-def]
    """What `totals_scan` returns, in O(n · exits · log K), for thresholds that fall along the path.

    Along such a path a sample only moves to earlier exits, so its loss is a step function with at
    most `n_exits` steps: each step is noted once, and a cumulative sum over settings does the rest.
    """
    n_settings = losses.thresholds.shape[0]
    n_early = losses.confidences.shape[1]
    sums = np.zeros(n_settings + 1)
    squares = np.zeros(n_settings + 1)
    entries = np.empty(n_early, np.int64)
    for row in rows:
        contributes = False
        for exit_ in range(n_early + 1):
            contributes = contributes or losses.values[row, exit_] != 0.0
        if not contributes:
            continue  # most samples, for 0-1 losses
        fill_entries(losses, row, entries)
        before = losses.values[row, n_early]
        if monotone:
            before = max(0.0, before)
        sums[0] += before
        squares[0] += before * before
        for exit_ in range(n_early - 1, -1, -1):
            if exit_ > 0 and entries[exit_] == entries[exit_ - 1]:
                continue  # an earlier exit fires as soon as this one does
            value = losses.values[row, exit_]
            if monotone:
                value = max(before, value)
            sums[entries[exit_]] += value - before
            squares[entries[exit_]] += value * value - before * before
            before = value
    return np.cumsum(sums)[:n_settings], np.cumsum(squares)[:n_settings]


@compiled
def exit_counts(losses, rows, nested):  # type: ignore[no-untyped-def]
    """How many samples leave at each exit, setting by setting: (K, n_exits)."""
    n_settings = losses.thresholds.shape[0]
    n_early = losses.confidences.shape[1]
    counts = np.zeros((n_settings + 1, n_early + 1), np.int64)
    if nested:
        entries = np.empty(n_early, np.int64)
        for row in rows:
            fill_entries(losses, row, entries)
            counts[0, n_early] += 1
            for exit_ in range(n_early - 1, -1, -1):
                counts[entries[exit_], exit_ + 1] -= 1
                counts[entries[exit_], exit_] += 1
        for k in range(1, n_settings):
            counts[k] += counts[k - 1]
    else:
        for row in rows:
            for k in range(n_settings):
                counts[k, column(losses, row, k)] += 1
    return counts[:n_settings]


@compiled
def log_growth(gain):  # type: ignore[no-untyped-def]
    """log(1 + gain); a short series where `gain` is small, as it is throughout a long test."""
    if -0.015625 < gain < 0.015625:
        square = gain * gain
        low = gain * (1.0 - 0.5 * gain) + gain * square * (1.0 / 3.0 - 0.25 * gain)
        high = (0.2 - gain / 6.0) + square * (1.0 / 7.0 - 0.125 * gain)
        return low + gain * square * square * high
    return np.log1p(gain)


@compiled
def bet(missing, total, deviations, loss, level, largest_stake, i, n, log_level, bound, star):  # type: ignore[no-untyped-def]
    """Take one sample into account: what is missing to the goal, in logs, and the moments so far.

    The stake is WSR's, or STaR's, which aims at what is still missing. Once all is lost, an
    infinite amount is missing: rounding must not leave a crumb to start again from.
    """
    horizon = n - i if star else n
    urge = missing if star else log_level
    stake = min(largest_stake, np.sqrt(2.0 * (i + 1) * urge / (horizon * deviations)))
    gain = stake * (level - loss)
    missing = missing - log_growth(gain) if gain > -1.0 + ROUNDING else np.inf
    total += loss
    mean = (0.5 * bound + total) / (i + 2)
    return missing, total, deviations + (loss - mean) * (loss - mean)


@compiled
def log_deficit(losses, rows, setting, epsilon, delta, goal, bound, star, pool):  # type: ignore[no-untyped-def]
    """What the best wealth of a bet against "the risk is at least ε" lacks to `goal`, in logs.

    0 or less: the wealth reached `goal`, so the risk at `setting` is certified to be below ε with
    failure probability 1/goal. The stakes are tuned for failure probability `delta`. Stops as soon
    as the goal is reached, and once the wealth is 0, which is final. With `pool` > 0 the rows are a
    sample without replacement from a pool of that size, and ε is replaced at each step by the mean
    that the rest of it would need.
    """
    n = rows.size
    missing = np.log(goal)
    least = missing
    log_level = -np.log(delta)
    total = 0.0
    deviations = 0.25 * bound * bound
    level = epsilon
    largest_stake = 1.0 / (bound - epsilon if star else max(bound, bound - epsilon))
    for i in range(n):
        loss = losses.values[rows[i], column(losses, rows[i], setting)]
        if pool > 0:
            level = (pool * epsilon - total) / (pool - i)
            if level > bound * (1.0 + ROUNDING):
                return -np.inf  # the rest of the pool cannot bring the risk up to ε any more
            room = max(bound - level, 0.0) if star else max(bound, bound - level)
            largest_stake = 1.0 / room if room > bound * ROUNDING else 0.0
        missing, total, deviations = bet(
            missing, total, deviations, loss, level, largest_stake, i, n, log_level, bound, star
        )
        least = min(least, missing)
        if least <= 0.0 or missing == np.inf:
            return least
    return least


@compiled
def certify_two(losses, rows, setting, epsilon, delta, bound, star):  # type: ignore[no-untyped-def]
    """Whether a setting is certified, and the next one: two bets side by side.

    Each bet is a chain of operations that wait for one another, so two take little longer than one.
    """
    n = rows.size
    log_level = -np.log(delta)
    cap = 1.0 / (bound - epsilon if star else max(bound, bound - epsilon))
    lacks, lacks_next = log_level, log_level
    total, total_next = 0.0, 0.0
    spread, spread_next = 0.25 * bound * bound, 0.25 * bound * bound
    i = 0
    while i < n and 0.0 < lacks < np.inf and 0.0 < lacks_next < np.inf:
        row = rows[i]
        loss = losses.values[row, column(losses, row, setting)]
        loss_next = losses.values[row, column(losses, row, setting + 1)]
        lacks, total, spread = bet(
            lacks, total, spread, loss, epsilon, cap, i, n, log_level, bound, star
        )
        lacks_next, total_next, spread_next = bet(
            lacks_next,
            total_next,
            spread_next,
            loss_next,
            epsilon,
            cap,
            i,
            n,
            log_level,
            bound,
            star,
        )
        i += 1
    k = i
    while k < n and 0.0 < lacks < np.inf:
        loss = losses.values[rows[k], column(losses, rows[k], setting)]
        lacks, total, spread = bet(
            lacks, total, spread, loss, epsilon, cap, k, n, log_level, bound, star
        )
        k += 1
    if not lacks <= 0.0:
        return False, False  # the walk ends here, so the next one does not matter
    while i < n and 0.0 < lacks_next < np.inf:
        loss = losses.values[rows[i], column(losses, rows[i], setting + 1)]
        lacks_next, total_next, spread_next = bet(
            lacks_next, total_next, spread_next, loss, epsilon, cap, i, n, log_level, bound, star
        )
        i += 1
    return True, lacks_next <= 0.0


@compiled
def select_by_betting(losses, rows, epsilons, delta, bound, star, pool, start, stop):  # type: ignore[no-untyped-def]
    """Fixed sequence of betting tests of settings `start` to `stop`, for rising levels.

    Returns for each level the last certified setting (`start - 1` if none). What is certified at a
    level is certified at any higher one, so each level goes on where the one before it stopped.
    """
    selected = np.empty(epsilons.size, np.int64)
    goal = 1.0 / delta
    last = start - 1
    for j in range(epsilons.size):
        passed = True
        while passed and last + 1 < stop:
            if pool == 0 and last + 2 < stop:
                first, second = certify_two(losses, rows, last + 1, epsilons[j], delta, bound, star)
                last += int(first) + int(second)
                passed = second
            else:
                deficit = log_deficit(
                    losses, rows, last + 1, epsilons[j], delta, goal, bound, star, pool
                )
                passed = deficit <= 0.0
                last += int(passed)
        selected[j] = last
    return selected
