"""Fingerprints of models: what a policy certifies, in one hash."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

__all__ = ["begin_fingerprint", "fingerprint"]


def fingerprint(
    model: nn.Module, *, temperatures: tuple[float, ...] | None = None, dtype: str | None = None
) -> str:
    """Return a hash of names, shapes and values of parameters and buffers, and how they are run.

    Wrapping the model, or moving it to another device, does not change it.

    Examples
    --------
    >>> layer = nn.Linear(2, 2)
    >>> fingerprint(layer) == fingerprint(torch.nn.DataParallel(layer))
    True
    """
    return _hash({**_parameters(model), **_buffers(model)}, f"{temperatures}{dtype}")


def begin_fingerprint(
    model: nn.Module,
    device: torch.device,
    *,
    temperatures: tuple[float, ...] | None = None,
    dtype: str | None = None,
) -> "Future[str]":
    """Begin to take a fingerprint in a thread, on a GPU beside what that is asked to do next.

    The model may run meanwhile. It is the fingerprint of the model as it is now: a run may change
    buffers, which are therefore copied first, but no parameters.
    """
    values = _parameters(model)
    values |= {name: value.detach().cpu().clone() for name, value in _buffers(model).items()}
    beside = None
    if device.type == "cuda":
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(device))

    def run() -> str:
        with torch.cuda.stream(beside):
            return _hash(values, f"{temperatures}{dtype}")

    threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swiftsure-fingerprint")
    begun = threads.submit(run)
    threads.shutdown(wait=False)
    return begun


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    # Not the state dict's, which lacks buffers that are not saved: answers depend on those too.
    return dict(model.named_buffers(remove_duplicate=False))


def _hash(values: Mapping[str, Tensor], run_as: str) -> str:
    digest = hashlib.sha256()
    digest.update(run_as.encode())
    for name, value in sorted(
        zip(_plain(list(values)), values.values(), strict=True), key=lambda entry: entry[0]
    ):
        array = value.detach().cpu().contiguous()
        digest.update(f"{name}{tuple(array.shape)}{array.dtype}".encode())
        digest.update(array.view(-1).view(torch.uint8).numpy().data)
    return f"sha256:{digest.hexdigest()}"


def _plain(names: list[str]) -> list[str]:
    """Drop what wrapping adds: `_orig_mod` (torch.compile), `module` before all (data parallel)."""
    plain = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain
