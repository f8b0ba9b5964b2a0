"""Watch: JSON lines of requests, folded as they come, kept in a file between runs.

| key | meaning |
|---|---|
| `loss` | a loss to fold; left out or null where it is not known, or comes later |
| `id` | number of the request, growing; a line without a loss announces one that comes later |
| `exit`, `cost`, `confidence` | of any request, for the warnings |

A line may also be a loss alone, as a bare number.
"""

import hashlib
import json
import os
from typing import Any, BinaryIO

from pydantic import Field

from swiftsure.monitor.drift import Drift, DriftState
from swiftsure.monitor.order import OrderState, RequestOrder
from swiftsure.monitor.risk import Monitor, MonitorState
from swiftsure.monitor.state import Section, read_state, write_state

__all__ = ["StreamFaultError", "Watch"]

KEYS = {"loss", "id", "exit", "cost", "confidence"}
LONGEST = 1 << 20
"""Bytes of a line at most: what is longer is no line of losses."""
TAIL = 512
"""How many bytes before the place reached must still be there when reading goes on."""


class StreamFaultError(ValueError):
    """A line of the stream voids the guarantee; those before it are folded, it is not."""


class StreamState(Section):
    """How far a stream was read."""

    lines: int = Field(ge=0)
    offset: int = Field(ge=0)
    tail: str
    """Fingerprint of the last bytes read, to know the file again."""
    unreadable: int = Field(default=0, ge=0)


START = StreamState(lines=0, offset=0, tail=hashlib.sha256(b"").hexdigest())


KINDS: dict[str, type[Section]] = {
    "monitor": MonitorState,
    "order": OrderState,
    "drift": DriftState,
    "stream": StreamState,
}


class Watch:
    r"""Reads JSON lines into a monitor, with what belongs to it, and keeps all of it in a file.

    Parameters
    ----------
    monitor : Monitor
    drift : Drift, optional
        To warn of what needs no labels.
    patience, missing
        As in `RequestOrder`.

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
        self.unreadable = 0
        self.lines = 0
        self.offset = 0
        self._rest = b""  # of a line whose end has not come yet
        self._tail = b""  # the last bytes that were read
        self._in_file = False  # where a place can be found again, as in a pipe it cannot
        self._place_before = START  # in a file, as a state says
        self._drift_before: DriftState | None = None  # kept for when there is a policy again

    def feed(self, data: bytes) -> None:
        """Take some bytes of the stream; what follows the last line break waits for its rest.

        Raises
        ------
        StreamFaultError
            At a line that voids the guarantee. Reading again starts with this line.
        """
        *lines, rest = (self._rest + data).split(b"\n")
        for position, line in enumerate(lines):
            try:
                self._take(line)
            except (ValueError, TypeError, OverflowError) as error:
                self._rest = b"\n".join([*lines[position:], rest])
                raise StreamFaultError(f"line {self.lines + 1:,} of the stream: {error}") from None
            self._passed(line + b"\n")
        if len(rest) > LONGEST:
            raise ValueError(
                f"`stream` must be JSON lines, but line {self.lines + 1:,} is longer than"
                f" {LONGEST:,} bytes."
            )
        self._rest = rest

    def finish(self) -> bool:
        """Take what the stream ends with; return whether that was a line cut short.

        An object that is whole is a line though no line break follows. Anything else may be a part
        of one, a bare number too, and is left for the next time.
        """
        if not self._rest.strip():
            return False
        if not isinstance(_parsed(self._rest), dict):
            return True
        self.feed(b"\n")
        self.lines -= 1  # this line break was never there
        self.offset -= 1
        self._tail = self._tail[:-1]
        return False

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        content = _parsed(line)
        if _is_number(content):
            content = {"loss": content}
        if not isinstance(content, dict) or not KEYS & content.keys():
            self.unreadable += 1
            return
        seen = {name: content.get(name) for name in ("exit", "cost", "confidence")}
        if self.drift is not None:
            self.drift.refuse(**seen)  # before the loss: a line is taken whole or not at all
        self._fold(content.get("id"), content.get("loss"))
        if self.drift is not None:
            self.drift.update(**seen)

    def _fold(self, request: Any, loss: Any) -> None:
        if loss is not None and not _is_number(loss):
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

    def _passed(self, line: bytes) -> None:
        self.lines += 1
        self.offset += len(line)
        self._tail = (self._tail + line)[-TAIL:]

    def resume(self, file: BinaryIO, name: str = "the stream") -> None:
        """Go to the place in a file where reading goes on.

        Raises
        ------
        ValueError
            If the file is not the one that was read before.
        """
        place = self._place()
        start = max(0, place.offset - TAIL)
        file.seek(start)
        before = file.read(place.offset - start)
        if start + len(before) < place.offset or _fingerprint(before) != place.tail:
            raise ValueError(
                f"{name} is not the file that was read before, up to byte {place.offset:,}: it was"
                " replaced or cut. Read the rest of the old file first, then this one from its"
                " start (--from-start)."
            )
        self._in_file, self._rest, self._tail = True, b"", before
        self.lines, self.offset = place.lines, place.offset

    def restart(self) -> None:
        """Read the next file from its start; what was folded stays folded."""
        self._in_file, self._rest, self._tail = False, b"", b""
        self.lines, self.offset, self._place_before = 0, 0, START

    def _place(self) -> StreamState:
        """Return where reading a file goes on; a pipe in between leaves that as it is."""
        if not self._in_file:
            return self._place_before
        return StreamState(lines=self.lines, offset=self.offset, tail=_fingerprint(self._tail))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything as JSON, whole or not at all: a run that is killed goes on from here."""
        write_state(
            path,
            {
                "monitor": self.monitor.state(),
                "order": self.order.state(),
                "drift": self._drift_before if self.drift is None else self.drift.state(),
                "stream": self._place().model_copy(update={"unreadable": self.unreadable}),
            },
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        drift: Drift | None = None,
        *,
        patience: int | None = None,
        missing: str = "lowest",
    ) -> "Watch":
        """Read a state, checked in every field; see `Monitor.load`."""
        found = read_state(path, KINDS)
        watch = cls(Monitor.from_state(found["monitor"]), drift, patience=patience, missing=missing)
        if "order" in found:
            watch.order.restore(found["order"])
        watch._drift_before = found.get("drift")
        if drift is not None and watch._drift_before is not None:
            drift.restore(watch._drift_before)
        if "stream" in found:
            watch._place_before = found["stream"]
            watch.unreadable = found["stream"].unreadable
        return watch


def _parsed(line: bytes) -> Any:
    """Return what a line of JSON holds; None if it is none, such as one that a crash cut short."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fingerprint(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
