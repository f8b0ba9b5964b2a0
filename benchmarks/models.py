"""Images per second of trained networks with certified exits, against the full networks.

By default the network that comes with the library. For one that was trained and recorded as in
`experiments/image_classification` or `experiments/segmentation`, run
`python benchmarks/models.py --results FOLDER --name NAME [--images FILE.npy] [--device cuda]`, with
test images (n, 3, height, width) of uint8 in the file; Fashion-MNIST's by default. For segmentation
add `--loss miou --score mean_top1`.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Result, show
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import interpolate

import swiftsure_zoo as zoo
from swiftsure import Calibration, ExitRecord, Promise
from swiftsure.torch import EarlyExit, Staged, Stream
from swiftsure_zoo.readers.folders import IMAGENET_MEAN, IMAGENET_STD

TITLE = "models: certified networks (gap to the full one at most 0.05, δ = 0.1) against full ones"

N_CALIBRATION, N_IMAGES, REPEATS = 1000, 512, 5


def trained(results: Path, name: str) -> tuple[Staged, ExitRecord, dict[str, Any]]:
    """Return a network from its report and weights, its record, and its data set's settings."""
    recipe = json.loads((results / f"{name}.json").read_text())["recipe"]
    arguments = dict(recipe["model"])
    model: Staged = getattr(zoo, arguments.pop("name", "ADPC"))(**arguments)
    dtypes = {key: tensor.dtype for key, tensor in model.state_dict().items()}
    weights = load_file(results / f"{name}.safetensors")
    model.load_state_dict({key: tensor.to(dtypes[key]) for key, tensor in weights.items()})
    return model.eval(), ExitRecord.load(results / f"{name}.parquet"), recipe["data"]


def prepared(images: np.ndarray, data: dict[str, Any]) -> Tensor:
    """Return images as the network takes them."""
    usual = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    mean, std = (torch.tensor(data.get(key, usual[key])).view(1, 3, 1, 1) for key in usual)
    x = (torch.from_numpy(images) / 255 - mean) / std
    size = data.get("size", tuple(x.shape[2:]))
    height, width = (size, size) if isinstance(size, int) else size
    if x.shape[2:] == (height, width):
        return x
    return interpolate(x, size=(height, width), mode="bilinear")


def measure(
    name: str,
    model: Staged,
    record: ExitRecord,
    x: Tensor,
    batch: int,
    loss: str = "zero_one",
    score: str = "top1",
) -> list[Result]:
    """Time a network on images, in full and under its policy, with and without the stream."""
    device = x.device.type
    model = model.to(x.device)
    rows = np.random.default_rng(0).permutation(record.n)[:N_CALIBRATION]
    samples = replace(record.take(rows), groups=None)  # frames of videos, one by one
    policy = Calibration(Promise(loss, epsilon=0.05), rule=score).run(samples)
    fast = EarlyExit(model, policy)
    batches = list(torch.split(x, batch))

    @torch.inference_mode()
    def full(part: Tensor) -> Tensor:
        state: Any = model.begin(part)
        for k in range(model.n_exits):
            state = model.advance(k, state)
        return model.head(model.n_exits - 1, state)

    variants: dict[str, Callable[[], object]] = {
        "full": lambda: [full(part) for part in batches],
        "early": lambda: [fast(part) for part in batches],
        "stream": lambda: list(Stream(fast, batch).run(batches)),
    }
    best = dict.fromkeys(variants, np.inf)
    order = list(variants)
    for repeat in range(REPEATS + 1):
        random.Random(repeat).shuffle(order)
        for variant in order:
            _wait(device)
            start = time.perf_counter()
            variants[variant]()
            _wait(device)
            if repeat > 0:
                best[variant] = min(best[variant], time.perf_counter() - start)
    exits = torch.cat([fast(part).exits for part in batches]).cpu().numpy()
    flops = record.costs["flops"]
    whole = record.full_costs.get("flops", flops[-1])
    note = (
        f"{len(x) / best['full']:,.0f} images a second in full; {100 * (exits == 0).mean():.0f} %"
        f" leave first; {100 * (1 - flops[exits].mean() / whole):.0f} % of FLOPs saved"
    )
    where = f"{name}, {device}, batch {batch}: "
    return [
        Result(f"{where}early exits", best["full"] / best["early"], note=note),
        Result(f"{where}with the stream", best["full"] / best["stream"]),
    ]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def run(device: str = "cpu", batches: tuple[int, ...] = (1, 64)) -> list[Result]:
    model, record = zoo.msdnet_fashion_mnist(), zoo.records.record()
    x = zoo.prepared(zoo.records.sample_images().images[:N_IMAGES]).to(device)
    return [
        r for batch in batches for r in measure("MSDNet, Fashion-MNIST", model, record, x, batch)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--images", type=Path)
    parser.add_argument("--n", type=int, default=N_IMAGES, help="how many images")
    parser.add_argument("--loss", default="zero_one")
    parser.add_argument("--score", default="top1")
    arguments = parser.parse_args()
    if arguments.results is None:
        show(TITLE, run(arguments.device, tuple(arguments.batch)), Console())
        return
    model, record, data = trained(arguments.results, arguments.name)
    images = np.load(arguments.images) if arguments.images else zoo.records.sample_images().images
    x = prepared(images[: arguments.n], data).to(arguments.device)
    chosen = (arguments.loss, arguments.score)
    found = [
        result
        for batch in arguments.batch
        for result in measure(arguments.name, model, record, x, batch, *chosen)
    ]
    show(TITLE, found, Console())


if __name__ == "__main__":
    main()
