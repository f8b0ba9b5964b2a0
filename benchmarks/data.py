"""Records to measure on: samples of the simulated early-exit classifier, five exits."""

from functools import cache

import numpy as np

from swiftsure.curves.paths import Path
from swiftsure.records import ExitRecord
from swiftsure.study.simulate import Population

__all__ = ["arrays", "linear_path", "path", "record"]

CHUNK = 20_000
"""Samples whose logits are held at once."""


@cache
def arrays(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return confidences (n, 4), losses and inconsistencies (n, 5) of n samples."""
    rng = np.random.default_rng(seed)
    population = Population()
    out = {
        "confidences": np.empty((n, 4), np.float32),
        "gap brier": np.empty((n, 5)),
        "consistency brier": np.empty((n, 5)),
        "consistency zero_one": np.empty((n, 5)),
    }
    for start in range(0, n, CHUNK):
        part = slice(start, min(n, start + CHUNK))
        sample = population.sample(part.stop - start, rng)
        exits = ExitRecord.from_logits(sample.logits, sample.labels)
        out["confidences"][part] = exits.confidences["top1"]
        out["gap brier"][part] = exits.losses["brier"]
        for loss in ("brier", "zero_one"):
            out[f"consistency {loss}"][part] = exits.inconsistencies[loss]
    return out


def record(n: int, risk: str, loss: str, total: int | None = None) -> ExitRecord:
    """Return a record of n samples with one loss; the first of `total` samples, if given."""
    found = arrays(total or n)
    kind = "losses" if risk == "gap" else "inconsistencies"
    return ExitRecord(found["confidences"][:n], **{kind: {loss: found[f"{risk} {loss}"][:n]}})


def linear_path(n_settings: int) -> Path:
    """Return the paper's grid, of this many settings with the full model."""
    return Path.grid(np.linspace(1, 0, n_settings - 1, endpoint=False))


def path(n_settings: int) -> Path:
    """Return a path that is even in the logit, of this many settings with the full model."""
    return Path.grid(1 / (1 + np.exp(-np.linspace(11, -6, n_settings - 1))))
