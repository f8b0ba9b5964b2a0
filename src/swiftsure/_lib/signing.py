"""Checksums and signatures of policy files."""

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swiftsure._lib.files import json_checksum

__all__ = ["proofs", "refuse_unsigned"]


def proofs(content: Mapping[str, Any]) -> dict[str, str]:
    """Return the checksum of a file's content, and its signature if the environment has a key."""
    found = {"checksum": json_checksum(content)}
    key = _key()
    if key is not None:
        found["signature"] = _signature(content, key)
    return found


def refuse_unsigned(
    path: str | os.PathLike[str], content: Mapping[str, Any], signature: object
) -> None:
    """Raise if the environment has a key, and the content is not signed with it."""
    key = _key()
    if key is not None and not hmac.compare_digest(
        json.dumps(signature).encode(), json.dumps(_signature(content, key)).encode()
    ):
        raise ValueError(
            f"{path} {'is not signed' if signature is None else 'does not fit its signature'},"
            " but SWIFTSURE_POLICY_KEY asks for one: it was changed, or saved without this key."
            " Load it where the key is not set, check it, and save it where the key is set."
        )


def _signature(content: Mapping[str, Any], key: bytes) -> str:
    text = json.dumps(content, sort_keys=True)
    return f"hmac-sha256:{hmac.new(key, text.encode(), hashlib.sha256).hexdigest()}"


def _key() -> bytes | None:
    """Return the key for signatures from the environment; None if no variable is set.

    A key may be any bytes; spaces around it are ignored.
    """
    text, file = (os.environ.get(f"SWIFTSURE_POLICY_KEY{end}") for end in ("", "_FILE"))
    if text is not None and file is not None:
        raise ValueError("Set SWIFTSURE_POLICY_KEY or SWIFTSURE_POLICY_KEY_FILE, not both.")
    if text is None and file is None:
        return None
    key = os.fsencode(text or "").strip()
    if file is not None:
        try:
            key = Path(file).read_bytes().strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"SWIFTSURE_POLICY_KEY_FILE cannot be read ({error}).") from None
    if not key:
        name = "SWIFTSURE_POLICY_KEY" if file is None else f"SWIFTSURE_POLICY_KEY_FILE ({file})"
        raise ValueError(f"{name} is empty: set a key, or unset it to do without signatures.")
    return key
