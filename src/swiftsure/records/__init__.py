"""Records: the losses and costs of n samples at every exit, or at every threshold."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftsure.records import files
from swiftsure.records.exit_record import ExitRecord
from swiftsure.records.sharded import ShardedRecord, record_files
from swiftsure.records.threshold_record import ThresholdRecord

__all__ = ["ExitRecord", "ShardedRecord", "ThresholdRecord", "load_record", "open_record"]


def load_record(path: str | os.PathLike[str]) -> ExitRecord | ThresholdRecord:
    """Read a record of either kind, from a file or from all Parquet files in a folder."""
    if Path(path).is_dir():
        with _about_folder(path):
            paths = record_files(path)
            if files.kind(paths[0]) == "thresholds":
                return ThresholdRecord.concatenate([ThresholdRecord.load(each) for each in paths])
            return ShardedRecord(path).load()
    if files.kind(path) == "exits":
        return ExitRecord.load(path)
    return ThresholdRecord.load(path)


def open_record(path: str | os.PathLike[str]) -> ExitRecord | ThresholdRecord | ShardedRecord:
    """Read a record, but leave a folder of exit records on the disk; see `ShardedRecord`."""
    if Path(path).is_dir():
        with _about_folder(path):
            if files.kind(record_files(path)[0]) == "exits":
                record = ShardedRecord(path)
                return record if record.first.groups is None else record.load()
    return load_record(path)


@contextmanager
def _about_folder(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say in errors what a folder must hold."""
    try:
        yield
    except ValueError as error:
        raise ValueError(
            "`path` must be an existing file, or a folder with the Parquet files of one record, but"
            f" {path} is not one: {error}"
        ) from None
