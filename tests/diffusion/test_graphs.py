"""Steps that can be recorded: with masks in place of shapes, they find what `denoise` finds."""

import numpy as np
import pytest
import torch

from diffusion.builders import Sure, confidence_levels, network
from swiftsure.diffusion import DDIM, DeeDiff, DeeDiffRule, Guided, Schedule
from swiftsure.diffusion.graphs import RecordedSampler, RecordedSteps
from swiftsure.diffusion.noise import sample_noise
from swiftsure.diffusion.steps import denoise

N = 7


def labelled():
    return network(n_classes=3)


def guided():
    return Guided(network(n_classes=4), 1.5)


def batch_of(model, seed, n=N):
    random = torch.Generator().manual_seed(seed)
    images = torch.randn(n, *model.image_shape, generator=random)
    batch = (images, torch.rand(n, generator=random))
    if getattr(model, "n_classes", None) is None:
        return batch
    return (*batch, torch.randint(model.n_classes, (n,), generator=random))


def levels_of(model):
    labels = None if model.n_classes is None else np.arange(N) % model.n_classes
    found = confidence_levels(DeeDiff(model, sampler=DDIM(4, Schedule(40))), N, labels=labels)
    return torch.tensor((found * N)[:N])


@pytest.mark.parametrize("make", [network, labelled, guided])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("min_exit", [0, 2])
def test_masked_steps_find_what_shrinking_ones_find(make, strict, min_exit):
    model = make()
    rule = DeeDiffRule(None, strict=strict, min_exit=min_exit)
    levels = levels_of(model)
    with torch.inference_mode():
        recorded = RecordedSteps(model, batch_of(model, 99), rule, looks=True, dtype=None)
        taken = set()
        for seed in range(12):  # one after the other: nothing may be left of the one before
            batch, order = batch_of(model, seed), torch.randperm(N)
            expected = denoise(model, batch, levels[order], rule, looks=True)
            found = recorded(batch, levels[order])
            assert torch.equal(found.exits, expected.exits)
            torch.testing.assert_close(found.noise, expected.noise)
            torch.testing.assert_close(found.max_skipped, expected.max_skipped)
            torch.testing.assert_close(found.min_taken, expected.min_taken)
            taken.update(found.exits.tolist())
    assert len(taken) > 2
    assert min(taken) >= min_exit


def test_a_confidence_at_its_threshold_exits_unless_the_rule_is_strict():
    model = Sure(0.5)
    with torch.inference_mode():
        for strict, expected in ((False, 0), (True, model.n_exits - 1)):
            step = RecordedSteps(
                model, batch_of(model, 0), DeeDiffRule(None, strict=strict), looks=True, dtype=None
            )
            found = step(batch_of(model, 1), torch.full((N,), 0.5))
            assert found.exits.tolist() == [expected] * N


def test_nan_exits_and_is_reported():
    model = Sure(float("nan"))
    with torch.inference_mode():
        step = RecordedSteps(model, batch_of(model, 0), DeeDiffRule(None), looks=True, dtype=None)
        found = step(batch_of(model, 1), torch.full((N,), 0.5))
    assert found.exits.tolist() == [0] * N
    assert found.min_taken.isnan().all()


def test_nothing_runs_after_all_have_left():
    model = Sure(0.9)
    with torch.inference_mode():
        step = RecordedSteps(model, batch_of(model, 0), DeeDiffRule(None), looks=True, dtype=None)
        model.advanced.clear()
        step(batch_of(model, 1), torch.full((N,), 0.5))
    assert model.advanced == [(0, N)]


def test_without_looks_no_early_head_runs():
    model = network()
    batch = batch_of(model, 0)
    with torch.inference_mode():
        step = RecordedSteps(model, batch, DeeDiffRule(None), looks=False, dtype=None)
        expected = denoise(model, batch, torch.ones(N), DeeDiffRule(None), looks=False)
        model.confidence_at = None  # any look would fail
        found = step(batch, torch.ones(N))
    assert torch.equal(found.noise, expected.noise)
    assert torch.equal(found.exits, expected.exits)
    assert (found.max_skipped == -torch.inf).all()


@pytest.mark.parametrize("sampler", [DDIM(4, Schedule(40)), DDIM(4, Schedule(40), eta=1.0)])
def test_a_recorded_sampler_makes_the_same_images(sampler):
    model = labelled()
    labels, levels = np.arange(N) % 3, levels_of(model)
    plain = DeeDiff(model, 0.5, sampler=sampler)
    expected = plain.generate(N, labels=labels, thresholds=levels.tolist())
    numbers = np.arange(N)
    with torch.inference_mode():
        steps = RecordedSteps(model, batch_of(model, 9), DeeDiffRule(None), looks=True, dtype=None)
        recorded = RecordedSampler(
            steps, sampler, sampler.schedule.times(torch.tensor(sampler.times))
        )
        samples, classes, images = plain._start(numbers, labels, 0)

        def fresh(k):
            return sample_noise(0, samples, sampler.times[k], model.image_shape)

        for _ in range(2):
            found = recorded(images, classes, levels, fresh, lambda: None)
            torch.testing.assert_close(found.images.clamp(-1, 1), expected.images)
            assert np.array_equal(found.exits.numpy(), expected.exits)
            np.testing.assert_allclose(found.max_skipped.numpy(), expected.max_skipped, rtol=1e-4)
            np.testing.assert_allclose(found.min_taken.numpy(), expected.min_taken, rtol=1e-4)


def test_graphs_need_a_gpu():
    fast = DeeDiff(network(), 0.4, sampler=DDIM(3), graphs=True)
    with pytest.raises(ValueError, match="CUDA device, but it is on cpu"):
        fast.generate(2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("make", [labelled, guided])
def test_on_a_gpu_images_are_the_same(make, dtype):
    model = make().cuda()
    sampler = DDIM(6, Schedule(40))
    options = {"sampler": sampler, "dtype": dtype}
    labels = np.arange(8) % 3
    level = confidence_levels(DeeDiff(model, **options), labels=labels)[1]
    for threshold in (None, level):
        plain = DeeDiff(model, threshold, **options)
        recorded = DeeDiff(model, threshold, **options, graphs=True)
        for size in (8, 3):
            expected = plain.generate(8, labels=labels, batch_size=size)
            found = recorded.generate(8, labels=labels, batch_size=size)
            tolerance = {"atol": 2e-3 if dtype is None else 0.1, "rtol": 0}
            torch.testing.assert_close(found.images, expected.images, **tolerance)
            assert (found.exits == expected.exits).mean() > 0.9
