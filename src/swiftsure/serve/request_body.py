"""Bodies of requests: JSON, .npy and Arrow IPC, checked before anything is allocated for them."""

import io
import math
import struct
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy
from numpy.typing import NDArray

from swiftsure.serve.engine import InvalidRequestError
from swiftsure.serve.http import JSON, MOST_LISTS, RefusedError, read_json

__all__ = ["ARROW", "JSON", "NPY", "Parsed", "check_count", "parse_body"]

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
    slices : list of str or None, optional
        The slice of each sample; None if the body says nothing of slices.
    """

    inputs: Any
    samples: list[Any] | None
    id: object = None
    slices: list[str | None] | None = None


def parse_body(kind: str, body: bytes, most: int) -> Parsed:
    """Return the content of a body of one of the kinds above, with at most so many samples."""
    if kind == JSON:
        return _json_body(body)
    if kind == ARROW:
        return Parsed(None, _arrow_body(body, most))
    return Parsed(_npy_body(body), None)


def check_count(samples: int, most: int) -> None:
    """Refuse a request with more samples than may wait: sending it again would not help."""
    if samples > most:
        raise RefusedError(413, f"A request must have at most {most:,} samples.")


def _json_body(body: bytes) -> Parsed:
    content = read_json(body)
    if not isinstance(content, dict) or ("inputs" in content) == ("samples" in content):
        raise InvalidRequestError(
            'The body must be an object such as {"inputs": [0.1, 0.2]}, or {"samples": [...]} for'
            " several."
        )
    own = "slices" if "samples" in content else "slice"
    if unknown := content.keys() - {"inputs", "samples", "id", own}:
        raise InvalidRequestError(
            f"The body must have the keys `inputs` or `samples`, `id` and `{own}`, but has"
            f" {sorted(unknown)[0]!r:.60}."
        )
    samples = content.get("samples")
    if "samples" in content and (not isinstance(samples, list) or not samples):
        raise InvalidRequestError("`samples` must be an array of at least one sample.")
    return Parsed(content.get("inputs"), samples, content.get("id"), _slices_in(content, own))


def _slices_in(content: dict[str, Any], key: str) -> list[str | None] | None:
    given = content.get(key)
    if given is None:
        return None
    slices = [given] if key == "slice" else given
    if not isinstance(slices, list) or not all(isinstance(each, str | None) for each in slices):
        wanted = "a text" if key == "slice" else "an array of a text or null for each sample"
        raise InvalidRequestError(f"`{key}` must be {wanted}.")
    return slices


def _npy_body(body: bytes) -> NDArray[Any]:
    """Return the array in a .npy body; never unpickles, nor allocates more than the body holds."""
    try:
        # Version 1.0 has the length of its header in bytes 8 and 9.
        start = 10 + int.from_bytes(body[8:10], "little")
        short = body[6:8] == b"\x01\x00" and start <= SHORT
        shape, fortran, dtype, start = _short_header(body[:start]) if short else _npy_header(body)
        size = math.prod(shape) * dtype.itemsize
        plain = dtype.kind in "biuf" and min(shape, default=1) >= 1
    except Exception:  # NumPy's parser of headers raises many kinds of errors
        raise InvalidRequestError("The body must be an array in NumPy's .npy format.") from None
    data = body[start:]
    if not plain or len(data) != size:
        raise InvalidRequestError(
            "The body must be a .npy array of numbers, no axis of it empty, and nothing else."
        )
    array = np.frombuffer(data, dtype)
    try:
        return array.reshape(shape, order="F" if fortran else "C")
    except (TypeError, ValueError):  # too many dimensions
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


def _arrow_body(body: bytes, most: int) -> list[Any]:
    """Return the rows of an Arrow IPC stream: its only column `inputs`, or dicts of its columns.

    A row of a tensor or list column is an array. All that is made before the rows were counted and
    validated are views of the body.
    """
    try:
        count = sum(map(_checked_message, pa.ipc.MessageReader.open_stream(pa.py_buffer(body))))
        check_count(count, most)  # each batch has at least one row
        options = pa.ipc.IpcReadOptions(use_threads=False)
        with pa.ipc.open_stream(pa.py_buffer(body), options=options) as reader:
            _check_schema(reader.schema)
            batches = [_checked_batch(batch) for batch in reader]
        if sum(batch.nbytes for batch in batches) > 2 * len(body):  # columns that share bytes
            raise InvalidRequestError("The Arrow body must not refer to bytes twice.")
        rows = sum(batch.num_rows for batch in batches)
        check_count(rows, most)
        table = pa.Table.from_batches(batches).combine_chunks()
        columns = {name: _arrow_rows(table.column(name).chunk(0)) for name in table.column_names}
    except (InvalidRequestError, RefusedError):
        raise
    except Exception:  # damaged bodies raise many kinds of errors
        raise InvalidRequestError("The body must be a table as an Arrow IPC stream.") from None
    if [*columns] == ["inputs"]:
        return list(columns["inputs"])
    return [{name: values[k] for name, values in columns.items()} for k in range(rows)]


def _checked_message(message: pa.ipc.Message) -> bool:
    """Return whether a message is a batch, and refuse those that Arrow would not read as they are.

    Arrow decompresses buffers, swaps their bytes and looks dictionaries up before it validates
    anything. So the message's flatbuffer is read here: https://arrow.apache.org/docs/format.
    """
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
    if header is None or message.type not in ("schema", "record batch"):
        raise InvalidRequestError("The Arrow body must hold a schema and its batches alone.")
    if message.type == "schema":
        order = field(follow(header), 0)
        if order is not None and struct.unpack_from("<h", data, order)[0]:
            raise InvalidRequestError("The Arrow body must be little-endian.")
        return False
    if field(follow(header), 3) is not None:
        raise InvalidRequestError("The Arrow body must not be compressed.")
    return True


def _check_schema(schema: pa.Schema) -> None:
    if len(schema.names) > MOST_NAMES:
        raise InvalidRequestError(f"A table must have at most {MOST_NAMES} columns.")
    if len(set(schema.names)) < len(schema.names):
        raise InvalidRequestError("The columns of a table must have different names.")
    for column in schema:
        kind = column.type
        if isinstance(kind, pa.FixedShapeTensorType):
            kind = kind.storage_type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or _is_fixed(kind):
            kind = kind.value_type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise InvalidRequestError(
                f"An Arrow column must hold integers or floats, or lists or tensors of them, but"
                f" {column.name!r:.60} is of type {column.type!s:.60}."
            )


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind) and kind.list_size > 0)


def _checked_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch whose buffers are as long as its rows and offsets say."""
    batch.validate(full=True)
    if batch.num_rows == 0:
        raise InvalidRequestError("An Arrow table and its batches must have at least one row.")
    return batch


def _arrow_rows(column: pa.Array) -> Any:
    """Return an array of all rows; a list of arrays where lists differ in length."""
    if column.null_count:
        raise InvalidRequestError("An Arrow column must have no nulls.")
    if isinstance(column, pa.FixedShapeTensorArray):
        return column.to_numpy_ndarray()
    if not pa.types.is_nested(column.type):
        return column.to_numpy()
    values = _arrow_rows(column.flatten())
    if pa.types.is_fixed_size_list(column.type):
        ends = np.arange(len(column) + 1) * column.type.list_size
    else:
        ends = np.asarray(column.offsets) - column.offsets[0].as_py()
    length = ends[1] if len(ends) > 1 else 0
    if isinstance(values, np.ndarray) and np.array_equal(np.diff(ends), [length] * len(column)):
        return values.reshape(len(column), length, *values.shape[1:])
    if len(column) > MOST_LISTS:
        raise RefusedError(413, f"At most {MOST_LISTS:,} Arrow lists may differ in length.")
    return [values[start:end] for start, end in pairwise(ends)]
