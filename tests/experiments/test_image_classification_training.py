"""Experiments: their data are read in each published layout, and every recipe trains."""

import gzip
import importlib
import io
import json
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from PIL import Image  # noqa: E402 (comes with PyTorch's extra)

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "image_classification"
RECIPES = sorted((FOLDER / "recipes").glob("*.toml"))


@pytest.fixture
def load(monkeypatch):
    """Import a module of the experiment, as its scripts do."""
    monkeypatch.syspath_prepend(str(FOLDER.parents[1]))
    shared = ("augment", "commands", "training")
    return lambda name: importlib.import_module(
        f"experiments.{name}" if name in shared else f"experiments.image_classification.{name}"
    )


def pixels(n, side, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, 3, side, side), np.uint8)


def test_both_layouts_of_cifar10_hold_the_same(load, tmp_path):
    images, labels = pixels(20, 32), np.arange(20) % 10
    binary, png = tmp_path / "binary", tmp_path / "png"
    binary.mkdir()
    png.mkdir()
    rows = np.concatenate([labels[:, None].astype(np.uint8), images.reshape(20, -1)], axis=1)
    rows.tofile(binary / "test_batch.bin")
    Image.fromarray(images.transpose(0, 2, 3, 1).reshape(20, 1024, 3)).save(png / "test_batch.png")
    (png / "test_lables.json").write_text(json.dumps(labels.tolist()))
    for folder in (binary, png):
        part = load("data").cifar10(folder, "test")
        np.testing.assert_array_equal(part.images, images)
        np.testing.assert_array_equal(part.labels, labels)
    with pytest.raises(
        FileNotFoundError, match=r"must hold data_batch_1\.bin or data_batch_1\.png"
    ):
        load("data").cifar10(binary, "train")


def test_fashion_mnist_is_read_from_its_idx_files(load, tmp_path):
    images, labels = pixels(20, 28)[:, :1], np.arange(20, dtype=np.uint8) % 10
    header = np.asarray([2051, 20, 28, 28], ">u4").tobytes()
    file = gzip.compress(header + images.tobytes())
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(file)
    with pytest.raises(FileNotFoundError, match=r"must hold t10k-labels-idx1-ubyte\.gz"):
        load("data").fashion_mnist(tmp_path, "test")
    file = gzip.compress(np.asarray([2049, 20], ">u4").tobytes() + labels.tobytes())
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(file)
    part = load("data").fashion_mnist(tmp_path, "test")
    np.testing.assert_array_equal(part.images, images.repeat(3, axis=1))
    assert part.labels.tolist() == labels.tolist()


def test_tiny_imagenet_is_read_from_its_archives(load, tmp_path):
    for k in range(2):
        with zipfile.ZipFile(tmp_path / f"train-{k}.zip", "w") as archive:
            for label in range(3):
                file = io.BytesIO()
                Image.new("RGB", (64, 64), (100 * k, 80 * label, 0)).save(file, "JPEG")
                archive.writestr(f"{label:03d}/n{k}.JPEG", file.getvalue())
    part = load("data").tiny_imagenet_100(tmp_path, "train")
    assert part.images.shape == (6, 3, 64, 64)
    assert part.labels.tolist() == [0, 1, 2, 0, 1, 2]
    rest, held = part.split(2, seed=0)
    assert (len(rest.labels), len(held.labels)) == (4, 2)
    with pytest.raises(FileNotFoundError, match="zip file of the part 'test'"):
        load("data").tiny_imagenet_100(tmp_path, "test")


def test_images_are_shifted_mirrored_and_cut(load):
    x = torch.arange(2 * 3 * 16 * 16).float().view(2, 3, 16, 16) + 1
    random = torch.Generator().manual_seed(0)
    out = load("augment").augmented(x, {"padding": 2, "hole": 6}, random)
    assert out.shape == x.shape
    assert 0 < (out == 0).float().mean() < 0.3
    assert set(out.unique().tolist()) - {0.0} <= set(x.unique().tolist())


def test_crops_are_of_the_image_and_at_their_largest_the_image_itself(load):
    x = torch.rand(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(0)
    crops = load("augment").cropped(x, 0.3, random)
    assert crops.shape == x.shape
    assert crops.min() >= x.min()
    assert crops.max() <= x.max()
    ramp = torch.linspace(0, 1, 16).expand(64, 3, 16, 16).contiguous()
    slopes = load("augment").cropped(ramp, 0.3, random).diff(dim=-1)[:, 0, 8, 8] * 15
    assert slopes.abs().max() <= 1.01  # enlarged, never shrunk
    assert slopes.abs().min() >= 0.3
    assert 16 <= (slopes < 0).sum() <= 48  # mirrored
    plain = {"smallest_crop": 1.0, "shading": 0.0, "hole": 0}
    whole = load("augment").augmented(torch.ones_like(x) * x[:, :, :1, :1], plain, random)
    torch.testing.assert_close(whole, x[:, :, :1, :1].expand_as(x))


@pytest.mark.parametrize("plan", [{"cutmix": 1.0}, {"mixup": 0.4}, {"cutmix": 1.0, "mixup": 0.4}])
def test_mixed_targets_say_what_share_of_an_image_is_whose(load, plan):
    x = torch.eye(8).view(8, 8, 1, 1).expand(8, 8, 32, 32)  # channel k: the share of image k
    for seed in range(5):
        torch.manual_seed(seed)
        random = torch.Generator().manual_seed(seed)
        images, targets = load("augment").mixed(x, torch.eye(8), plan, random)
        torch.testing.assert_close(images.mean(dim=(2, 3)), targets)


def small_network(load, folder, name="known", n_classes=3):
    """A network of 48 x 48 pixels, as a training leaves it."""
    shape = {"kind": "deit", "image_size": 48, "grids": [2, 3], "width": 8, "depth": 1}
    recipe = {
        "name": name,
        "data": {"size": 48},
        "model": {"name": "DViT", "n_classes": n_classes, "n_heads": 2, **shape},
    }
    torch.manual_seed(0)
    network = load("networks").build(recipe).eval()
    load("commands").save(network, {"recipe": recipe}, folder, half=False)
    return network


def test_a_teacher_answers_at_its_own_size_and_does_not_learn(load, tmp_path):
    train = load("train")
    known = small_network(load, tmp_path)
    learner = torch.nn.Module()
    learner.forward = lambda images: [images.mean(dim=(2, 3)), images.amax(dim=(2, 3))]
    taught = train.Taught(learner, train.Teacher(tmp_path, "known"))
    images = torch.randn(4, 3, 48, 48)
    *own, lesson = taught(images)
    assert len(own) == 2
    torch.testing.assert_close(lesson, known(images)[-1])
    assert not lesson.requires_grad
    assert taught(torch.randn(4, 3, 32, 32))[-1].shape == (4, 3)  # enlarged
    with pytest.raises(FileNotFoundError, match="train absent first"):
        train.Teacher(tmp_path, "absent")


def test_what_exits_learn_from(load):
    loss_of, random = load("train").sum_over_exits, torch.Generator().manual_seed(0)
    first, last, lesson = torch.randn(3, 8, 5, generator=random).unbind()
    targets = torch.eye(5)[torch.arange(8) % 5]
    entropy = torch.nn.functional.cross_entropy
    for distilled, taught in [(0.0, 0.0), (0.5, 0.0), (0.0, 0.25), (0.5, 0.25)]:
        goal = (1 - taught) * targets + taught * lesson.softmax(1)
        earlier = (1 - distilled) * goal + distilled * last.softmax(1)
        outputs = [first, last, lesson] if taught else [first, last]
        expected = entropy(first, earlier) + entropy(last, goal)
        torch.testing.assert_close(loss_of(0.0, distilled, taught)(outputs, targets), expected)


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_trains_and_is_recorded(load, tmp_path, monkeypatch, path):
    """On a few images, for an epoch: the network is the recipe's own."""
    train, data = load("train"), load("data")
    recipe = tomllib.loads(path.read_text())
    side = {"cifar10": 32, "fashion_mnist": 28}.get(recipe["data"]["name"], 64)
    labels = torch.arange(24) % recipe["model"]["n_classes"]
    part = data.Images(torch.from_numpy(pixels(24, side)), labels)
    monkeypatch.setitem(data.DATA_SETS, recipe["data"]["name"], lambda folder, which: part)
    monkeypatch.setattr(train, "HERE", tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / path.name).write_text(
        path.read_text().replace(f"batch = {recipe['training']['batch']}", "batch = 8")
    )
    teacher = recipe["training"].get("teacher")
    if teacher is not None:
        small_network(load, tmp_path / "teachers", teacher, recipe["model"]["n_classes"])
    arguments = ["train", path.stem, "--data", ".", "--output", str(tmp_path), "--epochs", "1"]
    monkeypatch.setattr(
        sys, "argv", [*arguments, "--holdout", "8", "--teachers", str(tmp_path / "teachers")]
    )
    train.main()
    report = json.loads((tmp_path / f"{path.stem}.json").read_text())
    assert len(report["held_out_accuracy"]) >= 2
    monkeypatch.setattr(sys, "argv", ["records", "--results", str(tmp_path), "--data", "."])
    load("records").main()
    report = json.loads((tmp_path / f"{path.stem}.json").read_text())
    assert len(report["test_accuracy"]) == len(report["flops"])
    assert (np.diff(report["flops"]) > 0).all()
    assert (tmp_path / f"{path.stem}.parquet").is_file()


def test_relative_rates_follow_the_size_of_what_they_change(load):
    training = load("training")
    large, small = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    for layer, size in ((large, 1.0), (small, 0.01)):
        torch.nn.init.constant_(layer.weight, size)
        torch.nn.init.zeros_(layer.bias)
    model = torch.nn.Sequential(large, small)
    plan = {"epochs": 2, "lr": 0.1, "weight_decay": 0.01, "averaged_epochs": 1}
    plan |= {"optimizer": "adamw", "relative": True}
    optimizer = training.make_optimizer(model, plan)
    rates = []

    def step(_inputs, _targets):
        found = {id(group["params"][0]): group["lr"] for group in optimizer.param_groups}
        rates.append([found[id(layer.weight)] for layer in (large, small)])
        small.weight.data.fill_(0.02)
        return torch.tensor(1.0)

    batch = (torch.zeros(1), torch.zeros(1))
    training.fit("small", model, optimizer, plan, step, lambda: [batch], 1)
    assert [a / b for a, b in rates] == pytest.approx([100, 50])
    # Weights of like size share a group, and biases, which start as zeros, have one that is not 0.
    decays = {len(g["params"]): g["weight_decay"] for g in optimizer.param_groups}
    assert decays == {1: 0.01, 2: 0.0}
    assert training.root_mean_square([large.bias]) == 1e-3


def test_a_training_that_diverges_stops_after_its_epoch(load):
    training = load("training")
    model = torch.nn.Linear(2, 1)
    plan = {"epochs": 50, "lr": 0.1, "weight_decay": 0.0, "averaged_epochs": 1}
    optimizer = training.make_optimizer(model, plan)
    batch = (torch.zeros(4, 2), torch.zeros(4))
    epochs = []

    def epoch():
        epochs.append(None)
        return [batch, batch]

    def step(_inputs, _targets):
        return torch.tensor(float("nan") if len(epochs) == 2 else 1.0)

    with pytest.raises(FloatingPointError, match="small: the loss of epoch 2 is nan"):
        training.fit("small", model, optimizer, plan, step, epoch, 2)
    assert len(epochs) == 2
