"""Policy files of a server: one policy, or one for each slice."""

import json
import os
from pathlib import Path

from swiftsure.certify.policy import Policy
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.serve.engine import AnyPolicy

__all__ = ["load_policy"]


def load_policy(path: str | os.PathLike[str]) -> AnyPolicy:
    """Return the policy in a file, with its checksum and signature checked."""
    place = Path(path)
    try:
        sliced = json.loads(place.read_bytes())["format"] == "swiftsure-sliced-policy"
    except (ValueError, KeyError, TypeError, RecursionError):
        sliced = False  # `Policy.load` says what is wrong
    return SlicedPolicy.load(place) if sliced else Policy.load(place)
