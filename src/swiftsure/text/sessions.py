"""Buffers and captured functions that are kept between generations."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor, nn

__all__ = ["Sessions"]

LARGEST = 8
"""Number of sessions that are kept where nothing is captured."""

T = TypeVar("T")


class Sessions(Generic[T]):
    """Sessions by what they are for; dropped when a weight is replaced or moved.

    Captured functions read weights at their addresses. Changing values in place, as
    `load_state_dict` does, needs no new capture.

    Parameters
    ----------
    modules : modules that the sessions run; None are skipped
    """

    def __init__(self, modules: Sequence[nn.Module | None]) -> None:
        self._modules = [module for module in modules if module is not None]
        self._kept: dict[Hashable, T] = {}
        self._held: list[Tensor] = []
        self._places: list[int] = []

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], T], *, unlimited: bool) -> T:
        """Return a session, made if it is missing; `unlimited`: others are never dropped for it."""
        weights = [weight for each in self._modules for weight in _weights(each)]
        places = list(map(Tensor.data_ptr, weights))
        if places != self._places:
            self._kept.clear()
            self._places = places
            self._held = [weight.detach() for weight in weights]  # so that the memory stays theirs
        if key not in self._kept:
            if not unlimited and len(self._kept) >= LARGEST:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = make()
        return self._kept[key]


def _weights(module: nn.Module) -> list[Tensor]:
    """Return a module's weights, some twice; `parameters` takes longer to leave those out."""
    found, parts = list[Tensor](), [module]
    while parts:
        part = parts.pop()
        found += [weight for weight in part._parameters.values() if weight is not None]
        parts += [each for each in part._modules.values() if each is not None]
    return found
