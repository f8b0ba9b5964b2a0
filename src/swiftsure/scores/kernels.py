"""Compiled loops for the scores of classifiers, for runtimes that decide on a CPU.

NumPy and PyTorch take microseconds per operation, of which a score has eight; a loop takes one.
"""

import math

import numpy as np

from swiftsure._lib.compile import compiled

__all__ = ["CLASS_SCORES", "MOST_LOGITS", "class_confidences", "learned_confidences"]

EDGE = 2.0**-25  # as in `features`, whose arithmetic this repeats; numba needs them in this file
STEPS = 2.0**24
SHIFT = (math.sqrt(5.0) - 1.0) / 2.0

TOP1, TOP_DIFF, ENTROPY = 0, 1, 2
CLASS_SCORES = {"top1": TOP1, "top_diff": TOP_DIFF, "entropy": ENTROPY}
"""Numbers of the scores that `class_confidences` computes."""

MOST_LOGITS = 2048
"""Logits from which on vectorised operations are faster than a loop."""


@compiled
def on_grid(value):  # type: ignore[no-untyped-def]
    """Return a score as `outputs` rounds it."""
    return min(max(math.floor(value * STEPS + SHIFT) / STEPS, 0.0), 1.0)


@compiled
def class_confidences(logits, temperature, score):  # type: ignore[no-untyped-def]
    """Return a score of logits, (n, n_classes) in float64, as `outputs` defines it.

    `score` is one of `CLASS_SCORES`. Invalid logits give NaN.
    """
    n, n_classes = logits.shape
    found = np.empty(n, np.float32)
    scaled = np.empty(n_classes)
    for i in range(n):
        largest = logits[i].max() / temperature
        total = 0.0
        for j in range(n_classes):
            scaled[j] = math.exp(logits[i, j] / temperature - largest)
            total += scaled[j]
        if not total > 0.0:
            found[i] = np.nan
            continue
        if score == ENTROPY:
            spread = 0.0
            for j in range(n_classes):
                p = scaled[j] / total
                if p > 0.0:
                    spread -= p * math.log(p)
            found[i] = on_grid(min(max(1.0 - spread / math.log(n_classes), 0.0), 1.0))
            continue
        first, second = 0.0, 0.0
        for j in range(n_classes):
            p = scaled[j] / total
            if p > first:
                first, second = p, first
            elif p > second:
                second = p
        found[i] = on_grid(first if score == TOP1 else first - second)
    return found


@compiled
def learned_confidences(logits, temperature, weights):  # type: ignore[no-untyped-def]
    """Return the confidences of logits, (n, n_classes) in float64, by the default features.

    `weights` are the intercept and the slopes of one exit. Invalid logits give NaN.
    """
    n, n_classes = logits.shape
    found = np.empty(n, np.float32)
    scaled = np.empty(n_classes)
    for i in range(n):
        largest = logits[i].max() / temperature
        total = 0.0
        for j in range(n_classes):
            scaled[j] = math.exp(logits[i, j] / temperature - largest)
            total += scaled[j]
        if not total > 0.0:
            found[i] = np.nan
            continue
        first, second = 0.0, 0.0
        for j in range(n_classes):
            p = scaled[j] / total
            if p > first:
                first, second = p, first
            elif p > second:
                second = p
        top1, top_diff = on_grid(first), on_grid(first - second)
        ratio = math.log(min(max(top1, EDGE), 1.0 - EDGE)) - math.log(
            min(max(top1 - top_diff, EDGE), 1.0)
        )
        z = weights[0] + weights[1] * ratio
        z = z + weights[2] * math.log1p(ratio)
        found[i] = on_grid(1.0 / (1.0 + math.exp(-z)))
    return found
