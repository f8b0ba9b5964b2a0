"""Images in folders: labels by the order of the names, prepared as published networks expect."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from swiftsure_zoo.readers.folders import IMAGENET_MEAN, IMAGENET_STD, ImageFolder, centred


def write(path, color, size=(300, 260)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "n02000000" / "ILSVRC2012_val_00000002.JPEG", "blue")
    write(tmp_path / "n01440764" / "ILSVRC2012_val_00000003.JPEG", "red")
    write(tmp_path / "n01440764" / "ILSVRC2012_val_00000001.JPEG", "black", (224, 500))
    (tmp_path / "n01440764" / "list.txt").write_text("no image")
    return tmp_path


def test_labels_follow_the_names_of_the_folders(folder):
    images = ImageFolder(folder)
    assert images.classes == ["n01440764", "n02000000"]
    assert [(path.name[-6], label) for path, label in images.files] == [
        ("1", 0),
        ("3", 0),
        ("2", 1),
    ]
    batch, labels = next(iter(DataLoader(images, batch_size=3)))
    assert batch.shape == (3, 3, 224, 224)
    assert labels.tolist() == [0, 0, 1]
    black = -torch.tensor(IMAGENET_MEAN) / torch.tensor(IMAGENET_STD)
    assert batch[0].amax(dim=(1, 2)).tolist() == pytest.approx(black.tolist(), abs=1e-5)


def test_the_middle_is_kept():
    """A gradient from left to right keeps its value in the middle, and loses both sides."""
    ramp = np.tile(np.arange(512, dtype=np.uint8) // 2, (256, 1))
    image = Image.fromarray(np.stack([ramp] * 3, axis=2))
    kept = centred(image, mean=(0, 0, 0), std=(1, 1, 1))[0] * 255
    assert kept.shape == (224, 224)
    expected = (np.arange(512, dtype=np.uint8) // 2)[144 : 144 + 224]
    np.testing.assert_allclose(kept[0].numpy(), expected, atol=0.01)


@pytest.mark.parametrize("size", [(300, 260), (260, 300), (256, 256), (100, 700), (64, 64)])
def test_every_size_becomes_one(size):
    assert centred(Image.new("RGB", size)).shape == (3, 224, 224)
    assert centred(Image.new("RGB", size), size=32, shorter=32).shape == (3, 32, 32)


def test_own_preparation(folder):
    images = ImageFolder(folder, prepare=lambda image: torch.tensor(image.size))
    assert images[0][0].tolist() == [224, 500]


def test_grey_images_have_three_channels(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("L", (256, 256), 128).save(tmp_path / "a" / "grey.png")
    assert ImageFolder(tmp_path)[0][0].shape == (3, 224, 224)


def test_folders_that_are_none(tmp_path, folder):
    with pytest.raises(ValueError, match="`folder` must be an existing folder"):
        ImageFolder(tmp_path / "no")
    (tmp_path / "flat").mkdir()
    write(tmp_path / "flat" / "ILSVRC2012_val_00000001.JPEG", "red")
    with pytest.raises(ValueError, match=r"`folder` .* sort them by their ground truth"):
        ImageFolder(tmp_path / "flat")
    (tmp_path / "empty" / "n01440764").mkdir(parents=True)
    with pytest.raises(ValueError, match="`folder` must hold images"):
        ImageFolder(tmp_path / "empty")


def test_a_broken_image_is_named(folder):
    (folder / "n02000000" / "ILSVRC2012_val_00000002.JPEG").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ValueError, match=r"00000002\.JPEG is not a readable image"):
        ImageFolder(folder)[2]


def test_a_side_that_is_too_short():
    with pytest.raises(ValueError, match="`shorter` must be at least `size`, 224"):
        centred(Image.new("RGB", (10, 10)), shorter=100)
