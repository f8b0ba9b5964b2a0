"""U-ViT with DeeDiff's exits: against what its authors' code computes, and as a staged model."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

import swiftsure as ss
from swiftsure.torch import EarlyExit, Scored, check
from swiftsure_zoo import UViT
from swiftsure_zoo.networks.uvit import waves
from tests.torch.builders import every_output, policy_of, refused, rows
from tests.torch.reference import Reference, images, on_meta

REFERENCE = Reference("deediff")
TINY = {"image_size": 8, "patch_size": 2, "width": 16, "depth": 4, "n_heads": 2, "mlp_ratio": 2}
LAYOUTS = [
    {},
    {"n_classes": 4},
    {"depth": 1},
    {"depth": 5, "n_classes": 4, "qkv_bias": True},
    {"skips": False},
    {"convolution": False},
    {"image_size": 12, "patch_size": 4, "n_channels": 2, "mlp_ratio": 1.5},
]


def random_network(seed=0, **options):
    """A tiny network with weights large enough to tell images apart, ready to run."""
    torch.manual_seed(seed)
    model = UViT(**{**TINY, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model.eval()


def batch_for(model, n=3):
    """Images and times, and labels where the model asks for them."""
    channels, side, _ = model.image_shape
    parts = [images(n, side)[:, :channels], torch.linspace(0, 0.9, n)]
    if model.label_emb is not None:
        parts.append(torch.arange(n) % model.label_emb.num_embeddings)
    return tuple(parts)


def every_state(model, batch):
    """The state at every exit."""
    states = [model.begin(batch)]
    for k in range(model.n_exits):
        states.append(model.advance(k, states[-1]))
    return states[1:]


def early_confidences(model, batch):
    """Confidences at every exit but the last, (n, n_exits - 1)."""
    with torch.no_grad():
        early = every_state(model, batch)[:-1]
        return torch.stack([model.head(k, s).confidence for k, s in enumerate(early)], dim=1)


# ------------------------------------------------------------------------- the published network


@pytest.fixture(scope="module")
def parity():
    hyperparameters, weights, tensors = REFERENCE.parity()
    return hyperparameters, weights, tensors, (tensors["in.x"], tensors["in.timesteps"])


@REFERENCE.needed
def test_every_exit_gives_the_published_noise(parity):
    hyperparameters, weights, tensors, batch = parity
    model = UViT.from_published(hyperparameters, weights)
    assert not model.training
    expected = torch.cat([tensors["out.g"], tensors["out.predicted_noise"][:, None]], dim=1)
    torch.testing.assert_close(every_output(model, batch), expected, rtol=0, atol=1e-4)


@REFERENCE.needed
def test_every_exit_has_the_published_uncertainty(parity):
    hyperparameters, weights, tensors, batch = parity
    model = UViT.from_published(hyperparameters, weights)
    with torch.no_grad():
        *early, last = every_state(model, batch)
        maps = torch.stack([model.uncertainty(state) for state in early], dim=1)
        assert model.head(model.n_exits - 1, last).confidence.tolist() == [1, 1]
    torch.testing.assert_close(maps, tensors["out.u"], rtol=0, atol=1e-4)
    means = 1 - early_confidences(model, batch)
    torch.testing.assert_close(means, tensors["out.u_mean"], rtol=0, atol=1e-4)


@REFERENCE.needed
def test_samples_leave_where_they_do_in_the_published_rule(parity):
    hyperparameters, weights, tensors, batch = parity
    model = UViT.from_published(hyperparameters, weights)
    confidences = early_confidences(model, batch)
    levels = tensors["out.lambdas"].tolist()
    found = [ss.exits.exit_indices(confidences.numpy(), level, strict=True) for level in levels]
    # Published: a sample that would leave at the first exit leaves at the second.
    assert np.maximum(found, 1).tolist() == tensors["out.exit_layers"].tolist()


@REFERENCE.needed
def test_times_are_embedded_as_published(parity):
    tensors = parity[2]
    expected = tensors["out.time_embedding"]
    torch.testing.assert_close(waves(tensors["in.timesteps"], 16), expected, rtol=0, atol=1e-6)


@REFERENCE.needed
@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod."])
def test_wrapping_of_a_checkpoint_is_seen_through(parity, prefix):
    hyperparameters, weights, _, batch = parity
    wrapped = {prefix + key: value for key, value in weights.items()}
    plain = UViT.from_published(hyperparameters, weights)
    for found in (wrapped, {"epoch": 3, "model": wrapped}):
        model = UViT.from_published(hyperparameters, found)
        assert torch.equal(every_output(model, batch), every_output(plain, batch))


@REFERENCE.needed
@pytest.mark.parametrize("name", REFERENCE.configurations())
def test_every_published_configuration_has_the_published_keys_and_shapes(name):
    published = REFERENCE.configurations()[name]
    hyperparameters, early_exits = published["hyperparameters"], name.startswith("DeeDiff")
    model = on_meta(UViT.from_hyperparameters, hyperparameters, early_exits=early_exits)
    found = [[key, list(value.shape)] for key, value in model.state_dict().items()]
    assert found == [[key, shape] for key, shape, _ in REFERENCE.facts("state_dict.json")[name]]
    assert sum(p.numel() for p in model.parameters()) == published["n_params"]
    assert model.n_exits == published.get("n_exits", 1)


PUBLISHED = {
    "img_size": 8,
    "patch_size": 2,
    "embed_dim": 16,
    "depth": 2,
    "num_heads": 2,
    "mlp_ratio": 4,
}


def test_an_error_lists_missing_and_surplus_keys():
    weights = on_meta(UViT.from_hyperparameters, PUBLISHED).state_dict()
    weights["UEM.1.bias"] = weights.pop("UEM.0.bias")
    with pytest.raises(ValueError, match=r"1 missing: UEM\.0\.bias; 1 surplus: UEM\.1\.bias"):
        on_meta(UViT.from_published, PUBLISHED, weights)


def test_plain_weights_are_taken_for_a_plain_network_alone():
    weights = on_meta(UViT.from_hyperparameters, PUBLISHED, early_exits=False).state_dict()
    assert on_meta(UViT.from_published, PUBLISHED, weights, early_exits=False).n_exits == 1
    with pytest.raises(ValueError, match=r"10 missing: final_layer_in\.0\.weight"):
        on_meta(UViT.from_published, PUBLISHED, weights)


def test_published_hyperparameters_go_by_their_names():
    options = {"in_chans": 4, "num_classes": 7, "qkv_bias": True, "conv": False, "skip": False}
    model = on_meta(UViT.from_hyperparameters, {**PUBLISHED, **options})
    keys = list(model.state_dict())
    assert keys[:4] == [
        "pos_embed",
        "patch_embed.proj.weight",
        "patch_embed.proj.bias",
        "label_emb.weight",
    ]
    assert "mid_block.attn.qkv.bias" in keys
    assert not [key for key in keys if "skip_linear" in key or "final_layer" in key]
    assert (model.label_emb.num_embeddings, model.image_shape) == (7, (4, 8, 8))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mlp_time_embed": True}, "mlp_time_embed"),
        ({"num_classes": 0}, "n_classes"),
        ({"embed_dim": 20}, "width"),
        ({"colour": "red"}, "hyperparameters"),
    ],
    ids=str,
)
def test_published_hyperparameters_that_do_not_fit_are_refused(changes, name):
    with refused(name):
        on_meta(UViT.from_hyperparameters, {**PUBLISHED, **changes})


def test_a_published_hyperparameter_that_is_missing_is_named():
    with pytest.raises(ValueError, match="missing: embed_dim"):
        UViT.from_hyperparameters({k: v for k, v in PUBLISHED.items() if k != "embed_dim"})


# ------------------------------------------------------------------------------- a staged model


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_network_of_any_layout_is_a_staged_model(options):
    model = random_network(**options)
    batch = batch_for(model)
    check(model, batch)
    assert every_output(model, batch).shape == (3, model.n_exits, *model.image_shape)


@pytest.mark.parametrize("options", [{}, {"n_classes": 4}], ids=["no labels", "labels"])
def test_early_exit_gives_what_the_whole_network_gives(options):
    model = random_network(**options)
    batch = batch_for(model, 12)
    confidences = early_confidences(model, batch)
    # At each exit about half of those who are still there may leave.
    levels = tuple(confidences.median(dim=0).values.tolist())
    found = EarlyExit(model, policy_of(levels, model.n_exits, "model"))(batch)
    assert len(found.exits.unique()) > 2
    expected = rows(every_output(model, batch), found.exits)
    torch.testing.assert_close(found.outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"n_classes": 4}], ids=["no labels", "labels"])
def test_who_is_selected_at_any_exit_gets_the_same_later_outputs(options):
    model, index = random_network(**options), torch.tensor([4, 1])
    batch = batch_for(model, 5)
    expected = every_output(model, batch)[index]
    with torch.no_grad():
        for left, state in enumerate(every_state(model, batch)[:-1]):
            kept = model.select(state, index)
            for k in range(left + 1, model.n_exits):
                kept = model.advance(k, kept)
                output = model.head(k, kept).output
                torch.testing.assert_close(output, expected[:, k], rtol=1e-4, atol=1e-4)


def test_the_state_keeps_only_the_skips_that_are_still_to_come():
    model = random_network(depth=6)
    states = every_state(model, batch_for(model))
    assert [len(state["skips"]) for state in states[:-1]] == [0, 1, 2, 3, 2, 1, 0]
    assert list(states[-1]) == ["tokens"]
    assert states[-1]["tokens"].shape == (3, 16, 16)
    plain = random_network(skips=False)
    assert not any(state["skips"] for state in every_state(plain, batch_for(plain))[:-1])


def test_times_are_embedded_once_for_all_exits():
    """In small batches a look at an exit costs what its many small kernels cost."""

    class Cosines(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.cos.default
            return func(*args, **(kwargs or {}))

    model = random_network()
    with torch.no_grad(), Cosines() as seen:
        every_output(model, batch_for(model))
    assert seen.count == 1  # for tokens and for doubts


def test_a_stage_leaves_the_state_it_was_given_alone():
    model = random_network()
    with torch.no_grad():
        state = model.begin(batch_for(model))
        for k in range(model.n_exits):
            before = deepcopy(state)
            following = model.advance(k, state)
            model.head(k, following)
            torch.testing.assert_close(state, before, rtol=0, atol=0)
            state = following


@pytest.mark.parametrize("part", [0, 1, 2], ids=["images", "timesteps", "labels"])
def test_all_parts_of_a_batch_matter(part):
    model = random_network(n_classes=4)
    batch = list(batch_for(model))
    expected = every_output(model, tuple(batch))
    batch[part] = batch[part].flip(0)
    changed = (every_output(model, tuple(batch)) - expected).abs().flatten(2).amax(dim=2)
    assert (changed[0] > 1e-4).all()


def test_without_early_exits_the_full_output_is_the_same():
    model = random_network()
    batch = batch_for(model)
    plain = UViT(**TINY, early_exits=False).eval()
    weights = model.state_dict()
    plain.load_state_dict({key: weights[key] for key in plain.state_dict()})
    (output,) = plain(batch)
    torch.testing.assert_close(output, model(batch)[-1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_gives_finite_noise_and_fine_confidences(dtype):
    model = random_network(n_classes=4)
    policy = policy_of(1.0, model.n_exits, "model")
    found = EarlyExit(model, policy, dtype=dtype)(batch_for(model, 4))
    assert found.outputs.isfinite().all()
    assert found.confidences.dtype == torch.float32
    assert ((found.confidences > 0) & (found.confidences < 1)).all()


# ------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_every_weight_of_a_small_network_gets_a_finite_gradient(options):
    torch.manual_seed(0)
    model = UViT(**{**TINY, **options})
    batch = batch_for(model, 4)
    noise = torch.randn(batch[0].shape)
    *early, last = every_state(model, batch)
    loss = mse_loss(model.head(model.n_exits - 1, last).output, noise)
    for k, state in enumerate(early):
        estimate, unsure = model.head(k, state).output, model.uncertainty(state)
        loss = loss + mse_loss(unsure, (estimate - noise).abs().tanh().detach())
        loss = loss + ((1 - unsure.detach()) * (estimate - noise).square()).mean()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (2, 3, 8, 4), (2, 1, 8, 8), (3, 8, 8)], ids=str)
def test_images_of_another_size_are_refused(shape):
    with pytest.raises(ValueError, match=r"`images` must have shape \(n, 3, 8, 8\), but got"):
        random_network()((torch.zeros(shape), torch.zeros(shape[0])))


@pytest.mark.parametrize(
    ("n_classes", "change", "name"),
    [
        (None, lambda x, t: x, "batch"),
        (None, lambda x, t: (x,), "batch"),
        (None, lambda x, t: (x, t, t.long()), "batch"),
        (None, lambda x, t: (x, t[:1]), "timesteps"),
        (None, lambda x, t: (x, t[:, None]), "timesteps"),
        (4, lambda x, t: (x, t), "batch"),
        (4, lambda x, t: (x, t, t), "labels"),
        (4, lambda x, t: (x, t, t[:1].long()), "labels"),
    ],
    ids=[
        "no tuple",
        "no times",
        "labels unasked",
        "too few times",
        "times in a column",
        "no labels",
        "fractional labels",
        "too few labels",
    ],
)
def test_a_batch_that_does_not_fit_is_refused(n_classes, change, name):
    model = random_network(n_classes=n_classes)
    with refused(name):
        model(change(images(2, 8), torch.zeros(2)))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"image_size": 0}, "image_size"),
        ({"image_size": 9}, "image_size"),
        ({"patch_size": 0}, "patch_size"),
        ({"n_channels": 0}, "n_channels"),
        ({"width": 12}, "width"),
        ({"width": 0}, "width"),
        ({"n_heads": 0}, "n_heads"),
        ({"n_heads": 3}, "width"),
        ({"depth": 0}, "depth"),
        ({"depth": 2.5}, "depth"),
        ({"mlp_ratio": 0}, "mlp_ratio"),
        ({"mlp_ratio": 0.01}, "mlp_ratio"),
        ({"n_classes": 0}, "n_classes"),
    ],
    ids=str,
)
def test_a_bad_hyperparameter_is_refused_by_name(options, name):
    with refused(name) as error:
        on_meta(UViT, **{**TINY, **options})
    assert "\n" not in str(error.value)


def test_a_head_gives_its_own_confidence():
    model = random_network()
    state = model.advance(0, model.begin(batch_for(model)))
    scored = model.head(0, state)
    assert isinstance(scored, Scored)
    expected = 1 - model.uncertainty(state).flatten(1).mean(dim=1)
    torch.testing.assert_close(scored.confidence, expected)
