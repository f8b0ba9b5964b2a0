"""Text summarisation with CALM on CNN/DM (section 5.3 and Fig. 2 of the paper).

From the authors' own measurements: ROUGE-L of 2000 articles at 100 thresholds of an early-exit
T5-large, and its mean number of decoder layers per token.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.control import Control
from swiftsure.evaluation import Study, evaluate
from swiftsure.files import npz, write_text
from swiftsure.records import ThresholdRecord
from swiftsure.reproduce.tables import csv_text

__all__ = ["CONTROLS", "CalmResult", "calm_cnndm", "load_measurements"]

CONTROLS = {
    "CRC (paper's rule)": Control("crc", selection="paper"),
    "CRC (contiguous)": Control("crc", selection="contiguous"),
    "CRC (monotone)": Control("crc"),
    "UCB (WSR)": Control("ucb", bound="wsr"),
    "UCB (STaR)": Control("ucb", bound="star"),
    "LTT (HB, zero-bounded)": Control("ltt", bound="hoeffding_bentkus", zero_bounded=True),
}
"""The paper's controls, the valid form of CRC, and STaR."""

SHOWN = (
    "CRC (paper's rule)",
    "CRC (monotone)",
    "UCB (WSR)",
    "UCB (STaR)",
    "LTT (HB, zero-bounded)",
)
EPSILONS = np.round(np.arange(0.01, 0.151, 0.01), 2)


@dataclass(frozen=True)
class CalmResult:
    """A study for each calibration size."""

    studies: dict[int, Study]

    def table(self, epsilons: Sequence[float] = (0.03, 0.05, 0.10)) -> list[dict[str, Any]]:
        """Return mean decoder layers per token: a row for each size and control."""
        rows = []
        for n, study in self.studies.items():
            columns = [int(np.argmin(np.abs(study.epsilons - e))) for e in epsilons]
            for label in study.labels:
                layers = study.mean_cost[label].mean(axis=0)
                row: dict[str, Any] = {"n": n, "control": label}
                row |= {f"ε={study.epsilons[j]:g}": float(layers[j]) for j in columns}
                rows.append(row)
        return rows

    def shown(self) -> dict[str, Study]:
        """Return the studies as the figure shows them, by title."""
        return {f"CNN/DM, n = {n:,}": only(study, SHOWN) for n, study in self.studies.items()}

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write figure, table of means and every number behind them; return the files."""
        from swiftsure.report import study_figure

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        study_figure(self.shown(), target / "calm_cnndm.png")
        every = list(next(iter(self.studies.values())).epsilons)
        write_text(target / "calm_cnndm_layers.csv", csv_text(self.table(every)))
        summary = [{"n": n, **row} for n, study in self.studies.items() for row in study.summary()]
        write_text(target / "calm_cnndm_summary.csv", csv_text(summary))
        names = ("calm_cnndm.png", "calm_cnndm_layers.csv", "calm_cnndm_summary.csv")
        return [target / name for name in names]


def calm_cnndm(
    data: str | os.PathLike[str],
    *,
    sizes: Sequence[int] = (100, 1000),
    splits: int = 400,
    delta: float = 0.1,
    epsilons: NDArray[np.float64] = EPSILONS,
    seed: int = 0,
    progress: bool | None = None,
) -> CalmResult:
    """Run the experiment on the authors' measurements.

    Parameters
    ----------
    data : path
        npz with `thresholds` (100,), `mean_layers` (100,) and `rouge_l` (articles, 100).
    sizes : calibration sizes
    splits : random splits into calibration and test articles
    """
    record = load_measurements(data)
    return CalmResult(
        {
            n: evaluate(
                record,
                controls=CONTROLS,
                epsilons=epsilons,
                delta=delta,
                n_calibration=n,
                splits=splits,
                seed=seed,
                progress=progress,
            )
            for n in sizes
        }
    )


def load_measurements(data: str | os.PathLike[str]) -> ThresholdRecord:
    """Read the measurements; the loss is 1 less ROUGE-L."""
    with npz(data) as arrays:
        needed = ("thresholds", "mean_layers", "rouge_l")
        missing = [name for name in needed if name not in arrays]
        if missing:
            raise ValueError(f"{data} lacks {', '.join(missing)}.")
        thresholds, layers, rouge = (arrays[name] for name in needed)
    return ThresholdRecord(thresholds, losses={"rouge_l": 1.0 - rouge}, costs={"layers": layers})


def only(study: Study, labels: Sequence[str]) -> Study:
    """Return a study of some of its controls."""
    return replace(study, labels=tuple(label for label in labels if label in study.labels))
