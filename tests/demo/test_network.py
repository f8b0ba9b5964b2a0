"""The network that comes with the library, and its record."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from swiftsure import demo
from swiftsure.demo.network import prepared, trained_exits
from swiftsure.torch import collect, fingerprint


def test_its_record_is_what_it_does():
    model, sample = trained_exits(), demo.sample_images()
    record = demo.record()
    assert record.fingerprint == fingerprint(model)
    part = record.take(sample.ids[:60])
    batch = (prepared(sample.images[:60]), torch.from_numpy(sample.labels[:60]))
    found = collect(model, [batch], losses=["zero_one"])
    np.testing.assert_allclose(found.confidences["top1"], part.confidences["top1"], atol=1e-5)
    np.testing.assert_array_equal(found.losses["zero_one"], part.losses["zero_one"])
    np.testing.assert_array_equal(found.costs["flops"], demo.description()["flops"])
    accuracy = 1 - record.losses["zero_one"].mean(axis=0)
    np.testing.assert_allclose(accuracy, demo.description()["test_accuracy"], atol=1e-4)


def test_its_images_are_not_calibrated_on():
    assert not np.isin(demo.calibration_record().ids, demo.sample_images().ids).any()


def test_its_record_needs_no_torch():
    code = "import sys; from swiftsure import demo; demo.calibration_record(); demo.description()"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    "images", [np.zeros((2, 3, 32, 32)), np.zeros((2, 32, 32, 3), np.uint8), np.zeros(3, np.uint8)]
)
def test_images_that_are_none(images):
    with pytest.raises(ValueError, match="`images` must be uint8 of shape"):
        prepared(images)
