"""Image classification (section 5.1 of the paper: Figs. 1, 3 and 8, Table 2).

From exit records of our own networks; records of any other classifiers can take their place.
"""

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from experiments.figures import exits_figure, models_figure
from experiments.studies import StudyOptions, column, evaluate_all, labelled, summary
from experiments.tables import join_levels, markdown_table, write_all
from swiftsure.certify.control import Control
from swiftsure.records import ExitRecord
from swiftsure.study.results import Study
from swiftsure_zoo.records import IMAGE_CLASSIFICATION

__all__ = [
    "CONTROLS",
    "RISKS",
    "ImageClassificationResult",
    "image_classification",
    "load_records",
    "published",
]


RISKS = {
    "gap, 0-1": ("gap", "zero_one"),
    "gap, Brier": ("gap", "brier"),
    "consistency, 0-1": ("consistency", "zero_one"),
    "consistency, Brier": ("consistency", "brier"),
}

CONTROLS = {
    "UCB (WSR)": Control("ucb", bound="wsr"),
    "UCB (auto)": Control("ucb"),
    "CRC (monotone)": Control("crc"),
    "CRC (paper's rule)": Control("crc", selection="paper"),
}
"""The paper's UCB (WSR), ours (binomial or STaR), CRC in its valid form, and the paper's CRC."""

DRAWN = ("UCB (WSR)", "CRC (monotone)", "CRC (paper's rule)")
EPSILONS = np.concatenate([np.arange(0.01, 0.1, 0.01), np.arange(0.1, 0.401, 0.02)]).round(2)

TABLE_LEVELS = (0.01, 0.05)


@dataclass(frozen=True)
class ImageClassificationResult:
    """A study for each calibration size, risk and model."""

    records: Mapping[str, ExitRecord]
    studies: Mapping[int, Mapping[str, Mapping[str, Study]]]

    def table(self) -> list[dict[str, Any]]:
        """Return Table 2: the gain in mean exit (%), ours beside the paper's."""
        rows = []
        for n, by_risk in self.studies.items():
            for control in CONTROLS:
                for model in self.records:
                    row: dict[str, Any] = {"control": control, "n": n, "model": model}
                    for risk, models in by_risk.items():
                        study = models[model]
                        gain = study.gain[control].mean(axis=0)
                        for level in TABLE_LEVELS:
                            at = column(study, level)
                            row[f"{risk}, ε={level:g}"] = round(float(gain[at]), 2)
                    rows.append(row)
                rows += [
                    row | {"model": f"{row['model']}, ImageNet (paper)"}
                    for row in published()
                    if (row["control"], row["n"]) == (control, n)
                ]
        return rows

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return the tables to print, by title."""
        gains = {
            f"Gain in mean exit, %: n = {n:,}, ε = 0.01 / 0.05": join_levels(
                [row for row in self.table() if row["n"] == n], list(RISKS)
            )
            for n in self.studies
        }
        title = "Where each promise came closest to being broken, over all models, risks and levels"
        return gains | {title: self.promises()}

    def promises(self) -> list[dict[str, Any]]:
        """Return, for each size and control, where its promise came closest to being broken.

        `ucb` promises that at most a share δ of calibration sets ends above ε; `crc` that the mean
        risk is at most ε. Calibration sets are drawn with replacement, so that the true risk is
        known: it is the record's. Intervals are 95 % each. The worst of hundreds of cells is
        expected to lie above its true value.
        """
        rows = []
        for n, by_risk in self.studies.items():
            for label, control in CONTROLS.items():
                worst: dict[str, Any] = {}
                for at, study in labelled(by_risk, "risk", "model"):
                    for j, epsilon in enumerate(study.epsilons):
                        found = _kept(study, label, control, j)
                        if found["margin"] < worst.get("margin", np.inf):
                            where = f"{at['model']}, {at['risk']}, ε={epsilon:g}"
                            worst = found | {"at": where}
                rows.append({"control": label, "n": n} | worst)
        return rows

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write figures, table and every number behind them; return the files."""
        table = self.table()
        contents = {
            "table2.md": markdown_table(table),
            "table2.csv": table,
            "promises.csv": self.promises(),
            "summary.csv": summary(self.studies, "n", "risk", "model"),
        }
        files = write_all(folder, contents)
        exits_figure(self.records, Path(folder) / "exits.png")
        figures = [Path(folder) / "exits.png"]
        for n, studies in self.studies.items():
            figures.append(Path(folder) / f"curves_n{n}.png")
            models_figure(studies, DRAWN, figures[-1])
        return [*figures, *files]


def image_classification(
    data: str | os.PathLike[str] | None = None,
    *,
    sizes: Sequence[int] = (100, 1000),
    **options: Unpack[StudyOptions],
) -> ImageClassificationResult:
    """Run the experiment on records of classifiers.

    Parameters
    ----------
    data : path, optional
        Folder of exit records (`*.parquet`); our own by default.
    sizes : calibration sizes
    options : see `StudyOptions`; 1,000 draws by default
    """
    records = load_records(data)
    cases = {
        (n, title, model): {"record": record, "risk": risk, "loss": loss, "n_calibration": n}
        for n in sizes
        for title, (risk, loss) in RISKS.items()
        for model, record in records.items()
    }
    given = {"epsilons": EPSILONS, "draws": 1000, "cost": "exit", **options}
    return ImageClassificationResult(records, evaluate_all(cases, controls=CONTROLS, **given))


def published() -> list[dict[str, Any]]:
    """Return Table 2 of the paper, on ImageNet: gain in mean exit (%) for each risk and ε."""
    text = (Path(__file__).parent / "published.csv").read_text(encoding="utf-8")
    return [
        {
            name: cell
            if name in ("control", "model")
            else int(cell)
            if name == "n"
            else float(cell)
            for name, cell in row.items()
        }
        for row in csv.DictReader(text.splitlines())
    ]


def _kept(study: Study, label: str, control: Control, j: int) -> dict[str, Any]:
    """Return how far a control is from breaking its promise at one ε."""
    epsilon = float(study.epsilons[j])
    if control.name == "ucb":
        rate = study.violations[label][j]
        return {
            "promise": f"risk > ε in at most {100 * study.delta:g} % of sets",
            "worst": f"{100 * float(rate):.1f} %",
            "interval": f"{100 * float(rate.low):.1f} to {100 * float(rate.high):.1f} %",
            "margin": round(study.delta - float(rate), 6),
        }
    risks = study.pool_risk[label][:, j]
    mean = float(risks.mean()) / epsilon
    error = float(risks.std() / np.sqrt(len(risks))) / epsilon
    return {
        "promise": "none" if control.selection == "paper" else "mean risk at most ε",
        "worst": f"{mean:.3f} ε",
        "interval": f"{mean - 1.96 * error:.3f} to {mean + 1.96 * error:.3f} ε",
        "margin": round(1 - mean, 6),
    }


def load_records(data: str | os.PathLike[str] | None = None) -> dict[str, ExitRecord]:
    """Return the records of a folder, by name; "msdnet_cifar10" is "MSDNet, CIFAR-10".

    By default our own, without that of the demonstration's network on Fashion-MNIST.
    """
    folder = IMAGE_CLASSIFICATION if data is None else Path(data)
    if not folder.is_dir():
        raise ValueError(f"`data` must be a folder of exit records, but {folder} is not a folder.")
    files = sorted(folder.glob("*.parquet"), key=_order)
    if data is None:
        files = [file for file in files if not file.stem.endswith("_fashion_mnist")]
    if not files:
        raise ValueError(f"`data` must hold exit records (*.parquet), but {folder} has none.")
    return {_title(file.stem): ExitRecord.load(file) for file in files}


MODELS = {"msdnet": "MSDNet", "l2w_den": "L2W-DEN", "dvit": "DViT", "dyn_perceiver": "Dyn-Perc"}
DATA_SETS = {
    "cifar10": "CIFAR-10",
    "tiny_imagenet_100": "Tiny-ImageNet-100",
    "imagenet": "ImageNet",
}


def _title(stem: str) -> str:
    for model, model_title in MODELS.items():
        for data, data_title in DATA_SETS.items():
            if stem == f"{model}_{data}":
                return f"{model_title}, {data_title}"
    return stem


def _order(file: Path) -> tuple[int, str]:
    """Sort models and data sets as the paper's tables do; others come last."""
    names = [f"{model}_{data}" for data in DATA_SETS for model in MODELS]
    return (names.index(file.stem) if file.stem in names else len(names), file.stem)
