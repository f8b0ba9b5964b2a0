"""What guidance and training need of a network."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

__all__ = ["DiffusionNetwork", "check_network"]


@runtime_checkable
class DiffusionNetwork(Protocol):
    """A staged model that estimates noise, and its own uncertainty, at every exit.

    A batch is (images, times) or, if it has classes, (images, times, labels). U-ViT of
    `swiftsure-zoo` is one: `swiftsure_zoo.UViT`.
    """

    n_exits: int
    n_blocks: int
    n_classes: int | None
    image_shape: tuple[int, int, int]
    training: bool

    def checked(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return a batch unchanged; raises unless it fits the network."""

    def begin(self, batch: Sequence[Tensor]) -> Any:
        """Return the state before the first exit."""

    def advance(self, exit_index: int, state: Any) -> Any:
        """Return the state at an exit, from the one before it."""

    def confidence_at(self, exit_index: int, state: Any) -> Tensor:
        """Return an exit's confidence, (n,)."""

    def estimate(self, exit_index: int, state: Any, rows: Tensor | None = None) -> Tensor:
        """Return an exit's noise estimate for all images, or for some rows."""

    def uncertainty(self, state: Any) -> Tensor:
        """Return the uncertainty, in (0, 1), of every pixel, at any exit except the last."""


def check_network(model: object, reason: str = "") -> None:
    """Raise unless a model is a module with what `DiffusionNetwork` names."""
    if not isinstance(model, nn.Module) or not isinstance(model, DiffusionNetwork):
        raise TypeError(
            "`model` must be a module with the methods of `swiftsure.diffusion.DiffusionNetwork`,"
            f" such as `swiftsure_zoo.UViT`, but got a {type(model).__name__}{reason}."
        )
