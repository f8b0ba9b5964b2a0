"""Fine-tune a pretrained encoder and add exits to it, from the root of the repository:
`python -m experiments.intents.train minilm_banking77 --model FOLDER --data FOLDER`.

The encoder learns the intents, then heads after its layers learn its answers (distillation), with
its weights frozen. Writes NAME.safetensors (what was trained, in half precision) and NAME.json
(recipe, seed, device, time, accuracy of every exit on the training questions that were held out).
A recipe with the table [joint] then trains everything together, and writes NAME_joint likewise.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

from experiments import commands
from experiments.intents.data import Questions, banking77
from experiments.intents.network import add_update, pretrained, round_trained, save, with_exits
from experiments.training import batches, fit, make_optimizer, recorded_step
from swiftsure.torch import EarlyStopping, train_heads

HERE = Path(__file__).parent
STEP = 8  # tokens, between the lengths of batches


class Logits(nn.Module):
    """A classifier of transformers that takes ids, padded with 0, and returns its logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> list[Tensor]:
        return [self.network(input_ids=ids, attention_mask=(ids != 0).long()).logits]


def fine_tuned(
    recipe: dict[str, Any],
    network: nn.Module,
    tokenizer: Any,
    questions: Questions,
    device: str,
    seed: int,
) -> Any:
    """Return a network that has learned the intents of questions, in evaluation mode."""
    plan = recipe["training"]
    torch.manual_seed(seed)
    random = torch.Generator().manual_seed(seed)
    model = Logits(network).to(device).train()
    optimizer = make_optimizer(model, plan)

    def loss_of(outputs: list[Tensor], labels: Tensor) -> Tensor:
        return functional.cross_entropy(outputs[0], labels, label_smoothing=plan["label_smoothing"])

    step = recorded_step(model, optimizer, loss_of, plan.get("clip"))
    ids = tokenizer(
        questions.texts,
        padding="max_length",
        truncation=True,
        max_length=recipe["data"]["length"],
        return_tensors="pt",
    )["input_ids"]
    lengths = (ids != 0).sum(dim=1)
    ids, labels = ids.to(device), questions.labels.to(device)
    size = min(plan["batch"], len(ids))

    def epoch() -> Iterator[tuple[Tensor, Tensor]]:
        for index in batches(len(ids), size, random):
            # Rounded up, since each length is captured as a graph.
            longest = math.ceil(int(lengths[index].max()) / STEP) * STEP
            rows = index.to(device)
            yield ids[rows, :longest], labels[rows]

    trained = fit(recipe["name"], model, optimizer, plan, step, epoch, len(ids) // size)
    return trained.network.eval()


def loader(
    tokenizer: Any, questions: Questions, recipe: dict[str, Any], size: int, shuffle: bool = False
) -> DataLoader[Any]:
    """Return batches as users of transformers make them."""
    texts = tokenizer(questions.texts, truncation=True, max_length=recipe["data"]["length"])
    rows = [
        {"input_ids": ids, "attention_mask": mask, "labels": label}
        for ids, mask, label in zip(
            texts["input_ids"], texts["attention_mask"], questions.labels.tolist(), strict=True
        )
    ]
    collate = DataCollatorWithPadding(tokenizer)
    return DataLoader(rows, batch_size=size, shuffle=shuffle, collate_fn=collate)


def train(
    recipe: dict[str, Any], folder: Path, questions: Questions, device: str, seed: int
) -> Iterator[tuple[str, Any, list[float]]]:
    """Yield the network with trained heads, then trained jointly if the recipe says so.

    Each comes with its name and the accuracy of its exits on the questions held out.
    """
    network, tokenizer = pretrained(folder, int(questions.labels.max()) + 1)
    order = torch.randperm(len(questions.texts), generator=torch.Generator().manual_seed(seed))
    n_held = recipe["data"]["held_out"]
    learned, held = questions.rows(order[n_held:]), questions.rows(order[:n_held])
    watched = loader(tokenizer, held, recipe, 250)
    torch.manual_seed(seed)  # the updates are drawn
    add_update(network, recipe["model"]["rank"])
    network = fine_tuned(recipe, network, tokenizer, learned, device, seed)
    round_trained(network)
    exits = with_exits(network, tokenizer, recipe["model"])
    options = {"dtype": "bfloat16" if device == "cuda" else None, "progress": False}
    plan = dict(recipe["heads"])
    training = loader(tokenizer, learned, recipe, plan.pop("batch"), shuffle=True)
    stop = EarlyStopping(watched, plan.pop("patience"))
    train_heads(exits, training, stop=stop, **options, **plan)
    round_trained(exits)
    yield recipe["name"], exits, accuracies(exits, watched, device)
    if "joint" in recipe:
        plan = dict(recipe["joint"])
        training = loader(tokenizer, learned, recipe, plan.pop("batch"), shuffle=True)
        train_heads(exits, training, frozen=False, **options, **plan)
        round_trained(exits)
        yield f"{recipe['name']}_joint", exits, accuracies(exits, watched, device)


@torch.inference_mode()
def accuracies(exits: Any, batches: DataLoader[Any], device: str) -> list[float]:
    """Return the accuracy of every exit."""
    right = []
    for batch in batches:
        inputs = {name: value.to(device) for name, value in batch.items()}
        labels = inputs.pop("labels")
        outputs = exits(inputs)
        right.append(torch.stack([output.argmax(dim=1) == labels for output in outputs], dim=1))
    return [round(share, 4) for share in torch.cat(right).float().mean(dim=0).tolist()]


def main() -> None:
    parser = commands.options(__doc__, HERE)
    parser.add_argument("--model", type=Path, required=True, help="folder of the encoder")
    arguments = parser.parse_args()
    recipe, device = commands.recipe_of(arguments, HERE), commands.device()
    questions = banking77(arguments.data, "train")
    arguments.output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    trained = train(recipe, arguments.model, questions, device, arguments.seed)
    for name, exits, accuracy in trained:
        save(exits, arguments.output / f"{name}.safetensors")
        report = commands.report(
            {**recipe, "name": name}, arguments.seed, began, exits, held_out_accuracy=accuracy
        )
        commands.write_report(report, arguments.output)


if __name__ == "__main__":
    main()
