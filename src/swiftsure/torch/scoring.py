"""Scores on tensors: the twins of `swiftsure.scores`, computed where the outputs are.

Classifiers, whose outputs are (n, n_classes), have "top1", "top_diff" and "entropy". Segmentation,
whose outputs are maps of logits, (n, n_classes, height, width), has an aggregate of one of them
over the pixels of an image: "mean_top1", "quantile_entropy", "patch_top_diff", and so on.

A record must hold the confidences that the runtime will compute, so the scores of classifiers have
one definition: temperature, softmax and score in float64, rounded to multiples of 2**-24, returned
as float32. `ExitRecord.from_logits`, `collect` and `EarlyExit` then agree to the last bit, whatever
the dtype of the logits. Scores of maps are computed in float32: records of maps come from `collect`
only, which calls these same functions, and float64 would take 2 to 4 times as long on a CPU.

Images are scored at the resolution of the logits that the heads give, which is often a quarter of
the image's: nothing is enlarged for a decision, here or in `collect`. A patch of 50 pixels is then
200 wide in the image, where the paper means 50. For patches of another size let the head give
`Scored(logits, patch(top1(logits), size))`, with these functions, and use the score "model".
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, special

from swiftsure import checks
from swiftsure.scores import SHIFT, STEPS
from swiftsure.torch.staged import Scored, Tempered, plain_output

__all__ = [
    "AGGREGATES",
    "CLASS_SCORES",
    "IMAGE_SCORES",
    "MODEL_SCORE",
    "SCORES",
    "confidence",
    "entropy",
    "mean",
    "patch",
    "quantile",
    "top1",
    "top_diff",
]

MODEL_SCORE = "model"
"""Name of the confidence that a model gives itself."""

Score = Callable[[Tensor, float], Tensor]
"""From logits, (n, n_classes, ...), and a temperature to confidences."""

Aggregate = Callable[[Tensor], Tensor]
"""From the scores of pixels, (n, height, width), to those of images."""


def top1(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the largest class probability; classes on axis 1."""
    return _as_score(_probabilities(logits, temperature).amax(dim=1), logits)


def top_diff(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the difference between the two largest class probabilities."""
    p = _probabilities(logits, temperature)
    if logits.ndim == 2:
        two = p.topk(2, dim=1).values
        return _as_score(two[:, 0] - two[:, 1], logits)
    # Selecting along any axis but the last is slow: rule out the first, and look once more.
    first = p.max(dim=1, keepdim=True)
    second = p.scatter_(1, first.indices, -1.0).amax(dim=1)
    return first.values[:, 0] - second


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return 1 minus the entropy over log(n_classes)."""
    p = _probabilities(logits, temperature)
    spread = special.entr(p).sum(dim=1)  # 0 log 0 = 0, and NaN stays NaN
    return _as_score((1.0 - spread / math.log(logits.shape[1])).clamp(0.0, 1.0), logits)


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return class probabilities: a classifier's in float64, those of maps in float32."""
    if logits.ndim == 2:
        # MPS has no float64.
        values = (logits.cpu() if logits.device.type == "mps" else logits).double()
    else:
        values = logits.float()
    return (values if temperature == 1.0 else values / temperature).softmax(dim=1)


def _as_score(values: Tensor, logits: Tensor) -> Tensor:
    """Return values as float32 where the logits are; a classifier's rounded as `STEPS` says."""
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
    low, high = _ordered(flat, [below, math.ceil(place)])
    found = low + (place - below) * (high - low)
    # In order NaN comes last, where no quantile would see it.
    return torch.where(flat.sum(dim=1).isnan(), torch.nan, found)


def _ordered(values: Tensor, places: list[int]) -> list[Tensor]:
    """Return what stands at some places of each row once it is in order.

    `torch.quantile` would do, but for large images, which it refuses.
    """
    if values.device.type == "cpu":  # where selecting is ten times as fast as sorting
        return [values.kthvalue(place + 1, dim=1).values for place in places]
    ordered = values.sort(dim=1).values
    return [ordered[:, place] for place in places]


def patch(pixels: Tensor, size: int = 50) -> Tensor:
    """Return the smallest mean over all patches of an image, which are cut to it if larger."""
    checks.count("size", size)
    height, width = (min(size, side) for side in pixels.shape[1:])
    sums = _window_sums(_window_sums(pixels, height, 1), width, 2)
    return (sums.amin(dim=(1, 2)) / (height * width)).clamp(0.0, 1.0)


def _window_sums(values: Tensor, size: int, dim: int) -> Tensor:
    """Return the sums of all windows along an axis, put together from windows of 1, 2, 4 and so on.

    At most 2 log2(size) additions a place, which stay exact in float32; a table of running sums
    would subtract large numbers from each other.
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


CLASS_SCORES: dict[str, Score] = {"top1": top1, "top_diff": top_diff, "entropy": entropy}
"""Scores of classifiers, by name."""

AGGREGATES: dict[str, Aggregate] = {"mean": mean, "quantile": quantile, "patch": patch}
"""From the pixels' scores to the image's, by name."""

IMAGE_SCORES: dict[str, Score] = {
    f"{aggregate}_{score}": _image_score(AGGREGATES[aggregate], CLASS_SCORES[score])
    for aggregate, score in product(AGGREGATES, CLASS_SCORES)
}
"""Scores of maps of logits, by name."""

SCORES: dict[str, Score] = {**CLASS_SCORES, **IMAGE_SCORES}
"""All scores that policies name, but for the model's own."""


def confidence(name: str, output: Any) -> Tensor:
    """Return the confidence of each sample, (n,) in float32, by the score's name.

    The temperature of a `Tempered` output is applied here, to the logits as the head gave them: the
    divided ones are rounded to their dtype.
    """
    temperature = 1.0
    if isinstance(output, Tempered):
        output, temperature = output.given, output.temperature
    if name == MODEL_SCORE:
        return _own_confidence(output)
    if name not in SCORES:
        checks.choice("score", name, [*SCORES, MODEL_SCORE])
    measure = SCORES[name]
    values = plain_output(output)
    form = "(n, n_classes, height, width)" if name in IMAGE_SCORES else "(n, n_classes)"
    ndim = 4 if name in IMAGE_SCORES else 2
    if not isinstance(values, Tensor) or values.ndim != ndim:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(
            f"`score` {name!r} needs outputs of shape {form}, but got {shape}; {_way_out(values)}."
        )
    return measure(values, temperature)


def _own_confidence(output: Any) -> Tensor:
    if not isinstance(output, Scored):
        raise ValueError(
            "`score` 'model' needs heads that give their own confidence"
            " (swiftsure.torch.Scored), and this model's do not."
        )
    if output.confidence.ndim != 1:
        raise ValueError(
            "`score` 'model' needs one confidence a sample, of shape (n,), but got shape"
            f" {tuple(output.confidence.shape)}."
        )
    return output.confidence.float()


def _way_out(values: Any) -> str:
    """Say which scores suit outputs of this form."""
    ndim = values.ndim if isinstance(values, Tensor) else 0
    if ndim == 4:
        return f"maps of logits have {', '.join(IMAGE_SCORES)}"
    if ndim == 2:
        return f"classifiers have {', '.join(CLASS_SCORES)}"
    return "let the head return Scored(output, confidence) and use score 'model'"
