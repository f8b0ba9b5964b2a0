"""Records: the losses and costs of n samples at every exit, or at every threshold."""

import os

from swiftsure.records import files
from swiftsure.records.exit_record import ExitRecord
from swiftsure.records.threshold_record import ThresholdRecord

__all__ = ["ExitRecord", "ThresholdRecord", "load_record"]


def load_record(path: str | os.PathLike[str]) -> ExitRecord | ThresholdRecord:
    """Read a record of either kind."""
    if files.kind(path) == "exits":
        return ExitRecord.load(path)
    return ThresholdRecord.load(path)
