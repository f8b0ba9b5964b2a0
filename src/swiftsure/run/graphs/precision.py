"""The context in which models answer: without gradients, in a chosen precision."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["inference"]


@contextmanager
def inference(device: torch.device, dtype: str | None) -> Iterator[None]:
    """Disable gradients and autocast to a dtype; no autocast for None and "float32"."""
    kind = None if dtype in (None, "float32") else getattr(torch, str(dtype))
    # Gives a new thread the number of `torch.set_num_threads`; matrix products alone do not.
    torch.get_num_threads()
    with torch.inference_mode():
        if kind is None and not torch.is_autocast_enabled(device.type):
            yield  # entering a disabled autocast would take as long as a small layer
        else:
            with torch.autocast(device.type, dtype=kind, enabled=kind is not None):
                yield
