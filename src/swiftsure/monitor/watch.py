"""Watch: reads requests from JSON lines into a monitor, and saves its state between runs.

| key | meaning |
|---|---|
| `loss` | a loss to add; omitted or null if it is unknown or comes later |
| `id` | id of the request; a line without a loss announces one that comes later |
| `time` | seconds since 1970, by which lines of several logs are ordered |
| `exit`, `cost`, `confidence` | the request's exit, cost and confidence, for the warnings |

A line may also be just a loss, as a bare number.
"""

import math
import os
from collections.abc import Iterable
from typing import Any, BinaryIO

from swiftsure.monitor._lines import parse_json, parse_request
from swiftsure.monitor._place import START, Edges, StreamState, compare_file, inode_of
from swiftsure.monitor.drift import Drift, DriftState
from swiftsure.monitor.logs import LONGEST, Logs, LogsState
from swiftsure.monitor.order import OrderState, RequestOrder
from swiftsure.monitor.risk import Monitor, MonitorState
from swiftsure.monitor.state import Section, read_state, write_state

__all__ = ["StreamFaultError", "Watch"]


class StreamFaultError(ValueError):
    """A line of the stream voids the guarantee; only the lines before it count."""


KINDS: dict[str, type[Section]] = {
    "monitor": MonitorState,
    "order": OrderState,
    "drift": DriftState,
    "stream": StreamState,
    "logs": LogsState,
}


class Watch:
    r"""Reads JSON lines into a monitor and its warnings, and saves their state in a file.

    Parameters
    ----------
    monitor : Monitor
    drift : Drift, optional
        For warnings that need no labels.
    patience, missing
        As in `RequestOrder`.

    Attributes
    ----------
    requests : int
        How many non-empty lines were read.
    unreadable : int
        How many of them were cut short, and skipped.
    odd : int
        How many had an exit, a cost or a confidence that the warnings cannot use.
    in_file : bool
        Whether the stream is a file, which can be resumed at a position, unlike a pipe.
    saved : str or None
        Checksum of the state file that this watch continues.

    Examples
    --------
    >>> watch = Watch(Monitor(epsilon=0.05))
    >>> watch.feed(b'{"loss": 0}\n{"loss": 1}\n{"lo')
    >>> watch.monitor.n
    2
    """

    def __init__(
        self,
        monitor: Monitor,
        drift: Drift | None = None,
        *,
        patience: int | None = None,
        missing: str = "lowest",
    ) -> None:
        self.monitor = monitor
        self.drift = drift
        self.order = RequestOrder(monitor, patience=patience, missing=missing)
        self.requests = self.unreadable = self.odd = 0
        self.lines = 0
        self.offset = 0
        self._rest = b""  # an incomplete last line
        self._edges = Edges()  # of the bytes read
        self._inode: int | None = None
        self.in_file = False
        self.logs = Logs()
        self._place_before = START  # the last position in a file, from a saved state
        self._drift_before: DriftState | None = None  # saved again if this run has no policy
        self.saved: str | None = None

    @property
    def mostly_unreadable(self) -> bool:
        """Whether more than half of the lines were skipped, so the result means little."""
        return 2 * self.unreadable > self.requests

    def feed(self, data: bytes) -> None:
        """Process bytes of the stream; an incomplete last line waits for the next call.

        Raises
        ------
        StreamFaultError
            At a line that voids the guarantee. Reading resumes with this line.
        """
        *lines, rest = (self._rest + data).split(b"\n")
        for position, line in enumerate(lines):
            try:
                self._take(line)
            except (ValueError, TypeError, OverflowError) as error:
                self._rest = b"\n".join([*lines[position:], rest])
                raise self._fault(error) from None
            self._passed(line + b"\n")
        self._rest = rest
        if len(rest) > LONGEST:
            raise self._fault(
                ValueError(f"`stream` must hold JSON lines of at most {LONGEST:,} bytes.")
            )

    def finish(self) -> bool:
        """Process the end of the stream; return whether its last line is incomplete.

        A complete object counts as a line even without a line break. Anything else, even a bare
        number, may be part of a line and is left for the next run.
        """
        if not self._rest.strip():
            return False
        try:
            whole = isinstance(parse_json(self._rest), dict)
        except ValueError:
            return True
        if not whole:
            return True
        try:
            self._take(self._rest)
        except (ValueError, TypeError, OverflowError) as error:
            raise self._fault(error) from None
        self._passed(self._rest)
        self._rest = b""
        return False

    def read_logs(self, paths: Iterable[str | os.PathLike[str]], until: float = math.inf) -> bool:
        """Process the new lines of several logs as one stream, up to an alarm; see `Logs.read`.

        Returns whether there were any.

        Raises
        ------
        StreamFaultError
            At a line that voids the guarantee. Reading resumes with this line.
        """
        any_line = False
        for log, number, line in self.logs.read(paths, until):
            if self.monitor.alarm:
                break
            try:
                self._take(line)
            except (ValueError, TypeError, OverflowError) as error:
                raise StreamFaultError(f"line {number:,} of {log}: {error}") from None
            any_line = True
        return any_line

    def _fault(self, error: Exception) -> StreamFaultError:
        return StreamFaultError(f"line {self.lines + 1:,} of the stream: {error}")

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        content = parse_request(line)
        if content is None:
            self.requests += 1
            self.unreadable += 1
            return
        self._fold(content.get("id"), content.get("loss"))
        self.requests += 1
        self._note(**{name: content.get(name) for name in ("exit", "cost", "confidence")})

    def _fold(self, request: Any, loss: Any) -> None:
        if loss is not None and not isinstance(loss, int | float):
            raise ValueError(f"`loss` must be a number, but got {loss!r}.")
        if request is None:
            if loss is not None and self.order.in_use:
                raise ValueError(
                    "`id` must be given, as it was before: all losses have one or none."
                )
            if loss is not None:
                self.monitor.update(loss)
        elif loss is None:
            self.order.expect(request)
        else:
            self.order.arrive(request, loss)

    def _note(self, **seen: Any) -> None:
        """Update the warnings; bad values are counted, since they must not block a loss."""
        if self.drift is None:
            return
        try:
            self.drift.update(**seen)
        except (ValueError, TypeError, OverflowError):
            self.odd += 1

    def _passed(self, data: bytes) -> None:
        self.lines += data.count(b"\n")
        self.offset += len(data)
        self._edges = self._edges.and_then(data)

    def resume(self, file: BinaryIO, name: str = "the stream") -> None:
        """Seek to the position in a file where the last run stopped.

        Raises
        ------
        ValueError
            If the file is not the one that was read before, or that is unclear: its lines are all
            the same, but its inode differs.
        """
        place = self._place()
        answer = compare_file(place, file)
        if answer == "other":
            raise ValueError(
                f"{name} is not the file that was read before, up to byte {place.offset:,}: it was"
                " replaced or cut. Read the rest of the old file first, then this one from its"
                " start (--from-start)."
            )
        if answer == "unclear":
            raise ValueError(
                f"{name} is another file than the one that was read before, up to byte"
                f" {place.offset:,}, but its lines are the same. If it is a new one, read it from"
                " its start (--from-start); if it is a copy, read what follows that byte so."
            )
        self.in_file, self._rest, self._inode = True, b"", inode_of(file)
        self._edges = Edges.of(file, place.offset)
        self.lines, self.offset = place.lines, place.offset

    def restart(self, file: BinaryIO | None = None, name: str = "the stream") -> None:
        """Start reading a new file from its beginning, and keep all losses so far.

        Raises
        ------
        ValueError
            If the new file is the one that was read before: its lines would count twice.
        """
        place = self._place()
        if file is not None and place.offset and compare_file(place, file) == "same":
            raise ValueError(
                f"{name} is the file that was read before, up to byte {place.offset:,}: leave out"
                " --from-start to go on there, as its lines must not count twice."
            )
        self.in_file, self._rest, self._edges = False, b"", Edges()
        self.lines, self.offset, self._place_before = 0, 0, START

    def _place(self) -> StreamState:
        """Return the position to resume at; reading a pipe in between does not change it."""
        if not self.in_file:
            return self._place_before
        return self._edges.at(self.lines, self.offset, self._inode)

    def _stream(self) -> StreamState:
        counts = {"unreadable": self.unreadable, "requests": self.requests, "odd": self.odd}
        return self._place().model_copy(update=counts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to a JSON file, atomically; a killed run resumes from it.

        Raises
        ------
        ValueError
            If the file holds a state that this one does not continue; see `Monitor.save`.
        """
        with self.monitor.lock:
            sections: dict[str, Section | None] = {
                "monitor": self.monitor.state(),
                "order": self.order.state(),
                "drift": self._drift_before if self.drift is None else self.drift.state(),
                "stream": self._stream(),
                "logs": self.logs.state(),
            }
            self.saved = write_state(path, sections, self.saved)

    def replay(self, data: bytes) -> None:
        """Process what a killed run had read from a pipe but not saved.

        The rest of an incomplete last line died with that run, so it is counted as unreadable.
        """
        self.feed(data)
        if self._rest.strip():
            self.feed(b"\n")

    @property
    def rest(self) -> bytes:
        """The incomplete last line, which the state does not hold."""
        return self._rest

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        drift: Drift | None = None,
        *,
        patience: int | None = None,
        missing: str | None = None,
    ) -> "Watch":
        """Read a state file; every field is checked. See `Monitor.load`.

        Parameters
        ----------
        patience, missing
            By default those of the state.

        Raises
        ------
        ValueError
            If the state was saved with another patience, or another rule for missing losses.
        """
        found, checksum = read_state(path, KINDS)
        order = found.get("order")
        if order is not None and order.missing is not None:
            patience = order.patience if patience is None else patience
            missing = order.missing if missing is None else missing
        monitor = Monitor.from_state(found["monitor"])
        watch = cls(
            monitor, drift, patience=patience, missing="lowest" if missing is None else missing
        )
        watch.saved = checksum
        if order is not None:
            watch.order.restore(order)
        watch._drift_before = found.get("drift")
        if drift is not None and watch._drift_before is not None:
            drift.restore(watch._drift_before)
        if "stream" in found:
            place: StreamState = found["stream"]
            watch._place_before = place
            watch.requests = place.requests or place.lines  # older states have no `requests`
            watch.unreadable, watch.odd = place.unreadable, place.odd
        watch.logs = Logs(found.get("logs"), watch._place_before)
        return watch
