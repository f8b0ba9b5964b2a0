"""The page about a policy: its numbers are the library's, and it needs nothing but itself."""

import json
import re
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.best_of import calibrate_best
from swiftsure.report import policy_page
from swiftsure.report.charts import LETTER_WIDTH, chart, log_ticks, shortened
from swiftsure.report.findings import findings
from swiftsure.report.quality import exit_losses, reliability
from swiftsure.report.sentences import about_sizes
from swiftsure.study import planning
from swiftsure.study.simulate import Population

FAMILY = [[0.95, 0.9, 0.8], [0.8, 0.7, 0.6], [0.6, 0.5, 0.4]]
SEVERAL = [ss.Risk("gap", "zero_one", 0.05), ss.Risk("consistency", "brier", 0.1)]


@pytest.fixture(scope="module")
def sample():
    return Population(n_exits=4, overconfidence=1.5).sample(800, 0)


@pytest.fixture(scope="module")
def record(sample):
    return ss.ExitRecord.from_logits(
        sample.logits, sample.labels, score=["top1", "entropy"], costs={"layers": [3, 6, 9, 12]}
    )


@pytest.fixture(scope="module")
def thresholds():
    rng = np.random.default_rng(0)
    drift = np.linspace(0, 0.2, 5) ** 1.5
    losses = np.clip(0.5 + 0.1 * rng.normal(size=(500, 5)) + drift, 0, 1)
    return ss.ThresholdRecord(
        np.linspace(1, 0.2, 5),
        losses={"rouge_l": losses},
        costs={"layers": np.linspace(24, 4, 5)},
        dial="fallback",
    )


@pytest.fixture(scope="module")
def policy(record):
    return ss.calibrate(record, loss="zero_one", epsilon=0.05)


@pytest.fixture(scope="module")
def found(record, policy):
    return findings(record, policy)


def text(page):
    """What a reader sees, roughly."""
    body = re.sub(r"<(style|script).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", body).replace("\N{NO-BREAK SPACE}", " ").split())


# ---------------------------------------------------------------------------------------- numbers


def test_the_bound_that_is_drawn_is_the_certificates(found, policy):
    along = found.risks[0]
    certificate = policy.certificate
    where = along.upper_settings.index(certificate.index)
    assert along.upper[where] == certificate.promises[0].upper_bound
    where = along.settings.index(certificate.index)
    assert along.risk[where] == pytest.approx(certificate.promises[0].calibration_risk)


def test_every_level_is_what_calibrate_would_choose(found, record):
    choices = found.by_epsilon[0]
    assert 50 <= len(choices.epsilons) <= 65
    assert choices.epsilons[choices.own] == 0.05
    for epsilon, index in list(zip(choices.epsilons, choices.settings, strict=True))[::9]:
        other = ss.calibrate(record, loss="zero_one", epsilon=epsilon)
        setting = found.settings[index]
        assert setting.threshold == other.threshold
        promise = other.certificate.promises[0]
        assert setting.risks == pytest.approx((promise.calibration_risk,))
        assert setting.shares == pytest.approx(other.certificate.exit_shares)
        full, here = other.certificate.costs["layers"]
        assert setting.saved["layers"] == pytest.approx(1 - here / full)


def test_every_delta_is_what_calibrate_would_choose(found, record):
    for delta, index in zip(found.by_delta.deltas, found.by_delta.settings, strict=True):
        other = ss.calibrate(record, loss="zero_one", epsilon=0.05, delta=delta)
        assert found.settings[index].threshold == other.threshold


def test_several_promises_together_allow_the_safest_of_their_settings(record):
    found = findings(record, ss.calibrate(record, risks=SEVERAL))
    first, second = found.by_epsilon
    for i, j in [(10, 50), (50, 10), (40, 40)]:
        risks = [
            replace(SEVERAL[0], epsilon=first.epsilons[i]),
            replace(SEVERAL[1], epsilon=second.epsilons[j]),
        ]
        together = found.settings[min(first.settings[i], second.settings[j])]
        assert together.threshold == ss.calibrate(record, risks=risks).threshold


def test_sizes_agree_with_planning(found, record):
    sizes = found.by_size.sizes
    plan = planning.gain_by_samples(
        record.curve("gap", "zero_one"), epsilon=0.05, sizes=sizes, cost="layers", draws=100
    )
    assert sizes[3] == record.n
    assert 100 * np.asarray(found.by_size.saved) == pytest.approx(plan.gain, abs=4)
    assert np.asarray(found.by_size.certified) == pytest.approx(plan.certified, abs=0.2)


def test_more_samples_are_worth_a_sentence(found):
    few = replace(found.by_size, saved=(0.1, 0.2, 0.3, 0.4, 0.48, 0.5))
    sentence = about_sizes(replace(found, by_size=few))
    assert sentence.startswith("Collect 800 more samples and save 8.0 points more of layers")
    same = replace(found.by_size, saved=(0.4,) * 6)
    sentence = about_sizes(replace(found, by_size=same))
    assert sentence == "More samples, up to 3,200, would hardly save more of layers."
    none_larger = replace(found.by_size, sizes=(100, 200, 400, 800), saved=(0.4,) * 4)
    assert about_sizes(replace(found, by_size=none_larger)) == ""


def lossless(n):
    """A record whose exits all agree and are all right."""
    confidences = np.random.default_rng(1).random((n, 2))
    tables = {"zero_one": np.zeros((n, 3))}
    return ss.ExitRecord(confidences, losses=tables, inconsistencies=tables)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"risk": "consistency"},
            "even if every loss were 0, the tests here would need at least 230.",
        ),
        (
            {"risk": "consistency", "control": "crc", "epsilon": 0.002},
            "here would need at least 499.",
        ),
        ({"risk": "gap"}, "even if none had a loss, it would take at least 230."),
    ],
)
def test_where_no_size_certifies_the_fewest_that_can_are_named(options, said):
    record = lossless(50)
    policy = ss.calibrate(record, **{"epsilon": 0.01, **options})
    sentence = about_sizes(findings(record, policy))
    assert sentence.startswith("Nothing would be certified with up to 200 samples; ")
    assert sentence.endswith(said)
    assert "hardly" not in text(policy_page(record, policy))


def test_the_fewest_that_can_certify_do():
    policy = ss.calibrate(lossless(230), risk="consistency", epsilon=0.01)
    full, here = policy.certificate.costs["exit"]
    assert 1 - here / full == pytest.approx(2 / 3)


def test_a_record_too_large_to_draw_from_is_not_said_to_be_enough(found, policy):
    many = policy.certificate.model_copy(update={"n": 300_000})
    large = replace(found, by_size=None, policy=edited(policy, certificate=many))
    assert "little" not in about_sizes(large)


@pytest.mark.parametrize("options", [{"control": "empirical"}, {"selection": "paper"}])
def test_rules_without_a_guarantee_certify_nothing(record, options):
    rule = {"loss": "zero_one", "control": "crc", "epsilon": 0.05, **options}
    page = text(policy_page(record, ss.calibrate(record, **rule)))
    assert "certif" not in page.partition("What moves the threshold")[2]
    assert "n threshold saved faster" in page
    wrong = ss.ExitRecord(np.ones((50, 1)), losses={"zero_one": np.tile([1, 0], (50, 1))})
    nothing = ss.calibrate(wrong, **rule)
    assert nothing.runs_full_model
    page = text(policy_page(wrong, nothing))
    assert "certif" not in page
    assert "nothing faster was found to keep" in page
    assert "Nothing faster would be found with up to 200 samples." in page


def test_exits_are_checked_to_improve():
    losses = np.asarray([[1, 0, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0]])
    record = ss.ExitRecord(np.full((4, 3), 0.5), losses={"zero_one": losses})
    (checked,) = exit_losses(record)
    assert checked.means == (1, 0.5, 0.75, 0)
    (rise,) = checked.rises
    assert (rise.exit, rise.by) == (2, 0.25)
    assert not rise.clear
    page = text(policy_page(record, ss.calibrate(record, epsilon=0.5)))
    assert "exit 3 is worse than exit 2 by 0.25" in page


def test_reliability_by_hand():
    record = ss.ExitRecord(
        [[0.95], [0.97], [0.31], [0.33]], losses={"zero_one": [[0, 0], [1, 0], [1, 0], [1, 1]]}
    )
    (exit_,) = reliability(record)
    assert exit_.confidences == pytest.approx((0.32, 0.96))
    assert exit_.accuracies == (0, 0.5)
    assert exit_.counts == (2, 2)
    assert exit_.error == pytest.approx(0.5 * 0.32 + 0.5 * 0.46)


# ---------------------------------------------------------------------------------------- the page


def test_the_page_says_the_promise_and_what_it_rests_on(record, policy):
    page = text(policy_page(record, policy))
    promise, _, conditions = str(policy).partition(", provided that ")
    assert promise in page
    assert conditions in page
    for assumption in policy.certificate.assumptions:
        assert assumption in page
    assert policy.certificate.data in page


def test_the_page_needs_nothing_but_itself(record, policy):
    page = policy_page(record, policy)
    assert not re.search(r"https?://|\b(src|href)=|@import|url\((?!#)", page)
    assert len(page.encode()) < 200_000
    assert page == policy_page(record, policy)


def test_drawings_are_described(record, policy):
    page = policy_page(record, policy)
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == 2 + 1 + 2 + 3 + 3  # path, exits, losses, movement, reliability
    for drawing in drawings:
        names = re.search(r'aria-labelledby="(\S+) (\S+)"', drawing)
        assert f'<title id="{names[1]}">' in drawing
        assert f'<desc id="{names[2]}">' in drawing
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"control": "ucb"}, "90 % upper bound"),
        (
            {"control": "ltt", "correction": "bonferroni", "bound": "hoeffding"},
            "the fastest that passes wins",
        ),
        ({"control": "crc"}, "CRC compares with ε the mean of the largest loss"),
        ({"control": "crc", "method": "ucb"}, "To keep the mean within ε"),
        ({"control": "crc", "selection": "paper"}, "no guarantee"),
        ({"control": "empirical"}, "looks at the measured risk alone"),
        ({"control": ss.Control("ucb", zero_bounded=True)}, "zero_bounded = True"),
        ({"risk": "zero-bounded gap"}, "zero_one zero-bounded gap"),
        ({"pool": 4000}, "not shown for a finite pool"),
        ({"path": "breakpoints"}, "every breakpoint"),
        ({"strict": True, "min_exit": 1}, "must be above its threshold; none before exit 2"),
        ({"score": "entropy"}, "of entropy"),
        ({"epsilon": 0.001}, "nothing faster is certified"),
        ({"epsilon": 0.99}, "ε = 0.99"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_every_kind_of_policy_has_a_page(record, options, said):
    policy = ss.calibrate(record, **{"loss": "zero_one", "epsilon": 0.05, **options})
    page = text(policy_page(record, policy))
    assert said in page
    assert "nan" not in page
    assert "Undefined" not in page


def test_bets_on_every_setting_are_made_for_few_levels(record):
    policy = ss.calibrate(
        record,
        loss="zero_one",
        control="ltt",
        bound="star",
        correction="bonferroni",
        path=[0.99, 0.9],
        epsilon=0.05,
    )
    found = findings(record, policy, [0.99, 0.9])
    assert len(found.by_epsilon[0].epsilons) == 11
    assert found.by_size is None
    assert "it is slow" in about_sizes(found)


def test_thresholds_of_each_exit(record):
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.1, path=FAMILY)
    assert isinstance(policy.threshold, tuple)
    page = text(policy_page(record, policy, path=FAMILY))
    assert "no. 1" in page
    with pytest.raises(ValueError, match=r"`path` must be given: .* family of per-exit thresholds"):
        policy_page(record, policy)


def test_a_record_of_thresholds_has_no_exits_to_tell_of(thresholds):
    page = text(policy_page(thresholds, ss.calibrate(thresholds, epsilon=0.05)))
    assert page.count("there are no exits to show") == 1  # said once
    assert "Dial fallback" in page
    bare = replace(thresholds, costs={})
    page = text(policy_page(bare, ss.calibrate(bare, epsilon=0.05)))
    assert "The record holds no costs" in page


def test_groups(record):
    grouped = replace(record, groups=np.arange(record.n) // 2)
    policy = ss.calibrate(grouped, loss="zero_one", epsilon=0.05)
    found = findings(grouped, policy)
    exits = policy.exits(grouped.confidences["top1"])
    assert found.setting.shares == pytest.approx(np.bincount(exits, minlength=4) / grouped.n)
    page = text(policy_page(grouped, policy))
    assert "400 groups" in page
    assert "whatever its group" in page


@pytest.mark.parametrize("kind", ["exits", "thresholds"])
@pytest.mark.parametrize("saving", [0.2, 0.3, 0.5, 0.7])
def test_a_budget_has_no_level_to_move(record, thresholds, kind, saving):
    held = {"exits": record, "thresholds": thresholds}[kind]
    loss = {"exits": "zero_one", "thresholds": "rouge_l"}[kind]
    policy = planning.lowest_epsilon(held, saving=saving, loss=loss, cost="layers").policy
    found = findings(held, policy)
    assert found.by_epsilon is None
    where = found.risks[0].upper_settings.index(policy.certificate.index)
    assert found.risks[0].upper[where] == policy.certificate.promises[0].upper_bound
    page = policy_page(held, policy)
    assert "chosen by its cost" in text(page)
    assert "<script" not in page
    assert "What moves the threshold" not in page


@pytest.mark.parametrize("kind", ["exits", "thresholds"])
def test_a_budget_for_the_full_model(record, thresholds, kind):
    held = {"exits": record, "thresholds": thresholds}[kind]
    policy = planning.lowest_epsilon(held, 100.0, loss=next(iter(held.losses))).policy
    page = text(policy_page(held, policy))
    assert "Always runs the full model: the budget allows it." in page
    assert "certified" not in page


def test_a_budget_that_nothing_is_certified_for(record):
    few = record.take(range(12))
    plan = planning.lowest_epsilon(few, saving=0.4, loss="zero_one", bound="empirical_bernstein")
    page = text(policy_page(few, plan.policy))
    assert "no level of the zero_one gap to the full model below 1 was certified" in page


def test_missing_labels(sample):
    full = ss.ExitRecord.from_logits(sample.logits, sample.labels, losses=["zero_one"])
    needed = ss.ExitRecord.from_logits(sample.logits, losses=["zero_one"]).needs_label()
    labels = np.where(np.isin(np.arange(800), needed), sample.labels, -1)
    part = ss.ExitRecord.from_logits(sample.logits, labels, losses=["zero_one"])
    policy = ss.calibrate(part, epsilon=0.05, seed=0)
    assert policy.threshold == ss.calibrate(full, epsilon=0.05, seed=0).threshold
    page = text(policy_page(part, policy))
    assert f"This uses only the {len(needed):,} samples with a label" in page
    assert "Reliability diagrams need the probability" in page


def test_a_record_without_labels(sample):
    record = ss.ExitRecord.from_logits(sample.logits)
    policy = ss.calibrate(record, risk="consistency", loss="zero_one", epsilon=0.05)
    page = text(policy_page(record, policy))
    assert "holds no losses against labels" in page
    assert "Reliability diagrams need the probability" in page


def test_the_cost_to_speak_of(record, policy):
    assert findings(record, policy).cost == "layers"
    assert findings(record, policy, cost="exit").cost == "exit"
    with pytest.raises(ValueError, match="Did you mean 'layers'"):
        policy_page(record, policy, cost="layer")


def test_names_from_files_cannot_run():
    evil = "<script>alert(1)</script>"
    rng = np.random.default_rng(0)
    record = ss.ExitRecord(
        {evil: rng.random((300, 1))},
        losses={evil: np.column_stack([rng.random(300) / 10, np.zeros(300)])},
        costs={evil: [1, 2]},
    )
    page = policy_page(record, ss.calibrate(record, epsilon=0.2))
    assert evil not in page
    assert "&lt;script&gt;alert(1)" in page
    assert page.count("<script") == 2


# ----------------------------------------------------------------- what does not fit together


def edited(policy, **changes):
    return policy.model_copy(update=changes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: r.take(range(700)), "the number of samples is 800 in the policy, but 700"),
        (lambda r: r.take(np.arange(800)[::-1]), "the fingerprint of the calibration data"),
        (lambda r: replace(r, fingerprint="sha256:" + "0" * 64), "the model's fingerprint is none"),
        (
            lambda r: replace(r, confidences={"entropy": r.confidences["entropy"]}),
            "the score is top1 in the policy, but entropy",
        ),
        (
            lambda r: replace(r, losses={"brier": r.losses["brier"]}),
            "the loss of the gap risk is zero_one in the policy, but brier",
        ),
        (lambda r: replace(r, groups=np.arange(800)), "how samples count"),
        (lambda r: replace(r, dtype="float16"), "`dtype`"),
        (
            lambda r: replace(r, costs={"layers": [1, 1, 1, 1000]}),
            "the mean layers cost of the full model and of the policy's setting is 12 and",
        ),
        (lambda r: replace(r, costs={}), "counted as costs is exit and layers in the policy"),
        (
            lambda r: replace(r, costs={**r.costs, "ms": [1, 2, 3, 4]}),
            "is exit and layers in the policy, but exit and layers and ms in the record",
        ),
    ],
)
def test_a_record_of_something_else_is_refused(record, policy, change, named):
    with pytest.raises(ValueError, match="do not belong together") as refused:
        policy_page(change(record), policy)
    assert named in str(refused.value)
    assert "Give the record that the policy was calibrated on" in str(refused.value)


def test_a_record_of_another_kind_is_refused(record, thresholds, policy):
    with pytest.raises(ValueError, match="a network with exits in the policy, but a dial"):
        policy_page(thresholds, policy)
    with pytest.raises(ValueError, match="a dial of a whole run in the policy, but a network"):
        policy_page(record, ss.calibrate(thresholds, epsilon=0.05))
    other = replace(thresholds, dial="rollback")
    with pytest.raises(ValueError, match="the dial is fallback in the policy, but rollback"):
        policy_page(other, ss.calibrate(thresholds, epsilon=0.05))
    with pytest.raises(TypeError, match="must be an ExitRecord or a ThresholdRecord"):
        policy_page(record.curve("gap", "zero_one"), policy)


def test_other_exits_are_refused(sample, policy):
    fewer = ss.ExitRecord.from_logits(sample.logits[:, :3], sample.labels)
    with pytest.raises(ValueError, match="number of exits is 4 in the policy, but 3"):
        policy_page(fewer, policy)


def test_a_path_of_ones_own_must_be_the_right_one(record):
    policy = ss.calibrate(record, loss="zero_one", path=[0.9, 0.8], epsilon=0.05)
    assert "given grid, 3 settings" in text(policy_page(record, policy, path=[0.9, 0.8]))
    with pytest.raises(ValueError, match="number of settings is 3 in the policy, but 4"):
        policy_page(record, policy, path=[0.9, 0.8, 0.7])
    with pytest.raises(ValueError, match="fingerprint of the calibration data"):
        policy_page(record, policy, path=[0.9, 0.7])


def test_an_edited_threshold_is_refused(record, policy):
    with pytest.raises(ValueError, match="`policy` contradicts itself"):
        policy_page(record, edited(policy, threshold=0.1))


def forged(policy, *place, value):
    """The policy with one value of its file changed."""
    content = json.loads(policy.model_dump_json())
    part = content
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    return ss.Policy.model_validate_json(json.dumps(content))


PROMISE = ("certificate", "promises", 0)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ((*PROMISE, "epsilon"), 0.001, "`threshold` is 0."),
        ((*PROMISE, "calibration_risk"), 0.0, "calibration_risk` is 0 in the policy"),
        ((*PROMISE, "upper_bound"), 0.0001, "upper_bound` is 0.0001 in the policy"),
        ((*PROMISE, "loss_range"), [-1, 2], "loss_range[1]` is 2 in the policy, but 1 when"),
        (("certificate", "delta"), 1e-6, "`threshold` is 0."),
        (("certificate", "delta"), None, "`threshold` is 0."),
        (("certificate", "guarantee"), "expectation", "guarantee` is expectation"),
        (("certificate", "n"), 600, "certificate.n` is 600 in the policy, but 800 when"),
        (("certificate", "exit_shares"), [1, 0, 0, 0], "exit_shares[0]` is 1 in"),
        (("certificate", "control"), "budget", "number behind the bound is 800 in"),
        (("certificate", "costs", "layers"), [12, 1], "layers cost"),
        (("settings", "threshold"), 0.1, "settings.threshold` is 0.1"),
    ],
)
def test_an_edited_promise_is_refused(record, policy, place, value, named):
    with pytest.raises(ValueError, match="in the policy, but") as refused:
        policy_page(record, forged(policy, *place, value=value))
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("place", "value", "named"),
    [
        ((*PROMISE, "epsilon"), 0.001, "epsilon` is 0.001 in the policy"),
        ((*PROMISE, "upper_bound"), 0.001, "upper_bound` is 0.001 in the policy"),
        (("certificate", "delta"), 1e-6, "epsilon` is"),
        (("certificate", "seed"), 5, "epsilon` is"),
        (("certificate", "n"), 500, "epsilon` is"),
        (("certificate", "n"), 900, "number behind the bound is 900 in the policy, but at most"),
        (("certificate", "control"), "ucb", "`threshold` is"),
    ],
)
def test_an_edited_budget_is_refused(record, place, value, named):
    policy = planning.lowest_epsilon(record, saving=0.3, loss="zero_one", cost="layers").policy
    with pytest.raises(ValueError, match="in the policy, but") as refused:
        policy_page(record, forged(policy, *place, value=value))
    assert named in str(refused.value)


# ----------------------------------------------------------------------------------------- drawings


@pytest.mark.parametrize("ends", [(0.001, 0.1), (1e-4, 0.5), (25, 800), (1250, 40000), (3, 4)])
def test_texts_along_an_axis_do_not_run_into_each_other(ends):
    axes = chart("a", "a", "a", x=ends, y=(0, 1), x_label="a", x_ticks=log_ticks(*ends), x_log=True)
    ticks = axes.x.ticks
    for before, after in pairwise(ticks):
        assert after.at - before.at >= LETTER_WIDTH * (len(before.text) + len(after.text)) / 4


def test_long_titles_are_shortened_and_kept_whole_for_hovering():
    name = "a_loss_whose_name_goes_on_and_on_beyond_the_edge_of_any_drawing"
    rng = np.random.default_rng(0)
    record = ss.ExitRecord(
        rng.random((200, 1)),
        losses={name: np.column_stack([rng.random(200) / 10, np.zeros(200)])},
    )
    page = policy_page(record, ss.calibrate(record, epsilon=0.2))
    titles = re.findall(r'<text class="title"[^>]*>([^<]+)</text>', page)
    assert max(len(title) for title in titles) <= 340 / 7  # a drawing is 340 wide
    short = next(title for title in titles if title.endswith("gap"))
    assert short.startswith("a_loss_whose_name")
    assert "…" in short
    assert f'<title id="risk-0-title">{name} gap</title>' in page


def test_wide_letters_leave_room_for_fewer():
    assert len(shortened("M" * 99, 340)) < len(shortened("a" * 99, 340)) < 99 / 2
    for title in ("", "a", "Samples that take each exit", "Saved, by failure probability δ"):
        assert shortened(title, 340) == title
    assert shortened("a" * 99, 0) == "a…a"


def test_an_axis_without_extent_still_has_two_ends():
    axes = chart("a", "a", "a", x=(1, 1), y=(0.2, 0.2), x_label="a")
    assert axes.x.low < 1 < axes.x.high
    assert axes.y.low < 0.2 < axes.y.high


@pytest.mark.parametrize("options", [{}, {"control": "crc"}, {"control": "crc", "method": "ucb"}])
def test_groups_averaged_per_sample(record, options):
    """The page is made from the certificate's average and largest size, and says them."""
    groups = np.repeat(np.arange(400), np.tile([1, 3], 200))
    grouped = replace(record, groups=groups)
    counted = {"average": "sample", "max_group_size": 5}
    policy = ss.calibrate(grouped, loss="zero_one", epsilon=0.05, **counted, **options)
    found = findings(grouped, policy)
    curve = grouped.curve(loss="zero_one", **counted)
    assert found.setting.risks == pytest.approx([curve.risk()[found.chosen]])
    page = text(policy_page(grouped, policy))
    assert "average per sample of groups" in page
    assert "groups of at most 5 samples, as declared" in page
    assert "every sample counts the same, whatever its group" in page
    by_group = ss.calibrate(grouped, loss="zero_one", epsilon=0.05, **options)
    page = text(policy_page(grouped, by_group))
    assert "average of group averages" in page
    assert "every group counts the same, whatever its size" in page


def test_policies_that_reports_do_not_show_are_named(record):
    best = calibrate_best({"a": record}, loss="zero_one", epsilon=0.05, correction="bonferroni")
    with pytest.raises(ValueError, match="best of several candidates, which reports do not show"):
        policy_page(record, best)
    dials = {"steps": [50, 25], "cache": [0.0, 0.1]}
    table = ss.ThresholdRecord(dials=dials, losses={"mse": np.zeros((400, 2))})
    with pytest.raises(ValueError, match="several dials, which reports do not show"):
        policy_page(table, ss.calibrate(table, epsilon=0.1))
