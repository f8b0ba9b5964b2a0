"""Schedules and samplers: against published numbers, and on cases whose end is known."""

import math

import numpy as np
import pytest
import torch

from swiftsure.diffusion import DDIM, DDPM, Sampler, Schedule
from swiftsure.diffusion.schedules import sampler_from_settings
from tests.torch.reference import Reference

REFERENCE = Reference("deediff")


@REFERENCE.needed
def test_the_published_schedule():
    _, _, tensors = REFERENCE.parity()
    schedule = Schedule(50)
    np.testing.assert_allclose(schedule.signal, tensors["out.alphas_bar_T50"], rtol=1e-5)
    # The published variance has 1 as the signal before time 0.
    before = np.concatenate([[1.0], schedule.signal[:-1]])
    tilde = schedule.betas * (1 - before) / (1 - schedule.signal)
    np.testing.assert_allclose(tilde[1:], tensors["out.betas_tilde_T50"][1:], rtol=1e-3)
    step = DDPM(schedule, variance="beta_tilde").step
    zeros, ones = torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)
    for k in (0, 20, 47):
        expected = math.sqrt(float(tensors["out.betas_tilde_T50"][49 - k]))
        assert step(k, zeros, zeros, ones).item() == pytest.approx(expected, rel=1e-3)


def test_noised_images_are_a_mixture():
    schedule = Schedule(10)
    images, noise = torch.ones(2, 3, 2, 2), torch.full((2, 3, 2, 2), 2.0)
    mixed = schedule.noised(images, noise, torch.tensor([0, 9]))
    for row, time in enumerate((0, 9)):
        share = schedule.signal[time]
        expected = math.sqrt(share) + 2 * math.sqrt(1 - share)
        torch.testing.assert_close(mixed[row], torch.full((3, 2, 2), expected))


def test_a_schedule_goes_to_a_device_once(monkeypatch):
    """In training it is asked for at every step, and bringing it to a GPU waits for the GPU."""
    brought, plain = [], torch.from_numpy
    monkeypatch.setattr(torch, "from_numpy", lambda array: brought.append(array) or plain(array))
    images, times = torch.zeros(2, 3, 2, 2), torch.tensor([0, 9])
    with torch.inference_mode():
        Schedule(10, last_beta=0.017).noised(images, images, times)
    clean = torch.ones_like(images, requires_grad=True)
    Schedule(10, last_beta=0.017).noised(clean, clean, times).sum().backward()
    assert len(brought) == 1


def test_times_are_seen_on_the_networks_scale():
    times = torch.tensor([0, 500, 999])
    torch.testing.assert_close(Schedule().times(times), torch.tensor([0, 0.5, 0.999]))
    scaled = Schedule(time_scale=1000.0).times(times)
    torch.testing.assert_close(scaled, torch.tensor([0, 500, 999.0]))


@pytest.mark.parametrize("n_steps", [1, 7, 50, 1000])
@pytest.mark.parametrize("clip", [True, False])
def test_ddim_with_the_true_noise_gives_the_true_image(n_steps, clip):
    schedule = Schedule()
    random = torch.Generator().manual_seed(0)
    clean = torch.rand(2, 3, 4, 4, generator=random).double() * 2 - 1
    sampler = DDIM(n_steps, schedule, clip=clip)
    share = float(schedule.signal[-1])
    noise = torch.randn(2, 3, 4, 4, generator=random).double()
    images = math.sqrt(share) * clean + math.sqrt(1 - share) * noise
    for k, time in enumerate(sampler.times):
        share = float(schedule.signal[time])
        found = (images - math.sqrt(share) * clean) / math.sqrt(1 - share)
        images = sampler.step(k, images, found, None)
    torch.testing.assert_close(images, clean, rtol=0, atol=1e-8)


def test_times_of_the_samplers():
    assert DDIM(1).times == (999,)
    assert DDIM(3, Schedule(10)).times == (9, 5, 2)
    assert DDIM(10, Schedule(10)).times == tuple(range(9, -1, -1))
    assert DDPM(Schedule(5)).times == (4, 3, 2, 1)  # never 0, as published


def test_who_draws_fresh_noise():
    ddpm = DDPM(Schedule(5))
    assert [ddpm.draws(k) for k in range(4)] == [True, True, True, False]
    assert not any(DDIM(5).draws(k) for k in range(5))
    drawing = DDIM(5, eta=0.5)
    assert [drawing.draws(k) for k in range(5)] == [True] * 4 + [False]


def test_ddim_with_all_noise_is_ddpm():
    """η = 1 at every time is the exact step: DDPM with variance β̃, with the same noise."""
    schedule = Schedule(20)
    random = torch.Generator().manual_seed(0)
    x, noise, fresh = torch.randn(3, 2, 3, 4, 4, generator=random).unbind(0)
    ddim, ddpm = DDIM(20, schedule, eta=1.0, clip=False), DDPM(schedule, variance="beta_tilde")
    for k in range(18):
        torch.testing.assert_close(ddim.step(k, x, noise, fresh), ddpm.step(k, x, noise, fresh))


def test_ddpm_by_hand():
    schedule = Schedule(5)
    beta, share = schedule.betas[4], schedule.signal[4]
    x, noise, fresh = (torch.full((1, 1, 1, 1), each) for each in (1.5, 0.5, -1.0))
    expected = (1.5 - beta / math.sqrt(1 - share) * 0.5) / math.sqrt(1 - beta) - math.sqrt(beta)
    assert DDPM(schedule).step(0, x, noise, fresh).item() == pytest.approx(expected)


def test_clipping_keeps_images_where_they_lie():
    x, noise = torch.full((1, 1, 1, 1), 5.0), torch.zeros(1, 1, 1, 1)
    assert DDIM(1, clip=True).step(0, x, noise, None).item() == 1
    assert DDIM(1, clip=False).step(0, x, noise, None).item() > 100


@pytest.mark.parametrize(
    "sampler",
    [
        DDIM(),
        DDIM(7, Schedule(100, 1e-3, 0.1, 1000.0), eta=0.5, clip=False),
        DDPM(),
        DDPM(Schedule(30), variance="beta_tilde"),
    ],
)
def test_settings_bring_a_sampler_back(sampler):
    assert isinstance(sampler, Sampler)
    assert sampler_from_settings(sampler.settings()) == sampler


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Schedule(1), "n_times"),
        (lambda: Schedule(first_beta=0.0), "first_beta"),
        (lambda: Schedule(last_beta=1.0), "last_beta"),
        (lambda: Schedule(time_scale=0.0), "time_scale"),
        (lambda: DDIM(0), "n_steps"),
        (lambda: DDIM(51, Schedule(50)), "n_steps"),
        (lambda: DDIM(eta=1.5), "eta"),
        (lambda: DDPM(variance="gamma"), "variance"),
        (lambda: sampler_from_settings({"name": "euler"}), "sampler"),
    ],
)
def test_what_is_no_schedule_or_sampler_is_refused(make, name):
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        make()
