"""Image generation with DeeDiff (section 5.4 of the paper, and its appendix on CIFAR-10).

From a threshold record of `swiftsure.diffusion.sweep`: the perceptual difference (LPIPS) between
images of the early-exit model and of the full one, from the same noise, and how many layers a step
took. The paper's networks and their images are not public; ours take their place.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure import assets
from swiftsure.control import Control
from swiftsure.evaluation import Study, evaluate
from swiftsure.files import write_text
from swiftsure.records import ThresholdRecord
from swiftsure.reproduce.tables import csv_text

__all__ = ["CONTROLS", "RECORD", "DiffusionResult", "diffusion", "load_pairs"]

RECORD = assets.FOLDER / "diffusion" / "uvit_cifar10.parquet"
"""The library's own record."""

CONTROLS = {
    "CRC (paper's rule)": Control("crc", selection="paper"),
    "CRC (monotone)": Control("crc"),
    "UCB (WSR)": Control("ucb", bound="wsr"),
    "UCB (STaR)": Control("ucb", bound="star"),
}
"""The paper's two controls, the valid form of CRC, and STaR."""

EPSILONS = np.round(np.arange(0.01, 0.201, 0.01), 2)


@dataclass(frozen=True)
class DiffusionResult:
    """A study of one record."""

    study: Study
    title: str

    def table(self, epsilons: Sequence[float] = (0.05, 0.10, 0.15)) -> list[dict[str, Any]]:
        """Return test risk, layers a step and the saving of both costs: a row a control and ε."""
        study = self.study
        columns = [int(np.argmin(np.abs(study.epsilons - e))) for e in epsilons]
        found = {
            "test risk": study.test_risk,
            "layers": study.exit_layer,
            "layers saved, %": study.gain,
            "FLOPs saved, %": study.flops_gain,
        }
        return [
            {"control": label, "ε": float(study.epsilons[j])}
            | {name: float(values[label][:, j].mean()) for name, values in found.items()}
            for label in study.labels
            for j in columns
        ]

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write figure, table of means and every number behind them; return the files."""
        from swiftsure.report import study_figure

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        figure, table, summary = (
            target / f"diffusion{suffix}" for suffix in (".png", "_layers.csv", "_summary.csv")
        )
        study_figure({self.title: self.study}, figure)
        write_text(table, csv_text(self.table(self.study.epsilons.tolist())))
        write_text(summary, csv_text(self.study.summary()))
        return [figure, table, summary]


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
) -> DiffusionResult:
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
    return DiffusionResult(study, f"{name}, {pairs.n:,} pairs, n = {n_calibration:,}")


def load_pairs(record: str | os.PathLike[str] | None = None) -> ThresholdRecord:
    """Read a record of pairs; say how to make one where there is none."""
    if record is None and not RECORD.is_file():
        raise ValueError(
            "The library has no record of diffusion of its own: make one with train.py and then"
            " records.py of experiments/diffusion, and name it with --record FILE.parquet."
        )
    return ThresholdRecord.load(RECORD if record is None else record)
