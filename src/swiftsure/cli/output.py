"""What commands print: tables in a terminal, plain lines in a pipe, JSON for machines."""

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["is_terminal", "number", "print_json", "print_table", "print_text"]


def is_terminal() -> bool:
    """Whether a person is looking."""
    return Console().is_terminal


def print_text(text: str, style: str = "") -> None:
    """Print a paragraph; styled and wrapped only in a terminal."""
    console = Console()
    if console.is_terminal:
        console.print(text, style=style, highlight=False, markup=False)
    else:
        print(text)  # noqa: T201 (a pipe gets the line as it is)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; in a pipe, lines with tabs between the cells."""
    console = Console()
    if not console.is_terminal:
        for cells in [columns, *rows]:
            print("\t".join(cells))  # noqa: T201
        return
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    for cells in rows:
        table.add_row(*cells)
    console.print(table)


def print_json(value: Any) -> None:
    """Print JSON; NaN, which JSON does not know, as null."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))  # noqa: T201


def number(value: float | tuple[float | None, ...] | None, digits: int = 4) -> str:
    """Write a number, or the thresholds of several exits; None is the full model."""
    if value is None:
        return "full model"
    if isinstance(value, tuple):
        each = ("never" if level is None else number(level, digits) for level in value)
        return "(" + ", ".join(each) + ")"
    return "–" if math.isnan(value) else f"{value:.{digits}g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
