"""DeeDiff's threshold and number of steps as two dials, from the root of the repository:
`python -m experiments.several_dials.deediff --lpips lpips_alexnet.npz --shards FOLDER`.

The U-ViT trained on CIFAR-10 makes each image at every threshold with 50 and with fewer steps of
DDIM, from the same noise. Losses are against the full model with 50 steps. Thresholds come from a
pilot with another seed. Writes deediff.parquet.
"""

import argparse
import json
from pathlib import Path

from experiments.diffusion.records import HERE as DIFFUSION
from experiments.diffusion.records import classes, kept_thresholds, network
from swiftsure.diffusion import DDIM, Lpips, Schedule, pilot_thresholds, sweep

HERE = Path(__file__).parent
NAME = "uvit_cifar10"
N_STEPS = (35, 25, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lpips", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--shards", type=Path, required=True, help="where to keep unfinished work")
    parser.add_argument("--n", type=int, default=160, help="images")
    arguments = parser.parse_args()
    recipe = json.loads((DIFFUSION / "results" / f"{NAME}.json").read_text())["recipe"]
    model = network(DIFFUSION / "results" / f"{NAME}.safetensors", recipe)
    sampler = DDIM(50, Schedule(**recipe["schedule"]))

    def pilot() -> list[float | None]:
        labels = classes(8, model.n_classes, 1)
        return pilot_thresholds(model, 6, n=8, labels=labels, seed=1, sampler=sampler)

    record = sweep(
        model,
        arguments.n,
        thresholds=kept_thresholds(arguments.shards / "deediff", pilot),
        n_steps=N_STEPS,
        losses=[Lpips.load(arguments.lpips, side=64)],
        sampler=sampler,
        labels=classes(arguments.n, model.n_classes, 0),
        batch_size=16,
        shards=arguments.shards / "deediff",
        shard_size=16,
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    record.save(arguments.output / "deediff.parquet")
    print(record)


if __name__ == "__main__":
    main()
