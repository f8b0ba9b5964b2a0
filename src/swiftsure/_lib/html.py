"""Small HTML cards for notebooks."""

from collections.abc import Mapping
from html import escape

__all__ = ["html_card"]


def html_card(title: str, facts: Mapping[str, object], text: str = "") -> str:
    """Return a title, a table of facts and a sentence as HTML; everything is escaped."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(str(name))}</th>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in facts.items()
    )
    below = f'<p style="white-space:pre-line">{escape(text)}</p>' if text else ""
    return f"<div><strong>{escape(title)}</strong><table>{rows}</table>{below}</div>"
