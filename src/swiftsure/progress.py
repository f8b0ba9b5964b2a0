"""A progress bar for long work, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["steps"]


@contextmanager
def steps(title: str, total: int | None) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps and give the function that advances it."""
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
