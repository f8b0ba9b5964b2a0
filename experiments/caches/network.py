"""The DiT of this experiment: its layout, its pipeline and its weights in seven bits.

A `DiTTransformer2DModel` of diffusers on pixels. Its blocks share one embedder of time and class,
as the published DiT's do, and the labels run to 1000, since `DiTPipeline` takes 1000 for "no
class". `Pixels` stands in for the autoencoder that the pipeline expects.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers import (
    ConfigMixin,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    ModelMixin,
)
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn

__all__ = ["NO_CLASS", "Pixels", "dit", "load_weights", "pipeline", "save_weights"]

NO_CLASS = 1000
"""The label that `DiTPipeline` gives to rows without a class."""

LEVELS = 50
"""Weights are stored as whole numbers from -50 to 50, with one scale per row."""


class Pixels(ModelMixin, ConfigMixin):
    """An autoencoder that changes nothing: the transformer works on pixels."""

    @register_to_config
    def __init__(self, scaling_factor: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("place", torch.zeros(1), persistent=False)  # its device and dtype

    @property
    def device(self) -> torch.device:
        """Where the pipeline is."""
        return self.place.device

    @property
    def dtype(self) -> torch.dtype:
        """The pipeline's dtype."""
        return self.place.dtype

    def decode(self, latents: Tensor) -> Any:
        """Return the images."""
        return SimpleNamespace(sample=latents)


def dit(recipe: dict[str, Any]) -> DiTTransformer2DModel:
    """Return the network of a recipe, with random weights, in evaluation mode.

    It is trained in evaluation mode too: in training mode each block would drop labels on its own.
    """
    model = DiTTransformer2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        num_embeds_ada_norm=NO_CLASS,
        **recipe["model"],
    )
    for block in model.transformer_blocks:
        block.norm1.emb = model.transformer_blocks[0].norm1.emb
    return model.eval()


def scheduler(recipe: dict[str, Any]) -> DDIMScheduler:
    """Return the noise schedule that the network is trained on, and its sampler."""
    return DDIMScheduler(**recipe["schedule"])


def pipeline(model: DiTTransformer2DModel, recipe: dict[str, Any]) -> DiTPipeline:
    """Return diffusers' pipeline for a network."""
    made = DiTPipeline(model, Pixels(), scheduler(recipe))
    made.set_progress_bar_config(disable=True)
    return made


def save_weights(model: nn.Module, file: Path) -> None:
    """Write weights as whole numbers with one scale per row; vectors in half precision."""
    arrays: dict[str, np.ndarray] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().float().cpu().numpy()
        if weight.ndim == 1:
            arrays[name] = weight.astype(np.float16)
            continue
        rows = weight.reshape(len(weight), -1)
        scales = (np.abs(rows).max(axis=1) / LEVELS).astype(np.float32)
        whole = np.rint(rows / np.maximum(scales, 1e-12)[:, None])
        arrays[name] = whole.reshape(weight.shape).astype(np.int8)
        arrays[f"{name}.scale"] = scales
    np.savez_compressed(file, **arrays)


def load_weights(model: DiTTransformer2DModel, file: Path) -> DiTTransformer2DModel:
    """Load what `save_weights` wrote; the rounded network is the one that is certified."""
    with np.load(file) as arrays, torch.no_grad():
        for name, parameter in model.named_parameters():
            weight = arrays[name].astype(np.float32)
            if f"{name}.scale" in arrays:
                scales = arrays[f"{name}.scale"]
                weight *= scales.reshape(-1, *[1] * (weight.ndim - 1))
            parameter.copy_(torch.from_numpy(weight))
    return model.eval()
