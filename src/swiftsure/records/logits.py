"""From a classifier's logits to the confidences and losses of a record."""

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure import checks
from swiftsure.losses import LOSSES, Loss
from swiftsure.records import checks as record_checks
from swiftsure.scores import SCORES, probabilities

__all__ = ["reduced_logits"]

Array = NDArray[Any]

CHUNK = 4096
"""Samples whose probabilities are held in float64 at once."""


def reduced_logits(
    logits: ArrayLike,
    labels: ArrayLike | None,
    score: str | Iterable[str],
    losses: str | Iterable[str],
    label: str,
    temperatures: ArrayLike,
    seed: int,
) -> dict[str, Any]:
    """Return the fields of an `ExitRecord` that follow from logits; see its `from_logits`."""
    values = checks.numbers("logits", logits)
    checks.of_shape("logits", values, {"n": None, "n_exits": None, "n_classes": None})
    n, n_exits, n_classes = values.shape
    if n_exits < 2 or n_classes < 2:
        raise ValueError(
            "`logits` must have 2 exits and 2 classes or more, but got shape"
            f" {checks.shape_text(values.shape)}."
        )
    scale = record_checks.temperature_tuple(
        np.full(n_exits, temperatures) if np.ndim(temperatures) == 0 else temperatures, n_exits
    )
    columns = np.asarray(scale)[:, None]
    checks.known("label", label, ["expected", "sample", "argmax"])
    score_names = [score] if isinstance(score, str) else list(score)
    loss_names = [losses] if isinstance(losses, str) else list(losses)
    chosen = [LOSSES[checks.known("losses", name, LOSSES)] for name in loss_names]
    targets = None if labels is None else record_checks.label_array(labels, n, n_classes)
    rng = np.random.default_rng(seed)
    first = values[:CHUNK]
    if (first >= 0).all() and np.allclose(first.sum(axis=2, dtype=np.float64), 1, atol=1e-3):
        warnings.warn(
            "`logits` look like probabilities, of which another softmax makes too little"
            " confidence: pass their logarithms.",
            stacklevel=3,
        )

    parts: dict[str, list[Array]] = {}
    for start in range(0, n, CHUNK):
        p = probabilities(values[start : start + CHUNK], columns)
        for name in score_names:
            measure = SCORES[checks.known("score", name, SCORES)]
            parts.setdefault(f"score/{name}", []).append(measure(p[:, :-1]))
        for loss in chosen:
            parts.setdefault(f"soft/{loss.name}", []).append(_against_last(loss, p, label, rng))
            if targets is not None:
                part = targets[start : start + CHUNK]
                against = loss.against_labels(p, np.maximum(part, 0))
                against = np.where(part[:, None] < 0, np.nan, against)
                parts.setdefault(f"loss/{loss.name}", []).append(against)
    joined = {key: np.concatenate(blocks) for key, blocks in parts.items()}
    if targets is not None and (targets < 0).any():  # only these can do without some labels
        chosen_losses = [loss for loss in chosen if loss.of == "prediction"]
    else:
        chosen_losses = chosen if targets is not None else []
    drawn = label != "expected"
    return {
        "confidences": {name: joined[f"score/{name}"] for name in score_names},
        "losses": {loss.name: joined[f"loss/{loss.name}"] for loss in chosen_losses},
        "inconsistencies": {loss.name: joined[f"soft/{loss.name}"] for loss in chosen},
        "inconsistency_ranges": {
            loss.name: loss.range.gap() for loss in chosen if drawn and loss.of == "distribution"
        },
        "temperatures": None if set(scale or ()) == {1.0} else scale,
    }


def _against_last(loss: Loss, p: Array, label: str, rng: np.random.Generator) -> Array:
    """Return inconsistencies with the last exit, by the rule that `label` names."""
    if loss.of == "prediction" or label == "expected":
        return loss.against_last(p)
    last = p[:, -1]
    if label == "argmax":
        chosen = last.argmax(axis=-1)
    else:
        cumulative = last.cumsum(axis=-1)
        chosen = (rng.random((len(last), 1)) * cumulative[:, -1:] > cumulative).sum(axis=-1)
    losses = loss.against_labels(p, chosen)
    difference: Array = losses - losses[:, -1:]
    return difference
