"""Road scenes: small files in the published layouts, and CamVid itself where it is at hand."""

import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from swiftsure.losses import VOID
from swiftsure.torch import collect
from swiftsure_zoo import ADPC
from swiftsure_zoo.readers.folders import IMAGENET_MEAN, IMAGENET_STD
from swiftsure_zoo.readers.road_scenes import (
    CAMVID_CLASSES,
    CITYSCAPES_CLASSES,
    GTA5,
    CamVid,
    Cityscapes,
)

REAL_CAMVID = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "camvid"


def write_image(path, size=(8, 4), color=(255, 0, 0)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def write_label(path, numbers, *, palette=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(numbers, np.uint8))
    if palette:
        image.putpalette([value for k in range(256) for value in (k, 0, 255 - k)])
        assert image.mode == "P"
    image.save(path)


def numbers(*values, size=(8, 4)):
    """A label of the size, which begins with these values and is full of the last."""
    width, height = size
    flat = [*values, *[values[-1]] * (width * height - len(values))]
    return np.reshape(flat, (height, width))


# ------------------------------------------------------------------------------------ cityscapes


def cityscapes(root, kind="labelIds", values=(7, 8, 33, 0, 5, 31), split="val"):
    for name in ("munster_000001_000019", "lindau_000000_000019", "lindau_000000_000020"):
        city = name.split("_")[0]
        write_image(root / "leftImg8bit" / split / city / f"{name}_leftImg8bit.png")
        write_label(root / "gtFine" / split / city / f"{name}_gtFine_{kind}.png", numbers(*values))
    return root


def test_cityscapes(tmp_path):
    scenes = Cityscapes(cityscapes(tmp_path), "val")
    assert len(scenes) == 3
    assert scenes.ids == ["lindau_000000_000019", "lindau_000000_000020", "munster_000001_000019"]
    assert scenes.groups == ["lindau_000000", "lindau_000000", "munster_000001"]
    image, label, name = scenes[2]
    assert name == "munster_000001_000019"
    assert image.shape == (3, 4, 8)
    red = (torch.tensor([1.0, 0, 0]) - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    torch.testing.assert_close(image[:, 1, 1], red)
    assert label.dtype == torch.int64
    assert label[0].tolist() == [0, 1, 18, VOID, VOID, 16, 16, 16]


def test_every_label_id_of_cityscapes(tmp_path):
    """The published table: 19 ids that count, among 34."""
    counted = [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]
    ids = numbers(*range(34), 255, size=(8, 5))
    for path in (root := cityscapes(tmp_path)).rglob("*_labelIds.png"):
        write_label(path, ids)
    for path in root.rglob("*_leftImg8bit.png"):
        write_image(path, (8, 5))
    found = Cityscapes(root)[0][1].flatten()[:35].tolist()
    expected = [counted.index(k) if k in counted else VOID for k in [*range(34), 255]]
    assert found == expected
    assert len(CITYSCAPES_CLASSES) == 19
    assert CITYSCAPES_CLASSES[found[26]] == "car"


def test_cityscapes_with_train_ids(tmp_path):
    root = cityscapes(tmp_path, "labelTrainIds", (0, 18, 255))
    assert Cityscapes(root)[0][1][0, :3].tolist() == [0, 18, VOID]
    cityscapes(tmp_path)  # label ids go first where both are there
    assert Cityscapes(root)[0][1][0, :3].tolist() == [0, 1, 18]


def test_cityscapes_that_lacks_something(tmp_path):
    with pytest.raises(ValueError, match="`root` must hold leftImg8bit/val"):
        Cityscapes(tmp_path)
    root = cityscapes(tmp_path)
    with pytest.raises(ValueError, match="`root` must hold leftImg8bit/train"):
        Cityscapes(root, "train")
    lost = next(root.rglob("lindau_000000_000020_gtFine_labelIds.png"))
    lost.unlink()
    with pytest.raises(ValueError, match=r"lindau_000000_000020_gtFine_labelIds.png is missing"):
        Cityscapes(root)
    write_label(lost.with_name(lost.name.replace("labelIds", "labelTrainIds")), numbers(0))
    with pytest.raises(ValueError, match="has each for some"):
        Cityscapes(root)


@pytest.mark.parametrize(("kind", "value"), [("labelIds", 40), ("labelTrainIds", 19)])
def test_a_number_that_is_no_label_is_named(tmp_path, kind, value):
    scenes = Cityscapes(cityscapes(tmp_path, kind, (0, value)))
    with pytest.raises(
        ValueError, match=rf"lindau_\w+.png must hold labels among 0-.* but has {value}"
    ):
        scenes[0]


def test_labels_in_colour_are_refused(tmp_path):
    root = cityscapes(tmp_path)
    for path in root.rglob("*_labelIds.png"):
        write_image(path)
    with pytest.raises(ValueError, match=r"must hold class numbers, .* mode RGB"):
        Cityscapes(root)[0]


# ------------------------------------------------------------------------------------------ gta5


def gta5(root, n=3):
    for k in range(1, n + 1):
        write_image(root / "images" / f"{k:05d}.png", (64, 40))
        ids = numbers(7, 26, 34, 4, size=(64, 40))
        write_label(root / "labels" / f"{k:05d}.png", ids, palette=True)
    return root


def test_gta5(tmp_path):
    scenes = GTA5(gta5(tmp_path))
    assert scenes.ids == ["00001", "00002", "00003"]
    assert scenes.groups is None
    image, label, name = scenes[1]
    assert (image.shape, label.shape, name) == ((3, 40, 64), (40, 64), "00002")
    assert label[0, :4].tolist() == [0, 13, VOID, VOID]
    assert scenes.classes == CITYSCAPES_CLASSES
    assert "groups" not in scenes.collate([scenes[0], scenes[1]])


def test_a_split_of_gta5(tmp_path):
    assert GTA5(gta5(tmp_path), ["00003", "00001"]).ids == ["00003", "00001"]
    with pytest.raises(ValueError, match=r"`names` must name images in .* but '00009' is not"):
        GTA5(tmp_path, ["00009"])


@pytest.mark.parametrize("palette", [True, False])
def test_labels_of_nearly_the_images_size_are_fitted_to_it(tmp_path, palette):
    root = gta5(tmp_path)
    left_and_right = np.repeat([[7, 26]], [20, 46], axis=1).repeat(41, axis=0)  # (41, 66)
    write_label(root / "labels" / "00002.png", left_and_right, palette=palette)
    write_label(root / "labels" / "00003.png", numbers(7, size=(64, 44)), palette=True)
    scenes = GTA5(root)
    label = scenes[1][1]  # between 7 and 26 there are other classes, which must not appear
    assert label.shape == (40, 64)
    assert set(label.unique().tolist()) == {0, 13}
    assert (label[:, :19] == 0).all()
    assert (label[:, 20:] == 13).all()
    with pytest.raises(ValueError, match=r"00003.png has size \(64, 44\), .* \(64, 40\)"):
        scenes[2]


# ---------------------------------------------------------------------------------------- camvid

FRAMES = ["0001TP_006690", "0001TP_006720", "0006R0_f00930", "Seq05VD_f00000"]


def camvid(root, images="images", labels="labels", suffix="jpg"):
    for name in FRAMES:
        write_image(root / images / f"{name}.{suffix}")
        write_label(root / labels / f"{name}.png", numbers(0, 5, 10, 11))
    return root


def zipped(folder, path):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.*")):
            archive.write(file, file.relative_to(folder).as_posix())
    return path


@pytest.fixture(params=["folder", "zip", "zips", "segnet"])
def camvid_root(request, tmp_path):
    if request.param == "segnet":
        camvid(tmp_path, "test", "testannot", "png")
        return camvid(tmp_path, "val", "valannot", "png")
    folder = camvid(tmp_path / "unpacked")
    if request.param == "folder":
        return folder
    archive = zipped(folder, tmp_path / "val.zip")
    return archive if request.param == "zip" else tmp_path


@pytest.mark.parametrize("n_workers", [0, 2])
def test_camvid_in_all_its_layouts(camvid_root, n_workers):
    scenes = CamVid(camvid_root, "val")
    assert scenes.ids == FRAMES
    assert scenes.groups == ["0001TP", "0001TP", "0006R0", "Seq05VD"]
    loader = DataLoader(scenes, batch_size=3, num_workers=n_workers, collate_fn=scenes.collate)
    first, last = loader
    assert first["inputs"].shape == (3, 3, 4, 8)
    assert first["labels"][:, 0, :4].tolist() == [[0, 5, 10, VOID]] * 3
    assert first["ids"] == FRAMES[:3]
    assert first["groups"] == ["0001TP", "0001TP", "0006R0"]
    assert last["groups"] == ["Seq05VD"]


def test_images_are_resized_and_labels_are_not(tmp_path):
    image, label, _ = CamVid(camvid(tmp_path), size=(32, 64))[0]
    assert image.shape == (3, 32, 64)
    assert label.shape == (4, 8)


def test_images_of_several_sizes_are_refused_with_a_way_out(tmp_path):
    write_image(camvid(tmp_path) / "images" / f"{FRAMES[1]}.jpg", (16, 8))
    write_label(tmp_path / "labels" / f"{FRAMES[1]}.png", numbers(0, size=(16, 8)))
    scenes = CamVid(tmp_path)
    loader = DataLoader(scenes, batch_size=4, collate_fn=scenes.collate)
    with pytest.raises(
        ValueError,
        match=r"images .* 0001TP_006690 has \(4, 8\) and 0001TP_006720 \(8, 16\): .*`size`",
    ):
        next(iter(loader))
    scenes = CamVid(tmp_path, size=(32, 32))
    with pytest.raises(ValueError, match=r"labels of a batch .* load one at a time\."):
        next(iter(DataLoader(scenes, batch_size=4, collate_fn=scenes.collate)))
    assert len(list(DataLoader(scenes, batch_size=1, collate_fn=scenes.collate))) == 4


def test_camvid_that_lacks_something(tmp_path):
    with pytest.raises(ValueError, match="`root` must be a folder or a zip file"):
        CamVid(tmp_path / "no")
    with pytest.raises(ValueError, match=r"`root` must hold val/NAME\.png or \.jpg"):
        CamVid(tmp_path)
    (camvid(tmp_path) / "labels" / f"{FRAMES[2]}.png").unlink()
    with pytest.raises(ValueError, match=r"0006R0_f00930\.png is missing"):
        CamVid(tmp_path)


def test_a_broken_file_is_named(tmp_path):
    (camvid(tmp_path) / "images" / f"{FRAMES[0]}.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(ValueError, match=r"0001TP_006690\.jpg is not a readable image"):
        CamVid(tmp_path)[0]


def test_a_size_that_is_none(tmp_path):
    with pytest.raises(ValueError, match="`size` must be at least 1"):
        CamVid(camvid(tmp_path), size=(0, 4))


def small_network():
    torch.manual_seed(0)
    small = {"first_width": 4, "widths": (4, 4, 4, 4), "n_modules": (1, 1, 1)}
    return ADPC(len(CAMVID_CLASSES), n_blocks=(1, 1, 1, 1), head_width=4, **small).eval()


def test_from_files_to_a_record(tmp_path):
    scenes = CamVid(camvid(tmp_path), size=(32, 64))
    loader = DataLoader(scenes, batch_size=2, collate_fn=scenes.collate)
    record = collect(small_network(), loader, ["miou"], ["mean_top1"])
    assert record.ids.tolist() == FRAMES
    assert record.groups.tolist() == scenes.groups
    plain = collect(small_network(), DataLoader(scenes, batch_size=2), ["miou"], ["mean_top1"])
    assert plain.groups is None
    assert np.array_equal(plain.losses["miou"], record.losses["miou"])


@pytest.mark.skipif(not REAL_CAMVID.is_dir(), reason=f"CamVid is not at {REAL_CAMVID}")
@pytest.mark.parametrize(
    ("split", "videos"),
    [
        ("train", {"0001TP": 62, "0006R0": 101, "0016E5": 204}),
        ("val", {"0016E5": 101}),
        ("test", {"0001TP": 62, "Seq05VD": 171}),
    ],
)
def test_camvid_itself(split, videos):
    scenes = CamVid(REAL_CAMVID, split)
    assert Counter(scenes.groups) == videos
    shown = np.zeros(len(CAMVID_CLASSES))
    for index in range(0, len(scenes), 25):
        image, label, _ = scenes[index]
        assert image.shape == (3, 360, 480)
        assert label.shape == (360, 480)
        inside = label[label != VOID]
        assert 0.8 < len(inside) / label.numel() <= 1
        shown += np.bincount(inside, minlength=len(CAMVID_CLASSES))
    share = dict(zip(CAMVID_CLASSES, shown / shown.sum(), strict=True))
    assert share["road"] > 0.15  # that the names are in the right order
    assert share["building"] > 0.1
    assert share["pole"] < 0.03
    loader = DataLoader(
        torch.utils.data.Subset(CamVid(REAL_CAMVID, split, size=(64, 96)), range(4)),
        batch_size=2,
        collate_fn=scenes.collate,
    )
    record = collect(small_network(), loader, ["miou", "pixel_brier"], ["patch_top1"])
    assert record.n == 4
    assert (record.losses["miou"] > 0.5).all()  # an untrained network knows nothing
