"""EarlyExit: runs a staged model under a policy, and really skips what is saved."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from swiftsure import checks
from swiftsure.policy import Policy
from swiftsure.torch.fingerprint import fingerprint
from swiftsure.torch.scoring import MODEL_SCORE, confidence
from swiftsure.torch.staged import Scored, StagedModel, device_of, rows_of
from swiftsure.torch.staged import batch_size as size_of

__all__ = ["EarlyExit", "ExitOutput", "Gathered", "plain_output", "refuse_nan"]


@dataclass(frozen=True)
class ExitOutput:
    """What a batch gave, in the order of the batch.

    Attributes
    ----------
    outputs
        Whatever the heads give, with the batch first; logits after temperature scaling. Reading
        them raises where a classifier's output is NaN, and says of which sample at which exit.
    exits : (n,)
        Exit of each sample, 0-based.
    confidences : (n, n_exits - 1)
        What decided; NaN where an exit was not reached or its head not needed. None from a stream.
    """

    raw: Any
    exits: Tensor
    confidences: Tensor | None

    @cached_property
    def outputs(self) -> Any:
        """Outputs of all samples, looked through for NaN when they are first read.

        Not before, on a GPU: looking means waiting, and the next batch can be on its way meanwhile.
        """
        refuse_nan(self.raw, self.exits)
        return self.raw

    @property
    def predictions(self) -> Tensor:
        """Most probable class of each sample, for classifiers."""
        if not isinstance(self.outputs, Tensor) or self.outputs.ndim < 2:
            raise ValueError("`predictions` needs outputs of shape (n, n_classes, ...).")
        return self.outputs.argmax(dim=1)


class EarlyExit(nn.Module):
    """A staged model under a policy.

    At each exit that may fire, the samples that are confident enough leave, the rest is compacted,
    and later stages run on what remains. Heads that no decision needs are not run.

    Parameters
    ----------
    model : StagedModel
        In evaluation mode.
    policy : Policy
        Made for this model; a policy that was made from arrays is bound to none, and is taken.
    score : str, optional
        If given, must be the policy's: a reminder in code of what was certified.
    dtype : str, optional
        Inference dtype ("bfloat16", "float16") to run under autocast; the policy's by default.
    compile : bool
        Compile each stage with torch.compile, for any batch size: a few graphs a stage.

    Raises
    ------
    ValueError
        If the policy was made for another score, number of exits, model, temperatures or dtype.

    Notes
    -----
    On a GPU one host-device synchronisation remains at each exit that may fire: the number of
    samples that go on decides the shapes of what follows.
    """

    def __init__(
        self,
        model: StagedModel,
        policy: Policy,
        *,
        score: str | None = None,
        dtype: str | None = None,
        compile: bool = False,  # noqa: A002 (what torch calls it)
    ) -> None:
        super().__init__()
        self.model = model
        self.policy = policy
        self.score = _accepted_score(policy, score)
        self.dtype = _accepted_dtype(policy, dtype)
        levels = policy.thresholds
        if levels is None or policy.n_exits != model.n_exits:
            raise ValueError(
                f"`policy` was made for {policy.n_exits or 'a system without'} exits, but the model"
                f" has {model.n_exits}."
            )
        expected = policy.certificate.model
        if expected is not None:
            if not isinstance(model, nn.Module):
                raise ValueError("`model` must be an nn.Module to be compared with the policy's.")
            found = fingerprint(model, temperatures=policy.temperatures, dtype=policy.dtype)
            if found != expected:
                raise ValueError(
                    "`policy` was made for another model (or other weights): its fingerprint is"
                    f" {expected[:19]}…, but this model's is {found[:19]}…. Calibrate anew."
                )
        self._levels: list[float] = levels.tolist()
        if isinstance(model, nn.Module) and model.training:
            raise ValueError("`model` must be in evaluation mode: call model.eval() first.")
        self._stages: list[Callable[[Any], Any]] = [
            partial(model.advance, k) for k in range(model.n_exits)
        ]
        if compile:
            self._stages = [torch.compile(stage, dynamic=True) for stage in self._stages]

    def forward(self, batch: Any) -> ExitOutput:
        """Run a batch; results come in its order."""
        if isinstance(self.model, nn.Module) and self.model.training:
            raise ValueError("`model` must be in evaluation mode: call model.eval() first.")
        with self.context(batch):
            return self._run(batch)

    def run(self, batches: Iterable[Any], batch_size: int | None = None) -> Iterator[ExitOutput]:
        """Run many batches and give their results in order, the faster way for the device.

        On a GPU late stages run full batches, gathered from several (see `Stream`). On a CPU, where
        small batches are nearly as efficient, each batch is compacted by itself.

        Parameters
        ----------
        batches : iterable
        batch_size : int, optional
            How many samples a stage gathers on a GPU; the first batch's by default.
        """
        from swiftsure.torch.stream import Stream

        waiting = iter(batches)
        for batch in waiting:
            if device_of(batch).type == "cpu":
                yield self(batch)
            else:
                gathered = Stream(self, batch_size or size_of(batch))
                yield from gathered.run(chain([batch], waiting), ordered=True)

    @contextmanager
    def context(self, batch: Any) -> Iterator[None]:
        """Run without gradients, in the dtype that the policy was made for."""
        kind = None if self.dtype is None else getattr(torch, self.dtype)
        device = device_of(batch).type
        with torch.inference_mode(), torch.autocast(device, dtype=kind, enabled=kind is not None):
            yield

    def stage(self, exit_index: int, state: Any) -> Any:
        """Advance to an exit, compiled if so wished."""
        return self._stages[exit_index](state)

    def may_fire(self, exit_index: int) -> bool:
        """Return whether some confidence can make a sample leave at this exit."""
        level = self._levels[exit_index]
        reachable = level < 1.0 if self.policy.strict else level <= 1.0
        return exit_index >= self.policy.min_exit and reachable

    def part(self, exit_index: int, output: Any) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return who stays, who leaves (None if nobody), and all confidences.

        This is the exit rule on tensors. A NaN counts as leaving: it must not run on unseen, and
        `refuse_nan` finds it among those who left.
        """
        scores = confidence(self.score, output)
        level = self._levels[exit_index]
        staying = scores <= level if self.policy.strict else scores < level
        # The one synchronisation of an exit: how many leave decides what shapes follow.
        n_stay = int(staying.sum())
        if n_stay == len(scores):
            return None, None, scores
        if self.score == MODEL_SCORE and scores.isnan().any():  # the output may look well
            row = int(scores.isnan().nonzero()[0, 0])
            raise ValueError(
                f"The confidence at exit {exit_index + 1} is NaN for row {row} of what reached it."
            )
        order = staying.logical_not().byte().argsort(stable=True)  # who stays first, in order
        return order[:n_stay], order[n_stay:], scores

    def scaled(self, exit_index: int, output: Any) -> Any:
        """Return an exit's output after the policy's temperature."""
        temperatures = self.policy.temperatures
        if temperatures is None or temperatures[exit_index] == 1.0:
            return output
        if isinstance(output, Scored):
            return Scored(output.output / temperatures[exit_index], output.confidence)
        return output / temperatures[exit_index]

    def _run(self, batch: Any) -> ExitOutput:
        model, n, device = self.model, size_of(batch), device_of(batch)
        last = model.n_exits - 1
        exits = torch.full((n,), last, dtype=torch.long, device=device)
        seen = torch.full((n, last), torch.nan, device=device)
        gathered = Gathered(n)
        here = torch.arange(n, device=device)
        state = model.begin(batch)
        for k in range(last):
            state = self.stage(k, state)
            if not self.may_fire(k):
                continue
            output = self.scaled(k, model.head(k, state))
            stay, gone, scores = self.part(k, output)
            if len(scores) == n:
                seen[:, k] = scores
            else:
                seen[here, k] = scores
            if gone is None or stay is None:
                continue
            exits[here[gone]] = k
            gathered.put(here[gone], rows_of(plain_output(output), gone))
            here = here[stay]
            if len(stay) == 0:
                break
            state = model.select(state, stay)
        if len(here) or n == 0:
            output = self.scaled(last, model.head(last, self.stage(last, state)))
            gathered.put(here, plain_output(output))
        found = ExitOutput(gathered.tree, exits, seen)
        if device.type == "cpu":
            refuse_nan(found.raw, exits)
        return found


class Gathered:
    """Outputs of samples that leave at different exits, put back into the order of their batch."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.tree: Any = None

    def put(self, where: Tensor, output: Any) -> None:
        """Put rows of output at the given places."""
        if self.tree is None:
            if len(where) == self.n:  # all at once, in order
                self.tree = output
                return
            self.tree = pytree.tree_map(lambda x: x.new_empty((self.n, *x.shape[1:])), output)
        kept, fresh = pytree.tree_leaves(self.tree), pytree.tree_leaves(output)
        if len(kept) != len(fresh):
            raise ValueError("Exits must give outputs of the same structure.")
        for target, leaf in zip(kept, fresh, strict=True):
            if target.shape[1:] != leaf.shape[1:]:
                raise ValueError(
                    f"Exits must give outputs of the same shape, but got {tuple(leaf.shape[1:])}"
                    f" after {tuple(target.shape[1:])}."
                )
            target[where] = leaf.to(target.dtype)


def refuse_nan(outputs: Any, exits: Tensor, samples: Tensor | None = None) -> None:
    """Raise where a classifier's output is NaN, and say of which sample at which exit."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or not outputs.is_floating_point():
        return
    bad = outputs.isnan().any(dim=1)
    if bad.any():
        row = int(bad.nonzero()[0, 0])
        sample = row if samples is None else int(samples[row])
        raise ValueError(f"The output of exit {int(exits[row]) + 1} is NaN for sample {sample}.")


def plain_output(output: Any) -> Any:
    """Return an output without the model's own confidence."""
    return output.output if isinstance(output, Scored) else output


def _accepted_score(policy: Policy, score: str | None) -> str:
    made_for = policy.score
    if made_for is None:
        raise ValueError("`policy` sets the threshold of a whole run, not of exits.")
    if score is not None and score != made_for:
        raise ValueError(f"`policy` was made for score {made_for!r}, but got {score!r}.")
    return made_for


def _accepted_dtype(policy: Policy, dtype: str | None) -> str | None:
    names = ["bfloat16", "float16", "float32"]
    if dtype is not None:
        checks.known("dtype", dtype, names)
        if policy.dtype is not None and policy.dtype != dtype:
            raise ValueError(f"`policy` was made for dtype {policy.dtype}, but got {dtype}.")
    chosen = dtype or policy.dtype
    return None if chosen == "float32" else chosen
