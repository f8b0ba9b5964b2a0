"""Cascades of two language models on multiple-choice and short answers, with what they cost.

From answers that were released with *Rational Tuning of LLM Cascades* (2025): Llama 3 from 1B to
405B, GPT-4o-mini, Qwen 2.5 and GPT-4o, on MedMCQA (1,300 questions) and TruthfulQA (817). In each
draw a random half calibrates, and risk and dollars are those of the other half.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import swiftsure as ss
from experiments.studies import DATA_FOLDER
from experiments.tables import write_all
from swiftsure._lib.files import npz

__all__ = ["LlmPairsResult", "llm_pairs", "load_pairs"]

FOLDER = "llm_pairs"
TASKS = {"medmcqa": "MedMCQA", "truthfulqa": "TruthfulQA"}
EPSILONS = (0.02, 0.05)
CHOSEN = "the best pair"
"""Chosen on 30 % of the calibration half, by `calibrate_best`."""

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class LlmPairsResult:
    """A row for each pair of models and level, and one for the pair that was chosen."""

    rows: Rows

    def tables(self) -> dict[str, Rows]:
        """Return the tables to print, by title."""
        return {"Cascades of two language models": self.rows, "For the README": self.readme()}

    def readme(self) -> Rows:
        """Return the rows of chosen pairs, as the README's first table has them."""
        return [
            {
                "model": row["models"],
                "data": row["data"],
                "quality measure": "accuracy",
                "guaranteed drop": f"≤ {row['promised']:.2f}".replace("0.", "."),
                "measured drop": f"{row['measured']:.3f}".replace("0.", "."),
                "dollars saved": f"{100 * row['saved']:.0f} %",
            }
            for row in self.rows
            if row["small"] == CHOSEN
        ]

    def write(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write both tables; return the files."""
        return write_all(folder, {"llm_pairs.csv": self.rows, "readme.csv": self.readme()})


def llm_pairs(
    data: str | os.PathLike[str] | None = None,
    *,
    epsilons: Sequence[float] = EPSILONS,
    splits: int = 60,
    delta: float = 0.1,
    seed: int = 0,
) -> LlmPairsResult:
    """Run the experiment.

    Parameters
    ----------
    data : path, optional
        Folder of npz files with `models` (k,), `correct`, `logprob` and `cost` (n, k); by default
        llm_pairs in the folder that the environment variable SWIFTSURE_DATA names.
    """
    folder = DATA_FOLDER / FOLDER if data is None else Path(data)
    files = sorted(folder.glob("*.npz"))
    if not files:
        raise FileNotFoundError(f"{folder} has no answers of language models (*.npz).")
    rows = []
    for file in files:
        data_name = TASKS.get(file.stem.split("_")[0], file.stem)
        pairs = load_pairs(file)
        large = next(iter(pairs)).split(" → ")[1]
        for name, records in [*((k, {k: v}) for k, v in pairs.items()), (CHOSEN, pairs)]:
            shown = f"{CHOSEN} with {large}" if name == CHOSEN else name
            for epsilon in epsilons:
                measured = _measured(records, epsilon, splits, delta, seed)
                rows.append(
                    {"data": data_name, "models": shown, "small": name, "promised": epsilon}
                    | measured
                )
    return LlmPairsResult(rows)


def load_pairs(file: Path) -> dict[str, ss.ExitRecord]:
    """Return the record of each smaller model of a file before its last one."""
    with npz(file) as arrays:
        names = [str(each) for each in arrays["models"]]
        correct, logprob, cost = (
            np.asarray(arrays[name], np.float64) for name in ("correct", "logprob", "cost")
        )
    found = {}
    for k, name in enumerate(names[:-1]):
        own = cost[:, [k, -1]]
        found[f"{name} → {names[-1]}"] = ss.ExitRecord(
            {"mean_logprob": np.exp(np.minimum(logprob[:, [k]], 0.0))},
            losses={"zero_one": 1.0 - correct[:, [k, -1]]},
            costs={"usd": np.cumsum(own, axis=1)},
            full_costs={"usd": own[:, -1]},
            ids=np.arange(len(correct)),
            order=0,
        )
    return found


def _measured(
    pairs: Mapping[str, ss.ExitRecord], epsilon: float, splits: int, delta: float, seed: int
) -> dict[str, Any]:
    """Return mean risk, dollars saved and how often the risk of the other half is above ε."""
    request = ss.Calibration(ss.Promise("zero_one", epsilon=epsilon), delta=delta)
    n = next(iter(pairs.values())).n
    found, chosen = [], []
    for draw in range(splits):
        rows = np.random.default_rng([seed, draw]).permutation(n)
        first, rest = rows[: n // 2], rows[n // 2 :]
        halves = {name: record.take(first) for name, record in pairs.items()}
        name = next(iter(pairs))
        if len(pairs) == 1:
            policy = request.run(halves[name])
        else:
            policy = ss.calibrate_best(halves, request, split=0.3)
            best = policy.certificate.selection
            name = name if best is None else best.chosen
        test = policy.evaluate(pairs[name].take(rest))
        found.append((test.risk, test.savings["usd"]))
        chosen.append(name)
    risks, saved = np.asarray(found).T
    return {
        "measured": float(risks.mean()),
        "saved": float(saved.mean()),
        "halves above": int((risks > epsilon).sum()),
        "halves": splits,
        "chosen most often": Counter(chosen).most_common(1)[0][0],
    }
