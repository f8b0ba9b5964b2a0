"""Results of a run: `ExitOutputBase` holds those of a batch, `StreamResultBase` of a stream."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib.html import html_card
from swiftsure.run.auditing import AuditBase

__all__ = ["ExitOutputBase", "InvalidSampleError", "StreamResultBase", "refuse_output"]


class InvalidSampleError(ValueError):
    """Some samples have no valid answer: their output is NaN or infinite.

    Attributes
    ----------
    samples : (m,)
        Which ones: rows of the batch, or numbers of samples in a stream.
    """

    def __init__(self, message: str, samples: Sequence[int]) -> None:
        super().__init__(message)
        self.samples: NDArray[np.int64] = np.asarray(samples, np.int64)


@dataclass(frozen=True)
class ExitOutputBase(ABC):
    """Results of a batch, in the order of the batch.

    Attributes
    ----------
    outputs
        What the heads return, with the batch first. Logits are divided by the exit's temperature
        if it is not 1, in float32 or wider. Reading this raises `InvalidSampleError` if a sample's
        largest logit is not finite, unless invalid samples are marked.
    invalid : (n,)
        Whether each sample has no valid answer. If invalid samples are marked, their rows of
        `outputs` mean nothing, and those of all other samples are valid.
    failures : dict
        Why the model raised an error, by row; such samples are invalid and have exit -1.
    exits : (n,)
        Exit of each sample, 0-based.
    confidences : (n, n_exits - 1)
        Confidences that the decisions used; NaN if an exit was not reached or its head not needed.
        None from a stream.
    audit : Audit, optional
        The full model's answers to some of the samples, if the runtime audits.
    """

    raw: Any
    exits: Any
    confidences: Any
    decided: Any
    audit: AuditBase | None = None
    on_invalid: str = "raise"
    failures: Mapping[int, str] = field(default_factory=dict)

    @cached_property
    def outputs(self) -> Any:
        """Outputs of all samples, checked on first read.

        On a GPU the check waits for the device, so it is delayed to let the next batch start.
        """
        if self.on_invalid == "raise":
            self._refuse_broken()
        return self._built()

    @abstractmethod
    def _refuse_broken(self) -> None:
        """Raise if a sample has no valid answer."""

    @abstractmethod
    def _built(self) -> Any:
        """Return the outputs in the form of the model's."""

    @abstractmethod
    def _on_host(self) -> NDArray[np.int64]:
        """Return the exits as an array."""

    @property
    def _counts(self) -> list[int]:
        exits = self._on_host()
        counts: list[int] = np.bincount(exits[exits >= 0]).tolist()
        return counts

    def __repr__(self) -> str:
        return f"ExitOutput(n={len(self.exits)}, samples_per_exit={self._counts})"

    def _repr_html_(self) -> str:
        counts = self._counts
        facts = {f"exited at exit {k + 1}": f"{count:,}" for k, count in enumerate(counts)}
        return html_card("ExitOutput", {"samples": f"{len(self.exits):,}"} | facts)


@dataclass(frozen=True)
class StreamResultBase(ABC):
    """Samples that exited together.

    Attributes
    ----------
    ids : (m,)
        Numbers of the samples, ascending, counted from 0 in the order in which they were pushed.
    outputs
        What the exit's head returned, with the samples first; checked on first read.
    exit : int
        Their exit, 0-based.
    decided : (m,), optional
        The confidences at which they exited; None at the last exit.
    """

    ids: Any
    raw: Any
    exit: int
    decided: Any = None
    on_invalid: str = "raise"

    @cached_property
    def outputs(self) -> Any:
        """Outputs of these samples; raises if one is not valid, unless invalid ones are marked."""
        if self.on_invalid == "raise":
            self._refuse_broken()
        return self._built()

    @abstractmethod
    def _refuse_broken(self) -> None:
        """Raise if a sample has no valid answer."""

    @abstractmethod
    def _built(self) -> Any:
        """Return the outputs in the form of the model's."""


def refuse_output(exit_index: int, sample: int, *others: int) -> NoReturn:
    """Raise for samples whose answers are not valid; the first one's logits at an exit are not."""
    more = f" (and {len(others):,} more: see `samples`)" if others else ""
    raise InvalidSampleError(
        f"The output of exit {exit_index + 1} is NaN or infinite for sample"
        f" {sample}{more}. Logits must"
        " be finite; a classifier may mask some classes, but not all, with −inf. Look for NaN and"
        " very large numbers in the inputs, or run in a wider dtype.",
        [sample, *others],
    )
