"""The segmentation experiment: scenes are zoomed with their labels, and recipes train."""

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
from safetensors.torch import save_file  # noqa: E402

from swiftsure import ExitRecord  # noqa: E402
from swiftsure_zoo import ADPC  # noqa: E402
from swiftsure_zoo.readers.road_scenes import CamVid  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
VOID = 255


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"experiments.segmentation.{name}")


def test_labels_stay_with_what_they_label(load):
    labels = torch.randint(0, 5, (32, 3, 4)).repeat_interleave(16, 1).repeat_interleave(16, 2)
    images = labels[:, None].float().expand(-1, 3, -1, -1).half()
    random = torch.Generator().manual_seed(0)
    seen, found = load("train").zoomed(images, labels.to(torch.uint8), (0.5, 2.0), random)
    inside = found != VOID
    assert 0.3 < inside.float().mean() < 0.999  # some were zoomed out of
    close = (seen[:, 0] - found).abs()[inside] < 0.01
    assert close.float().mean() > 0.8  # but for the edges, which are interpolated
    assert (found.unique() <= 4).sum() == 5


def test_rare_classes_weigh_more_and_void_nothing(load):
    labels = torch.tensor([[0] * 90 + [1] * 10 + [VOID] * 50], dtype=torch.uint8)
    weights = load("train").class_weights(labels, 2)
    assert weights[1] > 2 * weights[0]
    assert float(weights.mean()) == pytest.approx(1.0)


def test_the_score_is_that_of_the_whole_part(load):
    """IoUs of classes over all images, and not the mean over images."""

    class Fixed(torch.nn.Module):
        n_exits = 1

        def forward(self, images):
            return [torch.stack([images[:, 0], 1 - images[:, 0]], dim=1)]

    truth = torch.tensor([[[0, 0, 1, 1]], [[0, 1, 1, VOID]]], dtype=torch.uint8)
    says = torch.tensor([[[1.0, 1, 1, 0]], [[1, 0, 0, 0]]])[:, None].expand(-1, 3, -1, -1)
    part = load("data").Scenes(says, truth)
    # Class 0: 3 right of 3 true and 4 said; class 1: 3 right of 4 true and 3 said.
    assert load("train").mean_ious(Fixed(), part, 2) == [0.75]


def archive(path, n, seed):
    rng = np.random.default_rng(seed)
    with zipfile.ZipFile(path, "w") as file:
        for i in range(n):
            label = rng.integers(0, 12, (6, 8)).repeat(12, 0).repeat(12, 1).astype(np.uint8)
            for kind, array, form in (
                ("images", rng.integers(0, 256, (*label.shape, 3), np.uint8), "jpg"),
                ("labels", label, "png"),
            ):
                held = io.BytesIO()
                Image.fromarray(array).save(held, {"jpg": "JPEG", "png": "PNG"}[form])
                file.writestr(f"{kind}/0001TP_{i:06d}.{form}", held.getvalue())


def test_scenes_are_held_in_their_order_however_many_are_read_ahead(load, tmp_path, monkeypatch):
    archive(tmp_path / "val.zip", 5, 0)
    scenes = CamVid(tmp_path, "val", size=(32, 64))
    monkeypatch.setattr(load("data"), "AHEAD", 2)
    held = load("data").in_memory(scenes, "cpu")
    assert held.labels.shape == (5, 32, 64)
    for i, image in enumerate(held.images):
        assert torch.equal(image, scenes[i][0].half())


@pytest.mark.slow
def test_the_recipe_of_camvid_trains_and_is_recorded(load, tmp_path, monkeypatch):
    for k, split in enumerate(("train", "val", "test")):
        archive(tmp_path / f"{split}.zip", 4, k)
    train = load("train")
    recipe = (ROOT / "experiments/segmentation/recipes/adp_c_camvid.toml").read_text()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(
        recipe.replace("[352, 480]", "[64, 96]").replace("batch = 16", "batch = 2")
    )
    monkeypatch.setattr(train, "HERE", tmp_path)
    common = ["--data", str(tmp_path)]
    arguments = ["train", "tiny", *common, "--output", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", [*arguments, "--epochs", "1", "--holdout"])
    train.main()
    report = json.loads((tmp_path / "results" / "tiny.json").read_text())
    assert len(report["held_out_miou"]) == 4
    assert report["images"] == 4
    monkeypatch.setattr(sys, "argv", ["records", *common, "--results", str(tmp_path / "results")])
    load("records").main()
    record = ExitRecord.load(tmp_path / "results" / "tiny.parquet")
    assert record.n == 4
    assert len(record.confidences) == 9
    with np.load(tmp_path / "results" / "tiny.npz") as arrays:
        assert arrays["early_predictions"].shape == (4, 180, 240)


def test_the_recipe_for_fine_tuning_names_a_published_network(load):
    text = (ROOT / "experiments/segmentation/recipes/adp_c_w48_gta5.toml").read_text()
    recipe = tomllib.loads(text)
    with pytest.raises(SystemExit, match="--weights"):
        load("train").build(recipe)
    with torch.device("meta"):
        model = ADPC.from_hyperparameters(recipe["start"])
    assert sum(p.numel() for p in model.parameters()) > 60e6


FINE_TUNING = """
[data]
name = "gta5"
n_classes = 19
size = [32, 64]

[start]
exit_type = "flex"
exit_inter_channel = 4
mask_use = true
mask_conf_threshold = 1.01
num_classes = 19
stages = [
  { modules = 1, block = "BOTTLENECK", blocks = [1], channels = [4] },
  { modules = 1, block = "BASIC", blocks = [1, 1], channels = [4, 4] },
  { modules = 1, block = "BASIC", blocks = [1, 1, 1], channels = [4, 4, 4] },
  { modules = 1, block = "BASIC", blocks = [1, 1, 1, 1], channels = [4, 4, 4, 4] },
]

[training]
epochs = 1
batch = 9
lr = 0.01
weight_decay = 5e-4
smallest_zoom = 0.75
largest_zoom = 2.0
shading = 0.2
averaged_epochs = 1
"""


def test_a_network_is_fine_tuned_and_recorded_on_images_it_did_not_see(load, tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for kind, shape, high in (("images", (32, 64, 3), 256), ("labels", (32, 64), 34)):
        (tmp_path / kind).mkdir()
        for i in range(20):
            array = rng.integers(0, high, shape, np.uint8)
            Image.fromarray(array).save(tmp_path / kind / f"{i:05d}.png")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(FINE_TUNING)
    start = ADPC.from_hyperparameters(tomllib.loads(FINE_TUNING)["start"])
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    train, results = load("train"), tmp_path / "results"
    monkeypatch.setattr(train, "HERE", tmp_path)
    seen, plain = [], train.train
    monkeypatch.setattr(train, "train", lambda *given: seen.append(given[1]) or plain(*given))
    arguments = ["train", "tiny", "--data", str(tmp_path), "--output", str(results)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--weights", str(tmp_path / "start.safetensors")])
    train.main()
    data = load("data")
    tested = data.in_memory(
        data.scenes(tomllib.loads(FINE_TUNING), tmp_path, data.TEST_PART["gta5"]), "cpu"
    )
    (learnt,) = seen
    assert (len(learnt.labels), len(tested.labels)) == (18, 2)
    assert learnt.images.dtype == torch.half
    assert learnt.labels.dtype == torch.uint8
    for labels in tested.labels:
        assert not (learnt.labels == labels).flatten(1).all(dim=1).any()
    (results / "another.json").write_text("{}")  # of other data, to be left alone
    monkeypatch.setattr(
        sys, "argv", ["records", "tiny", "--data", str(tmp_path), "--results", str(results)]
    )
    load("records").main()
    assert ExitRecord.load(results / "tiny.parquet").ids.tolist() == ["00000", "00010"]
