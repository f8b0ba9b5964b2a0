"""Segmentation: scores and losses of whole images, against loops over their pixels."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import avg_pool2d, interpolate
from torch.profiler import ProfilerActivity, profile

import swiftsure as ss
from swiftsure import scores
from swiftsure.losses import LOSSES, VOID
from swiftsure.torch import EarlyExit, Staged, Stream, collect
from swiftsure.torch.collecting import InterruptedCollectionError
from swiftsure.torch.scoring import AGGREGATES, IMAGE_SCORES, confidence, patch, quantile, top1
from swiftsure.torch.segmentation import Enlarged, image_losses
from swiftsure_zoo import ADPC
from tests.torch.builders import expected_exits, policy_of, refused

NAMES = ["miou", "miscoverage", "pixel_brier"]


def maps(n=3, n_exits=4, n_classes=5, height=6, width=9, seed=0, scale=3.0):
    """Logits of all exits, each (n, n_classes, height, width)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (n_exits, n, n_classes, height, width)
    return list((scale * torch.randn(shape, generator=generator)).unbind(0))


def truths(n=3, n_classes=5, height=6, width=9, seed=0, void=0.2):
    """Labels, some of them void in one way or the other."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_classes, size=(n, height, width))
    drawn = rng.random(labels.shape)
    labels[drawn < void] = VOID
    labels[drawn < void / 2] = -1
    return torch.from_numpy(labels)


def test_a_score_is_learned_from_scores_of_maps():
    """`EarlyExit` exits where the record's learned confidences say."""
    x = torch.stack(maps(n=60), dim=1)
    names = ["mean_top1", "patch_entropy"]
    record = collect(PlayedMaps(), [(x, truths(60))], ["miou"], names)
    learned = ss.LearnedScore.fit(record)
    assert learned.features == ("mean_top1", "patch_entropy")
    sure = learned.confidences(record.confidences)
    middle = float(np.median(sure))
    promise = ss.Promise("miou", risk="consistency", epsilon=0.99)
    rule = ss.ExitRule(replace(learned, pilot=None))
    policy = ss.Calibration(promise, rule=rule, control="empirical", path=[middle]).run(record)
    out = EarlyExit(PlayedMaps(), policy)(x)
    clear = (np.abs(sure - np.float32(middle)) > 1e-5).all(axis=1)
    assert len(set(out.exits.tolist())) > 1
    assert np.array_equal(out.exits.numpy()[clear], policy.exits(sure)[clear])


def distributions(outputs):
    """Probabilities as arrays have them, (n, n_exits, height, width, n_classes)."""
    return scores.probabilities(torch.stack(outputs, dim=1).double().movedim(2, -1).numpy())


class PlayedMaps(Staged):
    """Plays given maps of logits, (n, n_exits, n_classes, height, width)."""

    def __init__(self, n_exits=4):
        super().__init__()
        self.n_exits = n_exits
        self.eval()

    def advance(self, exit_index, state):
        return state

    def head(self, exit_index, state):
        return state[:, exit_index]


def played(n=24, **options):
    """What `PlayedMaps` plays: images from blurred to clear."""
    contrast = torch.linspace(0.2, 2, n).view(n, 1, 1, 1, 1)
    return torch.stack(maps(n, **options), dim=1) * contrast


# ---------------------------------------------------------------------------------------- scores


def test_nine_names_on_both_sides():
    assert list(IMAGE_SCORES) == list(scores.IMAGE_SCORES)
    assert len(IMAGE_SCORES) == 9
    assert {"mean_top1", "quantile_entropy", "patch_top_diff"} <= set(IMAGE_SCORES)


@pytest.mark.parametrize("name", list(IMAGE_SCORES))
@pytest.mark.parametrize("size", [(1, 1), (6, 9), (60, 50), (53, 120)])
def test_scores_are_those_of_arrays(name, size):
    logits = maps(n=4, n_exits=1, height=size[0], width=size[1])[0]
    p = scores.probabilities(logits.double().movedim(1, -1).numpy())
    found = confidence(name, logits)
    assert found.shape == (4,)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), scores.IMAGE_SCORES[name](p), atol=1e-6)


@pytest.mark.parametrize("aggregate", ["mean", "quantile", "patch"])
def test_large_maps_are_scored_as_exactly(aggregate):
    """Nearly sure everywhere, where sums of float32 numbers lose most."""
    generator = torch.Generator().manual_seed(0)
    pixels = 1 - 1e-3 * torch.rand(1, 1024, 2048, generator=generator)
    found = AGGREGATES[aggregate](pixels).item()
    expected = float(scores.AGGREGATES[aggregate](pixels.double().numpy())[0])
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 13, 50, 64, 100])
def test_patches_slide_over_every_place(size):
    pixels = torch.rand(2, 40, 70, generator=torch.Generator().manual_seed(size))
    high, wide = min(size, 40), min(size, 70)
    expected = [
        min(
            float(image[i : i + high, j : j + wide].double().mean())
            for i, j in itertools.product(range(40 - high + 1), range(70 - wide + 1))
        )
        for image in pixels
    ]
    assert patch(pixels, size).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("q", [0.0, 0.1, 0.25, 0.5, 1.0])
def test_quantiles_are_numpys(q):
    pixels = torch.rand(3, 7, 11, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(quantile(pixels, q), scores.quantile(pixels.numpy(), q), atol=1e-6)


@pytest.mark.parametrize("name", list(IMAGE_SCORES))
def test_one_broken_pixel_leaves_no_confidence(name):
    logits = maps(n=3, n_exits=1, height=70, width=60)[0]
    logits[1, 2, 66, 3] = torch.nan
    assert confidence(name, logits).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", list(IMAGE_SCORES))
def test_certainty_is_exactly_one(name):
    logits = torch.zeros(1, 3, 55, 60)
    logits[:, 0] = 300.0
    assert confidence(name, logits).item() == 1.0


@pytest.mark.parametrize("name", list(IMAGE_SCORES))
def test_images_are_scored_by_themselves(name):
    logits = maps(n=5, n_exits=1, height=60, width=64)[0]
    together = confidence(name, logits)
    alone = torch.cat([confidence(name, image[None]) for image in logits])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)
    assert confidence(name, logits[:0]).shape == (0,)


def test_scores_of_the_other_kind_are_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"`score` 'top1' needs .*\(n, n_classes\).* mean_top1"):
        confidence("top1", torch.zeros(2, 3, 4, 5))
    with pytest.raises(ValueError, match=r"`score` 'mean_top1' needs .* classifiers have top1"):
        confidence("mean_top1", torch.zeros(2, 3))
    with refused("size"):
        patch(torch.zeros(1, 2, 2), 0)


# ---------------------------------------------------------------------------------------- losses


def counted_losses(p, labels):
    """mIoU, miscoverage and Brier of one image at one exit, pixel by pixel."""
    n_classes = p.shape[-1]
    both, either = [0] * n_classes, [0] * n_classes
    wrong, brier, n = 0, 0.0, 0
    for place in np.ndindex(labels.shape):
        label, found = int(labels[place]), int(p[place].argmax())
        if label < 0 or label == VOID:
            continue
        n += 1
        wrong += found != label
        one_hot = np.eye(n_classes)[label]
        brier += float(((p[place] - one_hot) ** 2).sum())
        for k in range(n_classes):
            both[k] += found == k == label
            either[k] += k in (found, label)
    shares = [b / e for b, e in zip(both, either, strict=True) if e]
    return {
        "miou": 1 - sum(shares) / len(shares),
        "miscoverage": wrong / n,
        "pixel_brier": brier / n,
    }


@pytest.mark.parametrize("seed", range(3))
def test_losses_against_labels_pixel_by_pixel(seed):
    outputs, labels = maps(seed=seed), truths(seed=seed)
    labels[0][labels[0] == 3] = 2  # a class that one label lacks
    found = image_losses(outputs, labels)
    p = distributions(outputs)
    for i, k in np.ndindex(3, 4):
        expected = counted_losses(p[i, k], labels[i].numpy())
        for name in NAMES:
            assert found[f"losses/{name}"][i, k].item() == pytest.approx(expected[name], abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_losses_against_the_last_exit_pixel_by_pixel(seed):
    outputs, labels = maps(seed=seed), truths(seed=seed)
    found = image_losses(outputs, labels)
    p = distributions(outputs)
    last = p[:, -1].argmax(axis=-1)
    for i, k in np.ndindex(3, 4):
        expected = counted_losses(p[i, k], last[i])  # all pixels, void ones too
        expected["pixel_brier"] = ((p[i, k] - p[i, -1]) ** 2).sum(axis=-1).mean()
        for name in NAMES:
            value = found[f"inconsistencies/{name}"][i, k].item()
            assert value == pytest.approx(expected[name], abs=1e-6)
    for name in NAMES:
        assert (found[f"inconsistencies/{name}"][:, -1] == 0).all()
        assert torch.equal(
            found[f"inconsistencies/{name}"], image_losses(outputs)[f"inconsistencies/{name}"]
        )


@pytest.mark.parametrize("size", [(24, 36), (6, 36), (24, 9), (25, 31), (3, 4), (1, 1), (6, 9)])
def test_strips_are_rows_of_the_enlarged_maps(size):
    logits = maps(n_exits=1)[0]
    whole = interpolate(logits, size, mode="bilinear", align_corners=False)
    for start in range(size[0]):
        for stop in range(start + 1, size[0] + 1):
            strip = Enlarged([logits], size).rows(0, slice(start, stop))
            torch.testing.assert_close(strip, whole[:, :, start:stop], atol=1e-5, rtol=0)


def test_losses_are_taken_at_the_size_of_the_labels():
    outputs, labels = maps(), truths(height=25, width=36)
    large = [interpolate(o, (25, 36), mode="bilinear", align_corners=False) for o in outputs]
    found, expected = image_losses(outputs, labels), image_losses(large, labels)
    without_labels = image_losses(outputs, size=(25, 36))
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-6, rtol=0)
        if key in without_labels:
            torch.testing.assert_close(found[key], without_labels[key], atol=0, rtol=0)


def test_agreement_of_predictions_is_agreement_of_losses():
    """What lets the gap be known without labels."""
    outputs = maps(n_exits=2)
    outputs[0] = 0.5 * outputs[1]  # less sure of the same
    found = image_losses(outputs, truths(height=24, width=36))
    for name in ("miou", "miscoverage"):
        assert (found[f"inconsistencies/{name}"] == 0).all()
        assert torch.equal(found[f"losses/{name}"][:, 0], found[f"losses/{name}"][:, 1])


def test_losses_reach_both_ends_of_their_ranges():
    sure = torch.full((1, 2, 4, 4), -100.0)
    sure[:, 0] = 100.0
    found = image_losses([sure, sure.flip(1)], torch.zeros(1, 4, 4, dtype=torch.uint8))
    for name in NAMES:
        assert LOSSES[name].range.low == 0
        assert found[f"losses/{name}"].tolist() == [[0, LOSSES[name].range.high]]
        assert found[f"inconsistencies/{name}"].tolist() == [[LOSSES[name].range.high, 0]]


def test_more_classes_than_the_number_of_void():
    """Then that number is a class."""
    outputs = maps(n=1, n_exits=2, n_classes=260, height=2, width=2)
    labels = torch.full((1, 2, 2), VOID)
    outputs[1][:, VOID] = 100.0
    assert image_losses(outputs, labels)["losses/miscoverage"][0, 1] == 0


def test_memory_is_less_than_one_exits_logits_at_full_size():
    """Four exits, whose logits at the size of the labels would be four times the limit."""
    n_classes, height, width = 19, 256, 512
    outputs = maps(n=1, n_classes=n_classes, height=height // 4, width=width // 4)
    labels = truths(n=1, n_classes=n_classes, height=height, width=width)
    held, most = 0, 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        image_losses(outputs, labels)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    one_exit = 4 * n_classes * height * width
    assert 0.05 * one_exit < most < one_exit  # that something was measured, too


def test_labels_that_are_none():
    outputs, strange, void = maps(), truths(), truths()
    strange[1, 2, 3], void[2] = 7, VOID
    with pytest.raises(ValueError, match=r"`labels` must be .* below 5, .*sample 1 has 7"):
        image_losses(outputs, strange)
    with pytest.raises(ValueError, match=r"sample 2 is all void \(1 such\): leave it out"):
        image_losses(outputs, void)
    for labels in (truths()[:2], truths()[0], truths().float(), truths()[:, 0]):
        with refused("labels"):
            image_losses(outputs, labels)


def test_outputs_that_are_no_maps():
    with pytest.raises(
        ValueError, match=r"\(n, n_classes, height, width\) .*'zero_one' or 'brier'"
    ):
        image_losses([torch.zeros(2, 3)] * 2)
    with pytest.raises(ValueError, match="at every exit"):
        image_losses([torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 8, 8)])


# --------------------------------------------------------------------------------------- collect


def batches(x, labels, size=5, **more):
    loader = []
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        batch = {"inputs": x[part], "labels": labels[part]}
        loader.append({**batch, **{name: values[part] for name, values in more.items()}})
    return loader


def test_the_record_of_a_segmentation():
    x, labels = played(), truths(24, height=24, width=36)
    record = collect(PlayedMaps(), batches(x, labels), NAMES, list(IMAGE_SCORES))
    outputs = list(x.unbind(1))
    p = distributions(outputs)
    for name in IMAGE_SCORES:
        expected = scores.IMAGE_SCORES[name](p[:, :-1])
        np.testing.assert_allclose(record.confidences[name], expected, atol=1e-5)
    expected = image_losses(outputs, labels)
    for name in NAMES:
        np.testing.assert_allclose(record.losses[name], expected[f"losses/{name}"], atol=1e-9)
        found = record.inconsistencies[name]
        np.testing.assert_allclose(found, expected[f"inconsistencies/{name}"], atol=1e-9)
        assert record.loss_ranges[name] == LOSSES[name].range
    for risk, name in itertools.product(("gap", "consistency"), NAMES):
        promise = ss.Promise(name, epsilon=0.9, risk=risk)
        policy = ss.Calibration([promise], rule=ss.ExitRule("patch_top1")).run(record)
        assert policy.score == "patch_top1"


class Pooled(PlayedMaps):
    """Images that are their own logits, at a quarter of their resolution."""

    def head(self, exit_index, state):
        return avg_pool2d(4 * state + exit_index * state.roll(1, dims=1), 4)


def test_without_labels_images_are_compared_at_their_own_size():
    x = torch.randn(3, 3, 32, 64, generator=torch.Generator().manual_seed(0))
    record = collect(Pooled(), [x], NAMES, ["mean_top1"])
    outputs = Pooled()(x)
    expected, at_logits = image_losses(outputs, size=(32, 64)), image_losses(outputs)
    assert record.losses == {}
    for name in NAMES:
        key = f"inconsistencies/{name}"
        np.testing.assert_allclose(record.inconsistencies[name], expected[key], atol=1e-9)
        assert not torch.allclose(at_logits[key], expected[key], atol=1e-3)


def test_images_without_a_labelled_pixel_are_left_out_and_named():
    x, labels = played(), truths(24)
    labels[[3, 17]] = VOID
    labels[17, 0, 0] = -1
    names = [f"scene {i}" for i in range(24)]
    with pytest.warns(UserWarning, match="2 of 24 samples .* left out: scene 3, scene 17"):
        record = collect(
            PlayedMaps(),
            batches(x, labels, ids=names, groups=np.arange(24) // 2),
            NAMES,
            ["mean_top1"],
        )
    kept = np.delete(np.arange(24), [3, 17])
    assert record.ids.tolist() == [names[i] for i in kept]
    assert record.groups.tolist() == (kept // 2).tolist()
    expected = collect(PlayedMaps(), batches(x[kept], labels[kept]), NAMES, ["mean_top1"])
    for tables in ("confidences", "losses", "inconsistencies"):
        for name, values in getattr(record, tables).items():
            np.testing.assert_allclose(values, getattr(expected, tables)[name], atol=1e-9)
            assert not np.isnan(values).any()


@pytest.mark.parametrize("size", [1, 5, 24])
def test_nothing_but_void(size):
    labels = torch.full((24, 6, 9), VOID)
    with pytest.raises(ValueError, match="at least one sample with a labelled pixel"):
        collect(PlayedMaps(), batches(played(), labels, size), NAMES, ["mean_top1"])


@pytest.mark.parametrize("shard_size", [1, 4, 100])
@pytest.mark.parametrize("after", [1, 3, 4])
def test_a_run_that_left_images_out_resumes(tmp_path, shard_size, after):
    x, labels = played(), truths(24)
    labels[[0, 7, 8, 14, 15, 16, 23]] = VOID
    loader = batches(x, labels, size=3)

    def broken():
        yield from loader[:after]
        raise OSError("the disk is gone")

    options = {"losses": NAMES, "scores": ["mean_top1"]}
    with pytest.raises(InterruptedCollectionError):
        collect(
            PlayedMaps(),
            broken(),
            **options,
            run=ss.RunOptions(shards=tmp_path, shard_size=shard_size),
        )
    with pytest.warns(UserWarning, match="7 of 24 samples .*: 0, 7, 8, 14, 15, 16, 23"):
        record = collect(
            PlayedMaps(),
            loader,
            **options,
            run=ss.RunOptions(shards=tmp_path, shard_size=shard_size),
        )
    with pytest.warns(UserWarning, match="7 of 24"):
        whole = collect(PlayedMaps(), loader, **options)
    assert record.ids.tolist() == whole.ids.tolist()
    for name in NAMES:
        np.testing.assert_allclose(record.losses[name], whole.losses[name], atol=1e-12)


def test_a_run_that_was_killed_between_telling_and_writing(tmp_path):
    """The shard that the last left-out samples belong to was never written."""
    x, labels = played(), truths(24)
    labels[[1, 9]] = VOID
    options = {"losses": ["miou"], "scores": ["mean_top1"]}
    options["run"] = ss.RunOptions(shards=tmp_path, shard_size=4)
    with pytest.warns(UserWarning, match="2 of 24"):
        whole = collect(PlayedMaps(), batches(x, labels), **options)
    last = sorted(tmp_path.glob("shard-*.parquet"))[1:]
    assert json.loads((tmp_path / "manifest.json").read_text())["notes"]["left_out"] == {
        "0": [1],
        "1": [9],
    }
    for path in last:
        path.unlink()
    with pytest.warns(UserWarning, match="2 of 24"):
        record = collect(PlayedMaps(), batches(x, labels), **options)
    assert record.ids.tolist() == whole.ids.tolist()


def test_a_wrong_label_is_named_by_value_and_sample():
    x, labels = played(), truths(24)
    labels[12, 1, 2] = 34
    with pytest.raises(InterruptedCollectionError, match="sample 12 has 34"):
        collect(PlayedMaps(), batches(x, labels), NAMES, ["mean_top1"])
    names = [f"scene {i}" for i in range(24)]
    with pytest.raises(ValueError, match="sample scene 12 has 34"):
        collect(PlayedMaps(), batches(x, labels, size=24, ids=names), NAMES, ["mean_top1"])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("exit_index", [0, 3])
def test_a_broken_pixel_is_refused_at_any_exit(exit_index, value):
    """Maps are interpolated, where −inf would become NaN: it cannot mask a class there."""
    x = played()
    x[7, exit_index, 2, 3, 4] = value
    with pytest.raises(
        ValueError, match=f"The output of exit {exit_index + 1} is NaN or infinite for sample 7"
    ):
        collect(PlayedMaps(), batches(x, truths(24), size=24), ["miou"], ["mean_top1"])


def test_losses_of_classifiers_name_those_of_segmentation():
    with pytest.raises(ValueError, match="'miou', 'miscoverage' and 'pixel_brier'"):
        collect(PlayedMaps(), [(played(), truths(24))], scores=["mean_top1"])


@pytest.mark.parametrize("name", ["ids", "groups"])
def test_ids_and_groups_must_be_one_a_sample(name):
    with refused(name):
        collect(PlayedMaps(), [{"inputs": played(), name: list(range(25))}], NAMES, ["mean_top1"])


# --------------------------------------------------------------------------------------- runtime


@pytest.mark.parametrize("temperatures", [None, (2.0, 1.5, 1.0, 0.5)])
@pytest.mark.parametrize("name", list(IMAGE_SCORES))
def test_images_leave_where_the_record_says(name, temperatures):
    x = played(40)
    record = collect(PlayedMaps(), x.split(7), ["miou"], [name], temperatures=temperatures)
    confidences = record.confidences[name]
    policy = policy_of(float(np.quantile(confidences, 0.6)), 4, name, temperatures=temperatures)
    out = EarlyExit(PlayedMaps(), policy)(x)
    exits = expected_exits(policy, confidences)
    assert len(set(exits)) > 2
    assert out.exits.tolist() == exits
    scale = torch.ones(4) if temperatures is None else torch.tensor(temperatures)
    taken = x[torch.arange(40), out.exits] / scale[out.exits].view(-1, 1, 1, 1)
    torch.testing.assert_close(out.outputs, taken)
    assert out.predictions.shape == (40, 6, 9)
    streamed = Stream(EarlyExit(PlayedMaps(), policy), 8).run(x.split(7), ordered=True)
    assert torch.cat([part.exits for part in streamed]).tolist() == exits


def tiny():
    small = {"first_width": 4, "widths": (4, 4, 4, 4), "n_modules": (1, 1, 1)}
    return ADPC(n_classes=5, n_blocks=(1, 1, 1, 1), head_width=4, threshold=2.0, **small).eval()


def test_a_segmentation_network_from_record_to_runtime():
    torch.manual_seed(1)
    model = tiny()
    x = torch.randn(12, 3, 64, 96) * torch.linspace(0.2, 5, 12).view(12, 1, 1, 1)
    labels = truths(12, height=64, width=96)
    record = collect(model, batches(x, labels), NAMES, ["patch_entropy"])
    with torch.no_grad():
        expected = image_losses(model(x), labels)
    np.testing.assert_allclose(record.losses["miou"], expected["losses/miou"], atol=1e-3)
    policy = ss.calibrate(record, loss="miou", epsilon=0.9, control="empirical")
    out = EarlyExit(model, policy)(x)
    assert out.outputs.shape == (12, 5, 16, 24)
    assert out.exits.tolist() == expected_exits(policy, record.confidences["patch_entropy"])


def test_own_patches_by_the_models_own_confidence():
    def narrow(logits):
        return patch(top1(logits.float()), 4)

    torch.manual_seed(1)
    model = tiny()
    model.confidence = narrow
    x = torch.randn(2, 3, 32, 32)
    record = collect(model, [x], ["miou"], ["model"])
    with torch.no_grad():
        first = model(x)[0]
    np.testing.assert_allclose(record.confidences["model"][:, 0], narrow(first), atol=1e-6)
