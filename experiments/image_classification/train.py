"""Train a multi-exit classifier by a recipe, from the root of the repository:
`python -m experiments.image_classification.train msdnet_cifar10 --data FOLDER`.

Writes NAME.safetensors (weights; half precision where the recipe says so) and NAME.json (recipe,
seed, device, time and scores). `--compile` compiles the blocks of a DViT, which takes a minute or
two and makes training faster. To try a recipe use `--holdout N`: it trains without N training
images and scores those. Without it, training uses all images, and `records` scores the network.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import swiftsure_zoo as zoo
from experiments import commands
from experiments.augment import augmented, mixed
from experiments.image_classification.data import DATA_SETS, Images
from experiments.image_classification.networks import build, load, normaliser, resized
from experiments.training import (
    Step,
    batches,
    fit,
    make_optimizer,
    recorded_step,
    refresh_statistics,
)
from swiftsure_zoo.networks.dvit import Block
from swiftsure_zoo.networks.transformer import Performer

HERE = Path(__file__).parent


class Teacher(nn.Module):
    """A trained, frozen network; returns its last exit's output."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__()
        self.model, report = load(folder, name)
        self.recipe = report["recipe"]
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        answer: Tensor = self.model(resized(images, self.recipe))[-1]
        return answer


class Taught(nn.Module):
    """A network in training and its teacher, whose output follows those of all exits."""

    def __init__(self, model: nn.Module, teacher: Teacher) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher

    def forward(self, images: Tensor) -> list[Tensor]:
        return [*self.model(images), self.teacher(images)]


def sum_over_exits(
    smoothing: float, distilled: float = 0.0, taught: float = 0.0
) -> Callable[[list[Tensor], Tensor], Tensor]:
    """Return the sum of the exits' cross-entropies, the published loss.

    `taught` is the share of the targets that comes from the teacher's output, if there is one, and
    `distilled` the share of early exits' targets that comes from the last exit.
    """

    def loss_of(outputs: list[Tensor], targets: Tensor) -> Tensor:
        if taught:
            *outputs, lesson = outputs
            targets = torch.lerp(targets, lesson.softmax(dim=1), taught)
        earlier = torch.lerp(targets, outputs[-1].detach().softmax(dim=1), distilled)
        goals = [earlier] * (len(outputs) - 1) + [targets]
        losses = [
            functional.cross_entropy(output, goal, label_smoothing=smoothing)
            for output, goal in zip(outputs, goals, strict=True)
        ]
        return torch.stack(losses).sum()

    return loss_of


def l2w_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: dict[str, Any], steps: int
) -> Step:
    """Return the step of L2W-DEN: a small network learns the weight of each sample and exit."""
    device = next(model.parameters()).device
    weigh = zoo.WeightNetwork(model.n_exits, spread=plan["l2w"]["spread"]).to(device)
    adam = torch.optim.Adam(weigh.parameters(), lr=plan["l2w"]["lr"], weight_decay=1e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    trainer = zoo.L2WTrainer(model, weigh, optimizer, adam)
    done = count()

    learn = recorded_step(model, optimizer, lambda *batch: trainer.weighted_loss(*batch)[0])

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


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a transformer; equal ones share a compilation."""
    blocks = [part for part in model.modules() if isinstance(part, Block | Performer)]
    if not blocks:
        raise ValueError("--compile needs a network with transformer blocks, but this one has none")
    torch._dynamo.config.recompile_limit = 64  # one per grid and drop-path rate
    for block in blocks:
        block.compile(dynamic=False)


@torch.inference_mode()
def accuracies(model: nn.Module, part: Images, recipe: dict[str, Any]) -> list[float]:
    """Return the accuracy of each exit."""
    normalise = normaliser(recipe, part.images.device)
    right = torch.zeros(model.n_exits, device=part.images.device)
    for images, labels in zip(part.images.split(1000), part.labels.split(1000), strict=True):
        outputs = model(resized(normalise(images), recipe))
        right += torch.stack([(out.argmax(1) == labels).sum() for out in outputs])
    return [round(x / len(part.labels), 4) for x in right.tolist()]


def train(
    recipe: dict[str, Any],
    part: Images,
    device: str,
    seed: int,
    seconds: float | None = None,
    teacher: Teacher | None = None,
    compiled: bool = False,
) -> nn.Module:
    """Return the trained model; with `seconds`, sets the recipe's number of epochs."""
    torch.manual_seed(seed)
    random = torch.Generator(device).manual_seed(seed)
    plan = recipe["training"]
    model = build(recipe).to(device, memory_format=torch.channels_last).train()
    if compiled:
        compile_blocks(model)
    per_epoch = len(part.labels) // plan["batch"]
    optimizer = make_optimizer(model, plan)
    if "l2w" in plan:
        step = l2w_step(model, optimizer, plan, plan["epochs"] * per_epoch)
    else:
        loss_of = sum_over_exits(
            plan["label_smoothing"], plan.get("distilled", 0.0), plan.get("taught", 0.0)
        )
        learning = model if teacher is None else Taught(model, teacher.to(device))
        step = recorded_step(learning, optimizer, loss_of, plan.get("clip"))
    normalise = normaliser(recipe, device)

    def images_at(index: Tensor) -> Tensor:
        return augmented(normalise(part.images[index]), plan, random)

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        for index in batches(len(part.labels), plan["batch"], random):
            targets = functional.one_hot(part.labels[index], recipe["model"]["n_classes"]).float()
            images, targets = mixed(images_at(index), targets, plan, random)
            images = resized(images, recipe)
            yield images.contiguous(memory_format=torch.channels_last), targets

    trained = fit(recipe["name"], model, optimizer, plan, step, epoch, per_epoch, seconds)
    some = islice(batches(len(part.labels), min(256, len(part.labels)), random), 40)
    refresh_statistics(trained, (resized(images_at(index), recipe) for index in some))
    return trained.eval()


def main() -> None:
    parser = commands.options(__doc__, HERE)
    parser.add_argument("--holdout", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="the blocks of transformers")
    parser.add_argument("--teachers", type=Path, help="folder of trained networks, for recipes")
    arguments = parser.parse_args()
    recipe, device = commands.recipe_of(arguments, HERE), commands.device()
    part = DATA_SETS[recipe["data"]["name"]](arguments.data, "train")
    held = None
    if arguments.holdout:
        part, held = part.split(arguments.holdout, seed=0)
        held = Images(*(tensor.to(device) for tensor in held))
    part = Images(*(tensor.to(device) for tensor in part))
    began = time.perf_counter()
    teacher = None
    if "teacher" in recipe["training"]:
        folder = arguments.teachers or arguments.output
        teacher = Teacher(folder, recipe["training"]["teacher"])
    model = train(
        recipe, part, device, arguments.seed, arguments.seconds, teacher, arguments.compile
    )
    report = commands.report(recipe, arguments.seed, began, model)
    if held is not None:
        report["held_out_accuracy"] = accuracies(model, held, recipe)
    commands.save(model, report, arguments.output, half=recipe["training"].get("half", False))


if __name__ == "__main__":
    main()
