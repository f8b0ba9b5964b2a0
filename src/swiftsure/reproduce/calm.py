"""Text generation with CALM (section 5.3 of the paper), from threshold records of our own models.

One record a confidence measure, as `experiments/calm` makes them: losses and decoder layers of
every text at every threshold. Those of a T5 on Multi30k come with the library.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.evaluation import Study, evaluate
from swiftsure.files import write_text
from swiftsure.progress import steps
from swiftsure.records import ThresholdRecord
from swiftsure.reproduce.calm_cnndm import CONTROLS, EPSILONS, SHOWN, only
from swiftsure.reproduce.tables import csv_text

__all__ = ["CalmStudies", "calm", "load_sweeps"]

SCORES = ("softmax", "shortlist", "saturation", "meta")
"""Confidence measures, in the paper's order; the second is the softmax over fewer words."""


@dataclass(frozen=True)
class CalmStudies:
    """A study for each confidence measure and calibration size."""

    studies: Mapping[str, Mapping[int, Study]]

    def table(self, epsilons: Sequence[float] = (0.02, 0.05, 0.10)) -> list[dict[str, Any]]:
        """Return mean decoder layers a token: a row for each measure, size and control.

        "saved, ε=…" are the FLOPs of generation that are saved, in %, looks included.
        """
        rows = []
        for score, by_size in self.studies.items():
            for n, study in by_size.items():
                columns = [int(np.argmin(np.abs(study.epsilons - e))) for e in epsilons]
                for label in study.labels:
                    layers = study.mean_cost[label].mean(axis=0)
                    row: dict[str, Any] = {"score": score, "n": n, "control": label}
                    row |= {f"ε={study.epsilons[j]:g}": float(layers[j]) for j in columns}
                    saved = study.flops_gain[label].mean(axis=0)
                    if np.isfinite(saved).all():  # the record counts FLOPs
                        row |= {f"saved, ε={study.epsilons[j]:g}": float(saved[j]) for j in columns}
                    rows.append(row)
        return rows

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the paper's two figures, a table, and every number behind them."""
        from swiftsure.report import study_figure

        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        first, last = next(iter(self.studies.items())), max(next(iter(self.studies.values())))
        by_size = {f"{first[0]}, n = {n:,}": only(study, SHOWN) for n, study in first[1].items()}
        by_score = {
            f"{score}, n = {last:,}": only(sizes[last], SHOWN)
            for score, sizes in self.studies.items()
        }
        files = [target / "calm.png", target / "calm_scores.png"]
        study_figure(by_size, files[0])
        study_figure(by_score, files[1])
        summary = [
            {"score": score, "n": n} | row
            for score, sizes in self.studies.items()
            for n, study in sizes.items()
            for row in study.summary()
        ]
        every = list(first[1][last].epsilons)
        for name, text in (
            ("calm_layers.csv", csv_text(self.table(every))),
            ("calm_summary.csv", csv_text(summary)),
        ):
            files.append(target / name)
            write_text(files[-1], text)
        return files


def calm(
    records: Mapping[str, ThresholdRecord],
    *,
    risk: str = "gap",
    loss: str = "bleu",
    sizes: Sequence[int] = (100, 1000),
    splits: int = 100,
    delta: float = 0.1,
    epsilons: Sequence[float] | NDArray[np.float64] = EPSILONS,
    seed: int = 0,
    progress: bool | None = None,
) -> CalmStudies:
    """Run the experiment on the sweeps of one model.

    Parameters
    ----------
    records : mapping of confidence measures to records
    risk, loss
        As in `record.curve`.
    sizes : calibration sizes
    splits : random splits into calibration and test texts
    """
    if not records:
        raise ValueError("`records` must hold a record for at least one confidence measure.")
    studies: dict[str, dict[int, Study]] = {}
    with steps("evaluating", len(records) * len(sizes), progress) as advance:
        for score, record in records.items():
            for n in sizes:
                studies.setdefault(score, {})[n] = evaluate(
                    record,
                    risk=risk,
                    loss=loss,
                    controls=CONTROLS,
                    epsilons=epsilons,
                    delta=delta,
                    n_calibration=n,
                    splits=splits,
                    seed=seed,
                    progress=False,
                )
                advance()
    return CalmStudies(studies)


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
