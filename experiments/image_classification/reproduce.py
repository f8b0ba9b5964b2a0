"""Image classification (section 5.1 of the paper: Figs. 1, 3 and 8, Table 2).

From exit records of our own networks; records of any other classifiers can take their place.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from experiments.figures import exits_figure, models_figure
from experiments.studies import StudyOptions, column, evaluate_all, labelled, summary
from experiments.tables import join_levels, markdown_table, write_all
from swiftsure import assets
from swiftsure.control import Control
from swiftsure.evaluation import Study
from swiftsure.records import ExitRecord

__all__ = [
    "CONTROLS",
    "PUBLISHED",
    "RISKS",
    "ImageClassificationResult",
    "image_classification",
    "load_records",
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

PUBLISHED: dict[tuple[str, int], dict[str, tuple[float, ...]]] = {
    ("UCB (WSR)", 100): {
        "MSDNet": (0.0, 42.51, 0.0, 30.62, 0.0, 34.21, 0.0, 30.47),
        "DViT": (0.0, 46.5, 0.0, 35.4, 0.0, 45.14, 0.0, 39.74),
        "L2W-DEN": (0.0, 49.47, 0.0, 33.09, 0.0, 41.77, 0.0, 35.77),
        "Dyn-Perc": (0.0, 45.42, 0.0, 35.67, 0.0, 31.71, 0.0, 34.85),
    },
    ("CRC (paper's rule)", 100): {
        "MSDNet": (41.64, 58.6, 10.99, 43.58, 30.71, 43.68, 4.46, 40.54),
        "DViT": (49.32, 58.6, 5.02, 51.09, 40.36, 51.83, 4.58, 46.89),
        "L2W-DEN": (50.82, 64.38, 8.09, 50.4, 35.09, 50.57, 0.0, 44.66),
        "Dyn-Perc": (44.39, 63.9, 36.86, 59.42, 30.09, 57.99, 31.19, 58.05),
    },
    ("UCB (WSR)", 1000): {
        "MSDNet": (33.23, 56.0, 27.94, 46.11, 27.05, 44.0, 28.05, 43.65),
        "DViT": (38.24, 58.12, 34.93, 52.31, 34.61, 50.02, 34.5, 48.31),
        "L2W-DEN": (38.11, 60.87, 28.96, 47.97, 32.04, 49.71, 26.46, 43.6),
        "Dyn-Perc": (42.24, 63.77, 49.9, 62.51, 30.48, 56.01, 50.34, 60.28),
    },
    ("CRC (paper's rule)", 1000): {
        "MSDNet": (46.56, 62.55, 33.11, 50.56, 33.01, 46.12, 34.09, 46.26),
        "DViT": (48.68, 61.6, 39.05, 54.89, 40.75, 52.21, 38.48, 49.86),
        "L2W-DEN": (47.73, 65.04, 35.09, 53.81, 37.08, 51.7, 33.76, 48.48),
        "Dyn-Perc": (55.16, 66.73, 54.28, 65.25, 43.35, 58.62, 53.67, 62.04),
    },
}
"""Table 2 of the paper, on ImageNet: gain in mean exit (%), for each risk at ε = .01 and .05."""

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
                for model, gains in PUBLISHED.get((control, n), {}).items():
                    row = {"control": control, "n": n, "model": f"{model}, ImageNet (paper)"}
                    names = [f"{risk}, ε={level:g}" for risk in RISKS for level in TABLE_LEVELS]
                    rows.append(row | dict(zip(names, gains, strict=True)))
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
    given = {"epsilons": EPSILONS, "draws": 1000, **options}
    return ImageClassificationResult(records, evaluate_all(cases, controls=CONTROLS, **given))


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
    """Return the records of a folder, by name; "msdnet_cifar10" is "MSDNet, CIFAR-10"."""
    folder = assets.IMAGE_CLASSIFICATION if data is None else Path(data)
    if not folder.is_dir():
        raise ValueError(f"`data` must be a folder of exit records, but {folder} is not a folder.")
    files = sorted(folder.glob("*.parquet"), key=_order)
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
