"""Train a DiT of diffusers, from the root of the repository:
`python -m experiments.caches.train dit_cifar10 --data FOLDER --seconds 300`.

Writes NAME.safetensors (averaged weights, half precision), NAME.npz (those in seven bits, which
`network.load_weights` reads), NAME.json (recipe, seed, device, time, losses) and NAME.png (samples
of the weights in seven bits). With `--images N` also N images for each of some guidance scales, as
NAME_SCALE.npz.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import DiTTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn

from experiments import commands
from experiments.caches.network import (
    NO_CLASS,
    dit,
    load_weights,
    pipeline,
    save_weights,
    scheduler,
)
from experiments.image_classification.data import DATA_SETS, Images
from experiments.training import Recording

HERE = Path(__file__).parent
SCALES = (1.0, 1.5, 2.0)
LOOK = 50
"""Steps between looks at the clock and the loss: each look waits for the device."""


class Batch(NamedTuple):
    """Noisy images, their times and labels, the target and the weight of each image's loss."""

    images: Tensor
    times: Tensor
    labels: Tensor
    target: Tensor
    weights: Tensor


def initialise(model: DiTTransformer2DModel) -> None:
    """Start as the published DiT does: blocks change nothing, and the output is zero."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    embedder = model.transformer_blocks[0].norm1.emb
    for weight in (
        embedder.timestep_embedder.linear_1.weight,
        embedder.timestep_embedder.linear_2.weight,
    ):
        nn.init.normal_(weight, std=0.02)
    nn.init.zeros_(embedder.class_embedder.embedding_table.weight)
    table = embedder.class_embedder.embedding_table.weight
    with torch.no_grad():
        used = [*range(10), NO_CLASS]
        table[used] = torch.randn(len(used), table.shape[1]) * 0.02
    projection = model.pos_embed.proj
    nn.init.xavier_uniform_(projection.weight.view(len(projection.weight), -1))
    for block in model.transformer_blocks:
        nn.init.zeros_(block.norm1.linear.weight)
    for layer in (model.proj_out_1, model.proj_out_2):
        nn.init.zeros_(layer.weight)


def batches(part: Images, recipe: dict[str, Any], random: torch.Generator) -> Iterator[Batch]:
    """Yield batches forever: images in random order, half of them mirrored."""
    plan, n, device = recipe["training"], len(part.labels), part.images.device
    size = plan["batch"]
    signal = scheduler(recipe).alphas_cumprod.to(device)
    ratio = signal / (1 - signal)
    weights = ratio.clamp(max=plan["most_signal"]) / (ratio + 1)
    while True:
        order = torch.randperm(n, device=device, generator=random)
        for index in order[: n - n % size].split(size):
            clean = part.images[index].float() / 127.5 - 1
            mirrored = torch.rand(size, 1, 1, 1, device=device, generator=random) < 0.5
            clean = torch.where(mirrored, clean.flip(3), clean)
            hidden = torch.rand(size, device=device, generator=random) < plan["unlabelled"]
            labels = part.labels[index].masked_fill(hidden, NO_CLASS)
            times = torch.randint(len(signal), (size,), device=device, generator=random)
            noise = torch.randn(clean.shape, device=device, generator=random)
            share = signal[times][:, None, None, None]
            noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
            target = share.sqrt() * noise - (1 - share).sqrt() * clean
            yield Batch(noisy, times, labels, target, weights[times])


class Trainer:
    """A network, its average and its optimiser, one step at a time."""

    def __init__(self, recipe: dict[str, Any], device: str) -> None:
        self.plan = recipe["training"]
        self.model = dit(recipe)
        initialise(self.model)
        self.average = dit(recipe)
        self.average.load_state_dict(self.model.state_dict())
        self.model, self.average = self.model.to(device), self.average.to(device)
        self.on_gpu = device == "cuda"
        if self.on_gpu:
            for block in self.model.transformer_blocks:
                block.compile()
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim > 1]},
                {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=self.plan["lr"],
            weight_decay=self.plan["weight_decay"],
            betas=(0.9, 0.99),
            fused=self.on_gpu,
        )
        self.recording: Recording | None = None
        self.steps = 0

    def step(self, batch: Batch, share: float) -> Tensor:
        """Learn from a batch, and return its loss."""
        warm_up = self.plan["warm_up"]
        rate = share / warm_up
        if share >= warm_up:
            rate = (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up))) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan["lr"] * rate
        if not self.on_gpu:
            loss = self._learn(*batch)
        else:
            if self.recording is None:
                self.recording = Recording(self._learn, batch, list(self.model.parameters()))
            loss = self.recording.replay(batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.plan["clip"])
        self.optimizer.step()
        self.steps += 1
        # A short decay at first: the average must forget the initial weights.
        decay = min(self.plan["average"], (1 + self.steps) / (10 + self.steps))
        with torch.no_grad():
            averaged, current = list(self.average.parameters()), list(self.model.parameters())
            torch._foreach_lerp_(averaged, current, 1 - decay)
        return loss

    def _learn(
        self, images: Tensor, times: Tensor, labels: Tensor, target: Tensor, weights: Tensor
    ) -> Tensor:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast(images.device.type, torch.bfloat16, cache_enabled=False):
            found = self.model(images, timestep=times, class_labels=labels, return_dict=False)[0]
        errors = (found.float() - target).square().mean(dim=(1, 2, 3))
        loss = (weights * errors).mean()
        loss.backward()
        return loss.detach()


def images_of(
    model: DiTTransformer2DModel, recipe: dict[str, Any], labels: list[int], scale: float, size: int
) -> np.ndarray:
    """Return samples, (n, 32, 32, 3) of bytes, in batches of `size`."""
    made = pipeline(model, recipe)
    random = torch.Generator(model.device).manual_seed(0)
    parts = [
        made(labels[k : k + size], guidance_scale=scale, generator=random, output_type="np").images
        for k in range(0, len(labels), size)
    ]
    return np.rint(np.concatenate(parts) * 255).astype(np.uint8)


def sheet(images: np.ndarray, columns: int) -> np.ndarray:
    """Return images side by side in rows."""
    rows = len(images) // columns
    tiles = images[: rows * columns].reshape(rows, columns, *images.shape[1:])
    return tiles.transpose(0, 2, 1, 3, 4).reshape(rows * 32, columns * 32, 3)


def main() -> None:
    from PIL import Image

    parser = commands.options(__doc__, HERE, unit="steps")
    parser.add_argument("--images", type=int, default=0, help="for each guidance scale")
    arguments = parser.parse_args()
    recipe = commands.recipe_of(arguments, HERE, unit="steps")
    name, output = recipe["name"], arguments.output
    output.mkdir(parents=True, exist_ok=True)
    device = commands.device()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    part = Images(*(t.to(device) for t in DATA_SETS["cifar10"](arguments.data, "train")))
    trainer = Trainer(recipe, device)
    stream = batches(part, recipe, torch.Generator(device).manual_seed(arguments.seed))
    history: list[dict[str, float]] = []
    loss = trainer.step(next(stream), 0.0)  # compiles and records, at learning rate 0
    print(f"ready: loss {float(loss):.4f}", flush=True)
    began = time.perf_counter()
    total, share, shown = torch.zeros((), device=device), 0.0, 0.0
    while share < 1:
        total.zero_()
        for _ in range(LOOK):
            total += trainer.step(next(stream), share)
        value, seconds = float(total) / LOOK, time.perf_counter() - began
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss is {value} after {trainer.steps} steps")
        share = min(1.0, trainer.steps / recipe["training"]["steps"])
        if arguments.seconds is not None:
            share = min(1.0, seconds / arguments.seconds)
        if seconds - shown > 10 or share == 1:
            shown = seconds
            history.append({"seconds": round(seconds, 1), "steps": trainer.steps, "loss": value})
            print(f"{seconds:.0f} s, step {trainer.steps:,}: loss {value:.5f}", flush=True)
    average = trainer.average
    weights = {n: p.detach().half().contiguous().cpu() for n, p in average.named_parameters()}
    save_file(weights, output / f"{name}.safetensors")
    save_weights(average, output / f"{name}.npz")
    images = trainer.steps * recipe["training"]["batch"]
    report = commands.report(recipe, arguments.seed, began, average, images=images)
    (output / f"{name}.json").write_text(json.dumps(report | {"history": history}, indent=2) + "\n")
    print(json.dumps(report), flush=True)
    load_weights(average, output / f"{name}.npz")
    classes = [k % 10 for k in range(100)]
    tiles = images_of(average, recipe, classes, 1.5, 100)
    Image.fromarray(sheet(tiles, 10)).save(output / f"{name}.png")
    for scale in SCALES if arguments.images else ():
        labels = [k % 10 for k in range(arguments.images)]
        made = images_of(average, recipe, labels, scale, 500)
        np.savez_compressed(output / f"{name}_{scale}.npz", images=made)
        print(f"guidance {scale}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
