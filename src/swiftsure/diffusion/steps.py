"""One step of denoising: every image leaves the network where it is sure enough."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.diffusion.rules import ExitRule
from swiftsure.torch.costs import exit_flops
from swiftsure.torch.scoring import MODEL_SCORE, confidence
from swiftsure.torch.staged import StagedModel, plain_output

__all__ = ["Denoised", "StepCosts", "denoise"]


class Denoised(NamedTuple):
    """What a step found, in the order of the batch.

    Attributes
    ----------
    noise : (n, channels, height, width)
    exits : (n,)
        0-based.
    stayed : (n,)
        Largest confidence of the exits that were looked at and passed; -inf if there was none.
    left : (n,)
        The confidence by which an image left; inf at the last exit, which asks for none.
    """

    noise: Tensor
    exits: Tensor
    stayed: Tensor
    left: Tensor


def denoise(
    model: StagedModel, batch: tuple[Tensor, ...], levels: Tensor, rule: ExitRule, looks: bool
) -> Denoised:
    """Run the network on a batch; images that have left are dropped, and the rest goes on.

    Parameters
    ----------
    batch
        (images, times) or (images, times, labels), as the model takes it.
    levels : (n,)
        Each image's own threshold.
    looks : bool
        Whether any level can be reached; if none can, no early head runs.
    """
    images, last = batch[0], model.n_exits - 1
    n, device = len(images), images.device
    found = Denoised(
        torch.empty_like(images),
        torch.full((n,), last, device=device),
        torch.full((n,), -torch.inf, device=device),
        torch.full((n,), torch.inf, device=device),
    )
    here, passed = torch.arange(n, device=device), found.stayed.clone()
    state = model.begin(batch)
    for k in range(last):
        state = model.advance(k, state)
        if not looks or k < rule.min_exit:
            continue
        output = model.head(k, state)
        scores = confidence(MODEL_SCORE, output)
        # NaN counts as leaving: it must not run on unseen, and who leaves by it is refused.
        staying = scores <= levels if rule.strict else scores < levels
        # The one synchronisation of an exit: how many leave decides what shapes follow.
        n_stay = int(staying.sum())
        if n_stay < len(here):
            order = staying.logical_not().byte().argsort(stable=True)  # who stays first, in order
            stay, gone = order[:n_stay], order[n_stay:]
            out = here[gone]
            found.noise[out] = plain_output(output)[gone].to(images.dtype)
            found.exits[out] = k
            found.stayed[out] = passed[gone]
            found.left[out] = scores[gone]
            if n_stay == 0:
                return found
            here, levels, passed, scores = (each[stay] for each in (here, levels, passed, scores))
            state = model.select(state, stay)
        passed = torch.maximum(passed, scores)
    noise = plain_output(model.head(last, model.advance(last, state))).to(images.dtype)
    found.stayed[here] = passed
    if len(here) == n:
        return found._replace(noise=noise)
    found.noise[here] = noise
    return found


class StepCosts(NamedTuple):
    """What one step of one image costs, by the exit it takes, (n_exits,).

    Attributes
    ----------
    layers
        Blocks that run.
    flops
        Where a threshold can be reached: blocks, and the heads that were looked at.
    full_flops : float
        Of a step that never looks: all blocks, and the last head alone.
    """

    layers: NDArray[np.float64]
    flops: NDArray[np.float64]
    full_flops: float

    @classmethod
    def of(cls, model: StagedModel, batch: tuple[Tensor, ...], min_exit: int) -> "StepCosts":
        """Count, on a batch of one image or more."""
        stages = exit_flops(_Headless(model), batch)
        heads = np.diff(exit_flops(model, batch) - stages, prepend=0.0)
        looked = np.where(np.arange(model.n_exits) < min_exit, 0.0, heads)
        n_blocks = getattr(model, "n_blocks", model.n_exits)
        layers = np.minimum(np.arange(1, model.n_exits + 1), n_blocks).astype(np.float64)
        return cls(layers, stages + np.cumsum(looked), float(stages[-1] + heads[-1]))


class _Headless:
    """A staged model that answers nothing, to count what its stages alone cost."""

    def __init__(self, model: StagedModel) -> None:
        self.n_exits = model.n_exits
        self.begin, self.advance, self.select = model.begin, model.advance, model.select

    def head(self, exit_index: int, state: Any) -> None:
        """Give nothing."""
