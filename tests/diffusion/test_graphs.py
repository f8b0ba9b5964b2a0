"""Steps that can be recorded: with masks in place of shapes, they find what `denoise` finds."""

import numpy as np
import pytest
import torch

from swiftsure.diffusion import DDIM, DeeDiff, DeeDiffRule, Guided, Schedule
from swiftsure.diffusion.graphs import RecordedSampler, RecordedSteps
from swiftsure.diffusion.steps import denoise
from tests.diffusion.builders import Sure, confidence_levels, network

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
@pytest.mark.parametrize("options", [{}, {"min_exit": 2}, {"look_at": [0, 3]}])
def test_masked_steps_find_what_shrinking_ones_find(make, strict, options):
    model = make()
    rule = DeeDiffRule(None, strict=strict, **options)
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
    assert taken <= {*rule.looks(model.n_exits), model.n_exits - 1}
    assert len(taken) == (3 if "look_at" in options else len(taken)) > 2


def test_a_confidence_at_its_threshold_exits_unless_the_rule_is_strict():
    model = Sure(0.5)
    with torch.inference_mode():
        for strict, expected in ((False, 0), (True, model.n_exits - 1)):
            step = RecordedSteps(
                model, batch_of(model, 0), DeeDiffRule(None, strict=strict), looks=True, dtype=None
            )
            found = step(batch_of(model, 1), torch.full((N,), 0.5))
            assert found.exits.tolist() == [expected] * N


def test_nan_never_exits():
    model = Sure(float("nan"))
    with torch.inference_mode():
        step = RecordedSteps(model, batch_of(model, 0), DeeDiffRule(None), looks=True, dtype=None)
        found = step(batch_of(model, 1), torch.full((N,), 0.5))
    assert found.exits.tolist() == [model.n_exits - 1] * N
    assert found.max_skipped.isneginf().all()


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


@pytest.mark.parametrize(
    ("threshold", "options"), [(None, {}), (2, {}), (3, {}), (3, {"look_steps": 4})]
)
def test_a_sampler_as_one_graph_makes_the_same_images(threshold, options):
    model, sampler = labelled(), DDIM(6, Schedule(40))
    numbers, labels = np.arange(N), np.arange(N) % 3
    level = None
    if threshold is not None:
        level = confidence_levels(DeeDiff(model, sampler=sampler), N, labels=labels)[threshold]
    fast = DeeDiff(model, DeeDiffRule(level, **options), sampler=sampler)
    with torch.inference_mode():
        images, classes = fast._noise(numbers, labels, 0)
        whole = RecordedSampler(
            sampler, model, (images, torch.zeros(N), *classes), fast.rule, level is not None, None
        )
        taken = set()
        for seed in (0, 5, 0):  # nothing may be left of the one before
            expected = fast.generate(N, labels=labels, seed=seed)
            images, classes = fast._noise(numbers, labels, seed)
            found = whole(images, classes, torch.full((N,), np.inf if level is None else level))
            torch.testing.assert_close(found.images.clamp(-1, 1), expected.images)
            assert np.array_equal(found.exits.numpy(), expected.exits)
            if level is not None:
                np.testing.assert_allclose(found.max_skipped, expected.max_skipped, atol=1e-6)
                np.testing.assert_allclose(found.min_taken, expected.min_taken, atol=1e-6)
            taken.update(expected.exits.ravel().tolist())
    assert (len(taken) > 1) == (level is not None)


def test_graphs_need_a_gpu():
    fast = DeeDiff(network(), 0.4, sampler=DDIM(3), graphs=True)
    with pytest.raises(ValueError, match="CUDA device, but it is on cpu"):
        fast.generate(2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("make", [labelled, guided])
@pytest.mark.parametrize("way", ["one graph", "fresh noise", "no conditional parts"])
def test_on_a_gpu_images_are_the_same(make, dtype, way, monkeypatch):
    model = make().cuda()
    sampler = DDIM(6, Schedule(40), eta=0.5 if way == "fresh noise" else 0.0)
    if way == "no conditional parts":
        monkeypatch.setattr("swiftsure.diffusion.graphs.can_branch", lambda: False)
    options = {"sampler": sampler, "dtype": dtype}
    labels = np.arange(8) % 3
    level = confidence_levels(DeeDiff(model, **options), labels=labels)[2]
    rules = [
        None,
        level,
        DeeDiffRule(level, look_at=[0, 2]),
        DeeDiffRule(level, look_steps=3),
    ]
    for rule in rules:
        plain = DeeDiff(model, rule, **options)
        recorded = DeeDiff(model, rule, **options, graphs=True)
        for size in (8, 3, 1):
            expected = plain.generate(8, labels=labels, batch_size=size)
            for _ in range(2):
                found = recorded.generate(8, labels=labels, batch_size=size)
                tolerance = {"atol": 2e-3 if dtype is None else 0.1, "rtol": 0}
                torch.testing.assert_close(found.images, expected.images, **tolerance)
                assert (found.exits == expected.exits).mean() > 0.9
        assert (len(np.unique(expected.exits)) > 1) == (rule is not None)
