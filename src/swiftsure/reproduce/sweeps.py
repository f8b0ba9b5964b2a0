"""One threshold record, studied: what the experiments with generated answers have in common."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swiftsure.control import Control
from swiftsure.evaluation import Study
from swiftsure.files import write_text
from swiftsure.records import ThresholdRecord
from swiftsure.reproduce.tables import csv_text

__all__ = ["CONTROLS", "Source", "SweepResult", "loaded"]

Source = ThresholdRecord | str | os.PathLike[str] | None
"""A record, its file, or None for the library's own."""

CONTROLS = {
    "CRC (paper's rule)": Control("crc", selection="paper"),
    "CRC (monotone)": Control("crc"),
    "UCB (WSR)": Control("ucb", bound="wsr"),
    "UCB (STaR)": Control("ucb", bound="star"),
}
"""The paper's two controls, the valid form of CRC, and STaR."""


def loaded(record: Source, own: Path) -> ThresholdRecord:
    """Return a record; the library's own where none is named."""
    if isinstance(record, ThresholdRecord):
        return record
    return ThresholdRecord.load(own if record is None else record)


@dataclass(frozen=True)
class SweepResult:
    """A study of one record.

    Parameters
    ----------
    study : Study
    title : str
        Of the figure.
    name : str
        What the files' names begin with.
    unit : str
        What the study counts as cost, in words.
    shown : levels of the table, unless it is asked for others
    speed : str, optional
        What is answered, in the plural, where the record says in how many seconds.
    """

    study: Study
    title: str
    name: str
    unit: str = "layers"
    shown: tuple[float, ...] = (0.05, 0.10, 0.15)
    speed: str | None = None

    def table(self, epsilons: Sequence[float] | None = None) -> list[dict[str, Any]]:
        """Return test risk, mean cost and the saving of both costs: a row a control and ε."""
        study, levels = self.study, self.shown if epsilons is None else epsilons
        columns = [int(np.argmin(np.abs(study.epsilons - e))) for e in levels]
        found = {
            "test risk": study.test_risk,
            self.unit: study.mean_cost,
            f"{self.unit} saved, %": study.gain,
            "FLOPs saved, %": study.flops_gain,
        }
        if self.speed is not None:
            found[f"{self.speed} a second"] = {k: 1 / each for k, each in study.seconds.items()}
        return [
            {"control": study.legend(label), "ε": float(study.epsilons[j])}
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
            target / f"{self.name}{suffix}" for suffix in (".png", "_costs.csv", "_summary.csv")
        )
        study_figure({self.title: self.study}, figure, speed=self.speed)
        write_text(table, csv_text(self.table(self.study.epsilons.tolist())))
        write_text(summary, csv_text(self.study.summary()))
        return [figure, table, summary]
