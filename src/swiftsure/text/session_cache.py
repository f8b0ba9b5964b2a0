"""Buffers and captured functions that are kept between generations."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

__all__ = ["SessionCache"]

LARGEST = 8
"""Number of sessions that are kept where nothing is captured."""

T = TypeVar("T")


class SessionCache(Generic[T]):
    """SessionCache by what they are for; dropped when a weight is replaced or moved.

    Captured functions read weights at their addresses. Changing values in place, as
    `load_state_dict` does, needs no new capture.

    Parameters
    ----------
    modules : modules that the sessions run; None are skipped
    """

    def __init__(self, modules: Sequence[nn.Module | None]) -> None:
        self._modules = [module for module in modules if module is not None]
        self._kept: dict[Hashable, T] = {}
        self._parts: list[tuple[dict[str, Any], str, Any]] = []
        """Where each module and weight is found."""
        self._places: list[int] = []
        self._held: list[Tensor] = []

    def __len__(self) -> int:
        """Return the number of sessions."""
        return len(self._kept)

    def get(self, key: Hashable, make: Callable[[], T], *, unlimited: bool) -> T:
        """Return a session, made if it is missing; `unlimited`: others are never dropped for it."""
        if not self._parts or self._changed():
            self._kept.clear()
            self._parts = [found for each in self._modules for found in _parts(each)]
            weights = [each for _, _, each in self._parts if isinstance(each, Tensor)]
            self._places = [weight.data_ptr() for weight in weights]
            self._held = [weight.detach() for weight in weights]  # so that the memory stays theirs
        if key not in self._kept:
            if not unlimited and len(self._kept) >= LARGEST:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = make()
        return self._kept[key]

    def _changed(self) -> bool:
        """Return whether a module or weight was replaced, or a weight moved."""
        if not all(where.get(name) is part for where, name, part in self._parts):
            return True
        weights = [part for _, _, part in self._parts if isinstance(part, Tensor)]
        return [weight.data_ptr() for weight in weights] != self._places


def _parts(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the modules and weights in a module, and the dictionaries that they are in."""
    for each in module.modules():
        for where in (each._parameters, each._modules):
            yield from ((where, name, part) for name, part in where.items())
