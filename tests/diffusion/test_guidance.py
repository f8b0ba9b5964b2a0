"""Guidance: two runs of a network for every image, which leave together."""

import numpy as np
import pytest
import torch

import swiftsure as ss
from swiftsure.diffusion import DDIM, DeeDiff, DeeDiffRule, Guided, Schedule, sweep
from swiftsure.diffusion.steps import denoise
from swiftsure.torch import check
from tests.diffusion.builders import Sure, confidence_levels, network, reference_sample

SAMPLER = DDIM(5, Schedule(40))
LABELS = np.asarray([0, 2, 1, 1, 0, 2])
NONE = 3


@pytest.fixture
def plain():
    return network(n_classes=4)


def batch_of(n=6):
    random = torch.Generator().manual_seed(0)
    images = torch.randn(n, 3, 8, 8, generator=random)
    return images, torch.rand(n, generator=random), torch.from_numpy(LABELS[:n])


def test_every_exit_is_guided(plain):
    """Against two plain runs of the network, one by one."""
    images, times, labels = batch_of()
    with torch.no_grad():
        guided = Guided(plain, 2.5)
        state = guided.begin((images, times, labels))
        with_label = plain.begin((images, times, labels))
        without = plain.begin((images, times, torch.full_like(labels, NONE)))
        for k in range(plain.n_exits):
            state = guided.advance(k, state)
            with_label, without = plain.advance(k, with_label), plain.advance(k, without)
            a, b = plain.head(k, with_label), plain.head(k, without)
            found = guided.head(k, state)
            expected = b.output + 2.5 * (a.output - b.output)
            torch.testing.assert_close(found.output, expected)
            torch.testing.assert_close(found.confidence, (a.confidence + b.confidence) / 2)
            rows = torch.tensor([4, 0, 1])
            torch.testing.assert_close(guided.estimate(k, state, rows), expected[rows])
            assert (a.output - b.output).abs().max() > 1e-3  # labels do matter


def test_a_scale_of_one_is_the_network_with_its_labels(plain):
    guided = DeeDiff(Guided(plain, 1.0), sampler=SAMPLER).generate(6, labels=LABELS)
    alone = DeeDiff(plain, sampler=SAMPLER).generate(6, labels=LABELS)
    torch.testing.assert_close(guided.images, alone.images, atol=1e-4, rtol=0)


def test_the_scale_matters(plain):
    images = [
        DeeDiff(Guided(plain, scale), sampler=SAMPLER).generate(6, labels=LABELS).images
        for scale in (1.0, 3.0)
    ]
    assert (images[0] - images[1]).abs().mean() > 1e-3


def test_images_come_about_as_one_by_one(plain):
    guided = Guided(plain, 1.5)
    levels = confidence_levels(DeeDiff(guided, sampler=SAMPLER), 6, labels=LABELS)
    taken = set()
    for level in levels:
        made = DeeDiff(guided, level, sampler=SAMPLER).generate(6, labels=LABELS, batch_size=4)
        for i, label in enumerate(LABELS.tolist()):
            image, exits, _ = reference_sample(guided, SAMPLER, i, level, label=label)
            torch.testing.assert_close(made.images[i], image, atol=1e-4, rtol=0)
            assert made.exits[i].tolist() == exits
            taken.update(exits)
    assert len(taken) > 2


def test_it_is_a_staged_model_whose_rows_can_be_dropped(plain):
    check(Guided(plain, 2.0), batch_of())


def test_images_that_leave_take_both_their_runs_along(plain, monkeypatch):
    guided, seen = Guided(plain, 1.5), []
    advance = plain.advance

    def counted(k, state):
        seen.append(len(state["tokens"]))
        return advance(k, state)

    monkeypatch.setattr(plain, "advance", counted)
    levels = torch.tensor([-1.0, 2.0, 2.0, -1.0, 2.0, 2.0])  # two leave at once
    with torch.no_grad():
        found = denoise(guided, batch_of(), levels, DeeDiffRule(None), looks=True)
    assert seen == [12] + [8] * (plain.n_exits - 1)
    assert found.exits.tolist() == [0, 5, 5, 0, 5, 5]


def test_flops_count_both_runs_and_layers_one(plain):
    both, one = DeeDiff(Guided(plain, 2.0)).costs, DeeDiff(plain).costs
    np.testing.assert_allclose(both.flops, 2 * one.flops, rtol=1e-3)
    np.testing.assert_array_equal(both.layers, one.layers)


def test_policies_are_bound_to_the_scale(plain):
    guided = Guided(plain, 1.5)
    level = confidence_levels(DeeDiff(guided, sampler=SAMPLER), 6, labels=LABELS)[-1]
    labels = np.arange(60) % 3
    record = sweep(
        DeeDiff(guided, sampler=SAMPLER),
        60,
        thresholds=[level],
        losses=["mse"],
        labels=labels,
    )
    policy = ss.calibrate(record, risk="consistency", loss="mse", epsilon=0.5)
    assert policy.threshold == pytest.approx(level)
    DeeDiff(Guided(plain, 1.5), policy)
    for other in (Guided(plain, 2.0), plain):
        with pytest.raises(ValueError, match="another model"):
            DeeDiff(other, policy)


def test_the_class_of_none_is_no_class_of_images(plain):
    fast = DeeDiff(Guided(plain, 2.0), sampler=SAMPLER)
    assert fast.n_classes == NONE
    with pytest.raises(ValueError, match="in 0 to 2, but got 0 to 3"):
        fast.generate(2, labels=[0, NONE])


@pytest.mark.parametrize(("n_classes", "has"), [(None, "none"), (1, "1")])
def test_a_network_without_a_class_of_none_is_refused(n_classes, has):
    with pytest.raises(ValueError, match=f"stands for no label, but it has {has}"):
        Guided(network(n_classes=n_classes), 2.0)


def test_a_network_of_another_kind_is_refused(plain):
    for other in (Sure(), Guided(plain, 2.0)):
        with pytest.raises(
            TypeError, match=f"`swiftsure_zoo.UViT`, but got a {type(other).__name__}"
        ):
            Guided(other, 2.0)


def test_a_batch_that_is_none_is_refused_as_by_the_network(plain):
    guided = Guided(plain, 2.0)
    images, times, labels = batch_of()
    for batch, message in (
        ((images, times), r"\(images, timesteps, labels\), but got a tuple of 2"),
        (images, "but got a Tensor"),
        ((images, times, labels[:4]), r"`labels` must have shape \(6,\).* but got \(4,\)"),
        ((images, times[:, None], labels), r"`timesteps` must have shape \(6,\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            guided.begin(batch)


def test_half_precision_rounds_before_noise_is_guided_and_not_in_between(plain):
    """In bfloat16, from 2.5 times a difference that was rounded itself, errors would double."""
    batch = batch_of()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        guided = Guided(plain, 2.5)
        state = guided.advance(0, guided.begin(batch))
        found = guided.estimate(0, state)
        doubled = (batch[0].repeat_interleave(2, dim=0), batch[1].repeat_interleave(2))
        labels = torch.stack([batch[2], torch.full_like(batch[2], NONE)], dim=1).flatten()
        both = plain.estimate(0, plain.advance(0, plain.begin((*doubled, labels))))
    assert found.dtype == both.dtype == torch.bfloat16
    a, b = both.double()[::2], both.double()[1::2]
    assert torch.equal(found, (b + 2.5 * (a - b)).bfloat16())


def test_a_scale_is_kept_with_the_weights(plain):
    other = Guided(network(seed=1, n_classes=4), 1.0)
    other.load_state_dict(Guided(plain, 3.0).state_dict())
    assert other.scale == 3
    assert DeeDiff(other).fingerprint == DeeDiff(Guided(plain, 3.0)).fingerprint


@pytest.mark.parametrize("scale", [0, 1e39, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none_is_refused(plain, scale):
    with pytest.raises(ValueError, match="`scale` must be in"):
        Guided(plain, scale)


def test_it_is_in_the_mode_of_its_network_and_leaves_its_parts_alone():
    model = network(n_classes=4)
    assert not Guided(model, 2.0).training
    model.mid_block.train()
    with pytest.raises(ValueError, match="evaluation mode"):
        DeeDiff(Guided(model, 2.0))
    assert model.mid_block.training
    assert Guided(model.train(), 2.0).training
