"""Attention masks: captured and compiled stages build one exactly where the batch has one.

Eager networks of transformers read the mask of a batch, and build none where nothing is padded, so
that attention takes its fastest kernel. A graph cannot read: under tracing they build one always.
Here the host reads instead (`ReplayedModel.settled`), and graphs follow the form of the batch.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["masks_by_form"]

_local = threading.local()
_lock = threading.Lock()
_users = 0
_original: Any = None


@contextmanager
def masks_by_form() -> Iterator[None]:
    """Let transformers decide about masks in this thread without reading any.

    It then builds a mask if it is given one, and none otherwise. If it read, then what one batch
    recorded could be wrong for another.
    """
    global _users, _original  # noqa: PLW0603 (one patch for all threads)
    masking_utils: Any = sys.modules.get("transformers.masking_utils")
    if masking_utils is None:  # then no network of transformers is here
        yield
        return
    with _lock:
        _users += 1
        if _users == 1:
            _original = masking_utils.is_tracing
            masking_utils.is_tracing = _is_given
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1
        with _lock:
            _users -= 1
            if _users == 0:
                masking_utils.is_tracing = _original


def _is_given(mask: Any = None) -> bool:
    """Stand in for transformers' `is_tracing`, which asks whether a mask may not be read."""
    if getattr(_local, "depth", 0):
        return mask is not None
    found: bool = _original(mask)
    return found
