"""Checks of sample numbers, samplers and labels."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.diffusion.schedules import DDIM, Sampler, sampler_from_settings
from swiftsure.run import check_same

__all__ = ["class_labels", "resolve_sampler", "sample_numbers"]


def sample_numbers(samples: ArrayLike) -> NDArray[np.int64]:
    """Return sample numbers: those given, or 0 to n - 1."""
    if isinstance(samples, int | np.integer) and not isinstance(samples, bool):
        return np.arange(checks.count("samples", int(samples)))
    numbers = checks.numbers("samples", samples)
    if numbers.ndim != 1 or numbers.size == 0 or numbers.dtype.kind not in "iu":
        raise ValueError(
            "`samples` must be a number of samples, or a list of sample numbers that is not empty."
        )
    if numbers.min() < 0:
        raise ValueError(f"`samples` must be at least 0, but got {numbers.min()}.")
    return numbers.astype(np.int64)


def resolve_sampler(settings: Mapping[str, Any], sampler: Sampler | None) -> Sampler:
    """Return the sampler of a policy's settings; raise if another one is given.

    A policy may have the number of steps as a dial, besides the sampler of the full model.
    """
    if not isinstance(sampler, Sampler | None):
        raise TypeError(f"`sampler` must be a Sampler, such as DDIM(50), but got {sampler!r}.")
    if "sampler" not in settings:
        return DDIM() if sampler is None else sampler
    own = dict(settings["sampler"])
    if "n_steps" in settings:
        own["n_steps"] = settings["n_steps"]
    if sampler is None:
        return sampler_from_settings(own)
    check_same(own, sampler.settings())
    return sampler


def class_labels(
    labels: ArrayLike | None, n: int, n_classes: int | None
) -> NDArray[np.int64] | None:
    """Return the class of each of n images; None for a network without classes."""
    if (labels is None) != (n_classes is None):
        has = "no classes" if n_classes is None else f"{n_classes} classes"
        asked = "leave them out" if n_classes is None else "give one per image"
        raise ValueError(f"`labels`: the model has {has}; {asked}.")
    if labels is None or n_classes is None:
        return None
    classes = checks.numbers("labels", labels)
    if classes.shape != (n,) or classes.dtype.kind not in "iu":
        raise ValueError(
            f"`labels` must be whole numbers of shape ({n},), one per image, but got"
            f" {classes.dtype} of shape {checks.shape_text(classes.shape)}."
        )
    if classes.min() < 0 or classes.max() >= n_classes:
        raise ValueError(
            f"`labels` must be in 0 to {n_classes - 1}, but got {classes.min()} to {classes.max()}."
        )
    return classes.astype(np.int64)
