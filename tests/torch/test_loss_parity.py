"""Every loss that is computed on arrays and on tensors gives the same numbers on both.

The losses come from the registry, so a new one is tested once it is registered. Its inputs are
those of its family, the file of `swiftsure.losses` that it stands in.
"""

import numpy as np
import pytest
import torch

from swiftsure.losses import LOSSES, VOID
from swiftsure.scores import probabilities

N, N_EXITS, N_CLASSES, SIDE = 6, 4, 5, 13


def classifications(random):
    scale = [[3.0], [30.0], [1500.0]] * (N // 3)  # large logits underflow to equal probabilities
    logits = random.normal(size=(N, N_EXITS, N_CLASSES)) * np.asarray(scale)[..., None]
    return logits, probabilities(logits), random.integers(0, N_CLASSES, N)


def segmentations(random):
    logits = random.normal(size=(N, N_EXITS, N_CLASSES, SIDE, SIDE)) * 3
    labels = random.integers(0, N_CLASSES, (N, SIDE, SIDE))
    labels[random.random(labels.shape) < 0.2] = VOID
    return logits, softmax(np.moveaxis(logits, 2, -1)), labels


def images(random):
    pixels = random.random((N, N_EXITS, 3, SIDE, SIDE))
    return pixels, pixels, random.random((N, 3, SIDE, SIDE))


def softmax(logits):
    powers = np.exp(logits)
    return powers / powers.sum(axis=-1, keepdims=True)


INPUTS = {"classification": classifications, "segmentation": segmentations, "image": images}
"""What the exits of each family return, the same as its functions on arrays get it, and labels."""


def functions(loss):
    """Pairs of functions, on arrays and on tensors, by field."""
    on_tensors = loss.on_tensors()
    pairs = {
        field: (getattr(loss, field), getattr(on_tensors, field))
        for field in ("against_labels", "against_last")
    }
    return {field: pair for field, pair in pairs.items() if None not in pair}


BOTH = [(name, field) for name, loss in LOSSES.items() for field in functions(loss)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "field"), BOTH)
def test_arrays_and_tensors_have_the_same_loss(name, field, seed):
    on_arrays, on_tensors = functions(LOSSES[name])[field]
    family = on_arrays.__module__.rpartition(".")[2]
    outputs, answers, labels = INPUTS[family](np.random.default_rng(seed))
    given = [list(torch.from_numpy(outputs).unbind(1))]
    if field == "against_labels":
        expected = on_arrays(answers, labels)
        given.append(torch.from_numpy(labels))
    else:
        expected = on_arrays(answers)
        np.testing.assert_allclose(expected[:, -1], 0, atol=1e-12)
    assert expected.shape == (N, N_EXITS)
    assert expected.std() > 0
    np.testing.assert_allclose(on_tensors(*given).double(), expected, atol=1e-6)


def test_all_families_are_compared():
    names = {name for name, _ in BOTH}
    assert {"zero_one", "brier", "miou", "miscoverage", "pixel_brier", "mse", "ssim"} <= names
