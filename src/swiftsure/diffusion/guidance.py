"""Classifier-free guidance with early exits.

Ho and Salimans, *Classifier-Free Diffusion Guidance* (2022).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure._lib import checks
from swiftsure.diffusion.network import DiffusionNetwork, check_network
from swiftsure.torch.staged import Scored, Staged

__all__ = ["Guided"]

MAX_SCALE = 1000.0
"""Largest scale; beyond it the amplified noise drowns everything else."""


class Guided(Staged):
    """A class-conditional network with guidance; pass it to `DeeDiff` as the model.

    Every image runs twice, with and without its label, and its noise is
    `without + scale * (with - without)`. Both runs take the same exit, by the mean of their
    confidences, so that the errors they share cancel in the difference, which guidance amplifies.
    FLOPs count both runs; layers count one.

    Parameters
    ----------
    model : DiffusionNetwork
        Such as `swiftsure_zoo.UViT`. Its last class must mean "no label", and must have been
        trained as such on a fraction of the images, as in published networks.
    scale : float
        Usually 1.5 to 4; at 1 guidance has no effect and the second run is wasted. (If others write
        `with + s * (with - without)`, this is 1 + s.) Policies are bound to it.

    Raises
    ------
    ValueError
        If the network has fewer than two classes, or the scale is not in (0, 1000).

    Examples
    --------
    >>> from swiftsure.diffusion import DDIM, DeeDiff
    >>> from swiftsure_zoo import UViT
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

    def __init__(self, model: DiffusionNetwork, scale: float) -> None:
        super().__init__()
        check_network(model)
        if model.n_classes is None or model.n_classes < 2:
            raise ValueError(
                "`model` must have at least two classes, the last of which stands for no label, but"
                f" it has {model.n_classes or 'none'}."
            )
        self.model = model
        self.n_classes = model.n_classes - 1
        self.n_exits, self.n_blocks = model.n_exits, model.n_blocks
        self.image_shape = model.image_shape
        # A buffer, so that the fingerprint includes the scale.
        self.register_buffer("scale", torch.tensor(checks.between("scale", scale, 0, MAX_SCALE)))
        self.training = model.training  # not train(), which would change the model's parts

    def begin(self, batch: Sequence[Tensor]) -> Any:
        """Return the state of both runs of each image, (n, 2, ...)."""
        images, times, labels = self.model.checked(batch)
        none = torch.full_like(labels, self.n_classes)
        twice = (images.repeat_interleave(2, dim=0), times.repeat_interleave(2))
        return _paired(self.model.begin((*twice, torch.stack([labels, none], dim=1).flatten())))

    def advance(self, exit_index: int, state: Any) -> Any:
        """Run one stage on both runs of each image."""
        return _paired(self.model.advance(exit_index, _unpaired(state)))

    def head(self, exit_index: int, state: Any) -> Scored:
        """Return an exit's guided noise estimate and its confidence."""
        return Scored(self.estimate(exit_index, state), self.confidence_at(exit_index, state))

    def confidence_at(self, exit_index: int, state: Any) -> Tensor:
        """Return an exit's confidence, (n,): the mean over both runs."""
        both: Tensor = _paired(self.model.confidence_at(exit_index, _unpaired(state)))
        return both.mean(dim=1)

    def estimate(self, exit_index: int, state: Any, rows: Tensor | None = None) -> Tensor:
        """Return the guided noise estimate for all images, or for some rows."""
        both = None if rows is None else torch.stack([2 * rows, 2 * rows + 1], dim=1).flatten()
        noise = self.model.estimate(exit_index, _unpaired(state), both)
        # In float32: in half precision the difference would be rounded before it is amplified.
        labelled, plain = _paired(noise.float()).unbind(dim=1)
        guided: Tensor = plain + self.scale * (labelled - plain)
        return guided.to(noise.dtype)


def _paired(state: Any) -> Any:
    """Return (2n, ...) as (n, 2, ...): one row per image, so that `select` can drop images."""
    return pytree.tree_map(lambda each: each.unflatten(0, (-1, 2)), state)


def _unpaired(state: Any) -> Any:
    """Return (n, 2, ...) as (2n, ...)."""
    return pytree.tree_map(lambda each: each.flatten(0, 1), state)
