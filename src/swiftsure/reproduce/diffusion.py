"""Image generation with DeeDiff (section 5.4 of the paper, and its appendix on CIFAR-10).

From a threshold record of `swiftsure.diffusion.sweep`: the perceptual difference (LPIPS) between
images of the early-exit model and of the full one, from the same noise, and how many layers a step
took. The paper's networks and their images are not public; ours take their place.
"""

import numpy as np
from numpy.typing import NDArray

from swiftsure import assets
from swiftsure.evaluation import evaluate
from swiftsure.reproduce.sweeps import CONTROLS, Source, SweepResult, loaded

__all__ = ["diffusion"]

EPSILONS = np.round(np.arange(0.01, 0.301, 0.01), 2)

LOSSES = ("lpips_64", "lpips")
"""What is controlled unless another loss is asked for, the first that a record has.

LPIPS sees little in images of fewer than 64 pixels, whose records also have it of enlarged ones.
"""


def diffusion(
    record: Source = None,
    *,
    loss: str | None = None,
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
    record : ThresholdRecord, or file
        Of pairs. Default: of the network that was trained for the library.
    loss : str, optional
        Which of the record's inconsistencies is controlled; LPIPS by default, of images enlarged to
        64 pixels where the record has that.
    n_calibration : pairs to calibrate on
    splits : random splits into calibration and test pairs
    """
    pairs = loaded(record, assets.DIFFUSION)
    if loss is None:
        loss = next((each for each in LOSSES if each in pairs.inconsistencies), LOSSES[-1])
    study = evaluate(
        pairs,
        risk="consistency",
        loss=loss,
        controls=CONTROLS,
        epsilons=epsilons,
        delta=delta,
        n_calibration=n_calibration,
        splits=splits,
        seed=seed,
        progress=progress,
    )
    title = f"{loss}, {pairs.n:,} pairs, n = {n_calibration:,}"
    return SweepResult(study, title, "diffusion", shown=(0.05, 0.1, 0.2, 0.3))
