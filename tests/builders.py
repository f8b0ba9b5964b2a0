"""Data to try things on, and plain retellings of what the library computes with care."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import swiftsure as ss

LEVELS = [0.0, 0.25, 0.5, float(np.nextafter(np.float32(0.5), np.float32(1))), 0.75, 1.0]
"""Few values, so that confidences and thresholds often tie."""


PROMISE = frozenset(field.name for field in fields(ss.Promise)) - {"_"}


def request_of(*limits, **given):
    """The request of one promise, given the fields of both, and of `limits` of costs."""
    own = {name: given.pop(name) for name in PROMISE & given.keys()}
    return ss.Calibration([ss.Promise(**own), *limits], **given)


def refused(name):
    """Expect an error about the argument `name`, which it puts in backticks."""
    return pytest.raises((ValueError, TypeError), match=rf"`{name}\b[^`]*`")


def first_exits(confidences, thresholds, strict=False, min_exit=0):
    """The exit rule in words: the first exit, from `min_exit` on, that is confident enough."""
    chosen = []
    for row in np.asarray(confidences, np.float32).tolist():
        for exit_, (confidence, threshold) in enumerate(zip(row, thresholds, strict=True)):
            enough = confidence > threshold if strict else confidence >= threshold
            if exit_ >= min_exit and enough and threshold != math.inf:
                chosen.append(exit_)
                break
        else:
            chosen.append(len(row))
    return chosen


def along_path(values, confidences, settings, strict=False, min_exit=0):
    """The (n, K) matrix of the values of the exits taken, which the library avoids."""
    columns = [first_exits(confidences, row, strict, min_exit) for row in settings]
    return np.asarray(values)[np.arange(len(values))[:, None], np.transpose(columns)]


def random_logits(n=300, n_exits=4, n_classes=5, seed=0):
    """Logits that grow surer with the exit, and the labels they are about."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_classes, size=n)
    signal = np.eye(n_classes)[labels][:, None] * np.linspace(1.0, 4.0, n_exits)[:, None]
    return signal + 1.5 * rng.normal(size=(n, n_exits, n_classes)), labels


def random_record(n=300, seed=0, **arguments):
    """A record of random logits, with 0-1 and Brier losses."""
    logits, labels = random_logits(n, seed=seed)
    draw = {name: arguments.pop(name, None) for name in ("groups", "slices")}
    return replace(ss.ExitRecord.from_logits(logits, labels, **arguments), **draw)


def table_curve(columns, n=200, **arguments):
    """A curve of 0-1 losses: column k holds `columns[k]` ones among n, spread evenly.

    A first column without ones is the full model's, unless `relative` says otherwise.
    """
    losses = np.zeros((n, len(columns)))
    for k, ones in enumerate(columns):
        losses[np.linspace(0, n - 1, ones).astype(int), k] = 1.0
    arguments.setdefault("loss_range", (0, 1))
    arguments.setdefault("relative", None if columns[0] else True)
    return ss.RiskCurve.from_losses(np.linspace(1, 0, len(columns)), losses, **arguments)


@st.composite
def exit_cases(draw):
    """Confidences, losses, settings (K, n_exits - 1), costs and a variant of the exit rule."""
    n, n_early, K = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    each = {"fill": st.nothing()}  # every element drawn by itself
    levels = st.sampled_from(LEVELS)
    confidences = draw(hnp.arrays(np.float32, (n, n_early), elements=levels, **each))
    losses = draw(hnp.arrays(np.float64, (n, n_early + 1), elements=st.integers(-2, 2), **each))
    losses[:, -1] = 0.0
    thresholds = st.sampled_from([*LEVELS, math.inf])
    if draw(st.booleans()):  # a shared threshold, which falls
        path = ss.Path.grid(draw(hnp.arrays(np.float64, K, elements=thresholds)))
    else:  # any family, in any order
        rows = draw(hnp.arrays(np.float64, (K, n_early), elements=thresholds, **each))
        path = ss.Path.family(rows)
    costs = draw(hnp.arrays(np.float64, (n, n_early + 1), elements=st.integers(0, 9), **each))
    rule = {"strict": draw(st.booleans()), "min_exit": draw(st.integers(0, n_early + 1))}
    return confidences, losses, path, costs, rule


def exit_rule_cases():
    """The shared table of the exit rule: (confidence, threshold, strict, whether it exits).

    Every runtime, and every kernel that cannot call `swiftsure.exits.reaches`, is tested with it.
    """
    half, after = LEVELS[2], LEVELS[3]
    values = [0.0, half, after, 1.0, math.nan]
    thresholds = [-1.0, 0.0, half, after, 1.0, math.inf]
    return [
        (confidence, threshold, strict, confidence > threshold or (
            confidence == threshold and not strict
        ))
        for confidence in values
        for threshold in thresholds
        for strict in (False, True)
    ]  # fmt: skip
