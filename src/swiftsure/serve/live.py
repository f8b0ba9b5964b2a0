"""`LiveStatus`: what the live page shows, as JSON, as a first page and as a stream of events."""

import asyncio
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import jinja2

from swiftsure.serve.bill import Bill
from swiftsure.serve.history import History
from swiftsure.serve.policy_manager import PolicyManager

__all__ = ["LiveStatus", "Load"]

EVERY = 1.0
"""Seconds between events."""
LONGEST = 60.0
"""Seconds after which a stream of events ends; the page then asks for another one."""
FOLDERS = re.compile(r"""[^\s'"\\/]*(?:[\\/][^\\/'"\n]*)*[\\/]""")
"""All of a path but the file's name; where a name holds spaces, also words between two paths."""
REASONS = 12
"""How many reasons the page shows."""
NO_POLICY = "There is no policy, so the full model answers all requests."
UNITS = {"flops": "of FLOPs saved", "seconds": "of time saved", "usd": "of the bill saved"}


class Load(Protocol):
    """The requests under way: of a batcher, or of a proxy."""

    @property
    def alive(self) -> bool:
        """Whether requests are answered."""

    @property
    def depth(self) -> int:
        """How many requests wait, or are under way."""

    @property
    def dropped(self) -> int:
        """How many audits were dropped."""


class LiveStatus:
    """Knows how a server is doing.

    Attributes
    ----------
    load : Load, optional
        Set when the application starts.
    exits : list of int
        Answers of each exit so far.
    bill : Bill
        What answers and audits cost.
    reasons : Counter
        How many requests a proxy's models answered for each reason.
    """

    def __init__(
        self, n_exits: int, manager: PolicyManager, trouble: Callable[[], str | None] = lambda: None
    ) -> None:
        """Take a function that returns what is wrong besides the monitor."""
        self._manager, self._trouble = manager, trouble
        self.load: Load | None = None
        self.exits = [0] * n_exits
        self.bill = Bill()
        self.reasons: Counter[str] = Counter()
        self._history = History()
        text = (Path(__file__).parent / "page.html").read_text("utf-8")
        self._page = jinja2.Environment(autoescape=True).from_string(text)

    def tick(self) -> None:
        """Add to the history, at most once per second or so."""
        self._history.note(self.exits, self._evidence())

    def health(self) -> dict[str, Any]:
        """Return whether the server answers, and how, for anybody: without names of folders."""
        manager, load = self._manager, self.load
        alive = load is not None and load.alive
        trouble = self._trouble()
        state = "degraded" if manager.state == "ok" and trouble else manager.state
        return {
            "status": state if alive else "dead",
            "policy": manager.version,
            "policy_number": manager.number,
            "queue": 0 if load is None else load.depth,
            "alarm": _without_folders(manager.alarm),
            "fault": _without_folders(manager.fault) or trouble,
        }

    def status(self) -> dict[str, Any]:
        """Return what the page shows."""
        total, n_exits = sum(self.exits), len(self.exits)
        run = sum((k + 1) * n for k, n in enumerate(self.exits))
        saved = 1 - run / (total * n_exits) if total else None
        shares = self.bill.shares
        unit = next(iter(shares), None)
        health = self.health()
        found: dict[str, Any] = {
            **health,
            "alarm": self._manager.alarm,
            "fault": self._manager.fault or health["fault"],
            "sentence": str(self._manager.mode.policy or NO_POLICY),
            "exits": list(self.exits),
            "saved": saved,
            "costs": shares,
            "bill": {
                unit: {
                    "answers": self.bill.spent[unit],
                    "audits": self.bill.audits[unit],
                    "saved": saved_cost,
                }
                for unit, saved_cost in self.bill.saved.items()
            },
            "reasons": sorted(self.reasons.items(), key=lambda each: -each[1])[:REASONS],
            "saved_share": saved if unit is None else shares[unit],
            "saved_what": "of exits skipped"
            if unit is None
            else UNITS.get(unit, f"of {unit} saved"),
            "dropped": 0 if self.load is None else self.load.dropped,
            "history": self._history.shown(),
            "monitor": None,
        }
        audit_log = self._manager.audit_log
        monitor = None if audit_log is None else audit_log.monitor
        if audit_log is not None and monitor is not None:
            found["recent"] = list(audit_log.recent)
            found["failed"] = audit_log.failed
            found["monitor"] = {
                "n": monitor.n,
                "mean": monitor.mean if monitor.n else None,
                "interval": monitor.interval(0.05),
                "epsilon": monitor.epsilon,
                "evidence": monitor.evidence,
                "evidence_needed": 1 / monitor.alpha,
                "sentence": str(monitor),
            }
        found["headline"], found["detail"] = _headline(found, watched=not self._manager.fault)
        return found

    def page(self, *, empty: bool) -> str:
        """Return the page as it is now; an empty one shows nothing before it has a token."""
        colours = _colours(len(self.exits))
        if empty:
            words = {"state": "unreachable", "headline": "Waiting for the server."}
            return self._page.render(**words, colours=colours, requests="–", saved="–")
        found = self.status()
        share = found["saved_share"]
        return self._page.render(
            state=found["status"],
            headline=found["headline"],
            detail=found["detail"],
            promise=found["sentence"],
            requests=f"{sum(self.exits):,}",
            saved="–" if share is None else f"{100 * share:.1f} %",
            saved_what=found["saved_what"],
            colours=colours,
        )

    async def events(self, stopping: Callable[[], bool]) -> AsyncIterator[str]:
        """Yield the status every second as server-sent events.

        They end if the server stops, since it waits for open answers.
        """
        since = 0.0
        while not stopping() and since < LONGEST:
            if since % EVERY == 0:
                yield f"data: {json.dumps(self.status())}\n\n"
            await asyncio.sleep(EVERY / 4)
            since += EVERY / 4

    def _evidence(self) -> float | None:
        audit_log = self._manager.audit_log
        monitor = None if audit_log is None else audit_log.monitor
        if monitor is None:
            return None
        evidence = max(monitor.evidence, 1e-300)
        return round(math.log(evidence) / math.log(1 / monitor.alpha), 4)


def _without_folders(text: str | None) -> str | None:
    return None if text is None else FOLDERS.sub("", text)


def _headline(found: dict[str, Any], *, watched: bool) -> tuple[str, str]:
    if found["status"] == "dead":
        return "The server does not answer.", "Its log says why. Start it again."
    if found["alarm"]:
        return f"Alarm: the {found['status']} answers all requests.", found["alarm"]
    if found["fault"]:
        title = "A model does not answer, or changed." if watched else "The monitor does not work."
        return title, found["fault"]
    monitor = found["monitor"]
    return "The certified policy answers.", monitor[
        "sentence"
    ] if monitor else "Nothing is audited."


def _colours(n: int) -> list[str]:
    """Return one colour per exit, from light to dark."""
    return [
        f"hsl({210 + 40 * k / max(n - 1, 1):.0f} 60% {78 - 46 * k / max(n - 1, 1):.0f}%)"
        for k in range(n)
    ]
