"""Scores from files: tables, and the logs of lm-evaluation-harness and inspect-ai.

| file | recognised by | a sample | score |
|---|---|---|---|
| table, `.csv` or `.parquet` | its ending; one column per model | a row, or `id` | the column |
| lm-evaluation-harness, `.jsonl` | `doc_id` | `doc_id`, `doc_hash` | the measure's field |
| inspect-ai, `.json` or `.eval` | `samples` | `id`, and `epoch` | `scores[measure].value` |
"""

import json
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from swiftsure._lib.files import shortened
from swiftsure.comparing.columns import Columns
from swiftsure.records.frames import read_csv

__all__ = ["read_columns"]

GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""inspect-ai's letters: correct, partly correct, incorrect, no answer."""

ZSTANDARD = 93
"""The compression of inspect-ai's archives, as ZIP numbers it."""

TABLES = (".csv", ".parquet")

PathLike = str | os.PathLike[str]


def read_columns(
    source: PathLike | Mapping[str, PathLike], measure: str, *, filter_name: str | None = None
) -> Columns:
    """Read the scores of several models on the same samples.

    Parameters
    ----------
    source : path, or mapping of models to paths
        One table with a column per model (`.csv`, `.parquet`), or one log per model.
    measure : str
        What the logs measure: a field of lm-evaluation-harness, such as "exact_match", or the name
        of a scorer of inspect-ai, such as "match". Tables hold one measure, and need no name.
    filter_name : str, optional
        lm-evaluation-harness: the filter of the answers, such as "strict-match", if the log has
        several.

    Raises
    ------
    ValueError
        If a log cannot be read, or the logs are not of the same samples.
    """
    if not isinstance(source, Mapping):
        return _table(Path(source))
    logs = {name: _scores(Path(path), measure, filter_name) for name, path in source.items()}
    first = next(iter(logs), None)
    if first is None:
        raise ValueError("`source` must name two logs at least, but names none.")
    samples = list(logs[first])
    for name, scores in logs.items():
        apart = set(samples) ^ set(scores)
        if apart:
            raise ValueError(
                f"`source` must be logs of the same samples, but {len(apart):,} samples are only in"
                f" one of {first} and {name}, such as {sorted(apart)[0][0]!r}. Run both on the same"
                " data; leaving samples out could favour one of them."
            )
    columns = {name: np.array([scores[key] for key in samples]) for name, scores in logs.items()}
    questions = [question for question, _ in samples]
    repeated = len(set(questions)) < len(questions)
    return Columns(
        columns,
        ids=[f"{question}/{turn}" if repeated else question for question, turn in samples],
        groups=questions if repeated else None,
    )


def _table(path: Path) -> Columns:
    if path.suffix not in TABLES:
        raise ValueError(
            f"`source` must be a table ({', '.join(TABLES)}) or a log for each of several models,"
            f" but got {path.name}."
        )
    if not path.is_file():
        raise ValueError(f"`source` must be an existing file, but {path} is not one.")
    if path.suffix == ".csv":
        return Columns.of(read_csv(path))
    from pyarrow import parquet

    return Columns.of(parquet.read_table(path))


def _scores(path: Path, measure: str, filter_: str | None) -> dict[tuple[str, str], float]:
    """Return the score of every sample of a log, by its question and its turn."""
    if not path.is_file():
        raise ValueError(f"`source` must be existing files, but {path} is not one.")
    try:
        inspect = path.suffix in (".json", ".eval")
        return _inspect(path, measure) if inspect else _lm_eval(path, measure, filter_)
    except (ValueError, TypeError, KeyError, zipfile.BadZipFile) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else shortened(error)
        raise ValueError(f"{path}: {why.removesuffix('.')}.") from None


def _lm_eval(path: Path, measure: str, filter_: str | None) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    filters: set[str] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        entry = json.loads(line)
        if not isinstance(entry, dict) or "doc_id" not in entry:
            raise ValueError(f"line {number} is not a sample of lm-evaluation-harness")
        if filter_ is not None and entry.get("filter") != filter_:
            continue
        filters.add(str(entry.get("filter")))
        if len(filters) > 1:
            raise ValueError(f"its answers were filtered in several ways: {sorted(filters)}")
        if measure not in entry:
            raise ValueError(f"line {number} has no {measure!r}, but {entry.get('metrics', [])}")
        question = f"{entry['doc_id']}-{str(entry.get('doc_hash', ''))[:12]}".removesuffix("-")
        _add(found, (question, "1"), float(entry[measure]))
    if not found:
        raise ValueError("it holds no samples" + (f" of the filter {filter_!r}" if filter_ else ""))
    return found


def _inspect(path: Path, measure: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for sample in _inspect_samples(path):
        if sample.get("error"):
            raise ValueError(f"sample {sample['id']!r} ended in an error, so it has no score")
        scores = sample.get("scores") or {}
        if measure not in scores:
            raise ValueError(f"sample {sample['id']!r} has no {measure!r}, but {sorted(scores)}")
        value = scores[measure]["value"]
        value = GRADES[value] if isinstance(value, str) and value in GRADES else float(value)
        _add(found, (str(sample["id"]), str(sample.get("epoch", 1))), value)
    if not found:
        raise ValueError("it holds no samples")
    return found


def _inspect_samples(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".json":
        yield from json.loads(path.read_bytes()).get("samples") or []
        return
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.filename.startswith("samples/") and entry.filename.endswith(".json"):
                yield json.loads(_content(path, archive, entry))


def _content(path: Path, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return a file of an archive; before Python 3.14, `zipfile` cannot read Zstandard."""
    if entry.compress_type != ZSTANDARD:
        return archive.read(entry)
    import pyarrow as pa

    with path.open("rb") as file:
        file.seek(entry.header_offset + 26)
        name_and_extra = struct.unpack("<HH", file.read(4))
        file.seek(sum(name_and_extra), os.SEEK_CUR)
        packed = file.read(entry.compress_size)
    content: bytes = pa.decompress(packed, entry.file_size, "zstd", asbytes=True)
    return content


def _add(found: dict[tuple[str, str], float], key: tuple[str, str], value: float) -> None:
    if key in found:
        raise ValueError(f"it holds the sample {key[0]!r} twice")
    found[key] = value
