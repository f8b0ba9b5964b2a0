"""Exit records of trained networks on the test questions, from the root of the repository:
`python -m experiments.intents.records --model FOLDER --data FOLDER`.

Reads each NAME.safetensors of the folder of results, and writes NAME.parquet beside it, and the
test accuracies of the exits into NAME.json. Prints what a policy saves at each level.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from experiments.intents.data import Questions, banking77, in_batches
from experiments.intents.network import load
from swiftsure import ExitRecord, calibrate
from swiftsure.torch import collect

HERE = Path(__file__).parent
LEVELS = (0.01, 0.02)
RISKS = ("gap", "consistency")


def shuffled(questions: Questions) -> Questions:
    """Return questions in random order, the same at every call: the file is sorted by intent."""
    generator = torch.Generator().manual_seed(0)
    return questions.rows(torch.randperm(len(questions.texts), generator=generator))


def halves(record: ExitRecord) -> tuple[ExitRecord, ExitRecord]:
    """Return one half of a record to calibrate on, and the other to see what the policy does."""
    return record.split(record.n // 2, seed=0)


def certified(record: ExitRecord) -> list[dict[str, Any]]:
    """Return policies calibrated on one half of a record and their results on the other."""
    calibration, rest = halves(record)
    rows: list[dict[str, Any]] = []
    for risk in RISKS:
        for epsilon in LEVELS:
            policy = calibrate(calibration, risk=risk, loss="zero_one", epsilon=epsilon)
            found = policy.evaluate(rest)
            rows.append(
                {
                    "risk": risk,
                    "epsilon": epsilon,
                    "threshold": policy.threshold,
                    "test_risk": round(found.risk, 4),
                    "flops_saved": round(found.savings["flops"], 4),
                    "exit_shares": [round(share, 3) for share in found.exit_shares.tolist()],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the encoder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    questions = shuffled(banking77(arguments.data, "test"))
    n_classes = len(json.loads((arguments.data / "categories.json").read_text()))
    for file in sorted(arguments.results.glob("minilm*.safetensors")):
        described = file.with_suffix(".json")
        report = json.loads(described.read_text())
        exits, tokenizer = load(arguments.model, file, report["recipe"], n_classes)
        record = collect(
            exits,
            in_batches(tokenizer, questions, 44, report["recipe"]["data"]["length"]),
            scores=["top1", "top_diff", "entropy"],
            losses=["zero_one", "brier"],
        )
        record.save(file.with_suffix(".parquet"))
        accuracy = 1 - record.losses["zero_one"].mean(axis=0, dtype=float)
        report["test_accuracy"] = accuracy.round(4).tolist()
        report["flops"] = record.costs["flops"].tolist()
        report["certified"] = certified(record)
        described.write_text(json.dumps(report, indent=2) + "\n")
        print(f"{file.stem}: {', '.join(f'{100 * a:.2f}' for a in accuracy)} % at the exits")
        for row in report["certified"]:
            print(json.dumps(row))


if __name__ == "__main__":
    main()
