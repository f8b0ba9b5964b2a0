"""Temperature scaling per exit, which corrects most of the early exits' overconfidence."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from swiftsure.torch.batches import Batch, moved
from swiftsure.torch.losses import class_numbers, stacked_logits
from swiftsure.torch.modes import model_device, refuse_training
from swiftsure.torch.results import refuse_broken
from swiftsure.torch.scoring import warn_of_probabilities
from swiftsure.torch.staged import StagedModel, all_outputs, refuse_unstaged

__all__ = ["fit_temperatures"]


def fit_temperatures(
    model: StagedModel, loader: Iterable[Any], *, limits: tuple[float, float] = (0.05, 20.0)
) -> tuple[float, ...]:
    """Return, for each exit, the temperature that maximises the likelihood of the labels.

    The data must be disjoint from the calibration data, or the guarantee is void; part of the
    validation data will do. Pass the result to `collect(temperatures=...)`: the policy stores it,
    and `EarlyExit` applies it.

    Parameters
    ----------
    model : StagedModel
        A classifier in evaluation mode.
    loader : iterable
        Yields batches with labels, as for `collect`; negative labels are missing. Use a few
        thousand samples: their logits are held in memory.
    limits : (low, high)
        Range of the search.

    Returns
    -------
    temperatures : (n_exits,)
        Divisors of the logits.
    """
    refuse_unstaged(model, selects=False)
    refuse_training(model)
    low, high = limits
    if not 0 < low < high < np.inf:
        raise ValueError(
            f"`limits` must be (low, high) with 0 < low < high, but got ({low}, {high})."
        )
    device, done = model_device(model), 0
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    with torch.inference_mode():
        for given in loader:
            batch = Batch.of(given)
            if batch.labels is None:
                raise ValueError(
                    "`loader` must give labels, to which temperatures are fitted, but gave none."
                )
            found = stacked_logits(all_outputs(model, moved(batch.inputs, device))).double().cpu()
            if not done:
                for k in range(model.n_exits):
                    warn_of_probabilities(found[:, k])
            for k in range(model.n_exits):
                refuse_broken(found[:, k], k, done + torch.arange(len(found)))
            truth = class_numbers(torch.as_tensor(batch.labels).cpu(), len(found), found.shape[2])
            _refuse_masked_labels(found, truth, done)
            done += len(found)
            logits.append(found[truth >= 0])
            labels.append(truth[truth >= 0])
    if not sum(map(len, labels)):
        raise ValueError("`loader` must give at least one sample with a label, but gave none.")
    values, targets = torch.cat(logits), torch.cat(labels)
    return tuple(_fit(values[:, k], targets, low, high) for k in range(model.n_exits))


def _refuse_masked_labels(logits: Tensor, labels: Tensor, done: int) -> None:
    """Raise if an exit rules out a sample's label: no temperature makes that label likelier."""
    index = labels.clamp(min=0)[:, None, None].expand(-1, logits.shape[1], 1)
    masked = logits.gather(2, index)[..., 0].isinf() & (labels >= 0)[:, None]
    if masked.any():
        row, exit_index = masked.nonzero()[0].tolist()
        raise ValueError(
            f"`loader`: exit {exit_index + 1} gives the label of sample {done + row} a logit of"
            " −inf, so no temperature fits it: leave the sample out, or do not mask its class."
        )


def _fit(logits: Tensor, labels: Tensor, low: float, high: float) -> float:
    """Return the temperature with the smallest negative log-likelihood, searched on a log scale."""

    def nll(log_temperature: float) -> float:
        scaled = logits / float(np.exp(log_temperature))
        return float(nn.functional.cross_entropy(scaled, labels))

    bounds = (np.log(low), np.log(high))
    found = minimize_scalar(nll, bounds=bounds, method="bounded", options={"xatol": 1e-4})
    return float(np.exp(found.x))
