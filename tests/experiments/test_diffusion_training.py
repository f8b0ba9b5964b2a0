"""The diffusion experiment: its data in their published layouts, its scripts at tiny settings."""

import importlib
import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from PIL import Image  # noqa: E402 (comes with PyTorch's extra)

import swiftsure as ss  # noqa: E402
from swiftsure.diffusion import DDIM, DeeDiff, Guided, Schedule  # noqa: E402
from swiftsure_zoo import UViT  # noqa: E402
from tests.diffusion.builders import random_weights  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "diffusion"
RECIPES = sorted((FOLDER / "recipes").glob("*.toml"))
TINY = """
[data]
name = "cifar10"

[model]
image_size = 32
patch_size = 4
width = 48
depth = 2
n_heads = 2
mlp_ratio = 1.0
uncertainty_ratio = 0.5
n_classes = 11

[schedule]
n_times = 20
last_beta = 0.5
time_scale = 1000.0

[training]
steps = 60
batch = 8
lr = 5e-3
weight_decay = 0.03
warm_up = 0.1
clip = 1.0
average = 0.9
early_weight = 0.5
most_signal = 5.0
unlabelled = 0.2
eased = true
half = true

[guidance]
scale = 1.5
"""


@pytest.fixture
def script(monkeypatch):
    """Run a script of the experiment, or import a module of it, as it would be by itself."""
    monkeypatch.syspath_prepend(str(FOLDER.parents[1]))
    torch.set_num_threads(1)

    def run(name, *arguments):
        module = importlib.import_module(f"experiments.diffusion.{name}")
        if arguments:
            monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
            module.main()
        return module

    return run


@pytest.fixture
def tiny(tmp_path, script, monkeypatch):
    """A recipe, and a folder of so few images that look like CIFAR-10."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "tiny.toml").write_text(TINY)
    monkeypatch.setattr(script("train"), "HERE", tmp_path)
    rng = np.random.default_rng(0)
    for name in [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]:
        labels = rng.integers(0, 10, 4, np.uint8)
        colours = np.repeat(25 * labels[:, None], 3072, axis=1).astype(np.uint8)
        np.concatenate([labels[:, None], colours], axis=1).tofile(tmp_path / f"{name}.bin")
    return tmp_path


def train(script, tiny, *more):
    script("train", "tiny", "--data", tiny, "--output", tiny / "out", *more)
    return json.loads((tiny / "out" / "tiny.json").read_text())


def test_a_network_is_trained_reported_and_shown(script, tiny):
    report = train(script, tiny, "--seed", 3)
    assert report["finished"]
    assert (report["seed"], report["steps"], report["images"]) == (3, 60, 480)
    losses = report["test_losses"]
    assert len(losses["exits"]) == 4
    assert losses["exits"][-1] == losses["denoising"] < 0.95  # 1 before it has learnt
    assert losses["images"] == 4
    with Image.open(tiny / "out" / "tiny.png") as sheet:
        assert sheet.size == (320, 256)
    model = script("records").network(tiny / "out" / "tiny.safetensors", report["recipe"])
    assert isinstance(model, Guided)
    assert (model.n_exits, model.n_classes, model.scale) == (4, 10, 1.5)


def test_some_images_hide_their_label_and_those_with_little_noise_come_rarely(script):
    recipe = tomllib.loads(TINY)
    recipe["training"]["batch"] = 1000
    part = script("images").Images(
        torch.zeros(1000, 3, 2, 2, dtype=torch.uint8), torch.arange(1000) % 10
    )
    schedule = Schedule(**recipe["schedule"])
    stream = script("batches").batches(part, recipe, schedule, torch.Generator().manual_seed(0))
    drawn = [next(stream) for _ in range(20)]
    labels = torch.cat([batch.labels for batch in drawn])
    assert (labels == 10).float().mean().item() == pytest.approx(0.2, abs=0.01)
    assert (labels[labels < 10].bincount() / 16_000 - 0.1).abs().max() < 0.01
    times = (torch.cat([batch.times for batch in drawn]) * 20 / 1000).round().long()
    share = torch.from_numpy(schedule.signal)
    expected = torch.minimum(torch.ones(20), 5 * (1 - share) / share)
    assert expected[0] < 0.01 < expected[1] < 1 == expected[-1]
    found = times.bincount(minlength=20) / len(times)
    torch.testing.assert_close(found, (expected / expected.sum()).float(), atol=0.01, rtol=0)


def test_times_are_drawn_alike_unless_a_recipe_says_otherwise(script):
    assert (script("batches").weights_of_times(Schedule(50), torch.inf) == 1).all()


def test_training_follows_the_clock(script, tiny):
    report = train(script, tiny, "--seconds", "1.5", "--checkpoint", "0")
    assert report["seconds"] >= 1
    assert report["steps"] % 25 == 1  # whole rounds, and the step that prepares
    assert report["finished"]


def test_an_eased_network_knows_where_patches_are(script):
    model = UViT(image_size=12, patch_size=4, width=16, depth=2, n_heads=2, n_classes=3)
    extras = model.pos_embed[0, :2].clone()
    script("easing").ease(model)
    places = model.pos_embed[0, 2:].detach()
    rows, columns = places.view(3, 3, 16).split(8, dim=2)
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    assert torch.equal(columns, rows.transpose(0, 1))
    assert len(rows[:, 0].unique(dim=0)) == 3
    assert places.square().mean().item() == pytest.approx(0.5)
    assert torch.equal(model.pos_embed[0, :2], extras)


def test_an_eased_network_says_the_noise_alike_at_every_exit(script):
    """As long as blocks add nothing, tokens go through, and all early exits say the same."""
    torch.manual_seed(0)
    model = UViT(image_size=12, patch_size=4, width=16, depth=4, n_heads=2, n_classes=3).eval()
    script("easing").ease(model)
    with torch.no_grad():
        for block in [*model.in_blocks, model.mid_block, *model.out_blocks]:
            block.attn.proj.weight.zero_()
            block.mlp.fc2.weight.zero_()
            if block.skip_linear is not None:
                block.skip_linear.weight[:, model.width :] = 0
        batch = (torch.randn(2, 3, 12, 12), torch.rand(2), torch.tensor([0, 2]))
        first, *others, _ = model(batch)
        assert first.std() > 0.01
        for other in others:
            torch.testing.assert_close(other, first)


def test_rates_rise_and_fall(script):
    rate = script("train").rate
    assert rate(0, 0.1) == 0
    assert rate(0.05, 0.1) == pytest.approx(0.5)
    assert rate(0.1, 0.1) == pytest.approx(1)
    assert rate(0.55, 0.1) == pytest.approx(0.5)
    assert rate(1, 0.1) == pytest.approx(0)


def test_a_run_that_is_cut_off_keeps_its_weights_and_goes_on(script, tiny, monkeypatch):
    module = script("train")
    step = module.Trainer.step

    def cut(self, batch, share):
        if self.steps == 40:
            raise KeyboardInterrupt
        return step(self, batch, share)

    monkeypatch.setattr(module.Trainer, "step", cut)
    with pytest.raises(KeyboardInterrupt):
        train(script, tiny, "--resume", "--checkpoint", "0")
    report = json.loads((tiny / "out" / "tiny.json").read_text())
    assert not report["finished"]
    assert report["steps"] == 26
    kept = script("records").network(tiny / "out" / "tiny.safetensors", report["recipe"])
    state = torch.load(tiny / "out" / "tiny.state.pt", weights_only=True)
    for name, value in kept.model.state_dict().items():
        torch.testing.assert_close(value, state["average"][name], rtol=1e-3, atol=1e-4)
    monkeypatch.setattr(module.Trainer, "step", step)
    report = train(script, tiny, "--resume")
    assert report["finished"]
    assert report["steps"] == 60
    assert train(script, tiny, "--resume")["steps"] == 60  # nothing is left to do


def test_pairs_are_recorded_and_shown(script, tiny):
    report = train(script, tiny)
    options = ("--results", tiny / "out", "--n", 12, "--steps", 4, "--thresholds", 5, "--batch", 5)
    script("records", "tiny", *options)
    record = ss.ThresholdRecord.load(tiny / "out" / "tiny.parquet")
    assert record.n == 12
    assert set(record.inconsistencies) == {"ssim", "mse"}
    assert record.thresholds[0] == np.inf
    found = json.loads((tiny / "out" / "tiny.json").read_text())
    assert found["test_losses"] == report["test_losses"]
    assert found["record"]["layers"][0] == 3
    assert found["record"]["mse"] == record.inconsistencies["mse"].mean(axis=0).round(4).tolist()
    assert found["record"]["share_of_flops"][-1] < 1
    rows = len(np.unique(np.linspace(0, len(record.thresholds) - 1, 6).round()))
    with Image.open(tiny / "out" / "tiny_thresholds.webp") as sheet:
        assert sheet.size == (320, 32 * rows)
        shown = np.asarray(sheet)[:32, :32]
    model = script("records").network(tiny / "out" / "tiny.safetensors", report["recipe"])
    fast = DeeDiff(model, sampler=DDIM(4, Schedule(20, last_beta=0.5, time_scale=1000.0)))
    assert record.fingerprint == fast.fingerprint
    label = script("records").classes(12, 10, 0)[:1]
    made = fast.generate(1, labels=label).pixels()[0]
    assert np.abs(made.astype(int) - shown).max() <= 1
    (shards,) = (tiny / "out" / "tiny_shards").iterdir()
    levels = json.loads((shards / "thresholds.json").read_text())
    assert levels[1:] == record.thresholds[1:].tolist()
    script("records", "tiny", *options)  # goes on from its shards, and has nothing to do
    assert list((tiny / "out" / "tiny_shards").iterdir()) == [shards]
    policy = ss.calibrate(record, risk="consistency", loss="mse", epsilon=0.5)
    DeeDiff(model, policy).generate(1, labels=label)


@pytest.mark.slow
def test_a_network_that_was_trained_anew_is_recorded_anew(script, tiny):
    options = ("--results", tiny / "out", "--n", 4, "--steps", 2, "--thresholds", 3, "--batch", 4)
    found = []
    for seed in (0, 1):
        train(script, tiny, "--seed", seed, "--steps", 2)
        script("records", "tiny", *options)
        record = ss.ThresholdRecord.load(tiny / "out" / "tiny.parquet")
        found.append((record.fingerprint, tuple(record.thresholds)))
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]  # a pilot of its own
    script("records", "tiny", *options, "--seed", 7)  # and other options go with other shards


@pytest.mark.slow
def test_samples_are_shown_at_levels_of_risk(script, tiny):
    train(script, tiny)
    options = ("--results", tiny / "out", "--n", 40, "--steps", 4, "--thresholds", 8, "--seed", 3)
    script("records", "tiny", *options)
    records = script("records")
    record = ss.ThresholdRecord.load(tiny / "out" / "tiny.parquet")
    report = json.loads((tiny / "out" / "tiny.json").read_text())
    assert list(report["levels"]) == ["ssim"]  # without weights of LPIPS
    found = report["levels"]["ssim"]
    assert list(found) == ["0.0", "0.05", "0.1", "0.15", "0.2", "0.25", "0.3"]
    levels = list(found.values())
    assert levels[0] is None
    policy = ss.calibrate(record, risk="consistency", loss="ssim", bound="wsr", epsilon=0.3)
    assert levels[-1] == policy.threshold is not None
    model = records.network(tiny / "out" / "tiny.safetensors", report["recipe"])
    labels = records.classes(10, 10, 4)[:1]
    made = DeeDiff(model, policy).generate([40], labels=labels, seed=3).pixels()[0]
    with Image.open(tiny / "out" / "tiny_levels_ssim.webp") as sheet:
        assert sheet.size == (320, 7 * 32)
        shown = np.asarray(sheet)[-32:, :32]
    assert np.abs(made.astype(int) - shown).max() <= 1


def test_small_images_are_recorded_with_both_forms_of_lpips(script, tiny):
    train(script, tiny, "--steps", 2)
    weights = {name: tensor.numpy() for name, tensor in random_weights().items()}
    np.savez(tiny / "lpips.npz", **weights)
    options = ("--results", tiny / "out", "--n", 4, "--steps", 2, "--thresholds", 3)
    script("records", "tiny", *options, "--lpips", tiny / "lpips.npz")
    record = ss.ThresholdRecord.load(tiny / "out" / "tiny.parquet")
    assert list(record.inconsistencies) == ["lpips", "lpips_64", "ssim", "mse"]
    report = json.loads((tiny / "out" / "tiny.json").read_text())
    assert list(report["levels"]) == ["lpips", "lpips_64"]
    for loss in report["levels"]:
        assert (tiny / "out" / f"tiny_levels_{loss}.webp").is_file()


@pytest.mark.slow
def test_images_are_shown_to_a_classifier(script, tiny, monkeypatch):
    train(script, tiny)
    options = ("--results", tiny / "out", "--n", 40, "--steps", 4, "--thresholds", 8)
    script("records", "tiny", *options)
    recognised = script("recognised")
    labels = script("records").classes(6, 10, recognised.SEED)
    asked = []

    def predicted(images, device):
        asked.append(images)
        return np.where(np.arange(6) < 2, labels, labels + 1)  # the first two are recognised

    monkeypatch.setattr(recognised, "predicted", predicted)
    before = json.loads((tiny / "out" / "tiny.json").read_text())
    script("recognised", "tiny", "--results", tiny / "out", "--n", 6)
    report = json.loads((tiny / "out" / "tiny.json").read_text())
    found = report.pop("recognised")
    assert report == before
    assert found["ssim"] == dict.fromkeys(before["levels"]["ssim"], 0.3333)
    assert found["of_real_images"] > 0.9
    assert len(asked) == len(set(before["levels"]["ssim"].values()))
    fast = DeeDiff(
        script("records").network(tiny / "out" / "tiny.safetensors", report["recipe"]),
        sampler=DDIM(4, Schedule(20, last_beta=0.5, time_scale=1000.0)),
    )
    full = fast.generate(6, labels=labels, seed=recognised.SEED).pixels()
    np.testing.assert_array_equal(asked[0], full)
    last = list(before["levels"]["ssim"].values())[-1]
    early = fast.generate(6, labels=labels, seed=recognised.SEED, thresholds=[last] * 6).pixels()
    np.testing.assert_array_equal(asked[-1], early)
    assert (asked[0] != asked[-1]).any()


def test_levels_are_drawn_with_what_they_cost(script, tmp_path):
    picture = script("picture")
    report = {
        "recipe": {"model": {"image_size": 16}},
        "record": {"thresholds": [None, 0.9, 0.7, 0.5], "layers": [9.0, 7.25, 4.0, 1.0]},
        "levels": {"lpips": {"0.0": None, "0.05": 0.90001, "0.1": 0.5}},
    }
    lines = picture.captions(report, "lpips")
    assert lines == [
        "ε = 0\n9.0 layers of 9",
        "ε = 0.05\n7.2 layers of 9",
        "ε = 0.1\n1.0 layers of 9",
    ]
    report["recognised"] = {"lpips": {"0.0": 0.889, "0.05": 0.8, "0.1": 0.25}}
    lines = picture.captions(report, "lpips")
    assert [line.splitlines()[2] for line in lines] == [
        "89 % recognised",
        "80 % recognised",
        "25 % recognised",
    ]
    (tmp_path / "net.json").write_text(json.dumps(report))
    Image.new("RGB", (32, 48)).save(tmp_path / "net_levels_lpips.webp")
    script("picture", "net", "--results", tmp_path)
    with Image.open(tmp_path / "net_levels_lpips.png") as drawn:
        assert drawn.width > 64
    Image.new("RGB", (32, 32)).save(tmp_path / "net_levels_lpips.webp")
    with pytest.raises(ValueError, match="has 2 rows, but the report has 3 values of ε"):
        script("picture", "net", "--results", tmp_path, "--loss", "lpips")


def test_the_classifier_knows_images_of_the_full_model(script):
    """The first row of the sheet of levels: the full model's image for each of ten classes."""
    sheet = FOLDER / "results" / "uvit_cifar10_levels_lpips.webp"
    if not sheet.is_file():
        pytest.skip("an sdist holds no images")
    with Image.open(sheet) as picture:
        row = np.asarray(picture.convert("RGB"))[:32]
    images = row.reshape(32, 10, 32, 3).transpose(1, 0, 2, 3)
    found = script("recognised").predicted(images, "cpu", batch=6)
    assert (found == script("records").classes(10, 10, 1)).sum() >= 8


def test_speed_is_measured_under_policies_of_the_record(script, tiny, monkeypatch):
    train(script, tiny)
    options = ("--results", tiny / "out", "--n", 40, "--steps", 4, "--thresholds", 8)
    script("records", "tiny", *options)
    monkeypatch.syspath_prepend(str(FOLDER.parents[1] / "benchmarks"))
    spec = importlib.util.spec_from_file_location(
        "diffusion_benchmark", FOLDER.parents[1] / "benchmarks" / "diffusion.py"
    )
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    record = ss.ThresholdRecord.load(tiny / "out" / "tiny.parquet")
    script("records", "tiny", *options[:4], "--steps", 4, "--look-at", 0, "--levels", 0.6, 0.5)
    few = ss.ThresholdRecord.load(tiny / "out" / "tiny_look_at_0.parquet")
    assert few.thresholds.tolist() == [np.inf, np.float32(0.6), 0.5]
    model = benchmark.trained(tiny / "out", "tiny")
    both = benchmark.certified(model, [record, few], ["ssim"])
    assert list(both)[3:] == ["ssim 0.05, looks at 1", "ssim 0.1, looks at 1"]
    assert both["ssim 0.1, looks at 1"].rule.look_at == (0,)
    variants = benchmark.certified(model, [record], ["ssim"])
    assert list(variants) == ["full", "ssim 0.05", "ssim 0.1"]
    for epsilon in (0.05, 0.1):
        policy = ss.calibrate(record, risk="consistency", loss="ssim", epsilon=epsilon)
        assert variants[f"ssim {epsilon}"].rule.threshold == policy.threshold
    found = benchmark.measure("tiny", variants, [2], 1)
    assert [result.what for result in found] == [
        "tiny, cpu, batch 2, ssim 0.05",
        "tiny, cpu, batch 2, ssim 0.1",
    ]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_is_whole(script, path):
    recipe = tomllib.loads(path.read_text())
    assert recipe["data"]["name"] in script("images").DATA_SETS
    with torch.device("meta"):
        model = UViT(**recipe["model"])
    n = sum(p.numel() for p in model.parameters())
    assert n < (20e6 if "cifar10" in path.stem else 50e6)
    Schedule(**recipe["schedule"])
    missing = set(tomllib.loads(TINY)["training"]) - set(recipe["training"])
    assert missing <= {"most_signal", "unlabelled"}
    assert ("unlabelled" in missing) == ("guidance" not in recipe)


def test_celeba_is_read_as_published(script, tmp_path):
    (tmp_path / "img_align_celeba").mkdir()
    lines = []
    for k in range(6):
        name = f"{k + 1:06d}.jpg"
        photograph = np.zeros((218, 178, 3), np.uint8)
        photograph[57:185, 25:153] = 40 * k  # the face
        Image.fromarray(photograph).save(tmp_path / "img_align_celeba" / name, quality=95)
        lines.append(f"{name} {k % 3}")
    (tmp_path / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")
    load = script("images").load
    recipe = {"data": {"name": "celeba", "size": 16}}
    for part, expected in (("train", [0, 120]), ("test", [80, 200])):
        found = load(recipe, tmp_path, part)
        assert found.images.shape == (2, 3, 16, 16)
        middles = found.images[:, :, 4:12, 4:12].float().mean(dim=(1, 2, 3))
        np.testing.assert_allclose(middles, expected, atol=2)
    with pytest.raises(FileNotFoundError, match=r"list_eval_partition\.txt"):
        load(recipe, tmp_path / "img_align_celeba", "train")
