"""Dynamic Perceiver: against what its authors' code computes, and as a staged model."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from swiftsure.torch import EarlyExit, check, exit_flops
from swiftsure_zoo import DynPerceiver
from swiftsure_zoo.networks.feature_branches import BRANCHES, feature_branch
from tests.torch.builders import every_output, full_confidences, policy_of, refused, rows
from tests.torch.reference import Reference, images, on_meta

REFERENCE = Reference("dyn_perceiver")
CONFIGURATIONS = REFERENCE.configurations("published")
PARITY = ["small", "mobilenet"]
EXITS = ["y_early3", "y_att", "y_cnn", "y_merge"]

REGNET = {
    "kind": "regnet",
    "stem_width": 8,
    "depths": (1, 2, 1, 1),
    "widths": (8, 16, 16, 32),
    "group_widths": (4, 8, 8, 8),
    "strides": (1, 2, 2, 2),
}
RESNET = {
    "kind": "resnet",
    "stem_width": 8,
    "depths": (1, 2, 1, 1),
    "widths": (4, 4, 8, 8),
    "stem_kernel": 3,
    "stem_stride": 1,
}
MOBILENET = {"kind": "mobilenet_v3", "width_multiplier": 0.125, "stem_stride": 2}
SMALL = {"n_latents": 16, "depths": (1, 1, 2, 1), "widening": 2, "pooled_side": 3}

KINDS = pytest.mark.parametrize(
    "branch", [REGNET, RESNET, MOBILENET], ids=lambda branch: branch["kind"]
)


def random_network(seed=0, **options):
    """A small network whose batch normalisation has seen something, ready to run."""
    torch.manual_seed(seed)
    model = DynPerceiver(5, **{"branch": REGNET, **SMALL, **options})
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    nn.init.normal_(model.early_classifier3.weight)
    nn.init.normal_(model.classifier_att.weight)
    return model.eval()


def published_shapes(name):
    return {key: shape for key, shape, _ in REFERENCE.facts("state_dict.json")[name]}


def published_network(name):
    """A published network without its values: the state dict decides on the feature branch."""
    shapes = published_shapes(name)
    weights = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    return on_meta(
        DynPerceiver.from_published,
        CONFIGURATIONS[name]["hyperparameters"],
        weights,
    )


def shapes_of(model):
    return {key: list(value.shape) for key, value in model.state_dict().items()}


# ------------------------------------------------------------------------- the published network


@pytest.fixture(scope="module", params=PARITY)
def parity(request):
    return REFERENCE.parity(f"parity_{request.param}")


@REFERENCE.needed
def test_every_exit_gives_the_published_logits(parity):
    hyperparameters, weights, tensors = parity
    model = DynPerceiver.from_published(hyperparameters, weights)
    assert not model.training
    outputs = every_output(model, tensors["in.x"])
    for k, name in enumerate(EXITS):
        torch.testing.assert_close(outputs[:, k], tensors[f"out.{name}"], rtol=0, atol=1e-4)


@REFERENCE.needed
def test_wrapping_of_a_checkpoint_is_seen_through(parity):
    hyperparameters, weights, tensors = parity
    wrapped = {f"module._orig_mod.{key}": value for key, value in weights.items()}
    checkpoint = {"epoch": 3, "model": wrapped, "optimizer": {}, "args": None, "model_ema": None}
    plain = DynPerceiver.from_published(hyperparameters, weights)
    model = DynPerceiver.from_published(hyperparameters, checkpoint)
    assert torch.equal(every_output(model, tensors["in.x"]), every_output(plain, tensors["in.x"]))


@REFERENCE.needed
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_published_configuration_has_the_published_keys_and_shapes(name):
    model = published_network(name)
    assert shapes_of(model) == published_shapes(name)
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert n_parameters == CONFIGURATIONS[name]["derived"]["n_params"]


@REFERENCE.needed
@pytest.mark.parametrize(
    "name",
    [name for name, facts in CONFIGURATIONS.items() if "upstream_gflops_per_exit" in facts],
)
def test_every_exit_of_a_published_configuration_takes_the_published_operations(name):
    published = CONFIGURATIONS[name]["upstream_gflops_per_exit"]
    found = exit_flops(published_network(name), torch.zeros(1, 3, 224, 224, device="meta"))
    # They counted a multiply-add as one, and some things that our counter leaves out.
    np.testing.assert_allclose(found / 2e9, published, rtol=5e-3)


PUBLISHED = {
    "num_classes": 5,
    "num_latents": 8,
    "num_SA_heads": [1, 2, 4, 8],
    "SA_widening_factor": 2,
    "spatial_reduction": True,
    "depth_factor": [1, 1, 1, 1],
    "backbone": "tiny",
    "cnn": {
        "stem_width": 8,
        "depths": [1, 1, 1, 1],
        "widths": [8, 16, 16, 32],
        "group_widths": [8, 8, 8, 8],
        "bottleneck_multiplier": 1.0,
        "strides": [2, 2, 2, 2],
        "se_ratio": 0.25,
        "num_classes": 5,
    },
}


def without(mapping, *names):
    return {key: value for key, value in mapping.items() if key not in names}


def test_an_error_lists_missing_and_surplus_keys():
    weights = DynPerceiver.from_hyperparameters(PUBLISHED).state_dict()
    weights["surplus.weight"] = weights.pop("latent")
    with pytest.raises(ValueError, match=r"1 missing: latent; 1 surplus: surplus\.weight\.$"):
        DynPerceiver.from_published(PUBLISHED, weights)


@pytest.mark.parametrize("name", BRANCHES)
def test_the_feature_branch_is_known_from_the_weights(name):
    given = without(PUBLISHED, "cnn") | {"backbone": name}
    expected = on_meta(DynPerceiver.from_hyperparameters, given)
    weights = {f"module.{key}": value for key, value in expected.state_dict().items()}
    found = on_meta(DynPerceiver.from_published, without(given, "backbone"), weights)
    assert shapes_of(found) == shapes_of(expected)


def test_weights_of_no_published_feature_branch_ask_for_one():
    with pytest.raises(ValueError, match=r"give `backbone` \(one of: regnet_y_400mf, .*`cnn`"):
        DynPerceiver.from_published(
            without(PUBLISHED, "backbone", "cnn"), {"latent": torch.ones(1)}
        )


def test_published_hyperparameters_go_by_their_names():
    cnn = {"layers": [1, 1, 1, 1], "channel_multiplier": 0.375}
    given = {**PUBLISHED, "num_classes": 7, "depth_factor": [1, 2, 1, 1], "input_size": 224}
    model = on_meta(DynPerceiver.from_hyperparameters, {**given, "cnn": cnn})
    assert [len(getattr(model, f"self_att{stage}")) for stage in (1, 2, 3, 4)] == [3, 6, 9, 3]
    assert model.classifier_cnn.weight.shape == (7, 768)
    assert feature_branch("resnet50_0375").widths[-1] == 768


@pytest.mark.parametrize(
    ("flag", "gone"),
    [
        ("with_dwc", ["dwc"]),
        ("with_z2x", ["cross_att2_z2x", "cross_att3_z2x", "cross_att4_z2x"]),
        ("with_last_CA", ["last_cross_att_z2x"]),
        ("with_isc", ["isc3", "isc4"]),
        ("spatial_reduction", ["token_mixer"]),
    ],
)
def test_a_part_that_is_left_out_has_no_weights(flag, gone):
    whole = on_meta(DynPerceiver.from_hyperparameters, PUBLISHED).state_dict()
    model = on_meta(DynPerceiver.from_hyperparameters, {**PUBLISHED, flag: False})
    assert set(model.state_dict()) == {key for key in whole if not key.startswith(tuple(gone))}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"colour": "red"}, "hyperparameters"),
        ({"cnn": None}, "branch"),
        ({"cnn": {"width_mult": 0.5, "conf": "mobilenet_v3_small"}}, "conf"),
        ({"cnn": {"width_mult": 0.5}}, "hyperparameters"),
        ({"cnn": {"channel_multiplier": 0.5}}, "hyperparameters"),
        ({"cnn": {**PUBLISHED["cnn"], "num_classes": 1000}}, "cnn"),
        ({"depth_factor": 2}, "depth_factor"),
        ({"with_x2z": False}, "with_x2z"),
    ],
    ids=str,
)
def test_published_hyperparameters_that_do_not_fit_are_refused(changes, name):
    with refused(name) as error:
        on_meta(DynPerceiver.from_hyperparameters, {**PUBLISHED, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["num_latents", "depth_factor"])
def test_a_published_hyperparameter_that_is_missing_is_named(name):
    with pytest.raises(ValueError, match=f"missing: {name}"):
        DynPerceiver.from_hyperparameters(without(PUBLISHED, name))


def test_the_defaults_are_a_published_network():
    published = {**PUBLISHED, "num_classes": 10, "num_latents": 128, "SA_widening_factor": 4}
    published |= {"depth_factor": [1, 1, 1, 2], "backbone": "regnet_y_800mf"}
    expected = on_meta(DynPerceiver.from_hyperparameters, without(published, "cnn"))
    assert shapes_of(on_meta(DynPerceiver, 10)) == shapes_of(expected)


# ------------------------------------------------------------------------------- a staged model


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, (32, 32)),
        ({"branch": RESNET}, (32, 32)),
        ({"branch": {**RESNET, "stem_kernel": 7, "stem_stride": 4}}, (64, 64)),
        ({"branch": MOBILENET}, (64, 64)),
        ({"branch": {**REGNET, "bottleneck": 0.5, "squeeze": 0.5, "stem_stride": 1}}, (16, 16)),
        ({"pooled_side": 7}, (40, 24)),
        ({"depthwise": False, "n_latents": 8}, (32, 32)),
        ({"write_features": False}, (32, 32)),
        ({"write_last_features": False}, (32, 32)),
        ({"feedback": False}, (32, 32)),
        ({"halve_latents": False, "n_latents": 3}, (1, 1)),
    ],
    ids=str,
)
def test_a_network_of_any_layout_is_a_staged_model(options, shape):
    # Double precision, since normalising over few latents magnifies what rounding leaves.
    model, batch = random_network(**options).double(), images(3, *shape).double()
    check(model, batch)
    assert every_output(model, batch).shape == (3, 4, 5)


@KINDS
def test_early_exit_gives_what_the_whole_network_gives(branch):
    model, batch = random_network(branch=branch).double(), images(12).double()
    shares = [0.75, 0.5, 0.5]
    confidences = full_confidences(model, batch)
    levels = [float(np.quantile(confidences[:, k], share)) for k, share in enumerate(shares)]
    found = EarlyExit(model, policy_of(tuple(levels), model.n_exits))(batch)
    assert len(found.exits.unique()) >= 3
    expected = rows(every_output(model, batch), found.exits)
    torch.testing.assert_close(found.outputs, expected, rtol=1e-6, atol=1e-6)


def test_half_precision_runs_all_exits():
    model = random_network()
    found = EarlyExit(model, policy_of(None, model.n_exits, dtype="bfloat16"))(images(4))
    assert found.outputs.shape == (4, 5)
    assert found.outputs.isfinite().all()


def test_heads_run_only_where_they_are_needed():
    model, seen = random_network(), []
    names = {"early_classifier3", "classifier_att", "classifier_cnn", "classifier_merge"}
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    EarlyExit(model, policy_of(None, model.n_exits))(images(2))
    assert "classifier_cnn" not in seen  # the others the last exit listens to
    assert set(seen) == names - {"classifier_cnn"}
    seen.clear()
    EarlyExit(model, policy_of(0.0, model.n_exits))(images(2))
    assert seen == ["early_classifier3"]


def test_the_state_keeps_only_what_is_needed_later():
    model = random_network()
    state, kept = model.begin(images(2)), []
    for k in range(model.n_exits):
        state = model.advance(k, state)
        kept.append({name: tuple(value.shape[1:]) for name, value in state.items()})
    assert kept == [
        {"features": (16, 8, 8), "latents": (4, 16)},
        {"features": (16, 4, 4), "latents": (2, 16), "feedback": (16,)},
        {"features": (32, 2, 2), "latents": (2, 16), "feedback": (16,)},
        {"merged": (32 + 16 + 16,)},
    ]


def test_no_images_give_no_answers():
    model = random_network()
    assert len(EarlyExit(model, policy_of(0.5, model.n_exits))(images(0)).exits) == 0


# ------------------------------------------------------------------------------------- training


@KINDS
def test_a_step_of_training_reaches_every_weight(branch):
    model = random_network(branch=branch, dropout=0.2).train()
    batch, labels = images(8), torch.tensor([0, 1] * 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss():
        return sum(cross_entropy(logits, labels) for logits in model(batch))

    loss().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    optimizer.step()
    assert loss().isfinite()


def test_statistics_are_gathered_once_a_step():
    model = random_network().train()
    before = {name: value.clone() for name, value in model.named_buffers() if "tracked" in name}
    model(images(4))
    after = dict(model.named_buffers())
    assert all(after[name] == count + 1 for name, count in before.items())


def test_a_small_network_learns():
    torch.manual_seed(0)
    model = DynPerceiver(2, branch=REGNET, **SMALL)
    batch, labels = images(16, 16, 16), torch.tensor([0, 1] * 8)
    batch[labels == 1] += 1
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = sum(cross_entropy(logits, labels) for logits in model(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 1, 32, 32), (2, 3, 0, 32), (2, 3, 32)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(ValueError, match=r"`images` must have shape .* one pixel a side, but got"):
        random_network()(torch.zeros(shape))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"n_latents": 0}, "n_latents"),
        ({"n_latents": 12}, "n_latents"),
        ({"depths": (1, 1, 1)}, "depths"),
        ({"depths": (1, 1, 1, 0)}, "depths"),
        ({"n_heads": (1, 2, 3, 8)}, "n_heads"),
        ({"n_heads": 8}, "n_heads"),
        ({"widening": 1.5}, "widening"),
        ({"pooled_side": 0}, "pooled_side"),
        ({"dropout": 1.0}, "dropout"),
        ({"branch": "regnet_y_800m"}, "branch"),
        ({"branch": None}, "branch"),
        ({"branch": {"widths": (8, 8, 8, 8)}}, "branch.kind"),
        ({"branch": {**REGNET, "wdths": (8, 8, 8, 8)}}, "branch"),
        ({"branch": {**REGNET, "widths": (8, 8, 8, 12)}}, "branch.group_widths"),
        ({"branch": {**REGNET, "depths": (1, 1)}}, "branch.depths"),
        ({"branch": {**REGNET, "squeeze": 0}}, "branch.squeeze"),
        ({"branch": {**REGNET, "bottleneck": "half"}}, "branch.bottleneck"),
        ({"branch": {**REGNET, "stem_stride": 0}}, "branch.stem_stride"),
        ({"branch": {**RESNET, "stem_width": 0}}, "branch.stem_width"),
        ({"branch": {**RESNET, "stem_kernel": 4}}, "branch.stem_kernel"),
        ({"branch": {**RESNET, "stem_stride": 3}}, "branch.stem_stride"),
        ({"branch": {**MOBILENET, "width_multiplier": -1}}, "branch.width_multiplier"),
        ({"branch": {**MOBILENET, "strides": (2, 2, 2)}}, "branch.strides"),
    ],
    ids=str,
)
def test_a_bad_hyperparameter_is_refused_by_name(options, name):
    with refused(name) as error:
        on_meta(DynPerceiver, 5, **{"branch": REGNET, **SMALL, **options})
    assert "\n" not in str(error.value)
