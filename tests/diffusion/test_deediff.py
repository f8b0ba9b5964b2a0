"""Generation: the full sampler where nothing exits, the exit rule where something does."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import swiftsure as ss
from swiftsure.diffusion import DDIM, DDPM, DeeDiff, DeeDiffRule, Schedule, pilot_thresholds, sweep
from swiftsure.diffusion.noise import sample_noise
from swiftsure.diffusion.steps import denoise
from swiftsure.torch import Staged
from swiftsure.torch.costs import _plain_attention
from swiftsure_zoo import UViT
from tests.diffusion.builders import TINY, Exact, Sure, confidence_levels, network, reference_sample

SCHEDULE = Schedule(40)
SAMPLERS = [
    DDIM(5, SCHEDULE),
    DDIM(5, SCHEDULE, eta=1.0, clip=False),
    DDPM(Schedule(8)),
    DDPM(Schedule(8, time_scale=1000.0), variance="beta_tilde"),
]
NAMES = ["ddim", "ddim with noise", "ddpm", "ddpm tilde"]


def plain(model, sampler, numbers, labels=None, seed=0):
    """The full sampler, as one would write it without exits."""
    samples = torch.tensor(numbers)
    x = sample_noise(seed, samples, sampler.schedule.n_times, model.image_shape)
    with torch.no_grad():
        for k, time in enumerate(sampler.times):
            times = sampler.schedule.times(torch.full((len(numbers),), time))
            batch = (x, times) if labels is None else (x, times, torch.tensor(labels))
            fresh = sample_noise(seed, samples, time, model.image_shape)
            x = sampler.step(k, x, model(batch)[-1], fresh if sampler.draws(k) else None)
    return x.clamp(-1, 1)


# ----------------------------------------------------------------------------- the full sampler


@pytest.mark.parametrize("sampler", SAMPLERS, ids=NAMES)
@pytest.mark.parametrize("labels", [None, [1, 0, 3]])
def test_without_exits_it_is_the_plain_sampler_bit_for_bit(sampler, labels):
    model = network(n_classes=None if labels is None else 4)
    made = DeeDiff(model, None, sampler=sampler).generate([4, 0, 7], labels=labels, seed=3)
    assert torch.equal(made.images, plain(model, sampler, [4, 0, 7], labels, seed=3))
    assert (made.exits == model.n_exits - 1).all()
    assert (made.layers == model.n_blocks).all()


@pytest.mark.parametrize("rule", [1.0, DeeDiffRule(1.0, strict=True), DeeDiffRule(0.9999)])
def test_a_threshold_that_nothing_reaches_changes_nothing(rule):
    model, sampler = network(), SAMPLERS[0]
    made = DeeDiff(model, rule, sampler=sampler).generate(3)
    full = DeeDiff(model, sampler=sampler).generate(3)
    assert torch.equal(made.images, full.images)
    assert (made.exits == model.n_exits - 1).all()


@pytest.mark.parametrize(
    "sampler",
    [
        DDIM(20, Schedule(200, last_beta=0.08)),
        DDIM(50, Schedule(200, last_beta=0.08, time_scale=1000.0), eta=1.0),
        DDPM(Schedule(200, last_beta=0.08)),
    ],
    ids=["ddim", "ddim with noise", "ddpm"],
)
def test_a_network_that_is_always_right_gives_the_images_that_there_are(sampler):
    random = torch.Generator().manual_seed(0)
    known = torch.randint(0, 2, (4, 3, 2, 2), generator=random) * 2.0 - 1
    model = Exact(known, sampler.schedule).eval()
    made = DeeDiff(model, 0.5, sampler=sampler).generate(200)
    distances = torch.cdist(made.images.flatten(1), known.flatten(1))
    assert distances.amin(dim=1).median() < 0.1
    shares = distances.argmin(dim=1).bincount(minlength=4) / 200
    assert (shares - 0.25).abs().max() < 0.12  # each as often as the others: a deviation of 0.03


def test_images_are_ordinary_tensors_in_their_range():
    made = DeeDiff(network(), 0.5, sampler=DDPM(Schedule(6))).generate(4)
    assert made.images.shape == (4, 3, 8, 8)
    assert made.images.abs().max() <= 1
    assert not made.images.is_inference()
    made.images.add_(1)
    pixels = DeeDiff(network(), 0.5, sampler=SAMPLERS[0]).generate(2).pixels()
    assert pixels.shape == (2, 8, 8, 3)
    assert pixels.dtype == np.uint8


# ------------------------------------------------------------------------------------ early exits


@pytest.mark.parametrize("sampler", [SAMPLERS[0], SAMPLERS[2]], ids=["ddim", "ddpm"])
@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"strict": True, "min_exit": 1},
        {"min_exit": 3},
        {"look_at": [0, 3]},
        {"look_steps": 2},
    ],
    ids=["plain", "strict", "late", "few looks", "first steps"],
)
@pytest.mark.parametrize("n_classes", [None, 4])
def test_images_are_those_of_a_plain_retelling(sampler, rule, n_classes):
    model = network(n_classes=n_classes)
    numbers = [2, 9, 4, 0, 11]
    labels = None if n_classes is None else [0, 3, 2, 2, 1]
    fast = DeeDiff(model, DeeDiffRule(0.5, **rule), sampler=sampler)
    level = confidence_levels(fast, 5, labels=labels)[2 if "look_at" in rule else 1]
    fast = DeeDiff(model, DeeDiffRule(level, **rule), sampler=sampler)
    made = fast.generate(numbers, labels=labels, seed=1)
    assert len(np.unique(made.exits)) > 1 or "min_exit" in rule
    for row, sample in enumerate(numbers):
        label = None if labels is None else labels[row]
        image, exits, looked = reference_sample(
            model, sampler, sample, level, seed=1, label=label, **rule
        )
        assert made.exits[row].tolist() == exits
        torch.testing.assert_close(made.images[row], image, rtol=0, atol=1e-4)
        layers = [min(e + 1, model.n_blocks) for e in exits]
        assert made.layers[row] == pytest.approx(np.mean(layers))
        looks = [k in fast.rule.looks(model.n_exits) for k in range(model.n_exits - 1)]
        passed = [looked[k, :e][looks[:e]] for k, e in enumerate(exits) if fast.rule.looks_in(k)]
        highest = max([float(p.max()) for p in passed if p.size], default=-np.inf)
        assert made.max_skipped[row] == pytest.approx(highest, abs=1e-5)
        by = [looked[k, e] for k, e in enumerate(exits) if e < model.n_exits - 1]
        assert made.min_taken[row] == pytest.approx(min(by, default=np.inf), abs=1e-5)


def test_a_sample_comes_out_of_any_batch():
    model, sampler = network(), SAMPLERS[2]
    level = confidence_levels(DeeDiff(model, sampler=sampler))[1]
    fast = DeeDiff(model, level, sampler=sampler)
    together = fast.generate(9)
    assert len({tuple(row) for row in together.exits.tolist()}) > 1  # images part within a batch
    for options in ({"batch_size": 1}, {"batch_size": 4}):
        again = fast.generate(9, **options)
        np.testing.assert_array_equal(again.exits, together.exits)
        torch.testing.assert_close(again.images, together.images, rtol=0, atol=1e-5)
        np.testing.assert_allclose(again.flops, together.flops)
    other = fast.generate([7, 2, 5])
    torch.testing.assert_close(other.images, together.images[[7, 2, 5]], rtol=0, atol=1e-5)


def test_each_image_may_have_its_own_threshold():
    model, sampler = network(), SAMPLERS[0]
    fast = DeeDiff(model, sampler=sampler)
    levels = [None, *confidence_levels(fast)]
    mixed = fast.generate(range(len(levels)), thresholds=levels)
    for row, level in enumerate(levels):
        alone = DeeDiff(model, level, sampler=sampler).generate([row])
        assert mixed.exits[row].tolist() == alone.exits[0].tolist()
        torch.testing.assert_close(mixed.images[row], alone.images[0], rtol=0, atol=1e-5)
        assert mixed.flops[row] == pytest.approx(alone.flops[0])
        np.testing.assert_allclose(mixed.max_skipped[row], alone.max_skipped[0], atol=1e-6)


@pytest.mark.parametrize("sampler", [SAMPLERS[1], SAMPLERS[2]], ids=["ddim", "ddpm"])
def test_pairs_share_all_their_noise(sampler):
    """Where every exit says the same, every threshold gives the full model's image."""
    full = DeeDiff(Sure().eval(), None, sampler=sampler).generate(3)
    early = DeeDiff(Sure().eval(), 0.5, sampler=sampler).generate(3)
    assert (early.exits == 0).all()
    assert torch.equal(early.images, full.images)


def test_what_has_left_is_not_run():
    model = Sure(0.5).eval()
    DeeDiff(model, 0.5, sampler=DDIM(2, SCHEDULE)).generate(6)
    assert model.advanced == [(0, 6), (0, 6)] + [(k, 1) for k in range(4)] * 3  # FLOPs: one image
    model.advanced.clear()
    DeeDiff(model, DeeDiffRule(0.5, min_exit=2), sampler=DDIM(1, SCHEDULE)).generate(6)
    assert model.advanced[:3] == [(0, 6), (1, 6), (2, 6)]
    model.advanced.clear()
    DeeDiff(model, DeeDiffRule(0.5, strict=True), sampler=DDIM(1, SCHEDULE)).generate(6)
    assert model.advanced[:4] == [(k, 6) for k in range(4)]


def test_images_that_go_on_run_by_themselves():
    model, sampler = network(), DDIM(1, SCHEDULE)
    fast = DeeDiff(model, sampler=sampler)
    level = float(np.median(fast.confidences(8)[:, 0, 0]))
    sizes = []
    advance = model.advance
    model.advance = lambda k, state: sizes.append(len(state["tokens"])) or advance(k, state)
    made = DeeDiff(model, level, sampler=sampler).generate(8)
    expected = [int((made.exits[:, 0] >= k).sum()) for k in range(made.exits.max() + 1)]
    assert sizes[: len(expected)] == expected
    assert expected[1] < 8


def test_nan_is_noticed_and_named():
    model = network()
    with torch.no_grad():
        model.UEM[2].bias.fill_(torch.nan)
        model.decoder_pred.bias.fill_(torch.nan)
    with pytest.raises(ValueError, match="image of sample 5 is not finite"):
        DeeDiff(model, 0.5, sampler=SAMPLERS[0]).generate([5, 6])


def test_a_confidence_of_nan_does_not_exit():
    model = network()
    with torch.no_grad():
        model.UEM[2].bias.fill_(torch.nan)
    rule = DeeDiffRule(0.0, look_at=[2])
    made = DeeDiff(model, rule, sampler=SAMPLERS[0]).generate([5, 6])
    assert (made.exits == model.n_exits - 1).all()


# ------------------------------------------------------------------------------------------ costs


class HeadsAlone(Staged):
    """A network of which only heads are known, which give noise and confidence at once."""

    def __init__(self, model):
        super().__init__()
        self.model, self.n_exits, self.image_shape = model, model.n_exits, model.image_shape
        self.begin, self.advance, self.head = model.begin, model.advance, model.head
        self.n_blocks = model.n_blocks


@pytest.mark.parametrize("kind", [lambda model: model, HeadsAlone], ids=["apart", "at once"])
@pytest.mark.parametrize("options", [{}, {"min_exit": 1, "look_at": [0, 1, 3]}])
def test_flops_are_those_of_a_step(kind, options):
    """Of a step with the exit that it took, counted while it runs."""
    model = kind(network()).eval()
    rule = DeeDiffRule(None, **options)
    costs = DeeDiff(model, rule).costs
    taken = set()
    for seed in range(30):
        torch.manual_seed(seed)
        batch = (torch.randn(1, 3, 8, 8), torch.rand(1))
        for level in (0.2, 0.4, 0.5, 0.6, 1.0):
            with torch.inference_mode(), _plain_attention(), FlopCounterMode(display=False) as seen:
                found = denoise(model, batch, torch.full((1,), level), rule, looks=True)
            exit_index = int(found.exits)
            assert costs.flops[exit_index] == seen.get_total_flops()
            taken.add(exit_index)
    assert len(taken) > 1
    with torch.inference_mode(), _plain_attention(), FlopCounterMode(display=False) as seen:
        denoise(model, batch, torch.ones(1), rule, looks=False)
    assert costs.full_flops == seen.get_total_flops()
    assert costs.layers.tolist() == [1, 2, 3, 4, 5, 5]


def test_flops_of_generated_images_are_the_sums_of_their_steps():
    model, sampler = network(), DDIM(4, SCHEDULE)
    fast = DeeDiff(model, sampler=sampler)
    level = confidence_levels(fast)[1]
    made = DeeDiff(model, level, sampler=sampler).generate(6)
    assert len(np.unique(made.exits)) > 1
    assert made.flops == pytest.approx(fast.costs.flops[made.exits].sum(axis=1))
    half = DeeDiff(model, DeeDiffRule(level, look_steps=2), sampler=sampler)
    made = half.generate(6)
    assert (made.exits[:, 2:] == model.n_exits - 1).all()
    early = half.costs.flops[made.exits[:, :2]].sum(axis=1)
    assert made.flops == pytest.approx(early + 2 * half.costs.full_flops)
    never = fast.generate(2)
    assert never.flops == pytest.approx([4 * fast.costs.full_flops] * 2)


def test_both_ways_to_look_generate_the_same():
    model = network()
    level = confidence_levels(DeeDiff(model, sampler=SAMPLERS[0]))[1]
    one = DeeDiff(model, level, sampler=SAMPLERS[0]).generate(8)
    other = DeeDiff(HeadsAlone(model).eval(), level, sampler=SAMPLERS[0]).generate(8)
    assert len(np.unique(one.exits)) > 1
    assert np.array_equal(one.exits, other.exits)
    torch.testing.assert_close(one.images, other.images)


class Wary(UViT):
    """Says how sure it is in its own way, and without noise."""

    def confidence_at(self, exit_index, state):
        return super().confidence_at(exit_index, state).double() ** 2


def test_all_that_looks_asks_alike():
    model = Wary(image_size=8, width=16, depth=4, n_heads=2, mlp_ratio=2).eval()
    model.load_state_dict(network().state_dict())
    seen = DeeDiff(model, sampler=SAMPLERS[0]).confidences(6)
    plain = DeeDiff(network(), sampler=SAMPLERS[0]).confidences(6)
    np.testing.assert_allclose(seen, plain**2, rtol=1e-5)
    level = float(np.median(seen[:, 0, 0]))
    made = DeeDiff(model, level, sampler=SAMPLERS[0]).generate(6)
    assert ((made.exits[:, 0] == 0) == (seen[:, 0, 0] >= np.float32(level))).all()
    assert made.max_skipped.dtype == np.float32
    model.confidence_at = lambda k, state: torch.ones(len(state["tokens"]), 1)
    with pytest.raises(ValueError, match=r"one confidence per sample, of shape \(n,\)"):
        DeeDiff(model, 0.5, sampler=SAMPLERS[0]).generate(1)


def test_a_method_called_estimate_is_a_models_own_business():
    model = HeadsAlone(network()).eval()
    model.estimate = lambda: None  # not ours: it has no `confidence_at`
    expected = DeeDiff(network(), 0.5, sampler=SAMPLERS[0]).generate(3)
    found = DeeDiff(model, 0.5, sampler=SAMPLERS[0]).generate(3)
    torch.testing.assert_close(found.images, expected.images)


def test_the_last_head_always_counts():
    model = network()
    rule = DeeDiffRule(0.0, min_exit=model.n_exits - 1)  # no early exit is ever looked at
    made = DeeDiff(model, rule, sampler=SAMPLERS[0]).generate(1)
    never = DeeDiff(model, None, sampler=SAMPLERS[0]).generate(1)
    assert made.flops == pytest.approx(never.flops)


def test_all_leave_at_the_first_exit_of_every_step():
    made = DeeDiff(network(), 0.0, sampler=SAMPLERS[2]).generate(5, batch_size=2)
    assert (made.exits == 0).all()
    assert (made.layers == 1).all()


# ------------------------------------------------------------------- the same at other thresholds


@pytest.mark.parametrize("strict", [False, True])
def test_a_run_knows_which_thresholds_give_the_same(strict):
    model, sampler = network(), SAMPLERS[0]
    pilot = DeeDiff(model, sampler=sampler)
    some = np.unique(pilot.confidences(4))[::7][::-1]
    rule = DeeDiffRule(float(some[len(some) // 3]), strict=strict)
    made = DeeDiff(model, rule, sampler=sampler).generate(4)
    grid = [None, 1.0, *some.tolist(), *made.min_taken.tolist(), *made.max_skipped.tolist(), 0.0]
    grid = [each for each in grid if each is None or np.isfinite(each)]
    same = made.same_at(grid)
    assert same.any(axis=1).all()
    assert not same.all()
    for column, level in enumerate(grid):
        other = DeeDiff(model, DeeDiffRule(level, strict=strict), sampler=sampler).generate(4)
        for row in range(4):
            if same[row, column]:
                assert other.exits[row].tolist() == made.exits[row].tolist()
            elif level is not None:
                assert other.exits[row].tolist() != made.exits[row].tolist()


def test_without_confidences_no_threshold_is_the_same():
    made = DeeDiff(network(), None, sampler=SAMPLERS[0]).generate(2)
    assert not made.same_at([None, 0.9, 0.1]).any()


# --------------------------------------------------------------------------------------- policies


def policy_for(model, sampler, threshold=0.5, **changes):
    settings = DeeDiff(model, sampler=sampler).settings | changes
    losses = np.column_stack([np.zeros(50), np.zeros(50)])
    record = ss.ThresholdRecord(
        [None, threshold],
        inconsistencies={"mse": losses},
        fingerprint=DeeDiff(model, sampler=sampler).fingerprint,
        settings=settings,
    )
    return ss.calibrate(record, risk="consistency", epsilon=0.5)


def test_a_policy_brings_threshold_and_sampler(tmp_path):
    model, sampler = network(), SAMPLERS[1]
    policy = policy_for(model, sampler, strict=True, min_exit=1)
    policy.save(tmp_path / "policy.json")
    fast = DeeDiff(model, ss.Policy.load(tmp_path / "policy.json"))
    assert fast.rule == DeeDiffRule(0.5, strict=True, min_exit=1)
    assert fast.sampler == sampler
    expected = DeeDiff(model, DeeDiffRule(0.5, strict=True, min_exit=1), sampler=sampler).generate(
        3
    )
    assert torch.equal(fast.generate(3).images, expected.images)


def test_a_policy_that_certifies_nothing_runs_the_full_model():
    model = network()
    policy = policy_for(model, SAMPLERS[0]).model_copy(update={"threshold": None})
    assert (DeeDiff(model, policy).generate(2).exits == model.n_exits - 1).all()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"score": "top1"}, {}, "score='top1'"),
        ({"n_exits": 3}, {}, "3 exits, but the model has 6"),
        ({}, {"sampler": DDIM(6, SCHEDULE)}, "n_steps=5, but got 6"),
        ({}, {"dtype": "bfloat16"}, "dtype='float32', but got 'bfloat16'"),
        ({"system": "calm"}, {}, "not made for deediff but for calm"),
    ],
)
def test_policies_for_something_else_are_refused(changes, options, message):
    model = network()
    policy = policy_for(model, SAMPLERS[0], **changes)
    with pytest.raises(ValueError, match=message):
        DeeDiff(model, policy, **options)


def test_a_policy_for_other_weights_is_refused():
    policy = policy_for(network(0), SAMPLERS[0])
    with pytest.raises(ValueError, match="made for another model"):
        DeeDiff(network(1), policy)
    with pytest.raises(ValueError, match="made for another model"):
        DeeDiff(
            network(0),
            policy.model_copy(update={"settings": policy.settings | {"dtype": "float16"}}),
        )


def test_a_policy_of_single_answers_is_refused():
    model = network()
    record = ss.ExitRecord(
        {"model": np.random.default_rng(0).random((50, 5))}, losses={"mse": np.zeros((50, 6))}
    )
    with pytest.raises(ValueError, match="not made for deediff"):
        DeeDiff(model, ss.calibrate(record, loss="mse", epsilon=0.5))


def test_half_precision_is_another_system():
    model, sampler = network(), SAMPLERS[0]
    half = DeeDiff(model, 0.5, sampler=sampler, dtype="bfloat16")
    assert half.settings["dtype"] == "bfloat16"
    assert half.fingerprint != DeeDiff(model, sampler=sampler).fingerprint
    made = half.generate(3)
    assert made.images.dtype == torch.float32
    full = DeeDiff(model, sampler=sampler).generate(3)
    rough = DeeDiff(model, sampler=sampler, dtype="bfloat16").generate(3)
    difference = (rough.images - full.images).abs().max()
    assert 0 < difference < 0.2


# ---------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "`samples` must be at least 1"),
        ({"samples": True}, "`samples` must"),
        ({"samples": []}, "`samples` must be a number of samples"),
        ({"samples": [-1]}, "`samples` must be at least 0"),
        ({"samples": [0.5]}, "`samples` must be a number of samples"),
        ({"samples": 2, "labels": [0, 1]}, "the model has no classes"),
        ({"samples": 2, "thresholds": [0.5]}, "`thresholds` must have one value per image, 2"),
        ({"samples": 1, "thresholds": [1.5]}, "`thresholds` must be at most 1"),
        ({"samples": 1, "seed": -1}, "`seed` must be at least 0"),
        ({"samples": 1, "batch_size": 0}, "`batch_size` must be at least 1"),
    ],
)
def test_what_cannot_be_generated_is_refused(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        DeeDiff(network(), sampler=SAMPLERS[0]).generate(**arguments)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "the model has 4 classes; give one per image"),
        ([0, 1, 2], r"shape \(2,\)"),
        ([0.0, 1.0], "whole numbers"),
        ([0, 4], "`labels` must be in 0 to 3"),
    ],
)
def test_labels_must_be_classes(labels, message):
    with pytest.raises(ValueError, match=message):
        DeeDiff(network(n_classes=4), sampler=SAMPLERS[0]).generate(2, labels=labels)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (1.5, "`threshold` must be at most 1"),
        (float("nan"), "`threshold` must not hold NaN"),
        (DeeDiffRule(0.5, min_exit=6), "`min_exit` must be less than the model's 6 exits"),
        (DeeDiffRule(0.5, look_at=[0, 5]), "`look_at` must name exits before the last .*got 5"),
    ],
)
def test_rules_that_fit_no_model_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        DeeDiff(network(), rule)


def test_a_network_without_early_exits_is_run_in_full():
    full = network()
    lone = UViT(**TINY, early_exits=False)
    lone.load_state_dict({k: v for k, v in full.state_dict().items() if k in lone.state_dict()})
    options = {"sampler": DDIM(4, Schedule(40))}
    expected = DeeDiff(full, **options).generate(3)
    found = DeeDiff(lone.eval(), **options).generate(3)
    torch.testing.assert_close(found.images, expected.images)
    np.testing.assert_array_equal(found.layers, expected.layers)
    np.testing.assert_allclose(found.flops, expected.flops, rtol=0.01)
    for use in (pilot_thresholds, partial(sweep, n=2, thresholds=[0.5], losses=["mse"])):
        with pytest.raises(ValueError, match="n_exits` must be at least 2"):
            use(DeeDiff(lone, **options))


def test_what_is_no_sampler_or_no_list_of_thresholds_is_refused():
    with pytest.raises(TypeError, match=r"`sampler` must be a Sampler, such as DDIM.* got 'ddim'"):
        DeeDiff(network(), sampler="ddim")
    with pytest.raises(
        ValueError, match=r"`thresholds` must have one value per image, 2, but got 0\.3"
    ):
        DeeDiff(network(), sampler=DDIM(2)).generate(2, thresholds=0.3)


def test_a_network_in_half_precision_says_how_to_run_it_so():
    with pytest.raises(TypeError, match=r"must be torch.bfloat16 as the network is, .* `dtype=`"):
        DeeDiff(network().bfloat16(), sampler=DDIM(2)).generate(1)
    DeeDiff(network(), sampler=DDIM(2), dtype="bfloat16").generate(1)


def test_models_in_training_or_without_exits_are_refused():
    with pytest.raises(ValueError, match="evaluation mode"):
        DeeDiff(network().train(), 0.5)
    plain = UViT(image_size=8, width=16, depth=2, n_heads=2, early_exits=False).eval()
    with pytest.raises(ValueError, match="n_exits"):
        DeeDiff(plain, 0.5)
    with pytest.raises(TypeError, match="`image_shape = "):
        DeeDiff(Staged.from_sequential([nn.Identity()] * 2, [nn.Identity()] * 2).eval(), 0.5)
    with pytest.raises(TypeError, match="must have a method"):
        DeeDiff(torch.nn.Linear(2, 2), 0.5)
    fast = DeeDiff(network(), 0.5, sampler=SAMPLERS[0])
    fast.model.train()
    with pytest.raises(ValueError, match="evaluation mode"):
        fast.generate(1)
