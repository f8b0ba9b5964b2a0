"""`InputForm`: checks samples against the example of a model, for engines that take arrays."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.serve.engine import InvalidRequestError

__all__ = ["AnyInputs", "InputForm", "checked_array"]

Leaf = tuple[tuple[int, ...], np.dtype[Any]]

LONGEST_EXAMPLE = 64
"""Numbers of an example in `/docs`."""


class InputForm:
    """The form of one sample: an array's shape and dtype, or a dict of them.

    Real numbers must have the shape; whole numbers, such as tokens, only as many axes.
    """

    def __init__(self, form: Leaf | Mapping[str, Leaf]) -> None:
        self.form = form

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of one sample."""
        if not isinstance(self.form, Mapping):
            return _schema(*self.form)
        found = {name: _schema(*leaf) for name, leaf in self.form.items()}
        return {"type": "object", "properties": found, "required": sorted(found)}

    def zeros(self) -> Any:
        """Return a sample of zeros."""
        if not isinstance(self.form, Mapping):
            return np.zeros(*self.form)
        return {name: np.zeros(*leaf) for name, leaf in self.form.items()}

    def example(self) -> Any:
        """Return a sample of zeros as JSON; None if it is long."""
        found = self.zeros()
        leaves = found if isinstance(found, dict) else {"": found}
        if sum(leaf.size for leaf in leaves.values()) > LONGEST_EXAMPLE:
            return None
        lists = {name: leaf.tolist() for name, leaf in leaves.items()}
        return lists if isinstance(found, dict) else lists[""]

    def sample(self, inputs: Any) -> Any:
        """Return a checked sample: an array, or a dict of arrays."""
        if not isinstance(self.form, Mapping):
            return checked_array("inputs", inputs, *self.form)
        if not isinstance(inputs, dict) or inputs.keys() != self.form.keys():
            raise InvalidRequestError(
                f"`inputs` must be an object with the keys {', '.join(sorted(self.form))}."
            )
        return {name: checked_array(name, inputs[name], *leaf) for name, leaf in self.form.items()}

    def covers(self, _sample: Any, _policy: Any) -> bool:
        """Return True: an array comes without options that a policy could be silent about."""
        return True

    def samples(self, inputs: Any) -> NDArray[Any] | None:
        """Return an array with one axis more than a sample; None for one sample."""
        if isinstance(self.form, Mapping) or not isinstance(inputs, np.ndarray):
            return None
        return inputs if inputs.ndim == len(self.form[0]) + 1 else None


class AnyInputs:
    """Takes any JSON as a sample; a list of numbers, or of such lists, is an array."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of one sample."""
        return {}

    def sample(self, inputs: Any) -> Any:
        """Return the sample."""
        if inputs is None:
            raise InvalidRequestError("`inputs` must not be null.")
        if isinstance(inputs, list):
            try:
                array = np.array(inputs, dtype=object)
            except ValueError:  # ragged
                return inputs
            if array.size and {type(each) for each in array.ravel().tolist()} <= {int, float}:
                return array.astype(np.float64)
        return inputs

    def covers(self, _sample: Any, _policy: Any) -> bool:
        """Return True: there are no options beside the inputs."""
        return True

    def samples(self, _inputs: Any) -> None:
        """Return None: an array is one sample."""
        return


def checked_array(
    name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    """Return numbers as an array of this dtype; raise if they do not fit.

    Real numbers must have the shape. Whole numbers, such as tokens, need only as many axes.
    """
    whole = dtype.kind in "iub"
    array = value if isinstance(value, np.ndarray | np.generic) else _as_array(name, value, whole)
    if array.dtype.kind not in ("iubO" if whole else "iufO"):
        raise InvalidRequestError(f"`{name}` must be an array of {_kind(whole)}.")
    fits = array.ndim == len(shape) and array.size > 0 if whole else array.shape == shape
    if not fits:
        wanted = f"{len(shape)} axes" if whole else f"shape {list(shape)}"
        raise InvalidRequestError(
            f"`{name}` must have {wanted}, but has shape {list(array.shape)}."[:300]
        )
    try:
        with np.errstate(all="ignore"):
            cast = np.ascontiguousarray(array, dtype).reshape(array.shape)
    except OverflowError:  # an int of Python's
        raise InvalidRequestError(f"`{name}` must fit {dtype.name}.") from None
    if whole and not np.array_equal(cast, array):
        raise InvalidRequestError(f"`{name}` must fit {dtype.name}.")
    if not np.isfinite(cast).all():
        raise InvalidRequestError(f"`{name}` must be finite numbers of {dtype.name}.")
    return cast


def _as_array(name: str, value: Any, whole: bool) -> NDArray[Any]:
    """Return nested lists as an array of Python's numbers.

    Their types are checked before numbers are made of them: NumPy would make all texts as long as
    the longest.
    """
    try:
        array = np.array(value, dtype=object)
        types = set(map(type, array.ravel().tolist()))
    except (ValueError, RecursionError):
        types = {list}
    if list in types or np.ndarray in types:
        raise InvalidRequestError(f"`{name}` must be an array of numbers, not ragged.")
    if not types <= ({int, bool} if whole else {int, float}):
        raise InvalidRequestError(f"`{name}` must be an array of {_kind(whole)}.")
    return array


def _schema(shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
    whole = dtype.kind in "iub"
    found: dict[str, Any] = {"type": "integer" if whole else "number"}
    for size in reversed(shape):
        found = {"type": "array", "items": found}
        if not whole:  # tokens may be as many as there are
            found |= {"minItems": size, "maxItems": size}
    return found


def _kind(whole: bool) -> str:
    return "whole numbers" if whole else "numbers"
