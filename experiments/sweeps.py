"""Experiments on generated answers: their controls, and the study of one threshold record."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies import column
from experiments.tables import write_all
from swiftsure.certify.control import Control
from swiftsure.records import ThresholdRecord
from swiftsure.report import study_figure
from swiftsure.study.results import Study

__all__ = ["CONTROLS", "DRAWN", "EPSILONS", "SweepResult", "load_sweep", "only"]

CONTROLS = {
    "CRC (paper's rule)": Control("crc", selection="paper"),
    "CRC (contiguous)": Control("crc", selection="contiguous"),
    "CRC (monotone)": Control("crc"),
    "UCB (WSR)": Control("ucb", bound="wsr"),
    "UCB (STaR)": Control("ucb", bound="star"),
    "LTT (HB, zero-bounded)": Control("ltt", bound="hoeffding_bentkus", zero_bounded=True),
}
"""The paper's controls, the valid form of CRC, and STaR."""

DRAWN = tuple(label for label in CONTROLS if label != "CRC (contiguous)")
"""Controls of the figures: the contiguous form lies between its neighbours."""

EPSILONS = np.round(np.arange(0.01, 0.151, 0.01), 2)
"""Values of ε in the experiments with CALM."""


def load_sweep(data: ThresholdRecord | str | os.PathLike[str]) -> ThresholdRecord:
    """Return a threshold record as it is, or read its file."""
    return data if isinstance(data, ThresholdRecord) else ThresholdRecord.load(data)


def only(study: Study, labels: Sequence[str]) -> Study:
    """Return a study with some of its controls."""
    kept = {label: study.controls[label] for label in labels if label in study.controls}
    return replace(study, controls=kept)


@dataclass(frozen=True)
class SweepResult:
    """A study of one record.

    Parameters
    ----------
    study : Study
    title : str
        Title of the figure.
    name : str
        Prefix of the file names.
    unit : str
        Unit of the cost, in words.
    shown : tuple of float
        Levels of the printed table.
    speed : str, optional
        Plural noun for what is generated, if the record has seconds: "sentences".
    """

    study: Study
    title: str
    name: str
    unit: str = "layers"
    shown: tuple[float, ...] = (0.05, 0.10, 0.15)
    speed: str | None = None

    def table(self, epsilons: Sequence[float] | None = None) -> list[dict[str, Any]]:
        """Return test risk, mean cost and savings, one row per control and ε."""
        study, levels = self.study, self.shown if epsilons is None else epsilons
        columns = [column(study, e) for e in levels]
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

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tables to print, by title."""
        loss, splits = self.study.about.statistic.loss, self.study.splits
        return {f"Means over {splits} splits: {loss}, {self.title}": self.table()}

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write figure, table of means and every number behind them; return the files."""
        tables = {
            f"{self.name}_costs.csv": self.table(self.study.epsilons.tolist()),
            f"{self.name}_summary.csv": self.study.summary(),
        }
        files = write_all(folder, tables)
        figure = Path(folder) / f"{self.name}.png"
        study_figure({self.title: self.study}, figure, speed=self.speed)
        return [figure, *files]
