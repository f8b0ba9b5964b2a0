"""Records: the losses and costs of n samples at every exit, or at every threshold."""

import os
from pathlib import Path

from swiftsure.records import files
from swiftsure.records.exit_record import ExitRecord
from swiftsure.records.sharded import ShardedRecord, record_files
from swiftsure.records.threshold_record import ThresholdRecord

__all__ = ["ExitRecord", "ShardedRecord", "ThresholdRecord", "load_record", "open_record"]


def load_record(path: str | os.PathLike[str]) -> ExitRecord | ThresholdRecord:
    """Read a record of either kind, from a file or from all Parquet files in a folder."""
    if Path(path).is_dir():
        paths = record_files(path)
        if files.kind(paths[0]) == "thresholds":
            return ThresholdRecord.concatenate([ThresholdRecord.load(each) for each in paths])
        return ShardedRecord(path).load()
    if files.kind(path) == "exits":
        return ExitRecord.load(path)
    return ThresholdRecord.load(path)


def open_record(path: str | os.PathLike[str]) -> ExitRecord | ThresholdRecord | ShardedRecord:
    """Read a record, but leave a folder of exit records on the disk; see `ShardedRecord`."""
    if Path(path).is_dir() and files.kind(record_files(path)[0]) == "exits":
        record = ShardedRecord(path)
        return record if record.first.groups is None else record.load()
    return load_record(path)
