"""A budget of labels: which are asked for, where the walk stops, and what a plan says."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.simulate import Population
from tests.builders import refused, request_of

PATH = ss.Path.logit_grid(step=0.25)
STAR = ss.Control("ucb", "star")
TWO = [
    ss.Promise("zero_one", epsilon=0.05),
    ss.Promise("zero_one", risk="consistency", epsilon=0.2),
]


@pytest.fixture(scope="module")
def sample():
    return Population(n_exits=4, overconfidence=2.5).sample(600, seed=1)


@pytest.fixture(scope="module")
def record(sample):
    return ss.ExitRecord.from_logits(sample.logits, costs={"flops": [1, 2, 3, 5]})


@pytest.fixture(scope="module")
def labelled(sample):
    return ss.ExitRecord.from_logits(sample.logits, sample.labels, costs={"flops": [1, 2, 3, 5]})


def index_with(record, **options):
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.05, path=PATH, **options)
    return policy.certificate.index or 0


def lacking(record, setting):
    """Whether some sample takes an unlabelled exit that disagrees at a setting."""
    exits = ss.exits.exit_indices(record.confidences["top1"], PATH.thresholds[setting])
    rows = np.arange(record.n)
    unknown = np.isnan(record.losses["zero_one"]).any(axis=1)
    return bool((unknown & (record.inconsistencies["zero_one"][rows, exits] > 0)).any())


@pytest.mark.parametrize("budget", [0, 1, 10, 40, 100, 600])
def test_the_walk_stops_at_the_first_setting_that_lacks_a_label(sample, record, labelled, budget):
    rows = record.needs_label("zero_one", path=PATH, budget=budget)
    assert len(rows) == min(budget, len(record.needs_label("zero_one", path=PATH)))
    part = record.with_labels(rows, sample.labels[rows])
    policy = ss.calibrate(part, loss="zero_one", epsilon=0.05, path=PATH, missing="stop")
    stop = next((k for k in range(len(PATH)) if lacking(part, k)), None)
    expected = index_with(labelled)
    expected = expected if stop is None else min(expected, stop - 1)
    certificate = policy.certificate
    assert (certificate.index or 0) == expected
    assert certificate.stopped_at == stop
    assert certificate.samples.labels == len(rows)
    assert certificate.n_settings == len(PATH)
    assert certificate.samples.n == 600


@pytest.mark.parametrize("bound", ["star", "wsr", "hoeffding"])
def test_every_bound_stops_there(sample, record, labelled, bound):
    rows = record.needs_label("zero_one", path=PATH, budget=60)
    part = record.with_labels(rows, sample.labels[rows])
    stop = next(k for k in range(len(PATH)) if lacking(part, k))
    full = index_with(replace(labelled, order=3), bound=bound)
    part = replace(part, order=3)
    assert index_with(part, bound=bound, missing="stop") == min(full, stop - 1)


def test_any_labels_may_be_there(sample, labelled):
    """Not those that are asked for, but any: the result is that of all labels, or safer."""
    full, rng = index_with(labelled), np.random.default_rng(0)
    chosen = []
    for share in (0.5, 0.9, 0.99):
        labels = np.where(rng.random(600) < share, sample.labels, -1)
        part = ss.ExitRecord.from_logits(sample.logits, labels)
        chosen.append(index_with(part, missing="stop"))
    assert max(chosen) <= full
    assert chosen == sorted(chosen)


def test_the_labeller_is_asked_only_as_the_walk_goes_on(sample, record, labelled):
    asked = []

    def labeller(ids):
        asked.append(ids.tolist())
        return sample.labels[ids]

    asking = ss.Ask(labeller)
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.05, path=PATH, missing=asking)
    assert policy.certificate.index == index_with(labelled)
    flat = [each for ids in asked for each in ids]
    needed = record.needs_label("zero_one", path=PATH).tolist()
    assert flat == needed[: len(flat)]
    assert len(flat) < len(needed)
    assert len(asked) > 3
    assert policy.certificate.samples.labels == len(flat)
    # The walk failed at the setting after the chosen one, whose labels were the last to be needed.
    until = PATH.thresholds[: policy.certificate.index + 2]
    assert set(flat) == set(record.needs_label("zero_one", path=ss.Path(until, PATH.kind)))


@pytest.mark.parametrize("budget", [0, 7, 30])
def test_the_labeller_is_not_asked_beyond_the_budget(sample, record, budget):
    asked = []

    def labeller(ids):
        asked.extend(ids.tolist())
        return sample.labels[ids]

    index = index_with(record, missing=ss.Ask(labeller, budget))
    assert len(asked) == budget
    rows = record.needs_label("zero_one", path=PATH, budget=budget)
    part = record.with_labels(rows, sample.labels[rows])
    assert index == index_with(part, missing="worst") >= index_with(part, missing="stop")


def test_a_budget_reaches_further_than_its_first_missing_label(sample, record, labelled):
    """The exact test counts the labels beyond it as the worst loss; bets have to stop there."""
    asking = ss.Ask(lambda ids: sample.labels[ids], budget=20)
    part = record.with_labels(
        rows := record.needs_label("zero_one", path=PATH, budget=20), sample.labels[rows]
    )
    stop = next(k for k in range(len(PATH)) if lacking(part, k))
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.05, path=PATH, missing=asking)
    assert stop <= policy.certificate.index <= index_with(labelled)
    assert policy.certificate.stopped_at is None
    assert "labels missing" not in {each.key for each in policy.certificate.conditions}
    bets = ss.calibrate(
        record, loss="zero_one", epsilon=0.05, path=PATH, missing=asking, bound="star"
    )
    assert (bets.certificate.index or 0) < stop == bets.certificate.stopped_at


@pytest.mark.parametrize("unknown", [None, -1])
def test_the_walk_counts_what_the_labeller_does_not_know_as_the_worst(sample, record, unknown):
    known = set(record.needs_label("zero_one", path=PATH, budget=20).tolist())

    def labeller(ids):
        return [sample.labels[each] if each in known else unknown for each in ids.tolist()]

    rows = record.needs_label("zero_one", path=PATH, budget=20)
    part = record.with_labels(rows, sample.labels[rows])
    assert index_with(record, missing=ss.Ask(labeller)) == index_with(part, missing="worst")
    bets = {"bound": "star"}
    fixed = [replace(each, order=3) for each in (record, part)]
    asked, stopped = ss.Ask(labeller), "stop"
    assert index_with(fixed[0], missing=asked, **bets) == index_with(
        fixed[1], missing=stopped, **bets
    )


def test_several_risks_stop_together(sample, record):
    rows = record.needs_label("zero_one", path=PATH, budget=30)
    part = record.with_labels(rows, sample.labels[rows])
    policy = ss.calibrate(part, TWO, path=PATH, missing="stop")
    alone = ss.calibrate(part, TWO[:1], path=PATH, missing="stop")
    assert policy.certificate.index == alone.certificate.index is not None
    assert policy.certificate.stopped_at == alone.certificate.stopped_at


def test_the_certificate_says_how_many_labels_were_used(sample, record):
    rows = record.needs_label("zero_one", budget=50)
    part = record.with_labels(rows, sample.labels[rows])
    policy = ss.calibrate(part, loss="zero_one", epsilon=0.05, missing="stop")
    text = str(policy)
    assert "over the draw of the 600 calibration samples (of which 50 are labelled)" in text
    assert "the number of calibration samples was fixed before the model was run on them" in text
    nothing = str(ss.calibrate(record, loss="zero_one", epsilon=0.001, missing="stop"))
    assert "of which none are labelled; label more, or allow a larger loss" in nothing


def test_controls_that_may_not_stop_are_refused(record):
    for control in ("empirical", ss.Control("ltt", correction="bonferroni")):
        with refused("missing"):
            index_with(record, missing="stop", control=control)
    assert index_with(record, missing="stop", control="crc") >= 0


def test_labels_are_added_once_and_to_known_samples(sample, record):
    rows = record.needs_label("zero_one", budget=3)
    part = record.with_labels(rows, sample.labels[rows])
    with refused("rows"):
        part.with_labels(rows[:1], [0])
    with refused("rows"):
        record.with_labels([600], [0])
    with refused("rows"):
        record.with_labels([1, 1], [0, 0])
    with refused("rows"):
        record.with_labels(["a"], [0])
    with refused("labels"):
        record.with_labels(rows, [0])
    with refused("labels"):
        record.with_labels(rows)
    with pytest.raises(ValueError, match="`predictions`, which it does not hold"):
        replace(record, predictions=None).with_labels(rows, sample.labels[rows])


def test_labels_are_the_same_whenever_they_come(sample, record, labelled, tmp_path):
    rows = record.needs_label("zero_one")
    part = record.with_labels(rows[:50], sample.labels[rows[:50]])
    part.save(tmp_path / "part.parquet")
    part = ss.ExitRecord.load(tmp_path / "part.parquet")
    whole = part.with_labels(rows[50:], sample.labels[rows[50:]])
    known = ~np.isnan(whole.losses["zero_one"]).any(axis=1)
    assert known.sum() == len(rows)
    assert np.array_equal(whole.losses["zero_one"][known], labelled.losses["zero_one"][known])
    assert index_with(whole) == index_with(labelled)


def test_labels_by_name_and_losses_for_other_answers():
    logits = np.zeros((2, 2, 2))
    logits[:, 0, 0] = logits[:, 1, 1] = 2.0
    record = ss.ExitRecord.from_logits(logits, ids=["x", "y"])
    named = record.with_labels(["y"], ["dog"], classes=["cat", "dog"])
    assert named.losses["zero_one"][1].tolist() == [1, 0]
    assert np.isnan(named.losses["zero_one"][0]).all()
    given = record.with_labels(["y"], losses={"zero_one": [[1, 0]]})
    assert np.array_equal(given.losses["zero_one"], named.losses["zero_one"], equal_nan=True)
    with refused("classes"):
        record.with_labels(["y"], ["dog"])
    with refused("losses"):
        record.with_labels(["y"], losses={"brier": [[1, 0]]})


def test_taking_and_joining_keep_predictions(record):
    parts = [record.take(range(300)), record.take(range(300, 600))]
    assert np.array_equal(ss.ExitRecord.concatenate(parts).predictions, record.predictions)
    without = replace(parts[1], predictions=None)
    assert ss.ExitRecord.concatenate([parts[0], without]).predictions is None


def of_labels(labels, **changes):
    """A request that gives each calibration set of a study a budget of labels."""
    missing = ss.Ask(None, budget=labels)
    given = {"loss": "zero_one", "epsilon": 0.05, "path": PATH, "missing": missing}
    return request_of(**given | changes)


def test_evaluate_spends_a_budget(labelled):
    study = ss.evaluate(
        labelled,
        risk=of_labels(30),
        controls=["ucb"],
        epsilons=[0.05, 0.1],
        n_calibration=300,
        splits=20,
    )
    assert study.labels == ("ucb", "ucb, random labels", "ucb, all labels")
    assert study.about.n_labels == 30
    gain = {label: study.flops_gain[label].mean(axis=0) for label in study.labels}
    assert (gain["ucb, random labels"] < gain["ucb"]).all()
    assert (gain["ucb"] <= gain["ucb, all labels"]).all()
    assert "with 30 labels" in str(study)
    for wrong in ({"risk": "consistency"}, {"path": "breakpoints"}, {"labels": 301}):
        asked = of_labels(**({"labels": 30} | wrong))
        with refused("missing"):
            ss.evaluate(labelled, risk=asked, n_calibration=300, splits=2, controls=["ucb"])
    with refused("missing"):
        ss.evaluate(labelled, risk=of_labels(30), controls=["empirical"])


def test_the_budget_of_a_study_is_that_of_calibrate(sample, labelled):
    """A walk of `evaluate` on one calibration set, and the same by hand."""
    study = ss.evaluate(
        labelled,
        risk=of_labels(20),
        controls=["ucb"],
        epsilons=[0.05],
        n_calibration=300,
        splits=5,
        seed=4,
    )
    rng = np.random.default_rng(4)
    for split in range(5):
        rows = rng.permutation(600)[:300]
        record = ss.ExitRecord.from_logits(sample.logits[rows])
        wanted = record.needs_label("zero_one", path=PATH, budget=20)
        part = record.with_labels(wanted, sample.labels[rows][wanted])
        assert (
            study.thresholds["ucb"][split, 0] == PATH.thresholds[index_with(part, missing="worst")]
        )


def test_a_pool_for_a_budget(labelled):
    request = request_of(loss="zero_one", epsilon=0.05, path=PATH)
    options = {"sizes": (40, 150, 3000), "draws": 30}
    for pilot in (labelled, replace(labelled, losses={})):
        plan = ss.planning.unlabelled_pool(40, request, pilot, **options)
        assert plan.n == range(5000)[plan]
        assert plan.gain[2] > 0.9 * plan.gain[1] > plan.gain[0]
        bets = ss.planning.unlabelled_pool(40, replace(request, control=STAR), pilot, **options)
        assert bets.n == 150  # they stop, so with many samples the budget ends at safe settings
        assert bets.gain[0] < bets.gain[1] > bets.gain[2]
        assert plan.labelled_pilot == bool(pilot.losses)
    with refused("budget"):
        ss.planning.unlabelled_pool(0, request, labelled)
    with refused("pilot"):
        ss.planning.unlabelled_pool(10, request, labelled.curve(loss="zero_one"))


def test_a_calibration_that_stopped_runs_again(sample, record):
    rows = record.needs_label("zero_one", budget=30)
    part = record.with_labels(rows, sample.labels[rows])
    for wanted in (TWO[:1], TWO):
        policy = ss.calibrate(part, wanted, missing="stop")
        assert policy.certificate.stopped_at is not None
        assert policy.calibration.run(part) == policy


def test_a_file_does_not_keep_the_labeller(sample, record, tmp_path):
    asking = ss.Ask(lambda ids: sample.labels[ids], budget=40)
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.05, missing=asking)
    policy.save(tmp_path / "policy.json")
    loaded = ss.Policy.load(tmp_path / "policy.json")
    assert loaded.calibration == policy.calibration
    assert loaded.calibration.missing == ss.Ask(None, budget=40)
    with pytest.raises(ValueError, match=r"must be Ask\(labeller\): a policy's file does not keep"):
        loaded.calibration.run(record)
    again = replace(loaded.calibration, missing=asking).run(record)
    assert again.certificate == policy.certificate


@pytest.mark.parametrize(
    "facts",
    [
        lambda record: record.grouped(np.arange(600) // 2),
        lambda record: record.weighted(np.tile([1.5, 0.5], 300), max_weight=1.5),
        lambda record: record.sliced(np.arange(600) % 2),
        lambda record: record.drawn_from(9000),
    ],
)
@pytest.mark.parametrize("promise", [{}, {"among": "exits"}, {"within": "slices"}])
def test_labels_are_asked_for_with_every_draw_and_promise(sample, labelled, record, facts, promise):
    """What is certified is what all labels would certify."""
    given, full = facts(record), facts(labelled)
    if given.sampling.population is not None and promise:
        return
    if promise.get("within") and given.slices is None:
        return
    request = request_of(loss="zero_one", epsilon=0.25, path=PATH, **promise)
    asked = []

    def labeller(ids):
        asked.extend(ids.tolist())
        return sample.labels[ids]

    found = replace(request, missing=ss.Ask(labeller)).run(replace(given, order=full.order))
    expected = request.run(full)
    assert expected.threshold is not None
    assert found.threshold == expected.threshold
    assert len(set(asked)) == len(asked) == found.certificate.samples.labels
