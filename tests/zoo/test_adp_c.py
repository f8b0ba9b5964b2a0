"""ADP-C: against what its authors' code computes, and as a staged model."""

import numpy as np
import pytest
import torch
from torch import nn

from swiftsure.torch import EarlyExit, check
from swiftsure.torch.fingerprinting import fingerprint
from swiftsure_zoo import ADPC
from swiftsure_zoo.networks.hrnet import Conv, Pixels
from tests.torch.builders import every_output, policy_of, refused, rows
from tests.torch.reference import Reference, images, on_meta

REFERENCE = Reference("adp_c")
PARITIES = ["parity_small", "parity_adpc_threshold_above_one"]
TINY = {
    "first_width": 4,
    "widths": (4, 5, 6, 7),
    "n_modules": (1, 1, 1),
    "n_blocks": (1, 1, 1, 1),
    "head_width": 4,
}


def random_network(seed=0, **options):
    """A tiny network whose batch normalisation has seen something, ready to run."""
    torch.manual_seed(seed)
    model = ADPC(5, **{"threshold": 0.5, **TINY, **options})
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # as of the one batch below
        elif isinstance(module, Conv) and module.masked:
            nn.init.constant_(module.Lambda, 0.5)  # pixels a little further off count, too
    for name in ("exit1", "exit2", "exit3", "last_layer"):
        nn.init.normal_(getattr(model, name)[-1].weight, std=0.5)
    with torch.no_grad():
        model.train()(images(4, 64))
    return model.eval()


def mean_confidence(logits):
    return logits.softmax(dim=1).amax(dim=1).mean(dim=(1, 2))


def states(model, batch):
    state, seen = model.begin(batch), []
    with torch.no_grad():
        for k in range(model.n_exits):
            state = model.advance(k, state)
            seen.append(state)
    return seen


# ------------------------------------------------------------------------- the published network


@pytest.fixture(scope="module", params=PARITIES)
def parity(request):
    return REFERENCE.parity(request.param)


@REFERENCE.needed
def test_every_exit_gives_the_published_logits_and_masks(parity):
    hyperparameters, weights, tensors = parity
    model = ADPC.from_published(hyperparameters, weights)
    assert not model.training
    outputs = every_output(model, tensors["in.x"])
    for k in range(model.n_exits):
        expected = tensors[f"out.exit{k + 1}"]
        torch.testing.assert_close(outputs[:, k], expected, rtol=0, atol=1e-4)
        if k < model.n_exits - 1:
            computed = Pixels(outputs[:, k], model.threshold).at(expected.shape[2:])
            assert torch.equal(computed[:, 0].float(), tensors[f"out.mask_after_exit{k + 1}"])


@REFERENCE.needed
@pytest.mark.parametrize("prefix", ["model.", "module.model.", "module.", "module._orig_mod."])
def test_wrapping_of_a_checkpoint_is_seen_through(prefix):
    hyperparameters, weights, tensors = REFERENCE.parity()
    wrapped = {f"{prefix}{key}": value for key, value in weights.items()}
    if "model." in prefix:
        wrapped[prefix.replace("model.", "loss.criterion.weight")] = torch.ones(5)
    plain = ADPC.from_published(hyperparameters, weights)
    expected = every_output(plain, tensors["in.x"])
    for checkpoint in (wrapped, {"epoch": 3, "state_dict": wrapped, "optimizer": {}}):
        model = ADPC.from_published(hyperparameters, checkpoint)
        assert torch.equal(every_output(model, tensors["in.x"]), expected)


@REFERENCE.needed
@pytest.mark.parametrize("name", REFERENCE.configurations())
def test_every_published_configuration_has_the_published_keys_and_shapes(name):
    published = REFERENCE.configurations()[name]
    model = on_meta(ADPC.from_hyperparameters, published)
    found = [[key, list(value.shape)] for key, value in model.state_dict().items()]
    assert found == [[key, shape] for key, shape, _ in REFERENCE.facts("state_dict.json")[name]]
    assert sum(value.numel() for value in model.parameters()) == published["n_params"]


# ----------------------------------------------------------------------- published hyperparameters

PUBLISHED = {
    "stages": [
        {"modules": 1, "block": "BOTTLENECK", "blocks": [1], "channels": [4]},
        {"modules": 1, "block": "BASIC", "blocks": [1, 1], "channels": [4, 5]},
        {"modules": 1, "block": "BASIC", "blocks": [1, 1, 1], "channels": [4, 5, 6]},
        {"modules": 1, "block": "BASIC", "blocks": [1, 1, 1, 1], "channels": [4, 5, 6, 7]},
    ],
    "exit_type": "flex",
    "exit_inter_channel": 4,
    "mask_use": True,
    "mask_conf_threshold": 0.5,
    "num_classes": 5,
}


def stages_with(k, **changes):
    stages = [dict(stage) for stage in PUBLISHED["stages"]]
    stages[k].update(changes)
    return {"stages": stages}


def test_published_hyperparameters_go_by_their_names():
    model, batch = random_network(), images(2)
    again = ADPC.from_published(PUBLISHED, model.state_dict())
    assert again.threshold == 0.5
    assert torch.equal(every_output(again, batch), every_output(model, batch))


def test_an_error_lists_missing_and_surplus_keys():
    weights = {f"model.{key}": value for key, value in random_network().state_dict().items()}
    weights["model.extra"] = weights.pop("model.exit2.1.Lambda")
    with pytest.raises(ValueError, match=r"1 missing: exit2\.1\.Lambda; 1 surplus: extra\."):
        ADPC.from_published(PUBLISHED, weights)


def test_a_network_without_masking_lacks_its_keys():
    weights = random_network().state_dict()
    with pytest.raises(ValueError, match=r"surplus: transition1\.0\.0\.Lambda"):
        ADPC.from_published({**PUBLISHED, "mask_use": False}, weights)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"exit_type": "round"}, "exit_type"),
        ({"exit_inter_channel": None}, "head_width"),
        ({"mask_conf_threshold": None}, "threshold"),
        ({"mask_criterion": "entropy"}, "mask_criterion"),
        ({"stem_channels": 32}, "stem_channels"),
        ({"colour": "red"}, "hyperparameters"),
        ({"stages": PUBLISHED["stages"][:3]}, "stages"),
        (stages_with(0, block="BASIC"), "stages"),
        (stages_with(1, block="BOTTLENECK"), "stages"),
        (stages_with(2, channels=[4, 6, 6]), "stages"),
        (stages_with(2, blocks=[1, 1]), "n_blocks"),
        (stages_with(1, depth=3), "hyperparameters"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_published_hyperparameters_that_do_not_fit_are_refused(changes, name):
    with refused(name):
        on_meta(ADPC.from_hyperparameters, {**PUBLISHED, **changes})


def test_a_published_hyperparameter_that_is_missing_is_named():
    with pytest.raises(ValueError, match="missing: num_classes"):
        ADPC.from_hyperparameters({k: v for k, v in PUBLISHED.items() if k != "num_classes"})


# -------------------------------------------------------------------------------------- masking


def test_a_masked_convolution_fills_in_from_what_it_computed():
    torch.manual_seed(0)
    conv, features = Conv(2, 3, masked=True), torch.randn(1, 2, 9, 9)
    logits = torch.zeros(1, 2, 9, 9)
    logits[:, 0, :, 4:] = 9.0  # sure of the right half
    with torch.no_grad():
        conv.Lambda.fill_(0.7)
        found, plain = conv(features, Pixels(logits, 0.9)), conv(features)
        assert torch.equal(found[..., :4], plain[..., :4])
        weights = [
            np.exp(-0.49 * (dy * dy + dx * dx)) * (dy != 0 or dx != 0)
            for dy in range(-3, 4)
            for dx in range(-3, 4)
        ]
        near = plain[..., 1:8, 2:9].clone()  # around row 4, column 5
        near[..., 2:] = 0.0
        expected = (near.flatten(2) * torch.tensor(weights)).sum(dim=2) / (sum(weights) + 1e-5)
    torch.testing.assert_close(found[..., 4, 5], expected.float())


def test_sure_pixels_keep_their_logits_and_others_do_not():
    model, batch = random_network(), images(3, 64)
    outputs = every_output(model, batch)
    for k in range(model.n_exits - 1):
        now, after = outputs[:, k], outputs[:, k + 1]
        kept = ~Pixels(now, 0.5).at(now.shape[2:]).expand_as(now)
        assert 0 < kept.float().mean() < 1
        assert torch.equal(after[kept], now[kept])
        assert (after[~kept] != now[~kept]).all()


def test_masking_is_switched_by_the_threshold():
    model, batch = random_network(), images(3, 64)
    masked, mark = every_output(model, batch), fingerprint(model)
    model.threshold = 1.01
    unmasked = every_output(model, batch)
    assert torch.equal(masked[:, 0], unmasked[:, 0])
    assert not torch.allclose(masked[:, 1:], unmasked[:, 1:])
    assert fingerprint(model) != mark
    # A network that cannot mask, with the same weights, gives the same.
    plain = random_network(masked=False)
    plain.load_state_dict({key: model.state_dict()[key] for key in plain.state_dict()})
    assert torch.equal(every_output(plain, batch), unmasked)
    model.threshold = 0.5
    assert torch.equal(every_output(model, batch), masked)
    assert fingerprint(model) == mark


def test_the_state_keeps_logits_only_where_later_stages_need_them():
    kept = [sorted(state) for state in states(random_network(), images(2))]
    assert kept == [["logits", "maps"]] * 3 + [["logits"]]
    kept = states(random_network(threshold=1), images(2))
    assert [sorted(state) for state in kept] == [["maps"]] * 4
    assert [len(state["maps"]) for state in kept] == [1, 2, 3, 4]


@pytest.mark.parametrize(("threshold", "runs"), [(0.5, [1, 1, 1, 1]), (1, [0, 0, 1, 0])])
def test_heads_run_once_at_most_and_only_where_needed(threshold, runs):
    model, seen = random_network(threshold=threshold), []
    heads = [model.exit1, model.exit2, model.exit3, model.last_layer]
    for head in heads:
        head.register_forward_hook(lambda module, *_: seen.append(module))
    model.head(2, states(model, images(2))[2])
    assert [seen.count(head) for head in heads] == runs


# ------------------------------------------------------------------------------- a staged model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": 1.01},
        {"masked": False},
        {"heads": "original", "head_width": None},
        {"heads": "original", "masked": False},
        {"first_width": 16, "widths": (64, 2, 2, 2)},
        {"n_modules": (1, 2, 1), "n_blocks": (2, 1, (1, 2, 1), 1)},
        {"confidence": mean_confidence},
    ],
    ids=lambda options: ",".join(options) or "defaults",
)
def test_a_network_of_any_layout_is_a_staged_model(options):
    model, batch = random_network(**options), images(3, 64, 96)
    check(model, batch)
    assert every_output(model, batch).shape == (3, 4, 5, 16, 24)


def test_original_heads_take_images_of_any_size():
    model, batch = random_network(heads="original"), images(3, 37, 50)
    check(model, batch)
    assert every_output(model, batch).shape == (3, 4, 5, 10, 13)


@pytest.mark.parametrize("threshold", [0.5, 1])
def test_selected_samples_go_on_as_before(threshold):
    model, batch = random_network(threshold=threshold), images(5, 64)
    whole, index = every_output(model, batch), torch.tensor([3, 1])
    for k, state in enumerate(states(model, batch)[:-1]):
        selected = model.select(state, index)
        for later in range(k + 1, model.n_exits):
            with torch.no_grad():
                selected = model.advance(later, selected)
                found = model.head(later, selected)
            torch.testing.assert_close(found, whole[index, later], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threshold", [0.5, 1])
def test_early_exit_gives_what_the_whole_network_gives(threshold):
    model, batch = random_network(threshold=threshold, confidence=mean_confidence), images(12)
    with torch.no_grad():
        whole = every_output(model, batch)
        middles = [float(mean_confidence(whole[:, k]).median()) for k in range(3)]
    policy = policy_of(tuple(middles), model.n_exits, "model")
    found = EarlyExit(model, policy)(batch)
    assert len(found.exits.unique()) > 2
    torch.testing.assert_close(found.outputs, rows(whole, found.exits), rtol=1e-4, atol=1e-4)


def test_training_reaches_all_heads_and_what_fills_in():
    model = random_network().train()
    sum(output.sum() for output in model(images(2, 64))).backward()
    heads = [model.exit1, model.exit2, model.exit3, model.last_layer]
    assert all(head[-1].weight.grad is not None for head in heads)
    assert model.exit2[1].Lambda.grad.abs() > 0
    assert model.exit2[1].square_dis.grad is None


@pytest.mark.parametrize("shape", [(2, 3, 32, 48), (2, 3, 0, 32), (2, 1, 32, 32), (3, 32, 32)])
def test_images_that_the_heads_cannot_take_are_refused(shape):
    with pytest.raises(ValueError, match=r"`images` must have shape .* multiples of 32, but got"):
        random_network()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"first_width": 0}, "first_width"),
        ({"widths": (4, 4, 4)}, "widths"),
        ({"widths": (4, 4, 4, 0)}, "widths"),
        ({"widths": "4444"}, "widths"),
        ({"n_modules": (1, 1)}, "n_modules"),
        ({"n_modules": (1, 1.5, 1)}, "n_modules"),
        ({"n_blocks": 2}, "n_blocks"),
        ({"n_blocks": (1, (1, 1, 1), 1, 1)}, "n_blocks"),
        ({"heads": "flex"}, "heads"),
        ({"head_width": 0}, "head_width"),
        ({"head_width": None}, "head_width"),
        ({"threshold": 0}, "threshold"),
        ({"threshold": "high"}, "threshold"),
        ({"threshold": float("nan")}, "threshold"),
    ],
    ids=str,
)
def test_a_bad_hyperparameter_is_refused_by_name(options, name):
    with refused(name) as error:
        on_meta(ADPC, 5, **{**TINY, **options})
    assert "\n" not in str(error.value)
