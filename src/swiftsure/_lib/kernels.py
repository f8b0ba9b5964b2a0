"""Compiled loops for the exit rule, losses along a path, and their totals."""

from typing import NamedTuple

import numpy as np

from swiftsure._lib.compile import compiled

__all__ = [
    "Losses",
    "earlier_cuts",
    "exit_counts",
    "exit_indices",
    "first_marked",
    "gather",
    "group_sums",
    "inclusive_thresholds",
    "totals_nested",
    "totals_scan",
]


class Losses(NamedTuple):
    """Loss of every sample at every setting of a path, in one of two forms.

    Exit form: `values` is (n, n_exits), and a sample's loss at setting k is in the column of the
    exit it takes under `thresholds[k]`. Table form: `values` is (n, K) and column k is the loss at
    setting k; `confidences` and `thresholds` then have no columns.
    """

    values: np.ndarray  # (n, n_exits) or (n, K), float64
    confidences: np.ndarray  # (n, n_exits - 1) or (n, 0), float32
    thresholds: np.ndarray  # (K, n_exits - 1) or (K, 0), float32
    strict: bool
    min_exit: int


@compiled
def first_exit(confidences, thresholds, strict, min_exit):  # type: ignore[no-untyped-def]
    """Return the exit of one sample (Eq. 1 of the paper); `exits.reaches`, compiled."""
    for exit_ in range(min_exit, confidences.shape[0]):
        if confidences[exit_] > thresholds[exit_]:
            return exit_
        if not strict and confidences[exit_] == thresholds[exit_]:
            return exit_
    return confidences.shape[0]


@compiled
def exit_indices(confidences, thresholds, strict, min_exit):  # type: ignore[no-untyped-def]
    """Return the exit of each sample under one setting, (n,)."""
    exits = np.empty(confidences.shape[0], np.int64)
    for i in range(exits.size):
        exits[i] = first_exit(confidences[i], thresholds, strict, min_exit)
    return exits


@compiled
def column(losses, row, setting):  # type: ignore[no-untyped-def]
    """Return the column of `losses.values` that holds a sample's loss at a setting."""
    if losses.thresholds.shape[1] == 0:
        return setting
    return first_exit(
        losses.confidences[row], losses.thresholds[setting], losses.strict, losses.min_exit
    )


@compiled
def gather(losses, rows, start, stop):  # type: ignore[no-untyped-def]
    """Return the losses of some rows at settings [start, stop), (n_rows, stop - start)."""
    out = np.empty((rows.size, stop - start), np.float64)
    for i in range(rows.size):
        for k in range(start, stop):
            out[i, k - start] = losses.values[rows[i], column(losses, rows[i], k)]
    return out


@compiled
def group_sums(losses, codes, divisors):  # type: ignore[no-untyped-def]
    """Return each group's total loss at each setting divided by its divisor, (n_groups, K).

    For group means the divisors are the group sizes; otherwise one number for all groups.
    """
    out = np.zeros((divisors.size, losses.thresholds.shape[0]), np.float64)
    for i in range(codes.size):
        for k in range(out.shape[1]):
            out[codes[i], k] += losses.values[i, column(losses, i, k)]
    for g in range(divisors.size):
        out[g] /= divisors[g]
    return out


@compiled
def totals_scan(losses, rows, monotone):  # type: ignore[no-untyped-def]
    """Return the sum and sum of squares of the losses at each setting, for any path."""
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


SEARCHES = 256
"""Rows searched in one batch: a single search is limited by the latency of its comparisons."""


@compiled
def inclusive_thresholds(losses):  # type: ignore[no-untyped-def]
    """Return thresholds λ, (n_early, K), adjusted so that c ≥ λ exits even if `strict`."""
    n_settings, n_early = losses.thresholds.shape
    thresholds = np.full((n_early, n_settings), np.float32(np.inf))
    for exit_ in range(losses.min_exit, n_early):
        for k in range(n_settings):
            given = losses.thresholds[k, exit_]
            thresholds[exit_, k] = (
                np.nextafter(given, np.float32(np.inf)) if losses.strict else given
            )
    return thresholds


@compiled
def fill_entries(entries, losses, thresholds, rows):  # type: ignore[no-untyped-def]
    """Write into `entries[l, j]` the first setting at which row j exits at l or earlier, else K.

    Thresholds must fall along the path.
    """
    confidences = np.empty(rows.size, np.float32)
    for exit_ in range(thresholds.shape[0]):
        falling = thresholds[exit_]
        found = entries[exit_]
        for j in range(rows.size):
            confidences[j] = losses.confidences[rows[j], exit_]
            found[j] = 0
        width = falling.size
        while width > 1:  # binary search, all rows in lockstep
            half = width // 2
            for j in range(rows.size):
                found[j] += half if falling[found[j] + half - 1] > confidences[j] else 0
            width -= half
        for j in range(rows.size):
            found[j] += falling[found[j]] > confidences[j]
            if exit_ > 0:
                found[j] = min(found[j], entries[exit_ - 1, j])


@compiled
def totals_nested(losses, rows, monotone):  # type: ignore[no-untyped-def]
    """Return what `totals_scan` does, in O(n · exits · log K); thresholds must fall along the path.

    Along such a path a sample only moves to earlier exits, so its loss is a step function with at
    most `n_exits` steps: each step is added once, and a cumulative sum over settings does the rest.
    """
    n_settings = losses.thresholds.shape[0]
    n_early = losses.confidences.shape[1]
    sums = np.zeros(n_settings + 1)
    squares = np.zeros(n_settings + 1)
    thresholds = inclusive_thresholds(losses)
    entries = np.empty((n_early, SEARCHES), np.int64)
    chosen = np.empty(SEARCHES, np.int64)
    for first in range(0, rows.size, SEARCHES):
        n_chosen = 0
        for row in rows[first : first + SEARCHES]:
            contributes = False
            for exit_ in range(n_early + 1):
                contributes |= losses.values[row, exit_] != 0.0
            chosen[n_chosen] = row
            n_chosen += contributes  # for 0-1 losses, few rows do
        fill_entries(entries, losses, thresholds, chosen[:n_chosen])
        for j in range(n_chosen):
            row = chosen[j]
            before = losses.values[row, n_early]
            if monotone:
                before = max(0.0, before)
            sums[0] += before
            squares[0] += before * before
            for exit_ in range(n_early - 1, -1, -1):
                if exit_ > 0 and entries[exit_, j] == entries[exit_ - 1, j]:
                    continue  # never taken: an earlier exit fires whenever this one does
                value = losses.values[row, exit_]
                if monotone:
                    value = max(before, value)
                sums[entries[exit_, j]] += value - before
                squares[entries[exit_, j]] += value * value - before * before
                before = value
    return np.cumsum(sums)[:n_settings], np.cumsum(squares)[:n_settings]


@compiled
def exit_counts(losses, rows, nested):  # type: ignore[no-untyped-def]
    """Return the number of samples that take each exit at each setting, (K, n_exits)."""
    n_settings = losses.thresholds.shape[0]
    n_early = losses.confidences.shape[1]
    counts = np.zeros((n_settings + 1, n_early + 1), np.int64)
    if nested:
        thresholds = inclusive_thresholds(losses)
        entries = np.empty((n_early, SEARCHES), np.int64)
        counts[0, n_early] = rows.size
        for first in range(0, rows.size, SEARCHES):
            part = rows[first : first + SEARCHES]
            fill_entries(entries, losses, thresholds, part)
            for exit_ in range(n_early):
                for j in range(part.size):
                    counts[entries[exit_, j], exit_ + 1] -= 1
                    counts[entries[exit_, j], exit_] += 1
        for k in range(1, n_settings):
            for exit_ in range(n_early + 1):
                counts[k, exit_] += counts[k - 1, exit_]
    else:
        for row in rows:
            for k in range(n_settings):
                counts[k, column(losses, row, k)] += 1
    return counts[:n_settings]


@compiled
def first_marked(losses, rows, nested):  # type: ignore[no-untyped-def]
    """Return, for each row, the first setting at which its loss is not 0; K if there is none.

    With thresholds that fall along the path (`nested`), O(exits · log K) per row.
    """
    n_settings, n_early = losses.thresholds.shape
    found = np.full(rows.size, n_settings)
    if not nested:
        for i in range(rows.size):
            for k in range(n_settings):
                if losses.values[rows[i], column(losses, rows[i], k)] != 0.0:
                    found[i] = k
                    break
        return found
    thresholds = inclusive_thresholds(losses)
    entries = np.empty((n_early, SEARCHES), np.int64)
    for first in range(0, rows.size, SEARCHES):
        part = rows[first : first + SEARCHES]
        fill_entries(entries, losses, thresholds, part)
        for j in range(part.size):
            until = n_settings  # exits from here on are taken before this setting
            for exit_ in range(n_early + 1):
                since = entries[exit_, j] if exit_ < n_early else 0
                if since < until and losses.values[part[j], exit_] != 0.0:
                    found[first + j] = since
                until = min(until, since)
    return found


REFRESHED = 20
"""A cut is taken anew once there is one more row for every 20 before."""


@compiled
def earlier_cuts(losses, weights, starts, share):  # type: ignore[no-untyped-def]
    """Return for each sample a cut that the samples of earlier rows decide, (n,).

    It is the smallest of their losses, at least 0, above which lies at most a share of their
    weight. Row j has the samples [starts[j], starts[j + 1]), which all get one cut.
    """
    n_rows = starts.size - 1
    cuts = np.zeros(losses.size)
    ordered, counted = np.empty(losses.size), np.empty(losses.size)  # ascending, only those above 0
    kept, seen, total = 0, 0, 0.0
    row = 1
    while row < n_rows:
        until = min(n_rows, row + 1 + row // REFRESHED)
        new = np.argsort(losses[seen : starts[row]]) + seen
        old = kept - 1
        for i in new:
            total += weights[i]
            kept += losses[i] > 0.0
        left = new.size - 1
        for place in range(kept - 1, -1, -1):  # merge from the largest down
            if left < 0 or not losses[new[left]] > 0.0:
                break
            if old >= 0 and ordered[old] > losses[new[left]]:
                ordered[place], counted[place] = ordered[old], counted[old]
                old -= 1
            else:
                ordered[place], counted[place] = losses[new[left]], weights[new[left]]
                left -= 1
        allowed, above, place = share * total * (1.0 + 1e-12), 0.0, kept
        while place > 0 and above + counted[place - 1] <= allowed:
            place -= 1
            above += counted[place]
        cuts[starts[row] : starts[until]] = ordered[place - 1] if place > 0 else 0.0
        seen = starts[row]
        row = until
    return cuts
