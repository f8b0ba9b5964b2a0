"""Train ADP-C by a recipe, from the root of the repository:
`python -m experiments.segmentation.train adp_c_camvid --data FOLDER`.

Writes NAME.safetensors and NAME.json (recipe, seed, device, time, scores). To try a recipe use
`--holdout`: it trains on the part "train" and scores the part "val". Without it, training uses both
if there is a third part to test on, and `records` scores the network. A recipe with a table [start]
fine-tunes published weights (`--weights`) to a second domain.
"""

import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from experiments import commands
from experiments.augment import shaded, uniform
from experiments.segmentation.data import TEST_PART, Scenes, in_memory, scenes
from experiments.training import batches, fit, make_optimizer, recorded_step, refresh_statistics
from swiftsure.losses import VOID
from swiftsure_zoo import ADPC

HERE = Path(__file__).parent


def zoomed(
    images: Tensor, labels: Tensor, zooms: tuple[float, float], random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Zoom into or out of each scene, shift it, and mirror half of them; outside is void."""
    n = len(images)
    zoom = uniform(n, math.log(zooms[0]), math.log(zooms[1]), random).exp()
    reach = 1 / zoom
    slack = (1 - reach).abs()
    right = slack * uniform(n, -1.0, 1.0, random)
    down = slack * uniform(n, -1.0, 1.0, random)
    sign = torch.where(uniform(n, -1.0, 1.0, random) < 0, -1.0, 1.0)
    zero = torch.zeros_like(reach)
    places = torch.stack([sign * reach, zero, right, zero, reach, down], dim=1).view(n, 2, 3)
    grid = functional.affine_grid(places, list(images.shape), align_corners=False)
    seen = functional.grid_sample(images.float(), grid, align_corners=False)
    # Class numbers plus one, so that 0 means outside.
    numbers = torch.where(labels == VOID, 0.0, labels.float() + 1)[:, None]
    found = functional.grid_sample(numbers, grid, mode="nearest", align_corners=False)[:, 0]
    return seen, torch.where(found < 0.5, float(VOID), found - 1).long()


def class_weights(labels: Tensor, n_classes: int) -> Tensor:
    """Return class weights with mean 1, larger for rarer classes."""
    counts = torch.bincount(labels.flatten().long(), minlength=VOID + 1)[:n_classes].float()
    weights = 1 / torch.log(1.02 + counts / counts.sum())
    return weights / weights.mean()


def enlarged(maps: Tensor, labels: Tensor) -> Tensor:
    """Return logit maps at the size of labels."""
    size = labels.shape[1:]
    return functional.interpolate(maps, size=size, mode="bilinear", align_corners=False)


def sum_over_exits(weights: Tensor):
    """Return the sum of the exits' cross-entropies, the published loss, at the labels' size."""

    def loss_of(outputs: list[Tensor], labels: Tensor) -> Tensor:
        losses = [
            functional.cross_entropy(enlarged(output, labels), labels, weights, ignore_index=VOID)
            for output in outputs
        ]
        return torch.stack(losses).sum()

    return loss_of


def build(recipe: dict[str, Any], weights: Path | None = None) -> ADPC:
    """Return the network of a recipe: untrained, or with published weights if it has [start]."""
    if "start" not in recipe:
        return ADPC(**recipe["model"])
    if weights is None:
        raise SystemExit("This recipe starts from trained weights: pass their file as --weights.")
    if weights.suffix == ".safetensors":
        state = load_file(weights)
    else:
        state = torch.load(weights, map_location="cpu", weights_only=True)
    return ADPC.from_published(recipe["start"], state)


def train(
    recipe: dict[str, Any],
    part: Scenes,
    device: str,
    seed: int,
    seconds: float | None = None,
    weights: Path | None = None,
) -> nn.Module:
    """Return the trained network; with `seconds`, sets the recipe's number of epochs."""
    torch.manual_seed(seed)
    random = torch.Generator(device).manual_seed(seed)
    plan = recipe["training"]
    model = build(recipe, weights).to(device, memory_format=torch.channels_last).train()
    balance = class_weights(part.labels, recipe["data"]["n_classes"])
    optimizer = make_optimizer(model, plan)
    step = recorded_step(model, optimizer, sum_over_exits(balance), plan.get("clip"))
    size = min(plan["batch"], len(part.labels))

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        for index in batches(len(part.labels), size, random):
            zooms = (plan["smallest_zoom"], plan["largest_zoom"])
            images, labels = zoomed(part.images[index], part.labels[index], zooms, random)
            images = shaded(images, plan["shading"], random)
            yield images.contiguous(memory_format=torch.channels_last), labels

    per_epoch = len(part.labels) // size
    trained = fit(recipe["name"], model, optimizer, plan, step, epoch, per_epoch, seconds)
    refresh_statistics(trained, (images for images, _ in islice(epoch(), 40)))
    return trained.eval()


@torch.inference_mode()
def mean_ious(model: nn.Module, part: Scenes, n_classes: int) -> list[float]:
    """Return the mIoU over all pixels of a part, at each exit."""
    confusions = torch.zeros(model.n_exits, n_classes, n_classes, device=part.labels.device)
    for images, labels in zip(part.images.split(8), part.labels.split(8), strict=True):
        for k, output in enumerate(model(images.float())):
            known = labels != VOID
            predictions = enlarged(output, labels).argmax(1)[known]
            pairs = labels[known].long() * n_classes + predictions
            confusions[k] += pairs.bincount(minlength=n_classes**2).view(n_classes, n_classes)
    both = confusions.diagonal(dim1=1, dim2=2)
    either = confusions.sum(1) + confusions.sum(2) - both
    shown = either > 0
    ious = (both / either.clamp(min=1)).sum(1) / shown.sum(1)
    return [round(x, 4) for x in ious.tolist()]


def main() -> None:
    parser = commands.options(__doc__, HERE)
    parser.add_argument("--weights", type=Path, help="file to start from, for recipes with [start]")
    parser.add_argument(
        "--holdout", action="store_true", help="do not train on the part val, but score it"
    )
    arguments = parser.parse_args()
    recipe, device = commands.recipe_of(arguments, HERE), commands.device()
    tested = TEST_PART[recipe["data"]["name"]] == "val"
    parts = {
        split: in_memory(scenes(recipe, arguments.data, split), device)
        for split in ("train", "val")
        if split == "train" or arguments.holdout or not tested
    }
    part = parts["train"]
    if not (arguments.holdout or tested):
        part = Scenes(*(torch.cat(pair) for pair in zip(*parts.values(), strict=True)))
    began = time.perf_counter()
    model = train(recipe, part, device, arguments.seed, arguments.seconds, arguments.weights)
    report = commands.report(recipe, arguments.seed, began, model)
    report["images"] = len(part.labels)
    if arguments.holdout:
        report["held_out_miou"] = mean_ious(model, parts["val"], recipe["data"]["n_classes"])
    commands.save(model, report, arguments.output, half=True)


if __name__ == "__main__":
    main()
