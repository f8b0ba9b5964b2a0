"""Parsing of JSON lines, including lines that a killed writer cut short."""

import json
from typing import Any

__all__ = ["KEYS", "parse_json", "parse_request"]

KEYS = {"loss", "id", "exit", "cost", "confidence"}

LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
LITERAL_ENDS = [word[k:] for word in LITERALS for k in range(1, len(word))]
ENDS = ["", '"', '":0', ":0", "0", '"":0', *LITERAL_ENDS]
"""Endings that may complete a truncated key or value before its object is closed."""
STRING_ENDS = ["", '"', '0"', '00"', '000"', '0000"']
"""Endings that may complete a string truncated inside an escape."""


def parse_json(line: bytes) -> Any:
    """Return the value of a line of JSON.

    Raises
    ------
    ValueError
        If the line is not JSON.
    """
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_request(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a request from a line; None if the line is a truncated object.

    Raises
    ------
    ValueError
        If the line has no usable content: a loss may have been in it.
    """
    try:
        content = parse_json(line)
    except ValueError:
        if _is_cut(line):
            return None
        raise _useless("is neither JSON nor a truncated JSON object") from None
    if isinstance(content, int | float) and not isinstance(content, bool):
        return {"loss": content}
    if not isinstance(content, dict):
        raise _useless("is neither an object nor a number")
    if not KEYS & content.keys():
        raise _useless(f"has none of the keys {', '.join(sorted(KEYS))}")
    return content


def _useless(why: str) -> ValueError:
    return ValueError(f'`loss` must be given as {{"loss": 0.5}} or as a number, but this {why}.')


def _is_cut(line: bytes) -> bool:
    """Return whether a line is the beginning of a JSON object."""
    text = line.decode(errors="replace").rstrip("\r")
    if not text.lstrip().startswith("{"):
        return False
    brackets, in_string = _left_open(text)
    if not brackets:
        return False
    closing = "".join(reversed(brackets))
    first = STRING_ENDS if in_string else [""]
    return any(_is_json(text + start + end + closing) for start in first for end in ENDS)


def _left_open(text: str) -> tuple[list[str], bool]:
    """Return the closing brackets that a text lacks, and whether it ends inside a string."""
    brackets: list[str] = []
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = character == "\\" and not escaped
        elif character == '"':
            in_string = True
        elif character in "{[":
            brackets.append("}" if character == "{" else "]")
        elif character in "}]" and (not brackets or brackets.pop() != character):
            return [], False
    return brackets, in_string


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
