"""Distances of images: against published values, against each other's twins, and by hand."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from swiftsure import losses
from swiftsure.diffusion import Lpips, compare_images
from swiftsure.losses import MSE, SSIM
from tests.diffusion.builders import random_weights

WEIGHTS = Path(__file__).resolve().parents[2].parent / "shared" / "weights"
PUBLISHED = WEIGHTS / "lpips_alexnet.npz"
needs_weights = pytest.mark.skipif(
    not PUBLISHED.is_file(), reason=f"the published weights of LPIPS are not at {PUBLISHED}"
)


def pairs(n=3, side=32, seed=0):
    """Pairs of images in [0, 1], from near to far."""
    random = torch.Generator().manual_seed(seed)
    images, noise = torch.rand(2, n, 3, side, side, generator=random).unbind(0)
    return images, images + torch.linspace(0, 1, n).view(n, 1, 1, 1) * (noise - images)


# ------------------------------------------------------------------------------------------ LPIPS


@needs_weights
@pytest.mark.parametrize(("name", "expected"), [("p0", 0.722), ("p1", 0.138)])
def test_the_published_distances_of_the_published_examples(name, expected):
    image = pytest.importorskip("PIL.Image")
    lpips = Lpips.load(PUBLISHED)
    one, two = (
        torch.tensor(np.asarray(image.open(WEIGHTS / f"lpips_ex_{each}.png"))).permute(2, 0, 1)[
            None
        ]
        for each in ("ref", name)
    )
    assert lpips(one / 127.5 - 1, two / 127.5 - 1).item() == pytest.approx(expected, abs=1e-3)
    assert lpips(one / 255, two / 255, image_range=(0, 1)).item() == pytest.approx(
        expected, abs=1e-3
    )


class Retold(nn.Module):
    """LPIPS as its authors write it: AlexNet cut into slices, a distance after each."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, one, two):
        shift = torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1)
        scale = torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1)
        conv, pool = nn.functional.conv2d, nn.MaxPool2d(3, 2)
        features = []
        for image in (one, two):
            x, own = (image - shift) / scale, []
            for k, (number, stride, padding) in enumerate(
                [(0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1)]
            ):
                x = pool(x) if k in (1, 2) else x
                kernel = self.weights[f"net.slice{k + 1}.{number}.weight"]
                bias = self.weights[f"net.slice{k + 1}.{number}.bias"]
                x = conv(x, kernel, bias, stride, padding).relu()
                own.append(x / (x.pow(2).sum(1, keepdim=True).sqrt() + 1e-10))
            features.append(own)
        total = 0
        for k, (a, b) in enumerate(zip(*features, strict=True)):
            weight = self.weights[f"lin{k}.model.1.weight"]
            total = total + conv((a - b) ** 2, weight).mean([2, 3])[:, 0]
        return total


@pytest.mark.parametrize("style", ["lpips", "torchvision", "jax"])
def test_weights_of_every_layout_give_the_same(style):
    images, others = pairs()
    expected = Retold(random_weights())(images * 2 - 1, others * 2 - 1)
    assert expected.max() > 1  # so that clipping shows
    found = Lpips(random_weights(style))(images, others, image_range=(0, 1))
    torch.testing.assert_close(found, expected.clamp(max=1))
    assert found[0] == 0


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pth"])
def test_weights_are_read_from_files(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    weights = random_weights("jax" if suffix == ".npz" else "lpips")
    if suffix == ".npz":
        np.savez(path, **{name: value.numpy() for name, value in weights.items()})
    elif suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(weights, path)
    else:
        torch.save({"state_dict": {f"module.{k}": v for k, v in weights.items()}}, path)
    images, others = pairs()
    expected = Lpips(random_weights())(images, others)
    torch.testing.assert_close(Lpips.load(path)(images, others), expected)


def stub(monkeypatch, module, maker, weights):
    """Install a package of one network."""
    parent = module.partition(".")[0]
    made = type(maker, (nn.Module,), {"state_dict": lambda self: weights})
    found = ModuleType(module)
    setattr(found, maker, lambda **_: made())
    monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, module, found)


def test_weights_of_installed_packages(monkeypatch, tmp_path):
    images, others = pairs()
    expected = Lpips(random_weights())(images, others)
    stub(monkeypatch, "lpips", "LPIPS", random_weights())
    torch.testing.assert_close(Lpips.load()(images, others), expected)
    both = random_weights("torchvision")
    stub(
        monkeypatch,
        "torchvision.models",
        "alexnet",
        {name: value for name, value in both.items() if name.startswith("features")},
    )
    linear = {name: value for name, value in both.items() if name.startswith("lins")}
    torch.save(linear, tmp_path / "alex.pth")
    torch.testing.assert_close(Lpips.load(tmp_path / "alex.pth")(images, others), expected)
    torch.save({k: v for k, v in both.items() if k not in linear}, tmp_path / "alexnet.pth")
    apart = Lpips.load(tmp_path / "alex.pth", tmp_path / "alexnet.pth")
    torch.testing.assert_close(apart(images, others), expected)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lpips", None)
    with pytest.raises(ImportError, match=r"Lpips\.load\('FILE\.npz'\), or install lpips"):
        Lpips.load()


@pytest.mark.parametrize(
    "missing", ["net.slice3.6.weight", "net.slice2.3.bias", "lin4.model.1.weight"]
)
def test_a_tensor_that_is_missing_is_named(missing):
    weights = random_weights()
    del weights[missing]
    ours = missing.replace("net.slice3.6", "features.6").replace("net.slice2.3", "features.3")
    with pytest.raises(ValueError, match=rf"not those of LPIPS.*{ours} is missing"):
        Lpips(weights)


def test_a_tensor_of_another_shape_is_named():
    weights = random_weights()
    weights["net.slice1.0.weight"] = torch.zeros(64, 3, 3, 3)
    with pytest.raises(
        ValueError, match=r"net\.slice1\.0\.weight must have shape \(64, 3, 11, 11\)"
    ):
        Lpips(weights)


def test_files_of_something_else_are_refused(tmp_path):
    np.savez(tmp_path / "other.npz", images=np.zeros(3))
    with pytest.raises(ValueError, match=r"features\.0\.weight is missing"):
        Lpips.load(tmp_path / "other.npz")
    np.savez(tmp_path / "words.npz", names=np.asarray(["a", "b"]))
    with pytest.raises(ValueError, match=r"features\.0\.weight is missing"):
        Lpips.load(tmp_path / "words.npz")
    np.savez(tmp_path / "objects.npz", things=np.asarray([{}, None], dtype=object))
    for name in ("text.pth", "text.npz", "text.safetensors"):
        (tmp_path / name).write_text("no weights")
    for name in ("text.pth", "text.npz", "text.safetensors", "objects.npz"):
        with pytest.raises(ValueError, match=rf"{name} is not a state dict"):
            Lpips.load(tmp_path / name)
    with pytest.raises(ValueError, match=r"absent\.npz is not one"):
        Lpips.load(tmp_path / "absent.npz")


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (2, 3, 30, 32)])
def test_lpips_needs_colours_and_some_pixels(shape):
    with pytest.raises(ValueError, match="3 channels and at least 31 x 31"):
        Lpips(random_weights())(torch.zeros(shape), torch.zeros(shape))


# ------------------------------------------------------------------------------------ SSIM and MSE


def test_mse_by_hand_and_at_its_ends():
    ones = torch.ones(2, 3, 4, 4)
    assert compare_images(MSE, -ones, ones).tolist() == [1, 1]
    assert compare_images(MSE, ones, ones).tolist() == [0, 0]
    assert compare_images(MSE, ones, 0 * ones, image_range=(0, 1)).tolist() == [1, 1]
    assert compare_images(MSE, ones, 0 * ones).tolist() == [0.25, 0.25]


def test_ssim_at_its_ends():
    images, _ = pairs()
    assert compare_images(SSIM, images, images).abs().max() < 1e-12
    board = (torch.arange(32)[:, None] + torch.arange(32)) % 2 * 1.0
    board = board.expand(1, 3, 32, 32)
    assert compare_images(SSIM, board, 1 - board, image_range=(0, 1)).item() == pytest.approx(
        1, abs=0.01
    )


def test_ssim_by_the_published_formula():
    """At one place, with one window: an image as large as the window."""
    x, y = pairs(1, side=11, seed=3)[0], pairs(1, side=11, seed=4)[0]
    bell = torch.exp(-((torch.arange(11.0) - 5) ** 2) / (2 * 1.5**2))
    w = bell[:, None] * bell / bell.sum() ** 2

    def mean(values):
        return (w * values).sum((2, 3))

    a, b = mean(x), mean(y)
    va, vb, both = mean(x * x) - a**2, mean(y * y) - b**2, mean(x * y) - a * b
    c1, c2 = 0.01**2, 0.03**2
    ssim = (2 * a * b + c1) * (2 * both + c2) / ((a**2 + b**2 + c1) * (va + vb + c2))
    expected = (1 - ssim.mean()) / 2
    assert compare_images(SSIM, x, y, image_range=(0, 1)).item() == pytest.approx(
        expected.item(), abs=1e-5
    )


def test_names_and_ranges():
    for loss in (losses.MSE, losses.SSIM, losses.LPIPS, Lpips(random_weights())):
        assert losses.LOSSES[loss.name].range == loss.range == losses.LossRange(0, 1)


def test_bytes_are_images_too():
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 3, 12, 12), np.uint8)
    np.testing.assert_allclose(
        losses.MSE.against_last(images), losses.MSE.against_last(images / 255)
    )


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("loss", [MSE, SSIM], ids=["mse", "ssim"])
@pytest.mark.parametrize(
    ("value", "image_range"), [(-0.1, (0, 1)), (1.1, (0, 1)), (-1.1, (-1, 1)), (255, (-1, 1))]
)
def test_pixels_outside_of_the_declared_range_are_refused(loss, value, image_range):
    images = torch.zeros(1, 3, 16, 16)
    bad = images.clone()
    bad[0, 0, 0, 0] = value
    for pair, name in (((bad, images), "images"), ((images, bad), "others")):
        with pytest.raises(ValueError, match=f"`{name}` must lie in"):
            compare_images(loss, *pair, image_range=image_range)


def test_other_declared_ranges_nan_and_shapes_are_refused():
    images = torch.zeros(1, 3, 16, 16)
    with pytest.raises(ValueError, match=r"`image_range` must be \(-1, 1\) or \(0, 1\)"):
        compare_images(MSE, images, images, image_range=(0, 255))
    with pytest.raises(ValueError, match="`images` must lie in"):
        compare_images(MSE, images + torch.nan, images)
    for other in (torch.zeros(2, 3, 16, 16), torch.zeros(3, 16, 16), torch.zeros(1, 3, 16, 15)):
        with pytest.raises(ValueError, match="must have one shape"):
            compare_images(MSE, images, other)
    with pytest.raises(ValueError, match="must have one shape"):
        compare_images(MSE, images[0], images[0])
    with pytest.raises(ValueError, match="at least 11 pixels"):
        compare_images(SSIM, images[..., :10], images[..., :10])


def test_what_is_no_tensor_and_no_range_is_refused():
    images = torch.zeros(1, 3, 12, 12)
    with pytest.raises(
        TypeError, match=r"`others` must be a tensor, .* ndarray: torch\.from_numpy"
    ):
        compare_images(MSE, images, images.numpy())
    for image_range in (None, (0, 255), 1):
        with pytest.raises(ValueError, match=r"`image_range` must be \(-1, 1\) or \(0, 1\)"):
            compare_images(MSE, images, images, image_range=image_range)


def test_arrays_that_are_no_images_are_refused():
    images = np.zeros((2, 3, 3, 12, 12))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        losses.MSE.against_last(images - 1)
    with pytest.raises(ValueError, match="`predictions` must be images of shape"):
        losses.MSE.against_last(images[0])
    with pytest.raises(ValueError, match="`labels` must be one image a sample"):
        losses.MSE.against_labels(images, images[:1, 0])
    with pytest.raises(ValueError, match="at least 11 pixels"):
        losses.SSIM.against_last(images[..., :9])
    with pytest.raises(ValueError, match=r"'lpips' .* set the field `against_last`"):
        losses.LPIPS.function("against_last")


def test_small_images_are_enlarged_if_so_wished():
    torch.manual_seed(0)
    images = torch.rand(2, 3, 32, 40)
    others = (images + 0.05 * torch.rand(2, 3, 32, 40)).clamp(0, 1)  # near: far ones are clipped
    plain, larger = Lpips(random_weights()), Lpips(random_weights(), side=64)
    assert (plain.name, larger.name) == ("lpips", "lpips_64")
    enlarged = (
        torch.nn.functional.interpolate(each, size=(64, 80), mode="bilinear")
        for each in (images, others)
    )
    options = {"image_range": (0, 1)}
    found = larger(images, others, **options)
    torch.testing.assert_close(found, plain(*enlarged, **options))
    assert (found > 0).all()
    assert (found < 1).all()
    assert (found - plain(images, others, **options)).abs().min() > 1e-3
    big = torch.rand(2, 3, 64, 70)
    pair = big, (big + 0.05 * torch.rand(2, 3, 64, 70)).clamp(0, 1)
    torch.testing.assert_close(larger(*pair, **options), plain(*pair, **options))
    assert (larger(*pair, **options) < 1).all()
    tiny = torch.rand(2, 2, 3, 8, 8)
    assert larger(*tiny, **options).shape == (2,)
    with pytest.raises(ValueError, match=r"3 channels .* but got \(1, 8, 8\)"):
        larger(*tiny[:, :, :1], **options)
    with pytest.raises(ValueError, match="`side` must be"):
        Lpips(random_weights(), side=8)
