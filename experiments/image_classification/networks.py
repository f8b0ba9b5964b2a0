"""Networks of recipes: build them, load trained ones, and prepare their inputs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import swiftsure_zoo as zoo
from experiments.commands import load_weights

__all__ = ["build", "load", "normaliser", "resized"]


def build(recipe: dict[str, Any]) -> nn.Module:
    """Return the untrained network of a recipe."""
    arguments = dict(recipe["model"])
    return getattr(zoo, arguments.pop("name"))(**arguments)


def load(folder: Path, name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a trained network, in single precision, and its report."""
    if not (folder / f"{name}.json").exists():
        raise FileNotFoundError(f"{folder} has no {name}.json: train {name} first")
    report = json.loads((folder / f"{name}.json").read_text())
    return load_weights(build(report["recipe"]), folder / f"{name}.safetensors"), report


def resized(images: Tensor, recipe: dict[str, Any]) -> Tensor:
    """Return the images at the size that the network takes."""
    size = recipe["data"].get("size", images.shape[-1])
    if size == images.shape[-1]:
        return images
    return functional.interpolate(images, size=(size, size), mode="bilinear")


def normaliser(recipe: dict[str, Any], device: torch.device | str) -> Callable[[Tensor], Tensor]:
    """Return the function from images of bytes to normalised inputs."""
    mean, std = (
        255 * torch.tensor(recipe["data"][key], device=device).view(1, 3, 1, 1)
        for key in ("mean", "std")
    )
    return lambda images: (images.float() - mean) / std
