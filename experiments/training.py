"""The training loop: optimizer, schedule, CUDA graphs of a step, averaged weights.

A recipe's table [training] is its plan: `epochs`, `batch`, `lr`, `weight_decay`, `averaged_epochs`
and, optionally, `optimizer` ("adamw"; SGD by default), `relative` (rates) and `clip`.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

__all__ = [
    "Recording",
    "Step",
    "batches",
    "fit",
    "make_optimizer",
    "one_cycle",
    "recorded_step",
    "refresh_statistics",
    "root_mean_square",
]

Step = Callable[[Tensor, Tensor], Tensor]
"""Learns from a batch of inputs and targets, and returns its loss."""

LossOf = Callable[[list[Tensor], Tensor], Tensor]
"""From the outputs of all exits, and targets."""


def batches(n: int, size: int, random: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of whole batches, in random order."""
    order = torch.randperm(n, device=random.device, generator=random)
    yield from order[: n - n % size].split(size)


def make_optimizer(model: nn.Module, plan: dict[str, Any]) -> torch.optim.Optimizer:
    """Return SGD, or AdamW if the plan says so; biases and norms are not decayed.

    With `relative`, parameters of similar initial size form a group, and the learning rate is
    relative to that size, as in Adafactor: T5's weights start between 0.005 and 1, and a deep T5
    learns little with one rate for all.
    """
    relative = plan.get("relative", False)
    groups: dict[tuple[bool, int], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        size = round(math.log2(root_mean_square([parameter]))) if relative else 0
        groups.setdefault((parameter.ndim > 1, size), []).append(parameter)
    options = [
        {
            "params": parameters,
            "weight_decay": plan["weight_decay"] if decays else 0.0,
            "relative": relative,
        }
        for (decays, _), parameters in groups.items()
    ]
    if plan.get("optimizer") == "adamw":
        return torch.optim.AdamW(options, lr=plan["lr"], fused=True)
    # L2W-DEN assumes plain SGD in its trial update.
    return torch.optim.SGD(options, lr=plan["lr"], momentum=0.9, nesterov="l2w" not in plan)


@torch.no_grad()
def root_mean_square(parameters: list[nn.Parameter]) -> float:
    """Return the root mean square of weights, at least 0.001 so that zeros can grow."""
    squares = torch.stack([parameter.float().square().sum() for parameter in parameters]).sum()
    return max(1e-3, math.sqrt(float(squares) / sum(p.numel() for p in parameters)))


def recorded_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: LossOf,
    clip: float | None = None,
) -> Step:
    """Return the step that lowers a loss of all outputs, with gradients clipped to `clip`.

    On a GPU, forward and backward are captured once per input shape and replayed: such a network
    launches hundreds of small kernels.
    """

    def learn(inputs: Tensor, targets: Tensor) -> Tensor:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        with torch.autocast(inputs.device.type, torch.bfloat16, cache_enabled=False):
            outputs = model(inputs)
        loss = loss_of([output.float() for output in outputs], targets)
        loss.backward()
        return loss.detach()

    recordings: dict[torch.Size, Recording] = {}

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        if not inputs.is_cuda:
            loss = learn(inputs, targets)
        else:
            if inputs.shape not in recordings:
                # The first graph allocates the gradients that all of them write to.
                makes = [] if recordings else list(model.parameters())
                recordings[inputs.shape] = Recording(learn, (inputs, targets), makes)
            loss = recordings[inputs.shape].replay((inputs, targets))
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return step


class Recording:
    """A CUDA graph of a training step for batches of one shape.

    Parameters
    ----------
    learn : callable
        Maps the parts of a batch to its loss, or losses, and writes gradients.
    batch : tensors
        None for missing parts.
    makes : list of parameters
        Parameters whose gradients are allocated in this graph.
    """

    def __init__(
        self,
        learn: Callable[..., Tensor],
        batch: Sequence[Tensor | None],
        makes: list[nn.Parameter],
    ) -> None:
        self._held = [None if part is None else part.clone() for part in batch]
        self._graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                learn(*self._held)
        torch.cuda.current_stream().wait_stream(side)
        for parameter in makes:
            parameter.grad = None
        with torch.cuda.graph(self._graph):
            self._result = learn(*self._held)

    def replay(self, batch: Sequence[Tensor | None]) -> Tensor:
        """Return what `learn` returns for another batch."""
        for held, new in zip(self._held, batch, strict=True):
            if held is not None:
                held.copy_(new)
        self._graph.replay()
        return self._result


def one_cycle(share: float, warm_up: float = 0.15) -> float:
    """Return the learning rate at a share of the training, relative to its peak."""
    if share < warm_up:
        return 0.04 + 0.96 * (1 - math.cos(math.pi * share / warm_up)) / 2
    return (1 + math.cos(math.pi * (share - warm_up) / (1 - warm_up))) / 2


def fit(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: dict[str, Any],
    step: Step,
    epoch: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    per_epoch: int,
    seconds: float | None = None,
) -> nn.Module:
    """Train a model and return it with weights averaged over the last steps.

    Parameters
    ----------
    epoch : callable
        Returns the batches of one epoch, `per_epoch` of them.
    seconds : float, optional
        Train for this long, in whole epochs, and set the plan's `epochs` to their number.
    """
    decay = 1 - 1 / (plan["averaged_epochs"] * per_epoch)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    steps = plan["epochs"] * per_epoch
    began = time.perf_counter()
    for number in count(1):
        total = torch.zeros((), device=next(model.parameters()).device)
        sizes = [
            root_mean_square(group["params"]) if group["relative"] else 1.0
            for group in optimizer.param_groups
        ]
        for i, (inputs, targets) in enumerate(epoch()):
            share = ((number - 1) * per_epoch + i) / steps
            if seconds is not None:
                share = min(1.0, (time.perf_counter() - began) / seconds)
            for group, size in zip(optimizer.param_groups, sizes, strict=True):
                group["lr"] = plan["lr"] * one_cycle(share) * size
            total += step(inputs, targets)
            average.update_parameters(model)
        loss, took = float(total) / per_epoch, time.perf_counter() - began
        if not math.isfinite(loss):
            raise FloatingPointError(f"{name}: the loss of epoch {number} is {loss}")
        last = number == plan["epochs"] if seconds is None else took >= seconds
        if number <= 2 or number % 5 == 0 or last:
            print(f"{name} epoch {number}: loss {loss:.3f}, {took:.0f} s", flush=True)
        if last:
            plan["epochs"] = number
            break
    return average.module


@torch.no_grad()
def refresh_statistics(model: nn.Module, inputs: Iterable[Tensor]) -> None:
    """Recompute the statistics of batch normalisation, which lag behind averaged weights."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d)
    norms = [layer for layer in model.modules() if isinstance(layer, kinds)]
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # every batch counts equally
    model.train()
    for batch in inputs:
        model(batch)
    model.eval()
