"""Buffers and captured functions that are kept between generations."""

from collections.abc import Callable, Hashable, Iterator, Sequence
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

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], T], *, unlimited: bool) -> T:
        """Return a session, made if it is missing; `unlimited`: others are never dropped for it."""
        weights = [weight for each in self._modules for weight in _weights(each)]
        if list(map(Tensor.data_ptr, weights)) != list(map(Tensor.data_ptr, self._held)):
            self._kept.clear()
            self._held = [weight.detach() for weight in weights]  # so that the memory stays theirs
        if key not in self._kept:
            if not unlimited and len(self._kept) >= LARGEST:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = make()
        return self._kept[key]


def _weights(module: nn.Module) -> Iterator[Tensor]:
    """Yield a module's weights, some twice; `parameters` takes longer to leave those out."""
    yield from (weight for weight in module._parameters.values() if weight is not None)
    for each in module._modules.values():
        if each is not None:
            yield from _weights(each)
