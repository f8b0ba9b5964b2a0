"""Printing: tables in a terminal, tab-separated lines in a pipe, or JSON."""

import json
import math
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from swiftsure.certify.policy import Policy
    from swiftsure.certify.slices import SlicedPolicy

__all__ = [
    "check_outputs",
    "is_terminal",
    "number",
    "one_line",
    "print_drawn_seed",
    "print_json",
    "print_policy",
    "print_table",
    "print_text",
    "printable",
    "rate",
]


_stdout_is_taken = False


def check_outputs(*paths: Path | None) -> None:
    """Check that files can be written, before any work; "-" is standard output.

    Messages go to standard error from now on if a file goes to standard output.
    """
    from swiftsure._lib.files import writable

    global _stdout_is_taken  # noqa: PLW0603 (a program has one standard output)
    given = [writable(path) for path in paths if path is not None]
    _stdout_is_taken = any(str(path) in ("-", "/dev/stdout", "/dev/fd/1") for path in given)


def _console() -> Console:
    return Console(stderr=_stdout_is_taken)


def _print_line(text: str) -> None:
    print(text, file=sys.stderr if _stdout_is_taken else None)


def is_terminal() -> bool:
    """Whether messages go to a terminal."""
    return _console().is_terminal


def print_text(text: str, style: str = "") -> None:
    """Print a paragraph; styled and wrapped only in a terminal."""
    _print(Text(printable(text), style))


def print_policy(policy: "Policy | SlicedPolicy") -> None:
    """Print a policy's sentence; in a terminal the promise is bold and its conditions dim."""
    from swiftsure.certify.policy import Policy
    from swiftsure.certify.wording import statement

    promise, conditions = statement(policy) if isinstance(policy, Policy) else (str(policy), "")
    _print(Text.assemble((printable(promise), "bold"), (printable(conditions), "dim")))


def print_drawn_seed(record: Path, policy: "Policy") -> None:
    """Print the seed that was drawn for a file without one, and how to repeat the result."""
    from swiftsure.records.files import keeps_order

    seed = policy.certificate.provenance.seed
    if seed is not None and policy.certificate.provenance.seed_drawn and not keeps_order(record):
        print_text(
            f"The order of the samples was drawn at random, with seed {seed}, which {record} does"
            " not keep. A Parquet file keeps its own; this one repeats the result: `swiftsure"
            f" convert {record} --seed {seed} -o {record.stem}.parquet`. Never choose among seeds."
        )


def printable(text: str) -> str:
    """Return text with control characters escaped, except line breaks."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _print(text: Text) -> None:
    console = _console()
    if console.is_terminal:
        console.print(text)
    else:
        _print_line(text.plain)  # no wrapping in a pipe


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> None:
    """Print a table with `left` left-aligned columns; in a pipe, tab-separated lines."""
    console = _console()
    if not console.is_terminal:
        for cells in [columns, *rows]:
            _print_line("\t".join(cells))
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


def one_line(message: str) -> str:
    r"""Return a message as one printable line, with at most 200 characters of anything it quotes.

    Examples
    --------
    >>> one_line("no file 'a\x1b[31m'\n")
    "no file 'a\\x1b[31m'"
    """
    line = " ".join(message.split())
    line = "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)
    return re.sub(r"""(['"])([^'"]{200})[^'"]+""", r"\1\2…", line)


def print_json(value: Any) -> None:
    """Print JSON, with null for NaN and infinity."""
    _print_line(json.dumps(_plain(value), indent=2, ensure_ascii=False))


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
