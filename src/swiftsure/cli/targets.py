"""Functions that the user names as module:function."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["call_target", "find_target", "import_from_current_folder", "one_line_of"]


@contextmanager
def import_from_current_folder() -> Iterator[None]:
    """Allow imports from the current folder, also while batches are made."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)


def call_target(option: str, target: str) -> Any:
    """Call the function named by module:function and return its result."""
    return find_target(option, target)()


def find_target(option: str, target: str) -> Callable[[], Any]:
    """Return the function or the class named by module:function."""
    module, _, name = target.partition(":")
    if not (module and name):
        raise ValueError(f"`{option}` must be module:function, but got {target!r}.")
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise ValueError(f"`{option}`: cannot import {module!r} ({one_line_of(error)}).") from error
    if not hasattr(found, name):
        raise ValueError(f"`{option}`: {module!r} has no function {name!r}.")
    function: Callable[[], Any] = getattr(found, name)
    if not callable(function):
        raise ValueError(
            f"`{option}` must name a function, but {target!r} is of type {type(function).__name__}."
        )
    return function


def one_line_of(error: BaseException | None) -> str:
    """Return the type of an error and the first line of what it says."""
    first = str(error).partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}: {first}"
