"""Options, recipes, weights and reports that the commands of experiments share."""

import argparse
import json
import time
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = [
    "device",
    "load_weights",
    "options",
    "recipe_of",
    "report",
    "save",
    "stored_weights",
    "write_report",
]

Model = TypeVar("Model", bound=nn.Module)


def device() -> str:
    """Return "cuda" if there is a GPU, else "cpu"."""
    torch.backends.cudnn.benchmark = True
    return "cuda" if torch.cuda.is_available() else "cpu"


def options(description: str | None, here: Path, unit: str = "epochs") -> argparse.ArgumentParser:
    """Return the options of all trainings, which last for some `unit`; experiments add theirs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("recipe", help="name of a file in recipes/")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=here / "results")
    parser.add_argument(f"--{unit}", type=int)
    parser.add_argument("--seconds", type=float, help=f"train for this long instead of {unit}")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def recipe_of(arguments: argparse.Namespace, here: Path, unit: str = "epochs") -> dict[str, Any]:
    """Return the chosen recipe with its name and, if given, another number of epochs."""
    recipe = tomllib.loads((here / "recipes" / f"{arguments.recipe}.toml").read_text())
    recipe["name"] = arguments.recipe
    recipe["training"][unit] = getattr(arguments, unit) or recipe["training"][unit]
    return recipe


def report(
    recipe: dict[str, Any], seed: int, began: float, model: nn.Module, **more: Any
) -> dict[str, Any]:
    """Return the report of a training that began at a time of `time.perf_counter`."""
    return {
        "recipe": recipe,
        "seed": seed,
        "seconds": round(time.perf_counter() - began),
        **more,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def stored_weights(model: nn.Module, half: bool) -> dict[str, Tensor]:
    """Return a model's weights for a file, in half precision if `half`."""
    weights = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    return {n: t.half() if half and t.is_floating_point() else t for n, t in weights.items()}


def load_weights(model: Model, file: Path) -> Model:
    """Load weights of any precision into a model; return it in evaluation mode."""
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    model.load_state_dict({name: t.to(dtypes[name]) for name, t in load_file(file).items()})
    return model.eval()


def save(model: nn.Module, report: dict[str, Any], folder: Path, half: bool) -> None:
    """Write the weights, in half precision if `half`, and the report beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    name = report["recipe"]["name"]
    save_file(stored_weights(model, half), folder / f"{name}.safetensors")
    write_report(report, folder)


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Print a report and write it as NAME.json."""
    print(json.dumps(report), flush=True)
    (folder / f"{report['recipe']['name']}.json").write_text(json.dumps(report, indent=2) + "\n")
