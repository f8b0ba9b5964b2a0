"""Text summarisation with CALM on CNN/DM (section 5.3 and Fig. 2 of the paper).

From the authors' own measurements: ROUGE-L of 2000 articles at 100 thresholds of an early-exit
T5-large, and its mean number of decoder layers per token.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from experiments.studies import DATA_FOLDER, StudyOptions, evaluate_all, layers_table, summary
from experiments.sweeps import CONTROLS, DRAWN, EPSILONS, only
from experiments.tables import write_all
from swiftsure._lib.files import npz
from swiftsure.records import ThresholdRecord
from swiftsure.report import study_figure
from swiftsure.study.results import Study

__all__ = ["CalmCnndmResult", "calm_cnndm", "load_measurements"]

FILE = "calm_cnndm.npz"


@dataclass(frozen=True)
class CalmCnndmResult:
    """A study for each calibration size."""

    studies: dict[int, Study]

    def table(self, epsilons: Sequence[float] = (0.03, 0.05, 0.10)) -> list[dict[str, Any]]:
        """Return mean decoder layers per token: one row per size and control."""
        return layers_table(self.studies, "n", epsilons=epsilons)

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tables to print, by title."""
        return {"Mean decoder layers per token": self.table()}

    def shown(self) -> dict[str, Study]:
        """Return the studies as the figure shows them, by title."""
        return {f"CNN/DM, n = {n:,}": only(study, DRAWN) for n, study in self.studies.items()}

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write figure, table of means and every number behind them; return the files."""
        every = list(next(iter(self.studies.values())).epsilons)
        tables = {
            "calm_cnndm_layers.csv": self.table(every),
            "calm_cnndm_summary.csv": summary(self.studies, "n"),
        }
        files = write_all(folder, tables)
        figure = Path(folder) / "calm_cnndm.png"
        study_figure(self.shown(), figure)
        return [figure, *files]


def calm_cnndm(
    data: str | os.PathLike[str] | None = None,
    *,
    sizes: Sequence[int] = (100, 1000),
    **options: Unpack[StudyOptions],
) -> CalmCnndmResult:
    """Run the experiment on the authors' measurements.

    Parameters
    ----------
    data : path, optional
        npz with `thresholds` (100,), `mean_layers` (100,) and `rouge_l` (articles, 100). By default
        calm_cnndm.npz in the folder that the environment variable SWIFTSURE_DATA names.
    sizes : calibration sizes
    options : see `StudyOptions`; 400 splits by default
    """
    if data is None and not (DATA_FOLDER / FILE).is_file():
        raise FileNotFoundError(
            f"{DATA_FOLDER} has no {FILE}, the paper's own measurements; set SWIFTSURE_DATA to its"
            " folder (experiments/calm_cnndm/README.md says where it comes from)."
        )
    record = load_measurements(data or DATA_FOLDER / FILE)
    cases = {(n,): {"record": record, "n_calibration": n} for n in sizes}
    given = {"epsilons": EPSILONS, "splits": 400, **options}
    return CalmCnndmResult(evaluate_all(cases, controls=CONTROLS, **given))


def load_measurements(data: str | os.PathLike[str]) -> ThresholdRecord:
    """Read the measurements; the loss is 1 − ROUGE-L."""
    with npz(data) as arrays:
        needed = ("thresholds", "mean_layers", "rouge_l")
        missing = [name for name in needed if name not in arrays]
        if missing:
            raise ValueError(f"{data} lacks {', '.join(missing)}.")
        thresholds, layers, rouge = (arrays[name] for name in needed)
    return ThresholdRecord(thresholds, losses={"rouge_l": 1.0 - rouge}, costs={"layers": layers})
