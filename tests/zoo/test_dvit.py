"""DViT: against what its authors' code computes, and as a staged model."""

import numpy as np
import pytest
import torch
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy, interpolate

from swiftsure.torch import EarlyExit, check
from swiftsure_zoo import DViT
from swiftsure_zoo.networks.transformer import DropPath, Window, stretching
from tests.torch.builders import every_output, full_confidences, labels, policy_of, refused, rows
from tests.torch.reference import Reference, images, on_meta

REFERENCE = Reference("dvit")
TINY = {
    "image_size": 32,
    "grids": (2, 3, 4),
    "width": 8,
    "depth": 2,
    "n_heads": 2,
    "token_width": 6,
    "feature_width": 3,
    "feature_hidden": 5,
}
NO_REUSE = {"feature_reuse": False, "relation_reuse": False}


def random_network(seed=0, **options):
    """A tiny network with weights large enough to tell images apart, ready to run."""
    torch.manual_seed(seed)
    model = DViT(5, **{**TINY, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return model.eval()


# ------------------------------------------------------------------------- the published network


@pytest.fixture(scope="module")
def parity():
    return REFERENCE.parity()


@REFERENCE.needed
def test_every_exit_gives_the_published_logits(parity):
    hyperparameters, weights, tensors = parity
    model = DViT.from_published(hyperparameters, weights)
    assert not model.training
    outputs = every_output(model, tensors["in.x"])
    for k in range(model.n_exits):
        torch.testing.assert_close(outputs[:, k], tensors[f"out.exit{k}"], rtol=0, atol=1e-4)


@REFERENCE.needed
def test_the_published_features_and_relations_are_handed_on(parity):
    hyperparameters, weights, tensors = parity
    model = DViT.from_published(hyperparameters, weights)
    with torch.no_grad():
        state = model.advance(0, model.begin(tensors["in.x"][:1]))
    tokens = torch.cat([state["class_token"][:, None], state["features"]], dim=1)
    expected = tensors["out.exit0_reused_feature"], tensors["out.exit0_relation_block0"]
    torch.testing.assert_close((tokens, state["relations"][0]), expected, rtol=0, atol=1e-4)


@REFERENCE.needed
def test_what_is_not_learned_starts_as_published(parity):
    hyperparameters, weights, _ = parity
    model = DViT.from_hyperparameters(hyperparameters)
    for key, value in model.state_dict().items():
        if key.endswith("pos_embed"):
            torch.testing.assert_close(value, weights[key])
        if key.endswith(".w"):  # random, but orthogonal and of one length
            torch.testing.assert_close(value @ value.T, weights[key] @ weights[key].T)


@REFERENCE.needed
def test_wrapping_of_a_checkpoint_is_seen_through(parity):
    hyperparameters, weights, tensors = parity
    wrapped = {f"module._orig_mod.{key}": value for key, value in weights.items()}
    checkpoint = {"model_state_dict": wrapped, "flops": [1, 2, 3], "dynamic_threshold": None}
    plain = DViT.from_published(hyperparameters, weights)
    model = DViT.from_published(hyperparameters, checkpoint)
    image = tensors["in.x"][:1]
    assert torch.equal(every_output(model, image), every_output(plain, image))


@REFERENCE.needed
@pytest.mark.parametrize("name", REFERENCE.configurations())
def test_every_published_configuration_has_the_published_keys_and_shapes(name):
    hyperparameters = REFERENCE.configurations()[name]
    model = on_meta(DViT.from_hyperparameters, hyperparameters)
    found = [[key, list(value.shape)] for key, value in model.state_dict().items()]
    assert found == [[key, shape] for key, shape, _ in REFERENCE.facts("state_dict.json")[name]]
    assert sum(p.numel() for p in model.parameters()) == hyperparameters["n_params"]


@REFERENCE.needed
@pytest.mark.parametrize("name", REFERENCE.configurations())
def test_every_published_configuration_runs(name):
    model = on_meta(DViT.from_hyperparameters, REFERENCE.configurations()[name]).eval()
    outputs = model(torch.zeros(2, 3, 224, 224, device="meta"))
    assert [tuple(output.shape) for output in outputs] == [(2, 1000)] * 3


def test_windows_are_the_published_ones():
    assert [Window.soft(224, grid) for grid in (7, 10, 14)] == [(14, 8, 3), (11, 6, 5), (7, 4, 2)]
    patches = [Window.patches(224, grid) for grid in (7, 10, 14)]
    assert patches == [(32, 32, 0), (23, 23, 3), (16, 16, 0)]


@pytest.mark.parametrize(("coarse", "between", "fine"), [(7, 14, 10), (10, 20, 14), (4, 8, 8)])
def test_stretching_is_the_published_resizing(coarse, between, fine):
    tokens = torch.randn(1 + coarse**2, 3, generator=torch.Generator().manual_seed(0))
    maps = tokens[1:].T.unflatten(1, (coarse, coarse))[None]
    maps = adaptive_avg_pool2d(interpolate(maps, size=between, mode="nearest"), fine)
    expected = torch.cat([tokens[:1], maps[0].flatten(1).T])
    torch.testing.assert_close(stretching(coarse, fine) @ tokens, expected)


PUBLISHED = {
    "kind": "t2t",
    "num_classes": 7,
    "img_size": 224,
    "embed_dim": 8,
    "depth": 1,
    "num_heads": 2,
    "mlp_ratio": 2.0,
    "token_dim": 4,
    "qkv_bias": False,
    "layernorm_eps": 1e-5,
    "feature_reuse": True,
    "relation_reuse": True,
    "feature_reuse_dim": 3,
    "feature_reuse_hidden": 5,
}


def test_an_error_lists_missing_and_surplus_keys():
    weights = on_meta(DViT.from_hyperparameters, PUBLISHED).state_dict()
    weights["tail.bias"] = weights.pop("less_token.head.bias")
    with pytest.raises(ValueError, match=r"1 missing: less_token\.head\.bias; 1 surplus: tail\."):
        on_meta(DViT.from_published, PUBLISHED, weights)


def test_published_rates_of_dropout_are_taken():
    given = {**PUBLISHED, "drop_rate": 0.1, "attn_drop_rate": 0.2, "drop_path_rate": 0.3}
    model = on_meta(DViT.from_hyperparameters, {**given, "depth": 3})
    layout = model.less_token.layout
    assert (layout.dropout, layout.attention_dropout) == (0.1, 0.2)
    assert [block.drop_path.rate for block in model.less_token.blocks] == [0, 0.15, 0.3]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"img_size": 192}, "img_size"),
        ({"kind": "swin"}, "kind"),
        ({"num_heads": 3}, "width"),
        ({"colour": "red"}, "hyperparameters"),
    ],
)
def test_published_hyperparameters_that_do_not_fit_are_refused(changes, name):
    with refused(name):
        on_meta(DViT.from_hyperparameters, {**PUBLISHED, **changes})


@pytest.mark.parametrize("name", ["embed_dim", "token_dim"])
def test_a_published_hyperparameter_that_is_missing_is_named(name):
    with pytest.raises(ValueError, match=f"missing: {name}"):
        DViT.from_hyperparameters({k: v for k, v in PUBLISHED.items() if k != name})


# ------------------------------------------------------------------------------- a staged model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "deit", "qkv_bias": True, "norm_eps": 1e-6},
        {"kind": "deit", "grids": (4, 8, 16), "depth": 1},
        {"grids": (2, 8), "depth": 3},
        {"grids": (2, 4, 8, 16), "image_size": 64, "depth": 1},
        {"feature_reuse": False},
        {"relation_reuse": False},
        {**NO_REUSE, "kind": "deit"},
    ],
    ids=str,
)
def test_a_network_of_any_layout_is_a_staged_model(options):
    model = random_network(**options)
    batch = images(3, options.get("image_size", 32))
    check(model, batch)
    assert every_output(model, batch).shape == (3, model.n_exits, 5)


@pytest.mark.parametrize("kind", ["t2t", "deit"])
def test_early_exit_gives_what_the_whole_network_gives(kind):
    model, batch = random_network(kind=kind), images(12)
    medians = np.median(full_confidences(model, batch), axis=0).tolist()
    found = EarlyExit(model, policy_of(tuple(medians), model.n_exits))(batch)
    assert found.exits.unique().tolist() == [0, 1, 2]
    expected = rows(every_output(model, batch), found.exits)
    torch.testing.assert_close(found.outputs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["t2t", "deit"])
def test_half_precision_gives_finite_logits(kind, dtype):
    model = random_network(kind=kind)
    found = EarlyExit(model, policy_of(None, model.n_exits), dtype=dtype)(images(4))
    assert found.outputs.isfinite().all()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"class_token", "images", "features", "relations"}),
        ({"feature_reuse": False}, {"class_token", "images", "relations"}),
        ({"relation_reuse": False}, {"class_token", "images", "features"}),
    ],
    ids=["all", "no features", "no relations"],
)
def test_the_state_keeps_only_what_is_needed_later(options, kept):
    model = random_network(**options)
    state, seen = model.begin(images(2)), []
    for k in range(model.n_exits):
        state = model.advance(k, state)
        seen.append(set(state))
    assert seen == [kept, kept, {"class_token"}]


@pytest.mark.parametrize("reused", ["features", "relations"])
def test_what_is_reused_matters(reused):
    model = random_network()
    with torch.no_grad():
        state = model.advance(0, model.begin(images(2)))
        expected = model.head(1, model.advance(1, state))
        del state[reused]
        if reused == "features":
            state["features"] = torch.zeros(2, 4, 8)
        assert not torch.allclose(model.head(1, model.advance(1, state)), expected, atol=1e-3)


# ------------------------------------------------------------------------------------- training


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "deit", "grids": (4, 8, 16)}, NO_REUSE],
    ids=["t2t", "deit", "no reuse"],
)
def test_a_small_network_learns(options):
    torch.manual_seed(0)
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "drop_path": 0.1}
    model = DViT(5, **{**TINY, "width": 32, **rates, **options})
    fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert all(name.endswith((".w", "pos_embed")) for name in fixed)
    # Reused features go to all tokens but that of the class, which alone is read after this block.
    unread = "normal_token.blocks.1.feature_resuse_mlp."
    batch, truth = images(8), labels(8)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = sum(cross_entropy(output, truth) for output in model(batch))
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            if name not in fixed:
                assert parameter.grad.isfinite().all(), name
                assert parameter.grad.any() or name.startswith(unread), name
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_new_tokens_are_not_drowned_by_their_positions():
    torch.manual_seed(0)
    model = DViT(5, **{**TINY, "width": 32})
    for part in (model.less_less_token, model.normal_token):
        assert part.tokens_to_token(images(8)).std() > part.pos_embed.std()
    smaller = DViT(5, **{**TINY, "width": 32}, position_scale=0.1)
    torch.testing.assert_close(smaller.normal_token.pos_embed, 0.1 * model.normal_token.pos_embed)


def test_dropped_paths_keep_the_mean():
    torch.manual_seed(0)
    path, branch = DropPath(0.25), torch.ones(4000, 1, 1)
    dropped = path(branch)
    assert dropped.unique().tolist() == pytest.approx([0, 4 / 3])
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)
    assert path.eval()(branch) is branch


# --------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("shape", [(2, 3, 28, 28), (2, 3, 32, 64), (2, 1, 32, 32), (3, 32, 32)])
def test_images_with_other_grids_are_refused(shape):
    with pytest.raises(ValueError, match=r"`images` must have shape .* 32 pixels a side"):
        random_network(grids=(2, 4, 8))(torch.zeros(shape))


def test_images_with_the_same_grids_are_taken():
    model = random_network(kind="deit", grids=(2, 4))
    assert (model.sides[0], model.sides[-1]) == (32, 39)
    assert torch.equal(*(model(images(2, 39)[..., :side, :side])[1] for side in (32, 39)))
    with pytest.raises(ValueError, match="32 to 39 pixels"):
        model(images(2, 40))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"kind": "vit"}, "kind"),
        ({"image_size": 0}, "image_size"),
        ({"grids": (4,)}, "grids"),
        ({"grids": "48"}, "grids"),
        ({"grids": (2, 4.5)}, "grids"),
        ({"grids": (2, 16)}, "grids"),
        ({"kind": "deit", "grids": (4, 14)}, "grids"),
        ({"width": 9}, "width"),
        ({"n_heads": 0}, "n_heads"),
        ({"depth": 0}, "depth"),
        ({"mlp_ratio": 0}, "mlp_ratio"),
        ({"mlp_ratio": 0.01}, "mlp_ratio"),
        ({"token_width": 1}, "token_width"),
        ({"position_scale": 0}, "position_scale"),
        ({"norm_eps": -1}, "norm_eps"),
        ({"feature_width": 0}, "feature_width"),
        ({"feature_hidden": 0}, "feature_hidden"),
        ({"dropout": 1}, "dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"drop_path": 1.5}, "drop_path"),
    ],
    ids=str,
)
def test_a_bad_hyperparameter_is_refused_by_name(options, name):
    with refused(name) as error:
        on_meta(DViT, 5, **{**TINY, **options})
    assert "\n" not in str(error.value)


def test_an_error_says_which_grids_there_are():
    with pytest.raises(ValueError, match=r"got 14; the nearest are 11, 12, 16, 17\."):
        on_meta(DViT, 5, **{**TINY, "kind": "deit", "grids": (4, 14)})
