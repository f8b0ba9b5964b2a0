"""Dials: the settings of a system that has more than one, as a list with the full model first."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["dial_grid", "dial_table", "setting_key", "settings_digest"]

Table = dict[str, tuple[Any, ...]]
"""The values of each dial, one per setting."""


def dial_grid(dials: Mapping[str, Sequence[Any]], full: Mapping[str, Any]) -> Table:
    """Return every combination of the dials' values, after the full model's setting.

    The first dial changes fastest. The combination that is the full model's own is not repeated.

    Parameters
    ----------
    dials : mapping of names to values
        The values of each dial, safest first.
    full : mapping
        The full model's value of each dial.

    Examples
    --------
    >>> dial_grid({"rollback": [1.0, 2.0], "fallback": [0.5, 0.2]}, {"rollback": 0, "fallback": 0})
    {'rollback': (0, 1.0, 2.0, 1.0, 2.0), 'fallback': (0, 0.5, 0.5, 0.2, 0.2)}
    """
    names = list(dials)
    if set(full) != set(names):
        raise ValueError(
            f"`full` must give the full model's value of every dial, {', '.join(names)}, but gives"
            f" {', '.join(full) or 'none'}."
        )
    lists = [[_plain(name, value) for value in dials[name]] for name in reversed(names)]
    first = tuple(_plain(name, full[name]) for name in names)
    combinations = (row[::-1] for row in itertools.product(*lists))
    rows = [first, *(row for row in combinations if setting_key(row) != setting_key(first))]
    return dial_table(dict(zip(names, zip(*rows, strict=True), strict=True)))


def dial_table(dials: Mapping[str, Any]) -> Table:
    """Return checked dials: names to values, one per setting, each setting only once.

    A value is a number, a text, a list of them, or None, for which infinity may stand ("never").
    """
    if not isinstance(dials, Mapping):
        raise TypeError(
            f"`dials` must map names to values, one per setting, but got {type(dials).__name__}."
        )
    table: Table = {}
    for name, values in dials.items():
        if not str(name):
            raise ValueError("`dials` must have names, but one is empty.")
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise TypeError(f"`dials['{name}']` must hold one value per setting.")
        table[name] = tuple(_plain(name, value) for value in values)
    sizes = {name: len(values) for name, values in table.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise ValueError(f"`dials` must all have K values, one per setting, but {listed}.")
    seen: dict[str, int] = {}
    for number, row in enumerate(zip(*table.values(), strict=True)):
        first = seen.setdefault(setting_key(row), number)
        if first < number:
            raise ValueError(
                f"`dials` must hold each setting once, but settings {first} and {number} are both"
                f" {dict(zip(table, row, strict=True))}."
            )
    return table


def setting_key(values: Iterable[Any]) -> str:
    """Return a text that settings share if they are the same: 1 is 1.0, but True is not 1.

    Examples
    --------
    >>> setting_key([1, None]) == setting_key([1.0, None]) != setting_key([True, None])
    True
    """
    return json.dumps([_normal(value) for value in values], sort_keys=True, default=str)


def settings_digest(dials: Mapping[str, Sequence[Any]]) -> str:
    """Return a hash of a list of settings; a path is for the settings it was made from."""
    text = json.dumps({name: list(values) for name, values in dials.items()})
    return hashlib.sha256(text.encode()).hexdigest()


def _normal(value: Any) -> Any:
    """Return a value with whole floats as integers, also inside a list."""
    if isinstance(value, list | tuple):
        return [_normal(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _plain(name: str, value: Any) -> Any:
    """Return a dial's value as what JSON can hold."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(name, each) for each in value]
    if isinstance(value, float) and np.isposinf(value):
        return None
    plain = value is None or isinstance(value, bool | int | str)
    if not plain and not (isinstance(value, float) and np.isfinite(value)):
        raise ValueError(
            f"`dials['{name}']` must hold numbers, texts or None, but got {value!r:.100}."
        )
    return value
