"""Sweeps: what every threshold would give by itself, with fewer runs; kept and resumed."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

import swiftsure as ss
from swiftsure.diffusion import (
    DDIM,
    DDPM,
    DeeDiff,
    DeeDiffRule,
    Schedule,
    compare_images,
    pilot_thresholds,
    sweep,
    sweeping,
)
from swiftsure.losses import MSE, Loss, LossRange, TensorFunctions
from tests.diffusion.builders import Sure, confidence_levels, network

SAMPLER = DDIM(4, Schedule(40))
RULES = [{}, {"strict": True, "min_exit": 1}, {"look_at": [0, 2]}, {"look_steps": 3}]


def deediff(model, *, sampler=SAMPLER, dtype=None, **rule):
    return DeeDiff(model, DeeDiffRule(None, **rule), sampler=sampler, dtype=dtype)


@pytest.fixture
def generated(monkeypatch):
    """How many images were generated, call by call."""
    calls, plain = [], DeeDiff.generate

    def generate(self, samples, **options):
        made = plain(self, samples, **options)
        calls.append(len(made.images))
        return made

    monkeypatch.setattr(DeeDiff, "generate", generate)
    return calls


@pytest.mark.parametrize("rule", RULES, ids=["plain", "strict", "few looks", "first steps"])
@pytest.mark.parametrize("sampler", [SAMPLER, DDPM(Schedule(6))], ids=["ddim", "ddpm"])
def test_a_record_holds_what_each_threshold_gives_by_itself(rule, sampler):
    model = network()
    levels = confidence_levels(DeeDiff(model, sampler=sampler))
    fast = deediff(model, sampler=sampler, **rule)
    record = sweep(fast, 5, thresholds=levels, losses=["mse"], seed=2, first=3)
    assert record.thresholds.tolist() == [np.inf, *levels]
    assert record.ids.tolist() == [3, 4, 5, 6, 7]
    full = DeeDiff(model, sampler=sampler).generate(range(3, 8), seed=2)
    losses = record.inconsistencies["mse"]
    assert (losses[:, 0] == 0).all()
    assert len(np.unique(losses.round(6))) > 5
    for column, level in enumerate([None, *levels]):
        alone = DeeDiff(model, DeeDiffRule(level, **rule), sampler=sampler).generate(
            range(3, 8), seed=2
        )
        np.testing.assert_allclose(
            losses[:, column], compare_images(MSE, alone.images, full.images), atol=1e-5
        )
        np.testing.assert_allclose(record.costs["layers"][:, column], alone.layers)
        np.testing.assert_allclose(record.costs["flops"][:, column], alone.flops)


def test_the_number_of_steps_is_a_second_dial():
    """Losses are against the full model with all steps, and a policy runs its number of steps."""
    model = network()
    levels = confidence_levels(DeeDiff(model, sampler=SAMPLER))[:2]
    options = {"losses": ["mse"], "seed": 2, "batch_size": 3}
    record = sweep(deediff(model), 5, thresholds=levels, n_steps=[3, 2], **options)
    assert record.dials == {
        "threshold": (None, *levels) * 3,
        "n_steps": (4,) * 3 + (3,) * 3 + (2,) * 3,
    }
    full = DeeDiff(model, sampler=SAMPLER).generate(5, seed=2)
    for number in range(record.n_settings):
        setting = record.setting(number)
        sampler = DDIM(setting["n_steps"], SAMPLER.schedule)
        alone = DeeDiff(model, setting["threshold"], sampler=sampler).generate(5, seed=2)
        found = record.inconsistencies["mse"][:, number]
        expected = compare_images(MSE, alone.images, full.images)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        np.testing.assert_allclose(record.costs["flops"][:, number], alone.flops)
        blocks = alone.layers * setting["n_steps"]
        np.testing.assert_allclose(record.costs["blocks"][:, number], blocks)
    many = ss.ThresholdRecord.concatenate(
        [replace(record, ids=np.arange(5) + 5 * k) for k in range(60)]
    )
    path = ss.Path.settings([7], many)
    policy = ss.calibrate(many, risk="consistency", epsilon=0.99, path=path)
    assert policy.settings["n_steps"] == 2
    made = DeeDiff(model, policy).generate(5, seed=2)
    np.testing.assert_allclose(made.flops, record.costs["flops"][:, 7])
    with pytest.raises(ValueError, match="was made for n_steps=2, but got 4"):
        DeeDiff(model, policy, sampler=SAMPLER)


@pytest.mark.parametrize(
    ("sampler", "n_steps", "message"),
    [
        (SAMPLER, [4], "must be below the sampler's 4"),
        (DDPM(Schedule(6)), [3], "needs a DDIM sampler, but got DDPM"),
    ],
)
def test_numbers_of_steps_that_cannot_be(sampler, n_steps, message):
    with pytest.raises(ValueError, match=message):
        sweep(deediff(network(), sampler=sampler), 2, thresholds=[0.5], n_steps=n_steps)


def test_the_order_of_work_changes_nothing(tmp_path):
    model, options = deediff(network()), {"losses": ["mse"]}
    levels = confidence_levels(model)
    whole = sweep(model, 7, thresholds=levels, **options)
    pieces = sweep(
        model,
        7,
        thresholds=levels,
        batch_size=2,
        run=ss.RunOptions(shards=tmp_path, shard_size=3),
        **options,
    )
    np.testing.assert_allclose(
        pieces.inconsistencies["mse"], whole.inconsistencies["mse"], atol=1e-5
    )
    np.testing.assert_array_equal(pieces.costs["layers"], whole.costs["layers"])
    np.testing.assert_array_equal(pieces.ids, whole.ids)


def test_thresholds_that_change_nothing_are_not_run(generated):
    record = sweep(
        deediff(Sure(0.5).eval()),
        6,
        thresholds=[0.99, 0.9, 0.8, 0.7, 0.5, 0.4, 0.3, 0.2, 0.1],
        losses=["mse"],
    )
    assert sum(generated) == 6 * 3  # in full, above every confidence, below every confidence
    assert record.costs["layers"][0].tolist() == [4] * 5 + [1] * 5
    assert (record.inconsistencies["mse"] == 0).all()


def test_labels_belong_to_the_samples():
    model, labels = network(n_classes=3), [0, 2, 1, 1, 0, 2, 2]
    levels = confidence_levels(DeeDiff(model, sampler=SAMPLER), 7, labels=labels)[1:3]
    options = {"losses": ["mse"], "thresholds": levels}
    record = sweep(deediff(model), 7, labels=labels, batch_size=3, **options)
    full = DeeDiff(model, sampler=SAMPLER).generate(7, labels=labels)
    for column, level in enumerate(levels, start=1):
        alone = DeeDiff(model, level, sampler=SAMPLER).generate(7, labels=labels)
        np.testing.assert_allclose(record.costs["layers"][:, column], alone.layers)
        expected = compare_images(MSE, alone.images, full.images)
        np.testing.assert_allclose(record.inconsistencies["mse"][:, column], expected, atol=1e-5)
    with pytest.raises(ValueError, match="the model has 3 classes"):
        sweep(deediff(model), 7, **options)


# ----------------------------------------------------------------------------------------- shards


@pytest.fixture
def killed_loss(monkeypatch):
    """Within this context the loss is killed after a while."""

    @contextmanager
    def killed(calls_left=3):
        compare = sweeping.compare_images

        def dying(loss, images, others):
            nonlocal calls_left
            calls_left -= 1
            if calls_left < 0:
                raise KeyboardInterrupt
            return compare(loss, images, others)

        with monkeypatch.context() as patched:
            patched.setattr(sweeping, "compare_images", dying)
            yield

    return killed


def test_a_sweep_goes_on_where_it_was_killed(tmp_path, generated, killed_loss):
    model = network()
    levels = confidence_levels(DeeDiff(model, sampler=SAMPLER))[:2]
    model, options = deediff(model), {"thresholds": levels, "losses": ["mse"]}
    expected = sweep(model, 6, **options)
    options["run"] = ss.RunOptions(shards=tmp_path, shard_size=2)
    with killed_loss(), pytest.raises(KeyboardInterrupt):
        sweep(model, 6, **options)
    kept = len(list(tmp_path.glob("shard-*.parquet")))
    assert 0 < kept < 3
    generated.clear()
    record = sweep(model, 6, **options)
    assert sum(generated) <= (6 - 2 * kept) * 3
    np.testing.assert_allclose(
        record.inconsistencies["mse"], expected.inconsistencies["mse"], atol=1e-6
    )
    assert record.ids.tolist() == list(range(6))
    generated.clear()
    again = sweep(model, 6, **options)
    assert not generated
    np.testing.assert_array_equal(again.costs["flops"], record.costs["flops"])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed"),
        ({"thresholds": [0.6]}, "thresholds"),
        ({"losses": ["ssim"]}, "losses"),
        ({"model": deediff(network(), sampler=DDIM(3, Schedule(40)))}, "settings"),
        ({"model": deediff(network(1))}, "model"),
        ({"n": 4}, "n"),
        ({"first": 1}, "first"),
        ({"run": {"shard_size": 1}}, "shard_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_shards_of_another_run_are_refused(tmp_path, changes, named):
    options = {"model": deediff(network()), "n": 2, "thresholds": [0.5], "losses": ["mse"]}
    sweep(**options, run=ss.RunOptions(shards=tmp_path))
    run = ss.RunOptions(shards=tmp_path, **changes.get("run", {}))
    with pytest.raises(ValueError, match=rf"holds another run, with other {named}:"):
        sweep(**options | changes | {"run": run})


# --------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("rule", [{"min_exit": 1}, {"look_at": (1, 3)}, {"look_steps": 3}])
def test_from_sweep_to_policy_to_generation(tmp_path, rule):
    model = network()
    levels = confidence_levels(DeeDiff(model, sampler=SAMPLER))
    record = sweep(deediff(model, **rule), 40, thresholds=levels, losses=["mse"])
    record.save(tmp_path / "record.parquet")
    record = ss.ThresholdRecord.load(tmp_path / "record.parquet")
    policy = ss.calibrate(record, risk="consistency", loss="mse", epsilon=0.3)
    assert policy.threshold in levels
    fast = DeeDiff(model, policy)
    assert fast.rule == DeeDiffRule(policy.threshold, **rule)
    made = fast.generate(5)
    column = levels.index(policy.threshold) + 1
    np.testing.assert_allclose(made.layers, record.costs["layers"][:5, column])
    with pytest.raises(ValueError, match="another model"):
        DeeDiff(network(1), policy)


def test_pilot_thresholds_spread_over_the_layers():
    model = network()
    levels = pilot_thresholds(deediff(model, min_exit=1), 6, n=8)
    assert levels[0] is None
    assert 4 <= len(levels) <= 7
    assert (np.diff(levels[1:]) < 0).all()
    layers = [
        DeeDiff(model, DeeDiffRule(level, min_exit=1), sampler=SAMPLER).generate(8, seed=1).layers
        for level in levels
    ]
    means = np.mean(layers, axis=1)
    assert means[-1] == 2  # all leave as soon as they may
    assert (np.diff(means) <= 0.2).all()
    assert len(np.unique(means.round(1))) >= 4


def test_pilot_thresholds_for_the_exits_that_are_looked_at():
    model = network()
    levels = pilot_thresholds(deediff(model, look_at=[0]), 6, n=8)
    seen = DeeDiff(model, sampler=SAMPLER).confidences(8, seed=1)[:, :, 0]
    assert len(levels) > 3
    assert seen.min() <= levels[-1] <= levels[1] <= seen.max()


def test_pilot_thresholds_for_the_steps_that_are_looked_at():
    model = network()
    levels = pilot_thresholds(deediff(model, look_steps=1), 6, n=8)
    seen = DeeDiff(model, sampler=SAMPLER).confidences(8, seed=1)[:, 0]
    assert len(levels) > 3
    assert seen.min() <= levels[-1] <= levels[1] <= seen.max()


def test_pilot_thresholds_save_more_than_looking_costs():
    model = network(uncertainty_ratio=16.0)  # a look costs about as much as a block
    fast = DeeDiff(model, sampler=SAMPLER)
    full = fast.generate(8, seed=1).flops
    levels = pilot_thresholds(fast, 6, n=8)
    assert len(levels) > 2
    for level in levels[1:]:
        made = fast.generate(8, seed=1, thresholds=[level] * 8)
        assert made.flops.mean() < 1.05 * full.mean()  # a pilot sees images of the full model
    none_saves = pilot_thresholds(deediff(model, min_exit=4), 6, n=8)
    assert len(none_saves) == 2  # and the fastest is left


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "`n` must be at least 1"),
        ({"thresholds": []}, "`thresholds` must be a list"),
        ({"thresholds": [0.5, 0.5]}, "`thresholds` must fall"),
        ({"thresholds": [0.5, 0.7]}, "`thresholds` must fall"),
        ({"thresholds": [2.0]}, "`thresholds` must be at most 1"),
        ({"losses": []}, "`losses` must name at least one loss"),
        ({"losses": ["mse", "mse"]}, "each only once"),
        ({"losses": ["psnr"]}, "`losses` must be one of"),
        ({"batch_size": 0}, "`batch_size`"),
        ({"first": -1}, "`first`"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    options = {"n": 2, "thresholds": [0.5], "losses": ["mse"]}
    with pytest.raises(ValueError, match=message):
        sweep(deediff(network()), **options | changes)


def test_a_bare_network_is_refused():
    with pytest.raises(TypeError, match=r"`model` must be a DeeDiff, .* but got UViT"):
        sweep(network(), 2, thresholds=[0.5])


def test_a_bar_shows_all_work(monkeypatch, tmp_path):
    from swiftsure.run import sweep as loop

    seen = {}

    @contextmanager
    def steps(title, total, shown):
        seen.update(title=title, total=total, shown=shown, done=0)
        yield lambda: seen.update(done=seen["done"] + 1)

    monkeypatch.setattr(loop, "steps", steps)
    model, options = deediff(network()), {"thresholds": [0.9, 0.5], "losses": ["mse"]}
    for _ in range(2):  # the second time from shards
        sweep(model, 5, run=ss.RunOptions(shards=tmp_path, shard_size=2, progress=True), **options)
        assert seen == {"title": "sweeping", "total": 15, "shown": True, "done": 15}


def test_losses_run_where_the_images_are():
    class Elsewhere(torch.nn.Module):
        moved = None

        def to(self, device):
            self.moved = device
            return super().to(device)

        def forward(self, outputs, labels):
            return torch.stack([(images - labels).abs().mean((1, 2, 3)) for images in outputs], 1)

    network_of_loss = Elsewhere()
    functions = TensorFunctions(network_of_loss)
    loss = Loss("elsewhere", LossRange(0, 1), "prediction", tensors=functions)
    record = sweep(deediff(network()), 1, thresholds=[0.5], losses=[loss])
    assert network_of_loss.moved == torch.device("cpu")
    assert record.inconsistency_ranges == {"elsewhere": LossRange(0, 1)}
    with pytest.raises(ValueError, match=r"'bleu' .* set the field `tensors\.against_labels`"):
        sweep(deediff(network()), 1, thresholds=[0.5], losses=["bleu"])
