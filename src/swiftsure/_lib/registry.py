"""Registry: things that users choose by name, such as losses, scores and bounds."""

from typing import Any, TypeVar

from swiftsure._lib import checks

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(dict[str, T]):
    """A dictionary of named items that refuses duplicates and suggests the nearest name.

    Parameters
    ----------
    argument : str
        What errors call it.
    *items
        The first ones to register.

    Examples
    --------
    >>> from swiftsure.certify.bounds import BOUNDS
    >>> BOUNDS.choose("star").name
    'star'
    """

    def __init__(self, argument: str, *items: T) -> None:
        super().__init__()
        self.argument = argument
        for item in items:
            self.register(item)

    def register(self, item: T, *names: str) -> T:
        """Add an item and return it; raise if a name is taken.

        The name is the item's attribute `name`, or that of the function, unless names are given.
        """
        for name in names or (_name(item),):
            if name in self and self[name] != item:
                raise ValueError(
                    f"`{self.argument}` must have a name of its own, but {name!r} is taken."
                )
            self[name] = item
        return item

    def choose(self, item: str | T, argument: str | None = None) -> T:
        """Return the item with this name; an item that has a name is returned unchanged.

        The error for an unknown name suggests the nearest.
        """
        if not isinstance(item, str) and hasattr(item, "name"):
            return item
        return self[checks.choice(argument or self.argument, str(item), self)]


def _name(item: Any) -> str:
    return str(getattr(item, "name", None) or item.__name__)
