"""Parsing of JSON lines, including lines that a killed writer cut short."""

import json
import re
from typing import Any

__all__ = ["KEYS", "parse_json", "parse_request"]

KEYS = {"loss", "id", "exit", "cost", "confidence"}

LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
LITERAL_STARTS = {word[:k] for word in LITERALS for k in range(1, len(word))}
NUMBER_START = re.compile(r"(?<![\w.+-])(-?(?:0|[1-9]\d*)(?:\.\d+(?=[eE]))?)(?:\.|[eE][+-]?)$")
"""A number that ends before its fraction or exponent does; group 1 is what JSON accepts of it."""
ESCAPE_START = re.compile(r"u[0-9a-fA-F]{0,4}")


def parse_json(line: bytes) -> Any:
    """Return the value of a line of JSON.

    Raises
    ------
    ValueError
        If the line is not JSON.
    """
    try:
        return json.loads(line, object_pairs_hook=_distinct)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise DuplicateKeyError("has a key twice")
    return found


class DuplicateKeyError(ValueError):
    """An object of a line has a key twice, so that it is unclear which value counts."""


def parse_request(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a request from a line; None if the line is a truncated object.

    Raises
    ------
    ValueError
        If the line has no usable content: a loss may have been in it.
    """
    try:
        content = parse_json(line)
    except DuplicateKeyError as error:
        raise _useless(str(error)) from None
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
    """Return whether a line is the beginning of a JSON object, judging by the parser's error."""
    text = line.decode(errors="replace").rstrip("\r")
    if not text.lstrip().startswith("{"):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        rest = text[error.pos :]
        if error.msg == "Extra data":
            return False
        if error.msg.startswith("Expecting value"):
            return rest.strip() == "" or rest in LITERAL_STARTS
        if error.msg.startswith("Invalid \\uXXXX escape"):
            return ESCAPE_START.fullmatch(rest) is not None
        number = NUMBER_START.search(text)
        return (
            error.msg.startswith("Unterminated string")
            or rest.strip() == ""
            or (number is not None and number.end(1) == error.pos)
        )
    except RecursionError:
        pass
    return False
