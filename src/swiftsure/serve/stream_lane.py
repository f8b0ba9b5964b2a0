"""`StreamLane`: answers requests with an engine whose requests join and leave a running batch."""

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swiftsure.serve.audits import Audited, Mode
from swiftsure.serve.engine import Answer, Part, StreamEngine
from swiftsure.serve.queueing import MOST_DEATHS, Outcome, Request, Served, WorkerDiedError

if TYPE_CHECKING:
    from swiftsure.serve.batching import Batcher

__all__ = ["StreamLane"]

log = logging.getLogger("swiftsure.serve")


@dataclass(slots=True, eq=False)
class _Row:
    """What is under way in one row of the batch: a request, or the full system for an audit."""

    mode: Mode
    request: Request | None = None
    audit: tuple[int, Audited] | None = None
    streamed: bool = False
    """Whether a part of the answer was sent, so that it cannot begin again."""


class StreamLane:
    """A thread of a batcher, for one `StreamEngine`.

    Requests join as soon as there is room, and are answered under the policy of that moment. While
    another policy waits to be installed, nobody joins. Audits run the full system in rows that no
    request waits for, so that they need no pause of the others.

    A request that is audited runs to its end also if its client went away: clients may leave
    because the answer is bad, and such answers must count.
    """

    def __init__(self, batcher: "Batcher", engine: StreamEngine) -> None:
        self._batcher, self._engine = batcher, engine
        self._rows: dict[int, _Row] = {}
        self._key = 0

    def work(self) -> None:
        """Run until the batcher closes and everything was answered and audited."""
        while self._batcher.wait(under_way=bool(self._rows)):
            try:
                self._admit()
                self._step()
            except WorkerDiedError as died:
                self._begin_again(died)
            self._batcher.look()

    def _admit(self) -> None:
        """Let requests join, and an audit where there is room left."""
        engine, mode = self._engine, self._batcher.mode
        if mode.policy is not None and engine.policy != mode.policy:
            if self._rows:
                return
            try:
                engine.install(mode.policy)
            except WorkerDiedError:
                raise
            except Exception as error:
                log.exception("a policy was not installed")
                for request in self._batcher.take(engine.room):
                    self._finish(_Row(mode, request), error)
                return
        if any(row.request is not None and row.request.deaths for row in self._rows.values()):
            return  # it may be what ended a worker, and runs alone
        for request in self._batcher.take(engine.room - len(self._rows), alone=not self._rows):
            covered = request.covered and not mode.full
            row = _Row(mode if covered else Mode(mode.policy, full=True), request)
            self._join(row, request.submission.sample, request.submission.slice_name)
        if len(self._rows) < engine.room and not self._batcher.depth:
            self._audit()

    def _join(self, row: _Row, sample: Any, slice_name: str | None = None) -> None:
        key = self._key = self._key + 1
        self._rows[key] = row
        refused: Exception | None
        try:
            refused = self._engine.join(key, sample, full=row.mode.full, slice_name=slice_name)
        except WorkerDiedError:
            raise
        except Exception as error:
            refused = error
        if refused is not None:
            self._finish(self._rows.pop(key), refused)

    def _audit(self) -> None:
        """Let the full system answer the next request to be audited."""
        taken = self._batcher.audits.take()
        if taken is None:
            return
        ticket, audited = taken
        if audited is None:
            self._batcher.audits.done(ticket)
            return
        row = _Row(Mode(audited.mode.policy, full=True), audit=(ticket, audited))
        self._batcher.begin()
        self._join(row, audited.sample)

    def _step(self) -> None:
        for key, row in list(self._rows.items()):
            request = row.request
            gone = request is not None and request.submission.done.cancelled()
            if gone and request.audit is None:  # type: ignore[union-attr]
                self._engine.leave(key)
                self._finish(self._rows.pop(key), TimeoutError())
        if not self._rows:
            return
        try:
            found = self._engine.step()
        except WorkerDiedError:
            raise
        except Exception as error:
            found = [(key, error) for key in self._rows]  # type: ignore[misc]
        parts: list[Outcome] = []
        for key, each in found:
            if not isinstance(each, Part):
                self._deliver(parts)  # whoever gets the answer must have all parts of it
                self._finish(self._rows.pop(key), each)
                continue
            row = self._rows[key]
            if row.request is not None and row.request.submission.parts is not None:
                row.streamed = True
                parts.append((row.request.submission.parts, each))
        self._deliver(parts)

    def _deliver(self, parts: list[Outcome]) -> None:
        """Hand parts over, and forget them."""
        if parts:
            self._batcher.deliver([*parts])
            parts.clear()

    def _finish(self, row: _Row, found: Answer | Exception) -> None:
        """Deliver an answer, or compare it with the one that is audited."""
        if row.audit is not None:
            ticket, audited = row.audit
            self._batcher.audit(ticket, replace(audited, full=found), self._engine)
            self._batcher.end()
            return
        request: Request = row.request  # type: ignore[assignment]
        each, answer = request.submission, found if isinstance(found, Answer) else None
        outcome = found if isinstance(found, Exception) else Served(found, row.mode)
        self._batcher.deliver([(each.done, outcome)])
        if request.audit is not None:
            audited = Audited(each.request, each.sample, answer, row.mode, each.slice_name)
            self._batcher.audits.fill(request.audit, None if row.mode.full else audited)
        self._batcher.end()

    def _begin_again(self, died: WorkerDiedError) -> None:
        """Put requests back whose worker died; those of which a part was sent fail."""
        rows, self._rows = self._rows, {}
        again = []
        for row in rows.values():
            if row.request is not None:
                row.request.deaths += 1
                if not row.streamed and row.request.deaths < MOST_DEATHS:
                    again.append(row.request)
                    continue
            self._finish(row, died)
        self._batcher.put_back(again)
        self._batcher.revive(died)
