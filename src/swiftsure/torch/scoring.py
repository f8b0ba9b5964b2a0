"""Confidence scores on tensors: `swiftsure.scores`, computed on the device of the outputs.

Classifiers, with outputs (n, n_classes), have "top1", "top_diff" and "entropy". Segmentation, with
logit maps (n, n_classes, height, width), has one of these aggregated over the pixels of an image:
"mean_top1", "quantile_entropy", "patch_top_diff", and so on.

A record must hold the confidences that the runtime will compute, so classifier scores have one
definition: temperature, softmax and score in float64, rounded to multiples of 2**-24, returned as
float32. `ExitRecord.from_logits`, `collect` and `EarlyExit` then agree to the last bit, whatever
the dtype of the logits. Scores of logit maps are computed in float32: their records only come from
`collect`, which calls these same functions, and float64 would take 2 to 4 times as long on a CPU.

Images are scored at the resolution of the heads' logits, often a quarter of the image's. Neither
the runtime nor `collect` enlarges logits for a decision. A patch of 50 pixels then spans 200 pixels
of the image, where the paper means 50. For another patch size, let the head return
`Scored(logits, patch(top1(logits), size))`, with these functions, and use the score "model".
"""

import math
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, special

from swiftsure._lib import checks
from swiftsure._lib.registry import Registry
from swiftsure.run.graphs.row_compaction import has_triton
from swiftsure.scores import SHIFT, STEPS, LearnedScore
from swiftsure.scores import warn_of_probabilities as warn_of_rows
from swiftsure.scores.features import DEFAULT_FEATURES, EDGE
from swiftsure.scores.kernels import (
    CLASS_SCORES,
    MOST_LOGITS,
    class_confidences,
    learned_confidences,
)
from swiftsure.torch.staged import Scored, Tempered, plain_output

__all__ = [
    "AGGREGATES",
    "IMAGE_SCORES",
    "MODEL_SCORE",
    "SCORES",
    "confidence",
    "entropy",
    "known_score",
    "mean",
    "patch",
    "quantile",
    "top1",
    "top_diff",
    "warn_of_probabilities",
]

MOST_CLASSES = 4096
"""Classes that one program of the kernel for learned scores holds."""

MODEL_SCORE = "model"
"""Name of the score for confidences that the model computes itself."""

MOST_LOOKED_AT = 64
"""Rows of a first batch that tell logits from probabilities."""

Score = Callable[[Tensor, float], Tensor]
"""Maps logits, (n, n_classes, ...), and a temperature to confidences."""

Aggregate = Callable[[Tensor], Tensor]
"""Maps scores of pixels, (n, height, width), to scores of images."""


def top1(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the largest class probability; classes on axis 1."""
    return _as_score(_probabilities(logits, temperature).amax(dim=1), logits)


def top_diff(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the difference between the two largest class probabilities."""
    p = _probabilities(logits, temperature)
    if logits.ndim == 2:
        two = p.topk(2, dim=1).values
        return _as_score(two[:, 0] - two[:, 1], logits)
    # topk is slow on any axis but the last: mask the maximum and take the maximum again.
    first = p.max(dim=1, keepdim=True)
    second = p.scatter_(1, first.indices, -1.0).amax(dim=1)
    return first.values[:, 0] - second


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return 1 minus the entropy divided by log(n_classes)."""
    p = _probabilities(logits, temperature)
    spread = special.entr(p).sum(dim=1)  # 0 log 0 = 0, and NaN stays NaN
    return _as_score((1.0 - spread / math.log(logits.shape[1])).clamp(0.0, 1.0), logits)


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return class probabilities, in float64 for classifiers and float32 for logit maps."""
    if logits.ndim == 2:
        # MPS has no float64.
        values = (logits.cpu() if logits.device.type == "mps" else logits).double()
    else:
        values = logits.float()
    return (values if temperature == 1.0 else values / temperature).softmax(dim=1)


def _as_score(values: Tensor, logits: Tensor) -> Tensor:
    """Return values as float32 on the logits' device, rounded by `STEPS` for classifiers."""
    if logits.ndim != 2:
        return values
    return ((values * STEPS + SHIFT).floor() / STEPS).float().to(logits.device)


def mean(pixels: Tensor) -> Tensor:
    """Return the mean of each image's pixels, (n, height, width)."""
    return pixels.mean(dim=(1, 2)).clamp(0.0, 1.0)


def quantile(pixels: Tensor, q: float = 0.25) -> Tensor:
    """Return the q-quantile of each image's pixels, interpolated as NumPy does."""
    flat = pixels.flatten(1)
    place = q * (flat.shape[1] - 1)
    below = math.floor(place)
    low, high = _order_statistics(flat, [below, math.ceil(place)])
    found = low + (place - below) * (high - low)
    # Sorting puts NaN last, where the quantile would miss it.
    return torch.where(flat.sum(dim=1).isnan(), torch.nan, found)


def _order_statistics(values: Tensor, places: list[int]) -> list[Tensor]:
    """Return the order statistics of each row at some 0-based ranks.

    Replaces `torch.quantile`, which refuses large images.
    """
    if values.device.type == "cpu":  # kthvalue is ten times as fast as sorting on a CPU
        return [values.kthvalue(place + 1, dim=1).values for place in places]
    ordered = values.sort(dim=1).values
    return [ordered[:, place] for place in places]


def patch(pixels: Tensor, size: int = 50) -> Tensor:
    """Return the smallest mean over all patches of an image; patches are at most its size."""
    checks.count("size", size)
    height, width = (min(size, side) for side in pixels.shape[1:])
    sums = _window_sums(_window_sums(pixels, height, 1), width, 2)
    return (sums.amin(dim=(1, 2)) / (height * width)).clamp(0.0, 1.0)


def _window_sums(values: Tensor, size: int, dim: int) -> Tensor:
    """Return the sums of all windows along an axis, built from windows of 1, 2, 4 and so on.

    Takes at most 2 log2(size) additions per place, which stay exact in float32. Differences of
    running sums would subtract large numbers from each other.
    """
    n_windows = values.shape[dim] - size + 1
    block, width, covered = values, 1, 0
    total: Tensor | None = None
    while True:
        if size & width:
            part = block.narrow(dim, covered, n_windows)
            total = part if total is None else total + part
            covered += width
        if total is not None and covered == size:
            return total
        n_blocks = block.shape[dim] - width
        block = block.narrow(dim, 0, n_blocks) + block.narrow(dim, width, n_blocks)
        width *= 2


def _image_score(aggregate: Aggregate, score: Score) -> Score:
    return lambda logits, temperature: aggregate(score(logits, temperature))


SCORES: Registry[Score] = Registry("score", top1, top_diff, entropy)
"""Classifier scores by name."""

AGGREGATES: Registry[Aggregate] = Registry("aggregate", mean, quantile, patch)
"""Aggregates of pixel scores by name."""

IMAGE_SCORES: Registry[Score] = Registry("score")
"""Scores of logit maps by name."""

for (_a, _over_pixels), (_s, _of_pixel) in product(AGGREGATES.items(), SCORES.items()):
    IMAGE_SCORES.register(_image_score(_over_pixels, _of_pixel), f"{_a}_{_s}")


def known_score(argument: str, score: str | LearnedScore | None) -> str | LearnedScore:
    """Return `score` if it is one of classifiers or images, or the model's own, or is learned."""
    if isinstance(score, LearnedScore):
        for name in score.inputs:
            known_score(argument, name)
        return score
    return checks.choice(argument, str(score), [*SCORES, *IMAGE_SCORES, MODEL_SCORE])


def confidence(name: str | LearnedScore, output: Any, exit_index: int = 0) -> Tensor:
    """Return the confidence of each sample, (n,) in float32, under a score.

    The temperature of a `Tempered` output is applied here, to the original logits: its divided
    logits are already rounded to their dtype. `exit_index` is only read by a learned score.
    """
    if isinstance(name, LearnedScore):
        return _learned(name, output, exit_index)
    temperature = 1.0
    if isinstance(output, Tempered):
        output, temperature = output.given, output.temperature
    if name == MODEL_SCORE:
        return _own_confidence(output)
    values = plain_output(output)
    if name in CLASS_SCORES and _on_host(values) and 0 < values.numel() <= MOST_LOGITS:
        found = class_confidences(_rows(values), temperature, CLASS_SCORES[name])
        return torch.from_numpy(found)
    measure = SCORES[name] if name in SCORES else IMAGE_SCORES[str(known_score("score", name))]
    form = "(n, n_classes, height, width)" if name in IMAGE_SCORES else "(n, n_classes)"
    ndim = 4 if name in IMAGE_SCORES else 2
    if not isinstance(values, Tensor) or values.ndim != ndim:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"`score` {name!r} needs outputs of shape {form}, but got {shape}: {_advice(values)}."
        )
    return measure(values, temperature)


def _learned(score: LearnedScore, output: Any, exit_index: int) -> Tensor:
    """Return the confidences of a learned score, from the rounded scores that a record holds.

    Those of classifiers are computed in one go: on a CPU each operation on a small tensor takes
    microseconds, and on a GPU each is a kernel.
    """
    given, temperature = output, 1.0
    if isinstance(output, Tempered):
        given, temperature = output.given, output.temperature
    logits = plain_output(given)
    of_classes = isinstance(logits, Tensor) and logits.ndim == 2 and logits.shape[1] > 1
    if of_classes and score.features == DEFAULT_FEATURES and not torch.compiler.is_compiling():
        weights = (*score.slopes(exit_index), temperature)
        if _on_host(logits):
            rows = _rows(logits)
            return torch.from_numpy(learned_confidences(rows, temperature, np.asarray(weights)))
        if has_triton(logits) and logits.shape[1] <= MOST_CLASSES:
            return _fused(logits, weights)
    parts = {name: confidence(name, output) for name in score.inputs}
    device = next(iter(parts.values())).device
    host = device.type == "mps"  # which has no float64
    doubles = {name: (each.cpu() if host else each).double() for name, each in parts.items()}
    found: Tensor = score.at(torch, exit_index, doubles)
    return found.float().to(device)


def _on_host(logits: Any) -> bool:
    """Return whether a loop on the host can score logits: nobody follows the operations."""
    return (
        type(logits) is Tensor
        and logits.ndim == 2
        and logits.shape[1] > 1
        and logits.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
    )


def _rows(logits: Tensor) -> NDArray[np.float64]:
    """Return logits on the CPU as an array."""
    values = logits.detach()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.double()
    return np.ascontiguousarray(values.numpy(), np.float64)


def _fused(logits: Tensor, weights: tuple[float, ...]) -> Tensor:
    """Return the confidences of a learned score by one kernel."""
    from swiftsure.torch._score_kernels import learned_kernel

    n, n_classes = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    constants = _constants(weights, logits.device)
    found = torch.empty(n, dtype=torch.float32, device=logits.device)
    if n:
        block = 1 << (n_classes - 1).bit_length()
        learned_kernel[(n,)](logits, found, constants, n_classes, logits.stride(0), BLOCK=block)
    return found


@cache  # for ever, since graphs that were captured read them
def _constants(weights: tuple[float, ...], device: torch.device) -> Tensor:
    values = [*weights, STEPS, SHIFT, EDGE]
    return torch.tensor(values, dtype=torch.float64, device=device)


def warn_of_probabilities(output: Any, stacklevel: int = 4) -> None:
    """Warn if a model's outputs, (n, n_classes, ...), are probabilities; waits for the device."""
    if isinstance(output, Tensor) and output.ndim in (2, 4) and output.is_floating_point():
        rows = output[:MOST_LOOKED_AT].detach().float().cpu().movedim(1, -1)
        if rows.numel():
            warn_of_rows(rows.numpy(), stacklevel, what="The model's outputs")


def _own_confidence(output: Any) -> Tensor:
    if not isinstance(output, Scored):
        raise ValueError(
            "`score` 'model' needs heads that return swiftsure.torch.Scored(output, confidence),"
            f" but got {type(output).__name__}."
        )
    if output.confidence.ndim != 1:
        raise ValueError(
            "`score` 'model' needs one confidence per sample, of shape (n,), but got shape"
            f" {tuple(output.confidence.shape)}."
        )
    return output.confidence.float()


def _advice(values: Any) -> str:
    """Return which scores suit outputs of this shape, for an error message."""
    ndim = values.ndim if isinstance(values, Tensor) else 0
    if ndim == 4:
        return f"logit maps have {', '.join(IMAGE_SCORES)}"
    if ndim == 2:
        return f"classifiers have {', '.join(SCORES)}"
    return "let the head return Scored(output, confidence) and use score 'model'"
