"""Images per second of a diffusion model with early exits, against the full sampler.

By default a small random U-ViT, at thresholds that save about a third and two thirds of its layers.
`python benchmarks/diffusion.py --device cuda --results FOLDER --name NAME` measures a trained one
under policies from its record (UCB; see `experiments/diffusion`), with their sampler and dtype; on
a GPU also captured as CUDA graphs, against the full sampler captured likewise. Several records,
such as one that looks at fewer exits, give several policies for each loss and ε.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from measure import Result, best_times, show
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from swiftsure import ThresholdRecord, calibrate
from swiftsure.diffusion import (
    DDIM,
    DeeDiff,
    DeeDiffRule,
    Generated,
    Guided,
    pilot_thresholds,
)
from swiftsure_zoo import UViT

TITLE = "diffusion: DDIM that leaves early against the full sampler, the same noise"

SAVINGS = (0.33, 0.67)
"""Shares of the layers that the thresholds shown should save, about."""

EPSILONS, DELTA = (0.05, 0.1), 0.1

FEWEST = 8
"""Smallest number of images to generate, in several batches if those are smaller."""


SMALL = {"patch_size": 4, "width": 128, "depth": 9, "n_heads": 4, "uncertainty_ratio": 1.0}
PUBLISHED: dict[str, Any] = {}  # the default arguments of UViT


def random_network(**options: Any) -> UViT:
    """Return a U-ViT with random weights whose uncertainty differs between exits."""
    torch.manual_seed(0)
    model = UViT(**options)
    with torch.no_grad():
        model.UEM[0].weight.normal_(0, 0.3)
        model.UEM[2].weight.normal_(0, 0.3)
    return model.eval()


class DrawnExits(UViT):
    """A U-ViT whose steps exit where they are told, after a confidence was computed as usual."""

    def __init__(self, n_times: int = 1000, **options: Any) -> None:
        super().__init__(**options)
        exits = np.random.default_rng(0).integers(self.n_exits, size=n_times)
        self.register_buffer("drawn", torch.from_numpy(exits), persistent=False)

    def begin(self, batch: Sequence[Tensor]) -> dict[str, Any]:
        drawn = cast(Tensor, self.drawn)
        return super().begin(batch) | {"exits": drawn[(batch[1] * len(drawn)).round().long()]}

    def confidence_at(self, exit_index: int, state: dict[str, Any]) -> Tensor:
        sure = super().confidence_at(exit_index, state)
        if "exits" not in state:
            return sure
        return (state["exits"] <= exit_index).float() + 0 * sure.nan_to_num()


def drawn_rows(
    batch: int, dtype: str, device: str, repeats: int, small: bool = False
) -> Iterator[dict[str, Any]]:
    """Time DDIM's 50 steps of the published U-ViT, exits drawn uniformly, one for each step.

    All images of a batch exit together, as those of trained networks nearly do. On a GPU everything
    is captured.
    """
    torch.manual_seed(0)
    model = DrawnExits(**(SMALL if small else PUBLISHED)).eval().to(device)
    some = list(range(2, model.n_exits - 1, 4))
    rules = {
        "full": None,
        "looks at all exits": DeeDiffRule(0.5),
        f"looks at {', '.join(str(k + 1) for k in some)}": DeeDiffRule(0.5, look_at=some),
    }
    options = {
        "sampler": DDIM(4 if small else 50),
        "dtype": None if dtype == "float32" else dtype,
        "graphs": device == "cuda",
    }
    fasts = {name: DeeDiff(model, rule, **options) for name, rule in rules.items()}

    def run(fast: DeeDiff) -> Generated:
        made = fast.generate(batch, batch_size=batch)
        made.images.cpu()  # waits for the device
        return made

    seconds = best_times({k: (lambda fast=fast: run(fast)) for k, fast in fasts.items()}, repeats)
    layers = {name: run(fast).layers.mean() for name, fast in fasts.items()}
    for name in list(rules)[1:]:
        yield {
            "network": "U-ViT, published size, DDIM 50 steps",
            "batch": batch,
            "dtype": dtype,
            "variant": name,
            "ms": 1e3 * seconds[name],
            "full_ms": 1e3 * seconds["full"],
            "speed_up": seconds["full"] / seconds[name],
            "layers_saved": 1 - layers[name] / layers["full"],
        }


def trained(results: Path, name: str) -> UViT | Guided:
    """Return a network from its report and weights, guided if its recipe says so."""
    recipe = json.loads((results / f"{name}.json").read_text())["recipe"]
    model = UViT(**recipe["model"])
    weights = load_file(results / f"{name}.safetensors")
    model.load_state_dict({key: value.float() for key, value in weights.items()})
    model.eval()
    return Guided(model, recipe["guidance"]["scale"]) if "guidance" in recipe else model


def saving(model: UViT, sampler: DDIM, dtype: str | None = None) -> dict[str, DeeDiff]:
    """Return a model at thresholds that save some of its layers, the full one first."""
    options = {"sampler": sampler, "dtype": dtype}
    thresholds = pilot_thresholds(DeeDiff(model, **options), 30, n=FEWEST)
    found = [DeeDiff(model, threshold, **options) for threshold in thresholds]
    layers = np.asarray([fast.generate(FEWEST).layers.mean() for fast in found])
    shares = 1 - layers / layers[0]
    nearest = {
        f"aim {100 * share:.0f} % of layers": found[int(np.argmin(abs(shares - share)))]
        for share in SAVINGS
    }
    return {"full": found[0], **nearest}


def certified(
    model: UViT | Guided, records: Sequence[ThresholdRecord], losses: Sequence[str]
) -> dict[str, DeeDiff]:
    """Return a model under policies of its records, the full one first."""
    found = {
        f"{loss} {epsilon:g}{looks_of(record)}": DeeDiff(
            model,
            calibrate(record, risk="consistency", loss=loss, epsilon=epsilon, delta=DELTA),
        )
        for record in records
        for loss in losses
        for epsilon in EPSILONS
    }
    any_of_them = next(iter(found.values()))
    full = DeeDiff(model, sampler=any_of_them.sampler, dtype=any_of_them.dtype)
    return {"full": full, **found}


def looks_of(record: ThresholdRecord) -> str:
    exits = record.settings.get("look_at")
    return "" if exits is None else f", looks at {', '.join(str(k + 1) for k in exits)}"


def with_graphs(fast: DeeDiff) -> DeeDiff:
    """Return the same, with its steps captured."""
    return DeeDiff(fast.model, fast.rule, sampler=fast.sampler, dtype=fast.dtype, graphs=True)


def measure(
    name: str,
    variants: dict[str, DeeDiff],
    batches: Sequence[int],
    repeats: int,
    with_eager: bool = True,
) -> list[Result]:
    full = variants["full"]
    device = next(full.model.parameters()).device.type
    if device == "cuda":
        recorded = {f"{key}, graphs": with_graphs(it) for key, it in variants.items()}
        variants = variants | recorded if with_eager else recorded
    results = []
    for batch in batches:
        n = max(batch, FEWEST)
        labels = None if full.n_classes is None else np.arange(n) % full.n_classes

        def run(fast: DeeDiff, n=n, batch=batch, labels=labels) -> Generated:
            made = fast.generate(n, labels=labels, batch_size=batch)
            made.images.cpu()  # waits for the device
            return made

        timed = {key: (lambda fast=fast: run(fast)) for key, fast in variants.items()}
        seconds = best_times(timed, repeats)
        made = {key: run(fast) for key, fast in variants.items()}
        for key in [each for each in variants if each != "full"]:
            if key == "full, graphs":
                if not with_eager:
                    continue
                ratio = seconds["full"] / seconds[key]
                note = f"{n / seconds[key]:.3g} images a second, against eager"
                results.append(Result(f"{name}, {device}, batch {batch}, {key}", ratio, note=note))
                continue
            against = "full, graphs" if variants[key].graphs else "full"
            layers = 1 - made[key].layers.mean() / made[against].layers.mean()
            flops = 1 - made[key].flops.mean() / made[against].flops.mean()
            note = (
                f"{n / seconds[against]:.3g} images a second in full, {n / seconds[key]:.3g} so;"
                f" layers saved {100 * layers:.0f} %, FLOPs {100 * flops:.0f} %"
            )
            what = f"{name}, {device}, batch {batch}, {key}"
            results.append(Result(what, seconds[against] / seconds[key], note=note))
    return results


def run(
    device: str = "cpu", batches: Sequence[int] = (1, 16), steps: int = 5, repeats: int = 3
) -> list[Result]:
    variants = saving(random_network(**SMALL).to(device), DDIM(steps))
    return measure("random U-ViT", variants, batches, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=50, help="of DDIM; a record has its own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", help="bfloat16, float16; float32 by default; a record's is its")
    parser.add_argument("--no-eager", action="store_true", help="on a GPU, only captured exits")
    parser.add_argument("--published", action="store_true", help="the published size, random")
    parser.add_argument("--results", type=Path, help="folder of a trained network and its record")
    parser.add_argument("--name", help="of its recipe")
    parser.add_argument("--record", type=Path, nargs="+", help="that in the folder by default")
    parser.add_argument("--loss", nargs="+", default=["lpips"], help="of its record, one or more")
    arguments = parser.parse_args()
    if arguments.results is None:
        options = PUBLISHED if arguments.published else SMALL
        name, model = "random U-ViT", random_network(**options).to(arguments.device)
        variants = saving(model, DDIM(arguments.steps), arguments.dtype)
    else:
        name = arguments.name
        model = trained(arguments.results, name).to(arguments.device)
        files = arguments.record or [arguments.results / f"{name}.parquet"]
        variants = certified(model, list(map(ThresholdRecord.load, files)), arguments.loss)
    with_eager = not arguments.no_eager
    found = measure(name, variants, arguments.batch, arguments.repeats, with_eager)
    show(TITLE, found, Console())


if __name__ == "__main__":
    main()
