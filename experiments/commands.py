"""What the training commands share: their options, recipes, and reports."""

import argparse
import json
import time
import tomllib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["device", "options", "recipe_of", "report", "save"]


def device() -> str:
    """Return where to train."""
    torch.backends.cudnn.benchmark = True
    return "cuda" if torch.cuda.is_available() else "cpu"


def options(description: str | None, here: Path) -> argparse.ArgumentParser:
    """Return the options of all trainings; an experiment adds its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("recipe", help="name of a file in recipes/")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=here / "results")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seconds", type=float, help="train for so long, and not for epochs")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def recipe_of(arguments: argparse.Namespace, here: Path) -> dict[str, Any]:
    """Return the recipe that was named, with its name and the epochs that were asked for."""
    recipe = tomllib.loads((here / "recipes" / f"{arguments.recipe}.toml").read_text())
    recipe["name"] = arguments.recipe
    recipe["training"]["epochs"] = arguments.epochs or recipe["training"]["epochs"]
    return recipe


def report(recipe: dict[str, Any], seed: int, began: float, model: nn.Module) -> dict[str, Any]:
    """Return what is to be known of a training that began at a time of `time.perf_counter`."""
    return {
        "recipe": recipe,
        "seed": seed,
        "seconds": round(time.perf_counter() - began),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def save(model: nn.Module, told: dict[str, Any], folder: Path, half: bool) -> None:
    """Write the weights, in half precision if wanted, and the report beside them."""
    print(json.dumps(told), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.contiguous().cpu() for name, t in model.state_dict().items()}
    if half:
        weights = {n: t.half() if t.is_floating_point() else t for n, t in weights.items()}
    name = told["recipe"]["name"]
    save_file(weights, folder / f"{name}.safetensors")
    (folder / f"{name}.json").write_text(json.dumps(told, indent=2) + "\n")
