"""Plain npz files without pickles, which can be read as records: arrays by name."""

import difflib
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swiftsure._lib import checks
from swiftsure._lib.files import npz

__all__ = ["is_npz", "load", "logits", "selected"]

TABLES = ("confidences", "losses", "inconsistencies", "features")


def is_npz(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is an npz."""
    return Path(path).suffix == ".npz" or (Path(path).is_file() and zipfile.is_zipfile(path))


def logits(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the arguments of `ExitRecord.from_logits` or `from_probabilities` from an npz.

    None if the file holds neither logits nor probabilities.
    """
    if not is_npz(path):
        return None
    with npz(path) as arrays:
        outputs = [name for name in ("logits", "probabilities") if name in arrays]
        if not outputs:
            return None
        if len(outputs) > 1:
            raise ValueError("The file must hold `logits` or `probabilities`, but holds both.")
        arguments: dict[str, Any] = {}
        for key in arrays:
            group, _, name = key.partition(".")
            if group in ("costs", "full_costs") and name:
                arguments.setdefault(group, {})[name] = arrays[key]
            else:
                known = [*outputs, "labels", "ids", "groups", "slices"]
                checks.choice("array", key, [*known, "costs.NAME", "full_costs.NAME"])
                arguments[key] = arrays[key]
        return arguments


def load(path: str | os.PathLike[str], only: Mapping[str, Iterable[str] | None]) -> dict[str, Any]:
    """Read `confidences.NAME`, `losses.NAME`, `costs.NAME`, … from an npz without pickles."""
    arguments: dict[str, Any] = {}
    with npz(path) as arrays:
        names = set(arrays)
        single = {"thresholds", "ids", "groups", "slices", "predictions"}
        groups = {*TABLES, "costs", "full_costs", "loss_ranges", "inconsistency_ranges", "dials"}
        for key in names:
            attribute, _, name = key.partition(".")
            if key in single:
                arguments[key] = arrays[key]
            elif key == "confidences":
                arguments.setdefault("confidences", {})["top1"] = arrays[key]
            elif attribute in groups and name:
                if name in selected(attribute, [name], only.get(attribute), strict=False):
                    value: Any = arrays[key]
                    value = tuple(value.tolist()) if attribute.endswith("_ranges") else value
                    arguments.setdefault(attribute, {})[name] = value
            else:
                near = difflib.get_close_matches(key, ["logits", *single, *groups], n=1)
                hint = f" Did you mean '{near[0]}'?" if near else ""
                raise ValueError(
                    f"{path} holds an unknown array {key!r}; known are thresholds, ids, groups,"
                    " slices, predictions, confidences, and confidences.NAME, losses.NAME,"
                    " inconsistencies.NAME, features.NAME, costs.NAME, full_costs.NAME, dials.NAME,"
                    " loss_ranges.NAME,"
                    " inconsistency_ranges.NAME; or in their place"
                    " logits or probabilities, and with them labels, ids, groups, slices,"
                    f" costs.NAME and full_costs.NAME.{hint}"
                )
    return arguments


def selected(
    attribute: str, names: list[str], only: Iterable[str] | None, strict: bool = True
) -> list[str]:
    """Return the names in a table that are to be read."""
    if only is None:
        return names
    if attribute == "confidences" and strict:
        return [checks.choice("scores", name, names) for name in only]
    return [name for name in only if name in names]
