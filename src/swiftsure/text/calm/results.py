"""Results of early-exit generation: sequences, and the depth at which each token exited."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from swiftsure.text.calm.confidences import Confidence
from swiftsure.text.decoder import Decoder, attention_width

__all__ = ["CalmOutput", "Depths", "Trace"]


@dataclass(frozen=True)
class Depths:
    """Exit depth of each token of a batch.

    Attributes
    ----------
    exit_layers : (n, tokens)
        Decoder blocks that each token ran, from 1; 0 after a sequence's end.
    confidences : (n, tokens, n_exits - 1)
        As compared with the threshold; NaN where none was computed.
    flops : (n,)
        FLOPs of decoding each sequence: blocks, keys and values of skipped blocks, heads and
        confidences.
    """

    exit_layers: NDArray[np.int64]
    confidences: NDArray[np.float32]
    flops: NDArray[np.float64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of tokens in each sequence, including the end token."""
        lengths: NDArray[np.int64] = (self.exit_layers > 0).sum(axis=1)
        return lengths

    @property
    def mean_layers(self) -> NDArray[np.float64]:
        """Mean decoder blocks per token, for each sequence."""
        mean: NDArray[np.float64] = self.exit_layers.sum(axis=1) / np.maximum(self.lengths, 1)
        return mean


@dataclass(frozen=True)
class CalmOutput:
    """Generated sequences, and the exit depths of their tokens.

    Attributes
    ----------
    sequences : Tensor
        As `generate` returns them.
    depths : Depths
    """

    sequences: Tensor
    depths: Depths

    @property
    def exit_layers(self) -> NDArray[np.int64]:
        """Decoder blocks that each token ran, (n, tokens); 0 after a sequence's end."""
        return self.depths.exit_layers

    @property
    def mean_layers(self) -> NDArray[np.float64]:
        """Mean decoder blocks per token, for each sequence."""
        return self.depths.mean_layers

    @property
    def flops(self) -> NDArray[np.float64]:
        """FLOPs of decoding each sequence."""
        return self.depths.flops


@dataclass
class Trace:
    """Log of one generation, kept on the device until it is read."""

    n: int
    n_exits: int
    prompt: int
    """Number of positions before the first generated token."""
    attended: Tensor | int
    """Positions of prompt and source that the first token attends to: one number, or (n,)."""
    steps: list[tuple[Tensor | None, Tensor | None, Tensor | None]] = field(default_factory=list)
    """`Step.results` of each token: depths, confidences and heads."""
    log: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None = None
    """The same for all tokens at once, where it is known."""

    def summary(self, decoder: Decoder, confidence: Confidence) -> Depths:
        """Return the log as arrays."""
        depths, looks, heads = self.log if self.log is not None else self._stacked_steps()
        # Drop tokens past the end of the longest sequence: a device may run one step too many.
        tokens = max(1, int((depths > 0).any(axis=0).sum()))
        depths, looks, heads = depths[:, :tokens], looks[:, :tokens], heads[:, :tokens]
        flops = self._flops(decoder, confidence, depths, looks, heads)
        return Depths(depths, looks, flops)

    def _stacked_steps(self) -> Any:
        empty: tuple[NDArray[Any], ...] = (
            np.full(self.n, self.n_exits, np.int64),
            np.full((self.n, self.n_exits - 1), np.nan, np.float32),
            np.ones(self.n, np.int64),
        )
        return map(_stacked, zip(*self.steps, strict=True), empty)

    def _flops(
        self,
        decoder: Decoder,
        confidence: Confidence,
        depths: NDArray[Any],
        looks: NDArray[Any],
        heads: NDArray[Any],
    ) -> NDArray[np.float64]:
        run, kept = decoder.all_block_flops
        ran = np.concatenate([[0.0], np.cumsum(run)])[depths]
        owed = kept.sum() - np.concatenate([[0.0], np.cumsum(kept)])[depths]
        start = self.attended.cpu().numpy() if isinstance(self.attended, Tensor) else self.attended
        positions = np.reshape(start, (-1, 1)) + np.arange(depths.shape[1])
        attention = 4.0 * attention_width(decoder.config) * positions * depths
        head = 2.0 * decoder.head.weight.numel()
        n_looks = np.isfinite(looks).sum(axis=2)
        measured = confidence.flops() * n_looks
        if decoder.exit_heads is not None:
            exited_early = (depths > 0) & (depths < self.n_exits)
            mapped = n_looks if confidence.through_heads else exited_early
            measured = measured + decoder.exit_heads.flops * mapped
        total = ran + owed + attention + head * heads + measured
        found: NDArray[np.float64] = np.where(depths > 0, total, 0.0).sum(axis=1)
        return found


def _stacked(parts: tuple[Tensor | None, ...], empty: NDArray[Any]) -> NDArray[Any]:
    """Stack the entries of all tokens along axis 1, with `empty` where there are none."""
    return np.stack([empty if part is None else part.cpu().numpy() for part in parts], axis=1)
