"""Train a U-ViT with DeeDiff's exits, from the root of the repository:
`python -m experiments.diffusion.train uvit_cifar10 --data FOLDER`.

Writes NAME.safetensors (averaged weights; half precision where the recipe says so), NAME.json
(recipe, seed, device, time, and the losses of each exit on the test part) and NAME.png (samples of
the full model). Weights and report are also written every minute, so that an interrupted run loses
little; with `--resume` it continues from there.

`--seconds N` trains for this long instead of the recipe's steps, with a learning rate that follows
the clock.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments import commands
from experiments.diffusion.batches import Batch, batches, noisy
from experiments.diffusion.easing import ease
from experiments.diffusion.images import Images, load
from experiments.training import Recording
from swiftsure._lib.files import atomic_write, write_text
from swiftsure.diffusion import DDIM, DeeDiff, Guided, Schedule, deediff_losses
from swiftsure_zoo import UViT

HERE = Path(__file__).parent
PARTS = ("denoising", "uncertainty", "layers")
LOOK = 25
"""Steps between looks at the clock and the losses: each look waits for the device."""


def recorded(
    learn: Callable[[Batch], Tensor], model: nn.Module, graphs: bool
) -> Callable[[Batch], Tensor]:
    """Return a function that learns from a batch, recorded once and replayed on a GPU.

    A small U-ViT with its exits runs over a thousand kernels per step, and launching them one by
    one keeps the GPU waiting.
    """
    if not graphs:
        return learn
    recordings: list[Recording] = []

    def replay(batch: Batch) -> Tensor:
        if not recordings:
            recordings.append(
                Recording(lambda *parts: learn(Batch(*parts)), batch, list(model.parameters()))
            )
        return recordings[0].replay(batch)

    return replay


class Trainer:
    """A network, its average and its optimiser, one step at a time."""

    def __init__(
        self, recipe: dict[str, Any], device: str, *, compiled: bool, graphs: bool
    ) -> None:
        self.plan = recipe["training"]
        self.model = UViT(**recipe["model"]).to(device).train()
        if self.plan["eased"]:
            ease(self.model)
        self.average = UViT(**recipe["model"]).to(device).eval()
        self.average.load_state_dict(self.model.state_dict())
        if compiled:
            # Block by block: they are alike, so that one compilation serves all.
            model = self.model
            for block in [*model.in_blocks, model.mid_block, *model.out_blocks]:
                block.compile()
            model.doubts = torch.compile(model.doubts)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.plan["weight_decay"]},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=self.plan["lr"],
            betas=(0.9, 0.99),
            fused=device == "cuda",
        )
        self.learn = recorded(self._learn, self.model, graphs)
        self.steps = 0

    def step(self, batch: Batch, share: float) -> Tensor:
        """Learn from a batch, and return its losses (`PARTS`)."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan["lr"] * rate(share, self.plan["warm_up"])
        losses = self.learn(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.plan["clip"])
        self.optimizer.step()
        self.steps += 1
        # A short decay at first: the average must forget the initial weights.
        decay = min(self.plan["average"], (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            averaged, current = list(self.average.parameters()), list(self.model.parameters())
            torch._foreach_lerp_(averaged, current, 1 - decay)
        return losses

    def _learn(self, batch: Batch) -> Tensor:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast(batch.images.device.type, torch.bfloat16, cache_enabled=False):
            losses = deediff_losses(self.model, *batch)
        early = self.plan["early_weight"] * (losses.uncertainty + losses.layers)
        (losses.denoising + early).backward()
        return torch.stack([getattr(losses, name).detach() for name in PARTS])

    def state(self) -> dict[str, Any]:
        """Return everything needed to continue."""
        return {
            "model": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]


def can_compile() -> bool:
    """Return whether torch.compile works here: it needs a C compiler."""
    try:
        torch.compile(nn.functional.silu)(torch.zeros(8, device="cuda"))
    except Exception as error:
        print(f"without torch.compile, which fails here ({type(error).__name__})", flush=True)
        return False
    return True


def rate(share: float, warm_up: float) -> float:
    """Return the learning rate at a share of the training, relative to its peak."""
    if share < warm_up:
        return share / warm_up
    return (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up))) / 2


@torch.inference_mode()
def losses_of_exits(
    model: UViT, part: Images, recipe: dict[str, Any], schedule: Schedule, n: int = 2048
) -> dict[str, Any]:
    """Return the mean squared error of every exit's noise on some images, and the three losses.

    Times are drawn uniformly.
    """
    random = torch.Generator(part.images.device).manual_seed(0)
    found = []
    n = min(n, len(part.labels))
    for start in range(0, n, 256):
        rows = slice(start, min(start + 256, n))
        clean = part.images[rows].float() / 127.5 - 1
        device = clean.device
        times = torch.randint(schedule.n_times, (len(clean),), device=device, generator=random)
        batch = noisy(clean, part.labels[rows], times, recipe, schedule, random)
        losses = deediff_losses(model, *batch)
        parts = torch.stack([losses.denoising, losses.uncertainty, losses.layers])
        found.append(len(clean) * torch.cat([parts, losses.exits]))
    means = (torch.stack(found).sum(dim=0) / n).tolist()
    return {
        "images": n,
        **{name: round(value, 5) for name, value in zip(PARTS, means, strict=False)},
        "exits": [round(value, 5) for value in means[3:]],
    }


def sheet(images: np.ndarray, columns: int) -> Image.Image:
    """Return images, (n, height, width, 3) of bytes, side by side in rows."""
    n, height, width, _ = images.shape
    rows = -(-n // columns)
    filled = np.zeros((rows * columns, height, width, 3), np.uint8)
    filled[:n] = images
    tiles = filled.reshape(rows, columns, height, width, 3).transpose(0, 2, 1, 3, 4)
    return Image.fromarray(tiles.reshape(rows * height, columns * width, 3))


def sampled(model: UViT, recipe: dict[str, Any]) -> UViT | Guided:
    """Return the network to sample from, guided if the recipe says so."""
    return Guided(model, recipe["guidance"]["scale"]) if "guidance" in recipe else model


def samples(model: UViT | Guided, schedule: Schedule, n: int = 80) -> Image.Image:
    """Return samples of the full model, one column per class if there are classes."""
    fast = DeeDiff(model, sampler=DDIM(min(50, schedule.n_times), schedule))
    labels = None if fast.n_classes is None else np.arange(n) % fast.n_classes
    return sheet(fast.generate(n, labels=labels, batch_size=n).pixels(), fast.n_classes or 10)


class Run:
    """One training, from its first step to its files."""

    def __init__(self, arguments: argparse.Namespace, recipe: dict[str, Any]) -> None:
        self.arguments, self.recipe = arguments, recipe
        self.device = commands.device()
        on_gpu = self.device == "cuda"
        torch.manual_seed(arguments.seed)
        if on_gpu:
            torch.set_float32_matmul_precision("high")
        self.schedule = Schedule(**recipe["schedule"])
        self.trainer = Trainer(
            recipe,
            self.device,
            compiled=on_gpu and not arguments.no_compile and can_compile(),
            graphs=on_gpu and not arguments.no_graph,
        )
        self.history: list[dict[str, float]] = []
        self.before = 0.0  # seconds of earlier runs that this one continues
        self.prepared = 0.0
        arguments.output.mkdir(parents=True, exist_ok=True)
        self.state_file = self.file(".state.pt")
        if arguments.resume and self.state_file.is_file():
            state = torch.load(self.state_file, map_location=self.device, weights_only=True)
            self.trainer.restore(state)
            self.history, self.before = state["history"], state["seconds"]
            print(f"continuing from step {self.trainer.steps:,}", flush=True)
        self.began = time.perf_counter()

    def file(self, suffix: str) -> Path:
        return self.arguments.output / f"{self.recipe['name']}{suffix}"

    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.began

    def share(self) -> float:
        """Return how much of the training is done."""
        if self.arguments.seconds is None:
            return min(1.0, self.trainer.steps / self.recipe["training"]["steps"])
        trained, whole = self.seconds() - self.prepared, self.arguments.seconds - self.prepared
        return min(1.0, trained / whole) if whole > 0 else 1.0

    def train(self, part: Images) -> None:
        # A continued run gets other batches than before.
        seed = self.arguments.seed + 1_000_003 * self.trainer.steps
        random = torch.Generator(self.device).manual_seed(seed)
        stream = batches(part, self.recipe, self.schedule, random)
        if self.share() < 1:
            self.prepare(next(stream))
        written = time.perf_counter()
        while self.share() < 1:
            n = LOOK
            if self.arguments.seconds is None:
                n = min(n, self.recipe["training"]["steps"] - self.trainer.steps)
            total = torch.zeros(len(PARTS), device=self.device)
            for _ in range(n):
                total += self.trainer.step(next(stream), self.share())
            self.note((total / n).tolist())  # waits for the device, so that the clock is right
            if time.perf_counter() - written > self.arguments.checkpoint:
                self.write(finished=False)
                written = time.perf_counter()

    def prepare(self, batch: Batch) -> None:
        """Compile and record, by a step at learning rate 0 that the schedule does not count."""
        began = time.perf_counter()
        self.trainer.step(batch, 0.0).tolist()
        self.prepared = time.perf_counter() - began

    def note(self, losses: list[float]) -> None:
        """Keep and print losses, at most ten times per minute."""
        now = round(self.seconds(), 1)
        if self.history and now - self.history[-1]["seconds"] < 6:
            return
        named = {name: round(value, 5) for name, value in zip(PARTS, losses, strict=True)}
        self.history.append({"seconds": now, "steps": self.trainer.steps, **named})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in named.items())
        print(f"{now:.0f} s, step {self.trainer.steps:,}: {shown}", flush=True)

    def write(self, finished: bool, **more: Any) -> None:
        """Write weights, report and, if the run may be continued, its state; each atomically."""
        weights = commands.stored_weights(self.trainer.average, self.recipe["training"]["half"])
        with atomic_write(self.file(".safetensors")) as path:
            save_file(weights, path)
        seconds = self.seconds()
        report = commands.report(
            self.recipe,
            self.arguments.seed,
            time.perf_counter() - seconds,
            self.trainer.model,
            finished=finished,
            steps=self.trainer.steps,
            seconds_of_preparation=round(self.prepared, 1),
            images=self.trainer.steps * self.recipe["training"]["batch"],
        )
        report |= {**more, "history": self.history}
        write_text(self.file(".json"), json.dumps(report, indent=2) + "\n")
        if self.arguments.resume:
            state = self.trainer.state() | {"history": self.history, "seconds": seconds}
            with atomic_write(self.state_file) as path:
                torch.save(state, path)


def weights_as_saved(run: Run) -> UViT:
    """Return the averaged network with the weights of its file, rounded if that is."""
    model = run.trainer.average
    if run.recipe["training"]["half"]:
        model.load_state_dict({k: v.half().float() for k, v in model.state_dict().items()})
    return model


def main() -> None:
    parser = commands.options(__doc__, HERE, unit="steps")
    parser.add_argument("--checkpoint", type=float, default=60, help="seconds between checkpoints")
    parser.add_argument(
        "--resume", action="store_true", help="keep the state, and continue from it"
    )
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--no-graph", action="store_true", help="without CUDA graphs")
    arguments = parser.parse_args()
    recipe = commands.recipe_of(arguments, HERE, unit="steps")
    run = Run(arguments, recipe)
    train, test = (
        Images(*(tensor.to(run.device) for tensor in load(recipe, arguments.data, part)))
        for part in ("train", "test")
    )
    run.began = time.perf_counter()  # do not count reading the images
    run.train(train)
    model = weights_as_saved(run)
    run.write(finished=True, test_losses=losses_of_exits(model, test, recipe, run.schedule))
    samples(sampled(model, recipe), run.schedule).save(run.file(".png"))
    print(run.file(".json").read_text().partition('"history"')[0], flush=True)


if __name__ == "__main__":
    main()
