"""Nested batches and outputs as flat lists of arrays, with a JSON description of the nesting.

| form | stands for |
|---|---|
| `{"dtype": "float32", "shape": [3, 32, 32]}` | an array, with the shape of one sample |
| `{"dict": {"tokens": form, …}}` | a dict with string keys |
| `{"tuple": [form, …]}`, `{"list": [form, …]}` | a tuple, a list |
| `{"value": 3}` | a constant: a number, a string, a boolean or None |
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Form",
    "arrays_in",
    "build",
    "check_form",
    "describe",
    "leaf_names",
    "leaves",
    "samples_of",
]

Form = dict[str, Any]
Array = NDArray[Any]

MAX_DEPTH = 50
"""How deeply batches and outputs may be nested in a file."""

DTYPES = {np.dtype(code).name for code in "?bhilqBHILQefd"}
"""Names of the dtypes of arrays."""


def describe(tree: Any, what: str = "`batch`") -> Form:
    """Return the form of nested arrays, which have the batch first.

    Examples
    --------
    >>> describe({"x": np.zeros((2, 3), np.float32)})
    {'dict': {'x': {'dtype': 'float32', 'shape': [3]}}}
    """
    if isinstance(tree, np.ndarray):
        return {"dtype": tree.dtype.name, "shape": list(tree.shape[1:])}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"{what} must have strings as keys, but has {list(tree)!r:.200}.")
        return {"dict": {key: describe(value, what) for key, value in tree.items()}}
    if type(tree) in (tuple, list):
        return {type(tree).__name__: [describe(value, what) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    raise TypeError(
        f"{what} must hold arrays in tuples, lists and dicts, but holds a {type(tree).__name__}."
    )


def check_form(form: Any, depth: int = 0) -> Form:
    """Return a form that was read from a file; raise if `describe` does not make such forms."""
    if not isinstance(form, dict) or depth > MAX_DEPTH:
        raise ValueError(f"a form must be a dict, nested at most {MAX_DEPTH} times")
    match form:
        case {"dtype": str(dtype), "shape": list(shape), **rest} if not rest:
            whole = all(type(size) is int and 0 <= size < 2**31 for size in shape)
            if dtype in DTYPES and whole and len(shape) < 32:
                return form
        case {"dict": dict(parts), **rest} if not rest:
            for part in parts.values():
                check_form(part, depth + 1)
            return form
        case {"tuple": list(parts), **rest} | {"list": list(parts), **rest} if not rest:
            for part in parts:
                check_form(part, depth + 1)
            return form
        case {"value": None | bool() | int() | float() | str(), **rest} if not rest:
            return form
    raise ValueError(
        f"a form must be an array, a dict, a tuple, a list or a value, not {form!r:.80}"
    )


def arrays_in(form: Form, tree: Any, what: str = "`batch`") -> list[Array]:
    """Return the arrays of a nested structure in the order of its form.

    Raises
    ------
    TypeError, ValueError
        If the structure, a dtype or a sample's shape is not that of the form, or if arrays have
        different numbers of samples.
    """
    found = list(_leaves(form, tree, what, ""))
    sizes = {len(array) for array in found}
    if len(sizes) != 1:
        raise ValueError(f"{what} must have one number of samples, but has {sorted(sizes)}.")
    return found


def _leaves(form: Form, tree: Any, what: str, place: str) -> Iterator[Array]:
    if "dtype" in form:
        array = np.asarray(tree)
        expected = (*form["shape"],)
        if array.dtype.name != form["dtype"] or array.ndim == 0 or array.shape[1:] != expected:
            name = f"{what}{place}"
            shape = ", ".join(map(str, ("n", *expected)))
            raise ValueError(
                f"{name} must be {form['dtype']} of shape ({shape}), as in the export, but got"
                f" {array.dtype.name} of shape {array.shape}."
            )
        yield array
    elif "dict" in form:
        if not isinstance(tree, Mapping) or any(key not in tree for key in form["dict"]):
            got = ", ".join(map(str, tree)) if isinstance(tree, Mapping) else type(tree).__name__
            raise ValueError(
                f"{what}{place} must be a dict with {', '.join(form['dict'])}, but got {got}."
            )
        for key, each in form["dict"].items():
            yield from _leaves(each, tree[key], what, f"{place}[{key!r}]")
    elif "value" not in form:
        parts = form.get("tuple", form.get("list"))
        if not isinstance(tree, Sequence) or parts is None or len(tree) != len(parts):
            raise ValueError(
                f"{what}{place} must have {len(parts or ())} parts, but got {type(tree).__name__}."
            )
        for k, (each, value) in enumerate(zip(parts, tree, strict=True)):
            yield from _leaves(each, value, what, f"{place}[{k}]")


def build(form: Form, arrays: Sequence[Any]) -> Any:
    """Return the nested structure of a form with these arrays.

    Examples
    --------
    >>> build({"tuple": [{"dtype": "int64", "shape": []}, {"value": None}]}, [np.arange(2)])
    (array([0, 1]), None)
    """
    rest = iter(arrays)
    return _mapped(form, lambda _: next(rest))


def samples_of(form: Form, n: int) -> list[Array]:
    """Return arrays of zeros for n samples, one for each array of a form."""
    return [np.zeros((n, *leaf["shape"]), leaf["dtype"]) for leaf in leaves(form)]


def leaves(form: Form) -> list[Form]:
    """Return the forms of the arrays in a form, in order."""
    found: list[Form] = []
    _mapped(form, found.append)
    return found


def leaf_names(form: Form, name: str) -> list[str]:
    """Return a name for each array: `name` for the only one, the keys of a dict, or numbered.

    Examples
    --------
    >>> one = {"dtype": "int64", "shape": []}
    >>> leaf_names(one, "input"), leaf_names({"tuple": [one, one]}, "input")
    (['input'], ['input_0', 'input_1'])
    """
    if "dtype" in form:
        return [name]
    if "dict" in form and all("dtype" in each for each in form["dict"].values()):
        return list(form["dict"])
    return [f"{name}_{k}" for k in range(len(leaves(form)))]


def _mapped(form: Form, function: Callable[[Form], Any]) -> Any:
    if "dtype" in form:
        return function(form)
    if "dict" in form:
        return {key: _mapped(each, function) for key, each in form["dict"].items()}
    if "tuple" in form:
        return tuple(_mapped(each, function) for each in form["tuple"])
    if "list" in form:
        return [_mapped(each, function) for each in form["list"]]
    return form["value"]
