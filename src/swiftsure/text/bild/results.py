"""Results of big-little decoding: sequences, and each model's passes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.text.bild.decoding import Call

__all__ = ["BildOutput", "BildRun"]


@dataclass(frozen=True)
class BildRun:
    """How one sequence was generated.

    Attributes
    ----------
    tokens : tuple of int
        New tokens, including the end token.
    calls : tuple of Call
        All passes of both models, in order.
    same_from, same_below : float
        Every level in [same_from, same_below) leads to the same calls.
    flops : float
        Both models' FLOPs: source or prompt, drafts and verification.
    alone_flops : float
        FLOPs of the large model generating the same tokens alone.
    """

    tokens: tuple[int, ...]
    calls: tuple[Call, ...]
    same_from: float
    same_below: float
    flops: float
    alone_flops: float

    @property
    def large_passes(self) -> int:
        """Number of large-model passes."""
        return sum(call.model == "large" for call in self.calls)

    @property
    def small_passes(self) -> int:
        """Number of small-model passes."""
        return sum(call.model == "small" for call in self.calls)

    @property
    def drafted(self) -> int:
        """Number of tokens that the small model drafted."""
        return sum(call.model == "small" and call.event == "accept" for call in self.calls)

    @property
    def rollbacks(self) -> int:
        """Number of drafted tokens that the large model replaced."""
        return sum(call.event == "rollback" for call in self.calls)


@dataclass(frozen=True)
class BildOutput:
    """Generated sequences, and how they were generated.

    Attributes
    ----------
    sequences : Tensor
        As `generate` returns them: after the start token, or after the prompt.
    runs : tuple of BildRun
        One per sequence.
    """

    sequences: Tensor
    runs: tuple[BildRun, ...]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of new tokens in each sequence."""
        return np.asarray([len(run.tokens) for run in self.runs], np.int64)

    @property
    def large_passes(self) -> NDArray[np.float64]:
        """Large-model passes per token, for each sequence; 1 for the large model alone."""
        return np.asarray([run.large_passes for run in self.runs]) / self.lengths

    @property
    def small_passes(self) -> NDArray[np.float64]:
        """Small-model passes per token, for each sequence."""
        return np.asarray([run.small_passes for run in self.runs]) / self.lengths

    @property
    def flops(self) -> NDArray[np.float64]:
        """FLOPs of each sequence."""
        return np.asarray([run.flops for run in self.runs], np.float64)
