"""Sampling whose random numbers belong to the sequence, so that batches do not change them.

Noise from Gumbel's distribution is added to the log probabilities, and the largest is taken: a draw
from them. The noise is a function of seed, sequence and place alone. So a sequence comes out the
same in any batch, and the full model and its early exits, which share the noise, differ no more
than their distributions do.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swiftsure import checks

__all__ = ["SequenceNoise", "sampling_processors"]

UNKNOWN = ("min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h")
"""What else `generate` can do to a distribution, and would leave out without a word."""


class SequenceNoise(LogitsProcessor):
    """Adds to each sequence's scores the noise of its next token.

    Parameters
    ----------
    seed : int
    sequence_ids : ints, optional
        What tells sequences apart; their places in the batch by default.
    """

    def __init__(self, seed: int, sequence_ids: Sequence[int] | None = None) -> None:
        self.seed = checks.count("seed", seed, 0)
        self.ids = None if sequence_ids is None else [int(each) for each in sequence_ids]
        self.place = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        """Return scores whose largest is a draw."""
        n, size = scores.shape
        ids = range(n) if self.ids is None else self.ids
        if len(ids) != n:
            raise ValueError(f"`sequence_ids` must be one a sequence, {n}, but got {len(ids)}.")
        noise = np.stack([gumbel(self.seed, each, self.place, size) for each in ids])
        self.place += 1
        return scores + torch.from_numpy(noise).to(scores.device)


def gumbel(seed: int, sequence: int, place: int, size: int) -> NDArray[np.float32]:
    """Return the noise of one token of one sequence."""
    # Philox counts blocks in its first word; the place in its last never meets another's blocks.
    bits = np.random.Philox(key=[seed, sequence], counter=[0, 0, 0, place])
    uniform = np.random.Generator(bits).random(size, dtype=np.float32)
    tiny = np.finfo(np.float32).tiny
    noise: NDArray[np.float32] = -np.log(np.maximum(-np.log(np.maximum(uniform, tiny)), tiny))
    return noise


def sampling_processors(
    options: dict[str, Any], config: Any, seed: int, sequence_ids: Sequence[int] | None
) -> dict[str, Any]:
    """Take what shapes the distribution out of `generate`'s options, and return what does it.

    As in `generate`, the model's generation config says what the options do not, and only the 50
    most probable tokens are drawn from unless `top_k` is another number, or 0 for all.
    """
    for name in UNKNOWN:
        if options.get(name) is not None:
            raise ValueError(
                f"`{name}` is not known to sampling here; pass what does it as `logits_processor`."
            )

    def option(name: str, default: float) -> Any:
        value = options.pop(name, None)
        value = getattr(config, name, None) if value is None else value
        return default if value is None else value

    temperature, top_k, top_p = (
        option("temperature", 1.0),
        option("top_k", 50),
        option("top_p", 1.0),
    )
    processors = LogitsProcessorList(options.pop("logits_processor", None) or [])
    if temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        processors.append(TopKLogitsWarper(int(top_k)))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(float(top_p)))
    processors.append(SequenceNoise(seed, sequence_ids))
    return {"logits_processor": processors}
