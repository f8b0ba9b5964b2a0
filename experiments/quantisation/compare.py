"""How few bits can be certified? `python -m experiments.quantisation.compare --data coqa.npz`

Prints the table of docs/guides/compare.md: over draws of n questions, the mean bits per weight of
the number format that `compare` chooses, and how many choices lose more than ε.
"""

import argparse
from pathlib import Path

import numpy as np

import swiftsure as ss
from swiftsure.comparing import Columns

EPSILON, DRAWS, SIZES, FULL_BITS = 0.05, 100, (100, 300, 1000), 16.0
CORRECTIONS = ("fixed_sequence", "bonferroni")


def load(path: Path) -> tuple[Columns, dict[str, float]]:
    """Return the scores of all formats, and their bits; `full` is the unquantised model."""
    with np.load(path) as data:
        bits, scores, full = data["bits"], data["scores"], data["full"]
    names = [f"{each:.3f}" for each in bits]
    costs = {"full": FULL_BITS, **dict(zip(names, map(float, bits), strict=True))}
    return Columns({"full": full, **dict(zip(names, scores.T, strict=True))}), costs


def choices(
    columns: Columns, costs: dict[str, float], n: int, correction: str, draws: int = DRAWS
) -> list[str]:
    """Return the model chosen in each draw of n questions."""
    rng = np.random.default_rng(0)
    size = len(columns.scores["full"])
    chosen = []
    for draw in range(draws):
        rows = rng.permutation(size)[:n]
        part = Columns({name: scores[rows] for name, scores in columns.scores.items()})
        policy = ss.compare(
            part, ss.Promise("f1", epsilon=EPSILON), costs=costs, correction=correction, seed=draw
        )
        chosen.append(policy.settings["model"])
    return chosen


def violations(columns: Columns, chosen: list[str]) -> int:
    """Return how many choices lose more than ε on all questions."""
    full = columns.scores["full"].mean()
    return sum(full - columns.scores[name].mean() > EPSILON for name in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    columns, costs = load(parser.parse_args().data)
    print("| questions | correction | mean bits | violations |\n|---|---|---|---|")
    for n in SIZES:
        for correction in CORRECTIONS:
            chosen = choices(columns, costs, n, correction)
            mean = np.mean([costs[name] for name in chosen])
            print(f"| {n:,} | {correction} | {mean:.2f} | {violations(columns, chosen)} |")


if __name__ == "__main__":
    main()
