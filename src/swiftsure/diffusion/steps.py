"""One denoising step: each image exits the network once the confidence is high enough.

A network may compute an exit's confidence without its output, `confidence_at(exit_index, state)`,
and the output alone for all or some rows, `estimate(exit_index, state, rows=None)`, as `UViT` does.
It has both methods or neither. With them, noise is estimated only for the images that exit;
without, `head` computes noise and confidence together.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.diffusion.rules import DeeDiffRule
from swiftsure.exits import reaches
from swiftsure.torch.costs import exit_flops
from swiftsure.torch.scoring import MODEL_SCORE, confidence
from swiftsure.torch.staged import Scored, StagedModel, plain_output

__all__ = ["Denoised", "StepCosts", "denoise", "exit_confidence", "exit_output"]


class Denoised(NamedTuple):
    """Result of a step, in batch order.

    Attributes
    ----------
    noise : (n, channels, height, width)
    exits : (n,)
        0-based.
    max_skipped : (n,)
        Largest confidence at the exits that were evaluated but not taken; -inf if there were none.
    min_taken : (n,)
        The confidence at the exit taken; inf at the last exit, which needs none.
    """

    noise: Tensor
    exits: Tensor
    max_skipped: Tensor
    min_taken: Tensor


def denoise(
    model: StagedModel, batch: tuple[Tensor, ...], levels: Tensor, rule: DeeDiffRule, looks: bool
) -> Denoised:
    """Run the network on a batch, dropping images from it as they exit.

    Parameters
    ----------
    batch
        (images, times) or (images, times, labels), the model's input.
    levels : (n,)
        Each image's threshold.
    looks : bool
        Whether any threshold can be reached; if not, no early head runs.
    """
    images, last = batch[0], model.n_exits - 1
    looked_at = rule.looks(model.n_exits) if looks else ()
    n, device = len(images), images.device
    found = Denoised(
        torch.empty_like(images),
        torch.full((n,), last, device=device),
        torch.full((n,), -torch.inf, device=device),
        torch.full((n,), torch.inf, device=device),
    )
    here, passed = torch.arange(n, device=device), found.max_skipped.clone()
    state = model.begin(batch)
    for k in range(last):
        state = model.advance(k, state)
        if k not in looked_at:
            continue
        scores, output = exit_confidence(model, k, state)
        staying = ~reaches(scores, levels, strict=rule.strict)
        # The only synchronisation per exit: later shapes depend on how many images exit.
        n_stay = int(staying.sum())
        if n_stay < len(here):
            order = staying.logical_not().byte().argsort(stable=True)  # staying images first
            stay, gone = order[:n_stay], order[n_stay:]
            out = here[gone]
            noise = output[gone] if output is not None else exit_output(model, k, state, gone)
            found.noise[out] = noise.to(images.dtype)
            found.exits[out] = k
            found.max_skipped[out] = passed[gone]
            found.min_taken[out] = scores[gone]
            if n_stay == 0:
                return found
            here, levels, passed, scores = (each[stay] for each in (here, levels, passed, scores))
            state = model.select(state, stay)
        passed = torch.fmax(passed, scores)  # NaN exits at no threshold
    noise = exit_output(model, last, model.advance(last, state)).to(images.dtype)
    found.max_skipped[here] = passed
    if len(here) == n:
        return found._replace(noise=noise)
    found.noise[here] = noise
    return found


def exit_confidence(model: StagedModel, exit_index: int, state: Any) -> tuple[Tensor, Any]:
    """Return an exit's confidence, (n,), and its output if that was computed too, else None."""
    if hasattr(model, "confidence_at"):
        alone = Scored(None, model.confidence_at(exit_index, state))
        return confidence(MODEL_SCORE, alone), None
    output = model.head(exit_index, state)
    return confidence(MODEL_SCORE, output), plain_output(output)


def exit_output(model: StagedModel, exit_index: int, state: Any, rows: Tensor | None = None) -> Any:
    """Return an exit's output, for all rows or some."""
    if hasattr(model, "confidence_at"):
        return model.estimate(exit_index, state, rows)  # type: ignore[attr-defined]
    output = plain_output(model.head(exit_index, state))
    return output if rows is None else output[rows]


class StepCosts(NamedTuple):
    """Cost of one step for one image, for each exit it may take, (n_exits,).

    Attributes
    ----------
    layers
        Number of blocks that run.
    flops
        If a threshold can be reached: blocks, confidences, and the estimate at the exit taken.
    full_flops : float
        FLOPs of a step that evaluates no exits: all blocks and the last head only.
    """

    layers: NDArray[np.float64]
    flops: NDArray[np.float64]
    full_flops: float

    @classmethod
    def of(
        cls, model: StagedModel, batch: tuple[Tensor, ...], looked_at: Sequence[int]
    ) -> "StepCosts":
        """Count the costs on a batch of at least one image, with looks at some exits."""
        stages, looks, answers = (
            exit_flops(_WithHead(model, head), batch)
            for head in (
                lambda *_: None,
                partial(exit_confidence, model),
                partial(exit_output, model),
            )
        )
        looks, answers = (np.diff(each - stages, prepend=0.0) for each in (looks, answers))
        exits = np.arange(model.n_exits)
        last = exits == model.n_exits - 1
        if not hasattr(model, "confidence_at"):
            answers = np.where(last, answers, 0.0)  # computed together with the confidence
        looks = np.where(np.isin(exits, list(looked_at)), looks, 0.0)
        n_blocks = getattr(model, "n_blocks", model.n_exits)
        layers = np.where(last, n_blocks, np.minimum(exits + 1, n_blocks)).astype(np.float64)
        return cls(layers, stages + np.cumsum(looks) + answers, float(stages[-1] + answers[-1]))


class _WithHead:
    """A staged model with another head, to count the FLOPs of its parts."""

    def __init__(self, model: StagedModel, head: Callable[[int, Any], Any]) -> None:
        self.n_exits, self.head = model.n_exits, head
        self.begin, self.advance, self.select = model.begin, model.advance, model.select
