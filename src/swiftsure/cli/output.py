"""Printing: tables in a terminal, tab-separated lines in a pipe, or JSON."""

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from swiftsure.policy import Policy

__all__ = [
    "is_terminal",
    "number",
    "print_drawn_seed",
    "print_json",
    "print_policy",
    "print_table",
    "print_text",
    "rate",
]


def is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return Console().is_terminal


def print_text(text: str, style: str = "") -> None:
    """Print a paragraph; styled and wrapped only in a terminal."""
    _print(Text(text, style))


def print_policy(policy: "Policy") -> None:
    """Print a policy's sentence; in a terminal the promise is bold and its conditions dim."""
    from swiftsure.policy import sentence_parts

    promise, conditions = sentence_parts(policy)
    _print(Text.assemble((promise, "bold"), (conditions, "dim")))


def print_drawn_seed(record: Path, policy: "Policy") -> None:
    """Print the seed that was drawn for a file without one, and how to repeat the result."""
    from swiftsure.records.files import keeps_order

    seed = policy.certificate.seed
    if seed is not None and policy.certificate.seed_drawn and not keeps_order(record):
        print_text(
            f"The order of the samples was drawn at random, with seed {seed}, which {record} does"
            f" not keep: `--seed {seed}` repeats this result. Never choose among seeds. A Parquet"
            f" file keeps its own: `swiftsure convert {record} -o {record.stem}.parquet`."
        )


def _print(text: Text) -> None:
    console = Console()
    if console.is_terminal:
        console.print(text)
    else:
        print(text.plain)  # noqa: T201 (no wrapping in a pipe)


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> None:
    """Print a table with `left` left-aligned columns; in a pipe, tab-separated lines."""
    console = Console()
    if not console.is_terminal:
        for cells in [columns, *rows]:
            print("\t".join(cells))  # noqa: T201
        return
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, header_style="bold"
    )
    for position, column in enumerate(_headers(columns, rows, console.width)):
        table.add_column(column, justify="left" if position < left else "right", vertical="bottom")
    for cells in rows:
        table.add_row(*cells)
    console.print()
    console.print(Text(title, "bold"))
    console.print(table)


def _headers(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Sequence[str]:
    """Return the headers, wrapped at spaces if the table is too wide for the terminal."""
    cells = [max((len(row[k]) for row in rows), default=0) for k in range(len(columns))]
    needed = sum(max(len(name), cell) + 2 for name, cell in zip(columns, cells, strict=True))
    if needed - 2 <= width:  # no gap after the last column
        return columns
    return [
        textwrap.fill(name, max(1, cell), break_long_words=False)
        for name, cell in zip(columns, cells, strict=True)
    ]


def print_json(value: Any) -> None:
    """Print JSON, with null for NaN and infinity."""
    print(json.dumps(_plain(value), indent=2, ensure_ascii=False))  # noqa: T201


def number(value: float | tuple[float | None, ...] | None, digits: int = 4) -> str:
    """Format a number, or the thresholds of several exits; None is the full model."""
    if value is None:
        return "full model"
    if isinstance(value, tuple):
        texts = ("never" if each is None else number(each, digits) for each in value)
        return "(" + ", ".join(texts) + ")"
    return "–" if math.isnan(value) else f"{value:.{digits}g}"


def rate(share: float, low: float, high: float) -> str:
    """Format a rate with its interval, in per cent."""
    return f"{100 * share:.1f} % ({100 * low:.1f}–{100 * high:.1f})"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
