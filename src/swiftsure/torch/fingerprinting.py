"""Model fingerprints: one hash of everything that a policy was certified for."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dis import get_instructions
from inspect import signature
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["begin_fingerprint", "configuration", "fingerprint"]

TRAINING_ONLY = ("training", "inplace", "momentum", "gradient_checkpointing")
"""Attributes that do not change outputs in evaluation mode, in addition to those of dropout."""

VOLATILE = (
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_factor",
    "initializer_range",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "pad_token_id",
    "return_dict",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Entries of a Hugging Face configuration that do not change what the network computes.

Policies keep the end-of-answer tokens in their own settings."""


def fingerprint(
    model: nn.Module, *, temperatures: tuple[float, ...] | None = None, dtype: str | None = None
) -> str:
    """Return a hash of a model's parameters, buffers, configuration, temperatures and dtype.

    Parameters and buffers are hashed by name, shape and value. Wrapping the model, or moving it to
    another device, does not change the hash.

    Examples
    --------
    >>> layer = nn.Linear(2, 2)
    >>> fingerprint(layer) == fingerprint(torch.nn.DataParallel(layer))
    True
    """
    run_as = _run_as(model, temperatures, dtype)
    return _hash({**_parameters(model), **_buffers(model)}, run_as)


def configuration(model: nn.Module) -> dict[str, Any]:
    """Return the hyperparameters that change what a model computes, by name.

    These are the plain attributes of every submodule (numbers, strings, functions, and tuples of
    these), such as strides and numbers of heads, and the classes of submodules without children,
    such as activations. Attributes assigned while the model runs, such as counters, are left out
    unless the constructor takes them. For a Hugging Face model it is the `config` instead.

    Examples
    --------
    >>> layer = nn.Softmax(dim=1)
    >>> configuration(layer)
    {'class': 'Softmax', 'dim': 1}
    """
    model = _unwrapped(model)
    return dict(sorted(_entries(model, "", _assigned_names(model))))


def _entries(module: nn.Module, prefix: str, state: set[str]) -> Iterator[tuple[str, Any]]:
    module = getattr(module, "_orig_mod", module)  # torch.compile wraps parts too
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        yield f"{prefix}config", _hugging_face(config)
        return
    children = list(module.named_children())
    if "Drop" in type(module).__name__:  # dropout of any kind
        return
    if not children:
        yield f"{prefix}class", type(module).__name__
    state_names = state - set(signature(type(module).__init__).parameters)
    for name, value in vars(module).items():
        if not (name.startswith("_") or name in {*TRAINING_ONLY, *state_names} or "drop" in name):
            plain = _plain_value(value)
            if plain is not None:
                yield f"{prefix}{name}", plain
    for name, child in children:
        yield from _entries(child, f"{prefix}{name}.", state)


def _assigned_names(model: nn.Module) -> set[str]:
    """Return the names of attributes that methods other than `__init__` assign."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    methods = [
        method.__code__
        for kind in kinds
        if not kind.__module__.startswith("torch.")  # whose attributes are hyperparameters
        for name, method in vars(kind).items()
        if name != "__init__" and isinstance(method, FunctionType)
    ]
    return {
        each.argval
        for code in methods
        for each in get_instructions(code)
        if each.opname == "STORE_ATTR"
    }


def _plain_value(value: Any) -> Any:
    """Return the JSON form of an attribute; None if it is not part of the configuration."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value.__name__
    if isinstance(value, tuple):
        plain = [_plain_value(each) for each in value]
        return plain if all(each is not None for each in plain) else None
    return None


def _hugging_face(config: Any) -> dict[str, Any]:
    """Return a Hugging Face configuration without `VOLATILE` entries and library defaults."""
    bases = (
        base for base in type(config).__mro__ if base.__module__.endswith("configuration_utils")
    )
    base = next(bases, None)
    defaults = {} if base is None else base().to_dict()
    return {
        name: value
        for name, value in config.to_dict().items()
        if not (name.startswith("_") or name in VOLATILE or "drop" in name)
        and (name not in defaults or value != defaults[name])
    }


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as torch.compile and DataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and [name for name, _ in model.named_children()] == ["module"]:
            own = [*model.parameters(recurse=False), *model.buffers(recurse=False)]
            inner = None if own else model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _run_as(model: nn.Module, temperatures: tuple[float, ...] | None, dtype: str | None) -> str:
    content = {
        "configuration": configuration(model),
        "temperatures": temperatures,
        "dtype": dtype,
    }
    return json.dumps(content, sort_keys=True, default=str)


def begin_fingerprint(
    model: nn.Module,
    device: torch.device,
    *,
    temperatures: tuple[float, ...] | None = None,
    dtype: str | None = None,
) -> "Future[str]":
    """Hash a model in a background thread; on CUDA, on a side stream.

    The model may run meanwhile. The fingerprint is that of the model as it is now: buffers, which
    a run may change, are copied first; parameters must not change.
    """
    run_as = _run_as(model, temperatures, dtype)
    values = _parameters(model)
    values |= {name: value.detach().cpu().clone() for name, value in _buffers(model).items()}
    side_stream = None
    if device.type == "cuda":
        side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side_stream.wait_stream(torch.cuda.current_stream(device))

    def run() -> str:
        with torch.cuda.stream(side_stream):
            return _hash(values, run_as)

    threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swiftsure-fingerprint")
    begun = threads.submit(run)
    threads.shutdown(wait=False)
    return begun


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    # Not from the state dict, which lacks non-persistent buffers: outputs depend on those too.
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
    """Return names without wrapper prefixes: `_orig_mod` (torch.compile), `module` (parallel)."""
    plain = [".".join(part for part in name.split(".") if part != "_orig_mod") for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain
