"""How `crc` with `method="ucb"` should split ε: rules for δ′, compared on records of classifiers.

The test runs at ε′ = (ε − δ′B) / (1 − δ′) with probability 1 − δ′, so that the mean risk is at most
ε whatever δ′ in (0, ε / B) is, as long as it is fixed beforehand.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np

import swiftsure as ss
from experiments.learned_score.reproduce import load_records
from experiments.tables import write_all
from swiftsure.study.evaluation import evaluate

__all__ = ["RULES", "CrcResult", "crc"]

Rows = list[dict[str, Any]]

RULES: dict[str, Callable[[float, int], float]] = {
    "1/(2√n)": lambda _, n: 1 / (2 * sqrt(n)),
    "1/20": lambda *_: 1 / 20,
    "1/10": lambda *_: 1 / 10,
    "1/5": lambda *_: 1 / 5,
    "min(1/10, 3/√n)": lambda _, n: min(1 / 10, 3 / sqrt(n)),
}
"""δ′ as a share of ε / B, by ε and n; the last is the library's."""

LOSSES = {"zero_one": 1.0, "brier": 2.0}
"""The largest value of each gap."""


@dataclass(frozen=True)
class CrcResult:
    """A row for each record, loss, n and ε: FLOPs saved, %, by each rule."""

    rows: Rows

    def tables(self) -> dict[str, Rows]:
        """Return the table to print: the means over all rows, for each n."""
        sizes = sorted({row["n"] for row in self.rows})
        found = [{"n": n} | self._means([r for r in self.rows if r["n"] == n]) for n in sizes]
        means = [*found, {"n": "all"} | self._means(self.rows)]
        return {"FLOPs saved, %, by crc with method='ucb', where any rule certifies": means}

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the rows; return the file."""
        return write_all(folder, {"crc.csv": self.rows})

    def _means(self, rows: Rows) -> dict[str, Any]:
        means = {rule: round(float(np.mean([row[rule] for row in rows])), 2) for rule in RULES}
        risks = [row["mean risk / ε"] for row in rows]
        return {"combinations": len(rows)} | means | {"largest mean risk / ε": max(risks)}


def crc(
    data: str | os.PathLike[str] | None = None,
    *,
    epsilons: Sequence[float] = (0.01, 0.02, 0.05, 0.1),
    sizes: Sequence[int] = (300, 1000, 3000),
    splits: int = 40,
    seed: int = 0,
) -> CrcResult:
    """Run the experiment.

    Parameters
    ----------
    data : path, optional
        A record, or a folder of records, in place of our own.
    sizes : ints
        Numbers of calibration samples; a record needs 100 more.
    """
    rows = []
    for name, record in load_records(data).items():
        for loss, most in LOSSES.items():
            for n in (each for each in sizes if record.n >= each + 100):
                for epsilon in epsilons:
                    row: dict[str, Any] = {"record": name, "loss": loss, "n": n, "ε": epsilon}
                    for rule, share in RULES.items():
                        saved, risk = _saved(record, loss, n, epsilon, most, share, splits, seed)
                        row[rule] = round(saved, 2)
                    row["mean risk / ε"] = round(risk / epsilon, 3)  # by the library's rule
                    if any(row[rule] > 0 for rule in RULES):
                        rows.append(row)
    return CrcResult(rows)


def _saved(
    record: ss.ExitRecord,
    loss: str,
    n: int,
    epsilon: float,
    most: float,
    share: Callable[[float, int], float],
    splits: int,
    seed: int,
) -> tuple[float, float]:
    """Return the mean saving and the mean risk of a rule, by its test with probability 1 − δ′."""
    delta = share(epsilon, n) * epsilon / most
    level = (epsilon - delta * most) / (1 - delta)
    study = evaluate(
        record,
        loss=loss,
        controls=["ucb"],
        epsilons=[level],
        delta=delta,
        n_calibration=n,
        splits=ss.Repeats(splits, 1, progress=False),
        seed=seed,
    )
    return float(study.flops_gain["ucb"].mean()), float(study.test_risk["ucb"].mean())
