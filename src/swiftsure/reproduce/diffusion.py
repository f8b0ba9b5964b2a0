"""Image generation with DeeDiff (section 5.4 of the paper, and its appendix on CIFAR-10).

From a threshold record of `swiftsure.diffusion.sweep`: the perceptual difference (LPIPS) between
images of the early-exit model and of the full one, from the same noise, and how many layers a step
took. The paper's networks and their images are not public; ours take their place.
"""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from swiftsure import assets
from swiftsure.evaluation import evaluate
from swiftsure.records import ThresholdRecord
from swiftsure.reproduce.sweeps import CONTROLS, SweepResult

__all__ = ["RECORD", "diffusion", "load_pairs"]

RECORD = assets.FOLDER / "diffusion" / "uvit_cifar10.parquet"
"""The library's own record."""

EPSILONS = np.round(np.arange(0.01, 0.201, 0.01), 2)


def diffusion(
    record: str | os.PathLike[str] | None = None,
    *,
    loss: str = "lpips",
    n_calibration: int = 500,
    splits: int = 100,
    delta: float = 0.1,
    epsilons: NDArray[np.float64] = EPSILONS,
    seed: int = 0,
    progress: bool | None = None,
) -> SweepResult:
    """Run the experiment on a record of generated pairs.

    Parameters
    ----------
    record : path, optional
        A threshold record; the library's own by default.
    loss : str
        Which of the record's inconsistencies is controlled.
    n_calibration : pairs to calibrate on
    splits : random splits into calibration and test pairs
    """
    pairs = load_pairs(record)
    study = evaluate(
        pairs,
        "consistency",
        loss,
        controls=CONTROLS,
        epsilons=epsilons,
        delta=delta,
        n_calibration=n_calibration,
        splits=splits,
        seed=seed,
        progress=progress,
    )
    name = RECORD.stem if record is None else Path(record).stem
    title = f"{name}, {pairs.n:,} pairs, n = {n_calibration:,}"
    return SweepResult(study, title, "diffusion")


def load_pairs(record: str | os.PathLike[str] | None = None) -> ThresholdRecord:
    """Read a record of pairs; say how to make one where there is none."""
    if record is None and not RECORD.is_file():
        raise ValueError(
            "The library has no record of diffusion of its own: make one with train.py and then"
            " records.py of experiments/diffusion, and name it with --record FILE.parquet."
        )
    return ThresholdRecord.load(RECORD if record is None else record)
