"""A staged model under a policy, cut into segments: what runs between two decisions of the host.

An exit that cannot fire needs no decision, so its stage joins the next one. Of the state between
two segments, only the tensors that later segments read are kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from swiftsure.run.graphs.recorder import Recorder
from swiftsure.torch.attention import masks_by_form
from swiftsure.torch.replaying import ReplayedModel
from swiftsure.torch.scoring import confidence
from swiftsure.torch.staged import batch_size, exit_output, plain_output, shapes_of
from swiftsure.torch.traced import CompiledStep

if TYPE_CHECKING:
    from swiftsure.torch.runtime import EarlyExit

__all__ = ["SegmentPlan", "Signature", "Step", "segment_exits", "signature_of"]

Signature = tuple[Any, ...]
"""Everything about a batch that a captured function depends on, except its size."""


def signature_of(batch: Any) -> Signature:
    """Return the structure, shapes per sample, dtypes and devices of a batch."""
    if isinstance(batch, Tensor):
        return batch.shape[1:], batch.dtype, batch.device
    leaves, structure = pytree.tree_flatten(batch)
    found = [
        (leaf.shape[1:], leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
    return (str(structure), *map(str, found))


def segment_exits(fast: "EarlyExit", full: bool = False) -> list[int]:
    """Return the exits that end a segment: those that may fire, and the last one."""
    last = fast.model.n_exits - 1
    return [*(k for k in range(last) if not full and fast.loop.can_exit(k)), last]


class Step(NamedTuple):
    """Result of a segment."""

    state: list[Tensor]
    """Tensors that later segments read."""
    values: list[Any]
    """Leaves of the exit's output."""
    scores: Tensor | None
    """Confidences; None at the last exit."""


@dataclass(frozen=True)
class _Form:
    """How to rebuild a nested structure from the tensors that are kept of it."""

    structure: Any
    leaves: list[Any]  # for a tensor that is not kept, an example; else the constant
    kept: list[int]

    def build(self, tensors: Sequence[Tensor]) -> Any:
        n, filled = tensors[0].shape[0], list(self.leaves)
        for index, leaf in enumerate(filled):
            if isinstance(leaf, Tensor):  # nobody reads it, but it may be handed on
                filled[index] = leaf[:1].expand(n, *leaf.shape[1:])
        for index, tensor in zip(self.kept, tensors, strict=True):
            filled[index] = tensor
        return pytree.tree_unflatten(filled, self.structure)

    def take(self, tree: Any) -> list[Tensor]:
        leaves, structure = pytree.tree_flatten(tree)
        if structure != self.structure:
            raise ValueError(
                "`model` must give states of one structure to be captured or compiled, but the"
                " structure of this one is not that of the first batch: its values must not decide"
                " which tensors a state holds."
            )
        return [leaves[index] for index in self.kept]


class SegmentPlan:
    """The segments of a runtime for batches of one signature, found by running a few samples.

    Parameters
    ----------
    fast : EarlyExit
    batch
        An example with at least one sample; its first two rows are run.
    full : bool
        Run the full model as one segment, whatever the policy says.
    compiled : bool
        Compile each segment with its head and its score.
    dynamic : bool
        Compile for any batch size, instead of for each one.
    """

    def __init__(
        self,
        fast: "EarlyExit",
        batch: Any,
        *,
        full: bool = False,
        compiled: bool = False,
        dynamic: bool = True,
    ) -> None:
        self.fast, self.exits = fast, segment_exits(fast, full)
        self.last = len(self.exits) - 1
        self._dynamic = dynamic
        two = min(2, batch_size(batch))
        self.forms, outputs = self._trace(_first_rows(batch, two))
        self.output_structure = outputs[0][1]
        self.outputs = _common_outputs(outputs)
        self.compiled = compiled
        self.steps: list[Callable[[list[Tensor]], Step]] = [
            self._compile(k) if compiled else self._step(k) for k in range(len(self.exits))
        ]

    def batch_tensors(self, batch: Any) -> list[Tensor]:
        """Return the tensors of a batch that the model reads."""
        return self.forms[0].take(batch)

    def output(self, leaves: Sequence[Any]) -> Any:
        """Return an output from its leaves."""
        return pytree.tree_unflatten(list(leaves), self.output_structure)

    def fastest_step(
        self, segment: int, tensors: list[Tensor], recorder: Recorder
    ) -> Callable[[list[Tensor]], Step]:
        """Return a segment's function; of a compiled one and the plain one, the faster in a graph.

        Inductor's kernels can be slower, where libraries' kernels do most of the work.
        """
        compiled = self.steps[segment]
        if not (self.compiled and recorder.captures):
            return compiled
        inputs = [tensor.clone() for tensor in tensors]  # a stage may overwrite its input
        scratch = Recorder(recorder.device, recorder.dtype)

        def seconds(step: Callable[[list[Tensor]], Step]) -> float:
            return scratch.record(lambda: step(inputs)).seconds(recorder.device, repeats=10)

        with recorder.budget.timed():
            return min(compiled, self._step(segment), key=seconds)

    def threshold(self, segment: int) -> float:
        """Return the threshold of the exit that ends a segment; 0 for the last, which has none."""
        if segment == self.last:
            return 0.0
        return float(self.fast.loop.thresholds[self.exits[segment]])

    def stages_text(self, segment: int) -> str:
        """Return the stages of a segment in words, counted from 1."""
        stages = self._stages(segment)
        if len(stages) == 1:
            return f"Stage {stages[0] + 1}"
        return f"One of stages {stages[0] + 1} to {stages[-1] + 1}"

    def _stages(self, segment: int) -> range:
        first = 0 if segment == 0 else self.exits[segment - 1] + 1
        return range(first, self.exits[segment] + 1)

    def _advance(self, segment: int, state: Any) -> Any:
        model = self.fast.model
        if segment == 0:
            state = model.begin(state)
        for stage in self._stages(segment):
            state = model.advance(stage, state)
        return state

    def _answer(self, segment: int, state: Any, n: int) -> Any:
        temperatures, exit_index = self.fast.policy.temperatures, self.exits[segment]
        temperature = 1.0 if temperatures is None else temperatures[exit_index]
        return exit_output(self.fast.model, exit_index, state, n, temperature)

    def _step(self, segment: int) -> Callable[[list[Tensor]], Step]:
        form, is_last = self.forms[segment], segment == self.last
        after = None if is_last else self.forms[segment + 1]
        score, exit_index = self.fast.score, self.exits[segment]

        def step(tensors: list[Tensor]) -> Step:
            with masks_by_form():
                state = self._advance(segment, form.build(tensors))
                output = self._answer(segment, state, tensors[0].shape[0])
            values = pytree.tree_leaves(plain_output(output))
            if after is None:
                return Step([], values, None)
            return Step(after.take(state), values, confidence(score, output, exit_index))

        return step

    def _compile(self, segment: int) -> Callable[[list[Tensor]], Step]:
        plain = self._step(segment)
        if isinstance(self.fast.model, ReplayedModel):
            return CompiledStep(plain, f"segment_{segment + 1}", dynamic=self._dynamic)

        def step(tensors: list[Tensor]) -> Step:
            return plain(tensors)

        # PyTorch limits the number of graphs per code object, so each segment gets its own.
        step.__code__ = step.__code__.replace(co_name=f"segment_{segment + 1}")
        compiled = torch.compile(step, dynamic=False)
        if not self._dynamic:
            return compiled

        def run(tensors: list[Tensor]) -> Step:
            # Only the batch axis is dynamic: dynamic image sizes give slower kernels.
            for tensor in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return compiled(tensors)

        return run

    def _trace(self, batch: Any) -> tuple[list[_Form], list[tuple[list[Any], Any]]]:
        """Run a batch and return the form of each segment's input and the exits' outputs."""
        n, state = batch_size(batch), batch
        flat, reads, handed_on, outputs = [], [], [], []
        for segment in range(len(self.exits)):
            # Clones, so that a read can be told by the storage of the tensor.
            leaves, structure = pytree.tree_flatten(
                pytree.tree_map_only(Tensor, torch.clone, state)
            )
            flat.append((leaves, structure))
            state = pytree.tree_unflatten(leaves, structure)
            numbers = {
                _storage(leaf): index
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor)
            }
            with masks_by_form(), _Reads(numbers) as watch:
                state = self._advance(segment, state)
                output = self._answer(segment, state, n)
                if segment < self.last:
                    confidence(self.fast.score, output, self.exits[segment])
            reads.append(watch.read)
            outputs.append(pytree.tree_flatten(plain_output(output)))
            handed_on.append(
                [
                    numbers.get(_storage(leaf)) if isinstance(leaf, Tensor) else None
                    for leaf in pytree.tree_leaves(state)
                ]
            )
        needed = [reads[-1]]
        for read, given in zip(reversed(reads[:-1]), reversed(handed_on[:-1]), strict=True):
            passed = {given[index] for index in needed[0]} - {None}
            needed.insert(0, read | passed)
        for keep, (leaves, _) in zip(needed, flat, strict=True):
            if not keep:  # the number of samples must come from somewhere
                keep.add(next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)))
        return [
            _Form(
                structure,
                [
                    None
                    if index in keep
                    else leaf[:1].clone()
                    if isinstance(leaf, Tensor)
                    else leaf
                    for index, leaf in enumerate(leaves)
                ],
                sorted(keep),
            )
            for (leaves, structure), keep in zip(flat, needed, strict=True)
        ], outputs


class _Reads(TorchDispatchMode):
    """Notes which of some tensors are arguments of an operation, views included."""

    def __init__(self, numbers: dict[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = numbers
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and _storage(leaf) in self.numbers:
                self.read.add(self.numbers[_storage(leaf)])
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _first_rows(batch: Any, n: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[:n], batch)


def _common_outputs(outputs: Sequence[tuple[list[Any], Any]]) -> list[Any]:
    """Return leaves like those of all exits, in the widest dtype; raises if exits differ."""
    for (one, first), (two, second) in pairwise(outputs):
        alike = first == second and all(
            a.shape == b.shape if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b
            for a, b in zip(one, two, strict=True)
        )
        if not alike:
            what = "shape" if first == second else "structure"
            shapes = [shapes_of(pytree.tree_unflatten(*each)) for each in outputs]
            raise ValueError(
                f"Exits must give outputs of the same {what}, but they give {shapes};"
                " `swiftsure.torch.check` looks at all exits."
            )
    common = list(outputs[0][0])
    for leaves, _ in outputs[1:]:
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                dtype = torch.promote_types(common[index].dtype, leaf.dtype)
                common[index] = common[index].to(dtype)
    return common
