"""State files: JSON with a checksum, written atomically and validated when read."""

import json
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from swiftsure.files import checksum, parse_json, write_text

__all__ = ["Section", "read_state", "write_state"]

FORMAT = "swiftsure-monitor"
VERSION = 1
"""Version of the state file; newer versions are refused."""


class Section(BaseModel):
    """A section of a state file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def write_state(path: str | os.PathLike[str], sections: Mapping[str, Section | None]) -> None:
    """Write sections to a file, atomically; numbers keep full precision."""
    content: dict[str, Any] = {
        name: section.model_dump(mode="json")
        for name, section in sections.items()
        if section is not None
    }
    head = {"format": FORMAT, "version": VERSION, "checksum": checksum(content)}
    write_text(path, json.dumps({**head, **content}, indent=2) + "\n")


def read_state(path: str | os.PathLike[str], kinds: Mapping[str, type[Section]]) -> dict[str, Any]:
    """Return the sections of these kinds that a file has; the first kind is required.

    The file is never changed, even if it is damaged.
    """
    content = parse_json(path, FORMAT, "monitor state", VERSION)
    found = [content.pop(name, None) for name in ("format", "version", "checksum")]
    if found[1] != VERSION:
        raise _damaged(path, f"its version is {found[1]!r}")
    if found[2] != checksum(content):
        raise _damaged(path, "its checksum does not match its numbers")
    required = next(iter(kinds))
    if required not in content:
        raise _damaged(path, f"it has no part {required!r}")
    try:
        return {
            name: kind.model_validate_json(json.dumps(content[name]))
            for name, kind in kinds.items()
            if name in content
        }
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise _damaged(path, f"{where}: {what}" if where else what) from None


def _damaged(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(
        f"{path} is a damaged monitor state: {why}. It was left as it is; restore a copy, or start"
        " again with another file and a new α."
    )
