"""Classifier-free guidance: labels count for more than they do in the data.

Ho and Salimans, *Classifier-Free Diffusion Guidance* (2022).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.torch.models.uvit import UViT
from swiftsure.torch.staged import Scored, Staged

__all__ = ["Guided"]

MOST = 1000.0
"""No scale is larger: there noise is enlarged until nothing else is left."""


class Guided(Staged):
    """A network with classes, guided: to be given to `DeeDiff` and `sweep` in its place.

    Every image runs twice, with its label and without; its noise is
    `without + scale * (with - without)`. Both runs leave at the same exit, by the mean of their
    confidences: errors that they have in common then cancel in the difference, which guidance
    enlarges. FLOPs count both; layers are those of one.

    Parameters
    ----------
    model : UViT
        Its last class stands for "no label", and was trained as such on a share of the images, as
        in published networks.
    scale : float
        1 takes labels as they are, and is not worth a second run; 1.5 to 4 are common. (Where
        others write `with + s * (with - without)`, this is 1 + s.) Policies are bound to it.

    Raises
    ------
    ValueError
        If the network has fewer than two classes, or the scale is not in (0, 1000).

    Examples
    --------
    >>> from swiftsure.diffusion import DDIM, DeeDiff
    >>> _ = torch.manual_seed(0)
    >>> model = UViT(image_size=8, width=16, depth=2, n_heads=2, n_classes=11).eval()
    >>> guided = Guided(model, 2.0).eval()
    >>> guided.n_classes
    10
    >>> made = DeeDiff(guided, 0.4, sampler=DDIM(3)).generate(2, labels=[3, 9])
    >>> tuple(made.images.shape)
    (2, 3, 8, 8)
    """

    scale: Tensor

    def __init__(self, model: UViT, scale: float) -> None:
        super().__init__()
        if not isinstance(model, UViT):
            raise TypeError(f"`model` must be a UViT, but got a {type(model).__name__}.")
        if model.n_classes is None or model.n_classes < 2:
            raise ValueError(
                "`model` must have at least two classes, the last of which stands for no label, but"
                f" it has {model.n_classes or 'none'}."
            )
        self.model = model
        self.n_classes = model.n_classes - 1
        self.n_exits, self.n_blocks = model.n_exits, model.n_blocks
        self.image_shape = model.image_shape
        # A buffer, so that fingerprints tell scales apart.
        self.register_buffer("scale", torch.tensor(checks.between("scale", scale, 0, MOST)))
        self.training = model.training  # and leave the modes of its parts alone

    def begin(self, batch: Sequence[Tensor]) -> Any:
        """Return the state of both runs of each image, (n, 2, ...)."""
        images, times, labels = self.model.checked(batch)
        none = torch.full_like(labels, self.n_classes)
        twice = (images.repeat_interleave(2, dim=0), times.repeat_interleave(2))
        return _paired(self.model.begin((*twice, torch.stack([labels, none], dim=1).flatten())))

    def advance(self, exit_index: int, state: Any) -> Any:
        """Run one stage on both."""
        return _paired(self.model.advance(exit_index, _apart(state)))

    def head(self, exit_index: int, state: Any) -> Scored:
        """Return the guided noise that an exit estimates, and its confidence."""
        return Scored(self.estimate(exit_index, state), self.confidence_at(exit_index, state))

    def confidence_at(self, exit_index: int, state: Any) -> Tensor:
        """Return how sure an exit is of both runs, (n,), on average."""
        both: Tensor = _paired(self.model.confidence_at(exit_index, _apart(state)))
        return both.mean(dim=1)

    def estimate(self, exit_index: int, state: Any, rows: Tensor | None = None) -> Tensor:
        """Return the guided noise of all images, or those of some rows."""
        both = None if rows is None else torch.stack([2 * rows, 2 * rows + 1], dim=1).flatten()
        noise = self.model.estimate(exit_index, _apart(state), both)
        # In half precision the difference would be rounded before it is enlarged.
        labelled, plain = _paired(noise.float()).unbind(dim=1)
        guided: Tensor = plain + self.scale * (labelled - plain)
        return guided.to(noise.dtype)


def _paired(state: Any) -> Any:
    """Return (2n, ...) as (n, 2, ...): rows are images, as whoever drops some of them expects."""
    return pytree.tree_map(lambda each: each.unflatten(0, (-1, 2)), state)


def _apart(state: Any) -> Any:
    """Return (n, 2, ...) as (2n, ...)."""
    return pytree.tree_map(lambda each: each.flatten(0, 1), state)
