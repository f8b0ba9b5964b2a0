"""`Guard`: which policy answers, what happens on an alarm, and how a new policy is installed.

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
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from swiftsure._lib.files import locked
from swiftsure.serve import watching
from swiftsure.serve.batching import Audited, Mode, Pending
from swiftsure.serve.engine import AnyPolicy, Engine
from swiftsure.serve.policies import load_policy
from swiftsure.serve.watching import Watcher, policy_version, resume

__all__ = ["Guard", "PolicyStore", "StoredPolicy"]

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


class Guard:
    """Keeps the policy in force, the watchers of its promise, and what is served after an alarm.

    Parameters
    ----------
    policy : Policy
        The model's own.
    watch : callable, optional
        Returns the watcher of a policy; without it nothing is watched.
    fallback : Policy, optional
        A safer certified policy for the time after an alarm; the full model by default. It is
        watched with an α of its own.
    store : PolicyStore, optional
        Where installed policies are kept; by default only in memory.
    file : path, optional
        A policy file that is watched: if its content changes, it is installed.

    Attributes
    ----------
    pending : Pending
        The audits that wait. A server sets it to its own, so that it is a fault if they hang.
    """

    def __init__(
        self,
        policy: AnyPolicy,
        *,
        watch: Callable[[Any], Watcher | None] | None = None,
        fallback: AnyPolicy | None = None,
        store: PolicyStore | None = None,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        self._watch, self._store = watch, store
        self._fallback = fallback
        self._file = None if file is None else Path(file)
        self._seen: bytes | None = None  # what the file held
        self._refused = 0  # the newest policy of another server that cannot be used here
        self._engine: Engine | None = None
        self._lock = threading.RLock()
        self._fault: str | None = None
        self.pending = Pending()
        self._ticked_at = time.monotonic()
        self._due_at = 0.0
        self._watchers: list[Watcher | None] = []  # one per policy of the ladder
        self.number, self._mode = 0, Mode(policy)
        stored = None if store is None else store.in_force(policy)
        if stored is None:
            self._stand(policy)
        else:
            self._stand(stored.policy, stored.number)

    def check_with(self, engine: Engine) -> None:
        """Use an engine to check policies before they are installed; checks those of the start."""
        self._engine = engine
        for policy, watcher in zip(self._ladder, self._watchers, strict=True):
            self._check(policy, watcher)

    @property
    def watcher(self) -> Watcher | None:
        """The watcher of the policy that answers; of the last one if the full model does."""
        return self._watchers[self._rung]

    @property
    def mode(self) -> Mode:
        """How requests must be answered now."""
        return self._mode

    @property
    def fault(self) -> str | None:
        """Why the monitor or the watched file cannot be used; None if they can.

        It depends on the time, so that it is seen although all threads of the model hang.
        """
        watcher = self.watcher
        return self._fault or (None if watcher is None else watcher.fault) or self._stall

    @property
    def _stall(self) -> str | None:
        """What hangs; None if nothing does."""
        if time.monotonic() - self._ticked_at > watching.LATE:
            return f"the monitor has not run for over {watching.LATE:g} s: a worker or a disk hangs"
        if self.pending.age() > watching.LATE:
            return (
                f"audits have waited for over {watching.LATE:g} s: a model or a worker hangs, or"
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
                await asyncio.sleep(watching.PAUSE)

        following = asyncio.get_running_loop().create_task(follow())
        try:
            yield
        finally:
            following.cancel()

    @property
    def alarm(self) -> str | None:
        """Why the policy in force does not answer; None if it does."""
        first = self._watchers[0]
        return None if first is None or first.fallback is None else str(first.fallback["reason"])

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
        watcher = self.watcher
        if watcher is not None and audited.mode.policy == watcher.policy:
            watcher.audit(audited, engine)

    def tick(self) -> None:
        """Follow the alarms, the policies that others installed, and the watched file."""
        if not self._lock.acquire(blocking=False):  # a policy is being installed
            return
        try:
            for watcher in self._present:
                watcher.tick()
            self._choose()
            if time.monotonic() >= self._due_at:
                self._due_at = time.monotonic() + watching.PAUSE
                if any(watcher.moved for watcher in self._present):
                    for watcher in self._present:
                        watcher.close()
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
            for watcher in self._present:
                watcher.close()
            for watcher in alarmed:
                resume(watcher.policy, watcher.folder.parent)
            self._renew()
            if alarmed:
                log.warning("resumed: the alarm was put aside")
            return bool(alarmed)

    def close(self) -> None:
        """Fold what is in the logs, and let another process go on."""
        with self._lock:
            for watcher in self._present:
                watcher.close()

    @property
    def _present(self) -> list[Watcher]:
        return [each for each in self._watchers if each is not None]

    def _renew(self) -> None:
        """Watch the policy in force anew, since the folder before was put aside."""
        before, self._watchers = self._watchers, [None] * len(self._watchers)
        try:
            self._stand(self.policy, self.number)
        except BaseException:
            self._watchers = before
            raise

    def _stand(self, policy: AnyPolicy, number: int | None = None) -> None:
        """Serve a policy from now on, stored under a number, or under a new one.

        It is checked, its watchers are built and it is stored before anything changes. So if one of
        these fails, the policy before stays in force, also after a restart.
        """
        ladder: list[AnyPolicy] = [policy]
        if self._fallback is not None and self._fallback != policy:
            ladder.append(self._fallback)
        before = self._present
        watchers: list[Watcher | None] = []
        try:
            for each in ladder:
                self._check(each, None)
                watchers.append(self._watcher_of(each))
                self._check(each, watchers[-1])
            number = self._store_as(policy) if number is None else number
        except BaseException:
            _close(each for each in watchers if each not in before)
            raise
        _close(each for each in before if each not in watchers)
        self._ladder, self._watchers = ladder, watchers
        self.number, self.policy, self.version = number, policy, policy_version(policy)
        log.info("policy %d (%s) is in force", number, self.version)
        self._choose()

    def _check(self, policy: AnyPolicy, watcher: Watcher | None) -> None:
        """Raise if the engine cannot use a policy, or cannot make the audits of its watcher."""
        engine = self._engine
        if engine is None:
            return
        if policy != engine.policy:
            engine.check(policy)
        loss = None if watcher is None or watcher.monitor is None else watcher.monitor.loss
        if loss is not None:
            engine.check_loss(loss)

    def _watcher_of(self, policy: AnyPolicy) -> Watcher | None:
        """Return the watcher that a policy has now, or a new one."""
        for each in self._present:
            if each.policy == policy:
                return each
        return None if self._watch is None else self._watch(policy)

    def _store_as(self, policy: AnyPolicy) -> int:
        """Store a policy, if there is a store, and return its number."""
        if self._store is not None:
            return self._store.install(policy).number
        return self.number + (self.number == 0 or policy != self.policy)

    def _choose(self) -> None:
        """Find the first policy of the ladder without an alarm."""
        alarms = [
            None if each is None or each.fallback is None else str(each.fallback["reason"])
            for each in self._watchers
        ]
        full = None not in alarms
        rung = len(alarms) - 1 if full else alarms.index(None)
        before, self._rung, self._mode = self._mode, rung, Mode(self._ladder[rung], full)
        if self._mode != before and (full or rung):
            reason = alarms[rung] or alarms[rung - 1]
            log.error("%s The %s answers from now on.", reason, self.state)

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


def _close(watchers: Iterable[Watcher | None]) -> None:
    for each in watchers:
        if each is not None:
            each.close()
