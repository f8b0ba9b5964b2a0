"""Results of a run on arrays: of whole batches, and of samples that exited together."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swiftsure.onnx.scoring import broken_rows
from swiftsure.run.results import ExitOutputBase, StreamResultBase, refuse_output

__all__ = ["ExitOutput", "StreamResult", "joined", "refuse_broken"]

Array = NDArray[Any]
Build = Callable[[list[Array]], Any]


@dataclass(frozen=True, repr=False)
class ExitOutput(ExitOutputBase):
    """Results of a batch, in the order of the batch, as arrays.

    Attributes are those of `swiftsure.run.results.ExitOutputBase`.
    """

    build: Build = field(kw_only=True)

    def _refuse_broken(self) -> None:
        refuse_broken(self.raw, self.exits, np.arange(len(self.exits)))

    def _built(self) -> Any:
        return self.build(self.raw)

    def _on_host(self) -> NDArray[np.int64]:
        exits: NDArray[np.int64] = self.exits
        return exits

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
class StreamResult(StreamResultBase):
    """Samples that exited together, as arrays.

    Attributes are those of `swiftsure.run.results.StreamResultBase`.
    """

    build: Build = field(kw_only=True)

    def _refuse_broken(self) -> None:
        refuse_broken(self.raw, np.full(len(self.ids), self.exit), self.ids)

    def _built(self) -> Any:
        return self.build(self.raw)


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
        build=found[0].build,
    )


def refuse_broken(
    arrays: list[Array], exits: NDArray[np.int64], samples: NDArray[np.int64]
) -> None:
    """Raise for the first sample whose output is not valid."""
    rows = np.flatnonzero(broken_rows(arrays))
    if len(rows):
        refuse_output(int(exits[rows[0]]), *samples[rows].tolist())
