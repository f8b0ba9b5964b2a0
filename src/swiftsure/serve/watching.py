"""`Watcher`: writes audits to a log, folds all logs into a monitor, and keeps its alarm."""

import errno
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from swiftsure._lib.files import LockedError, locked, read_json, sync, write_text
from swiftsure.certify.policy import Policy
from swiftsure.losses import LOSSES
from swiftsure.monitor import Monitor, Watch, request_ids
from swiftsure.serve.batching import Audited, WorkerDiedError
from swiftsure.serve.engine import Comparison, Engine
from swiftsure.serve.labels import LabelIndex, gap, needs_label

__all__ = ["Watcher", "watched_monitor"]

log = logging.getLogger("swiftsure.serve")

SETTLE = 2.0
"""Seconds within which other processes must write a line, so that logs are folded in order."""
PAUSE = 1.0
"""Seconds between looks at the logs."""
FORMAT, VERSION = "swiftsure-fallback", 1


def watched_monitor(
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
        it does not promise exactly one gap.
    """
    certificate = policy.certificate
    if certificate.samples.unit == "groups":
        raise ValueError(
            "`audit` must be 0 if the policy was calibrated by groups, since audits see single"
            " requests: watch such a policy with `swiftsure monitor`."
        )
    if labels:
        gaps = [each for each in certificate.promises if each.risk == "gap"]
        if len(gaps) != 1 or epsilon is not None:
            raise ValueError("`labels` needs a policy that promises one gap, and no `epsilon`.")
        return Monitor.from_policy(policy, alpha, risk="gap", loss=gaps[0].loss)
    promised = [each for each in certificate.promises if each.risk == "consistency"]
    if promised and epsilon is not None:
        raise ValueError("`epsilon` must not be given if the policy promises a consistency.")
    if len(promised) > 1:
        raise ValueError("`policy` must promise one consistency to be audited, not several.")
    if promised:
        return Monitor.from_policy(policy, alpha, risk="consistency", loss=promised[0].loss)
    if epsilon is None:
        raise ValueError(
            "`epsilon`, the largest inconsistency allowed, must be given to audit a policy that"
            " promises a gap, since a gap cannot be watched without labels. Or promise a"
            ' consistency: calibrate with risk="consistency".'
        )
    loss = LOSSES.choose(certificate.promises[0].loss)
    within = (loss.range.low, loss.range.high)
    return Monitor(epsilon, alpha, within, risk="consistency", loss=loss.name)


class Watcher:
    """Audits the answers of one process, and watches those of all processes with the same folder.

    Each process appends its audits to a log of its own. One of the processes, whichever holds a
    lock, folds all logs into one monitor. On an alarm it writes `fallback.json`, and all processes
    answer with the full model from then on, also after a restart. Another policy has another
    subfolder, so it starts with a new monitor and no alarm.

    Parameters
    ----------
    policy : Policy
    monitor : Monitor
        As new. If it watches a gap, the losses of requests on which the answers differ wait for
        their labels; see `label`.
    folder : path
    patience : int
        How many later audits may wait for a label, until it is given up. The lowest loss is added
        for it, so an alarm cannot come from a missing label.
    """

    def __init__(
        self,
        policy: Policy,
        monitor: Monitor,
        folder: str | os.PathLike[str],
        patience: int = 10_000,
    ) -> None:
        self.policy = policy
        self._new = monitor
        self._patience = patience if monitor.risk == "gap" else None
        self.folder = Path(folder) / policy_version(policy)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._labels = LabelIndex(self.folder) if monitor.risk == "gap" else None
        self._lock = threading.Lock()  # several lanes audit
        self.made = self.failed = 0
        self.recent: tuple[dict[str, Any], ...] = ()  # the last ten audits, newest first
        self.fault: str | None = None
        self.fallback: dict[str, Any] | None = None
        self._log: BinaryIO | None = None
        self._watch: Watch | None = None
        self._seen = monitor
        self._due_at = 0.0
        self._locks = ExitStack()
        self._look(time.time())

    @property
    def monitor(self) -> Monitor:
        """The monitor of all processes, as of the last look."""
        return self._seen if self._watch is None else self._watch.monitor

    def audit(self, audited: Audited, engine: Engine) -> None:
        """Compare an answer with the full model's, and append the loss to the log.

        If that fails, or the request had no valid answer, it counts as the lowest loss, so that an
        alarm cannot come from it.
        """
        content: dict[str, Any] = {"loss": self.monitor.loss_range.low}
        made = 1
        try:
            if audited.answer is not None:
                found = engine.compare(audited.sample, audited.answer, self._new.loss or "")
                content = self._found(found)
                content["exit"] = audited.answer.exit
                if audited.answer.confidence is not None:
                    content["confidence"] = audited.answer.confidence
        except WorkerDiedError:
            self._write({**content, "request": audited.request}, failed=1)
            raise
        except Exception as error:
            made = 0
            log.warning("an audit failed: %s: %s", type(error).__name__, error)
        self._write({**content, "request": audited.request}, made=made, failed=1 - made)

    def _found(self, found: Comparison) -> dict[str, Any]:
        """Return what the log says of an audit: its loss, or what a gap needs beside the label."""
        if self._labels is None:
            return {"loss": self.monitor.accepted(found.inconsistency)}
        if found.served is None or found.full is None:
            raise ValueError("a gap needs the class probabilities of both answers")
        if not needs_label(self._new.loss or "", found.served, found.full):
            return {"loss": 0.0}
        return {"served": found.served, "full": found.full}

    def _write(self, content: dict[str, Any], made: int = 0, failed: int = 0) -> None:
        """Append an audit to the log; it counts once it is on disk."""
        with self._lock:
            try:
                self._append(content)
            except OSError as error:
                self._report(error)
                return
            # Replaced, since other threads read it.
            self.recent = (content, *self.recent[:9])
            self.made += made
            self.failed += failed

    def label(self, labels: Mapping[str, int]) -> dict[str, str]:
        """Add labels of audited requests, by request id; return what became of each.

        Returns
        -------
        results
            "added", "known" if the loss is known already, or "not audited".

        Raises
        ------
        ValueError
            If the watcher does not watch a gap, or a label is not one of the classes.
        """
        if self._labels is None:
            raise ValueError("The server watches the inconsistency, which needs no labels.")
        with locked(self.folder / ".labels", wait=10), self._lock:
            waiting, known = self._labels.read()
            results, lines = {}, []
            for request, label in labels.items():
                held = waiting.get(request)
                results[request] = "added" if held else "known" if request in known else ""
                results[request] = results[request] or "not audited"
                if held is not None:
                    loss = gap(self._new.loss or "", held["served"], held["full"], label)
                    lines.append((held["id"], self.monitor.accepted(loss)))
            for audit, loss in lines:
                self._append({"loss": loss}, audit)
        return results

    def unlabelled(self) -> list[str]:
        """Return the ids of requests whose label is needed, oldest first."""
        if self._labels is None:
            return []
        with self._lock:
            return list(self._labels.read()[0])

    def tick(self) -> None:
        """Look at the logs and the fallback, at most once per second."""
        if self._due_at <= time.monotonic():
            self._look(time.time() - SETTLE)

    def close(self) -> None:
        """Fold what is in the logs, and let another process go on."""
        self._look(time.time())
        self._locks.close()
        if self._log is not None:
            self._log.close()

    def _append(self, content: dict[str, Any], audit: str | None = None) -> None:
        """Append a line to this process's log, and wait until it is on disk."""
        request = audit or request_ids(1)[0]  # a client may use its own ids twice
        if self._log is None:
            name = f"audits-{request_ids(1)[0]}.jsonl"
            self._log = (self.folder / name).open("ab", buffering=0)
            sync(self.folder)
        line = (json.dumps({"id": request, "time": time.time(), **content}) + "\n").encode()
        end = self._log.seek(0, os.SEEK_END)
        if self._log.write(line) < len(line):
            self._log.truncate(end)  # half a line would spoil the next one
            raise OSError(errno.ENOSPC, "there is no room for an audit", self._log.name)
        os.fsync(self._log.fileno())

    def _look(self, until: float) -> None:
        try:
            self._fold(until)
            self.fault = None
        except (OSError, ValueError) as error:
            self._report(error)
        try:
            self._read_fallback()
        except (OSError, ValueError) as error:
            # Whatever is in the file, it was written on an alarm.
            self.fallback = {"reason": f"{self._place('fallback.json')} cannot be read: {error}"}
        self._due_at = time.monotonic() + PAUSE

    def _fold(self, until: float) -> None:
        state = self._place("monitor.json")
        if self._watch is None:
            try:
                self._locks.enter_context(locked(self._place(".monitor.json.run")))
            except LockedError:  # another process folds
                if state.exists():
                    self._seen = Watch.load(state).monitor
                return
            try:
                self._watch = (
                    Watch.load(state)
                    if state.exists()
                    else Watch(self._new, patience=self._patience)
                )
                if self._watch.monitor.promise != self._new.promise:
                    promise, self._watch = self._watch.monitor.promise, None
                    raise ValueError(
                        f"{state} watches another risk ({promise}) than asked for"
                        f" ({self._new.promise}): choose another folder."
                    )
            except ValueError:
                self._locks.close()
                raise
        if self._watch.read_logs(sorted(self.folder.glob("audits-*.jsonl")), until):
            self._watch.save(state)
        if self._watch.monitor.alarm and not self._place("fallback.json").exists():
            content = {
                "format": FORMAT,
                "version": VERSION,
                "time": time.time(),
                "reason": str(self._watch.monitor),
            }
            write_text(self._place("fallback.json"), json.dumps(content, indent=2) + "\n")

    def _read_fallback(self) -> None:
        path = self._place("fallback.json")
        if path.exists():
            self.fallback = read_json(path, "the fallback of a server", FORMAT, VERSION)

    def _report(self, error: Exception) -> None:
        if self.fault != str(error):
            log.error("the monitor does not work: %s", error)
        self.fault = str(error)

    def _place(self, name: str) -> Path:
        return self.folder / name


def policy_version(policy: Policy) -> str:
    """Return a short name for a policy that changes with any of its fields."""
    return hashlib.sha256(policy.model_dump_json().encode()).hexdigest()[:16]


def resume(policy: Policy, folder: str | os.PathLike[str]) -> Path | None:
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
