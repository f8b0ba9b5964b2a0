"""Text generation with CALM (section 5.3 of the paper), from threshold records of our own models.

There is one record per confidence measure, made by `experiments.calm.records`: losses and decoder
layers of every text at every threshold.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from experiments.studies import StudyOptions, evaluate_all, layers_table, summary
from experiments.sweeps import CONTROLS, DRAWN, EPSILONS, only
from experiments.tables import write_all
from swiftsure.records import ThresholdRecord
from swiftsure.report import study_figure
from swiftsure.study.results import Study
from swiftsure_zoo.records import CALM

__all__ = ["CalmStudies", "calm", "load_sweeps"]

SCORES = ("softmax", "shortlist", "saturation", "meta")
"""Confidence measures, in the paper's order; the second is the softmax over fewer words."""


@dataclass(frozen=True)
class CalmStudies:
    """A study for each confidence measure and calibration size."""

    studies: Mapping[str, Mapping[int, Study]]
    risk: str
    loss: str

    def table(self, epsilons: Sequence[float] = (0.02, 0.05, 0.10)) -> list[dict[str, Any]]:
        """Return mean decoder layers per token: one row per measure, size and control."""
        return layers_table(self.studies, "score", "n", epsilons=epsilons)

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tables to print, by title."""
        title = f"Mean decoder layers per token, and FLOPs saved in %: {self.risk} of {self.loss}"
        return {title: self.table()}

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the paper's two figures, a table, and every number behind them."""
        first, last = next(iter(self.studies.items())), max(next(iter(self.studies.values())))
        by_size = {f"{first[0]}, n = {n:,}": only(study, DRAWN) for n, study in first[1].items()}
        by_score = {
            f"{score}, n = {last:,}": only(sizes[last], DRAWN)
            for score, sizes in self.studies.items()
        }
        every = list(first[1][last].epsilons)
        suffix = "" if self.loss == "bleu" else f"_{self.loss}"
        tables = {
            f"calm_layers{suffix}.csv": self.table(every),
            f"calm_summary{suffix}.csv": summary(self.studies, "score", "n"),
        }
        files = write_all(folder, tables)
        figures = [Path(folder) / f"{name}{suffix}.png" for name in ("calm", "calm_scores")]
        study_figure(by_size, figures[0])
        study_figure(by_score, figures[1])
        return [*figures, *files]


def calm(
    data: Mapping[str, ThresholdRecord] | str | os.PathLike[str] | None = None,
    *,
    risk: str = "gap",
    loss: str = "bleu",
    sizes: Sequence[int] = (100, 1000),
    **options: Unpack[StudyOptions],
) -> CalmStudies:
    """Run the experiment on the sweeps of one model.

    Parameters
    ----------
    data : mapping of confidence measures to records, or folder of NAME_SCORE.parquet, optional
        Our own translator's by default.
    risk, loss
        As in `record.curve`.
    sizes : calibration sizes
    options : see `StudyOptions`
    """
    records = data if isinstance(data, Mapping) else load_sweeps(data or CALM)
    if not records:
        raise ValueError("`data` must hold a record for at least one confidence measure.")
    cases = {
        (score, n): {"record": record, "n_calibration": n}
        for score, record in records.items()
        for n in sizes
    }
    given = {"epsilons": EPSILONS, "risk": risk, "loss": loss, "cost": "layers", **options}
    return CalmStudies(evaluate_all(cases, controls=CONTROLS, **given), risk, loss)


def load_sweeps(folder: str | os.PathLike[str]) -> dict[str, ThresholdRecord]:
    """Return the records NAME_SCORE.parquet of a folder, by score."""
    found = {}
    for score in SCORES:
        files = sorted(Path(folder).glob(f"*_{score}.parquet"))
        if len(files) > 1:
            raise ValueError(f"`folder` must hold one record of {score}, but has {len(files)}.")
        if files:
            found[score] = ThresholdRecord.load(files[0])
    if not found:
        raise ValueError(
            f"`folder` must hold records NAME_SCORE.parquet ({', '.join(SCORES)}), but {folder} has"
            " none; experiments/calm makes them."
        )
    return found
