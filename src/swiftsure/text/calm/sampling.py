"""Sampling with random numbers tied to the sequence, so that batching does not change them.

Adding Gumbel noise to the log probabilities and taking the largest is a draw from them. The noise
depends only on seed, sequence and position. So a sequence is the same in any batch, and the full
model and its early exits, which share the noise, differ only where their distributions do.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from swiftsure._lib import checks
from swiftsure.text.generation import check_sequence_ids, token_random, warpers

__all__ = ["SequenceNoise", "sampling_processors"]

UNSUPPORTED = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""Options that shape `generate`'s distribution and would be silently ignored here."""


class SequenceNoise(LogitsProcessor):
    """Adds Gumbel noise for the next token to each sequence's scores.

    Parameters
    ----------
    seed : int
    sequence_ids : ints, optional
        One per sequence; positions in the batch by default.
    """

    def __init__(self, seed: int, sequence_ids: Sequence[int] | None = None) -> None:
        self.seed = checks.count("seed", seed, 0)
        self.ids = None if sequence_ids is None else [int(each) for each in sequence_ids]
        self.place = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Return the scores plus noise; the argmax is a random draw."""
        n, size = scores.shape
        ids = check_sequence_ids(self.ids, n)
        noise = np.stack([gumbel(self.seed, each, self.place, size) for each in ids])
        self.place += 1
        return scores + torch.from_numpy(noise).to(scores.device)


def gumbel(seed: int, sequence: int, place: int, size: int) -> NDArray[np.float32]:
    """Return the Gumbel noise for one token of one sequence."""
    uniform = token_random(seed, sequence, place).random(size, dtype=np.float32)
    tiny = np.finfo(np.float32).tiny
    noise: NDArray[np.float32] = -np.log(np.maximum(-np.log(np.maximum(uniform, tiny)), tiny))
    return noise


def sampling_processors(
    options: dict[str, Any], config: Any, seed: int, sequence_ids: Sequence[int] | None
) -> dict[str, Any]:
    """Pop the sampling options from `generate`'s options; return logits processors that apply them.

    As in `generate`, missing options come from the model's generation config, and `top_k` is 50 by
    default; 0 draws from all tokens.
    """
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ValueError(
                f"`{name}` is not supported here; pass it as a `logits_processor` instead."
            )

    def option(name: str, default: float) -> Any:
        value = options.pop(name, None)
        value = getattr(config, name, None) if value is None else value
        return default if value is None else value

    processors = LogitsProcessorList(options.pop("logits_processor", None) or [])
    processors += warpers(option("temperature", 1.0), option("top_k", 50), option("top_p", 1.0))
    processors.append(SequenceNoise(seed, sequence_ids))
    return {"logits_processor": processors}
