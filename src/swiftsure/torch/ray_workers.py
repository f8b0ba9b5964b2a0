"""`RayReducer`: reduces batches in Ray actors, each with its own copy of the model.

The driver hashes the data, hands out batches, takes results in the order of the batches and writes
the shards. So the record and its shards are those of one process, whichever actor finishes first.
An actor that dies is started again and repeats what it had not returned.
"""

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftsure import checks
from swiftsure.torch.batches import Batch
from swiftsure.torch.reducing import Reducer, Rows
from swiftsure.torch.staged import StagedModel, batch_size

__all__ = ["RayReducer"]

AHEAD = 3
"""Batches that each actor has to do: one that runs, and others that wait for it."""


class RayReducer(Reducer):
    """Reduces batches to rows of a record in Ray actors; connects to a cluster, or starts one.

    Parameters
    ----------
    workers : int, optional
        Number of actors; the CPUs of the cluster by default.
    model, *settings
        As for `Reducer`.
    """

    def __init__(self, workers: int | None, model: StagedModel, *settings: Any) -> None:
        try:
            import ray
        except ImportError:
            raise ImportError(
                "engine='ray' needs Ray: pip install 'swiftsure[ray]'.", name="ray"
            ) from None

        super().__init__(model, *settings)
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        n = int(ray.cluster_resources().get("CPU", 1)) if workers is None else workers
        n = checks.count("workers", n)
        gpus = 1 if self.device.type == "cuda" else 0
        make = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=-1)(_Worker)
        # Copied to each node once, and kept: an actor that is started again reads it again.
        self._given = ray.put((model, *settings))
        self._ray = ray
        self._workers = [make.remote(self._given) for _ in range(n)]
        self._turns = cycle(self._workers)
        self.n_running = AHEAD * n

    def begin(self, batch: Batch, done: int) -> "_RemoteBatch":  # type: ignore[override]
        """Hand a batch to an actor."""
        n = batch_size(batch.inputs)
        if not self._measured:
            super().begin(batch.rows(slice(n)), done).rows()  # here, for the costs
        call = next(self._turns).reduce.remote(batch, done)
        return _RemoteBatch(self._ray, call, np.arange(done, done + n))

    def close(self) -> None:
        """Stop the actors, so that their CPUs are free."""
        for worker in self._workers:
            self._ray.kill(worker)


class _Worker:
    """One actor: a copy of the model, with one thread."""

    def __init__(self, given: tuple[Any, ...]) -> None:
        torch.set_num_threads(1)
        self.reducer = Reducer(*given)
        self.reducer.costs = {"flops": np.zeros(0), "seconds": np.zeros(0)}  # the driver has them

    def reduce(self, batch: Batch, done: int) -> Rows:
        """Return the rows of a batch."""
        return self.reducer.begin(batch, done).rows()


@dataclass(frozen=True)
class _RemoteBatch:
    """A batch that runs in an actor."""

    ray: Any
    call: Any
    ids: NDArray[np.int64]
    is_running: bool = True

    def rows(self) -> Rows:
        """Wait for the rows and return them; raises what the actor raised."""
        try:
            rows: Rows = self.ray.get(self.call)
        except self.ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
        return rows
