"""Labels that arrive later: which audits wait for one, and the gap that follows from it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swiftsure.losses import LOSSES
from swiftsure.records.checks import gap_is_known_by_agreement

__all__ = ["LabelIndex", "gap", "needs_label"]

REMEMBERED = 100_000
"""How many requests are remembered whose loss is known."""


Said = Sequence[float] | str
"""What an answer is compared by: class probabilities, or a text."""


def needs_label(loss: str, served: Said, full: Said) -> bool:
    """Return whether the gap between two answers depends on the label."""
    if isinstance(served, str):
        apart = LOSSES.choose(loss).function("against_last")([[served, full]])
        return bool(apart[0, 0]) or not gap_is_known_by_agreement(loss)
    if LOSSES.choose(loss).of != "prediction":
        return list(served) != list(full)
    return int(np.argmax(served)) != int(np.argmax(full))


def gap(loss: str, served: Said, full: Said, label: object) -> float:
    """Return the loss of the answer served minus that of the full model.

    Raises
    ------
    ValueError
        If the label is not one of the classes, or for texts not a text or a list of them.
    """
    if isinstance(served, str):
        texts = label if isinstance(label, list) else [label]
        if not texts or not all(isinstance(each, str) for each in texts):
            raise ValueError(f"A label must be a text, or a list of texts, but got {label!r:.80}.")
        against = LOSSES.choose(loss).function("against_labels")([[served, full]], [label])
        return float(against[0, 0] - against[0, 1])
    if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < len(full):
        raise ValueError(f"A label must be a class from 0 to {len(full) - 1}, but got {label!r}.")
    both = np.array([[served, full]], np.float64)
    losses = LOSSES.choose(loss).function("against_labels")(both, np.array([label]))
    return float(losses[0, 0] - losses[0, 1])


class LabelIndex:
    """The audits in a folder's logs that wait for a label, by their own ids.

    The logs are the only memory, so labels can be given to any server of the folder, also after a
    restart. Each call reads what was appended since the last one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self._waiting: dict[str, dict[str, Any]] = {}  # by the audit's own id
        self._losses: set[str] = set()  # of audits that were not announced yet
        self._known: dict[str, None] = {}  # by the client's id, which may come twice

    def read(self) -> tuple[dict[str, dict[str, Any]], dict[str, None]]:
        """Return (audits that wait for a label, by their own id; requests with a known loss)."""
        for path in sorted(self._folder.glob("audits-*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    self._take(line)
        for audit in self._losses & self._waiting.keys():  # which may be in another log
            self._known[self._waiting.pop(audit)["request"]] = None
            self._losses.remove(audit)
        for request in list(self._known)[: max(0, len(self._known) - REMEMBERED)]:
            del self._known[request]
        return self._waiting, self._known

    def _take(self, line: bytes) -> None:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):  # cut short by a kill, or damaged: a fault elsewhere
            return
        if not isinstance(content, dict):
            return  # the monitor reports it
        audit, request = content.get("id"), content.get("request")
        if not isinstance(audit, str):
            return
        if not isinstance(request, str):
            self._losses.add(audit)
        elif all(isinstance(content.get(name), list | str) for name in ("served", "full")):
            self._waiting[audit] = content
        else:
            self._known[request] = None
