"""Bodies of requests: JSON, .npy and Arrow IPC, checked before anything is allocated for them."""

import io
import json
import math
import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy
from numpy.typing import NDArray

from swiftsure.serve.engine import InvalidRequestError

__all__ = ["ARROW", "JSON", "NPY", "Parsed", "parse_body"]


JSON = "application/json"
NPY = ("application/x-npy", "application/octet-stream")
ARROW = "application/vnd.apache.arrow.stream"
SHORT = 512
"""Longest .npy header that is remembered, in bytes."""
MOST_NAMES = 100
"""Columns of an Arrow table that are read."""


class Parsed(NamedTuple):
    """The content of a body.

    Attributes
    ----------
    inputs
        One sample, or an array of samples; None if `samples` is set.
    samples : list, optional
        Several samples, not yet checked.
    id : object
        The caller's own id, not yet checked; None if there is none.
    """

    inputs: Any
    samples: list[Any] | None
    id: object


def parse_body(kind: str, body: bytes) -> Parsed:
    """Return the content of a body of one of the kinds above."""
    if kind == JSON:
        return _json_body(body)
    if kind == ARROW:
        return Parsed(None, _arrow_body(body), None)
    return Parsed(_npy_body(body), None, None)


def _json_body(body: bytes) -> Parsed:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequestError("The body must be JSON in UTF-8.") from None
    if not isinstance(content, dict) or ("inputs" in content) == ("samples" in content):
        raise InvalidRequestError(
            'The body must be an object such as {"inputs": [0.1, 0.2]}, or {"samples": [...]} for'
            " several."
        )
    if unknown := content.keys() - {"inputs", "samples", "id"}:
        raise InvalidRequestError(
            "The body must have the keys `inputs` or `samples`, and `id`, but has"
            f" {sorted(unknown)[0]!r:.60}."
        )
    samples = content.get("samples")
    if "samples" in content and (not isinstance(samples, list) or not samples):
        raise InvalidRequestError("`samples` must be an array of at least one sample.")
    return Parsed(content.get("inputs"), samples, content.get("id"))


def _npy_body(body: bytes) -> NDArray[Any]:
    """Return the array in a .npy body; never unpickles, nor allocates more than the body holds."""
    try:
        # Version 1.0 has the length of its header in bytes 8 and 9.
        start = 10 + int.from_bytes(body[8:10], "little")
        short = body[6:8] == b"\x01\x00" and start <= SHORT
        shape, fortran, dtype, start = _short_header(body[:start]) if short else _npy_header(body)
        size = math.prod(shape) * dtype.itemsize
        plain = dtype.kind in "biuf" and min(shape, default=1) >= 0
    except Exception:  # NumPy's parser of headers raises many kinds of errors
        raise InvalidRequestError("The body must be an array in NumPy's .npy format.") from None
    data = body[start:]
    if not plain or len(data) != size:
        raise InvalidRequestError("The body must be a .npy array of numbers, and nothing else.")
    array = np.frombuffer(data, dtype)
    try:
        return array.reshape(shape, order="F" if fortran else "C")
    except (TypeError, ValueError):  # too many dimensions, or no room for one beside a 0
        raise InvalidRequestError("The body must be a .npy array of a shape that exists.") from None


@lru_cache(maxsize=64)
def _short_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Remember headers: most requests have the same, and parsing took a fifth of their time."""
    return _npy_header(head)


def _npy_header(head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return the shape, the order, the dtype and the length of a header."""
    file = io.BytesIO(head)
    version = npy.read_magic(file)
    read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
    return (*read(file), file.tell())


def _arrow_body(body: bytes) -> list[Any]:
    """Return the rows of an Arrow IPC stream: its only column `inputs`, or dicts of its columns.

    A row of a tensor column is an array of its shape, one of a list column a nested list. Bodies
    are not compressed, so that nothing is allocated which is larger than the body.
    """
    try:
        if any(map(_is_compressed, pa.ipc.MessageReader.open_stream(pa.py_buffer(body)))):
            raise InvalidRequestError("The Arrow body must not be compressed.")
        options = pa.ipc.IpcReadOptions(use_threads=False)
        with pa.ipc.open_stream(pa.py_buffer(body), options=options) as reader:
            if len(reader.schema.names) > MOST_NAMES:
                raise InvalidRequestError(f"A table must have at most {MOST_NAMES} columns.")
            batches = list(reader)
        if sum(batch.nbytes for batch in batches) > 2 * len(body):  # columns that share bytes
            raise InvalidRequestError("The Arrow body must not refer to bytes twice.")
        for batch in batches:
            batch.validate(full=True)
        table = pa.Table.from_batches(batches) if batches else None
        columns = {} if table is None else _arrow_columns(table)
    except InvalidRequestError:
        raise
    except Exception:  # damaged bodies raise many kinds of errors
        raise InvalidRequestError("The body must be a table as an Arrow IPC stream.") from None
    rows = len(next(iter(columns.values()), []))
    if not rows:
        raise InvalidRequestError("The Arrow table must have at least one row.")
    if [*columns] == ["inputs"]:
        return columns["inputs"]
    return [{name: values[k] for name, values in columns.items()} for k in range(rows)]


def _is_compressed(message: pa.ipc.Message) -> bool:
    """Return whether a message declares compression: field 3 of a record batch's flatbuffer."""
    data = bytes(message.metadata)

    def field(table: int, number: int) -> int | None:
        vtable = table - struct.unpack_from("<i", data, table)[0]
        place = 4 + 2 * number
        if place >= struct.unpack_from("<H", data, vtable)[0]:
            return None
        offset: int = struct.unpack_from("<H", data, vtable + place)[0]
        return table + offset if offset else None

    def follow(place: int) -> int:
        target: int = place + struct.unpack_from("<I", data, place)[0]
        return target

    header = field(follow(0), 2)
    if message.type == "schema" or header is None:
        return False
    batch = follow(header)
    if message.type == "dictionary":
        inner = field(batch, 1)
        return inner is not None and field(follow(inner), 3) is not None
    return field(batch, 3) is not None


def _arrow_columns(table: pa.Table) -> dict[str, list[Any]]:
    if len(set(table.column_names)) < len(table.column_names):
        raise InvalidRequestError("The columns of a table must have different names.")
    return {name: _arrow_rows(table.column(name)) for name in table.column_names}


def _arrow_rows(column: pa.ChunkedArray) -> list[Any]:
    if isinstance(column.type, pa.FixedShapeTensorType):
        arrays = [chunk.to_numpy_ndarray() for chunk in column.chunks if len(chunk)]
        if column.null_count:
            raise InvalidRequestError("An Arrow column must have no nulls.")
        return [row for array in arrays for row in array]
    rows: list[Any] = column.to_pylist()
    return rows
