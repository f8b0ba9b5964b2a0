"""State files: JSON with a checksum, written atomically and validated when read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from swiftsure._lib.files import (
    NotJSONError,
    json_checksum,
    locked,
    read_json,
    validation_message,
    writable,
    write_text,
)

__all__ = ["Section", "read_state", "write_state"]

FORMAT = "swiftsure-monitor"
DAMAGED = (
    "is a damaged monitor state and was left as it is (restore a copy, or start again with"
    " another file and a new α)"
)
VERSION = 1
"""Version of the state file; newer versions are refused."""


class Section(BaseModel):
    """A section of a state file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def write_state(
    path: str | os.PathLike[str], sections: Mapping[str, Section | None], known: str | None = None
) -> str:
    """Write sections to a file, atomically, and return its checksum.

    Parameters
    ----------
    path : path
    sections : mapping
        Numbers keep full precision.
    known : str, optional
        The checksum of the state that this one continues; None for a new one.

    Raises
    ------
    ValueError
        If the file holds a state that this one does not continue: it would lose what another
        writer saved, perhaps an alarm.
    """
    content: dict[str, Any] = {
        name: section.model_dump(mode="json")
        for name, section in sections.items()
        if section is not None
    }
    checksum = json_checksum(content)
    head = {"format": FORMAT, "version": VERSION, "checksum": checksum}
    target = writable(path).resolve()
    with locked(target.with_name(f".{target.name}.lock"), wait=10.0):
        if target.exists():
            _refuse_other_state(target, known, content)
        write_text(target, json.dumps({**head, **content}, indent=2) + "\n")
    return checksum


def _refuse_other_state(path: Path, known: str | None, new: Mapping[str, Any]) -> None:
    """Refuse to replace a state that is not the known one, or that holds more than the new one."""
    content = _content(path)
    if known is not None and content.get("checksum") == known:
        lost = content.keys() - new.keys() - {"checksum"}
        if lost:
            raise ValueError(
                f"{path} holds more than a monitor: {', '.join(sorted(lost))}, which would be lost."
                " Load and save it with `Watch`, as `swiftsure monitor` does."
            )
        return
    monitor = content.get("monitor")
    alarm = isinstance(monitor, dict) and monitor.get("alarm_at") is not None
    raise ValueError(
        f"{path} was written by another monitor{', which raised an alarm' if alarm else ''}; it was"
        " left as it is. Load it and go on from there, or choose another file, which starts with a"
        " new α."
    )


def read_state(
    path: str | os.PathLike[str], kinds: Mapping[str, type[Section]]
) -> tuple[dict[str, Any], str]:
    """Return the sections of these kinds that a file has, and its checksum.

    The first kind is required. The file is never changed, even if it is damaged.
    """
    content = _content(path)
    checksum = content.pop("checksum", None)
    if checksum != json_checksum(content):
        raise _damaged(path, "its checksum does not match its numbers")
    required = next(iter(kinds))
    if required not in content:
        raise _damaged(path, f"it has no part {required!r}")
    try:
        sections = {
            name: kind.model_validate_json(json.dumps(content[name]), strict=True)
            for name, kind in kinds.items()
            if name in content
        }
    except ValidationError as error:
        raise _damaged(path, validation_message(error)) from None
    return sections, str(checksum)


def _content(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content of a state file after checking its format and version."""
    try:
        content = read_json(path, "the state of a Swiftsure monitor", FORMAT, VERSION)
    except NotJSONError as error:
        raise _damaged(path, f"it is not JSON ({error.why})") from None
    del content["format"]
    version = content.pop("version", None)
    if version != VERSION or isinstance(version, bool):
        raise _damaged(path, f"its version is {version!r}")
    return content


def _damaged(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(f"{path} {DAMAGED}: {why}.")
