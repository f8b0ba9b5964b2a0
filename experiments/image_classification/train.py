"""Train a multi-exit classifier by a recipe: `python train.py recipes/NAME.toml --data FOLDER`.

Writes NAME.safetensors (weights; half precision where the recipe says so) and NAME.json (recipe,
seed, device, time and scores). With `--holdout N` it trains without N training images and scores
those, which is how to try a recipe. Without, it trains on all, and `records.py` scores it.
"""

import argparse
import json
import math
import time
import tomllib
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from augment import augmented, mixed
from data import DATA_SETS, Images
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from swiftsure.torch import models

HERE = Path(__file__).parent


def batches(n: int, size: int, random: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of whole batches, in random order."""
    order = torch.randperm(n, device=random.device, generator=random)
    yield from order[: n - n % size].split(size)


Step = Callable[[Tensor, Tensor], Tensor]
"""Learns from a batch of images and targets (n, n_classes), and returns its loss."""


def recorded_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[list[Tensor], Tensor], Tensor],
    clip: float | None = None,
) -> Step:
    """Return the step that descends a loss of all outputs, its gradient cut to length `clip`.

    On a GPU, what is done for a batch is recorded once and replayed, since such a network is
    hundreds of small kernels.
    """
    held: list[Tensor] = []
    graph = torch.cuda.CUDAGraph() if torch.cuda.is_available() else None
    recorded: Tensor | None = None

    def learn() -> Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast(held[0].device.type, torch.bfloat16, cache_enabled=False):
            outputs = model(held[0])
        loss = loss_of([output.float() for output in outputs], held[1])
        loss.backward()
        return loss.detach()

    def record(graph: torch.cuda.CUDAGraph) -> Tensor:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                learn()
        torch.cuda.current_stream().wait_stream(side)
        for parameter in model.parameters():
            parameter.grad = None
        with torch.cuda.graph(graph):
            return learn()

    def step(images: Tensor, targets: Tensor) -> Tensor:
        nonlocal recorded
        if not held:
            held.extend((images.clone(), targets.clone()))
            recorded = None if graph is None else record(graph)
        held[0].copy_(images)
        held[1].copy_(targets)
        if graph is None or recorded is None:
            loss = learn()
        else:
            graph.replay()
            loss = recorded
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return step


def sum_over_exits(
    smoothing: float, distilled: float = 0.0
) -> Callable[[list[Tensor], Tensor], Tensor]:
    """Return the sum of the exits' cross-entropies, the published loss.

    A share `distilled` of what earlier exits learn from is the answer of the last one.
    """

    def loss_of(outputs: list[Tensor], targets: Tensor) -> Tensor:
        last = outputs[-1].detach().softmax(dim=1)
        taught = (1 - distilled) * targets + distilled * last
        goals = [taught] * (len(outputs) - 1) + [targets]
        losses = [
            functional.cross_entropy(output, goal, label_smoothing=smoothing)
            for output, goal in zip(outputs, goals, strict=True)
        ]
        return torch.stack(losses).sum()

    return loss_of


def make_optimizer(model: nn.Module, plan: dict[str, Any]) -> torch.optim.Optimizer:
    """Return SGD, or AdamW where the recipe says so; neither decays biases and norms."""
    groups = [
        {
            "params": [p for p in model.parameters() if p.ndim > 1],
            "weight_decay": plan["weight_decay"],
        },
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if plan.get("optimizer") == "adamw":
        return torch.optim.AdamW(groups, lr=plan["lr"], fused=True)
    # L2W-DEN looks ahead by a step of plain SGD.
    return torch.optim.SGD(groups, lr=plan["lr"], momentum=0.9, nesterov="l2w" not in plan)


def l2w_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: dict[str, Any], steps: int
) -> Step:
    """Return the way of L2W-DEN: a small network learns the weight of each sample at each exit."""
    device = next(model.parameters()).device
    weigh = models.WeightNetwork(model.n_exits, spread=plan["l2w"]["spread"]).to(device)
    adam = torch.optim.Adam(weigh.parameters(), lr=plan["l2w"]["lr"], weight_decay=1e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    trainer = models.L2WTrainer(model, weigh, optimizer, adam)
    done = count()

    def weighted(outputs: list[Tensor], targets: Tensor) -> Tensor:
        each = [functional.cross_entropy(o, targets, reduction="none") for o in outputs]
        losses = torch.stack(each, dim=1)
        with torch.no_grad():
            sure = torch.stack([o.softmax(dim=1).amax(dim=1) for o in outputs], dim=1)
            weights = weigh(losses, sure)
        return (weights * losses).mean(dim=0).sum()

    learn = recorded_step(model, optimizer, weighted)

    def step(images: Tensor, targets: Tensor) -> Tensor:
        halves = list(zip(images.chunk(2), targets.chunk(2), strict=True))
        meta = next(done) % plan["l2w"]["interval"] == 0
        total = torch.zeros((), device=device)
        for used, other in (halves, halves[::-1]):
            if meta:
                (a, of_a), (b, of_b) = used, other
                with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
                    trainer.meta_update((a, of_a.argmax(1)), (b, of_b.argmax(1)))
            total += learn(*used)
        cosine.step()
        return total / 2

    return step


@torch.inference_mode()
def accuracies(model: nn.Module, part: Images, recipe: dict[str, Any]) -> list[float]:
    """Return the share of right answers at each exit."""
    normalise = normaliser(recipe, part.images.device)
    right = torch.zeros(model.n_exits, device=part.images.device)
    for images, labels in zip(part.images.split(1000), part.labels.split(1000), strict=True):
        outputs = model(resized(normalise(images), recipe))
        right += torch.stack([(out.argmax(1) == labels).sum() for out in outputs])
    return [round(x / len(part.labels), 4) for x in right.tolist()]


def build(recipe: dict[str, Any]) -> nn.Module:
    """Return the untrained network of a recipe."""
    arguments = dict(recipe["model"])
    return getattr(models, arguments.pop("name"))(**arguments)


def one_cycle(share: float, warm_up: float = 0.15) -> float:
    """Return the learning rate at a share of the training, as a part of its peak."""
    if share < warm_up:
        return 0.04 + 0.96 * (1 - math.cos(math.pi * share / warm_up)) / 2
    return (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up))) / 2


def train(
    recipe: dict[str, Any], part: Images, device: str, seed: int, seconds: float | None = None
) -> nn.Module:
    """Return the trained model, its weights averaged over the last steps.

    With `seconds` it trains for so long, in whole epochs, and the recipe then says how many.
    """
    torch.manual_seed(seed)
    random = torch.Generator(device).manual_seed(seed)
    plan = recipe["training"]
    model = build(recipe).to(device, memory_format=torch.channels_last).train()
    per_epoch = len(part.labels) // plan["batch"]
    decay = 1 - 1 / (plan["averaged_epochs"] * per_epoch)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    optimizer = make_optimizer(model, plan)
    steps = plan["epochs"] * per_epoch
    if "l2w" in plan:
        step = l2w_step(model, optimizer, plan, steps)
    else:
        loss_of = sum_over_exits(plan["label_smoothing"], plan.get("distilled", 0.0))
        step = recorded_step(model, optimizer, loss_of, plan.get("clip"))
    normalise = normaliser(recipe, device)
    began = time.perf_counter()
    for epoch in count():
        total = torch.zeros((), device=device)
        for i, index in enumerate(batches(len(part.labels), plan["batch"], random)):
            share = (epoch * per_epoch + i) / steps
            if seconds is not None:
                share = min(1.0, (time.perf_counter() - began) / seconds)
            for group in optimizer.param_groups:
                group["lr"] = plan["lr"] * one_cycle(share)
            images = augmented(normalise(part.images[index]), plan, random)
            targets = functional.one_hot(part.labels[index], recipe["model"]["n_classes"]).float()
            images, targets = mixed(images, targets, plan, random)
            images = resized(images, recipe).contiguous(memory_format=torch.channels_last)
            total += step(images, targets)
            average.update_parameters(model)
        loss, took = float(total) / per_epoch, time.perf_counter() - began
        last = epoch + 1 == plan["epochs"] if seconds is None else took >= seconds
        if epoch < 2 or epoch % 5 == 4 or last:
            print(f"{recipe['name']} epoch {epoch + 1}: loss {loss:.3f}, {took:.0f} s", flush=True)
        if last:
            plan["epochs"] = epoch + 1
            break
    refresh_statistics(average.module, part, recipe, random)
    return average.module.eval()


@torch.no_grad()
def refresh_statistics(
    model: nn.Module, part: Images, recipe: dict[str, Any], random: torch.Generator
) -> None:
    """Measure what batch normalisation divides by anew: averages of it lag behind the weights."""
    plan, normalise = recipe["training"], normaliser(recipe, part.images.device)
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    norms = [layer for layer in model.modules() if isinstance(layer, kinds)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # then every batch counts alike
    model.train()
    size = min(256, len(part.labels))
    for index in islice(batches(len(part.labels), size, random), 40 if norms else 0):
        images = augmented(normalise(part.images[index]), plan, random)
        model(resized(images, recipe))


def resized(images: Tensor, recipe: dict[str, Any]) -> Tensor:
    """Return the images at the size that the network takes."""
    size = recipe["data"].get("size", images.shape[-1])
    if size == images.shape[-1]:
        return images
    return functional.interpolate(images, size=(size, size), mode="bilinear")


def normaliser(recipe: dict[str, Any], device: torch.device | str) -> Callable[[Tensor], Tensor]:
    """Return the function from bytes to what the network sees."""
    mean, std = (
        255 * torch.tensor(recipe["data"][key], device=device).view(1, 3, 1, 1)
        for key in ("mean", "std")
    )
    return lambda images: (images.float() - mean) / std


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--holdout", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seconds", type=float, help="train for so long, and not for epochs")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    recipe = tomllib.loads(arguments.recipe.read_text())
    recipe["name"] = arguments.recipe.stem
    recipe["training"]["epochs"] = arguments.epochs or recipe["training"]["epochs"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cudnn.benchmark = True
    part = DATA_SETS[recipe["data"]["name"]](arguments.data, "train")
    held = None
    if arguments.holdout:
        part, held = part.split(arguments.holdout, seed=0)
        held = Images(*(tensor.to(device) for tensor in held))
    part = Images(*(tensor.to(device) for tensor in part))
    began = time.perf_counter()
    model = train(recipe, part, device, arguments.seed, arguments.seconds)
    report = {
        "recipe": recipe,
        "seed": arguments.seed,
        "seconds": round(time.perf_counter() - began),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if held is not None:
        report["held_out_accuracy"] = accuracies(model, held, recipe)
    print(json.dumps(report), flush=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    weights = {name: t.contiguous().cpu() for name, t in model.state_dict().items()}
    if recipe["training"].get("half", False):
        weights = {n: t.half() if t.is_floating_point() else t for n, t in weights.items()}
    save_file(weights, arguments.output / f"{recipe['name']}.safetensors")
    (arguments.output / f"{recipe['name']}.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
