"""Tables of results: printed, and written as CSV or Markdown."""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftsure._lib.files import write_text
from swiftsure.cli.output import print_table

__all__ = ["csv_text", "join_levels", "markdown_table", "print_rows", "write_all"]

Rows = list[dict[str, Any]]


def csv_text(rows: Rows) -> str:
    """Return rows as CSV, with a line of headings."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown_table(rows: Rows, decimals: int = 2) -> str:
    """Return rows as a Markdown table."""
    names = list(rows[0])
    cells = [
        [f"{v:.{decimals}f}" if isinstance(v, float) else str(v) for v in row.values()]
        for row in rows
    ]
    lines = [names, ["---"] * len(names), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_all(folder: str | os.PathLike[str], contents: Mapping[str, str | Rows]) -> list[Path]:
    """Write texts, and rows as CSV, into a folder; return the files."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = [Path(folder) / name for name in contents]
    for file, content in zip(files, contents.values(), strict=True):
        write_text(file, content if isinstance(content, str) else csv_text(content))
    return files


def join_levels(rows: Rows, risks: Sequence[str]) -> Rows:
    """Return rows with one column per risk: its cells at all levels, separated by slashes."""
    return [
        {name: cell for name, cell in row.items() if "ε" not in name}
        | {
            risk: " / ".join(
                cell if isinstance(cell, str) else f"{cell:.1f}"
                for name, cell in row.items()
                if name.startswith(f"{risk}, ε")
            )
            for risk in risks
        }
        for row in rows
    ]


def print_rows(title: str, rows: Rows) -> None:
    """Print rows as a table."""
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in r.values()] for r in rows]
    left = sum(isinstance(value, str) for value in rows[0].values())
    print_table(title, list(rows[0]), cells, left=left)
