"""A progress bar on standard error."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["steps"]


@contextmanager
def steps(title: str, total: int | None, shown: bool | None = True) -> Iterator[Callable[[], None]]:
    """Yield a function that advances a bar of `total` steps; None shows it in terminals only."""
    if not (sys.stderr.isatty() if shown is None else shown):
        yield lambda: None
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
        yield lambda: progress.advance(task)
