"""Several logs, one monitor: folds their lines in order of time, each once, across restarts."""

import heapq
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pydantic import Field

from swiftsure.monitor._lines import parse_json
from swiftsure.monitor._place import START, Edges, StreamState, compare_file, inode_of
from swiftsure.monitor.state import Section

__all__ = ["LogPlace", "Logs", "LogsState", "log_files"]

LONGEST = 1 << 20
"""Maximum length of a line, in bytes."""


class LogPlace(Section):
    """How far a log was read."""

    place: StreamState
    time: float | None = None
    """The latest time of a line, in seconds since 1970; None if no line had one."""


class LogsState(Section):
    """How far each log was read, by path."""

    places: dict[str, LogPlace] = Field(default_factory=dict)


class _Entry(NamedTuple):
    """A line, sorted by time, then by log, then by place in the log."""

    time: float
    log: str
    number: int
    line: bytes


class Logs:
    """The positions in several logs, which are read as one stream of lines.

    Each log is append-only and has one writer. The lines of all logs are folded in order of their
    key `time`, and lines of the same time in order of the logs' paths; a line without a time counts
    as that before it. So the order does not depend on when the logs are read, if each line is
    written within `settle` seconds of its time; see `read`. A time that is still to come is of a
    clock that was wrong: it counts as now, and the line does not wait for it. Nor do lines after
    it, or after a clock was set back.

    Parameters
    ----------
    state : LogsState, optional
        Where reading stopped before.
    stream : StreamState
        Where reading stopped in a log that was read alone before.
    """

    def __init__(self, state: LogsState | None = None, stream: StreamState = START) -> None:
        self.places = {} if state is None else dict(state.places)
        self._alone = stream

    def state(self) -> LogsState | None:
        """Return the positions; None before any log was read."""
        return LogsState(places=self.places) if self.places else None

    def read(
        self, paths: Iterable[str | os.PathLike[str]], until: float = math.inf
    ) -> Iterator[tuple[str, int, bytes]]:
        """Yield (log, line number, line) for each line that was not read before.

        The position moves past a line when the next one is asked for, so a line that cannot be used
        is read again. An incomplete last line waits for its end.

        Parameters
        ----------
        paths : files
        until : float
            Lines between this time and now wait for another call: with `time.time() - settle`, a
            line that another log gets within `settle` seconds of its time is still folded in its
            place.

        Raises
        ------
        ValueError
            If a log is not the one that was read before under its name.
        """
        with ExitStack() as stack:
            found = {}
            for path in sorted({str(Path(each).resolve()) for each in paths}):
                file = stack.enter_context(Path(path).open("rb"))
                found[path] = _Reader(path, file, self._place(path, file))
            for entry in heapq.merge(*(each.entries(until) for each in found.values())):
                yield entry.log, entry.number, entry.line
                self.places[entry.log] = found[entry.log].passed(entry)

    def _place(self, path: str, file: BinaryIO) -> LogPlace:
        """Return where to resume in a log, which may have been renamed since."""
        known = self.places.get(path)
        if known is not None and compare_file(known.place, file) == "same":
            return known
        if known is not None:
            raise ValueError(
                f"{path} is not the log that was read before, up to byte {known.place.offset:,}: it"
                " was replaced or cut. Give each log a name of its own."
            )
        if self._alone.offset and compare_file(self._alone, file) == "same":
            place, self._alone = LogPlace(place=self._alone), START
            self.places[path] = place
            return place
        for old, before in self.places.items():
            if not Path(old).exists() and compare_file(before.place, file) == "same":
                self.places[path] = self.places.pop(old)
                return before
        return LogPlace(place=START)


class _Reader:
    """Reads the lines of one log from a position."""

    def __init__(self, path: str, file: BinaryIO, start: LogPlace) -> None:
        self._path, self._file = path, file
        self._lines, self._offset = start.place.lines, start.place.offset
        self._time = -math.inf if start.time is None else start.time
        self._edges = Edges.of(file, self._offset)

    def entries(self, until: float) -> Iterator[_Entry]:
        """Yield the complete lines up to a time."""
        latest, number = self._time, self._lines
        while True:
            line = self._file.readline(LONGEST + 1)
            if len(line) > LONGEST:
                raise ValueError(f"{self._path} must hold lines of at most {LONGEST:,} bytes.")
            if not line.endswith(b"\n"):
                return
            number += 1
            own, now = _time_of(line), time.time()
            if until < own <= now:
                return
            latest = max(latest, min(own, now))
            yield _Entry(latest, self._path, number, line)

    def passed(self, entry: _Entry) -> LogPlace:
        """Return the position after a line."""
        self._lines, self._time = entry.number, entry.time
        self._offset += len(entry.line)
        self._edges = self._edges.and_then(entry.line)
        place = self._edges.at(self._lines, self._offset, inode_of(self._file))
        return LogPlace(place=place, time=None if math.isinf(self._time) else self._time)


def _time_of(line: bytes) -> float:
    """Return the time of a line; -inf if it has none."""
    try:
        content = parse_json(line)
    except ValueError:
        return -math.inf
    found = content.get("time") if isinstance(content, dict) else None
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return -math.inf
    return float(found)


def log_files(paths: Iterable[Path]) -> list[Path]:
    """Return files, with each folder replaced by its files `*.jsonl`."""
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return found
