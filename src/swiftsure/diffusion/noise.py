"""Per-sample noise: a function of seed, sample and step only, independent of the batch.

A sample gets the same noise at the start and at each step, at every threshold and in the full
model, so pairs differ only by early exits. The generator is counter-based (SplitMix64; Steele et
al., 2014), so any part can be computed on its own, on the device where it is needed.
"""

from collections.abc import Sequence
from math import pi, prod

import torch
from torch import Tensor

from swiftsure._lib import checks

__all__ = ["sample_noise"]


def _as_int64(word: int) -> int:
    """Return an unsigned 64-bit word as a signed one, since PyTorch's int64 is signed."""
    return word - (1 << 64) if word >> 63 else word


GOLDEN = _as_int64(0x9E3779B97F4A7C15)
MULTIPLIER_1 = _as_int64(0xBF58476D1CE4E5B9)
MULTIPLIER_2 = _as_int64(0x94D049BB133111EB)
HALF_WORD = 1 << 32


def sample_noise(seed: int, samples: Tensor, place: int, shape: Sequence[int]) -> Tensor:
    """Return standard normal noise, (n, *shape) in float32, on the device of `samples`.

    It is the same on every device, up to rounding.

    Parameters
    ----------
    seed : int
    samples : (n,)
        Sample numbers.
    place : int
        Distinguishes the noises of one sample: the time of a step.

    Examples
    --------
    >>> both = sample_noise(0, torch.tensor([7, 3]), 1, (2, 2))
    >>> bool((both[1:] == sample_noise(0, torch.tensor([3]), 1, (2, 2))).all())
    True
    """
    checks.count("seed", seed, 0)
    # MPS has no float64, so compute on the CPU: in float32 the noise would depend on the device.
    where = torch.device("cpu") if samples.device.type == "mps" else samples.device
    stream = _mix_bits(torch.full((1, 1), _as_int64(seed % (1 << 64)), device=where))
    for number in (samples.to(where).long()[:, None], torch.full((1, 1), place, device=where)):
        stream = _mix_bits(stream + (number + 1) * GOLDEN)
    size = prod(shape)
    pairs = torch.arange(1, (size + 1) // 2 + 1, device=where)
    words = _mix_bits(stream + pairs * GOLDEN)
    # Box-Muller: the halves of a word give a length and an angle, and these two normal numbers.
    length = (_uniform(_shift_right(words, 32)).log() * -2).sqrt()
    angle = _uniform(words & (HALF_WORD - 1)) * (2 * pi)
    normal = torch.cat([length * angle.cos(), length * angle.sin()], dim=1)[:, :size]
    return normal.float().view(-1, *shape).to(samples.device)


def _mix_bits(words: Tensor) -> Tensor:
    """Mix the bits of 64-bit words (the SplitMix64 finalizer)."""
    words = (words ^ _shift_right(words, 30)) * MULTIPLIER_1
    words = (words ^ _shift_right(words, 27)) * MULTIPLIER_2
    return words ^ _shift_right(words, 31)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Return a logical right shift, filled with zeros."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _uniform(half_words: Tensor) -> Tensor:
    """Return numbers in the open interval (0, 1)."""
    return (half_words.double() + 0.5) / HALF_WORD
