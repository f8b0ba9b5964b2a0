"""Measure ratios of best times, taken in turn, and show them."""

import json
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

__all__ = ["CLOCKS", "Result", "best_times", "peak_bytes", "show", "use_clock", "write"]

TURN = 0.02
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""Wall clock, or processor time of all threads for busy machines."""

_chosen = ["wall"]


def use_clock(name: str) -> None:
    """Choose the clock for all later measurements."""
    _chosen[0] = name


@dataclass(frozen=True)
class Result:
    """A measured number and its target."""

    what: str
    value: float
    unit: str = "x"
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def target(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def met(self) -> bool | None:
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def verdict(self) -> str:
        return {True: "met", False: "MISSED", None: ""}[self.met]

    @property
    def number(self) -> str:
        digits = 0 if self.value >= 100 else 1 if self.value >= 10 else 2
        return f"{self.value:,.{digits}f} {self.unit}"


def best_times(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the shortest time, in seconds, of a call of each function.

    The functions take turns, of `TURN` seconds or one call each. The first round, which compiles
    and fills caches, does not count.
    """
    clock = CLOCKS[_chosen[0]]
    best = dict.fromkeys(functions, float("inf"))
    for number in range(rounds + 1):
        for name, function in functions.items():
            left = TURN
            while left > 0:
                start = clock()
                function()
                seconds = clock() - start
                left -= max(seconds, 1e-6)
                if number > 0:
                    best[name] = min(best[name], seconds)
    return best


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak memory of a function, beyond what was held before."""
    function()  # what is allocated once for all, such as compiled code, does not count
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def show(title: str, results: Sequence[Result], console: Console) -> None:
    """Print a table, or plain lines if not to a terminal."""
    if not console.is_terminal:
        print(f"\n{title}")
        for result in results:
            columns = (result.number.rjust(12), result.target.ljust(7), result.verdict.ljust(7))
            print(f"  {result.what:<58}{'  '.join(columns)}  {result.note}".rstrip())
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("what")
    table.add_column("measured", justify="right", no_wrap=True)
    table.add_column("target", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("note", style="dim")
    for result in results:
        style = {True: "green", False: "red", None: ""}[result.met]
        verdict = f"[{style}]{result.verdict}[/]" if style else ""
        table.add_row(result.what, result.number, result.target, verdict, result.note)
    console.print(table)


def write(path: Path, results: Mapping[str, Sequence[Result]]) -> None:
    """Write all results as JSON."""
    rows = {
        topic: [asdict(result) | {"met": result.met} for result in found]
        for topic, found in results.items()
    }
    path.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
