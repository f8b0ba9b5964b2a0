"""Bodies of requests: JSON and .npy, checked before anything is allocated for them."""

import io
import json
import math
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from swiftsure.serving.engine import InvalidRequestError

__all__ = ["checked_array", "json_body", "npy_body"]


def json_body(body: bytes) -> dict[str, Any]:
    """Return the object in a JSON body."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequestError("The body must be JSON in UTF-8.") from None
    if not isinstance(content, dict) or "inputs" not in content:
        raise InvalidRequestError('The body must be an object such as {"inputs": [0.1, 0.2]}.')
    if unknown := content.keys() - {"inputs", "id"}:
        raise InvalidRequestError(
            f"The body must have the keys `inputs` and `id`, but has {sorted(unknown)[0]!r:.60}."
        )
    return content


def npy_body(body: bytes) -> NDArray[Any]:
    """Return the array in a .npy body; never unpickles, nor allocates more than the body holds."""
    file = io.BytesIO(body)
    try:
        version = npy.read_magic(file)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
        size = math.prod(shape) * dtype.itemsize
        plain = dtype.kind in "biuf" and min(shape, default=1) >= 0
    except Exception:  # NumPy's parser of headers raises many kinds of errors
        raise InvalidRequestError("The body must be an array in NumPy's .npy format.") from None
    data = body[file.tell() :]
    if not plain or len(data) != size:
        raise InvalidRequestError("The body must be a .npy array of numbers, and nothing else.")
    array = np.frombuffer(data, dtype)
    return array.reshape(shape, order="F" if fortran else "C")

