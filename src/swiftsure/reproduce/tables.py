"""Rows of a table as text."""

import csv
import io
from typing import Any

__all__ = ["csv_text", "markdown_table"]


def csv_text(rows: list[dict[str, Any]]) -> str:
    """Return rows as CSV, with a line of headings."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def markdown_table(rows: list[dict[str, Any]], decimals: int = 2) -> str:
    """Return rows as a Markdown table."""
    names = list(rows[0])
    cells = [
        [f"{v:.{decimals}f}" if isinstance(v, float) else str(v) for v in row.values()]
        for row in rows
    ]
    lines = [names, ["---"] * len(names), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
