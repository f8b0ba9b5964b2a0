"""Confidences and losses of a record, computed from a classifier's logits or probabilities."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure.losses import LOSSES, Loss
from swiftsure.records import checks as record_checks
from swiftsure.scores import SCORES, LearnedScore, probabilities, warn_of_probabilities
from swiftsure.scores.features import DEFAULT_FEATURES, inputs_of

__all__ = ["reduced_logits", "reduced_probabilities"]

Array = NDArray[Any]

CHUNK = 4096
"""Samples whose float64 probabilities are in memory at once."""


def reduced_logits(
    logits: ArrayLike,
    labels: ArrayLike | None,
    score: str | LearnedScore | Iterable[str],
    losses: str | Loss | Iterable[str | Loss],
    label: str,
    temperatures: ArrayLike,
    seed: int,
) -> dict[str, Any]:
    """Return the fields of an `ExitRecord` computed from logits; see `ExitRecord.from_logits`."""
    values = checks.numbers("logits", logits)
    n, n_exits, n_classes = _three_axes("logits", values)
    scale = record_checks.temperature_tuple(
        np.full(n_exits, temperatures) if np.ndim(temperatures) == 0 else temperatures, n_exits
    )
    columns = np.asarray(scale)[:, None]
    checks.choice("label", label, ["expected", "sample", "argmax"])
    score_names, chosen = _score_names(score), _chosen_losses(losses)
    targets = None if labels is None else record_checks.label_array(labels, n, n_classes)
    warn_of_probabilities(values[:CHUNK], stacklevel=4, use="`ExitRecord.from_probabilities`, or ")
    return _reduced(
        lambda rows: probabilities(values[rows], columns),
        n,
        targets,
        score_names,
        chosen,
        label,
        np.random.default_rng(seed),
    ) | {"temperatures": None if set(scale or ()) == {1.0} else scale}


def reduced_probabilities(
    given: ArrayLike,
    labels: ArrayLike | None,
    score: str | LearnedScore | Iterable[str],
    losses: str | Loss | Iterable[str | Loss],
    classes: Sequence[Any] | None,
) -> dict[str, Any]:
    """Return the fields of an `ExitRecord` computed from probabilities."""
    values = checks.finite("probabilities", checks.numbers("probabilities", given))
    n, _, n_classes = _three_axes("probabilities", values)
    total = values.sum(axis=2, dtype=np.float64)
    if (values < 0).any() or not np.allclose(total, 1.0, atol=1e-3):
        raise ValueError(
            "`probabilities` must be at least 0 and sum to 1 over the classes, the last axis; for"
            " logits use `from_logits`."
        )
    if classes is not None and labels is not None:
        labels = _class_numbers(labels, classes, n_classes)
    elif labels is not None and np.asarray(labels).dtype.kind in "OUS":
        raise ValueError("`classes` must be given where `labels` are names.")
    targets = None if labels is None else record_checks.label_array(labels, n, n_classes)
    score_names, chosen = _score_names(score), _chosen_losses(losses)

    def normalised(rows: slice) -> Array:
        part = values[rows].astype(np.float64)
        scaled: Array = part / part.sum(axis=2, keepdims=True)
        return scaled

    rng = np.random.default_rng(0)
    return _reduced(normalised, n, targets, score_names, chosen, "expected", rng)


def _three_axes(name: str, values: Array) -> tuple[int, int, int]:
    """Return n, n_exits and n_classes; refuse fewer than 2 exits or classes."""
    checks.of_shape(name, values, {"n": None, "n_exits": None, "n_classes": None})
    n, n_exits, n_classes = values.shape
    if n_exits < 2 or n_classes < 2:
        raise ValueError(
            f"`{name}` must have 2 exits and 2 classes or more, but got shape"
            f" {checks.shape_text(values.shape)}."
        )
    return n, n_exits, n_classes


def _score_names(score: str | LearnedScore | Iterable[str]) -> list[str]:
    if isinstance(score, LearnedScore):
        return list(score.inputs)
    return [score] if isinstance(score, str) else list(score)


def _chosen_losses(losses: str | Loss | Iterable[str | Loss]) -> list[Loss]:
    given = [losses] if isinstance(losses, str | Loss) else list(losses)
    return [LOSSES.choose(loss, "losses") for loss in given]


def _class_numbers(labels: ArrayLike, classes: Sequence[Any], n_classes: int) -> Array:
    """Return the numbers of class names; missing labels are −1."""
    names = {name: number for number, name in enumerate(classes)}
    if len(names) != n_classes:
        raise ValueError(
            f"`classes` must be {n_classes} different names, one for each class, but got"
            f" {len(names)}."
        )
    listed = np.asarray(labels, dtype=object).ravel().tolist()
    unknown = [name for name in listed if name is not None and name not in names]
    if unknown:
        raise ValueError(f"`labels` must be among `classes`, but got {unknown[0]!r}.")
    return np.asarray([-1 if name is None else names[name] for name in listed])


def _reduced(
    probabilities_of: Callable[[slice], Array],
    n: int,
    targets: Array | None,
    score_names: list[str],
    chosen: list[Loss],
    label: str,
    rng: np.random.Generator,
) -> dict[str, Any]:
    """Return confidences and losses from the probabilities of all samples, in chunks."""
    parts: dict[str, list[Array]] = {}
    others = [name for name in inputs_of(DEFAULT_FEATURES) if name not in score_names]
    for start in range(0, n, CHUNK):
        p = probabilities_of(slice(start, start + CHUNK))
        parts.setdefault("predictions", []).append(p.argmax(axis=-1).astype(np.int32))
        for name in (*score_names, *others):
            parts.setdefault(f"score/{name}", []).append(SCORES.choose(name)(p[:, :-1]))
        for loss in chosen:
            parts.setdefault(f"soft/{loss.name}", []).append(_against_last(loss, p, label, rng))
            if targets is not None:
                part = targets[start : start + CHUNK]
                against = loss.function("against_labels")(p, np.maximum(part, 0))
                against = np.where(part[:, None] < 0, np.nan, against)
                parts.setdefault(f"loss/{loss.name}", []).append(against)
    joined = {key: np.concatenate(blocks) for key, blocks in parts.items()}
    if targets is not None and (targets < 0).any():  # only prediction losses allow missing labels
        chosen_losses = [loss for loss in chosen if loss.gap_needs_no_label()]
    else:
        chosen_losses = chosen if targets is not None else []
    drawn = label != "expected"
    return {
        "predictions": joined["predictions"],
        "confidences": {name: joined[f"score/{name}"] for name in score_names},
        "features": {name: joined[f"score/{name}"] for name in others},
        "losses": {loss.name: joined[f"loss/{loss.name}"] for loss in chosen_losses},
        "inconsistencies": {loss.name: joined[f"soft/{loss.name}"] for loss in chosen},
        "loss_ranges": {loss.name: loss.range for loss in chosen_losses},
        "inconsistency_ranges": {
            loss.name: loss.range.gap() if drawn and loss.of == "distribution" else loss.range
            for loss in chosen
        },
    }


def _against_last(loss: Loss, p: Array, label: str, rng: np.random.Generator) -> Array:
    """Return inconsistencies with the last exit; `label` is that of `ExitRecord.from_logits`."""
    if loss.of == "prediction" or label == "expected":
        soft: Array = loss.function("against_last")(p)
        return soft
    last = p[:, -1]
    if label == "argmax":
        chosen = last.argmax(axis=-1)
    else:
        cumulative = last.cumsum(axis=-1)
        chosen = (rng.random((len(last), 1)) * cumulative[:, -1:] > cumulative).sum(axis=-1)
    losses = loss.function("against_labels")(p, chosen)
    difference: Array = losses - losses[:, -1:]
    return difference
