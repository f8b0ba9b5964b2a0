"""Copies of modules that share weights with the original, so that parts of them can be replaced."""

import copy
from typing import Any

from torch import nn

__all__ = ["replace_submodule", "shallow_copy"]


def shallow_copy(module: nn.Module) -> Any:
    """Return a module that shares the submodules but has its own dicts of modules, hooks etc."""
    twin = copy.copy(module)
    for name, value in module.__dict__.items():
        if isinstance(value, dict):
            twin.__dict__[name] = copy.copy(value)
    return twin


def replace_submodule(owner: nn.Module, path: str, part: nn.Module) -> None:
    """Replace a submodule; modules on the way to it are copied, and share all others."""
    name, _, rest = path.partition(".")
    if rest:
        twin = shallow_copy(owner.get_submodule(name))
        replace_submodule(twin, rest, part)
        part = twin
    setattr(owner, name, part)
