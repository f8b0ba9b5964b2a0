"""Networks to generate with, and a plain retelling of how images come about."""

import numpy as np
import torch
from torch import nn

from swiftsure.diffusion.lpips import LAYERS
from swiftsure.diffusion.noise import sample_noise
from swiftsure.exits import exit_indices
from swiftsure.torch import Scored, Staged
from swiftsure_zoo import UViT

__all__ = [
    "TINY",
    "Exact",
    "Sure",
    "confidence_levels",
    "network",
    "random_weights",
    "reference_sample",
]

TINY = {"image_size": 8, "patch_size": 2, "width": 16, "depth": 4, "n_heads": 2, "mlp_ratio": 2}


def network(seed=0, **options):
    """A tiny network with weights large enough to tell images apart, ready to run."""
    torch.manual_seed(seed)
    model = UViT(**{**TINY, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
        # Weak estimates and strong doubts: images stay small, and exits differ.
        model.decoder_pred.weight.mul_(0.2)
        model.UEM[2].weight.mul_(3)
    return model.eval()


def confidence_levels(fast, n=8, **options):
    """Thresholds among a network's own confidences, safest first."""
    seen = fast.confidences(n, **options)
    return np.unique(np.quantile(seen, [0.99, 0.9, 0.7, 0.4]).astype(np.float32))[::-1].tolist()


class Sure(Staged):
    """Gives the same noise at every exit: early exits change what is run, and no image."""

    image_shape = (3, 4, 4)
    n_exits = 4

    def __init__(self, confidence=0.5):
        super().__init__()
        self.confidence = confidence
        self.weight = nn.Parameter(torch.tensor(0.5))
        self.advanced = []

    def begin(self, batch):
        return {"images": batch[0], "times": batch[1]}

    def advance(self, exit_index, state):
        self.advanced.append((exit_index, len(state["images"])))
        return state

    def head(self, exit_index, state):
        images = state["images"]
        sure = torch.full((len(images),), float(self.confidence))
        return Scored(self.weight * images, sure)


class Exact(Staged):
    """Knows the few images that there are, and so the mean noise in any image, exactly."""

    n_exits = 2

    def __init__(self, images, schedule):
        super().__init__()
        self.images, self.schedule = images, schedule
        self.image_shape = tuple(images.shape[1:])

    def begin(self, batch):
        return {"images": batch[0], "times": batch[1]}

    def advance(self, exit_index, state):
        return state

    def head(self, exit_index, state):
        x = state["images"].double()
        times = state["times"] * (self.schedule.n_times / self.schedule.time_scale)
        share = torch.from_numpy(self.schedule.signal)[times.round().long()][:, None]
        known = self.images.double().flatten(1)
        far = (x.flatten(1)[:, None] - share[:, None].sqrt() * known).square().sum(dim=2)
        clean = (-far / (2 * (1 - share))).softmax(dim=1) @ known
        noise = (x.flatten(1) - share.sqrt() * clean) / (1 - share).sqrt()
        return Scored(noise.view(x.shape).float(), torch.full((len(x),), 0.5))


def reference_sample(
    model,
    sampler,
    sample,
    level,
    *,
    seed=0,
    label=None,
    strict=False,
    min_exit=0,
    look_at=None,
    look_steps=None,
):
    """One image by itself, every exit run at every step: (image, exits, confidences)."""
    number = torch.tensor([sample])
    images = sample_noise(seed, number, sampler.schedule.n_times, model.image_shape)
    taken, looked = [], []
    with torch.no_grad():
        for k, time in enumerate(sampler.times):
            scale = sampler.schedule.time_scale / sampler.schedule.n_times
            batch = [images, torch.tensor([time * scale], dtype=torch.float32)]
            if label is not None:
                batch.append(torch.tensor([label]))
            state, outputs = model.begin(tuple(batch)), []
            for e in range(model.n_exits):
                state = model.advance(e, state)
                outputs.append(model.head(e, state))
            scores = torch.stack([each.confidence for each in outputs[:-1]], dim=1).numpy()
            levels = np.full(scores.shape[1], np.inf if level is None else level)
            if look_at is not None:
                levels[[k for k in range(len(levels)) if k not in look_at]] = np.inf
            if look_steps is not None and k >= look_steps:
                levels[:] = np.inf
            exit_index = int(exit_indices(scores, levels, strict=strict, min_exit=min_exit)[0])
            fresh = None
            if sampler.draws(k):
                fresh = sample_noise(seed, number, time, model.image_shape)
            images = sampler.step(k, images, outputs[exit_index].output, fresh)
            taken.append(exit_index)
            looked.append(scores[0])
    return images.clamp(-1, 1)[0], taken, np.asarray(looked)


def random_weights(style="lpips", seed=0):
    """AlexNet and linear layers of random numbers, under the names of a style."""
    random = torch.Generator().manual_seed(seed)
    found = {}
    for k, layer in enumerate(LAYERS):
        kernel = torch.randn(layer.shape, generator=random) * 0.05
        bias = torch.randn(layer.shape[:1], generator=random) * 0.05
        linear = torch.rand(1, layer.shape[0], 1, 1, generator=random) * 2
        if style == "jax":
            found |= {
                f"AlexNet_0.Conv_{k}.kernel": kernel.permute(2, 3, 1, 0).contiguous(),
                f"AlexNet_0.Conv_{k}.bias": bias,
                f"NetLinLayer_{k}.Conv_0.kernel": linear.permute(2, 3, 1, 0).contiguous(),
            }
        else:
            where = f"net.slice{k + 1}" if style == "lpips" else "features"
            own = f"lin{k}" if style == "lpips" else f"lins.{k}"
            found |= {
                f"{where}.{layer.number}.weight": kernel,
                f"{where}.{layer.number}.bias": bias,
                f"{own}.model.1.weight": linear,
            }
    return found
