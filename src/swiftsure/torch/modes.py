"""Helpers for eval mode, autocast and devices."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["evaluating", "model_device", "needs_gpu", "refuse_training", "uncompiled"]


def refuse_training(model: Any) -> None:
    """Raise if a model or any part of it is in training mode."""
    if isinstance(model, nn.Module) and any(part.training for part in model.modules()):
        part = next(name for name, part in model.named_modules() if part.training)
        found = f"its part {part!r}" if part else "it"
        raise ValueError(
            f"`model` must be in evaluation mode, but {found} is in training mode: call"
            " model.eval() first."
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, then restore the mode of every part."""
    modes = [(part, part.training) for part in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Run a model without its compiled parts, which would be compiled again for trial inputs."""
    if all(getattr(part, "_compiled_call_impl", None) is None for part in model.modules()):
        yield  # without importing the compiler
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def model_device(model: Any) -> torch.device | None:
    """Return the device of a model's first parameter; None for a model without any."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return None if parameter is None else parameter.device


def needs_gpu(device: torch.device | None) -> bool:
    """Whether each Ray actor needs a GPU for a model on this device."""
    if device is None or device.type != "cuda":
        return False
    if device.index:
        raise ValueError(
            f"`model` must be on the CPU or on cuda:0 for engine='ray', but is on {device}: each"
            " worker has a GPU of its own, which it knows as cuda:0."
        )
    return True
