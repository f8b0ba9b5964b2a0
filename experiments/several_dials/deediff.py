"""DeeDiff's threshold and number of steps as two dials, from the root of the repository:
`python -m experiments.several_dials.deediff --lpips lpips_alexnet.npz --shards FOLDER`.

The U-ViT trained on CIFAR-10, without guidance, makes each image at every threshold with 20 and
with 10 steps of DDIM, from the same noise. Losses are against the full model with 20 steps. The
thresholds are of the committed record's pilot. Writes deediff.parquet.
"""

import argparse
import json
from pathlib import Path

from experiments.diffusion.records import HERE as DIFFUSION
from experiments.diffusion.records import classes, network
from swiftsure import RunOptions
from swiftsure.diffusion import DDIM, DeeDiff, Lpips, Schedule, sweep

HERE = Path(__file__).parent
NAME = "uvit_cifar10"
STEPS = 20
N_STEPS = (10,)
THRESHOLDS = (0.98316, 0.96252, 0.92714)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lpips", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--shards", type=Path, required=True, help="where to keep unfinished work")
    parser.add_argument("--n", type=int, default=64, help="images")
    arguments = parser.parse_args()
    recipe = json.loads((DIFFUSION / "results" / f"{NAME}.json").read_text())["recipe"]
    del recipe["guidance"]
    model = network(DIFFUSION / "results" / f"{NAME}.safetensors", recipe)
    sampler = DDIM(STEPS, Schedule(**recipe["schedule"]))
    record = sweep(
        DeeDiff(model, sampler=sampler),
        arguments.n,
        thresholds=THRESHOLDS,
        n_steps=N_STEPS,
        losses=[Lpips.load(arguments.lpips, side=64)],
        labels=classes(arguments.n, model.n_classes - 1, 0),
        batch_size=16,
        run=RunOptions(shards=arguments.shards / "deediff", shard_size=16),
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    record.save(arguments.output / "deediff.parquet")
    print(record)


if __name__ == "__main__":
    main()
