"""MSDNet: against what its authors' code computes, and as a staged model."""

import numpy as np
import pytest
import torch
from torch import nn

from swiftsure.torch import EarlyExit, check
from swiftsure_zoo import MSDNet
from swiftsure_zoo.networks.published import load_published
from tests.torch.builders import every_output, full_confidences, policy_of, refused, rows
from tests.torch.reference import Reference, images, on_meta

REFERENCE = Reference("msdnet")
TINY = {"n_blocks": 3, "base": 1, "step": 1, "n_channels": 4, "growth": 2}


def random_network(seed=0, **options):
    """A tiny network whose batch normalisation has seen something, ready to run."""
    torch.manual_seed(seed)
    model = MSDNet(5, **{**TINY, **options})
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    for head in model.classifier:
        nn.init.normal_(head.linear.weight)
    return model.eval()


# ------------------------------------------------------------------------- the published network


@pytest.fixture(scope="module")
def parity():
    return REFERENCE.parity()


@REFERENCE.needed
def test_every_exit_gives_the_published_logits(parity):
    hyperparameters, weights, tensors = parity
    model = MSDNet.from_published(hyperparameters, weights)
    assert not model.training
    outputs = every_output(model, tensors["in.x"])
    for k in range(model.n_exits):
        torch.testing.assert_close(outputs[:, k], tensors[f"out.exit{k}"], rtol=0, atol=1e-4)


@REFERENCE.needed
def test_wrapping_of_a_checkpoint_is_seen_through(parity):
    hyperparameters, weights, tensors = parity
    wrapped = {f"module._orig_mod.{key}": value for key, value in weights.items()}
    checkpoint = {"epoch": 3, "arch": "msdnet", "state_dict": wrapped, "optimizer": {}}
    plain = MSDNet.from_published(hyperparameters, weights)
    model = MSDNet.from_published(hyperparameters, checkpoint)
    assert torch.equal(every_output(model, tensors["in.x"]), every_output(plain, tensors["in.x"]))


@REFERENCE.needed
@pytest.mark.parametrize("name", REFERENCE.configurations())
def test_every_published_configuration_has_the_published_keys_and_shapes(name):
    hyperparameters = REFERENCE.configurations()[name]["hyperparameters"]
    model = on_meta(MSDNet.from_hyperparameters, hyperparameters)
    found = [[key, list(value.shape)] for key, value in model.state_dict().items()]
    assert found == [[key, shape] for key, shape, _ in REFERENCE.facts("state_dict.json")[name]]


@REFERENCE.needed
@pytest.mark.parametrize("name", REFERENCE.configurations())
def test_every_exit_of_a_published_configuration_takes_the_published_operations(name):
    published = REFERENCE.configurations()[name]
    model = on_meta(MSDNet.from_hyperparameters, published["hyperparameters"]).eval()
    batch = torch.zeros(1, *published["derived"]["input_size"], device="meta")
    seen = []

    def count(module, _inputs, output):
        if isinstance(module, nn.Conv2d):
            each = module.in_channels * module.kernel_size[0] ** 2
            seen.append(output.numel() * each)
        elif isinstance(module, nn.ReLU):
            seen.append(output.numel())
        elif isinstance(module, nn.MaxPool2d | nn.AvgPool2d):
            seen.append(output.numel() * module.kernel_size**2)
        elif isinstance(module, nn.Linear):
            seen.append(module.weight.numel() + module.bias.numel())

    for module in model.modules():
        module.register_forward_hook(count)
    state, totals = model.begin(batch), []
    for k in range(model.n_exits):
        state = model.advance(k, state)
        model.head(k, state)
        totals.append(sum(seen))
    assert totals == published["derived"]["upstream_counted_ops_per_exit"]


# ------------------------------------------------------------------------ published tensors at all


def test_an_error_lists_missing_and_surplus_keys_and_wrong_shapes():
    model = on_meta(nn.Linear, 2, 1)
    with pytest.raises(
        ValueError, match=r"1 missing: bias; 1 surplus: b; 1 of another shape: "
    ) as e:
        load_published(model, {"weight": torch.zeros(1, 3), "b": torch.zeros(1)})
    assert "weight must be (1, 2) but is (1, 3)" in str(e.value)


def test_an_error_about_many_keys_stays_readable():
    with refused("state_dict") as error:
        load_published(random_network(), {})
    assert "and 202 more" in str(error.value)
    assert len(str(error.value)) < 700


def test_a_state_dict_must_hold_tensors():
    with refused("state_dict"):
        load_published(nn.Linear(1, 1), {"weight": torch.zeros(1, 1), "bias": "zero"})


PUBLISHED = {
    "data": "cifar10",
    "nBlocks": 2,
    "nChannels": 4,
    "base": 1,
    "stepmode": "even",
    "step": 1,
    "growthRate": 2,
    "grFactor": [1, 2, 4],
    "prune": "max",
    "bnFactor": [1, 2, 4],
    "bottleneck": True,
    "reduction": 0.5,
}


def test_published_hyperparameters_go_by_their_names():
    model = on_meta(MSDNet.from_hyperparameters, {**PUBLISHED, "data": "cifar100", "nScales": 3})
    assert (model.n_exits, model.classifier[0].linear.out_features) == (2, 100)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"data": "mnist"}, "data"),
        ({"nScales": 4}, "nScales"),
        ({"grFactor": "1-2-4"}, "grFactor"),
        ({"colour": "red"}, "hyperparameters"),
    ],
)
def test_published_hyperparameters_that_do_not_fit_are_refused(changes, name):
    with refused(name):
        MSDNet.from_hyperparameters({**PUBLISHED, **changes})


def test_a_published_hyperparameter_that_is_missing_is_named():
    with pytest.raises(ValueError, match="missing: growthRate"):
        MSDNet.from_hyperparameters({k: v for k, v in PUBLISHED.items() if k != "growthRate"})


# ------------------------------------------------------------------------------- a staged model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prune": "min"},
        {"prune": "min", "n_blocks": 2, "scale_factors": (1, 1, 2, 4, 4), "side": 128},
        {"step_mode": "lin_grow"},
        {"reduction": 0},
        {"bottleneck_factors": None},
        {"scale_factors": (1,), "bottleneck_factors": (2,), "growth": 3, "side": 8},
        {"scale_factors": (1, 2), "bottleneck_factors": (4, 1), "side": 16},
        {"stem": "imagenet", "scale_factors": (1, 2, 4, 4), "side": 160},
    ],
    ids=str,
)
def test_a_network_of_any_layout_is_a_staged_model(options):
    options = dict(options)
    batch = images(3, height=options.pop("side", 32))
    n_scales = len(options.get("scale_factors", (1, 2, 4)))
    options.setdefault("bottleneck_factors", (1,) * n_scales)
    model = random_network(**options)
    check(model, batch)
    assert every_output(model, batch).shape == (3, model.n_exits, 5)


def test_early_exit_gives_what_the_whole_network_gives():
    model, batch = random_network(), images(12)
    medians = np.median(full_confidences(model, batch), axis=0).tolist()
    found = EarlyExit(model, policy_of(tuple(medians), model.n_exits))(batch)
    assert found.exits.unique().tolist() == [0, 1, 2]
    expected = rows(every_output(model, batch), found.exits)
    torch.testing.assert_close(found.outputs, expected, rtol=1e-4, atol=1e-4)


def test_the_state_keeps_only_what_can_still_reach_a_head():
    model = random_network(prune="max", n_blocks=3)
    state, kept = model.begin(images(2)), []
    for k in range(model.n_exits):
        state = model.advance(k, state)
        kept.append(len(state))
    assert kept == [3, 2, 1]


def test_training_reaches_all_heads():
    model = random_network().train()
    sum(output.sum() for output in model(images(2))).backward()
    assert all(head.linear.weight.grad is not None for head in model.classifier)


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 3, 32, 64), (2, 1, 32, 32), (3, 32, 32)])
def test_images_that_the_heads_cannot_take_are_refused(shape):
    with pytest.raises(ValueError, match=r"`images` must have shape .* 17 to 48 pixels"):
        random_network()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"n_blocks": 0}, "n_blocks"),
        ({"base": 0}, "base"),
        ({"step": 1.5}, "step"),
        ({"step_mode": "odd"}, "step_mode"),
        ({"stem": "mnist"}, "stem"),
        ({"prune": "none"}, "prune"),
        ({"n_channels": 0}, "n_channels"),
        ({"growth": 3, "scale_factors": (1, 1, 2)}, "growth"),
        ({"scale_factors": ()}, "scale_factors"),
        ({"bottleneck_factors": (1, 2)}, "bottleneck_factors"),
        ({"reduction": 1.5}, "reduction"),
        ({"reduction": 0.01}, "reduction"),
    ],
    ids=str,
)
def test_a_bad_hyperparameter_is_refused_by_name(options, name):
    with refused(name) as error:
        on_meta(MSDNet, 5, **{**TINY, **options})
    assert "\n" not in str(error.value)
