"""Results of a run on arrays: samples that exited together, and whole batches."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib.html import html_card
from swiftsure.onnx.scoring import broken_rows

if TYPE_CHECKING:
    from swiftsure.onnx.audit import Audit

__all__ = ["ExitOutput", "Gathered", "StreamResult", "joined", "refuse_broken"]

Array = NDArray[Any]
Build = Callable[[list[Array]], Any]


@dataclass(frozen=True)
class ExitOutput:
    """Results of a batch, in the order of the batch.

    Attributes
    ----------
    outputs
        What the heads return, with the batch first. Logits are divided by the exit's temperature.
        Reading this raises if a sample's largest logit is not finite.
    exits : (n,)
        Exit of each sample, 0-based.
    confidences : (n, n_exits - 1)
        Confidences that the decisions used; NaN if an exit was not reached or its head not needed.
        None from a stream.
    audit : Audit, optional
        Both answers of the audited requests, if the runtime audits.
    """

    raw: list[Array]
    exits: NDArray[np.int64]
    confidences: NDArray[np.float32] | None
    decided: NDArray[np.float32]
    build: Build
    audit: "Audit | None" = None

    @cached_property
    def outputs(self) -> Any:
        """Outputs of all samples, checked on first read."""
        refuse_broken(self.raw, self.exits, np.arange(len(self.exits)))
        return self.build(self.raw)

    def __repr__(self) -> str:
        counts = np.bincount(self.exits).tolist()
        return f"ExitOutput(n={len(self.exits)}, samples_per_exit={counts})"

    def _repr_html_(self) -> str:
        counts = np.bincount(self.exits).tolist()
        facts = {f"exited at exit {k + 1}": f"{count:,}" for k, count in enumerate(counts)}
        return html_card("ExitOutput", {"samples": f"{len(self.exits):,}"} | facts)

    @property
    def predictions(self) -> NDArray[np.int64]:
        """Most probable class of each sample, for classifiers."""
        if not isinstance(self.outputs, np.ndarray) or self.outputs.ndim < 2:
            raise ValueError(
                "`predictions` needs outputs of shape (n, n_classes, ...): use `outputs`."
            )
        found: NDArray[np.int64] = self.outputs.argmax(axis=1)
        return found


@dataclass(frozen=True)
class StreamResult:
    """Samples that exited together.

    Attributes
    ----------
    ids : (m,)
        Numbers of the samples, ascending, counted from 0 in the order in which they were pushed.
    outputs
        What the exit's head returned, with the samples first; checked on first read.
    exit : int
        Their exit, 0-based.
    """

    ids: NDArray[np.int64]
    raw: list[Array]
    exit: int
    build: Build
    decided: NDArray[np.float32] | None = None
    """The confidences at which they exited; None at the last exit."""

    @cached_property
    def outputs(self) -> Any:
        """Outputs of these samples; raises if one is not valid."""
        refuse_broken(self.raw, np.full(len(self.ids), self.exit), self.ids)
        return self.build(self.raw)

    def rows(self, first: int, stop: int) -> "StreamResult":
        """Return the samples from `first` up to `stop`."""
        part = slice(first, stop)
        decided = None if self.decided is None else self.decided[part]
        raw = [array[part] for array in self.raw]
        return StreamResult(self.ids[part], raw, self.exit, self.build, decided)


class Gathered:
    """A batch of n samples, numbered from `start`, assembled as they exit."""

    def __init__(self, n: int, build: Build, start: int = 0) -> None:
        self.n, self.start, self.missing = n, start, n
        self.exits = np.zeros(n, np.int64)
        self.decided = np.zeros(n, np.float32)
        self.arrays: list[Array] = []
        self._build = build

    def put(self, left: StreamResult) -> None:
        """Store the outputs and exits of some samples of this batch."""
        where = left.ids - self.start
        self.exits[where] = left.exit
        if left.decided is not None:
            self.decided[where] = left.decided
        self.missing -= len(where)
        if not self.arrays:
            if len(where) == self.n:  # all at once, and in order
                self.arrays = left.raw
                return
            self.arrays = [np.empty((self.n, *array.shape[1:]), array.dtype) for array in left.raw]
        for target, array in zip(self.arrays, left.raw, strict=True):
            target[where] = array

    def whole(self, confidences: NDArray[np.float32] | None = None) -> ExitOutput:
        """Return the batch; call it once no sample is missing."""
        return ExitOutput(self.arrays, self.exits, confidences, self.decided, self._build)


def joined(parts: Sequence[tuple[NDArray[np.int64], ExitOutput]]) -> ExitOutput:
    """Return the results of a batch from those of its parts, each given with its rows."""
    back = np.argsort(np.concatenate([rows for rows, _ in parts]))
    found = [part for _, part in parts]

    def whole(arrays: Iterable[Array]) -> Array:
        return np.concatenate(list(arrays))[back]

    return ExitOutput(
        [whole(arrays) for arrays in zip(*(each.raw for each in found), strict=True)],
        whole(each.exits for each in found),
        whole(np.asarray(each.confidences) for each in found),
        whole(each.decided for each in found),
        found[0].build,
    )


def refuse_broken(
    arrays: list[Array], exits: NDArray[np.int64], samples: NDArray[np.int64]
) -> None:
    """Raise for the first sample whose output is not valid."""
    broken = np.flatnonzero(broken_rows(arrays))
    if len(broken):
        row = broken[0]
        raise ValueError(
            f"The output of exit {exits[row] + 1} is NaN or infinite for sample"
            f" {samples[row]}: look for NaN and very large numbers in its inputs."
        )
