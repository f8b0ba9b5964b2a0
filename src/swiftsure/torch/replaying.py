"""Cut any network at module boundaries, without tracing it.

The first stage runs the network's own `forward` and stops at the first cut. A later stage calls the
innermost module that contains both of its cuts again. Modules that ran before then answer with what
they returned, so only code between modules runs twice:

    stage 1   network(inputs)             embeddings and blocks 1 to 3 run                stop
    stage 2   encoder(same arguments)     blocks 1 to 3 answer, blocks 4 to 6 run         stop
    stage 3   network(inputs)             embeddings and blocks 1 to 6 answer, the rest runs

An example batch shows which calls there are, which of their tensors have one row per sample, and
which tensors later stages use. The state holds only those.
"""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from swiftsure.torch.batches import without_labels
from swiftsure.torch.modes import evaluating
from swiftsure.torch.staged import (
    Scored,
    Staged,
    batch_size,
    device_of,
    plain_output,
    rows_of,
)
from swiftsure.torch.tasks import Task

__all__ = ["FeatureHead", "Features", "ReplayedModel", "Replayer", "TailHead", "apply_head"]

Key = tuple[str, str, int]
"""A module call: the calling module, the called one, and how many such calls there were before."""

ROOT = ""
"""The name of the network itself, as in `named_modules`."""

MASK = "mask"
OUTPUT = "output"
REST = "rest"


# -------------------------------------------------------------------------------------- the model


class Features(NamedTuple):
    """What a head gets at a cut.

    Attributes
    ----------
    output
        What the module at the cut returned.
    mask : (n, tokens), optional
        The inputs' attention mask, if there is one.
    state : dict
        The whole state.
    """

    output: Any
    mask: Tensor | None
    state: dict[Any, Any]

    @property
    def hidden(self) -> Tensor:
        """The hidden state: the first tensor of the output."""
        hidden = _first_tensor(self.output)
        return hidden.to_padded_tensor(0.0) if hidden.is_nested else hidden


class ReplayedModel(Staged):
    """A network that stops at named modules and continues from there; made by `attach_heads`.

    Parameters
    ----------
    replayer : Replayer
    heads : one module per cut
    task : Task
    """

    def __init__(self, replayer: "Replayer", heads: Sequence[nn.Module], task: Task) -> None:
        super().__init__()
        self.network = replayer.network
        self.heads = nn.ModuleList(heads)
        self.replayer = replayer
        self.task = task
        self.at = tuple(name for _, name, _ in replayer.cuts)  # part of the fingerprint
        self.n_exits = len(heads) + 1
        self.training = self.heads.training = self.network.training

    def begin(self, batch: Any) -> Any:
        """Return the network's inputs, without labels."""
        return without_labels(batch)

    def advance(self, exit_index: int, state: Any) -> Any:
        """Run the network from one cut to the next."""
        return self.replayer.advance(exit_index, state)

    def head(self, exit_index: int, state: Any) -> Any:
        """Run the head of a cut; the last exit is the network's own output."""
        if exit_index == self.n_exits - 1:
            return self._answer(state[OUTPUT], state.get(MASK))
        features = self.replayer.features(exit_index, state)
        return self._answer(apply_head(self.heads[exit_index], features), features.mask)

    def _answer(self, given: Any, mask: Tensor | None) -> Any:
        """Return an output with its padding marked, and with the confidence of its task."""
        output = plain_output(given)
        if self.task.per_token and mask is not None and mask.shape == output.shape[:2]:
            output = output.masked_fill(mask[..., None] == 0, torch.nan)
        if isinstance(given, Scored):
            return Scored(output, given.confidence)
        if self.task.confidence is not None:
            return Scored(output, self.task.confidence(output))
        return output


class FeatureHead(nn.Module):
    """A head that gets the `Features` of a cut; other heads get the hidden state."""


def apply_head(head: nn.Module, features: Features) -> Any:
    """Return the output of a head."""
    return head(features) if isinstance(head, FeatureHead) else head(features.hidden)


class TailHead(FeatureHead):
    """A copy of the modules that the network runs after its blocks, applied at a cut.

    The blocks between the cut and the end of their list are skipped, so the output has the form of
    the network's own. Only the copied modules are trained and saved.
    """

    def __init__(self, replayer: "Replayer", index: int) -> None:
        super().__init__()
        self.replayer = replayer
        self.index = index
        parts = dict(replayer.network.named_modules())
        self.parts = nn.ModuleDict(
            {
                name.replace(".", "/"): copy.deepcopy(parts[name])
                for name in replayer.tails[index].modules
            }
        )
        self._shadow: _Shadow | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is rebuilt."""
        return {**self.__dict__, "_shadow": None}

    def forward(self, features: Features) -> Any:
        """Return the network's output as if the remaining blocks did nothing."""
        if self._shadow is None:
            own = {name.replace("/", "."): part for name, part in self.parts.items()}
            self._shadow = _Shadow(self.replayer.network, own)
            self._shadow.gate(self.replayer.gated)
        return self.replayer.tail(self.index, features, self._shadow)


def _first_tensor(tree: Any) -> Tensor:
    """Return the first tensor of a nested structure."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            return leaf
    raise TypeError(f"The output must hold a tensor, but got {type(tree).__name__} without any.")


# -------------------------------------------------------------------------------------- the engine


@dataclass
class _Stage:
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
        return [_arguments_of(self.frame), *self.answers]


@dataclass
class _Tail:
    """How a `TailHead` runs: `skipped` calls of blocks answer with the cut's output."""

    stage: _Stage
    skipped: tuple[Key, ...]
    modules: tuple[str, ...]


class Replayer:
    """Runs a network from cut to cut.

    Parameters
    ----------
    network : nn.Module
        Not changed.
    at : names of modules
    example
        A batch; its first samples are run.
    result : callable
        Maps what the network returns to the output of the last exit.
    tails : bool
        Prepare `tail`, for heads that copy the end of the network.

    Raises
    ------
    ValueError
        If the network cannot be cut there; the message says where it can.
    """

    def __init__(
        self,
        network: nn.Module,
        at: Sequence[str],
        example: Any,
        result: Callable[[Any], Any],
        *,
        tails: bool = False,
    ) -> None:
        self.network = network
        self.result = result
        self._shadow: _Shadow | None = None
        with evaluating(network), torch.no_grad():
            calls = _record_calls(network, example)
            cuts = [_find_call(calls, network, name) for name in at]
            _check_order(cuts)
            self.cuts = [cut.key for cut in cuts]
            above = [call for cut in cuts for call in cut.above]
            for call in above:
                _find_call(calls, network, call.name)  # refuses those that run more than once
            self.path = {call.name for call in above}
            self.gated = {call.name for call in calls if call.caller in self.path}
            self.stages = [_Stage(ROOT, (), cuts[0].key)]
            for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
                frame = _common_module(cut, following)
                answers = tuple(call.key for call in calls if call.answers_at(cut, frame))
                stop = None if following is None else following.key
                self.stages.append(_Stage(frame, answers, stop))
            self.tails = [_tail(calls, cut) for cut in cuts] if tails else []
            self._place_captures(calls, cuts)
            self._learn(example)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is rebuilt."""
        return {**self.__dict__, "_shadow": None}

    @property
    def shadow(self) -> "_Shadow":
        """The copied module tree that runs."""
        if self._shadow is None:
            made = _Shadow(self.network)
            made.gate(self.gated)
            self._shadow = made
        return self._shadow

    def advance(self, number: int, state: Any) -> Any:
        """Return the state at cut `number`, from the one before; after the last, the result."""
        stage = self.stages[number]
        run = _Run(self, stage)
        if number == 0:
            saved: dict[Any, Any] = {}
            rest: dict[Key, _Template] = {}
            inputs = _as_arguments(state)
            n = batch_size(state)
            found = run.start(self.shadow, *inputs)
            run.captured[_arguments_of(ROOT)] = inputs
            mask = state.get("attention_mask") if isinstance(state, Mapping) else None
            if isinstance(mask, Tensor) and mask.ndim == 2 and len(mask) == n:
                saved[MASK] = mask
        else:
            saved, rest = dict(state), state[REST].templates
            n = len(saved[self.cuts[number - 1]][0])
            trees = {name: rest[name].filled(saved[name], n) for name in stage.reads}
            args, kwargs = trees.pop(_arguments_of(stage.frame))
            run.answers = trees
            found = run.start(self.shadow, args, kwargs)
        if stage.stop is None:
            kept = {MASK: saved[MASK]} if MASK in saved else {}
            return {OUTPUT: self.result(found), **kept}
        return self._state(number, run, saved, rest, n)

    def features(self, number: int, state: dict[Any, Any]) -> Features:
        """Return what the head of a cut gets."""
        rows = state[self.cuts[number]]
        return Features(
            state[REST].templates[self.cuts[number]].filled(rows, len(rows[0])),
            state.get(MASK),
            state,
        )

    def tail(self, number: int, features: Features, shadow: "_Shadow") -> Any:
        """Return the result of the modules after the blocks, on the output of a cut."""
        tail = self.tails[number]
        templates = features.state[REST].templates
        n = len(features.state[self.cuts[number]][0])
        trees = {
            name: templates[name].filled(features.state[name], n)
            for name in tail.stage.reads
            if name not in tail.skipped
        }
        args, kwargs = trees.pop(_arguments_of(ROOT))
        run = _Run(self, tail.stage)
        run.answers = trees | dict.fromkeys(tail.skipped, features.output)
        return self.result(run.start(shadow, args, kwargs))

    def _state(
        self,
        number: int,
        run: "_Run",
        saved: dict[Any, Any],
        rest: "dict[Key, _Template]",
        n: int,
    ) -> dict[str, Any]:
        """Return the values that later stages and this cut's head use."""
        needed = self.needed[number]
        state: dict[Any, Any] = {MASK: saved[MASK]} if MASK in saved else {}
        templates: dict[Key, _Template] = {}
        for name, flags in needed.items():
            if name in run.captured:
                form = self.forms[name]
                state[name], templates[name] = form.packed(run.captured[name], flags, n)
            elif name in rest:
                state[name], templates[name] = rest[name].reduced(saved[name], flags)
            else:
                _refuse_other_calls(name)
        state[REST] = _Rest(templates)
        return state

    # ---------------------------------------------------------------------------------- planning

    def _place_captures(self, calls: "list[_Call]", cuts: "list[_Call]") -> None:
        """Decide in which stage each value that later stages read is captured."""
        ends = [cut.end for cut in cuts]
        starts = {call.name: call.start for call in calls}
        ended = {call.key: call.end for call in calls}

        def stage_of(moment: int) -> _Stage:
            return self.stages[next(k for k, end in enumerate(ends) if moment <= end)]

        later = [*self.stages[1:], *(tail.stage for tail in self.tails)]
        for frame in {stage.frame for stage in later} - {ROOT}:
            stage_of(starts[frame]).arguments.append(frame)
        keys = {key for stage in later for key in stage.answers}
        for key in sorted(keys):
            if ended[key] <= ends[-1]:
                stage_of(ended[key]).outputs.append(key)

    def _learn(self, example: Any) -> None:
        """Find out which tensors have one row per sample, and which ones later stages use."""
        whole = _Stage(ROOT, (), None)
        whole.arguments = [name for stage in self.stages for name in stage.arguments]
        whole.outputs = [key for stage in self.stages for key in stage.outputs]
        seen = []
        for n in (2, 3):
            index = torch.arange(n, device=device_of(example)) % batch_size(example)
            inputs = _as_arguments(_rows_of_batch(example, index, batch_size(example)))
            run = _Run(self, whole)
            run.start(self.shadow, *inputs)
            seen.append(run.captured | {_arguments_of(ROOT): inputs})
        self.forms = {name: _Form.of(seen[0][name], seen[1][name]) for name in seen[0]}
        for key in self.cuts:
            if key not in self.forms:
                _refuse_other_calls(key)
            if not any(self.forms[key].by_sample):
                raise ValueError(
                    f"`at` must name modules whose output has one row per sample, but {key[1]!r}"
                    " returns none."
                )
        values = seen[1]
        used = [self._used(stage, values) for stage in self.stages[1:]]
        for number, tail in enumerate(self.tails):
            stand_in = dict.fromkeys(tail.skipped, values[self.cuts[number]])
            try:
                found = self._used(tail.stage, values | stand_in)
            except RuntimeError as error:
                raise ValueError(
                    "`heads` 'copy' needs a network whose last modules fit the output of every"
                    f" cut, but they fail after {self.cuts[number][1]!r} ({error}): use 'linear'."
                ) from None
            kept = {name: flags for name, flags in found.items() if name not in tail.skipped}
            used[number] = _either(used[number], kept)
        self.needed: list[dict[Key, list[bool]]] = []
        for number, key in enumerate(self.cuts):
            own = {key: [True] * len(self.forms[key].by_sample)}
            needed = reduce(_either, used[number:], own)
            known = {_arguments_of(ROOT)} | {
                name
                for stage in self.stages[: number + 1]
                for name in [*map(_arguments_of, stage.arguments), *stage.outputs]
            }
            self.needed.append({name: needed[name] for name in needed if name in known})

    def _used(self, stage: _Stage, values: dict[Key, Any]) -> dict[Key, list[bool]]:
        """Return which tensors of the saved values change what a stage returns or captures."""
        run = _Run(self, stage)
        flow = _DataFlow()
        trees = {}
        for name in stage.reads:
            leaves, spec = pytree.tree_flatten(values[name])
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    flow.add_source(leaf, (name, place))
            trees[name] = pytree.tree_unflatten(leaves, spec)
        args, kwargs = trees[_arguments_of(stage.frame)]
        run.answers = trees
        with flow:
            found = run.start(self.shadow, args, kwargs)
            found = self.result(found) if stage.stop is None else None
        sources = flow.sources_of((found, run.captured))
        return {
            name: [(name, place) in sources for place in range(len(pytree.tree_leaves(tree)))]
            for name, tree in trees.items()
        }


def _either(one: dict[Key, list[bool]], other: dict[Key, list[bool]]) -> dict[Key, list[bool]]:
    """Return the union of two sets of flags."""
    joined = dict(one)
    for name, flags in other.items():
        known = joined.get(name, [False] * len(flags))
        joined[name] = [a or b for a, b in zip(known, flags, strict=True)]
    return joined


def _arguments_of(name: str) -> Key:
    """Return the key under which the arguments of a module are saved."""
    return ("()", name, 0)


def _as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs as arguments: a dict by name, a tuple or list by place, anything else alone."""
    if isinstance(inputs, Mapping):
        return (), dict(without_labels(inputs))
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _rows_of_batch(batch: Any, index: Tensor, n: int) -> Any:
    """Return rows of the tensors of a batch that have one per sample."""
    return pytree.tree_map_only(
        Tensor,
        lambda leaf: rows_of(leaf, index) if leaf.ndim and len(leaf) == n else leaf,
        without_labels(batch),
    )


# ------------------------------------------------------------------------------------ saved values


class _Row(NamedTuple):
    """The place of a tensor in the state; a nested one, of several lengths, is kept padded."""

    place: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nested: bool = False

    def filled(self, rows: Sequence[Tensor]) -> Tensor:
        given = rows[self.place]
        if not self.nested:
            return given
        present = torch.arange(given.shape[1], device=given.device) < rows[self.place + 1][:, None]
        return torch._nested_tensor_from_mask(given, present)


class _Unused(NamedTuple):
    """A tensor whose values do not matter; its shape may."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def filled(self, n: int) -> Tensor:
        make = torch.empty if self.dtype.is_floating_point else torch.zeros
        return make((n, *self.shape), dtype=self.dtype, device=self.device)


class _Template(NamedTuple):
    """A nested structure without the tensors that have one row per sample."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    def filled(self, rows: Sequence[Tensor], n: int) -> Any:
        """Return the structure with its tensors."""
        leaves = [
            leaf.filled(rows)
            if isinstance(leaf, _Row)
            else leaf.filled(n)
            if isinstance(leaf, _Unused)
            else leaf
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.spec)

    def reduced(
        self, rows: Sequence[Tensor], needed: Sequence[bool]
    ) -> "tuple[tuple[Tensor, ...], _Template]":
        """Return what is still needed of the tensors, and the template for it."""
        if not rows or len(needed) != len(self.leaves):
            return tuple(rows), self
        kept: list[Tensor] = []
        leaves = []
        for leaf, wanted in zip(self.leaves, needed, strict=True):
            if not isinstance(leaf, _Row):
                leaves.append(leaf)
            elif wanted or leaf.nested:
                leaves.append(leaf._replace(place=len(kept)))
                kept += rows[leaf.place : leaf.place + 1 + leaf.nested]
            else:
                leaves.append(_Unused(*leaf[1:4]))
        return tuple(kept), _Template(tuple(leaves), self.spec)


class _Rest:
    """The part of a state that all its samples share; equal if such states can be joined."""

    def __init__(self, templates: dict[Key, _Template]) -> None:
        self.templates = templates

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Rest) or list(self.templates) != list(other.templates):
            return False
        pairs = zip(self.templates.values(), other.templates.values(), strict=True)
        return all(
            one.spec == two.spec and all(map(_same, one.leaves, two.leaves)) for one, two in pairs
        )

    __hash__ = None  # type: ignore[assignment]


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one is two or torch.equal(one, two)
    return type(one) is type(two) and bool(one == two)


@dataclass(frozen=True)
class _Form:
    """What the example showed of a value: its structure, and which tensors have a row per sample.

    None stands for a place without a tensor.
    """

    spec: pytree.TreeSpec
    by_sample: tuple[bool | None, ...]

    def __reduce__(self) -> Any:
        """Pickle an empty structure: a TreeSpec is not made for it."""
        empty = pytree.tree_unflatten([None] * len(self.by_sample), self.spec)
        return _form_like, (empty, self.by_sample)

    @classmethod
    def of(cls, two: Any, three: Any) -> "_Form":
        """Compare the values of batches of two and three samples."""
        leaves, spec = pytree.tree_flatten(three)
        others = pytree.tree_leaves(two)
        if len(others) != len(leaves):
            return cls(spec, (None,) * len(leaves))
        return cls(spec, tuple(map(_by_sample, others, leaves)))

    def packed(
        self, tree: Any, needed: Sequence[bool], n: int
    ) -> tuple[tuple[Tensor, ...], _Template]:
        """Return the tensors with one row per sample, and the template for the rest.

        A value of another structure than the example's is kept whole, and a tensor where the
        example had none has one row per sample if it has as many rows.
        """
        leaves, spec = pytree.tree_flatten(tree)
        known = spec == self.spec
        rows: list[Tensor] = []
        places: list[Any] = []
        for place, leaf in enumerate(leaves):
            by_sample = self.by_sample[place] if known else None
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                places.append(leaf)
            elif leaf.is_nested:
                places.append(_Row(len(rows), (), leaf.dtype, leaf.device, nested=True))
                rows += [
                    leaf.to_padded_tensor(0.0),
                    leaf._nested_tensor_size()[:, 0].to(leaf.device),
                ]
            elif by_sample is False or (by_sample is None and leaf.shape[0] != n):
                places.append(leaf)
            elif by_sample and not needed[place]:
                places.append(_Unused(tuple(leaf.shape[1:]), leaf.dtype, leaf.device))
            else:
                places.append(_Row(len(rows), tuple(leaf.shape[1:]), leaf.dtype, leaf.device))
                rows.append(leaf)
        return tuple(rows), _Template(tuple(places), spec)


def _form_like(empty: Any, by_sample: tuple[bool | None, ...]) -> _Form:
    return _Form(pytree.tree_structure(empty), by_sample)


def _by_sample(two: Any, three: Any) -> bool | None:
    if not isinstance(two, Tensor) or not isinstance(three, Tensor):
        return None
    return two.dim() > 0 and two.size(0) == 2 and three.size(0) == 3


class _DataFlow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows which tensors are computed from which sources, by the memory that they share."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._labels: dict[int, frozenset[Any]] = {}
        self._read: frozenset[Any] = frozenset()
        self._alive: list[Any] = []  # so that no memory is used twice

    def add_source(self, tensor: Tensor, label: Any) -> None:
        """Follow a tensor."""
        self._alive.append(tensor)
        self._labels[_memory(tensor)] = frozenset([label])

    def sources_of(self, tree: Any) -> frozenset[Any]:
        """Return the sources of some tensors, and of numbers that were read."""
        return self._read | self._union(pytree.tree_leaves(tree))

    def _union(self, leaves: Iterable[Any]) -> frozenset[Any]:
        found = (
            self._labels.get(_memory(leaf), frozenset())
            for leaf in leaves
            if isinstance(leaf, Tensor)
        )
        return reduce(frozenset.union, found, frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs))
        labels = self._union(given)
        if labels:
            made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            if not made:
                self._read |= labels
            if func._schema.is_mutable:
                made += [leaf for leaf in given if isinstance(leaf, Tensor)]
            for tensor in made:
                where = _memory(tensor)
                self._labels[where] = self._labels.get(where, frozenset()) | labels
        self._alive.append(result)
        return result


def _memory(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


# ------------------------------------------------------------------------------------ module calls


@dataclass(eq=False)
class _Call:
    """A call of a module while the example ran.

    Attributes
    ----------
    caller : str
        The module that called it.
    above : list of _Call
        The calls that it is part of, outermost first.
    """

    name: str
    key: Key
    above: "list[_Call]"
    start: int
    end: int = -1

    @property
    def caller(self) -> str | None:
        return self.above[-1].name if self.above else None

    def answers_at(self, cut: "_Call", frame: str) -> bool:
        """Return whether this call is done at a cut and would be made again by `frame`."""
        if self.end > cut.end or not self.above:
            return False
        names = [call.name for call in cut.above]
        return self.above[-1] in cut.above[names.index(frame) :]


def _record_calls(network: nn.Module, example: Any) -> list[_Call]:
    """Return all module calls on an example, in the order of their starts."""
    shadow = _Shadow(network)
    shadow.gate(set(shadow.modules))
    recorder = _Recorder()
    with _active(recorder):
        args, kwargs = _as_arguments(example)
        shadow.modules[ROOT](*args, **kwargs)
    return recorder.calls


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._stack: list[_Call] = []
        self._times: Counter[Any] = Counter()
        self._clock = 0

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        caller = self._stack[-1] if self._stack else None
        times = self._times[id(caller), name]
        self._times[id(caller), name] += 1
        key = ("" if caller is None else caller.name, name, times)
        self._clock += 1
        call = _Call(name, key, list(self._stack), self._clock)
        self.calls.append(call)
        self._stack.append(call)
        try:
            return forward(*args, **kwargs)
        finally:
            self._stack.pop()
            self._clock += 1
            call.end = self._clock


def _find_call(calls: list[_Call], network: nn.Module, name: str) -> _Call:
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


def suggestion(network: nn.Module, calls: list[_Call] | None = None) -> str:
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


def _check_order(cuts: list[_Call]) -> None:
    ends = [cut.end for cut in cuts]
    if ends != sorted(set(ends)):
        raise ValueError("`at` must name submodules in the order in which they run, each once.")
    if not cuts[-1].above:
        raise ValueError("`at` must name submodules, not the network itself.")


def _common_module(cut: _Call, following: _Call | None) -> str:
    """Return the innermost module whose call contains two cuts; the network after the last."""
    if following is None:
        return ROOT
    inside = {*following.above, following}
    return next(call.name for call in reversed(cut.above) if call in inside)


def _tail(calls: list[_Call], cut: _Call) -> _Tail:
    """Return how to go from a cut to the end of the network without the blocks in between."""
    container = cut.name.rpartition(".")[0]
    blocks = [
        call
        for call in calls
        if call.caller == cut.caller and call.name.rpartition(".")[0] == container
    ]
    last = max(blocks, key=lambda call: call.end)
    answers = tuple(call.key for call in calls if call.answers_at(last, ROOT))
    skipped = [call for call in calls if call.key in answers and call.end >= cut.end]
    after = [call for call in calls if call.start > last.end and call.above[-1] in last.above]
    return _Tail(
        _Stage(ROOT, answers, None),
        tuple(call.key for call in skipped),
        tuple(dict.fromkeys(call.name for call in after)),
    )


# ------------------------------------------------------------------------------------ running calls

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


class _Run:
    """One run of a stage: answers calls from memory, captures values and stops."""

    def __init__(self, replayer: Replayer, stage: _Stage) -> None:
        self.stage = stage
        self.answers: dict[Key, Any] = {}
        self.captured: dict[Key, Any] = {}
        self._path = replayer.path
        self._arguments = frozenset(stage.arguments)
        self._outputs = frozenset(stage.outputs)
        self._stack: list[str] = []
        self._times: Counter[tuple[str, str]] = Counter()

    def start(self, shadow: "_Shadow", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the stage's module and return its output, None if it was stopped."""
        frame = self.stage.frame
        self._stack = [frame]
        try:
            with _active(self):
                output = shadow.call(frame, args, kwargs)
        except _StopError:
            return None
        stop = self.stage.stop
        if stop is not None and stop[1] == frame:
            self.captured[stop] = output
        elif stop is not None:
            _refuse_other_calls(stop)
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
        if name in self._arguments:
            self.captured[_arguments_of(name)] = (args, kwargs)
        self._stack.append(name)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._stack.pop()
        if key in self._outputs or key == self.stage.stop:
            self.captured[key] = output
        if key == self.stage.stop:
            raise _StopError
        return output


def _refuse_other_calls(key: Key) -> NoReturn:
    raise ValueError(
        f"The network did not run {key[1]!r} for this batch, as it did for the example: it can only"
        " be cut where all batches run the same modules."
    )


class _Shadow:
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
        "training": property(lambda self: self.__dict__["_shadow_of"].training),
    }
    if gated:
        forward = kind.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            run = getattr(_RUNNING, "run", None)
            if run is None:
                return forward(self, *args, **kwargs)
            return run.call(self.__dict__["_shadow_name"], forward.__get__(self), args, kwargs)

        members["__call__"] = call
    return type(kind.__name__, (kind,), members)
