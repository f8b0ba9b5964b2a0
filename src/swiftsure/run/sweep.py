"""The sweep loop: runs a system on inputs and returns a record, with fewer runs than settings.

A run only compares values with its setting, so it gives the same answer at every other setting
for which those comparisons come out the same. Settings that an earlier run covers are not run. To
add a system, subclass `Sweep` and write three methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib.progress import Advance, no_bar, steps
from swiftsure.records import ThresholdRecord
from swiftsure.records.shards import Shards
from swiftsure.run.binding import SYSTEM
from swiftsure.run.options import RunOptions
from swiftsure.run.ray_pool import RayPool

__all__ = ["RunBatch", "Runs", "Sweep", "sweep_grid"]

Array = NDArray[Any]


class Runs(NamedTuple):
    """Results of running some inputs.

    Attributes
    ----------
    values : mapping of (m,)
        One value per input under each name: answers, losses, costs.
    same : (m, K)
        True for the settings of the grid at which the run would have had the same values, so that
        it need not be repeated there. False is always safe; the setting that ran counts as True.
    """

    values: Mapping[str, Array]
    same: NDArray[np.bool_]


RunBatch = Callable[[NDArray[np.int64], NDArray[np.int64]], Runs]
"""Maps input numbers, (m,), and the grid column to run each at, (m,), to their runs."""


@dataclass(kw_only=True)
class Sweep(ABC):
    """A sweep of one system over one grid of settings.

    Parameters
    ----------
    system : str
        Name of the system. The record and its policies store it, and other systems refuse them.
    grid : (K,)
        Settings, safest first; column 0 is the full model.
    dial : str
        Name of the setting in a policy.
    dials : mapping of (K,), optional
        For several dials: their values at each setting; `grid` then numbers the settings.
    fingerprint : str, optional
        Fingerprint of the model; the record's policies run with no other model.
    settings : mapping
        Everything else that the record's policies are bound to.
    batch_size : int
        How many inputs run at once. Column 0 runs before the others, never in a batch with them.
    chunk_size : int, optional
        How many inputs are prepared at once; all of a shard by default.
    """

    system: str
    grid: Array
    dial: str = "threshold"
    dials: Mapping[str, Sequence[Any]] | None = None
    fingerprint: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    batch_size: int = 1
    chunk_size: int | None = None

    shard_size: ClassVar[int] = 64
    """Inputs per shard, unless the run's options say otherwise."""

    @abstractmethod
    def prepare(self, inputs: slice) -> RunBatch:
        """Return the function that runs some of these inputs, numbered from 0."""

    @abstractmethod
    def columns(self, inputs: slice, tables: dict[str, Array]) -> dict[str, Any]:
        """Return the columns of these inputs' `ThresholdRecord`: losses, costs, ids and so on.

        `tables` holds the values of their runs, (m, K) each.
        """

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what else a resumed sweep must have in common: losses, a hash of the inputs."""

    @property
    def needs_gpu(self) -> bool:
        """Whether each Ray actor needs a GPU, since the model is on one."""
        return False

    def order(self, inputs: slice) -> NDArray[np.int64]:
        """Return the order in which inputs, numbered from 0, are batched."""
        return np.arange(inputs.stop - inputs.start)

    def run(self, n: int, options: RunOptions = RunOptions()) -> ThresholdRecord:
        """Return the record of n inputs; resumes from finished shards.

        Ray actors take one shard at a time.
        """
        size, n_settings = options.shard_size or self.shard_size, len(self.grid)
        settings = {SYSTEM: self.system, **self.settings}
        thresholds = [float(each) if np.isfinite(each) else None for each in self.grid]
        place: dict[str, Any] = {"thresholds": thresholds, "dial": self.dial}
        if self.dials is not None:
            place = {"dials": self.dials}
        own = {"model": self.fingerprint, "settings": settings, "thresholds": thresholds}
        identity = own | self.identity() | {"shard_size": size}
        with (
            Shards(options.shards, ThresholdRecord, identity, durable=options.durable) as kept,
            steps("sweeping", n * n_settings, options.progress) as advance,
        ):
            due = dict(enumerate(_slices(slice(0, n), size)))
            for number in kept.records:
                for _ in range(kept[number].n * n_settings):
                    advance()
                due.pop(number, None)
            if options.engine == "ray":
                found = self._on_ray(due, n, options.workers, advance)
            else:
                found = self._here(due, advance)
            with closing(found):
                for number, columns in found:
                    record = ThresholdRecord(
                        **place,
                        **columns,
                        fingerprint=self.fingerprint,
                        settings=settings,
                    )
                    kept.put(number, record)
        return ThresholdRecord.concatenate(kept.all)

    def _here(
        self, due: dict[int, slice], advance: Advance
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield the columns of each shard that is due."""
        for number, inputs in due.items():
            yield number, self._columns(inputs, advance)

    def _on_ray(
        self, due: dict[int, slice], n: int, workers: int | None, advance: Advance
    ) -> Generator[tuple[int, Any], None, None]:
        """Yield the columns of each shard that is due, as Ray actors finish them."""
        if not due:
            return
        numbers, total = list(due), n * len(self.grid)
        left = sum(inputs.stop - inputs.start for inputs in due.values()) * len(self.grid)
        make = partial(_shard_function, self)
        with RayPool(make, workers, name="sweeping", gpus=int(self.needs_gpu)) as pool:
            pool.report(total - left, total)
            for place, columns in pool.unordered((inputs,) for inputs in due.values()):
                yield numbers[place], columns  # written before it counts as done
                inputs = due[numbers[place]]
                steps_done = (inputs.stop - inputs.start) * len(self.grid)
                left -= steps_done
                advance(steps_done)
                pool.report(total - left, total)

    def _columns(self, inputs: slice, advance: Advance) -> dict[str, Any]:
        return self.columns(inputs, self._tables(inputs, advance))

    def _tables(self, inputs: slice, advance: Advance) -> dict[str, Array]:
        size = self.chunk_size or inputs.stop - inputs.start
        parts = [self._chunk(chunk, advance) for chunk in _slices(inputs, size)]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _chunk(self, inputs: slice, advance: Advance) -> dict[str, Array]:
        """Return the values of inputs at every setting; skips settings that a run covers."""
        run, order = self.prepare(inputs), self.order(inputs)
        due = np.ones((len(order), len(self.grid)), dtype=bool)
        tables: dict[str, Array] = {}
        while due.any():
            # Batched with other settings, the full model would compute unused confidences.
            waiting: Array = np.any(due[:, :1] if due[:, 0].any() else due, axis=1)
            rows = order[waiting[order]][: self.batch_size]
            columns = due[rows].argmax(axis=1)  # the safest setting still due
            values, same = run(rows, columns)
            covered = due[rows] & same
            covered[np.arange(len(rows)), columns] = True
            place, column = np.nonzero(covered)
            for name, each in values.items():
                table = tables.setdefault(name, np.empty(due.shape, each.dtype))
                table[rows[place], column] = each[place]
            due[rows[place], column] = False
            for _ in place:
                advance()
        return tables


def _shard_function(sweep: Sweep) -> Callable[[slice], dict[str, Any]]:
    """Return the function that a Ray actor runs."""
    return lambda inputs: sweep._columns(inputs, no_bar)


def _slices(inputs: slice, size: int) -> Iterator[slice]:
    for first in range(inputs.start, inputs.stop, size):
        yield slice(first, min(first + size, inputs.stop))


def sweep_grid(levels: Array, full: float) -> Array:
    """Return the settings of a sweep, with the full model's setting (`full`) first.

    Examples
    --------
    >>> sweep_grid(np.asarray([0.9, 0.5]), np.inf)
    array([inf, 0.9, 0.5])
    """
    if levels.ndim != 1 or len(levels) == 0:
        raise ValueError("`thresholds` must be a list of numbers, safest first.")
    if levels[0] != full:
        levels = np.concatenate([np.asarray([full], levels.dtype), levels])
    falls = np.isposinf(full)
    if ((levels[1:] >= levels[:-1]) if falls else (levels[1:] <= levels[:-1])).any():
        how = "fall" if falls else "rise"
        raise ValueError(f"`thresholds` must {how} from the safest to the fastest, each once.")
    return levels
