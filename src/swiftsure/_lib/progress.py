"""A progress bar on standard error."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["Advance", "no_bar", "steps"]


class Advance(Protocol):
    """Advances a bar by some steps."""

    def __call__(self, n: int = 1) -> None:
        """Advance the bar by n steps."""


@contextmanager
def steps(title: str, total: int | None, shown: bool | None = True) -> Iterator[Advance]:
    """Yield a function that advances a bar of `total` steps; None shows it in terminals only."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield no_bar
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda n=1: progress.advance(task, n)


def no_bar(n: int = 1) -> None:
    """Advance no bar."""
