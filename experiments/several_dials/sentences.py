"""The test sentences of Multi30k that the records of several dials are made on."""

from pathlib import Path

import numpy as np

from experiments.calm.records import PARTS
from experiments.translation.data import Pairs, multi30k

__all__ = ["sentences"]


def sentences(folder: Path, n: int) -> tuple[list[int], Pairs]:
    """Return the numbers of n test sentences, drawn at random, and the sentences."""
    tests = Pairs([], [])
    for part in PARTS:
        tests += multi30k(folder / "multi30k", part)
    order = np.random.default_rng(0).permutation(len(tests.german))
    kept = sorted(order[:n].tolist())
    return kept, Pairs([tests.german[k] for k in kept], [tests.english[k] for k in kept])
