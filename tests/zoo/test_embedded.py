"""The MSDNet whose weights are in the zoo, and its record."""

import numpy as np
import pytest
import torch

import swiftsure as ss
from swiftsure import demo
from swiftsure.torch import EarlyExit, check, collect, exit_flops, fingerprint
from swiftsure.torch.costs import full_flops
from swiftsure_zoo import msdnet_fashion_mnist, prepared, records


@pytest.fixture(scope="module")
def model():
    return msdnet_fashion_mnist()


@pytest.fixture(scope="module")
def sample():
    return records.sample_images()


def test_it_is_a_sound_staged_model(model, sample):
    check(model, prepared(sample.images[:4]))


def test_its_record_is_what_it_does(model, sample):
    record = records.record().take(sample.ids[:150])
    x, y = prepared(sample.images[:150]), torch.from_numpy(sample.labels[:150])
    found = collect(model, [(x, y)], scores=["top1", "entropy"])
    for loss in ("zero_one", "brier"):
        np.testing.assert_allclose(found.losses[loss], record.losses[loss], atol=1e-5)
    for score in ("top1", "entropy"):
        np.testing.assert_allclose(found.confidences[score], record.confidences[score], atol=1e-5)
    np.testing.assert_array_equal(found.costs["flops"], record.costs["flops"])


def test_its_record_holds_confidences_as_the_runtime_rounds_them():
    for values in records.record().confidences.values():
        steps = values.astype(np.float64) * 2**24
        assert np.array_equal(steps, np.round(steps))


def test_its_record_is_bound_to_it(model):
    assert records.record().fingerprint == fingerprint(model)


def test_its_later_exits_are_better_than_its_first():
    """The fourth is 0.2 points above the last, which is within the noise of 10,000 images."""
    record = records.record()
    accuracy = 1 - record.losses["zero_one"].mean(axis=0)
    assert (np.diff(accuracy)[:3] > 0).all()
    assert (accuracy[1:] > accuracy[0] + 0.003).all()
    assert accuracy[-1] > 0.94
    np.testing.assert_allclose(accuracy, records.description()["test_accuracy"], atol=1e-4)


def test_images_and_labels_belong_together(sample):
    record = records.record().take(sample.ids)
    assert len(set(sample.ids.tolist())) == len(sample.labels) == 2000
    assert record.n == 2000
    assert np.bincount(sample.labels).min() > 150
    assert len(records.description()["classes"]) == 10


def test_flops_are_counted(model):
    image = torch.zeros(1, 3, 28, 28)
    np.testing.assert_allclose(exit_flops(model, image), records.description()["flops"])
    assert records.record().full_costs["flops"] == full_flops(model, image)


def test_savings_are_measured_against_the_network_without_early_heads():
    record = records.record()
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.5)  # all samples exit at the first
    saved = policy.evaluate(record).savings["flops"]
    assert saved == pytest.approx(1 - record.costs["flops"][0] / record.full_costs["flops"])


def test_a_policy_of_the_record_runs_the_network(model, sample):
    policy = ss.calibrate(records.record(), loss="brier", epsilon=0.02)
    out = EarlyExit(model, policy)(prepared(sample.images[:64]))
    expected = policy.exits(records.record().take(sample.ids[:64]).confidences["top1"])
    assert (out.exits.numpy() == expected).mean() > 0.95  # up to rounding near the threshold


def test_it_takes_the_same_input_as_the_small_network():
    small, large = demo.description(), records.description()
    assert all(small[key] == large[key] for key in ("mean", "std", "classes"))
