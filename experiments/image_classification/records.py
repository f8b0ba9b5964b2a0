"""Exit records of trained networks on the test part, from the root of the repository:
`python -m experiments.image_classification.records --data FOLDER`.

Reads each NAME.safetensors and NAME.json of the folder of results whose data set is in FOLDER, and
writes NAME.parquet beside them, and the test accuracies into NAME.json.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments import commands
from experiments.image_classification.data import DATA_SETS, Images
from experiments.image_classification.networks import load, normaliser, resized
from experiments.image_classification.train import HERE
from swiftsure import ExitRecord
from swiftsure.torch import collect


def batches(part: Images, recipe: dict[str, Any], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs of the network, with labels."""
    normalise = normaliser(recipe, device)
    for images, labels in zip(part.images.split(250), part.labels.split(250), strict=True):
        yield resized(normalise(images.to(device)), recipe), labels.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    device = commands.device()
    for file in sorted(arguments.results.glob("*.json")):
        recipe = json.loads(file.read_text())["recipe"]
        try:
            part = DATA_SETS[recipe["data"]["name"]](arguments.data, "test")
        except FileNotFoundError:
            continue  # the other data set
        model, report = load(arguments.results, file.stem)
        record: ExitRecord = collect(
            model.to(device),
            batches(part, recipe, device),
            scores=["top1", "top_diff", "entropy"],
            losses=["zero_one", "brier"],
        )
        record.save(file.with_suffix(".parquet"))
        accuracy = 1 - record.losses["zero_one"].mean(axis=0, dtype=float)
        report["test_accuracy"] = accuracy.round(4).tolist()
        report["flops"] = record.costs["flops"].tolist()
        report["full_flops"] = record.full_costs["flops"]
        file.write_text(json.dumps(report, indent=2) + "\n")
        print(f"{file.stem}: {', '.join(f'{100 * a:.2f}' for a in accuracy)} % at the exits")


if __name__ == "__main__":
    main()
