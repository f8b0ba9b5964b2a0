"""Argument checks; each error is one line: the argument, what was expected, what was received."""

import difflib
import inspect
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "between",
    "choice",
    "count",
    "failure_probability",
    "finite",
    "names",
    "number",
    "numbers",
    "of_shape",
    "shape_text",
    "suggesting",
    "within",
]

T = TypeVar("T")

MEANT = {"accuracy": "zero_one", "acc": "zero_one", "error": "zero_one", "eps": "epsilon"}
"""What some names mean that are not like ours."""


def between(name: str, value: float, low: float, high: float) -> float:
    """Return `value` as a float if it lies strictly between `low` and `high`."""
    given = number(name, value)
    if not low < given < high:  # also refuses NaN
        # Levels are shares: 5 may be meant as 5 %.
        meant = name.startswith("epsilon") and high <= given <= 100 and given.is_integer()
        hint = f" Did you mean {given / 100:g}, which is {given:g} %?" * meant
        raise ValueError(f"`{name}` must be in ({low:g}, {high:g}), but got {given:g}.{hint}")
    return given


def failure_probability(delta: float) -> float:
    """Return δ as a float in (0, 1); warn of one above 1/2, which is hardly a promise."""
    given = between("delta", delta, 0.0, 1.0)
    if given > 0.5:
        warnings.warn(
            f"`delta` is the probability that the promise fails: with {given:g} it holds with a"
            f" probability of {100 * (1 - given):.12g} % only. Did you mean {1 - given:.12g}?",
            stacklevel=3,
        )
    return given


def number(name: str, value: float) -> float:
    """Return `value` as a float; integers that are too large for one become infinite."""
    if isinstance(value, str | bool | bytes):
        raise TypeError(f"`{name}` must be a number, but got {value!r:.200}.")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        raise TypeError(f"`{name}` must be a number, but got {value!r:.200}.") from None


def count(name: str, value: int, least: int = 1) -> int:
    """Return `value` as an int if it is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be a whole number, but got {value!r}.")
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, but got {value}.")
    return int(value)


def choice(name: str, value: str, names: Iterable[str]) -> str:
    """Return `value` if it is one of `names`; the error lists them and suggests the nearest."""
    names = list(names)
    if value in names:
        return value
    near = nearest(str(value), names)
    hint = f" Did you mean '{near}'?" if near else ""
    options = ", ".join(names) if names else "none"
    raise ValueError(f"`{name}` must be one of: {options}; but got {value!r}.{hint}")


def nearest(name: str, names: Sequence[str]) -> str | None:
    """Return which of `names` was meant by another one, if any is near."""
    meant = [known for known in [MEANT.get(name)] if known in names]
    return next(iter(meant or difflib.get_close_matches(name, names, n=1)), None)


def suggesting(target: T) -> T:
    """Decorate a function, or a dataclass, to suggest a name where it gets an unknown argument."""
    function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in known:
                near = nearest(name, known)
                hint = f" Did you mean `{near}`?" if near else ""
                raise TypeError(f"`{target.__name__}` has no argument `{name}`.{hint}")  # type: ignore[attr-defined]
        return function(*args, **kwargs)

    if isinstance(target, type):
        target.__init__ = checked  # type: ignore[misc]
        return target
    return checked  # type: ignore[return-value]


def numbers(name: str, values: Any, dtype: type | None = None) -> NDArray[Any]:
    """Return `values` as an array of real numbers; tensors may have any device and dtype."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if str(values.dtype) == "torch.bfloat16" else values
    try:
        array = np.asarray(values)
    except ValueError as error:  # ragged nested sequences
        raise ValueError(f"`{name}` must be a rectangular array of numbers: {error}") from None
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`{name}` must hold real numbers, but its dtype is {array.dtype}.")
    return array if dtype is None else array.astype(dtype, copy=False)


def names(name: str, values: Any, n: int) -> NDArray[Any]:
    """Return n whole numbers or strings; object arrays of strings, as in pandas, are converted."""
    array = np.asarray(values)
    of_shape(name, array, {"n": n})
    if array.dtype.kind == "O" and all(isinstance(value, str) for value in array):
        array = array.astype(str)
    if array.dtype.kind not in "iuU":
        raise TypeError(
            f"`{name}` must be whole numbers or text, but their dtype is {array.dtype}."
        )
    return array


def shape_text(shape: Sequence[int | str]) -> str:
    """Return a shape as text, written as in the documentation."""
    return "(" + ", ".join(str(length) for length in shape) + ("," if len(shape) == 1 else "") + ")"


def of_shape(
    name: str, array: NDArray[Any], axes: Mapping[str, int | None], hint: str = ""
) -> NDArray[Any]:
    """Return `array` if it has the named axes; a length of None means any but zero."""
    expected = shape_text([a if n is None else f"{a}={n}" for a, n in axes.items()])
    lengths = list(axes.values())
    if array.ndim != len(lengths) or any(
        n is not None and n != got for n, got in zip(lengths, array.shape, strict=True)
    ):
        got = shape_text(array.shape)
        raise ValueError(f"`{name}` must have shape {expected}, but got {got}.{hint}")
    if array.size == 0:
        raise ValueError(f"`{name}` must not be empty, but got shape {shape_text(array.shape)}.")
    return array


def finite(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return `array` if it holds neither NaN nor infinity; the error says where the first is."""
    with np.errstate(invalid="ignore", over="ignore"):
        suspect = array.dtype.kind == "f" and not np.isfinite(array.sum(dtype=np.float64))
    if suspect:  # a second pass, only if the sum is not finite
        bad = np.argwhere(~np.isfinite(array))
        if bad.size:
            where = tuple(int(i) for i in bad[0])
            raise ValueError(
                f"`{name}` must be finite, but got {array[where]} at index {where}"
                f" ({len(bad)} such value{'s' * (len(bad) > 1)})."
            )
    return array


def within(
    name: str, array: NDArray[Any], low: float, high: float, slack: float = 0.0, hint: str = ""
) -> NDArray[Any]:
    """Return `array` clipped to [low, high]; values outside by more than `slack` are refused.

    Rounding may carry a loss slightly out of its range, so it is clipped. Anything more means that
    the declared range is wrong, and with it every guarantee.
    """
    smallest, largest = float(array.min()), float(array.max())
    if smallest < low - slack or largest > high + slack:
        value = smallest if smallest < low - slack else largest
        where = tuple(int(i) for i in np.argwhere(array == value)[0])
        raise ValueError(
            f"`{name}` must lie in [{low:g}, {high:g}], but got {value:g} at index {where}.{hint}"
        )
    clipped: NDArray[Any] = np.clip(array, low, high)
    return clipped if smallest < low or largest > high else array
