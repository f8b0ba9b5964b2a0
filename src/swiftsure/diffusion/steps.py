"""One step of denoising: every image leaves the network where it is sure enough.

A network may say how sure an exit is without its output, by `confidence_at(exit_index, state)`, and
give the output alone, of all rows or some, by `estimate(exit_index, state, rows=None)`, as `UViT`
does. It has both or neither. With them an exit's noise is estimated for those alone who leave
there; without, `head` gives noise and confidence at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.diffusion.rules import ExitRule
from swiftsure.torch.costs import exit_flops
from swiftsure.torch.scoring import MODEL_SCORE, confidence
from swiftsure.torch.staged import Scored, StagedModel, plain_output

__all__ = ["Denoised", "StepCosts", "denoise", "estimated", "looked"]


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
        scores, output = looked(model, k, state)
        # NaN counts as leaving: it must not run on unseen, and who leaves by it is refused.
        staying = scores <= levels if rule.strict else scores < levels
        # The one synchronisation of an exit: how many leave decides what shapes follow.
        n_stay = int(staying.sum())
        if n_stay < len(here):
            order = staying.logical_not().byte().argsort(stable=True)  # who stays first, in order
            stay, gone = order[:n_stay], order[n_stay:]
            out = here[gone]
            noise = output[gone] if output is not None else estimated(model, k, state, gone)
            found.noise[out] = noise.to(images.dtype)
            found.exits[out] = k
            found.stayed[out] = passed[gone]
            found.left[out] = scores[gone]
            if n_stay == 0:
                return found
            here, levels, passed, scores = (each[stay] for each in (here, levels, passed, scores))
            state = model.select(state, stay)
        passed = torch.maximum(passed, scores)
    noise = estimated(model, last, model.advance(last, state)).to(images.dtype)
    found.stayed[here] = passed
    if len(here) == n:
        return found._replace(noise=noise)
    found.noise[here] = noise
    return found


def looked(model: StagedModel, exit_index: int, state: Any) -> tuple[Tensor, Any]:
    """Return how sure an exit is, (n,), and its output if that came along."""
    if hasattr(model, "confidence_at"):
        alone = Scored(None, model.confidence_at(exit_index, state))
        return confidence(MODEL_SCORE, alone), None
    output = model.head(exit_index, state)
    return confidence(MODEL_SCORE, output), plain_output(output)


def estimated(model: StagedModel, exit_index: int, state: Any, rows: Tensor | None = None) -> Any:
    """Return the output of an exit, for all rows or some."""
    if hasattr(model, "confidence_at"):
        return model.estimate(exit_index, state, rows)  # type: ignore[attr-defined]
    output = plain_output(model.head(exit_index, state))
    return output if rows is None else output[rows]


class StepCosts(NamedTuple):
    """What one step of one image costs, by the exit it takes, (n_exits,).

    Attributes
    ----------
    layers
        Blocks that run.
    flops
        Where a threshold can be reached: blocks, looks at exits, and the estimate at the one taken.
    full_flops : float
        Of a step that never looks: all blocks, and the last head alone.
    """

    layers: NDArray[np.float64]
    flops: NDArray[np.float64]
    full_flops: float

    @classmethod
    def of(cls, model: StagedModel, batch: tuple[Tensor, ...], min_exit: int) -> "StepCosts":
        """Count, on a batch of one image or more."""
        stages, looks, answers = (
            exit_flops(_With(model, head), batch)
            for head in (lambda *_: None, partial(looked, model), partial(estimated, model))
        )
        looks, answers = (np.diff(each - stages, prepend=0.0) for each in (looks, answers))
        exits = np.arange(model.n_exits)
        last = exits == model.n_exits - 1
        if not hasattr(model, "confidence_at"):
            answers = np.where(last, answers, 0.0)  # a look has the answer already
        looks = np.where(last | (exits < min_exit), 0.0, looks)
        n_blocks = getattr(model, "n_blocks", model.n_exits)
        layers = np.where(last, n_blocks, np.minimum(exits + 1, n_blocks)).astype(np.float64)
        return cls(layers, stages + np.cumsum(looks) + answers, float(stages[-1] + answers[-1]))


class _With:
    """A staged model with another head, to count what its parts cost."""

    def __init__(self, model: StagedModel, head: Callable[[int, Any], Any]) -> None:
        self.n_exits, self.head = model.n_exits, head
        self.begin, self.advance, self.select = model.begin, model.advance, model.select
