"""A policy of every kind goes through its file and comes back equal."""

import json
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.curves.transforms import tail, worst_mean, zero_bounded
from tests.builders import random_record, request_of, table_curve

N = 900
RECORD = random_record(n=N, costs={"flops": [1, 2, 3, 5]})
GROUPED = RECORD.grouped(np.arange(N) // 3)
BY_SAMPLE = RECORD.grouped(np.arange(N) // 3, average="sample", max_size=5)
SLICED = RECORD.sliced(np.where(np.arange(N) % 3 == 0, "night", "day"))
WEIGHTED = SLICED.weighted({"night": 1.5, "day": 0.75}, max_weight=1.5)
UNLABELLED = ss.ExitRecord.from_logits(np.random.default_rng(0).normal(size=(N, 3, 4)))
PROMISE = {"loss": "zero_one", "epsilon": 0.3}
NOTHING = {"loss": "zero_one", "epsilon": 1e-9}
TAIL = {"loss": "brier", "epsilon": 0.4, "above": 0.1}
WORST = {"loss": "brier", "epsilon": 1.2, "worst": 0.2}
EXITING = {"loss": "zero_one", "epsilon": 0.5, "among": "exits"}
TWO = [
    ss.Promise("zero_one", epsilon=0.3),
    ss.Promise("brier", risk="consistency", epsilon=0.9),
]
COST = ss.CostPromise("flops", at_most=4.5)
FEW = RECORD.sliced(np.where(np.arange(N) < 2, "few", "many"))


def table(**fields):
    losses = np.tile([0.0, 0.02, 0.2], (N, 1))
    losses[: N // 2] = 0
    return ss.ThresholdRecord(losses={"x": losses}, **fields)


ONE_DIAL = table(thresholds=[1.0, 0.5, 0.2], costs={"layers": [3, 2, 1]})
DIALS = table(dials={"a": [0, 1, 1], "b": [None, "p", [1, 2]]}, costs={"layers": [3, 2, 1]})


def growing(record, **options):
    calibration = request_of(**PROMISE | options).start()
    calibration.update(record)
    return calibration.policy()


def sharded(folder):
    for part in range(3):
        RECORD.take(np.arange(300 * part, 300 * part + 300)).save(folder / f"{part}.parquet")
    return ss.ShardedRecord(folder)


def labelled(folder):
    labels = np.random.default_rng(1).integers(0, 4, N)
    return ss.calibrate(UNLABELLED, **PROMISE, missing=ss.Ask(lambda ids: labels[ids], 100))


EXITS = {
    "ucb": {},
    "ltt": {"control": "ltt"},
    "ltt, bonferroni": {"control": ss.Control("ltt", correction="bonferroni")},
    "crc": {"control": "crc", "epsilon": 0.4},
    "crc by ucb": {"control": ss.Control("crc", method="ucb")},
    "crc, contiguous": {"control": ss.Control("crc", monotone=False, selection="contiguous")},
    "empirical": {"control": "empirical"},
    "zero-bounded": {"control": ss.Control("ucb", zero_bounded=True)},
    "nothing": NOTHING,
    "strict": {"rule": ss.ExitRule(strict=True, min_exit=1)},
    "breakpoints": {"path": "breakpoints"},
    "thresholds of each exit": {"path": [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]]},
    "never at an exit": {"path": [[0.9, np.inf, 0.7], [0.6, np.inf, 0.4]]},
    "a tail": TAIL,
    "the worst share": WORST,
    "a worst share above 0": WORST | {"above": 0.1},
    "a worst share of nothing": {"loss": "brier", "worst": 0.2, "epsilon": 0.01},
    "samples that exit": EXITING,
    "samples that exit, nothing": EXITING | {"epsilon": 1e-9},
    "the tail of samples that exit": TAIL | EXITING | {"loss": "brier"},
    "consistency": {"risk": "consistency", "loss": "brier", "epsilon": 0.5},
    "a named cost": {"cost": "exit"},
    "a bound": {"bound": "wsr"},
    "a learned path": {"path": ss.Path.learn(0.3)},
    "a learned path, of samples that exit": EXITING | {"path": ss.Path.learn(200, cost="flops")},
    "a large delta": {"delta": 0.6},
}
DRAWS = {
    "a pool": RECORD.drawn_from(5000),
    "a pool of all": RECORD.drawn_from(N),
    "groups": GROUPED,
    "a pool of groups": GROUPED.drawn_from(1000),
    "groups by sample": BY_SAMPLE,
    "a seed": replace(RECORD, order=2**62),
    "groups, a seed": replace(GROUPED, order=3),
    "weights": WEIGHTED,
    "estimated weights": SLICED.weighted(
        {"night": 1.5, "day": 0.75}, max_weight=1.5, estimated=True
    ),
    "weights of groups": WEIGHTED.grouped(np.arange(N) // 3),
    "weights of groups by sample": WEIGHTED.grouped(
        np.arange(N) // 3, average="sample", max_size=5
    ),
    "slices": SLICED,
    "slices of groups": GROUPED.sliced(SLICED.slices),
}
PROMISES = {
    "a mean": PROMISE,
    "a tail": TAIL,
    "the worst share": WORST,
    "samples that exit": EXITING,
    "nothing": NOTHING,
}
RESTRICTED = ("the worst share", "samples that exit")
OTHERS = {
    "two promises": lambda _: ss.calibrate(RECORD, TWO),
    "two promises and a cost": lambda _: ss.calibrate(RECORD, [*TWO, COST]),
    "two walks": lambda _: ss.calibrate(RECORD, [*TWO, ss.Promise(**EXITING)]),
    "two walks and a cost": lambda _: ss.calibrate(RECORD, [*TWO, ss.Promise(**EXITING), COST]),
    "a cost that nothing keeps": lambda _: ss.calibrate(
        RECORD, [*TWO, ss.CostPromise("flops", at_most=1.01)]
    ),
    "a cost of weighted groups": lambda _: ss.calibrate(
        WEIGHTED.grouped(np.arange(N) // 3), [*TWO, COST]
    ),
    "metadata": lambda _: request_of(**PROMISE).run(
        RECORD, metadata={"name": "ü", "notes": "two\nlines"}
    ),
    "crc of groups": lambda _: ss.calibrate(GROUPED, loss="zero_one", control="crc", epsilon=0.4),
    "a slice": lambda _: request_of(**PROMISE, within="each slice").run(SLICED)["night"],
    "slices, and all": lambda _: ss.calibrate(
        SLICED, [ss.Promise(**PROMISE, within="slices"), ss.Promise("zero_one", epsilon=0.2)]
    ),
    "slices with weights": lambda _: request_of(**PROMISE, within="slices").run(WEIGHTED),
    "slices, a cost": lambda _: request_of(COST, **PROMISE, within="slices").run(SLICED),
    "a setting each, a cost": lambda _: request_of(COST, **PROMISE, within="each slice").run(
        SLICED
    ),
    "slices of text and numbers": lambda _: request_of(**PROMISE, within="slices").run(
        RECORD.sliced(np.arange(N) % 3)
    ),
    "a folder": lambda folder: ss.calibrate(sharded(folder), **PROMISE),
    "the budget of a folder": lambda folder: (
        ss.planning.lowest_epsilon(sharded(folder), saving=0.3, loss="zero_one").policy
    ),
    "a budget": lambda _: ss.planning.lowest_epsilon(RECORD, saving=0.3, loss="zero_one").policy,
    "the budget of a tail": lambda _: (
        ss.planning.lowest_epsilon(tail(RECORD.curve("gap", "brier"), 0.1), saving=0.3).policy
    ),
    "a budget for nothing": lambda _: (
        ss.planning.lowest_epsilon(
            RECORD, ss.planning.Budget(5.0, cost="flops"), loss="zero_one"
        ).policy
    ),
    "the budget of weights": lambda _: (
        ss.planning.lowest_epsilon(
            RECORD.weighted(np.tile([1.5, 0.5], N // 2), max_weight=1.5),
            saving=0.3,
            loss="zero_one",
        ).policy
    ),
    "the budget of the worst share": lambda _: (
        ss.planning.lowest_epsilon(worst_mean(RECORD.curve("gap", "brier"), 0.2), saving=0.3).policy
    ),
    "the budget of a zero-bounded gap": lambda _: (
        ss.planning.lowest_epsilon(zero_bounded(RECORD.curve("gap", "brier")), saving=0.3).policy
    ),
    "the budget of few": lambda _: (
        ss.planning.lowest_epsilon(RECORD.take(np.arange(4)), saving=0.3, loss="zero_one").policy
    ),
    "a slice with few samples": lambda _: request_of(**PROMISE, within="slices").run(FEW),
    "a slice with few samples, each": lambda _: request_of(**PROMISE, within="each slice").run(FEW),
    "dials in slices, one with few samples": lambda _: request_of(
        epsilon=0.05, within="slices"
    ).run(DIALS.sliced(FEW.slices)),
    "dials in slices, each": lambda _: request_of(epsilon=0.05, within="each slice").run(
        DIALS.sliced(FEW.slices)
    ),
    "the budget of groups": lambda _: (
        ss.planning.lowest_epsilon(GROUPED, saving=0.3, loss="zero_one").policy
    ),
    "the budget of groups by sample": lambda _: (
        ss.planning.lowest_epsilon(BY_SAMPLE, saving=0.3, loss="zero_one").policy
    ),
    "the budget of thresholds": lambda _: ss.planning.lowest_epsilon(ONE_DIAL, saving=0.3).policy,
    "the budget of dials": lambda _: ss.planning.lowest_epsilon(DIALS, saving=0.3).policy,
    "growth": lambda _: growing(RECORD),
    "growth of nothing": lambda _: growing(RECORD, epsilon=1e-9),
    "growth of dials": lambda _: growing(DIALS, loss="x", epsilon=0.1),
    "growth of groups": lambda _: growing(GROUPED),
    "growth of weighted groups": lambda _: growing(WEIGHTED.grouped(np.arange(N) // 3)),
    "growth of slices": lambda _: growing(SLICED, within="slices"),
    "growth of samples that exit": lambda _: growing(RECORD, **EXITING),
    "labels as the walk asks": labelled,
    "labels that stop it": lambda _: ss.calibrate(
        UNLABELLED.with_labels(UNLABELLED.needs_label(budget=50), np.zeros(50, int)),
        **PROMISE,
        missing="stop",
    ),
    "no labels": lambda _: ss.calibrate(UNLABELLED, **PROMISE, missing="stop"),
    "a score of several": lambda _: ss.calibrate_best(
        random_record(N, score=["top1", "entropy"]),
        request_of(**PROMISE, cost="exit"),
        correction="bonferroni",
    ),
    "a score by a pilot": lambda _: ss.calibrate_best(
        random_record(N, score=["top1", "entropy"]), request_of(**PROMISE), split=0.3
    ),
    "a learned path": lambda _: ss.calibrate(
        replace(RECORD, ids=np.arange(N) + 9999),
        **PROMISE,
        path=ss.Path.pareto(random_record(300, seed=8), loss="zero_one"),
    ),
    "a threshold": lambda _: ss.calibrate(ONE_DIAL, epsilon=0.05),
    "a threshold, nothing": lambda _: ss.calibrate(ONE_DIAL, epsilon=1e-9),
    "thresholds of groups": lambda _: ss.calibrate(
        ONE_DIAL.grouped(np.arange(N) // 3).drawn_from(999), epsilon=0.05
    ),
    "dials": lambda _: ss.calibrate(DIALS, epsilon=0.05),
    "dials, nothing": lambda _: ss.calibrate(DIALS, epsilon=1e-9),
    "branches": lambda _: ss.calibrate(
        DIALS, epsilon=0.05, path=ss.Path.branching([[1], [2]], DIALS)
    ),
    "dials, a learned path": lambda _: ss.calibrate(
        DIALS, epsilon=0.05, path=ss.Path.learn(0.3, cost="layers")
    ),
    "branches, two promises": lambda _: ss.calibrate(
        DIALS,
        [ss.Promise(epsilon=0.05), ss.Promise(epsilon=0.3, above=0.1)],
        path=ss.Path.branching([[1], [2]], DIALS),
    ),
    "temperatures": lambda _: ss.calibrate(
        random_record(N, temperatures=[2, 1.5, 1, 1]), **PROMISE
    ),
    "a curve": lambda _: ss.calibrate(table_curve([0, 3, 9], n=N), epsilon=0.1),
    "a curve that is not relative": lambda _: ss.calibrate(
        table_curve([5, 8, 90], n=N, relative=False), epsilon=0.1
    ),
    "a curve of exits": lambda _: ss.calibrate(RECORD.curve("gap", "zero_one"), epsilon=0.3),
    "a curve of a tail": lambda _: ss.calibrate(
        tail(RECORD.curve("gap", "brier"), 0.1), epsilon=0.3
    ),
    "a curve of groups": lambda _: ss.calibrate(BY_SAMPLE.curve("gap", "zero_one"), epsilon=0.3),
    "a dear setting": lambda _: ss.calibrate(
        ss.ThresholdRecord([1.0, 0.5], {"x": np.zeros((N, 2))}, costs={"usd": [3, 4]}), epsilon=0.1
    ),
}
KINDS = {
    **{k: lambda _, v=v: request_of(**PROMISE | v).run(RECORD) for k, v in EXITS.items()},
    **{
        f"{k}, {what}": lambda _, drawn=drawn, v=v: request_of(
            **v, within="slices" if drawn.slices is not None else None
        ).run(drawn)
        for k, drawn in DRAWS.items()
        for what, v in PROMISES.items()
        if not (drawn.sampling.population and what in RESTRICTED)
    },
    **OTHERS,
}


@pytest.mark.filterwarnings("ignore:`delta`")
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_comes_back_from_its_file(kind, tmp_path):
    made = KINDS[kind](tmp_path)
    made.save(tmp_path / "policy.json")
    loaded = type(made).load(tmp_path / "policy.json")
    assert loaded == made
    policies = made.policies.values() if isinstance(made, ss.SlicedPolicy) else [made]
    for policy in policies:
        request = policy.calibration
        if request is None:
            assert policy.certificate.by_budget
        else:
            assert ss.Calibration.from_json(json.loads(json.dumps(request.to_json()))) == request
            assert [p.epsilon for p in policy.certificate.promises] == [
                each.epsilon for each in request.risks
            ]


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    """As a level of an edited file that these few samples cannot have certified."""
    made = ss.calibrate(RECORD, **PROMISE)
    promise = replace(made.certificate.promises[0], epsilon=1e-6)
    certificate = made.certificate.model_copy(update={"promises": (promise,)})
    edited = made.model_copy(update={"certificate": certificate})
    with pytest.raises(ValueError, match=r"could not be loaded again: .* Calibrate again"):
        edited.save(tmp_path / "policy.json")
    assert not list(tmp_path.iterdir())
