"""Speculative decoding with BiLD (section 5.5 of the paper).

From a threshold record of `swiftsure.text.sweep_pair`: losses of sentences at each rollback
threshold, and how often the large model was asked, per token.
"""

import numpy as np
from numpy.typing import NDArray

from swiftsure.control import Control
from swiftsure.evaluation import evaluate
from swiftsure.records import ThresholdRecord
from swiftsure.reproduce.sweeps import CONTROLS, SweepResult

__all__ = ["bild"]

LTT = {"LTT (HB, zero-bounded)": Control("ltt", bound="hoeffding_bentkus", zero_bounded=True)}
EPSILONS = np.round(np.arange(0.01, 0.151, 0.01), 2)
PASSES = "large_passes"


def bild(
    record: ThresholdRecord,
    *,
    risk: str = "gap",
    loss: str = "bleu",
    n_calibration: int = 500,
    splits: int = 100,
    delta: float = 0.1,
    epsilons: NDArray[np.float64] = EPSILONS,
    seed: int = 0,
    progress: bool | None = None,
) -> SweepResult:
    """Run the experiment on the sweep of a pair of models.

    Parameters
    ----------
    record : ThresholdRecord
        With the cost "large_passes".
    risk, loss
        As in `record.curve`.
    n_calibration : sentences to calibrate on
    splits : random splits into calibration and test sentences
    """
    if PASSES not in record.costs:
        raise ValueError(
            f"`record` must hold the cost {PASSES!r}, as records of sweep_pair do, but holds"
            f" {', '.join(record.costs) or 'none'}."
        )
    study = evaluate(
        record,
        risk,
        loss,
        controls=CONTROLS | LTT,
        epsilons=epsilons,
        delta=delta,
        n_calibration=n_calibration,
        splits=splits,
        seed=seed,
        progress=progress,
    )
    title = f"{record.n:,} sentences, n = {n_calibration:,}"
    return SweepResult(study, title, "bild", "passes of the large model")
