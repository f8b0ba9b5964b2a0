"""A threshold and the size of the image as two dials.

The MSDNet that comes with `swiftsure-zoo` classifies its 2,000 test images of Fashion-MNIST. An
image is first shown smaller, to all exits but the last; if none is sure, it is shown in full, with
the same threshold. Returns a record, which is small enough to be made again each time.
"""

import numpy as np
import torch
from torch.nn.functional import interpolate

from swiftsure import ThresholdRecord, dial_grid
from swiftsure.curves.paths import Path
from swiftsure.exits import exit_indices
from swiftsure.records import ExitRecord
from swiftsure.torch import collect
from swiftsure_zoo import msdnet_fashion_mnist, prepared, records

__all__ = ["resolutions"]

SIZES = (28, 24, 20)
"""Sides of the image that is shown first, in pixels; the full size first."""


def resolutions(n: int | None = None) -> ThresholdRecord:
    """Return the record of n images, all by default."""
    thresholds = [float(each) for each in Path.logit_grid(step=0.5, low=-1.0).thresholds[1:]]
    found = {size: collected(size, n) for size in SIZES}
    whole = found[SIZES[0]]
    dials = dial_grid(
        {"threshold": [None, *thresholds], "size": SIZES}, {"threshold": None, "size": SIZES[0]}
    )
    losses, costs = [], []
    for threshold, size in zip(*dials.values(), strict=True):
        level = np.inf if threshold is None else threshold
        loss, cost = taken(whole, level)
        if size != SIZES[0]:
            small = found[size]
            first = exit_indices(small.confidences["top1"], level)
            sure, last = first < small.n_exits - 1, small.n_exits - 2
            own_loss, own_cost = taken(small, level)
            loss = np.where(sure, own_loss, loss)
            cost = np.where(sure, own_cost, small.costs["flops"][last] + cost)
        losses.append(loss)
        costs.append(cost)
    return ThresholdRecord(
        dials=dials,
        losses={"zero_one": np.column_stack(losses)},
        costs={"flops": np.column_stack(costs)},
        ids=whole.ids,
    )


def collected(size: int, n: int | None) -> ExitRecord:
    """Return the exit record of the images at a size."""
    sample = records.sample_images()
    images = prepared(sample.images[:n])
    if size != SIZES[0]:
        images = interpolate(images, size=size, mode="bilinear", antialias=True)
    labels, ids = torch.from_numpy(sample.labels[:n]), sample.ids[:n].tolist()
    parts = [slice(k, k + 100) for k in range(0, len(images), 100)]
    batches = [(images[part], labels[part], ids[part]) for part in parts]
    return collect(msdnet_fashion_mnist(), batches, losses=["zero_one"])


def taken(record: ExitRecord, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss and the cost of each image at the exit that it takes."""
    exits = exit_indices(record.confidences["top1"], level)
    rows = np.arange(record.n)
    return record.losses["zero_one"][rows, exits], record.costs["flops"][exits]
