"""Registry: things that users choose by name, such as losses, scores and bounds."""

from typing import Protocol, TypeVar

from swiftsure import checks

__all__ = ["Registry"]


class Named(Protocol):
    """Anything with a name."""

    @property
    def name(self) -> str:
        """The name that users pass."""


T = TypeVar("T", bound=Named)


class Registry(dict[str, T]):
    """A dictionary of named items that refuses duplicates and suggests the nearest name.

    Examples
    --------
    >>> from swiftsure.bounds import BOUNDS
    >>> BOUNDS.choose("star").name
    'star'
    """

    def __init__(self, argument: str) -> None:
        super().__init__()
        self.argument = argument

    def register(self, item: T) -> T:
        """Add an item under its name and return it; raise if the name is taken."""
        if item.name in self and self[item.name] != item:
            raise ValueError(
                f"`{self.argument}` must have a name of its own, but {item.name!r} is taken."
            )
        self[item.name] = item
        return item

    def choose(self, name: str) -> T:
        """Return the item with this name; the error for an unknown name suggests the nearest."""
        return self[checks.choice(self.argument, name, self)]
