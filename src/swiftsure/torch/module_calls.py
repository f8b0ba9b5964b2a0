"""Module calls: which there are, and how a stage answers, captures and stops them."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn

from swiftsure.torch.batches import without_labels

__all__ = [
    "ROOT",
    "Call",
    "Key",
    "Run",
    "Shadow",
    "Stage",
    "arguments_of",
    "as_arguments",
    "check_order",
    "common_module",
    "find_call",
    "is_cache",
    "record_calls",
    "refuse_other_calls",
    "suggestion",
]

Key = tuple[str, str, int]
"""A module call: the calling module, the called one, and how many such calls there were before."""

ROOT = ""
"""The name of the network itself, as in `named_modules`."""


@dataclass
class Stage:
    """One stage: the module to call, the calls that answer from memory, the call to stop after.

    Attributes
    ----------
    stop : key, optional
        None to run to the end.
    arguments : names of modules
        First called here; their arguments are needed later.
    outputs : keys of calls
        They run here and answer later.
    """

    frame: str
    answers: tuple[Key, ...]
    stop: Key | None
    arguments: list[str] = field(default_factory=list)
    outputs: list[Key] = field(default_factory=list)

    @property
    def reads(self) -> list[Key]:
        """Keys of the saved values that this stage starts from."""
        return [arguments_of(self.frame), *self.answers]


def arguments_of(name: str) -> Key:
    """Return the key under which the arguments of a module are saved."""
    return ("()", name, 0)


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as arguments: a dict by name, a tuple or list by place, anything else alone."""
    if isinstance(inputs, Mapping):
        return (), dict(without_labels(inputs))
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


@dataclass(eq=False)
class Call:
    """A call of a module while the example ran.

    Attributes
    ----------
    above : list of Call
        The calls that it is part of, outermost first.
    repeatable : bool
        Whether the same arguments can be given again: not a cache, which grows with every call.
    """

    name: str
    key: Key
    above: "list[Call]"
    start: int
    end: int = -1
    repeatable: bool = True

    @property
    def caller(self) -> str | None:
        """The module that called it."""
        return self.above[-1].name if self.above else None

    def answers_at(self, cut: "Call", frame: str) -> bool:
        """Return whether this call is done at a cut and would be made again by `frame`."""
        if self.end > cut.end or not self.above:
            return False
        names = [call.name for call in cut.above]
        return self.above[-1] in cut.above[names.index(frame) :]


def record_calls(network: nn.Module, example: Any) -> list[Call]:
    """Return all module calls on an example, in the order of their starts."""
    shadow = Shadow(network)
    shadow.gate(set(shadow.modules))
    recorder = _Recorder()
    with _active(recorder):
        args, kwargs = as_arguments(example)
        shadow.modules[ROOT](*args, **kwargs)
    return recorder.calls


def is_cache(value: Any) -> bool:
    """Return whether a value is transformers' cache of keys and values."""
    return hasattr(value, "get_seq_length")


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._stack: list[Call] = []
        self._times: Counter[Any] = Counter()
        self._clock = 0

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        caller = self._stack[-1] if self._stack else None
        times = self._times[id(caller), name]
        self._times[id(caller), name] += 1
        key = ("" if caller is None else caller.name, name, times)
        self._clock += 1
        repeatable = not any(map(is_cache, (*args, *kwargs.values())))
        call = Call(name, key, list(self._stack), self._clock, repeatable=repeatable)
        self.calls.append(call)
        self._stack.append(call)
        try:
            return forward(*args, **kwargs)
        finally:
            self._stack.pop()
            self._clock += 1
            call.end = self._clock


def find_call(calls: list[Call], network: nn.Module, name: str) -> Call:
    """Return the only call of a named module; raises if there is none or more than one."""
    names = {id(part): each for each, part in network.named_modules()}
    own = names[id(network.get_submodule(name))]
    found = [call for call in calls if call.name == own]
    if len(found) != 1:
        times = "not run" if not found else f"run {len(found)} times"
        raise ValueError(
            f"`at` must name submodules that run once, but {name!r} is {times} by the network."
            f" {suggestion(network, calls)}"
        )
    return found[0]


def suggestion(network: nn.Module, calls: list[Call] | None = None) -> str:
    """Return a sentence that names modules at which a network can be cut."""
    once = None
    if calls is not None:
        times = Counter(call.name for call in calls)
        once = {name for name in times if times[name] == 1}
    lists = []
    for name, part in network.named_modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1:
            names = [f"{name}.{child}" if name else child for child, _ in part.named_children()]
            names = [each for each in names if once is None or each in once]
            if len(names) > 1:
                lists.append(names)
    if not lists:
        names = [name for name, _ in network.named_children() if once is None or name in once]
        return f"It can be cut after {', '.join(names)}." if names else ""
    longest = max(lists, key=len)
    return f"It can be cut after {longest[0]}, {longest[1]}, … up to {longest[-1]}."


def check_order(cuts: list[Call]) -> None:
    """Raise unless cuts are in the order in which they run."""
    ends = [cut.end for cut in cuts]
    if ends != sorted(set(ends)):
        raise ValueError("`at` must name submodules in the order in which they run, each once.")
    if not cuts[-1].above:
        raise ValueError("`at` must name submodules, not the network itself.")


def common_module(cut: Call, following: Call | None) -> str:
    """Return the innermost module whose call contains two cuts and can be made again.

    After the last cut it is the network.
    """
    if following is None:
        return ROOT
    inside = {*following.above, following}
    return next(call.name for call in reversed(cut.above) if call in inside and call.repeatable)


_RUNNING = threading.local()


@contextmanager
def _active(run: Any) -> Iterator[None]:
    """Send the calls of gated modules in this thread to a run."""
    before = getattr(_RUNNING, "run", None)
    _RUNNING.run = run
    try:
        yield
    finally:
        _RUNNING.run = before


class _StopError(BaseException):
    """Ends a stage; not an Exception, which a network may catch."""


class Run:
    """One run of a stage: answers calls from memory, captures values and stops."""

    def __init__(self, path: set[str], stage: Stage) -> None:
        self.stage = stage
        self.answers: dict[Key, Any] = {}
        self.captured: dict[Key, Any] = {}
        self._path = path
        self._stack: list[str] = []
        self._times: defaultdict[tuple[str, str], int] = defaultdict(int)

    def start(self, shadow: "Shadow", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the stage's module and return its output, None if it was stopped."""
        frame = self.stage.frame
        self._stack = [frame]
        try:
            with _active(self):
                output = shadow.call(frame, args, kwargs)
        except _StopError as stopped:
            # Else frames of the stage, with their tensors, would stay until garbage is collected.
            stopped.__traceback__ = None
            return None
        stop = self.stage.stop
        if stop is not None and stop[1] == frame:
            self.captured[stop] = output
        elif stop is not None:
            refuse_other_calls(stop)
        return output

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer a call of a module, or make it."""
        caller = self._stack[-1]
        if caller not in self._path:  # inside a module that runs whole
            return forward(*args, **kwargs)
        times = self._times[caller, name]
        self._times[caller, name] = times + 1
        key = (caller, name, times)
        if key in self.answers:
            return self.answers[key]
        if name in self.stage.arguments:
            self.captured[arguments_of(name)] = (args, kwargs)
        self._stack.append(name)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._stack.pop()
        if key in self.stage.outputs or key == self.stage.stop:
            self.captured[key] = output
        if key == self.stage.stop:
            raise _StopError
        return output


def refuse_other_calls(key: Key) -> NoReturn:
    """Raise for a call that the example made and a batch does not make."""
    raise ValueError(
        f"The network did not run {key[1]!r} for this batch, as it did for the example: it can only"
        " be cut where all batches run the same modules."
    )


class Shadow:
    """A copy of a network's module tree that shares everything but the tree.

    Parameters, buffers, hooks and the train or eval mode are the network's own. Gated modules ask
    the running stage before they run.

    Parameters
    ----------
    replaced : dict
        Modules to put in place of the network's, by name.
    """

    def __init__(self, network: nn.Module, replaced: Mapping[str, nn.Module] = {}) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._copies: dict[int, nn.Module] = {}
        self._names = {id(part): name for name, part in network.named_modules()}
        self._replaced = replaced
        self._copy(network)

    def gate(self, names: Iterable[str]) -> None:
        """Let the running stage decide over the calls of some modules."""
        for name in names:
            part = self.modules.get(name)
            if part is not None and "_shadow_of" in part.__dict__:
                part.__class__ = _shadow_class(part.__dict__["_shadow_of"].__class__, gated=True)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module past its own gate."""
        part = self.modules[name]
        kind = type(part.__dict__["_shadow_of"])
        return kind.__call__(part, *args, **kwargs)

    def _copy(self, module: nn.Module) -> nn.Module:
        if id(module) in self._copies:
            return self._copies[id(module)]
        name = self._names[id(module)]
        if name in self._replaced or isinstance(module, torch.jit.ScriptModule):
            made = self._replaced.get(name, module)
        else:
            kind: Any = type(module)
            made = object.__new__(_shadow_class(kind, gated=False))
            made.__dict__.update(module.__dict__)
            made.__dict__["_shadow_of"] = module
            made.__dict__["_shadow_name"] = name
            made.__dict__["_modules"] = {
                child: None if part is None else self._copy(part)
                for child, part in module._modules.items()
            }
        self._copies[id(module)] = made
        self.modules[name] = made
        return made


@cache
def _shadow_class(kind: Any, *, gated: bool) -> Any:
    """Return a class like another, whose instances take their mode from the original module."""
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "training": property(_mode, _set_mode),
    }
    if gated:
        forward = kind.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = getattr(_RUNNING, "run", None)
            if run is None or "_shadow_name" not in self.__dict__:
                return forward(self, *args, **kwargs)
            return run.call(self.__dict__["_shadow_name"], forward.__get__(self), args, kwargs)

        members["__call__"] = call
    return type(kind.__name__, (kind,), members)


def _mode(shadow: nn.Module) -> bool:
    """Return the original's mode. A slice of a shadow has no original: it is made for one call."""
    original = shadow.__dict__.get("_shadow_of")
    mode: bool = shadow.__dict__["training"] if original is None else original.training
    return mode


def _set_mode(shadow: nn.Module, mode: bool) -> None:
    shadow.__dict__["training"] = mode
