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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure.torch.batches import without_labels
from swiftsure.torch.modes import evaluating
from swiftsure.torch.module_calls import (
    ROOT,
    Call,
    Key,
    Run,
    Shadow,
    Stage,
    arguments_of,
    as_arguments,
    check_order,
    common_module,
    find_call,
    record_calls,
    refuse_other_calls,
)
from swiftsure.torch.saved_values import SHARED, DataFlow, Form, Rest, Template, Unused
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

MASK = "mask"
OUTPUT = "output"
REST = "rest"
ATTENTION_MASK = "attention_mask"
FULL_MASK = "full_attention_mask"
"""Name of the attention mask of a batch in which nothing is padded, which heads alone get."""


# -------------------------------------------------------------------------------------- the model


class Features(NamedTuple):
    """What a head gets at a cut.

    Attributes
    ----------
    hidden : (n, ...)
        The first tensor of that, batch first.
    output
        What the module at the cut returned.
    mask : (n, tokens), optional
        The inputs' attention mask, if there is one.
    state : dict
        The whole state.
    """

    hidden: Tensor
    output: Any
    mask: Tensor | None
    state: dict[Any, Any]


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
        self.attached: dict[str, Any] = {}  # how `attach_heads` was called
        self.at = tuple(name for _, name, _ in replayer.cuts)  # part of the fingerprint
        self.n_exits = len(heads) + 1
        self.training = self.heads.training = self.network.training

    def begin(self, batch: Any) -> Any:
        """Return the network's inputs, without labels."""
        return without_labels(batch)

    def full_state(self, batch: Any) -> dict[str, Any]:
        """Return the state at the last exit, from one run of the network without a stop."""
        inputs, mask = without_labels(batch), _mask_of(batch)
        args, kwargs = as_arguments(inputs)
        found = self.replayer.result(self.network(*args, **kwargs))
        return {OUTPUT: found} if mask is None else {OUTPUT: found, MASK: mask}

    def settled(self, batch: Any) -> Any:
        """Return a batch whose form says whether anything is padded; reads the attention mask.

        Networks of transformers then attend without a mask where they need none. Heads get the
        mask in any case.
        """
        mask = _mask_of(batch)
        if mask is None or not hasattr(self.network, "config") or not bool(mask.all()):
            return batch
        rest = {name: value for name, value in batch.items() if name != ATTENTION_MASK}
        return rest | {FULL_MASK: mask}

    def advance(self, exit_index: int, state: Any) -> Any:
        """Run the network from one cut to the next."""
        return self.replayer.advance(exit_index, state)

    def seen(self, exit_index: int, state: Any) -> Features:
        """Return what the head of a cut sees."""
        return self.replayer.features(exit_index, state)

    def head(self, exit_index: int, state: Any) -> Any:
        """Run the head of a cut; the last exit is the network's own output."""
        if exit_index == self.n_exits - 1:
            return self._answer(state[OUTPUT], state.get(MASK))
        features = self.seen(exit_index, state)
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
        if self.task.learned:  # the last exit agrees with itself
            return Scored(output, output.new_ones(output.shape[0], dtype=torch.float32))
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
        self._shadow: Shadow | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is rebuilt."""
        return {**self.__dict__, "_shadow": None}

    def forward(self, features: Features) -> Any:
        """Return the network's output as if the remaining blocks did nothing."""
        if self._shadow is None:
            own = {name.replace("/", "."): part for name, part in self.parts.items()}
            self._shadow = Shadow(self.replayer.network, own)
            self._shadow.gate(self.replayer.gated)
        return self.replayer.tail(self.index, features, self._shadow)


# -------------------------------------------------------------------------------------- the engine


@dataclass
class _Tail:
    """How a `TailHead` runs: `skipped` calls of blocks answer with the cut's output."""

    stage: Stage
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
        self._shadow: Shadow | None = None
        with evaluating(network), torch.no_grad():
            calls = record_calls(network, example)
            cuts = [find_call(calls, network, name) for name in at]
            check_order(cuts)
            self.cuts = [cut.key for cut in cuts]
            above = [call for cut in cuts for call in cut.above]
            for call in above:
                find_call(calls, network, call.name)  # refuses those that run more than once
            self.path = {call.name for call in above}
            self.gated = {call.name for call in calls if call.caller in self.path}
            self.stages = [Stage(ROOT, (), cuts[0].key)]
            for cut, following in zip(cuts, [*cuts[1:], None], strict=True):
                frame = common_module(cut, following)
                answers = tuple(call.key for call in calls if call.answers_at(cut, frame))
                stop = None if following is None else following.key
                self.stages.append(Stage(frame, answers, stop))
            self.tails = [_tail(calls, cut) for cut in cuts] if tails else []
            self._place_captures(calls, cuts)
            self._learn(example)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is rebuilt."""
        return {**self.__dict__, "_shadow": None}

    @property
    def shadow(self) -> "Shadow":
        """The copied module tree that runs."""
        if self._shadow is None:
            made = Shadow(self.network)
            made.gate(self.gated)
            self._shadow = made
        return self._shadow

    def advance(self, number: int, state: Any) -> Any:
        """Return the state at cut `number`, from the one before; after the last, the result."""
        stage = self.stages[number]
        run = Run(self.path, stage)
        if number == 0:
            saved: dict[Any, Any] = {}
            rest: dict[Key, Template] = {}
            n, mask = batch_size(state), _mask_of(state)
            if isinstance(state, Mapping) and FULL_MASK in state:
                mask = state[FULL_MASK]
                state = {name: value for name, value in state.items() if name != FULL_MASK}
            inputs = as_arguments(state)
            found = run.start(self.shadow, *inputs)
            run.captured[arguments_of(ROOT)] = inputs
            if mask is not None and mask.shape[0] == n:
                saved[MASK] = mask
        else:
            saved, rest = dict(state), state[REST].templates
            n = saved[self.cuts[number - 1]][0].shape[0]
            blanks: dict[Unused, Tensor] = {}
            trees = {name: rest[name].filled(saved[name], n, blanks) for name in stage.reads}
            args, kwargs = trees.pop(arguments_of(stage.frame))
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
            rows[0],
            state[REST].templates[self.cuts[number]].filled(rows, rows[0].shape[0], {}),
            state.get(MASK),
            state,
        )

    def tail(self, number: int, features: Features, shadow: "Shadow") -> Any:
        """Return the result of the modules after the blocks, on the output of a cut."""
        tail = self.tails[number]
        templates = features.state[REST].templates
        blanks: dict[Unused, Tensor] = {}
        n = features.state[self.cuts[number]][0].shape[0]
        trees = {
            name: templates[name].filled(features.state[name], n, blanks)
            for name in tail.stage.reads
            if name not in tail.skipped
        }
        args, kwargs = trees.pop(arguments_of(ROOT))
        run = Run(self.path, tail.stage)
        run.answers = trees | dict.fromkeys(tail.skipped, features.output)
        return self.result(run.start(shadow, args, kwargs))

    def _state(
        self,
        number: int,
        run: "Run",
        saved: dict[Any, Any],
        rest: "dict[Key, Template]",
        n: int,
    ) -> dict[str, Any]:
        """Return the values that later stages and this cut's head use."""
        needed = self.needed[number]
        state: dict[Any, Any] = {MASK: saved[MASK]} if MASK in saved else {}
        templates: dict[Key, Template] = {}
        for name, flags in needed.items():
            if name in run.captured:
                form = self.forms[name]
                state[name], templates[name] = form.packed(run.captured[name], flags, n)
            elif name in rest and not saved[name]:
                state[name], templates[name] = (), rest[name]
            elif name in rest:
                state[name], templates[name] = rest[name].reduced(saved[name], flags)
            else:
                refuse_other_calls(name)
        state[REST] = Rest(templates)
        return state

    # ---------------------------------------------------------------------------------- planning

    def _place_captures(self, calls: "list[Call]", cuts: "list[Call]") -> None:
        """Decide in which stage each value that later stages read is captured."""
        ends = [cut.end for cut in cuts]
        starts = {call.name: call.start for call in calls}
        ended = {call.key: call.end for call in calls}

        def stage_of(moment: int) -> Stage:
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
        whole = Stage(ROOT, (), None)
        whole.arguments = [name for stage in self.stages for name in stage.arguments]
        whole.outputs = [key for stage in self.stages for key in stage.outputs]
        seen = []
        for n in (2, 3):
            index = torch.arange(n, device=device_of(example)) % batch_size(example)
            inputs = as_arguments(_rows_of_batch(example, index, batch_size(example)))
            run = Run(self.path, whole)
            run.start(self.shadow, *inputs)
            seen.append(run.captured | {arguments_of(ROOT): inputs})
        self.forms = {name: Form.of(seen[0][name], seen[1][name]) for name in seen[0]}
        for key in self.cuts:
            if key not in self.forms:
                refuse_other_calls(key)
            if not any(axis not in (None, SHARED) for axis in self.forms[key].axes):
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
            own = {key: [True] * len(self.forms[key].axes)}
            needed = reduce(_either, used[number:], own)
            for name, flags in needed.items():
                if any(a and b for a, b in zip(flags, self.forms[name].odd, strict=True)):
                    raise ValueError(
                        f"`at` must not name {key[1]!r}: the rest of the network uses a tensor of"
                        f" {name[1]!r} that mixes samples, so that samples cannot leave."
                    )
            known = {arguments_of(ROOT)} | {
                name
                for stage in self.stages[: number + 1]
                for name in [*map(arguments_of, stage.arguments), *stage.outputs]
            }
            self.needed.append({name: needed[name] for name in needed if name in known})

    def _used(self, stage: Stage, values: dict[Key, Any]) -> dict[Key, list[bool]]:
        """Return which tensors of the saved values change what a stage returns or captures."""
        run = Run(self.path, stage)
        flow = DataFlow()
        trees = {}
        for name in stage.reads:
            leaves, spec = pytree.tree_flatten(values[name])
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    flow.add_source(leaf, (name, place))
            trees[name] = pytree.tree_unflatten(leaves, spec)
        args, kwargs = trees[arguments_of(stage.frame)]
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


def _mask_of(batch: Any) -> Tensor | None:
    """Return the attention mask of a batch, (n, tokens); None without one."""
    mask = batch.get(ATTENTION_MASK) if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def _rows_of_batch(batch: Any, index: Tensor, n: int) -> Any:
    """Return rows of the tensors of a batch that have one per sample."""
    return pytree.tree_map_only(
        Tensor,
        lambda leaf: rows_of(leaf, index) if leaf.ndim and len(leaf) == n else leaf,
        without_labels(batch),
    )


def _tail(calls: list[Call], cut: Call) -> _Tail:
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
        Stage(ROOT, answers, None),
        tuple(call.key for call in skipped),
        tuple(dict.fromkeys(call.name for call in after)),
    )
