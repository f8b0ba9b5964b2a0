"""Policies and studies of every kind, made from small data: what the golden files freeze.

Everything here that speaks the library's API is to be changed together with it. What must not
change are the names of the cases, and what `describe` returns for them.
"""

import random
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path as FilePath

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.curves import sample_order
from swiftsure.study.budgets import Budget, lowest_epsilon
from swiftsure.study.planning import gain_by_samples, samples_needed
from swiftsure.study.unlabelled import unlabelled_pool

__all__ = ["POLICIES", "STUDIES", "describe", "drawing", "policy_of", "study_of"]

POLICIES, STUDIES = {}, {}

COARSE = ss.Path.logit_grid(step=0.25)
"""A path of 99 settings."""
CLASSES, EXITS = 6, 4
FINE = 1024
"""Confidences and losses are whole multiples of 1 / FINE, so that sums of them are exact."""


def policy(make):
    """Freeze the policy that a function makes."""
    POLICIES[make.__name__] = make
    return make


def study(make):
    """Freeze the numbers that a function returns."""
    STUDIES[make.__name__] = make
    return make


@contextmanager
def drawing(name):
    """Draw the same seeds whenever something of this name is made, whatever was made before."""
    before = sample_order.randbits
    sample_order.randbits = random.Random(name).getrandbits
    try:
        yield
    finally:
        sample_order.randbits = before


def data(make):
    """Make data once for all cases."""

    @cache
    @wraps(make)
    def made(*arguments, **options):
        with drawing(make.__name__):
            return make(*arguments, **options)

    return made


# ----------------------------------------------------------------------------------------- the data


def rounded(tables):
    return {name: np.round(values * FINE) / FINE for name, values in tables.items()}


@data
def classified(n=600, seed=0):
    """Logits that grow surer from exit to exit, and labels."""
    rng = np.random.default_rng([n, seed])
    labels = rng.integers(CLASSES, size=n)
    ability = np.linspace(1.5, 3.0, EXITS) * (0.5 + 1.5 * rng.random((n, 1)))
    typical = 2.0 * rng.normal(size=(n, 1, CLASSES))  # mistakes that all exits share
    noise = typical / 1.5 + 0.5 * rng.normal(size=(n, EXITS, CLASSES))
    return 2 * (np.eye(CLASSES)[labels][:, None] * ability[..., None] + noise), labels


def softmax(logits):
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


@data
def exits(n=600, seed=0, first_id=0):
    """A record of a classifier with four exits, two scores and two losses."""
    logits, labels = classified(n, seed)
    made = ss.ExitRecord.from_logits(
        logits,
        labels,
        ["top1", "top_diff"],
        costs={"flops": [1.0, 2.0, 3.0, 5.0]},
        ids=np.arange(first_id, first_id + n),
    )
    return replace(
        made,
        confidences=rounded(made.confidences),
        losses=rounded(made.losses),
        inconsistencies=rounded(made.inconsistencies),
        order=seed + 7,
    )


@data
def pilot():
    """A record of other samples."""
    return exits(300, 1, first_id=10_000)


@data
def grouped(n=600, largest=4):
    """The record, whose samples come from users who sent up to four each."""
    sizes = np.random.default_rng(3).integers(1, largest + 1, n)
    return replace(exits(n), groups=np.repeat(np.arange(n), sizes)[:n])


@data
def unlabelled(n=600):
    """The record without its labels; the classes that exits predict are known."""
    logits, labels = classified(n)
    made = ss.ExitRecord.from_logits(logits, score="top1", ids=np.arange(n))
    return replace(made, confidences=rounded(made.confidences), order=7), labels


@data
def sliced(n=600, share=0.4):
    """The record with two slices."""
    return replace(exits(n), slices=np.where(np.arange(n) < share * n, "north", "south"))


@data
def generated(n=500, seed=0):
    """A record of a system that is run once per threshold."""
    rng = np.random.default_rng([5, seed])
    quality = rng.integers(0, 700, (n, 1)) / FINE
    worse = rng.integers(-60, 90, (n, 5)) * np.linspace(0, 1, 5).round(2) + [0, 0, 5, 20, 90]
    apart = np.cumsum(rng.random((n, 5)) < [0.0, 0.005, 0.01, 0.05, 0.3], axis=1) > 0
    return ss.ThresholdRecord(
        [1.0, 0.8, 0.6, 0.4, 0.2],
        losses={"rouge_l": np.clip(quality + np.round(worse) / FINE, 0, 1)},
        inconsistencies={"exact_match": apart.astype(float)},
        costs={
            "layers": [24.0, 18.0, 12.0, 8.0, 4.0],
            "seconds": rng.integers(50, 80, (n, 5)) * [1.0, 0.8, 0.7, 0.5, 0.3],
        },
        dial="confidence",
        settings={"look_every": 2},
        ids=np.arange(1000 * seed, 1000 * seed + n),
        order=11,
    )


@data
def dials(n=500, seed=0):
    """A record of two dials; which setting is the best depends on the cost."""
    rng = np.random.default_rng([9, seed])
    apart = rng.random((n, 5)) < [0.0, 0.005, 0.03, 0.01, 0.12]
    return ss.ThresholdRecord(
        dials=ss.dial_grid(
            {"steps": [20, 10], "fallback": [0.5, 0.2]}, {"steps": 50, "fallback": 1.0}
        ),
        inconsistencies={"exact_match": apart.astype(float)},
        costs={"passes": [1.0, 0.8, 0.4, 0.6, 0.2], "money": [5.0, 2.0, 1.5, 4.0, 1.0]},
        ids=np.arange(1000 * seed, 1000 * seed + n),
        order=13,
    )


@data
def cascade_record(n=500, dear=10.0):
    """A record of two models, the second of which may also be run alone."""
    record = exits(n)
    pair = [0, 3]
    return ss.ExitRecord(
        {"top1": record.confidences["top1"][:, :1]},
        losses={"zero_one": record.losses["zero_one"][:, pair]},
        inconsistencies={"zero_one": record.inconsistencies["zero_one"][:, pair]},
        costs={"usd": [1.0, 1.0 + dear]},
        full_costs={"usd": dear},
        ids=np.arange(n),
        order=17,
    )


def arrays(n=400):
    """Losses of every sample at six settings, in quarters."""
    rng = np.random.default_rng(21)
    losses = rng.integers(-2, 3, (n, 6)) / 4 * (rng.random((n, 6)) < np.linspace(0, 0.3, 6))
    return losses + (np.arange(6) > 3) * 0.1


@data
def estimators():
    """A cascade of two estimators that scikit-learn takes for classifiers."""
    base = pytest.importorskip("sklearn.base")

    class Known(base.ClassifierMixin, base.BaseEstimator):
        """Knows the probabilities of all samples, whose numbers it is given."""

        def __init__(self, probabilities):
            self.probabilities = probabilities

        def fit(self, rows, labels):
            self.classes_ = np.unique(labels)
            return self

        def predict_proba(self, rows):
            return np.asarray(self.probabilities)[rows[:, 0].astype(int)]

    logits, labels = classified()
    models = [Known(softmax(logits[:, k])) for k in (0, 3)]
    made = ss.CertifiedCascade(models, epsilon=0.15, random_state=0, costs=[1.0, 10.0])
    return made.fit(np.arange(600)[:, None], labels)


def request(*promises, path=COARSE, **options):
    """A request on a coarse path."""
    return ss.Calibration(promises, path=path, **options)


def promised(loss="zero_one", epsilon=0.05, **options):
    """A request of one promise."""
    words = {"risk", "above", "worst", "among", "within"} & options.keys()
    promise = ss.Promise(loss, epsilon=epsilon, **{name: options.pop(name) for name in words})
    return request(promise, **options)


def calibrated(record=None, loss="zero_one", epsilon=0.05, **options):
    """The policy of most cases: the gap of 0-1 losses on a coarse path."""
    record = exits() if record is None else record
    if not isinstance(record, ss.ExitRecord | ss.ShardedRecord):
        options.setdefault("path", None)
    return promised(loss, epsilon, **options).run(record)


def per_sample(record, max_size):
    """A record of groups, whose samples count alike."""
    return record.grouped(record.groups, average="sample", max_size=max_size)


# --------------------------------------------------------------------------------- kinds of promise


@policy
def mean_gap_of_zero_one_losses():
    return calibrated()


@policy
def mean_gap_of_brier_losses():
    return calibrated(loss="brier")


@policy
def consistency_of_zero_one_losses():
    return calibrated(risk="consistency", epsilon=0.1)


@policy
def consistency_of_distributions():
    return calibrated(loss="brier", risk="consistency", epsilon=0.1)


@policy
def zero_bounded_gap():
    return calibrated(risk="zero-bounded gap", epsilon=0.1)


@policy
def three_risks_at_once():
    promises = [
        ss.Promise("zero_one", epsilon=0.06),
        ss.Promise("brier", epsilon=0.08),
        ss.Promise("zero_one", epsilon=0.15, risk="consistency"),
    ]
    return request(*promises).run(exits())


@policy
def tail_of_a_gap():
    return calibrated(loss="brier", epsilon=0.1, above=0.2)


@policy
def tail_of_a_consistency():
    return calibrated(loss="brier", risk="consistency", epsilon=0.1, above=0.25)


@policy
def worst_share_of_the_losses():
    return calibrated(loss="brier", epsilon=0.4, worst=0.2)


@policy
def worst_share_of_losses_above_a_point():
    return calibrated(loss="brier", epsilon=0.5, worst=0.2, above=0.125)


@policy
def tail_and_mean_and_worst_share_at_once():
    promises = [
        ss.Promise("brier", epsilon=0.12, above=0.25),
        ss.Promise("brier", epsilon=0.06),
        ss.Promise("brier", epsilon=0.5, worst=0.2),
    ]
    return request(*promises).run(exits())


@policy
def selective_gap():
    return calibrated(among="exits", epsilon=0.1)


@policy
def selective_gap_of_brier_losses():
    return calibrated(loss="brier", among="exits", epsilon=0.15)


@policy
def selective_consistency():
    return calibrated(risk="consistency", among="exits", epsilon=0.15)


@policy
def risk_and_mean_cost():
    return request(ss.Promise("zero_one", epsilon=0.05), ss.CostPromise("flops", at_most=4.0)).run(
        exits()
    )


@policy
def risk_and_a_mean_cost_that_is_not_certified():
    return request(ss.Promise("zero_one", epsilon=0.05), ss.CostPromise("flops", at_most=1.5)).run(
        exits()
    )


@policy
def weights_of_samples():
    weights = np.where(np.arange(600) % 2, 1.5, 0.5)
    return calibrated(exits().weighted(weights, max_weight=1.5), epsilon=0.1)


@policy
def weights_of_slices():
    weights = {"north": 1.25, "south": 0.75}
    return calibrated(sliced(share=0.5).weighted(weights, max_weight=1.25), epsilon=0.1)


@policy
def estimated_weights():
    weights = np.where(np.arange(600) % 4, 1.0, 2.0)
    return calibrated(exits().weighted(weights, max_weight=2.0, estimated=True), epsilon=0.15)


@policy
def weights_of_a_tail():
    weights = np.where(np.arange(600) % 2, 1.5, 0.5)
    return calibrated(exits().weighted(weights, max_weight=1.5), "brier", 0.15, above=0.25)


@policy
def one_setting_for_all_slices():
    return calibrated(sliced(), epsilon=0.08, within="slices")


@policy
def a_setting_for_each_slice_together():
    return calibrated(sliced(), epsilon=0.08, within="each slice")


@policy
def a_setting_for_each_slice_alone():
    return calibrated(sliced(), "brier", 0.1, within="each slice", delta=0.2)


@policy
def a_slice_that_is_too_small():
    return calibrated(sliced(share=0.02), epsilon=0.08, within="slices")


@policy
def datasets_as_slices():
    datasets = {"day": exits(300, 4), "night": exits(400, 5, first_id=5000)}
    return calibrated(ss.joined_datasets(datasets), "brier", 0.1, within="slices")


@policy
def a_tail_in_every_slice():
    return calibrated(sliced(), "brier", 0.15, above=0.25, within="slices")


# ---------------------------------------------------------------------------------- kinds of record


@policy
def record_of_logits():
    logits, labels = classified()
    return calibrated(replace(ss.ExitRecord.from_logits(logits, labels), order=7))


@policy
def record_of_probabilities_with_named_classes():
    logits, labels = classified(300)
    names = [f"class {k}" for k in range(CLASSES)]
    record = ss.ExitRecord.from_probabilities(softmax(logits), [names[k] for k in labels], names)
    return calibrated(replace(record, order=7), epsilon=0.08)


@policy
def record_of_logits_with_temperatures():
    logits, labels = classified()
    record = ss.ExitRecord.from_logits(logits, labels, temperatures=[1.5, 1.25, 1.0, 1.0])
    return calibrated(replace(record, order=7))


@policy
def second_of_two_scores():
    return calibrated(rule=ss.ExitRule("top_diff"))


@policy
def order_drawn_at_random():
    return calibrated(replace(exits(), order=None), loss="brier")


@policy
def order_of_a_given_seed():
    return calibrated(replace(exits(), order=3), loss="brier")


@policy
def groups_weighted_alike():
    return calibrated(grouped(), epsilon=0.1)


@policy
def samples_of_groups_weighted_alike():
    return calibrated(per_sample(grouped(), 4), epsilon=0.15)


@policy
def groups_and_two_risks():
    promises = [
        ss.Promise("zero_one", epsilon=0.12),
        ss.Promise("brier", epsilon=0.15, risk="consistency"),
    ]
    return request(*promises).run(grouped())


@policy
def few_labels_stop_the_walk():
    record, labels = unlabelled()
    wanted = record.needs_label("zero_one", budget=90)
    return calibrated(record.with_labels(wanted, labels[wanted]), epsilon=0.12, missing="stop")


@policy
def missing_labels_are_assumed_the_worst():
    record, labels = unlabelled()
    known = np.flatnonzero(np.arange(600) % 10 > 0)
    return calibrated(record.with_labels(known, labels[known]), epsilon=0.12, missing="worst")


@policy
def labels_asked_for_as_the_walk_goes():
    record, labels = unlabelled()
    return calibrated(record, epsilon=0.06, missing=ss.Ask(lambda ids: labels[ids]))


@policy
def labels_asked_for_within_a_budget():
    record, labels = unlabelled()
    return calibrated(record, epsilon=0.12, missing=ss.Ask(lambda ids: labels[ids], 60))


@policy
def no_labels_at_all():
    return calibrated(unlabelled()[0], risk="consistency", epsilon=0.1)


@policy
def record_of_shards():
    record = exits()
    with tempfile.TemporaryDirectory() as folder:
        for k, rows in enumerate(np.array_split(np.arange(record.n), 3)):
            record.take(rows).save(FilePath(folder) / f"{k}.parquet", durable=False)
        return calibrated(ss.ShardedRecord(folder), loss="brier", path=COARSE)


@policy
def thresholds_of_a_whole_run():
    return calibrated(generated(), "rouge_l", 0.03)


@policy
def thresholds_of_a_whole_run_without_labels():
    return calibrated(generated(), "exact_match", 0.05, risk="consistency")


@policy
def thresholds_of_a_whole_run_and_its_tail():
    return calibrated(generated(), "rouge_l", 0.1, above=0.0625)


@policy
def thresholds_of_a_whole_run_and_a_mean_cost():
    promises = [ss.Promise("rouge_l", epsilon=0.05), ss.CostPromise("layers", at_most=20.0)]
    return request(*promises, path=None).run(generated())


@policy
def dials_in_the_order_given():
    return calibrated(dials(), "exact_match", 0.05, risk="consistency")


@policy
def dials_along_a_front_of_a_pilot():
    path = ss.Path.pareto(dials(300, 1), cost="passes")
    return calibrated(dials(), "exact_match", 0.05, risk="consistency", path=path)


@policy
def dials_with_a_split_pilot():
    return calibrated(dials(), "exact_match", 0.06, risk="consistency", path=ss.Path.learn(0.3))


@policy
def dials_in_a_given_order():
    path = ss.Path.settings([3, 1], dials())
    return calibrated(dials(), "exact_match", 0.05, risk="consistency", path=path)


@policy
def dials_on_branches_that_pass_delta_on():
    path = ss.Path.branching(dials().branches(along="steps"), dials(), cost="money")
    return calibrated(dials(), "exact_match", 0.05, risk="consistency", path=path)


@policy
def dials_on_branches_that_keep_their_delta():
    path = ss.Path.branching([[1, 2], [3, 4]], dials(), flow=False, cost="passes")
    return calibrated(dials(), "exact_match", 0.05, risk="consistency", path=path)


@policy
def dials_on_branches_with_groups():
    record = replace(dials(), groups=np.arange(500) // 2)
    path = ss.Path.branching([[1, 2], [3, 4]], record, cost="passes")
    return calibrated(per_sample(record, 2), "exact_match", 0.08, risk="consistency", path=path)


@policy
def cascade_with_a_price():
    return calibrated(cascade_record(), epsilon=0.1)


@policy
def cascade_with_a_router():
    record = cascade_record()
    hopeless = np.asarray(1 - record.confidences["top1"][:, 0]) ** 2
    both = record.routed(hopeless, cost={"usd": 0.0625})
    return calibrated(both, epsilon=0.1, path=ss.Path.learn(0.25, cost="usd"))


@policy
def cascade_that_costs_more_than_its_large_model():
    return calibrated(cascade_record(dear=1.25), epsilon=0.1)


@policy
def curve_from_arrays():
    curve = ss.RiskCurve.from_losses([None, 5, 4, 3, 2, 1], arrays(), [6, 5, 4, 3, 2, 1], order=7)
    return ss.calibrate(curve, epsilon=0.05)


@policy
def curve_of_binary_losses():
    losses = (arrays() > 0).astype(float)
    curve = ss.RiskCurve.from_losses(
        [None, 5, 4, 3, 2, 1], losses * (np.arange(6) > 0), loss_range=(0, 1), binary=True, order=7
    )
    return ss.calibrate(curve, epsilon=0.1)


@policy
def curve_of_absolute_losses():
    curve = ss.RiskCurve.from_losses(
        [6, 5, 4, 3, 2, 1],
        np.abs(arrays()),
        loss_range=(0, 1),
        relative=False,
        loss="harm",
        order=7,
    )
    return ss.calibrate(curve, epsilon=0.1)


@policy
def curve_of_groups():
    curve = ss.RiskCurve.from_losses(
        [None, 5, 4, 3, 2, 1],
        arrays(),
        order=7,
    ).grouped(np.arange(400) // 2, average="sample", max_size=2)
    return ss.calibrate(curve, epsilon=0.1)


@policy
def estimators_in_a_cascade():
    return estimators().policy_


# ----------------------------------------------------------------------------------------- controls


@policy
def ltt_in_fixed_sequence():
    return calibrated(loss="brier", control="ltt")


@policy
def ltt_with_bonferroni():
    return calibrated(epsilon=0.1, control=ss.Control("ltt", correction="bonferroni"))


@policy
def ltt_as_the_paper_compares_it():
    return calibrated(loss="brier", epsilon=0.2, control=CONTROLS["ltt"])


@policy
def bound_star():
    return calibrated(bound="star")


@policy
def bound_wsr():
    return calibrated(loss="brier", bound="wsr")


@policy
def bound_hoeffding():
    return calibrated(epsilon=0.15, bound="hoeffding")


@policy
def bound_bentkus():
    return calibrated(risk="consistency", epsilon=0.1, bound="bentkus")


@policy
def bound_hoeffding_bentkus():
    return calibrated(risk="consistency", epsilon=0.1, bound="hoeffding_bentkus")


@policy
def bound_empirical_bernstein():
    return calibrated(risk="consistency", epsilon=0.15, bound="empirical_bernstein")


@policy
def bound_binomial():
    return calibrated(risk="consistency", epsilon=0.1, bound="binomial", delta=0.05)


@policy
def bound_trinomial():
    return calibrated(bound="trinomial", delta=0.01, epsilon=0.08)


@policy
def zero_bounded_losses_in_the_test():
    return calibrated(epsilon=0.08, control=ss.Control("ucb", zero_bounded=True))


@policy
def crc_of_running_maxima():
    return calibrated(control="crc", epsilon=0.08)


@policy
def crc_of_two_risks():
    promises = [ss.Promise("zero_one", epsilon=0.1), ss.Promise("brier", epsilon=0.15)]
    return request(*promises, control="crc").run(exits())


@policy
def crc_by_a_test():
    return calibrated(control=ss.Control("crc", method="ucb"))


@policy
def crc_by_a_test_with_a_given_share():
    control = ss.Control("crc", "star", method="ucb", delta_prime=0.005)
    return calibrated(epsilon=0.08, control=control)


@policy
def crc_in_a_contiguous_run():
    return calibrated(control=ss.Control("crc", selection="contiguous"))


@policy
def crc_as_in_the_paper():
    return calibrated(control=ss.Control("crc", selection="paper"))


@policy
def crc_of_samples_of_groups():
    return calibrated(per_sample(grouped(), 4), epsilon=0.1, control="crc")


@policy
def empirical_rule():
    return calibrated(control="empirical")


@policy
def nothing_is_certified():
    return calibrated(exits(60), epsilon=0.01)


# ---------------------------------------------------------------------------------- paths and exits


@policy
def the_default_path():
    return ss.calibrate(exits(), loss="zero_one", epsilon=0.05)


@policy
def every_breakpoint():
    return calibrated(path="breakpoints")


@policy
def given_thresholds():
    return calibrated(path=[0.5, 0.95, 0.9, 0.8, 0.7])


@policy
def thresholds_for_each_exit():
    return calibrated(path=[[0.95, 0.9, 0.8], [0.9, 0.75, 0.625], [0.75, None, 0.5]])


@policy
def exits_along_a_front_of_a_pilot():
    return calibrated(path=ss.Path.pareto(pilot(), loss="zero_one", cost="flops"))


@policy
def exits_with_a_split_pilot():
    return calibrated(path=ss.Path.learn(200), epsilon=0.08)


@policy
def exits_by_a_learned_score():
    return calibrated(rule=ss.LearnedScore.fit(pilot()))


@policy
def strictly_above_the_threshold():
    return calibrated(rule=ss.ExitRule(strict=True))


@policy
def first_exit_is_never_taken():
    return calibrated(rule=ss.ExitRule(min_exit=1))


# ---------------------------------------------------------------------- pools, growth, other makers


@policy
def finite_pool():
    return calibrated(exits().drawn_from(900))


@policy
def finite_pool_with_bets():
    return calibrated(exits().drawn_from(1200), loss="brier")


@policy
def a_calibration_that_grows():
    growing = promised(epsilon=0.08).start(500)
    for k in range(3):
        growing.update(exits(200, k, first_id=200 * k))
    return growing.policy()


@policy
def a_calibration_of_two_risks_that_grows():
    promises = [
        ss.Promise("rouge_l", epsilon=0.05),
        ss.Promise("rouge_l", epsilon=0.15, above=0.0625),
    ]
    growing = request(*promises, path=None).start(400)
    for k in range(2):
        growing.update(generated(300, k))
    return growing.policy()


@policy
def a_calibration_of_groups_that_grows():
    growing = promised(epsilon=0.12).start(200)
    growing.update(grouped())
    return growing.policy()


@policy
def lowest_epsilon_within_a_budget():
    plan = lowest_epsilon(exits(), Budget(3.0, cost="flops"), loss="zero_one", path=COARSE)
    return plan.policy


@policy
def lowest_epsilon_for_a_saving():
    return lowest_epsilon(generated(), Budget(saving=0.4, cost="layers"), loss="rouge_l").policy


@policy
def lowest_epsilon_of_groups():
    budget = Budget(saving=0.3, cost="flops")
    return lowest_epsilon(grouped(), budget, loss="brier", path=COARSE).policy


@policy
def best_of_two_scores_by_a_pilot():
    return ss.calibrate_best(exits(), promised(epsilon=0.08, cost="flops", path=None), split=200)


@policy
def best_of_two_scores_at_half_of_delta():
    return ss.calibrate_best(exits(), promised(cost="flops"), correction="bonferroni")


# ----------------------------------------------------------------------------- what is frozen of it


@cache
def policy_of(name):
    """Return the policy of a case, made once."""
    with drawing(name):
        return POLICIES[name]()


def study_of(name):
    """Return the numbers of a study."""
    with drawing(name):
        return STUDIES[name]()


def describe(made):
    """Return what is frozen of a policy, as plain values."""
    if isinstance(made, ss.SlicedPolicy):
        slices = {name: describe(each) for name, each in made.policies.items()}
        return {"by_slice": slices, "delta": made.delta}
    certificate = made.certificate
    selection = certificate.selection
    found = {
        "threshold": made.threshold,
        "settings": made.settings,
        "score": made.score,
        "n_exits": made.n_exits,
        "strict": made.strict,
        "min_exit": made.min_exit,
        "temperatures": made.temperatures,
        "promises": [
            {
                "risk": promise.risk.replace(" ", "-"),
                "loss": promise.loss,
                "epsilon": promise.epsilon,
                "largest_loss": promise.loss_range[1],
                "bound": promise.bound,
                "calibration_risk": promise.calibration_risk,
                "upper_bound": promise.upper_bound,
                "above": promise.above,
                "worst": promise.worst,
                "among": None if promise.among == "all" else promise.among,
                "within": promise.within,
            }
            for promise in certificate.promises
        ],
        "guarantee": certificate.guarantee,
        "control": certificate.control,
        "options": certificate.options,
        "delta": certificate.delta,
        "n": certificate.samples.n,
        "n_samples": certificate.samples.n_samples,
        "unit": certificate.samples.unit,
        "average": certificate.samples.average,
        "max_group_size": certificate.samples.max_group_size,
        "path": certificate.path,
        "n_settings": certificate.n_settings,
        "index": certificate.index,
        "seed": certificate.provenance.seed,
        "costs": certificate.costs.means,
        "not_worth": certificate.costs.not_worth,
        "exit_shares": certificate.costs.exit_shares,
        "labels": certificate.samples.labels,
        "stopped_at": certificate.stopped_at,
        "horizon": certificate.samples.horizon,
        "max_weight": certificate.samples.max_weight,
        "max_costs": certificate.max_costs,
        "pool": certificate.samples.population,
        "pilot": certificate.samples.pilot,
        "slices": certificate.samples.slices,
        "small_slices": certificate.samples.small_slices,
        "selection": None if selection is None else selection.model_dump(),
        "conditions": list(certificate.assumptions),
        "sentence": without(certificate.assumptions, str(made)),
    }
    return stated(found) | {"threshold": made.threshold, "index": certificate.index}


def without(conditions, sentence):
    """Return a sentence with the numbers of its conditions in their places."""
    for k, condition in enumerate(conditions):
        sentence = sentence.replace(condition, f"[{k}]", 1)
    return sentence


def stated(value):
    """Return a value without what is None, False, empty or the default of an option."""
    if isinstance(value, dict):
        return {
            k: stated(v) for k, v in value.items() if v is not None and v is not False and v != {}
        }
    return [stated(each) for each in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------------- study and plans


CONTROLS = {
    "crc": "crc",
    "ucb": "ucb",
    "ltt": ss.Control("ltt", bound="hoeffding_bentkus", zero_bounded=True),
    "empirical": "empirical",
}


def studied(record, loss, controls, epsilons, n_calibration=200, **options):
    found = ss.evaluate(
        record,
        risk=promised(loss, **options),
        controls=controls,
        epsilons=epsilons,
        n_calibration=n_calibration,
        splits=ss.Repeats(6, progress=False),
        seed=0,
    )
    return {"rows": found.summary(), "text": str(found)}


@study
def evaluate_exits():
    return studied(
        exits(),
        loss="zero_one",
        controls=CONTROLS,
        epsilons=[0.05, 0.1],
        cost="flops",
    )


@study
def evaluate_thresholds():
    return studied(
        generated(),
        loss="rouge_l",
        controls=["ucb", "crc"],
        epsilons=[0.03, 0.1],
        cost="layers",
        path=None,
    )


@study
def evaluate_breakpoints_of_brier_losses():
    return studied(exits(), loss="brier", controls=["ucb"], epsilons=[0.1], path="breakpoints")


@study
def evaluate_groups():
    record = per_sample(grouped(), 4)
    return studied(record, loss="zero_one", controls=["ucb"], epsilons=[0.1], n_calibration=100)


@study
def evaluate_a_budget_of_labels():
    missing = ss.Ask(None, budget=60)
    return studied(exits(), loss="zero_one", controls=["ucb"], epsilons=[0.1], missing=missing)


@study
def evaluate_policies_on_other_samples():
    other = exits(400, 6)
    names = ["mean_gap_of_brier_losses", "tail_of_a_gap", "three_risks_at_once", "selective_gap"]
    found = {name: policy_of(name).evaluate(other)._asdict() for name in names}
    rouge = policy_of("thresholds_of_a_whole_run").evaluate(generated(300, 2))
    return found | {"thresholds_of_a_whole_run": rouge._asdict()}


@study
def plan_numbers_of_samples():
    wanted = {
        "losses of 0": {"epsilon": 0.01},
        "losses of 0 or 1": {"epsilon": 0.05, "risk": 0.02, "power": 0.8},
        "gaps": {"epsilon": 0.02, "loss_range": (-1, 1), "disagreement": 0.05},
        "a pilot": {"epsilon": 0.05, "pilot": exits(), "loss": "zero_one"},
    }
    return {name.replace(" ", "_"): vars(samples_needed(**each)) for name, each in wanted.items()}


@study
def plan_gains_by_number_of_samples():
    found = gain_by_samples(
        exits(), promised(cost="flops"), target=10.0, sizes=(100, 300), draws=20
    )
    return vars(found) | {"n": found.n}


@study
def plan_a_pool_of_unlabelled_samples():
    return vars(unlabelled_pool(60, promised(epsilon=0.1), exits(), sizes=(100, 300), draws=20))


@study
def plan_the_lowest_epsilon():
    found = lowest_epsilon(exits(), Budget(saving=0.3, cost="flops"), loss="brier", path=COARSE)
    return {name: value for name, value in vars(found).items() if name != "policy"}
