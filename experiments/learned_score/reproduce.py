"""Scores learned without labels, against the top probability, on every record of a classifier.

Each pilot is drawn from the record and the score learned on it; the other samples are the
population. Savings are those of calibration sets without repetitions, on the samples left over;
violations are counted for sets drawn with replacement, whose true risk is the population's.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import swiftsure as ss
from experiments.learned_score.attempts import ATTEMPTS
from experiments.tables import write_all
from swiftsure.study.evaluation import Study, evaluate
from swiftsure_zoo.records import IMAGE_CLASSIFICATION, SEGMENTATION

__all__ = ["LearnedScoreResult", "learned_score", "load_records"]

Rows = list[dict[str, Any]]

INTENTS = Path(__file__).parents[1] / "intents" / "results"
EPSILONS = (0.01, 0.05)
N_CALIBRATION, N_PILOT = 1000, 500
PILOTS = (100, 500)
"""Sizes of the pilots on which the attempts are compared."""

MAPS = {"miou": 0.05, "miscoverage": 0.05, "pixel_brier": 0.05}
"""Losses of images with a class at every pixel, and their levels."""

N_ATTEMPTS = 6
"""Pilots of each size for the attempts."""


@dataclass(frozen=True)
class LearnedScoreResult:
    """Rows for each record and level, for each way to learn a score, and for pixel maps."""

    savings: Rows
    attempts: Rows
    maps: Rows

    def tables(self) -> dict[str, Rows]:
        """Return the tables to print, by title."""
        return {
            "FLOPs saved, %, by the top probability and by a learned score": self.savings,
            "FLOPs saved, %, by other ways to learn a score, less the top probability's": (
                self.attempts
            ),
            "FLOPs saved, %, for images with a class at every pixel": self.maps,
        }

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the tables; return the files."""
        found = {"savings.csv": self.savings, "attempts.csv": self.attempts, "maps.csv": self.maps}
        return write_all(folder, {name: rows for name, rows in found.items() if rows})


def learned_score(
    data: str | os.PathLike[str] | None = None,
    *,
    n_calibration: int = N_CALIBRATION,
    pilots: int = 20,
    splits: int = 400,
    draws: int = 20_000,
    delta: float = 0.1,
    seed: int = 0,
) -> LearnedScoreResult:
    """Run the experiment.

    Parameters
    ----------
    data : path, optional
        A record, or a folder of records, in place of our own.
    n_calibration : int
        Labelled samples; less where a record has fewer than 2,000.
    pilots : int
        Pilots of each record, over which splits and draws are divided.
    splits, draws : int
        Splits, and calibration sets drawn with replacement, for each record, level and score.
    """
    savings: Rows = []
    attempts: Rows = []
    for name, record in load_records(data).items():
        sizes = _sizes(record.n, n_calibration)
        repeats = ss.Repeats(max(splits // pilots, 1), max(draws // pilots, 1), progress=False)
        savings += _compared(name, record, sizes, pilots, repeats, delta, seed)
        for size in (each for each in PILOTS if 4 * each <= record.n):
            attempts += _attempted(name, record, (size, sizes[1]), splits, delta, seed)
    maps = _maps(pilots, splits, draws, delta, seed) if data is None else []
    return LearnedScoreResult(savings, attempts, maps)


def load_records(data: str | os.PathLike[str] | None = None) -> dict[str, ss.ExitRecord]:
    """Return the records of classifiers by name."""
    if data is not None:
        path = Path(data)
        files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    else:
        files = [
            *sorted(IMAGE_CLASSIFICATION.glob("*.parquet")),
            *sorted(INTENTS.glob("*.parquet")),
        ]
    if not files:
        raise FileNotFoundError(f"{data} has no records (*.parquet).")
    return {file.stem: ss.ExitRecord.load(file) for file in files}


def _sizes(n: int, n_calibration: int) -> tuple[int, int]:
    """Return how many samples are the pilot, and how many calibrate."""
    small = n < N_CALIBRATION + 2 * N_PILOT
    return (n // 4, n // 2) if small else (N_PILOT, n_calibration)


def _compared(
    name: str,
    record: ss.ExitRecord,
    sizes: tuple[int, int],
    pilots: int,
    repeats: ss.Repeats,
    delta: float,
    seed: int,
) -> Rows:
    """Return a row for each level: what both scores save, and how often they break the promise."""
    studies: dict[str, list[Study]] = {"top1": [], "learned": []}
    for k in range(pilots):
        pilot, rest = record.split(sizes[0], seed=seed + k)
        # The score forgets its pilot: samples of `rest` that are drawn twice get new numbers.
        learned = replace(ss.LearnedScore.fit(pilot), pilot=None)
        for label, score in (("top1", "top1"), ("learned", learned)):
            request = ss.Calibration(ss.Promise("zero_one", epsilon=EPSILONS[0]), rule=score)
            studies[label].append(
                evaluate(
                    rest,
                    risk=request,
                    controls=["ucb"],
                    epsilons=EPSILONS,
                    delta=delta,
                    n_calibration=sizes[1],
                    splits=repeats,
                    seed=seed + k,
                )
            )
    rows = []
    for j, epsilon in enumerate(EPSILONS):
        gains = {label: [_gain(each)[:, j] for each in found] for label, found in studies.items()}
        differences = [b.mean() - a.mean() for a, b in zip(*gains.values(), strict=True)]
        row = {
            "record": name,
            "exits": record.n_exits,
            "pilot": sizes[0],
            "n": sizes[1],
            "ε": epsilon,
            "top1": round(float(np.mean(gains["top1"])), 2),
            "learned": round(float(np.mean(gains["learned"])), 2),
            "gained": round(float(np.mean(differences)), 2),
            "± over pilots": round(float(np.std(differences, ddof=1)), 2) if pilots > 1 else 0.0,
        }
        for label, found in studies.items():
            rates = [float(each.violations["ucb"][j]) for each in found]
            row[f"violations, {label}"] = round(float(np.mean(rates)), 4)
        rows.append(row)
    return rows


def _attempted(
    name: str,
    record: ss.ExitRecord,
    sizes: tuple[int, int],
    splits: int,
    delta: float,
    seed: int,
) -> Rows:
    """Return a row with what each way to learn a score saves at the first level."""
    found: dict[str, list[float]] = {}
    for k in range(N_ATTEMPTS):
        pilot, rest = record.split(sizes[0], seed=seed + k)
        ways: Mapping[str, Callable[..., Any]] = {"top1": lambda _, rest: rest.confidences["top1"]}
        for label, way in {**ways, **ATTEMPTS}.items():
            tried = replace(rest, confidences={"tried": way(pilot, rest)}, features={})
            study = evaluate(
                tried,
                loss="zero_one",
                controls=["ucb"],
                epsilons=EPSILONS[:1],
                delta=delta,
                n_calibration=min(sizes[1], len(rest) // 2),
                splits=ss.Repeats(max(splits // N_ATTEMPTS, 1), 1, progress=False),
                seed=seed + k,
            )
            found.setdefault(label, []).append(float(_gain(study).mean()))
    means = {label: float(np.mean(values)) for label, values in found.items()}
    top1 = means.pop("top1")
    row = {"record": name, "pilot": sizes[0], "top1": round(top1, 2)}
    return [row | {label: round(value - top1, 2) for label, value in means.items()}]


def _maps(pilots: int, splits: int, draws: int, delta: float, seed: int) -> Rows:
    """Return a row for each loss of images, learned from all scores of the record.

    Frames count as independent: there are two videos, too few to be drawn as groups.
    """
    record = replace(ss.ExitRecord.load(SEGMENTATION), groups=None)
    repeats = ss.Repeats(max(splits // pilots, 1), max(draws // pilots, 1), progress=False)
    rows = []
    for loss, epsilon in MAPS.items():
        found: dict[str, list[Study]] = {"mean_top1": [], "learned": []}
        for k in range(pilots):
            pilot, rest = record.split(83, seed=seed + k)
            learned = replace(ss.LearnedScore.fit(pilot, loss=loss), pilot=None)
            for label, score in (("mean_top1", "mean_top1"), ("learned", learned)):
                request = ss.Calibration(ss.Promise(loss, epsilon=epsilon), rule=score)
                options: dict[str, Any] = {"controls": ["ucb"], "epsilons": [epsilon]}
                options |= {"n_calibration": 100, "splits": repeats, "seed": seed + k}
                found[label].append(evaluate(rest, risk=request, delta=delta, **options))
        row: dict[str, Any] = {"loss": loss, "pilot": 83, "n": 100, "ε": epsilon}
        for label, studies in found.items():
            row[label] = round(float(np.mean([_gain(each) for each in studies])), 2)
        for label, studies in found.items():
            rates = [float(each.violations["ucb"][0]) for each in studies]
            row[f"violations, {label}"] = round(float(np.mean(rates)), 4)
        rows.append(row)
    return rows


def _gain(study: Study) -> Any:
    """Return the saving in FLOPs of each split, (splits, epsilons), in %."""
    return study.flops_gain["ucb"]
