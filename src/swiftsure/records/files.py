"""Record files: Parquet with one row per sample."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from swiftsure._lib import checks
from swiftsure._lib.files import (
    TooLargeError,
    atomic_write,
    max_unpacked,
    npz,
    shortened,
    validation_message,
)
from swiftsure.curves.sample_order import SampleOrder
from swiftsure.curves.sampling import SHARED, Sampling
from swiftsure.losses import LossRange
from swiftsure.records import plain_arrays
from swiftsure.records.footer import column_sizes

__all__ = [
    "VERSION",
    "about",
    "checksum",
    "is_csv",
    "keeps_order",
    "kind",
    "load",
    "load_parts",
    "packed",
    "reading",
    "save",
    "write",
]

FIRST_VERSION, DIALS_VERSION, VERSION = 1, 2, 3
"""Versions of the file layout; newer ones are refused, and each record has the oldest that fits.

Records without dials, with them, and records that were split or whose ids `_look_given` misjudges.
"""

OTHERS = (".npz", ".npy", ".csv", ".json", ".txt", ".pkl", ".pt")
"""Suffixes of other formats, refused for a Parquet file."""

KEY, CHECKSUM = b"swiftsure", b"swiftsure-checksum"
"""Keys of the file's metadata: the header as JSON, and its checksum."""

TABLES = {
    "confidences": "confidence",
    "losses": "loss",
    "inconsistencies": "inconsistency",
    "features": "feature",
}
"""Attributes of a record that map names to tables, and the prefixes of their columns."""

TEXTS = ["id", "group", "slice"]
"""Columns that may hold texts."""

FULL = "full cost/"
"""Prefix of the columns of the full model's costs."""

Array = NDArray[Any]


def save(record: Any, path: str | os.PathLike[str], *, durable: bool = True) -> None:
    """Write a record as a Parquet file, atomically."""
    suffix = Path(path).suffix.lower()
    if suffix in OTHERS:
        raise ValueError(
            f"`path` must not end in {suffix}: a record is a Parquet file; got {path}."
        )
    write(packed(record), path, durable=durable)


def packed(record: Any) -> pa.Table:
    """Return a record as a table: one column per table, and the rest in its metadata."""
    columns: dict[str, pa.Array] = {"id": pa.array(record.ids)}
    draw = {"group": record.groups, "slice": record.slices, "weight": record.sampling.weights}
    columns |= {name: pa.array(values) for name, values in draw.items() if values is not None}
    if getattr(record, "predictions", None) is not None:
        columns["prediction"] = _lists(record.predictions)
    for attribute, prefix in TABLES.items():
        for name, values in getattr(record, attribute, {}).items():
            columns[f"{prefix}/{name}"] = _lists(values)
    shared_costs = {}
    for name, values in record.costs.items():
        if values.ndim == 1:
            shared_costs[name] = values.tolist()
        else:
            columns[f"cost/{name}"] = _lists(values)
    full_costs = dict(getattr(record, "full_costs", {}))
    for name, values in full_costs.items():
        if np.ndim(values) == 1:
            columns[f"{FULL}{name}"] = pa.array(values)
    header: dict[str, Any] = {
        "kind": "thresholds" if hasattr(record, "thresholds") else "exits",
        "version": FIRST_VERSION,
        "costs": shared_costs,
        "loss_ranges": {k: _range_json(v) for k, v in record.loss_ranges.items()},
        "inconsistency_ranges": {k: _range_json(v) for k, v in record.inconsistency_ranges.items()},
        "fingerprint": record.fingerprint,
        "order": {"seed": record.order.seed, "drawn": record.order.drawn},
        "sampling": record.sampling.facts(),
        "columns": {name: _digest(_values(column)) for name, column in columns.items()},
        "settings": dict(record.settings),
    }
    if header["kind"] == "exits":
        header |= {"temperatures": record.temperatures, "dtype": record.dtype}
        header |= {"full_costs": {k: v for k, v in full_costs.items() if np.ndim(v) == 0}}
    else:
        never = [None if np.isinf(t) else t for t in record.thresholds.tolist()]
        header |= {"thresholds": never, "dial": record.dial}
        if record.dials:
            header |= {"version": DIALS_VERSION, "dials": record.dials}
    header |= _origin(record)
    text = json.dumps(header).encode()
    return pa.table(columns).replace_schema_metadata({KEY: text, CHECKSUM: _sha256(text)})


def _origin(record: Any) -> dict[str, Any]:
    """Return what a header says about splits and ids, if there is anything to say."""
    found: dict[str, Any] = {}
    if record.order.splits:
        splits = record.order.splits
        found["splits"] = [{"seed": each.seed, "drawn": each.drawn} for each in splits]
    if record.has_ids != _look_given(record.ids):
        found["has_ids"] = record.has_ids
    return found and {"version": VERSION, **found}


def _look_given(ids: Array, first: int = 0) -> bool:
    """Return whether ids, from this row of a file on, are other than the numbers of the rows."""
    return not np.array_equal(ids, np.arange(first, first + len(ids)))


def write(table: pa.Table, path: str | os.PathLike[str], *, durable: bool = True) -> None:
    """Write what `packed` returns, atomically."""
    with atomic_write(path, durable=durable) as temporary, temporary.open("wb") as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )


def checksum(record: pa.Table | str | os.PathLike[str]) -> str:
    """Return the checksum of a record's header, which holds digests of all columns.

    Parameters
    ----------
    record : table or path
        What `packed` returns, or a Parquet file.
    """
    metadata = record.schema.metadata if isinstance(record, pa.Table) else _metadata(record)
    return str((metadata or {}).get(CHECKSUM, b""), "ascii", "replace")


def kind(path: str | os.PathLike[str]) -> str:
    """Return the kind of a record file, "exits" or "thresholds"."""
    if is_csv(path):
        return "exits"
    if plain_arrays.is_npz(path):
        with npz(path) as arrays:
            several = any(key.startswith("dials.") for key in arrays)
            return "thresholds" if several or "thresholds" in arrays else "exits"
    return _header(path).kind


@contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in every error about its content."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if str(path) in str(error):
            raise
        expected = TypeError if isinstance(error, TypeError) else ValueError
        raise expected(f"{path}: {error}") from None


def keeps_order(path: str | os.PathLike[str]) -> bool:
    """Return whether a file holds the seed of the sample order; otherwise loading draws one."""
    return not plain_arrays.is_npz(path) and not is_csv(path)


def load(
    path: str | os.PathLike[str], expected: str, only: Mapping[str, Iterable[str] | None]
) -> dict[str, Any]:
    """Return the arguments for a record's constructor; `only` names the tables to read."""
    _check_kind(path, expected)
    only = {**only, "inconsistencies": only.get("losses")}
    if plain_arrays.is_npz(path):
        return plain_arrays.load(path, only)
    layout = _layout(path, only)
    return _arguments(layout, _columns(path, layout.columns, layout.header))


def load_parts(
    path: str | os.PathLike[str], expected: str, only: Mapping[str, Iterable[str] | None]
) -> Iterator[dict[str, Any]]:
    """Yield the arguments for a record's constructor, for each row group of a Parquet file.

    `only` names the tables to read; inconsistencies are named as well as losses. Damage may be
    noticed only after the last of them.
    """
    _check_kind(path, expected)
    layout, done = _layout(path, only), 0
    for data in _row_groups(path, layout.columns, layout.header):
        yield _arguments(layout, data, done)
        done += len(data["id"])


def about(path: str | os.PathLike[str]) -> tuple["_Header", int]:
    """Return the header of a record in a Parquet file, and its number of samples."""
    header = _header(path)
    with Path(path).open("rb") as opened, pq.ParquetFile(opened) as file:
        return header, int(file.metadata.num_rows)


def _check_kind(path: str | os.PathLike[str], expected: str) -> None:
    found = kind(path)
    if found != expected:
        classes = {"exits": "an ExitRecord", "thresholds": "a ThresholdRecord"}
        raise ValueError(
            f"{path} holds {classes[found]}, but {classes[expected]} is needed here (to load it as"
            f" what it is: {classes[found].split()[1]}.load)."
        )


class _Layout(NamedTuple):
    """What is read of a file: the names in each table, and the columns."""

    header: "_Header"
    wanted: dict[str, list[str]]
    columns: list[str]


def _layout(path: str | os.PathLike[str], only: Mapping[str, Iterable[str] | None]) -> _Layout:
    header = _header(path)
    present = list(header.columns)
    columns = [name for name in present if "/" not in name or name.startswith(("cost/", FULL))]
    wanted: dict[str, list[str]] = {}
    for attribute, prefix in TABLES.items():
        names = [c.removeprefix(f"{prefix}/") for c in present if c.startswith(f"{prefix}/")]
        wanted[attribute] = plain_arrays.selected(attribute, names, only.get(attribute))
        columns += [f"{prefix}/{name}" for name in wanted[attribute]]
    _refuse_unknown(only.get("losses"), wanted, present)
    return _Layout(header, wanted, columns)


def _arguments(layout: _Layout, data: Mapping[str, Array], first: int = 0) -> dict[str, Any]:
    """Return the arguments for a record's constructor, given the columns from some row on."""
    header = layout.header
    arguments: dict[str, Any] = {
        attribute: {name: data[f"{prefix}/{name}"] for name in layout.wanted[attribute]}
        for attribute, prefix in TABLES.items()
    }
    costs: dict[str, Any] = dict(header.costs)
    costs |= {c.removeprefix("cost/"): data[c] for c in layout.columns if c.startswith("cost/")}
    arguments |= {
        "costs": costs,
        "ids": data["id"],
        "has_ids": _look_given(data["id"], first) if header.has_ids is None else header.has_ids,
        "groups": data.get("group"),
        "slices": data.get("slice"),
        "fingerprint": header.fingerprint,
        "order": SampleOrder(header.order.seed, header.order.drawn).after(
            *(SampleOrder(each.seed, each.drawn) for each in header.splits)
        ),
        "sampling": Sampling(**header.sampling, weights=data.get("weight")),
        "loss_ranges": {name: LossRange(*each) for name, each in header.loss_ranges.items()},
        "inconsistency_ranges": {
            name: LossRange(*each) for name, each in header.inconsistency_ranges.items()
        },
    }
    own = header.model_dump(include=header.own_fields | {"settings"})
    if isinstance(header, _ExitHeader):
        arguments["predictions"] = data.get("prediction")
        alone = {c.removeprefix(FULL): data[c] for c in layout.columns if c.startswith(FULL)}
        own["full_costs"] |= alone
    else:
        del arguments["confidences"], arguments["features"]
    return arguments | own


def _columns(path: str | os.PathLike[str], names: list[str], header: "_Header") -> dict[str, Array]:
    """Return columns by name, after comparing each with its digest in the header."""
    with _opened(path, names) as file:
        table = file.read(columns=names)
        _check_texts(path, table)
        found = {name: _values(table[name]) for name in names}
    for name, values in found.items():
        _compare(path, name, _digest(values), header)
    return found


def _row_groups(
    path: str | os.PathLike[str], names: list[str], header: "_Header"
) -> Iterator[dict[str, Array]]:
    """Yield columns by name, a row group at a time; compare them with their digests at the end."""
    with _opened(path, names) as file:
        groups, n = range(file.metadata.num_row_groups), file.metadata.num_rows
        widths = {name: _width(file, name) for name in names if "/" not in name}
    digests: dict[str, Any] = {}
    for group in groups:
        with _opened(path, names, checked=True) as file:
            table = file.read_row_group(group, columns=names)
            _check_texts(path, table)
            found = {name: _values(table[name]) for name in names}
        del table
        for name, values in found.items():
            whole = values.astype(f"<U{widths[name]}") if values.dtype.kind == "U" else values
            if name not in digests:
                digests[name] = _new_digest(whole.dtype, (n, *whole.shape[1:]))
            digests[name].update(np.ascontiguousarray(whole).view(np.uint8).data)
        yield found
    for name, digest in digests.items():
        _compare(path, name, digest.hexdigest(), header)


def _width(file: pq.ParquetFile, name: str) -> int:
    """Return the length of the longest text in a column; 0 if it holds numbers."""
    if not _is_text(file.schema_arrow.field(name).type):
        return 0
    parts = (file.read_row_group(group, columns=[name]) for group in range(file.num_row_groups))
    return max(_longest(part[name]) for part in parts)


def _longest(texts: pa.ChunkedArray) -> int:
    """Return the number of characters of the longest text in a column; at least 1."""
    found = (pc.max(pc.utf8_length(chunk.dictionary)).as_py() or 1 for chunk in texts.chunks)
    return max(found, default=1)


def _check_texts(path: str | os.PathLike[str], table: pa.Table) -> None:
    """Raise if texts, all as long as the longest, would need far more memory than the file.

    NumPy stores them so, with four bytes per character.
    """
    wide = [column for column in table.columns if pa.types.is_dictionary(column.type)]
    max_unpacked(path, sum(4 * len(each) * _longest(each) for each in wide))


def _unpacked(path: str | os.PathLike[str], file: pq.ParquetFile) -> int:
    """Return how many bytes the columns of a file take in memory.

    The sizes in its metadata do not say: encoded, millions of equal rows take a few bytes. Texts
    are read as dictionaries, so that each counts once, and a row as an index of four bytes.
    """
    metadata, sizes, total = file.metadata, column_sizes(path), 0
    groups = [metadata.row_group(each) for each in range(metadata.num_row_groups)]
    rows = max(metadata.num_rows, sum(group.num_rows for group in groups))
    fields = list(file.schema_arrow)
    if any(len(fields) != len(group) for group in sizes):  # one that holds several
        raise ValueError("its columns are not those of a record")
    for number, field in enumerate(fields):
        is_list = pa.types.is_fixed_size_list(field.type)
        kind, per_row = (
            (field.type.value_type, field.type.list_size) if is_list else (field.type, 1)
        )
        n_values = sum(group[number][0] for group in sizes)
        if _is_text(kind) and not is_list:
            total += 4 * rows + sum(group[number][1] for group in sizes)
        elif pa.types.is_integer(kind) or pa.types.is_floating(kind):
            total += max(per_row * rows, n_values) * kind.bit_width // 8
        else:
            raise ValueError(f"its column {field.name!r:.200} is of type {field.type}")
    return total


def _is_text(kind: pa.DataType) -> bool:
    """Return whether a column holds texts, which are read as dictionaries."""
    dictionary = pa.types.is_dictionary(kind)
    return bool(pa.types.is_string(kind.value_type if dictionary else kind))


@contextmanager
def _opened(
    path: str | os.PathLike[str], names: list[str], checked: bool = False
) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file, whose size may be checked already; errors say that it is damaged."""
    texts = [name for name in TEXTS if name in names]
    try:
        with (
            Path(path).open("rb") as opened,  # pyarrow refuses names that are not UTF-8
            pq.ParquetFile(opened, page_checksum_verification=True, read_dictionary=texts) as file,
        ):
            if not checked:
                max_unpacked(path, _unpacked(path, file))
            yield file
    except TooLargeError:
        raise
    except (pa.ArrowException, OSError, MemoryError, LookupError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged or cut short ({shortened(error)}).") from None


def _compare(path: str | os.PathLike[str], name: str, digest: str, header: "_Header") -> None:
    if digest != header.columns[name]:
        raise ValueError(f"{path} is damaged: its column {name!r} does not fit its checksum.")


def _refuse_unknown(
    losses: Iterable[str] | None, wanted: Mapping[str, list[str]], present: Iterable[str]
) -> None:
    """Refuse a loss that the file holds neither as a loss nor as an inconsistency."""
    known = [c.partition("/")[2] for c in present if c.startswith(("loss/", "inconsistency/"))]
    for name in losses or ():
        if name not in [*wanted["losses"], *wanted["inconsistencies"]]:
            checks.choice("losses", name, dict.fromkeys(known))


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Order(_Strict):
    """A seed, of the order in which the samples are tested or of a split."""

    seed: int = Field(ge=0)
    drawn: bool


_Sampling: Any = create_model(  # type: ignore[call-overload]
    "_Sampling",
    __base__=_Strict,
    **{each.name: (each.type, each.default) for each in fields(Sampling) if each.name in SHARED},
)
"""How the samples were drawn, as far as all of them share it."""


class _Header(_Strict):
    """What a record file says besides its columns."""

    own_fields: ClassVar[set[str]]
    """Fields of one kind of record."""
    kind: Literal["exits", "thresholds"]
    version: int = Field(ge=1, le=VERSION)
    costs: dict[str, list[float]]
    loss_ranges: dict[str, tuple[float, float, bool]]
    inconsistency_ranges: dict[str, tuple[float, float, bool]]
    fingerprint: str | None
    order: _Order
    sampling: dict[str, Any] = Field(default_factory=dict)
    columns: dict[str, str]
    """A digest of each column's values."""
    settings: dict[str, Any] = Field(default_factory=dict)
    splits: tuple[_Order, ...] = ()
    """The seeds of the splits that drew these samples from others; from version 3 on."""
    has_ids: bool | None = None
    """Whether the ids were given, if they do not look so, or do although they were not."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        _Sampling.model_validate(self.sampling)
        if ("weight" in self.columns) != ("max_weight" in self.sampling):
            raise ValueError("weights and their largest value must be given together")
        if "id" not in self.columns:
            raise ValueError("it has no column of ids")
        return self


class _ExitHeader(_Header):
    own_fields = {"temperatures", "dtype", "full_costs"}
    temperatures: tuple[float, ...] | None = None
    dtype: str | None = None
    full_costs: dict[str, float] = Field(default_factory=dict)


class _ThresholdHeader(_Header):
    own_fields = {"thresholds", "dial", "dials"}
    thresholds: list[float | None]
    dial: str = ""
    dials: dict[str, list[Any]] = Field(default_factory=dict)
    """Values of several dials, one per setting; from version 2 on."""


def _header(path: str | os.PathLike[str]) -> _Header:
    metadata = _metadata(path)
    text = metadata.get(KEY)
    if text is None:
        raise ValueError(
            f"{path} is a Parquet file, but not a Swiftsure record: it was not written by"
            " `record.save`."
        )
    try:
        content = json.loads(text)
        version, kind = content.get("version"), content.get("kind")
    except (AttributeError, RecursionError, ValueError):
        raise ValueError(f"{path} is damaged: its header is not valid JSON.") from None
    if isinstance(version, int) and version > VERSION:
        raise ValueError(
            f"{path} was written by a newer Swiftsure (record version {version}; this one reads up"
            f" to {VERSION}): upgrade swiftsure to read it."
        )
    if metadata.get(CHECKSUM) != _sha256(text):
        raise ValueError(f"{path} is damaged: its header does not fit its checksum.")
    try:
        kinds = _ThresholdHeader if kind == "thresholds" else _ExitHeader
        return kinds.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"{path} is not a valid record: {validation_message(error)}.") from None


def is_csv(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is named as a CSV file, which `records.frames` reads."""
    return Path(path).suffix.lower() == ".csv"


def _metadata(path: str | os.PathLike[str]) -> dict[bytes, bytes]:
    """Return the metadata of a Parquet file."""
    if not Path(path).is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    try:
        with Path(path).open("rb") as opened:
            return dict(pq.read_schema(opened).metadata or {})
    except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not a readable Parquet file ({shortened(error)}). A record is one that"
            " `record.save` wrote, or an npz of plain arrays."
        ) from None


def _lists(values: Array) -> pa.Array:
    """Return a matrix as a column of fixed-size lists, which Parquet reads back in one block."""
    flat = pa.array(np.ascontiguousarray(values).ravel(), from_pandas=False)
    return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])


def _values(column: pa.Array | pa.ChunkedArray) -> Array:
    """Return a column as an array; a column of lists as a matrix."""
    if column.null_count:
        raise ValueError("a column has empty rows")
    if isinstance(column, pa.ChunkedArray) and pa.types.is_dictionary(column.type):
        return _texts(column)
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_fixed_size_list(whole.type):
        flat: Array = whole.flatten().to_numpy(zero_copy_only=False)
        return flat.reshape(-1, whole.type.list_size)
    values: Array = whole.to_numpy(zero_copy_only=False)
    return values.astype(str) if values.dtype == object else values


def _texts(column: pa.ChunkedArray) -> Array:
    """Return a column of texts, which was read as dictionaries, as an array."""
    parts = []
    for chunk in column.chunks:
        names, rows = np.asarray(chunk.dictionary.to_pylist(), str), chunk.indices.to_numpy()
        parts.append(names[rows])
    found = np.concatenate(parts) if parts else np.empty(0, str)
    longest = max(1, int(np.char.str_len(found).max(initial=1)))
    return found.astype(f"<U{longest}", copy=False)  # a dictionary may hold unused texts


def _digest(values: Array) -> str:
    """Return a hash of an array's values, type and shape."""
    found = _new_digest(values.dtype, values.shape)
    found.update(np.ascontiguousarray(values).view(np.uint8).data if values.size else b"")
    return str(found.hexdigest())


def _new_digest(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return the hash of an array's type and shape, to be updated with its values."""
    return hashlib.blake2b(f"{dtype.str}{shape}".encode(), digest_size=16)


def _sha256(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _range_json(value: LossRange) -> list[float | bool]:
    return [value.low, value.high, value.whole]
