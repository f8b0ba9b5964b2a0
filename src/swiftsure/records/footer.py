"""`column_sizes`: what the footer of a Parquet file says of its columns, read without pyarrow.

pyarrow ends the whole process at some damaged footers if it is asked for the metadata of a column.
It raises an error if it is asked to read one, but then a small file may fill the memory first.
"""

import os
from pathlib import Path
from typing import Any

__all__ = ["column_sizes"]

ROW_GROUPS, COLUMNS, METADATA, N_VALUES, UNPACKED = 4, 1, 3, 5, 6
"""Numbers of fields in the format's Thrift definition."""


def column_sizes(path: str | os.PathLike[str]) -> list[list[tuple[int, int]]]:
    """Return (number of values, bytes when decompressed) of each column of each row group.

    Raises
    ------
    ValueError
        If there is no such footer.
    """
    with Path(path).open("rb") as file:
        file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(4), "little")
        file.seek(-8 - size, os.SEEK_END)
        data = file.read(size)
    try:
        footer, _ = _struct(data, 0)
        columns = [group[COLUMNS] for group in footer[ROW_GROUPS]]
        found = [[each[METADATA] for each in group] for group in columns]
        sizes = [[(each[N_VALUES], each[UNPACKED]) for each in group] for group in found]
    except (LookupError, TypeError, RecursionError):
        raise ValueError("its footer is damaged") from None
    if any(min(each) < 0 for group in sizes for each in group):
        raise ValueError("its footer is damaged")
    return sizes


def _struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Return the fields of a struct in Thrift's compact protocol, by number, and where it ends."""
    fields: dict[int, Any] = {}
    number = 0
    while head := data[at]:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            number, at = _integer(data, at)
        kind = head & 15
        if kind in (1, 2):  # a boolean, which has no value of its own
            continue
        fields[number], at = _value(data, at, kind)
    return fields, at + 1


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    """Return a value of a kind, or None if it is no number, list or struct, and where it ends."""
    if kind in (1, 2, 3):
        return data[at], at + 1
    if kind in (4, 5, 6):
        return _integer(data, at)
    if kind == 7:
        return None, at + 8
    if kind == 8:
        size, at = _varint(data, at)
        return None, at + size
    if kind in (9, 10):
        head, at = data[at], at + 1
        size, at = _varint(data, at) if head >> 4 == 15 else (head >> 4, at)
        values = []
        for _ in range(size):
            value, at = _value(data, at, head & 15)
            values.append(value)
        return values, at
    if kind == 12:
        return _struct(data, at)
    raise LookupError(kind)  # maps are not in the format


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
