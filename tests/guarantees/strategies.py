"""Losses for the property tests: few values, so that ties, extremes and repeats occur."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import swiftsure as ss

__all__ = [
    "ANY_DELTA",
    "EPSILONS",
    "deltas",
    "exit_records",
    "levels",
    "properties",
    "sequences",
    "tables",
]

EPSILONS = np.arange(1, 64) / 64
"""Levels as shares of B; far enough apart that rounding cannot make them meet."""

levels = st.sampled_from(EPSILONS.tolist())
deltas = st.sampled_from([1e-6, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.5, 0.9])

ANY_DELTA = pytest.mark.filterwarnings("ignore:`delta` is the probability that the promise fails")
"""For modules that use `deltas`: a δ above 1/2 warns, and its tests must be right all the same."""


def properties(examples: int = 50) -> settings:
    """Settings of a property test: as many examples, the same ones each time, no deadline."""
    return settings(max_examples=examples, deadline=None, derandomize=True)


@st.composite
def tables(draw, low: float = 0.0, high: float = 1.0, most: int = 60) -> np.ndarray:
    """Losses (n, K) in [low, high], multiples of (high − low)/64 so that sums are exact.

    Column 0 is 0. Rows are drawn from a few and repeated, so that risks are often small enough to
    be certified.
    """
    n = draw(st.integers(1, most))
    settings_ = draw(st.integers(2, 6))
    kinds = draw(st.integers(1, 5))
    rows = draw(hnp.arrays(np.int64, (kinds, settings_), elements=st.integers(0, 64)))
    rare = draw(st.integers(0, 8))
    which = draw(hnp.arrays(np.int64, n, elements=st.integers(-rare, kinds - 1)))
    values = np.vstack([low + (high - low) * rows / 64, np.zeros(settings_)])
    losses = values[np.where(which < 0, kinds, which)]
    losses[:, 0] = 0.0
    return losses


@st.composite
def sequences(draw, low: float = -1.0, high: float = 1.0) -> np.ndarray:
    """Losses (n,) in runs, with extremes: what a betting test may find hard."""
    values = [low, low / 2, 0.0, high / 64, high / 8, high / 2, 63 / 64 * high, high]
    runs = draw(
        st.lists(st.tuples(st.sampled_from(values), st.integers(1, 40)), min_size=1, max_size=12)
    )
    return np.concatenate([np.full(length, value) for value, length in runs])


@st.composite
def exit_records(draw, most: int = 40) -> ss.ExitRecord:
    """Records of 2 to 5 exits whose confidences and losses tie often; losses in [0, 1]."""
    n = draw(st.integers(1, most))
    early = draw(st.integers(1, 4))
    grades = st.sampled_from(np.float32([0.0, 0.25, 0.5, 0.75, 1.0]).tolist())
    confidences = draw(hnp.arrays(np.float32, (n, early), elements=grades))
    losses = draw(hnp.arrays(np.int64, (n, early + 1), elements=st.integers(0, 64))) / 64
    return ss.ExitRecord(confidences, losses={"some": losses})
