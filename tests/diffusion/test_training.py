"""Training losses: the published values, what each of them moves, and that they are learnt."""

import pytest
import torch

from swiftsure.diffusion import Guided, Schedule, deediff_losses
from swiftsure_zoo import UViT
from tests.diffusion.builders import network
from tests.torch.reference import Reference

REFERENCE = Reference("deediff")


def batch(model, n=4, seed=0):
    random = torch.Generator().manual_seed(seed)
    images, noise = torch.randn(2, n, *model.image_shape, generator=random).unbind(0)
    return images, torch.linspace(0, 0.9, n), noise


@REFERENCE.needed
def test_the_published_losses():
    hyperparameters, weights, tensors = REFERENCE.parity()
    model = UViT.from_published(hyperparameters, weights)
    found = deediff_losses(model, tensors["in.x"], tensors["in.timesteps"], tensors["in.noise"])
    for name, value in (
        ("simple", found.denoising),
        ("u", found.uncertainty),
        ("UAL", found.layers),
    ):
        torch.testing.assert_close(value.reshape(1), tensors[f"out.loss_{name}"].reshape(1))
    errors = (tensors["out.g"] - tensors["in.noise"][:, None]).square().mean(dim=(0, 2, 3, 4))
    torch.testing.assert_close(found.exits[:-1], errors)
    torch.testing.assert_close(found.exits[-1], found.denoising)
    torch.testing.assert_close(
        found.total, found.denoising + found.uncertainty + found.layers, rtol=0, atol=0
    )


def moved(loss, model):
    """Names of the parameters that a loss has a gradient for."""
    model.zero_grad()
    loss.backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def test_each_loss_moves_its_own_part():
    model = network().train()
    by_doubt = moved(deediff_losses(model, *batch(model)).uncertainty, model)
    assert "UEM.0.weight" in by_doubt
    assert "in_blocks.0.mlp.fc1.weight" in by_doubt
    assert not [name for name in by_doubt if "decoder" in name or "final_layer" in name]
    by_exits = moved(deediff_losses(model, *batch(model)).layers, model)
    assert {
        "decoder_pred.weight",
        "final_layer_in.0.weight",
        "final_layer_out.1.weight",
    } <= by_exits
    assert not [name for name in by_exits if "UEM" in name or name.startswith("norm")]
    by_noise = moved(deediff_losses(model, *batch(model)).denoising, model)
    assert {"final_layer.weight", "norm.weight"} <= by_noise
    assert "UEM.0.weight" not in by_noise


def test_labels_are_passed_on():
    model = network(n_classes=3)
    one, two = (
        deediff_losses(model, *batch(model), torch.tensor(labels)).total
        for labels in ([0, 1, 2, 0], [1, 1, 2, 0])
    )
    assert one != two


def test_training_lowers_every_loss():
    torch.manual_seed(0)
    model = UViT(image_size=8, patch_size=4, width=32, depth=2, n_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule, random = Schedule(), torch.Generator().manual_seed(0)
    clean = torch.ones(32, 3, 8, 8) * torch.tensor([-1.0, 1.0]).repeat(16).view(32, 1, 1, 1)
    history = []
    for _ in range(200):
        times = torch.randint(1000, (32,), generator=random)
        noise = torch.randn(32, 3, 8, 8, generator=random)
        noisy = schedule.noised(clean, noise, times)
        losses = deediff_losses(model, noisy, schedule.times(times), noise)
        optimizer.zero_grad()
        losses.total.backward()
        optimizer.step()
        history.append(losses)
    first, last = history[0], history[-1]
    assert last.denoising < 0.5 * first.denoising
    assert last.uncertainty < 0.8 * first.uncertainty
    assert (last.exits < 0.6 * first.exits).all()


def test_shapes_must_fit():
    model = network()
    images, times, noise = batch(model)
    with pytest.raises(ValueError, match="`noise` must have the images' shape"):
        deediff_losses(model, images, times, noise[:1])


def test_a_guided_network_is_not_trained():
    guided = Guided(network(n_classes=3), 2.0)
    images = torch.zeros(1, 3, 8, 8)
    with pytest.raises(TypeError, match="but got a Guided; guidance comes after"):
        deediff_losses(guided, images, torch.zeros(1), images, torch.tensor([0]))
