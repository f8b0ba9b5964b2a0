"""`RayReducer`: reduces batches in Ray actors, each with its own copy of the model.

The driver hands out batches, takes results in the order of the batches and writes the shards. So
the record and its shards are those of one process, whichever actor finishes first.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from swiftsure.losses import PIXEL_LOSSES, Loss
from swiftsure.run.ray_pool import RayPool
from swiftsure.torch.modes import needs_gpu
from swiftsure.torch.reducing import PendingRows, Reducer, Rows, Source
from swiftsure.torch.staged import StagedModel

__all__ = ["RayReducer"]

AHEAD = 3
"""Batches that each actor has to do: one that runs, and others that wait for it."""

WINDOW = 32
"""Batches per actor whose rows may wait for an older batch, while its actor is started again."""


class RayReducer(Reducer):
    """Reduces batches to rows of a record in Ray actors.

    Parameters
    ----------
    workers : int, optional
        Number of actors, as for `RayPool`.
    spare : int
        CPUs that the default number of actors leaves for reading data.
    model, losses, *settings
        As for `Reducer`. With `device`, the actors move the model there.
    """

    def __init__(
        self,
        workers: int | None,
        spare: int,
        model: StagedModel,
        losses: Sequence[str | Loss],
        *settings: Any,
        device: str | torch.device | None,
    ) -> None:
        super().__init__(model, losses, *settings, device=None)
        # Losses that are registered here only must travel; these are recognised by identity.
        chosen = [loss.name if loss in PIXEL_LOSSES else loss for loss in self.losses]
        gpu = needs_gpu(self.device if device is None else torch.device(device))
        make = partial(_reduce_function, model, (chosen, *settings), device)
        self.pool = RayPool(
            make, workers, name="collecting", gpus=int(gpu), spare=spare, ahead=AHEAD
        )
        self.n_running = WINDOW * self.pool.n

    def begin(
        self, given: Source, done: int, *, hashed: bool, measured: bool = True
    ) -> PendingRows:
        """Hand a batch to an actor."""
        first = measured and not self.measured
        pending = self._pending(given, _Task(done, hashed, first))
        if first:
            costs = self.pool.result(pending.answer)[1]
            self.costs, self.full_costs = costs
        return pending

    def begin_hashing(self, given: Source) -> PendingRows:
        """Let an actor hash a batch."""
        return self._pending(given, None)

    def report(self, done: int) -> None:
        """Publish the number of samples as a Ray metric."""
        self.pool.report(done, None)

    def close(self) -> None:
        """Stop the actors, so that their CPUs are free."""
        self.pool.close()

    def _pending(self, given: Source, task: "_Task | None") -> "_RemoteRows":
        return _RemoteRows(self.pool, self.pool.call(given, task), given.size)


class _Task(NamedTuple):
    """How to reduce a batch; see `Reducer.begin`."""

    done: int
    hashed: bool
    measured: bool


@dataclass(frozen=True)
class _RemoteRows:
    """Rows that an actor computes."""

    pool: RayPool
    answer: Any
    size: int

    @property
    def is_running(self) -> bool:
        """Whether the actor has not answered yet."""
        return not self.pool.is_done(self.answer)

    def rows(self) -> Rows:
        """Wait for the rows and return them; raises what the actor raised."""
        rows: Rows = self.pool.result(self.answer)[0]
        return rows


def _reduce_function(
    model: StagedModel, settings: tuple[Any, ...], device: str | torch.device | None
) -> Callable[[Source, _Task | None], tuple[Rows, Any]]:
    """Return the function that an actor runs: the rows of a batch, and costs if they are new."""
    if device is not None and isinstance(model, nn.Module):
        model = model.to(device)
    reducer = Reducer(model, *settings, device=device)

    def reduce(given: Source, task: _Task | None) -> tuple[Rows, Any]:
        if task is None:
            return reducer.begin_hashing(given).rows(), None
        done, hashed, measured = task
        rows = reducer.begin(given, done, hashed=hashed, measured=measured).rows()
        return rows, (reducer.costs, reducer.full_costs) if measured else None

    return reduce
