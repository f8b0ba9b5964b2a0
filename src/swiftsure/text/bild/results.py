"""What big-little decoding gives: tokens, and what each model did for them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.text.bild.decoding import Call

__all__ = ["BildOutput", "BildRun"]


@dataclass(frozen=True)
class BildRun:
    """How one sequence was written.

    Attributes
    ----------
    tokens : tuple of int
        New tokens, the end token included.
    calls : tuple of Call
        All passes of both models, in order.
    same_from, same_below : float
        Every level of the dial from the one on, and below the other, leads to the same calls.
    flops : float
        Of both models: source or prompt, drafts and verifications.
    alone_flops : float
        Of the large model, had it written the same tokens by itself.
    """

    tokens: tuple[int, ...]
    calls: tuple[Call, ...]
    same_from: float
    same_below: float
    flops: float
    alone_flops: float

    @property
    def large_passes(self) -> int:
        """How often the large model ran."""
        return sum(call.model == "large" for call in self.calls)

    @property
    def small_passes(self) -> int:
        """How often the small model ran."""
        return sum(call.model == "small" for call in self.calls)

    @property
    def drafted(self) -> int:
        """Tokens that the small model wrote."""
        return sum(call.model == "small" and call.event == "accept" for call in self.calls)

    @property
    def rollbacks(self) -> int:
        """How often the large model replaced a drafted token."""
        return sum(call.event == "rollback" for call in self.calls)


@dataclass(frozen=True)
class BildOutput:
    """Sequences, and how they were written.

    Attributes
    ----------
    sequences : Tensor
        As `generate` returns them: after the start token, or after the prompt.
    runs : tuple of BildRun
        One a sequence.
    """

    sequences: Tensor
    runs: tuple[BildRun, ...]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """New tokens of each sequence."""
        return np.asarray([len(run.tokens) for run in self.runs], np.int64)

    @property
    def large_passes(self) -> NDArray[np.float64]:
        """Passes of the large model per token, of each sequence; 1 for the large model alone."""
        return np.asarray([run.large_passes for run in self.runs]) / self.lengths

    @property
    def small_passes(self) -> NDArray[np.float64]:
        """Passes of the small model per token, of each sequence."""
        return np.asarray([run.small_passes for run in self.runs]) / self.lengths

    @property
    def flops(self) -> NDArray[np.float64]:
        """FLOPs of each sequence."""
        return np.asarray([run.flops for run in self.runs], np.float64)
