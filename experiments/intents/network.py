"""A pretrained encoder with exits, and an update of low rank that makes it a classifier.

The weights of each linear layer in the blocks become W + B A, of which only A and B are trained and
stored: MiniLM-L6-v2 has 22.7 million weights, an update of rank 32 has 1.3 million.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoTokenizer, BertForSequenceClassification

from experiments.intents.data import encoded
from swiftsure.torch import attach_heads

__all__ = ["add_update", "load", "merge_update", "pretrained", "save", "with_exits"]


class LowRank(nn.Module):
    """Adds B A to a weight; zero at first."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


def pretrained(folder: Path, n_classes: int) -> tuple[BertForSequenceClassification, Any]:
    """Return a published encoder with a new classifier, and its tokenizer."""
    network = BertForSequenceClassification.from_pretrained(
        folder, num_labels=n_classes, dtype=torch.float32
    )
    return network, AutoTokenizer.from_pretrained(folder)


def add_update(network: BertForSequenceClassification, rank: int) -> None:
    """Freeze the weights of a network's blocks and embeddings, and add an update to train.

    Biases, norms, the pooler and the classifier are trained whole. With rank 0, so is everything
    but the word embeddings.
    """
    network.bert.embeddings.word_embeddings.requires_grad_(False)
    if not rank:
        return
    network.bert.embeddings.requires_grad_(False)
    for layer in network.bert.encoder.modules():
        if isinstance(layer, nn.Linear):
            update = LowRank(*layer.weight.shape, rank).to(layer.weight.device)
            layer.weight.requires_grad_(False)
            parametrize.register_parametrization(layer, "weight", update)


def round_trained(module: nn.Module) -> None:
    """Round the trained weights to half precision, in which they are stored."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.copy_(parameter.half())


def merge_update(network: nn.Module) -> nn.Module:
    """Turn the updated weights into plain ones; the network has the modules it came with."""
    for layer in list(network.modules()):
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
    return network.requires_grad_(False)


def with_exits(network: nn.Module, tokenizer: Any, model: dict[str, Any]) -> Any:
    """Return a network with heads after the layers of a recipe, counted from 1."""
    at = [f"bert.encoder.layer.{layer - 1}" for layer in model["exits"]]
    example = encoded(tokenizer, ["Where is my card?", "Top up"], 64)
    device = next(network.parameters()).device
    example = {name: value.to(device) for name, value in example.items()}
    return attach_heads(network, at, example, heads=model["heads"])


def save(exits: Any, file: Path) -> None:
    """Write the trained weights of a network and its heads, before `merge_update`."""
    trained = {name: value for name, value in exits.named_parameters() if value.requires_grad}
    save_file({n: t.detach().half().cpu().contiguous() for n, t in trained.items()}, file)


def load(folder: Path, file: Path, recipe: dict[str, Any], n_classes: int) -> tuple[Any, Any]:
    """Return the network of a recipe with its exits, in evaluation mode, and its tokenizer.

    Parameters
    ----------
    folder : path
        The published encoder.
    file : path
        The weights that `save` wrote.
    """
    network, tokenizer = pretrained(folder, n_classes)
    add_update(network, recipe["model"]["rank"])
    stored = load_file(file)
    own = {name.removeprefix("network."): t for name, t in stored.items() if "heads." not in name}
    heads = {name.removeprefix("heads."): t for name, t in stored.items() if "heads." in name}
    missing, unknown = network.load_state_dict(
        {name: value.float() for name, value in own.items()}, strict=False
    )
    trained = {name for name, value in network.named_parameters() if value.requires_grad}
    if unknown or trained & set(missing):
        raise ValueError(f"{file} does not hold the weights of {recipe['name']}.")
    merge_update(network)
    exits = with_exits(network.eval(), tokenizer, recipe["model"])
    exits.heads.load_state_dict({name: value.float() for name, value in heads.items()})
    return exits.eval(), tokenizer
