"""Fingerprints of models: what a policy certifies, in one hash."""

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
"""Attributes that do not change answers in evaluation mode, beside those of dropout."""

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

Policies hold the tokens that end an answer in their own settings."""


def fingerprint(
    model: nn.Module, *, temperatures: tuple[float, ...] | None = None, dtype: str | None = None
) -> str:
    """Return a hash of parameters and buffers, of the configuration, and of how the model is run.

    Parameters and buffers count with names, shapes and values. Wrapping the model, or moving it to
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

    They are the plain attributes of every part (numbers, texts, functions, and tuples of these),
    such as strides and numbers of heads, and the classes of parts without children, such as
    activations. Attributes that are assigned while the model runs, such as counters, are left out
    unless the constructor takes them. A Hugging Face model gives its `config` instead.

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
    """Return names of attributes that methods other than constructors assign."""
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
    """Return what an attribute adds to a configuration; None for nothing."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value.__name__
    if isinstance(value, tuple):
        plain = [_plain_value(each) for each in value]
        return plain if all(each is not None for each in plain) else None
    return None


def _hugging_face(config: Any) -> dict[str, Any]:
    """Return a configuration without what is volatile or left at the default of all models."""
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
    """Return the model inside wrappers such as those of torch.compile and data parallelism."""
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

    The model may run meanwhile. It is the fingerprint of the model as it is now: a run may change
    buffers, which are therefore copied first, but not parameters.
    """
    run_as = _run_as(model, temperatures, dtype)
    values = _parameters(model)
    values |= {name: value.detach().cpu().clone() for name, value in _buffers(model).items()}
    beside = None
    if device.type == "cuda":
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream(device))

    def run() -> str:
        with torch.cuda.stream(beside):
            return _hash(values, run_as)

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
