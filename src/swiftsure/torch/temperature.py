"""Per-exit temperature scaling: early exits are overconfident; a number each mends most of it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from swiftsure.torch.staged import StagedModel, all_outputs

__all__ = ["fit_temperatures"]


def fit_temperatures(
    model: StagedModel, loader: Iterable[Any], *, limits: tuple[float, float] = (0.05, 20.0)
) -> tuple[float, ...]:
    """Return the temperature of each exit that makes its probabilities most likely.

    The data must be disjoint from the calibration's, or the guarantee is void; a part of the
    validation data will do. Pass the result to `collect(temperatures=...)`: the policy carries it,
    and `EarlyExit` applies it.

    Parameters
    ----------
    model : StagedModel
        A classifier in evaluation mode.
    loader : iterable of (inputs, labels)
        A few thousand samples; their logits are held in memory.
    limits : (low, high)
        Where to look.

    Returns
    -------
    temperatures : (n_exits,)
        To divide logits by.
    """
    if isinstance(model, nn.Module) and model.training:
        raise ValueError("`model` must be in evaluation mode: call model.eval() first.")
    logits: list[list[Tensor]] = [[] for _ in range(model.n_exits)]
    labels: list[Tensor] = []
    device = None
    if isinstance(model, nn.Module):
        device = next((p.device for p in model.parameters()), None)
    with torch.inference_mode():
        for inputs, target in loader:
            outputs = all_outputs(model, inputs.to(device) if device else inputs)
            for kept, output in zip(logits, outputs, strict=True):
                kept.append(output.double().cpu())
            labels.append(target.cpu())
    if not labels:
        raise ValueError("`loader` must give at least one batch.")
    target = torch.cat(labels)
    return tuple(_fit(torch.cat(exit_logits), target, limits) for exit_logits in logits)


def _fit(logits: Tensor, labels: Tensor, limits: tuple[float, float]) -> float:
    """Minimise the negative log-likelihood over the logarithm of the temperature."""

    def nll(log_temperature: float) -> float:
        scaled = logits / float(np.exp(log_temperature))
        return float(nn.functional.cross_entropy(scaled, labels))

    low, high = np.log(limits[0]), np.log(limits[1])
    found = minimize_scalar(nll, bounds=(low, high), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))
