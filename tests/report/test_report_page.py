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
SEVERAL = [
    ss.Promise("zero_one", epsilon=0.05),
    ss.Promise("brier", risk="consistency", epsilon=0.1),
]


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
    found = findings(record, ss.calibrate(record, SEVERAL))
    first, second = found.by_epsilon
    for i, j in [(10, 50), (50, 10), (40, 40)]:
        risks = [
            replace(SEVERAL[0], epsilon=first.epsilons[i]),
            replace(SEVERAL[1], epsilon=second.epsilons[j]),
        ]
        together = found.settings[min(first.settings[i], second.settings[j])]
        assert together.threshold == ss.calibrate(record, risks).threshold


def test_sizes_agree_with_planning(found, record):
    sizes = found.by_size.sizes
    request = ss.Calibration(ss.Promise("zero_one", epsilon=0.05), cost="layers")
    plan = planning.gain_by_samples(record, request, sizes=sizes, draws=100)
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


@pytest.mark.parametrize(
    "control", [ss.Control("empirical"), ss.Control("crc", selection="paper")], ids=str
)
def test_rules_without_a_guarantee_certify_nothing(record, control):
    rule = {"loss": "zero_one", "epsilon": 0.05, "control": control}
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


EACH = ss.Promise("zero_one", epsilon=0.05)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"control": "ucb"}, "90 % upper bound"),
        (
            {"control": ss.Control("ltt", "hoeffding", correction="bonferroni")},
            "the fastest that passes wins",
        ),
        ({"control": "crc"}, "CRC compares with ε the mean of the largest loss"),
        ({"control": ss.Control("crc", method="ucb")}, "To keep the mean within ε"),
        ({"control": ss.Control("crc", selection="paper")}, "no guarantee"),
        ({"control": "empirical"}, "looks at the measured risk alone"),
        ({"control": ss.Control("ucb", zero_bounded=True)}, "zero_bounded = True"),
        ({"promises": replace(EACH, risk="zero-bounded gap")}, "zero_one zero-bounded gap"),
        ({"path": "breakpoints"}, "every breakpoint"),
        (
            {"rule": ss.ExitRule(strict=True, min_exit=1)},
            "must be above its threshold; none before exit 2",
        ),
        ({"rule": "entropy"}, "of entropy"),
        ({"promises": replace(EACH, epsilon=0.001)}, "nothing faster is certified"),
        ({"promises": replace(EACH, epsilon=0.99)}, "ε = 0.99"),
        ({"promises": replace(EACH, above=0.5)}, "zero_one gap &gt; 0.5"),
        ({"promises": replace(EACH, worst=0.1, epsilon=0.5)}, "zero_one gap, worst 10 %"),
        ({"promises": replace(EACH, among="exits", epsilon=0.1)}, "zero_one gap of exits"),
        ({"promises": [EACH, ss.CostPromise("layers", at_most=9)]}, "the mean layers is at most 9"),
        ({"promises": [EACH, replace(EACH, among="exits")]}, "in several walks along the path"),
        ({"path": ss.Path.learn(200)}, "the path was learned on 200 others"),
    ],
    ids=str,
)
def test_every_kind_of_policy_has_a_page(record, changes, said, tmp_path):
    request = replace(ss.Calibration(EACH), **changes)
    request.run(record).save(tmp_path / "policy.json")
    page = text(policy_page(record, ss.Policy.load(tmp_path / "policy.json")))
    assert said in page
    assert "nan" not in page
    assert "Undefined" not in page


def halves(record):
    return record.sliced(np.arange(record.n) % 2)


FACTS = {
    "population": (lambda r: r.drawn_from(4000), "not shown for a finite pool"),
    "weights": (
        lambda r: halves(r).weighted({"0": 1.2, "1": 0.8}, max_weight=1.2),
        "under the distribution that the weights describe",
    ),
    "weights of groups": (
        lambda r: (
            halves(r)
            .weighted({"0": 1.2, "1": 0.8}, max_weight=1.2)
            .grouped(np.arange(r.n) // 2, average="sample", max_size=2)
        ),
        "every sample counts the same",
    ),
}


@pytest.mark.parametrize(("facts", "said"), FACTS.values(), ids=FACTS)
def test_every_fact_about_the_draw_is_kept(record, facts, said):
    known = facts(record)
    page = text(policy_page(known, ss.Calibration(EACH).run(known)))
    assert said in page
    assert "nan" not in page


@pytest.mark.parametrize("within", ["slices", "each slice"])
@pytest.mark.parametrize("facts", [halves, FACTS["weights"][0]], ids=["plain", "weights"])
def test_slices_have_pages(record, within, facts):
    sliced = facts(record)
    policy = ss.Calibration(replace(EACH, epsilon=0.1, within=within)).run(sliced)
    if within == "each slice":
        policy = policy["0"]
    found = findings(sliced, policy)
    kept = found.by_epsilon[0]
    assert kept.settings[kept.own] == found.chosen == policy.certificate.index > 0


def test_a_slice_has_the_same_page_without_the_samples_of_the_others(record):
    sliced = halves(record)
    policy = ss.Calibration(replace(EACH, epsilon=0.1, within="each slice")).run(sliced)["1"]
    alone = sliced.take(np.flatnonzero(sliced.slices == 1))
    assert policy_page(alone, policy) == policy_page(sliced, policy)
    other = sliced.take(np.flatnonzero(sliced.slices == 0))
    with pytest.raises(ValueError, match="the slice is 1 in the policy, but 0"):
        policy_page(other, policy)


def test_the_best_of_several_candidates_has_a_page(record):
    for how in ({"correction": "bonferroni"}, {"split": 0.3}):
        best = calibrate_best(record, EACH, **how)
        assert "candidate" in text(policy_page(record, best))
        found = findings(record, best)
        own = found.by_delta.deltas.index(0.1)
        assert found.by_delta.settings[own] == best.certificate.index


def test_a_calibration_that_grew_at_once_has_a_page(record):
    growing = ss.Calibration(EACH).start(horizon=500)
    growing.update(record)
    found = findings(record, growing.policy())
    own = found.by_epsilon[0]
    assert own.settings[own.own] == found.chosen > 0
    several = ss.Calibration(EACH).start(horizon=500)
    several.update(record.take(range(300)))
    several.update(record.take(range(300, 800)))
    with pytest.raises(ValueError, match="cannot be made again from one record"):
        policy_page(record, several.policy())


def test_several_dials_have_a_page():
    losses = (np.random.default_rng(0).random((400, 3)) < [0, 0.01, 0.3]).astype(float)
    dials = {"steps": [50, 25, 10], "cache": [0.0, 0.1, 0.1]}
    table = ss.ThresholdRecord(
        dials=dials, losses={"mse": losses}, costs={"seconds": [3.0, 2.0, 1.0]}
    )
    page = text(policy_page(table, ss.calibrate(table, epsilon=0.05)))
    assert "steps = 25, cache = 0.1" in page


def test_costs_move_with_the_levels(record):
    """Every level is what the request would choose, costs included."""
    request = ss.Calibration([EACH, ss.CostPromise("layers", at_most=6)])
    found = findings(record, request.run(record))
    levels = found.by_epsilon[0]
    for epsilon, index in list(zip(levels.epsilons, levels.settings, strict=True))[::5]:
        moved = replace(request, promises=(replace(EACH, epsilon=epsilon), request.promises[1]))
        assert (moved.run(record).certificate.index or 0) == index
    assert len(set(levels.settings)) > 2


def test_bets_on_every_setting_are_made_for_few_levels(record):
    control = ss.Control("ltt", "star", correction="bonferroni")
    policy = ss.calibrate(record, EACH, control=control, path=[0.99, 0.9])
    found = findings(record, policy)
    assert len(found.by_epsilon[0].epsilons) == 11
    assert found.by_size is None
    assert "it is slow" in about_sizes(found)


def test_thresholds_of_each_exit(record):
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.1, path=FAMILY)
    assert isinstance(policy.threshold, tuple)
    assert "no. 1" in text(policy_page(record, policy))


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
    budget = planning.Budget(saving=saving, cost="layers")
    policy = planning.lowest_epsilon(held, budget, loss=loss).policy
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
    full, part = replace(full, order=0), replace(part, order=0)
    policy = ss.calibrate(part, epsilon=0.05)
    assert policy.threshold == ss.calibrate(full, epsilon=0.05).threshold
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
        (lambda r: r.take(range(700)), "`certificate.n_samples` is 800 in the policy, but 700"),
        (lambda r: r.take(np.arange(800)[::-1]), "`certificate.data` is sha256:"),
        (lambda r: replace(r, fingerprint="sha256:" + "0" * 64), "`certificate.model` is none"),
        (
            lambda r: replace(r, confidences={"entropy": r.confidences["entropy"]}),
            "`score` is top1 in the policy, but entropy",
        ),
        (lambda r: replace(r, groups=np.arange(800)), "`certificate.unit` is samples"),
        (lambda r: replace(r, dtype="float16"), "`dtype`"),
    ],
)
def test_a_record_of_something_else_is_refused(record, policy, change, named):
    with pytest.raises(ValueError, match="not what this record gives") as refused:
        policy_page(change(record), policy)
    assert named in str(refused.value)
    assert "Give the record that the policy was calibrated on" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda r: replace(r, losses={"brier": r.losses["brier"]}), "`loss` must be one of: brier"),
        (
            lambda r: replace(r, costs={"layers": [1, 1, 1, 1000]}),
            "`certificate.costs.layers[0]` is 12 in the policy, but 1000",
        ),
        (lambda r: replace(r, costs={}), "`certificate.costs` is"),
        (lambda r: replace(r, costs={**r.costs, "ms": [1, 2, 3, 4]}), "`certificate.costs` is"),
    ],
)
def test_other_losses_and_costs_are_refused(record, policy, change, named):
    with pytest.raises(ValueError, match="`") as refused:
        policy_page(change(record), policy)
    assert named in str(refused.value)


def test_a_record_of_another_kind_is_refused(record, thresholds, policy):
    with pytest.raises(ValueError, match="a network with exits in the policy, but a dial"):
        policy_page(thresholds, policy)
    with pytest.raises(ValueError, match="a dial of a whole run in the policy, but a network"):
        policy_page(record, ss.calibrate(thresholds, epsilon=0.05))
    other = replace(thresholds, dial="rollback")
    with pytest.raises(
        ValueError, match=r"`settings` is .*fallback.* in the policy, but .*rollback"
    ):
        policy_page(other, ss.calibrate(thresholds, epsilon=0.05))
    with pytest.raises(TypeError, match="must be an ExitRecord or a ThresholdRecord"):
        policy_page(record.curve("gap", "zero_one"), policy)


def test_other_exits_are_refused(sample, policy):
    fewer = ss.ExitRecord.from_logits(sample.logits[:, :3], sample.labels)
    with pytest.raises(ValueError, match="`n_exits` is 4 in the policy, but 3"):
        policy_page(fewer, policy)


def test_a_path_of_ones_own_is_in_the_file(record):
    policy = ss.calibrate(record, loss="zero_one", path=[0.9, 0.8], epsilon=0.05)
    assert "given grid, 3 settings" in text(policy_page(record, policy))


def test_a_policy_that_does_not_say_how_it_was_made_is_refused(record, policy):
    with pytest.raises(ValueError, match="does not say how it was calibrated"):
        policy_page(record, edited(policy, calibration=None))


def test_an_edited_threshold_is_refused(record, policy):
    with pytest.raises(ValueError, match=r"`threshold` is 0\.1 in the policy"):
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
        ((*PROMISE, "epsilon"), 0.001, "promises[0].epsilon` is 0.001 in"),
        ((*PROMISE, "calibration_risk"), 0.0, "calibration_risk` is 0 in the policy"),
        ((*PROMISE, "upper_bound"), 0.0001, "upper_bound` is 0.0001 in the policy"),
        ((*PROMISE, "loss_range"), [-1, 2], "loss_range[1]` is 2 in the policy, but 1 when"),
        (("certificate", "delta"), 1e-6, "`certificate.delta` is 1e-06 in"),
        (("certificate", "delta"), None, "`certificate.delta` is none in"),
        (("certificate", "guarantee"), "expectation", "guarantee` is expectation"),
        (("certificate", "n"), 600, "certificate.n` is 600 in the policy, but 800 when"),
        (("certificate", "exit_shares"), [1, 0, 0, 0], "exit_shares[0]` is 1 in"),
        (("certificate", "control"), "budget", "promises[0].epsilon` is 0.05 in"),
        (("certificate", "costs", "layers"), [12, 1], "costs.layers[1]` is 1 in"),
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
        (("certificate", "delta"), 1e-6, "delta` is"),
        (("certificate", "seed"), 5, "seed` is 5 in"),
        (("certificate", "n"), 500, "epsilon` is"),
        (("certificate", "n"), 900, "number behind the bound is 900 in the policy, but 800"),
        (("certificate", "control"), "ucb", "in the policy, but"),
    ],
)
def test_an_edited_budget_is_refused(record, place, value, named):
    budget = planning.Budget(saving=0.3, cost="layers")
    policy = planning.lowest_epsilon(record, budget, loss="zero_one").policy
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


@pytest.mark.parametrize(
    "control", [ss.Control("ucb"), ss.Control("crc"), ss.Control("crc", method="ucb")], ids=str
)
def test_groups_averaged_per_sample(record, control):
    """The page is made from the certificate's average and largest size, and says them."""
    groups = np.repeat(np.arange(400), np.tile([1, 3], 200))
    grouped = record.grouped(groups, average="sample", max_size=5)
    policy = ss.calibrate(grouped, EACH, control=control)
    found = findings(grouped, policy)
    curve = grouped.curve(loss="zero_one")
    assert found.setting.risks == pytest.approx([curve.risk()[found.chosen]])
    page = text(policy_page(grouped, policy))
    assert "average per sample of groups" in page
    assert "groups of at most 5 samples, as declared" in page
    assert "every sample counts the same, whatever its group" in page
    by_group = record.grouped(groups)
    page = text(policy_page(by_group, ss.calibrate(by_group, EACH, control=control)))
    assert "average of group averages" in page
    assert "every group counts the same, whatever its size" in page


def test_labels_that_were_asked_for_must_be_in_the_record(sample, tmp_path):
    """A policy's file does not keep the labeller: the record shows which labels it gave."""
    unlabelled = ss.ExitRecord.from_logits(sample.logits)
    asked = []

    def labeller(ids):
        asked.extend(ids.tolist())
        return sample.labels[ids]

    request = ss.Calibration(EACH, missing=ss.Ask(labeller, budget=40))
    policy = request.run(unlabelled)
    policy.save(tmp_path / "policy.json")
    loaded = ss.Policy.load(tmp_path / "policy.json")
    labelled = unlabelled.with_labels(asked, sample.labels[asked])
    for each in (policy, loaded):
        assert findings(labelled, each).chosen == policy.certificate.index > 0
    assert len(set(asked)) == len(asked)  # a report asks nobody
    with pytest.raises(ValueError, match="give the record with just these labels"):
        policy_page(unlabelled, loaded)


def test_records_on_the_disk_have_pages(record, tmp_path):
    record.take(range(400)).save(tmp_path / "a.parquet")
    record.take(range(400, 800)).save(tmp_path / "b.parquet")
    folder = ss.ShardedRecord(tmp_path)
    policy = ss.calibrate(folder, EACH)
    assert findings(folder, policy).chosen == policy.certificate.index > 0
