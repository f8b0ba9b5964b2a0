"""`Stream`: gathers samples that remain from several batches, so that late stages run full."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from swiftsure.run.streaming import StageStream, Step, StreamError
from swiftsure.torch.captured_stream import CapturedStream
from swiftsure.torch.results import ExitOutput, Gathered, StreamResult, owned
from swiftsure.torch.runtime import EarlyExit
from swiftsure.torch.staged import batch_size, device_of, plain_output, rows_of

__all__ = ["Stream", "StreamError"]


class Stream(StageStream[StreamResult]):
    """Runs late stages on full batches, for offline throughput and for serving.

    Samples that do not exit wait before the next stage until there are `batch_size` of them. At
    most `2 · batch_size` samples wait before any stage, so memory is bounded. No sample waits for
    more than `max_wait` further pushes, so waiting is bounded too.

    Parameters
    ----------
    fast : EarlyExit
    batch_size : int
        How many samples a stage runs at once.
    max_wait : int
        After how many further pushes a stage runs a batch that is not full.
    full : bool
        Run the full model as one captured graph, whatever the policy says; needs an `EarlyExit`
        with `capture`.

    Notes
    -----
    A stream is not thread-safe. Threads may share the `EarlyExit`, each with its own stream. If the
    `EarlyExit` captures, samples also wait before the first stage until there are `batch_size` of
    them, and results come a few stages later: the host learns who left while later stages run.

    Examples
    --------
    >>> stream = Stream(fast, batch_size=256)  # doctest: +SKIP
    >>> for output in stream.run(batches, ordered=True):
    ...     ...  # doctest: +SKIP
    """

    def __init__(
        self, fast: EarlyExit, batch_size: int, max_wait: int = 32, *, full: bool = False
    ) -> None:
        if not isinstance(fast, EarlyExit):
            raise TypeError(f"`fast` must be an EarlyExit, but got {type(fast).__name__}.")
        super().__init__(fast.model.n_exits, batch_size, max_wait)
        self.fast = fast
        self._captured: CapturedStream | None = None
        if fast.captures is not None:
            self._captured = CapturedStream(fast, fast.captures, batch_size, max_wait, full)
        elif full:
            raise ValueError("`full` needs EarlyExit(..., capture=True).")

    def push(self, batch: Any) -> list[StreamResult]:
        """Add a batch and return the samples that exited, from this batch or earlier ones.

        Raises
        ------
        StreamError
            If a stage fails. The samples that it ran are lost; the error names them. Those that
            exited are in the error's `results`. All others stay, and the stream can go on.
        """
        return self._marked(super().push if self._captured is None else self._captured.push, batch)

    def flush(self) -> list[StreamResult]:
        """Run all waiting samples and return their results; see `push` for errors."""
        return self._marked(super().flush if self._captured is None else self._captured.flush)

    def _marked(self, run: Callable[..., list[StreamResult]], *given: Any) -> list[StreamResult]:
        """Return the results of a call, which mark invalid samples if the `EarlyExit` does."""
        mark = self.fast.on_invalid
        try:
            found = [replace(each, on_invalid=mark) for each in run(*given)]
        except StreamError as error:
            error.results = [replace(each, on_invalid=mark) for each in error.results]
            raise
        for each in found[:1]:
            self.fast.look_at(each.raw)
        return found

    @property
    def pushed(self) -> int:
        """Number of samples that were ever added."""
        return super().pushed if self._captured is None else self._captured.pushed

    @property
    def in_flight(self) -> int:
        """Number of samples that have not exited yet."""
        return super().in_flight if self._captured is None else self._captured.in_flight

    def _run_ordered(self, batches: Iterable[Any]) -> Iterator[ExitOutput]:
        run = super()._run_ordered if self._captured is None else self._captured.run
        for out in run(batches):
            self.fast.look_at(out.raw)
            yield replace(out, on_invalid=self.fast.on_invalid)

    def _size(self, batch: Any) -> int:
        return batch_size(batch)

    def _begin(self, batch: Any, start: int, n: int) -> tuple[Tensor, Any]:
        state = self.fast.model.begin(batch)
        return torch.arange(start, start + n, device=device_of(batch)), state

    def _step(self, exit_index: int, ids: Tensor, state: Any) -> Step[StreamResult]:
        fast, last = self.fast, self.fast.model.n_exits - 1
        state = fast.stage(exit_index, state)
        if exit_index == last:
            output = fast.answer(exit_index, state, len(ids))
            return Step(StreamResult(ids, owned(plain_output(output)), exit_index), None)
        if not fast.may_fire(exit_index):
            return Step(None, lambda: (ids, state))
        output = fast.answer(exit_index, state, len(ids))
        left, stay, _ = fast.part(exit_index, output, ids)
        if left is None:
            return Step(None, lambda: (ids, state))
        if stay is None:
            return Step(left, None)
        return Step(left, lambda: (ids[stay], fast.model.select(state, stay)))

    def _assembly(self, batch: Any, start: int) -> Gathered:
        open_ = Gathered(batch_size(batch), device_of(batch), start)
        if open_.n == 0:  # run it anyway, for the shapes of its outputs
            out = self.fast(batch)
            open_.put(StreamResult(out.exits, out.raw, 0))
        return open_

    def _form(self, state: Any) -> Any:
        """Return the structure of a state, and the type and shape of a sample in each leaf."""
        leaves, structure = pytree.tree_flatten(state)
        forms = [
            (leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else None for leaf in leaves
        ]
        return structure, forms

    def _rows(self, state: Any, first: int, stop: int) -> Any:
        return rows_of(state, torch.arange(first, stop, device=device_of(state)))

    def _joined(self, states: list[Any]) -> Any:
        flat = [pytree.tree_flatten(state) for state in states]
        leaves = [
            torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
            for leaves in zip(*(leaves for leaves, _ in flat), strict=True)
        ]
        return pytree.tree_unflatten(leaves, flat[0][1])

    def _joined_ids(self, ids: list[Tensor]) -> Tensor:
        return torch.cat(ids)

    @staticmethod
    def _on_host(ids: Tensor) -> NDArray[np.int64]:
        return ids.cpu().numpy()

    def _context(self, state: Any) -> AbstractContextManager[None]:
        return self.fast.context(state)
