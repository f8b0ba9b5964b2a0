"""Image generation with DeeDiff (section 5.4 of the paper, and its appendix on CIFAR-10).

From a threshold record of `swiftsure.diffusion.sweep`: the perceptual difference (LPIPS) between
images of the early-exit model and of the full one, from the same noise, and how many layers a step
took. The paper's networks and their images are not public; ours take their place.
"""

import os
from typing import Any, Unpack

import numpy as np

from experiments.studies import StudyOptions, studied
from experiments.sweeps import CONTROLS as ALL_CONTROLS
from experiments.sweeps import SweepResult, load_sweep
from swiftsure import assets
from swiftsure.records import ThresholdRecord

__all__ = ["diffusion"]

CONTROLS = {
    label: ALL_CONTROLS[label]
    for label in ("CRC (paper's rule)", "CRC (monotone)", "UCB (WSR)", "UCB (STaR)")
}
EPSILONS = np.round(np.arange(0.01, 0.301, 0.01), 2)

LOSSES = ("lpips_64", "lpips")
"""Default losses; the first that the record has is controlled.

LPIPS sees little in images smaller than 64 pixels, so their records also have it of enlarged ones.
"""


def diffusion(
    data: ThresholdRecord | str | os.PathLike[str] | None = None,
    *,
    loss: str | None = None,
    n_calibration: int = 500,
    **options: Unpack[StudyOptions],
) -> SweepResult:
    """Run the experiment on a record of generated pairs.

    Parameters
    ----------
    data : ThresholdRecord or file, optional
        A record of pairs of images; our own network's by default.
    loss : str, optional
        Which of the record's inconsistencies is controlled; LPIPS by default, of images enlarged to
        64 pixels where the record has that.
    n_calibration : pairs to calibrate on
    options : see `StudyOptions`
    """
    pairs = load_sweep(assets.DIFFUSION if data is None else data)
    if loss is None:
        loss = next((each for each in LOSSES if each in pairs.inconsistencies), LOSSES[-1])
    given: dict[str, Any] = {"risk": "consistency", "loss": loss, "n_calibration": n_calibration}
    given |= {"controls": CONTROLS, "epsilons": EPSILONS, "cost": "layers", **options}
    study = studied(pairs, **given)
    title = f"{loss}, {pairs.n:,} pairs, n = {n_calibration:,}"
    return SweepResult(study, title, "diffusion", shown=(0.05, 0.1, 0.2, 0.3))
