"""`AuditLog`: writes audits to a log, folds all logs into a monitor, and keeps its alarm."""

import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from swiftsure._lib.files import LockedError, is_open_at, locked, read_json, sync, write_text
from swiftsure.certify.certificate import PromiseResult
from swiftsure.certify.policy import Policy
from swiftsure.losses import LOSSES
from swiftsure.monitor import Monitor, Watch, request_ids
from swiftsure.serve.audits import Audited
from swiftsure.serve.engine import Answer, AnyPolicy, Comparison, Engine, UnansweredError
from swiftsure.serve.labels import LabelIndex, gap, needs_label
from swiftsure.serve.queueing import WorkerDiedError

__all__ = ["AuditLog", "audit_monitor"]

log = logging.getLogger("swiftsure.serve")

SETTLE = 2.0
"""Seconds within which other processes must write a line, so that logs are folded in order."""
PAUSE = 1.0
"""Seconds between looks at the logs."""
LATE = 45.0
"""Seconds that anything may wait before this is a fault, so that it shows within a minute."""
FAILURES = 3
"""How many audits in a row may fail before this is a fault."""
FORMAT, VERSION = "swiftsure-fallback", 1


def audit_monitor(
    policy: Policy, alpha: float, epsilon: float | None = None, *, labels: bool = False
) -> Monitor:
    """Return a monitor of the inconsistency, which needs no labels, or of the gap.

    Parameters
    ----------
    labels : bool
        Watch the gap that the policy promises; the labels come later.
    epsilon : float, optional
        For a policy that promises a gap: the largest inconsistency allowed. An inconsistency may be
        larger than the gap, so no level follows from the promise.

    Raises
    ------
    ValueError
        If the policy was calibrated by groups, if it does not promise exactly one consistency and
        no `epsilon` is given, or if both are there. Likewise if `labels`, and
        it does not promise exactly one gap. Also if what it promises is about the samples that exit
        early, or about a worst share.
    """
    certificate = policy.certificate
    if certificate.samples.unit == "groups":
        raise ValueError(
            "`audit` must be 0 if the policy was calibrated by groups, since audits see single"
            " requests: write the losses of whole groups to a log, and watch it with `swiftsure"
            " monitor`."
        )
    if labels:
        gaps = [each for each in certificate.promises if each.risk == "gap"]
        if len(gaps) != 1 or epsilon is not None:
            raise ValueError("`labels` needs a policy that promises one gap, and no `epsilon`.")
        return _promised_monitor(policy, alpha, gaps[0])
    promised = [each for each in certificate.promises if each.risk == "consistency"]
    if promised and epsilon is not None:
        raise ValueError("`epsilon` must not be given if the policy promises a consistency.")
    if len(promised) > 1:
        raise ValueError("`policy` must promise one consistency to be audited, not several.")
    if promised:
        return _promised_monitor(policy, alpha, promised[0])
    if epsilon is None:
        raise ValueError(
            "`epsilon`, the largest inconsistency allowed, must be given to audit a policy that"
            " promises a gap, since a gap cannot be watched without labels. Or promise a"
            ' consistency: calibrate with risk="consistency".'
        )
    loss = LOSSES.choose(certificate.promises[0].loss)
    within = (loss.range.low, loss.range.high)
    return Monitor(epsilon, alpha, within, risk="consistency", loss=loss.name)


def _promised_monitor(policy: Policy, alpha: float, promise: PromiseResult) -> Monitor:
    """Return a monitor of a promise, or raise if audits of all requests cannot watch it."""
    if promise.selective:
        raise ValueError(
            "`policy` must promise a risk of all samples to be audited, but it promises one of the"
            " samples that exit early, and audits see requests that run in full too: write the"
            " losses of those that exit early to a log, and watch it with `swiftsure monitor`."
        )
    return Monitor.from_policy(policy, alpha, risk=promise.risk, loss=promise.loss)


class AuditLog:
    """Audits the answers of one process, and watches those of all processes with the same folder.

    Each process appends its audits to a log of its own. One of the processes, whichever holds a
    lock, folds all logs into one monitor. On an alarm it answers with the full model and writes
    `fallback.json`, and all processes do the same from then on, also after a restart. Another
    policy has another subfolder, so it starts with a new monitor and no alarm.

    Each process checks that lines of the logs do not wait, so a process that holds the lock and
    hangs is a fault of all others.

    Parameters
    ----------
    policy : Policy
    monitor : Monitor, optional
        As new; without one, nothing is audited, and an alarm of before is still obeyed. If it
        watches a gap, the losses of requests on which the answers differ wait for
        their labels; see `label`.
    folder : path
    patience : int
        How many later audits may wait for a label, until it is given up. The lowest loss is added
        for it, so an alarm cannot come from a missing label.
    """

    def __init__(
        self,
        policy: Policy,
        monitor: Monitor | None,
        folder: str | os.PathLike[str],
        patience: int = 10_000,
    ) -> None:
        self.policy = policy
        self._new = monitor
        gaps = monitor is not None and monitor.risk == "gap"
        self._patience = patience if gaps else None
        self.folder = Path(folder) / policy_version(policy)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._labels = LabelIndex(self.folder) if gaps else None
        self._lock = threading.Lock()  # several lanes audit
        self.made = self.failed = 0
        self.recent: tuple[dict[str, Any], ...] = ()  # the last ten audits, newest first
        self._identity = self.folder.stat()
        self._log_name = f"audits-{request_ids(1)[0]}.jsonl"
        self._lost: str | None = None  # why the last audit is not on disk
        self._failures = 0  # since an audit was made
        self._worst = 0  # failed audits that count as the largest loss
        self._fault: str | None = None  # what the last look found
        self._logged: str | None = None
        self._fallback: dict[str, Any] | None = None  # the content of its file
        self._log: BinaryIO | None = None
        self._closed = False
        self._watch = None if monitor is None else Watch(monitor, patience=self._patience)
        self._holds = False  # whether this process folds; else `_watch` is what another one saved
        self._saved = 0  # lines of the logs in the saved state
        self._unread: dict[tuple[str, int], float] = {}
        self._due_at = 0.0
        self._locks = ExitStack()
        self._look(time.time())

    @property
    def monitor(self) -> Monitor | None:
        """The monitor of all processes, as of the last look; None if nothing was ever audited."""
        return None if self._watch is None else self._watch.monitor

    @property
    def fallback(self) -> dict[str, Any] | None:
        """What is known of the alarm, whether or not it could be stored; None if there is none."""
        return (
            {"reason": self._reason} if self._fallback is None and self._alarm else self._fallback
        )

    @property
    def fault(self) -> str | None:
        """Why audits or alarms may be lost; None if all works."""
        if self._lost or self._fault:
            return self._lost or self._fault
        if self._failures < FAILURES:
            return None
        return f"the last {FAILURES} audits failed, and count as the largest loss; the log says why"

    @property
    def moved(self) -> bool:
        """Whether another process put the folder aside, to start with a new α."""
        try:
            return not os.path.samestat(self._identity, self.folder.stat())
        except OSError:  # not there yet, or deleted
            return False

    @property
    def _promised(self) -> Monitor:
        if self._new is None:
            raise ValueError("Nothing is audited here, so there is nothing to watch.")
        return self._new

    def audit(self, audited: Audited, engine: Engine) -> None:
        """Compare an answer with the full model's, and append the loss to the log.

        An audit that fails counts as the largest loss: whatever makes audits fail must not hide a
        broken promise. So does a request without a valid answer that the full model answers; if
        both models have none, nothing is lost. But where the full model is another server's, an
        outage of it breaks no promise: the audit is lost, which is a fault until one is made.
        """
        content: dict[str, Any] = {"loss": self._promised.largest_loss}
        made = 1
        try:
            if audited.answer is None:
                if not _full_model_answers(audited, engine):
                    content = {"loss": 0.0}
            else:
                sample = audited.sample if audited.full is None else audited.full
                found = engine.compare(sample, audited.answer, self._promised.loss or "")
                content = self._found(found)
                content["exit"] = audited.answer.exit
                if audited.answer.confidence is not None:
                    content["confidence"] = audited.answer.confidence
        except WorkerDiedError:
            self._write(audited, content, failed=1)
            raise
        except UnansweredError as error:
            with self._lock:
                self._lose(error)
            return
        except Exception as error:
            made = 0
            log.warning("an audit failed: %s: %s", type(error).__name__, error)
        self._write(audited, content, made=made, failed=1 - made)

    def _found(self, found: Comparison) -> dict[str, Any]:
        """Return what the log says of an audit: its loss, or what a gap needs beside the label."""
        if self._labels is None:
            return {"loss": self._promised.accepted(found.inconsistency)}
        if found.served is None or found.full is None:
            raise ValueError("a gap needs the class probabilities of both answers")
        if not needs_label(self._promised.loss or "", found.served, found.full):
            return {"loss": 0.0}
        return {"served": found.served, "full": found.full}

    def _write(
        self, audited: Audited, content: dict[str, Any], made: int = 0, failed: int = 0
    ) -> None:
        """Append an audit to the log; it counts once it is on disk, and else as failed."""
        content = {**content, "request": audited.request}
        with self._lock:
            try:
                self._append(content)
            except Exception as error:  # whatever it is, the audit is lost
                self._lose(error)
                return
            if audited.sample is not None:  # else the full model was not needed
                self._lost, self._failures = None, self._failures + 1 if failed else 0
            self._report()
            # Replaced, since other threads read it.
            self.recent = (content, *self.recent[:9])
            self.made += made
            self.failed += failed
            self._worst += failed

    def _lose(self, error: Exception) -> None:
        """Count an audit that does not reach the monitor."""
        self.failed += 1
        self._lost = f"an audit was lost: {error}"
        self._report()

    def label(self, labels: Mapping[str, int]) -> dict[str, str]:
        """Add labels of audited requests, by request id; return what became of each.

        Returns
        -------
        results
            "added", "known" if the loss is known already, or "not audited". A label counts for
            each audit so far whose request had this id.

        Raises
        ------
        ValueError
            If the audit log does not watch a gap, or a label is not one of the classes.
        """
        if self._labels is None:
            raise ValueError("The server watches the inconsistency, which needs no labels.")
        with locked(self.folder / ".labels", wait=10), self._lock:
            waiting, known = self._labels.read()
            results = {each: "known" if each in known else "not audited" for each in labels}
            losses = {}
            for audit, held in waiting.items():
                request = held["request"]
                if request in labels:
                    results[request] = "added"
                    served, full = held["served"], held["full"]
                    found = gap(self._promised.loss or "", served, full, labels[request])
                    losses[audit] = self._promised.accepted(found)
            for audit, loss in losses.items():
                self._append({"loss": loss}, audit)
        return results

    def unlabelled(self) -> list[str]:
        """Return the ids of requests whose label is needed, oldest first."""
        if self._labels is None:
            return []
        with self._lock:
            waiting, _ = self._labels.read()
            return list(dict.fromkeys(held["request"] for held in waiting.values()))

    def tick(self) -> None:
        """Look at the logs and the fallback, at most once per second."""
        if self._due_at <= time.monotonic():
            self._look(time.time() - SETTLE)

    def close(self) -> None:
        """Fold what is in the logs, and let another process go on."""
        self._look(time.time())
        self._locks.close()
        self._holds = False
        with self._lock:
            self._closed = True
            self._close_log()

    def _append(self, content: dict[str, Any], audit: str | None = None) -> None:
        """Append a line to this process's log, and wait until it is on disk."""
        request = audit or request_ids(1)[0]  # a client may use its own ids twice
        path = self.folder / self._log_name
        if self._log is not None and not is_open_at(self._log.fileno(), path):
            self._close_log()  # it was deleted, which the monitor reports
        if self._log is None:
            self._log = path.open("ab", buffering=0)
            sync(self.folder)
        try:
            line = (json.dumps({"id": request, "time": time.time(), **content}) + "\n").encode()
            end = self._log.seek(0, os.SEEK_END)
            if self._log.write(line) < len(line):
                self._log.truncate(end)  # half a line would spoil the next one
                raise OSError(errno.ENOSPC, "there is no room for an audit", self._log.name)
            os.fsync(self._log.fileno())
        except OSError:
            self._close_log()  # opened again for the next audit
            raise
        if self._closed:  # while this audit was made
            self._close_log()

    def _close_log(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def _look(self, until: float) -> None:
        if self.moved:  # what is known is not about the new folder
            return
        steps = (lambda: self._fold(until), self._keep_alarm, self._save, self._check_lines)
        self._fault = next(filter(None, [_failure(step) for step in steps]), None)
        self._report()
        try:
            self._read_fallback()
        except (OSError, ValueError) as error:
            # Whatever is in the file, it was written on an alarm.
            self._fallback = {"reason": f"{self._place('fallback.json')} cannot be read: {error}"}
        self._due_at = time.monotonic() + PAUSE

    def _fold(self, until: float) -> None:
        if self._new is None and not self._place("monitor.json").exists():
            return
        if (self._holds or self._claim()) and self._watch is not None:
            self._watch.read_logs(self._logs(), until)

    def _claim(self) -> bool:
        """Read the state; return whether this process is the one that folds from now on."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self._place(".monitor.json.run")))
                free = True
            except LockedError:  # another process folds
                free = False
            state = self._place("monitor.json")
            if state.exists():
                watch = Watch.load(state)
                if self._new is not None and watch.monitor.promise != self._new.promise:
                    raise ValueError(
                        f"{state} watches another risk ({watch.monitor.promise}) than asked for"
                        f" ({self._new.promise}): choose another folder."
                    )
                self._watch, self._saved = watch, watch.requests
            if free:
                self._locks, self._holds = stack.pop_all(), True
        return free

    @property
    def _alarm(self) -> bool:
        return self.monitor is not None and self.monitor.alarm

    @property
    def _reason(self) -> str:
        if not self._worst:
            return str(self.monitor)
        failed = f"{self._worst:,} audits failed in this server and count as the largest loss."
        return f"{self.monitor} {failed}"

    def _keep_alarm(self) -> None:
        """Store an alarm, for other processes and restarts; see `fallback`."""
        if self._holds and self._alarm and not self._place("fallback.json").exists():
            content = {
                "format": FORMAT,
                "version": VERSION,
                "time": time.time(),
                "reason": self._reason,
            }
            write_text(self._place("fallback.json"), json.dumps(content, indent=2) + "\n")

    def _save(self) -> None:
        watch = self._watch
        if self._holds and watch is not None and watch.requests != self._saved:
            watch.save(self._place("monitor.json"))
            self._saved = watch.requests

    def _check_lines(self) -> None:
        """Raise if lines of the logs wait, as they do if the process that folds them hangs."""
        if self._watch is None or self._alarm:  # no line counts, or none does any more
            return
        read = {Path(log): each.place.offset for log, each in self._watch.logs.places.items()}
        offsets = {path.name: offset for path, offset in read.items()}  # folders may be mounted
        now, before, self._unread = time.monotonic(), self._unread, {}
        for path in self._logs():
            key = path.name, offsets.get(path.name, 0)
            if _has_line(path, key[1]):
                self._unread[key] = before.get(key, now)
        if self._unread and now - min(self._unread.values()) > LATE:
            raise ValueError(
                f"lines of the logs have waited for over {LATE:g} s: the server that holds"
                " .monitor.json.run hangs, or shows why it cannot read them. End it, and another"
                " takes over."
            )

    def _logs(self) -> list[Path]:
        return sorted(self.folder.glob("audits-*.jsonl"))

    def _read_fallback(self) -> None:
        path = self._place("fallback.json")
        if path.exists():
            self._fallback = read_json(path, "the fallback of a server", FORMAT, VERSION)

    def _report(self) -> None:
        """Log a fault once."""
        if self.fault not in (None, self._logged):
            log.error("the monitor does not work: %s", self.fault)
        self._logged = self.fault

    def _place(self, name: str) -> Path:
        return self.folder / name


def _full_model_answers(audited: Audited, engine: Engine) -> bool:
    """Return whether the full model answers a request that has no answer."""
    if audited.full is not None:
        return isinstance(audited.full, Answer)
    if audited.sample is None:  # no model of a proxy answered
        return False
    (found,) = engine.answer([audited.sample], full=True)
    return isinstance(found, Answer)


def _failure(step: Callable[[], None]) -> str | None:
    """Run a step of a look; return why it failed, so that the other steps run too."""
    try:
        step()
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _has_line(path: Path, offset: int) -> bool:
    """Return whether a log has a complete line at an offset."""
    with path.open("rb") as file:
        file.seek(offset)
        return file.readline().endswith(b"\n")


def policy_version(policy: AnyPolicy) -> str:
    """Return a short name for a policy that changes with any of its fields."""
    return hashlib.sha256(policy.model_dump_json().encode()).hexdigest()[:16]


def resume(policy: AnyPolicy, folder: str | os.PathLike[str]) -> Path | None:
    """Put the logs, the monitor and the alarm of a policy aside, to start with a new α.

    Returns the folder that holds them now; None if there was none.

    Raises
    ------
    LockedError
        If a server still uses them.
    """
    place = Path(folder) / policy_version(policy)
    if not place.exists():
        return None
    with locked(place / ".monitor.json.run"):
        aside = place.with_name(f"{place.name}-before-{request_ids(1)[0]}")
        place.rename(aside)
    return aside
