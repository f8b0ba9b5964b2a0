"""`PolicyManager`: which policy answers, what an alarm does, how a new policy is installed.

    the newest installed policy  --alarm-->  the fallback policy, if any  --alarm-->  the full model

Each policy of the ladder is watched with its own α, so with a fallback policy any false alarm has
probability at most 2α.

An alarm is kept in the folder of the policy that it is about, so a server that starts again stands
where it stood.
"""

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from swiftsure._lib.files import locked
from swiftsure.certify.slices import SlicedPolicy, load_policy
from swiftsure.serve import audit_log as logs
from swiftsure.serve.audit_log import AuditLog, policy_version, resume
from swiftsure.serve.audits import Audited, Mode, Pending
from swiftsure.serve.engine import AnyPolicy, Engine

__all__ = ["PolicyManager", "PolicyStore", "StoredPolicy"]

log = logging.getLogger("swiftsure.serve")

NAME = re.compile(r"policy-(\d{6})\.json")


class StoredPolicy(NamedTuple):
    """An installed policy and its number, counted from 1."""

    number: int
    policy: AnyPolicy


class PolicyStore:
    """Installed policies in a folder, `policy-000001.json` and so on; the last one is in force.

    Each file is written whole or not at all and is never changed, so a reader sees the old policy
    or the new one, also if a writer is killed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def newest(self, above: int = 0) -> StoredPolicy | None:
        """Return the policy in force; None if none was installed since number `above`."""
        path = max(self._files(), default=None)
        if path is None or _number(path) <= above:
            return None
        return StoredPolicy(_number(path), load_policy(path))

    def in_force(self, policy: AnyPolicy) -> StoredPolicy | None:
        """Return the policy in force; None if another one, which was never installed, replaces it.

        So a server that starts with an old policy goes on with the newest one.
        """
        version = policy_version(policy)
        known = any(policy_version(load_policy(path)) == version for path in self._files())
        return self.newest() if known else None

    def install(self, policy: AnyPolicy) -> StoredPolicy:
        """Add a policy, which is then in force; nothing changes if it is in force already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / ".policies", wait=10):
            before = self.newest()
            if before is not None and before.policy == policy:
                return before
            number = 1 if before is None else before.number + 1
            policy.save(self.folder / f"policy-{number:06d}.json")
            return StoredPolicy(number, policy)

    def _files(self) -> list[Path]:
        return [path for path in self.folder.glob("policy-*.json") if NAME.fullmatch(path.name)]


def _number(path: Path) -> int:
    found = NAME.fullmatch(path.name)
    return 0 if found is None else int(found[1])


class _Rung(NamedTuple):
    """A policy of the ladder, and the audit log of each of its slices; of None without slices."""

    policy: AnyPolicy | None
    audit_logs: Mapping[str | None, AuditLog]

    @property
    def alarm(self) -> str | None:
        """Why this policy must not answer; None if it may."""
        for name, each in self.audit_logs.items():
            if each.fallback is not None:
                reason = str(each.fallback["reason"])
                return reason if name is None else f"Slice {name}: {reason}"
        return None

    @property
    def fault(self) -> str | None:
        return next((each.fault for each in self.audit_logs.values() if each.fault), None)

    @property
    def shown(self) -> AuditLog | None:
        """The audit log that has the most to tell: of an alarm, a fault, or the most evidence."""

        def urgency(each: AuditLog) -> tuple[bool, bool, float]:
            evidence = 0.0 if each.monitor is None else each.monitor.evidence
            return each.fallback is not None, each.fault is not None, evidence

        return max(self.audit_logs.values(), key=urgency, default=None)


class PolicyManager:
    """Keeps the policy in force, the audit logs of its promise, and what is served after an alarm.

    Parameters
    ----------
    policy : Policy or SlicedPolicy, optional
        The model's own; without one the full model answers all.
    watch : callable, optional
        Returns the audit log of a policy, given also the share of α that it has: each slice has an
        equal share and an audit log of its own. Without it nothing is watched.
    fallback : Policy or SlicedPolicy, optional
        A safer certified policy for the time after an alarm; the full model by default. It is
        watched with an α of its own.
    store : PolicyStore, optional
        Where installed policies are kept; by default only in memory.
    file : path, optional
        A policy file that is watched: if its content changes, it is installed.
    on_alarm : callable, optional
        Called, in another thread, with the reason of each alarm and the state that follows.

    Attributes
    ----------
    pending : Pending
        The audits that wait. A server sets it to its own, so that it is a fault if they hang.
    """

    def __init__(
        self,
        policy: AnyPolicy | None,
        *,
        watch: Callable[[Any, float], AuditLog | None] | None = None,
        fallback: AnyPolicy | None = None,
        store: PolicyStore | None = None,
        file: str | os.PathLike[str] | None = None,
        on_alarm: Callable[[str, str], None] | None = None,
    ) -> None:
        self._watch, self._store = watch, store
        self._fallback, self._on_alarm = fallback, on_alarm
        self._file = None if file is None else Path(file)
        self._seen: bytes | None = None  # what the file held
        self._refused = 0  # the newest policy of another server that cannot be used here
        self._engine: Engine | None = None
        self._lock = threading.RLock()
        self._fault: str | None = None
        self.pending = Pending()
        self._ticked_at = time.monotonic()
        self._due_at = 0.0
        self._ladder: list[_Rung] = []
        self._rung = _Rung(policy, {})  # the one that answers, or the last if the full model does
        self._alarm: str | None = None  # the one that was last told
        self.number, self._mode = 0, Mode(policy, full=policy is None)
        stored = None if store is None or policy is None else store.in_force(policy)
        if stored is None:
            self._stand(policy)
        else:
            self._stand(stored.policy, stored.number)

    def check_with(self, engine: Engine) -> None:
        """Use an engine to check policies before they are installed; checks those of the start."""
        self._engine = engine
        for rung in self._ladder:
            self._check(rung)

    @property
    def audit_log(self) -> AuditLog | None:
        """The audit log of the policy that answers; of the last one if the full model does.

        Of several slices, the one that has the most to tell.
        """
        return self._rung.shown

    @property
    def mode(self) -> Mode:
        """How requests must be answered now."""
        return self._mode

    @property
    def fault(self) -> str | None:
        """Why the monitor or the watched file cannot be used; None if they can.

        It depends on the time, so that it is seen although all threads of the model hang.
        """
        return self._fault or self._rung.fault or self._stall

    @property
    def _stall(self) -> str | None:
        """What hangs; None if nothing does."""
        if time.monotonic() - self._ticked_at > logs.LATE:
            return f"the monitor has not run for over {logs.LATE:g} s: a worker or a disk hangs"
        if self.pending.age() > logs.LATE:
            return (
                f"audits have waited for over {logs.LATE:g} s: a model or a worker hangs, or"
                " the server is overloaded"
            )
        return None

    @asynccontextmanager
    async def logging_stalls(self) -> AsyncIterator[None]:
        """Log what hangs, in the event loop, which goes on when all threads of the model hang."""

        async def follow() -> None:
            logged = None
            while True:
                stall = self._stall
                if stall not in (None, logged):
                    log.error("the monitor does not work: %s", stall)
                logged = stall
                await asyncio.sleep(logs.PAUSE)

        following = asyncio.get_running_loop().create_task(follow())
        try:
            yield
        finally:
            following.cancel()

    @property
    def alarm(self) -> str | None:
        """Why the policy in force does not answer; None if it does."""
        return self._ladder[0].alarm

    @property
    def state(self) -> str:
        """One of "ok", "fallback policy", "full model" and "degraded"."""
        if self._mode.full:
            return "full model"
        if self._mode.policy != self.policy:
            return "fallback policy"
        return "degraded" if self.fault else "ok"

    def audit(self, audited: Audited, engine: Engine) -> None:
        """Audit an answer; one that was given under another policy is left out."""
        rung = self._rung
        sliced = isinstance(rung.policy, SlicedPolicy)
        audit_log = rung.audit_logs.get(audited.slice_name if sliced else None)
        if audit_log is not None and audited.mode.policy == rung.policy:
            audit_log.audit(audited, engine)

    def label(self, labels: Mapping[str, int]) -> dict[str, str]:
        """Add labels of audited requests; see `AuditLog.label`."""
        found = dict.fromkeys(labels, "not audited")
        for audit_log in self._rung.audit_logs.values():
            told = audit_log.label(labels)
            found |= {name: result for name, result in told.items() if result != "not audited"}
        return found

    def unlabelled(self) -> list[str]:
        """Return the ids of requests whose label is needed, oldest first in each slice."""
        return [
            each for audit_log in self._rung.audit_logs.values() for each in audit_log.unlabelled()
        ]

    def tick(self) -> None:
        """Follow the alarms, the policies that others installed, and the watched file."""
        if not self._lock.acquire(blocking=False):  # a policy is being installed
            return
        try:
            for audit_log in self._present:
                audit_log.tick()
            self._choose()
            if time.monotonic() >= self._due_at:
                self._due_at = time.monotonic() + logs.PAUSE
                if any(audit_log.moved for audit_log in self._present):
                    for audit_log in self._present:
                        audit_log.close()
                    self._renew()
                self._follow()
            self._ticked_at = time.monotonic()
        finally:
            self._lock.release()

    def install(self, policy: AnyPolicy) -> int:
        """Install a policy and return its number.

        Raises
        ------
        ValueError
            If it is not for this model, or cannot be watched. The policy in force stays.
        """
        with self._lock:
            self._stand(policy)
            return self.number

    def resume(self) -> bool:
        """Put the alarms aside and go back to the policy in force, with a new α.

        Returns whether there was an alarm.

        Raises
        ------
        LockedError
            If another server holds the monitor: nothing changes. Tell that server, and this one
            follows.
        """
        with self._lock:
            alarmed = [each for each in self._present if each.fallback is not None]
            for audit_log in self._present:
                audit_log.close()
            for audit_log in alarmed:
                resume(audit_log.policy, audit_log.folder.parent)
            self._renew()
            if alarmed:
                log.warning("resumed: the alarm was put aside")
            return bool(alarmed)

    def close(self) -> None:
        """Process the remaining lines of the logs, and release their locks."""
        with self._lock:
            for audit_log in self._present:
                audit_log.close()

    @property
    def _present(self) -> list[AuditLog]:
        return [each for rung in self._ladder for each in rung.audit_logs.values()]

    def _renew(self) -> None:
        """Watch the policy in force anew, since the folder before was put aside."""
        before, self._ladder = self._ladder, []
        try:
            self._stand(self.policy, self.number)
        except BaseException:
            self._ladder = before
            raise

    def _stand(self, policy: AnyPolicy | None, number: int | None = None) -> None:
        """Serve a policy from now on, stored under a number, or under a new one.

        It is checked, its logs are made and it is stored before anything changes. So if one of
        these fails, the policy before stays in force, also after a restart.
        """
        wanted = [policy]
        if self._fallback is not None and self._fallback != policy:
            wanted.append(self._fallback)
        before, ladder = self._present, list[_Rung]()
        try:
            for each in wanted:
                self._check(_Rung(each, {}))
                made: dict[str | None, AuditLog] = {}
                ladder.append(_Rung(each, made))
                self._watch_all(each, made)
                self._check(ladder[-1])
            number = self._store_as(policy) if number is None else number
        except BaseException:
            _close(
                each for rung in ladder for each in rung.audit_logs.values() if each not in before
            )
            raise
        self._ladder = ladder
        present = self._present
        _close(each for each in before if each not in present)
        self.number, self.policy = number, policy
        self.version = None if policy is None else policy_version(policy)
        if policy is not None:
            log.info("policy %d (%s) is in force", number, self.version)
        self._choose()

    def _check(self, rung: _Rung) -> None:
        """Raise if the engine cannot use a policy, or cannot make the audits of its audit logs."""
        engine = self._engine
        if engine is None or rung.policy is None:
            return
        if rung.policy != engine.policy:
            engine.check(rung.policy)
        for audit_log in rung.audit_logs.values():
            if audit_log.monitor is not None and audit_log.monitor.loss is not None:
                engine.check_loss(audit_log.monitor.loss)

    def _watch_all(self, policy: AnyPolicy | None, made: dict[str | None, AuditLog]) -> None:
        """Make the audit logs of a policy, or take those that it has now."""
        if policy is None or self._watch is None:
            return
        parts: Mapping[str | None, Any] = {None: policy}
        if isinstance(policy, SlicedPolicy):
            parts = {name: policy[name] for name in policy}
        for name, part in parts.items():
            known = next((each for each in self._present if each.policy == part), None)
            found = known or self._watch(part, 1 / len(parts))
            if found is not None:
                made[name] = found

    def _store_as(self, policy: AnyPolicy | None) -> int:
        """Store a policy, if there is a store, and return its number; 0 if there is none."""
        if policy is None:
            return 0
        if self._store is not None:
            return self._store.install(policy).number
        return self.number + (self.number == 0 or policy != self.policy)

    def _choose(self) -> None:
        """Find the first policy of the ladder without an alarm."""
        alarms = [rung.alarm for rung in self._ladder]
        rung = next((k for k, alarm in enumerate(alarms) if alarm is None), None)
        full = rung is None or self._ladder[rung].policy is None
        rung = len(alarms) - 1 if rung is None else rung
        before, self._rung = self._mode, self._ladder[rung]
        self._mode = Mode(self._rung.policy, full)
        reason = alarms[rung] or (alarms[rung - 1] if rung else None)
        if self._mode != before and reason is not None:
            log.error("%s The %s answers from now on.", reason, self.state)
        if reason not in (None, self._alarm) and self._on_alarm is not None:
            self._on_alarm(str(reason), self.state)
        self._alarm = reason

    def _follow(self) -> None:
        """Install what another server or the watched file has."""
        try:
            if self._store is not None:
                newest = self._store.newest(above=max(self.number, self._refused))
                if newest is not None:
                    self._refused = newest.number
                    self._stand(newest.policy, newest.number)
                    self._fault = None
            if self._file is not None and self._file.exists():
                content = self._file.read_bytes()
                if content != self._seen:
                    self._seen = content
                    self.install(load_policy(self._file))
                    self._fault = None
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):  # try again: the policy is not at fault
                self._refused, self._seen = 0, None
            fault = f"the policy was not installed: {error}"
            if fault != self._fault:
                log.error("%s", fault)
            self._fault = fault


def _close(audit_logs: Iterable[AuditLog]) -> None:
    for each in audit_logs:
        each.close()
