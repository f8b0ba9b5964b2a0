"""A policy of every kind goes through its file and comes back equal."""

from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.study.planning import lowest_epsilon
from tests.builders import random_record, table_curve

N = 900
RECORD = random_record(n=N, costs={"flops": [1, 2, 3, 5]})
GROUPED = replace(RECORD, groups=np.arange(N) // 3)
SLICED = replace(RECORD, slices=np.where(np.arange(N) % 3 == 0, "night", "day"))
UNLABELLED = ss.ExitRecord.from_logits(np.random.default_rng(0).normal(size=(N, 3, 4)))
PROMISE = {"loss": "zero_one", "epsilon": 0.3}
NOTHING = {"loss": "zero_one", "epsilon": 1e-9}
BY_SAMPLE = {"average": "sample", "max_group_size": 5}
BY_SLICE = {"weights": {"night": 1.5, "day": 0.75}, "max_weight": 1.5}


def table(**fields):
    losses = np.tile([0.0, 0.02, 0.2], (N, 1))
    losses[: N // 2] = 0
    return ss.ThresholdRecord(losses={"x": losses}, **fields)


ONE_DIAL = table(thresholds=[1.0, 0.5, 0.2], costs={"layers": [3, 2, 1]})
DIALS = table(dials={"a": [0, 1, 1], "b": [None, "p", [1, 2]]}, costs={"layers": [3, 2, 1]})


def growing(record, **options):
    calibration = ss.calibrate.start(**PROMISE | options)
    calibration.update(record)
    return calibration.policy()


def sharded(folder):
    for part in range(3):
        RECORD.take(np.arange(300 * part, 300 * part + 300)).save(folder / f"{part}.parquet")
    return ss.ShardedRecord(folder)


def labelled(folder):
    labels = np.random.default_rng(1).integers(0, 4, N)
    return ss.calibrate(UNLABELLED, **PROMISE, labeller=lambda ids: labels[ids], budget=100)


EXITS = {
    "ucb": {},
    "ltt": {"control": "ltt"},
    "ltt, bonferroni": {"control": "ltt", "correction": "bonferroni"},
    "crc": {"control": "crc", "epsilon": 0.4},
    "crc by ucb": {"control": "crc", "method": "ucb"},
    "crc, contiguous": {"control": "crc", "monotone": False, "selection": "contiguous"},
    "empirical": {"control": "empirical"},
    "zero-bounded": {"zero_bounded": True},
    "nothing": NOTHING,
    "a pool": {"pool": 5000},
    "a pool of all": {"pool": N},
    "strict": {"strict": True, "min_exit": 1},
    "breakpoints": {"path": "breakpoints"},
    "thresholds of each exit": {"path": [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]]},
    "never at an exit": {"path": [[0.9, np.inf, 0.7], [0.6, np.inf, 0.4]]},
    "a tail": {"loss": "brier", "above": 0.1},
    "the worst share": {"loss": "brier", "worst": 0.2, "epsilon": 1.2},
    "a worst share of nothing": {"loss": "brier", "worst": 0.2, "epsilon": 0.01},
    "samples that exit": {"risk": "selective gap", "epsilon": 0.5},
    "consistency": {"risk": "consistency", "loss": "brier", "epsilon": 0.5},
    "costs": {"max_costs": {"flops": 4.5}},
    "costs that nothing keeps": {"max_costs": {"flops": 1.01}},
    "a named cost": {"cost": "exit"},
    "a bound": {"bound": "wsr"},
    "metadata": {"metadata": {"name": "ü", "notes": "two\nlines"}},
    "a seed": {"seed": 2**62, "bound": "star"},
    "a large delta": {"delta": 0.6},
}
GROUPS = {
    "groups": {},
    "a pool of groups": {"pool": 700},
    "all groups": {"pool": 300},
    "groups by sample": BY_SAMPLE,
    "groups, crc": {"control": "crc", "epsilon": 0.4},
    "groups, a seed": {"seed": 3},
    "groups, nothing": NOTHING,
}
OTHERS = {
    "two risks": lambda _: ss.calibrate(
        RECORD, risks=[ss.Risk("gap", "zero_one", 0.3), ss.Risk("consistency", "brier", 0.9)]
    ),
    "weights": lambda _: ss.calibrate(SLICED, **PROMISE, **BY_SLICE),
    "estimated weights, nothing": lambda _: ss.calibrate(
        SLICED, **NOTHING, **BY_SLICE, estimated_weights=True
    ),
    "a tail with weights": lambda _: ss.calibrate(
        SLICED, loss="brier", epsilon=0.4, above=0.1, **BY_SLICE
    ),
    "a slice": lambda _: ss.calibrate_slices(SLICED, own=True, **PROMISE)["night"],
    "slices": lambda _: ss.calibrate_slices(SLICED, **PROMISE)["night"],
    "several in one": lambda _: ss.calibrate_slices(SLICED, **PROMISE),
    "slices, each alone": lambda _: ss.calibrate_slices(
        SLICED, own=True, together=False, **PROMISE
    ),
    "the tail of slices": lambda _: ss.calibrate_slices(
        SLICED, loss="brier", above=0.1, epsilon=0.4
    ),
    "a folder": lambda folder: ss.calibrate(sharded(folder), **PROMISE),
    "the budget of a folder": lambda folder: (
        lowest_epsilon(sharded(folder), saving=0.3, loss="zero_one").policy
    ),
    "a budget": lambda _: lowest_epsilon(RECORD, saving=0.3, loss="zero_one").policy,
    "the budget of a tail": lambda _: (
        lowest_epsilon(RECORD.curve("gap", "brier").tail(0.1), saving=0.3).policy
    ),
    "a budget for nothing": lambda _: (
        lowest_epsilon(RECORD, budget=5.0, cost="flops", loss="zero_one").policy
    ),
    "the budget of weights": lambda _: (
        lowest_epsilon(
            RECORD.curve("gap", "zero_one").weighted(np.tile([1.5, 0.5], N // 2), 1.5), saving=0.3
        ).policy
    ),
    "the budget of the worst share": lambda _: (
        lowest_epsilon(RECORD.curve("gap", "brier").worst_mean(0.2), saving=0.3).policy
    ),
    "the budget of a zero-bounded gap": lambda _: (
        lowest_epsilon(RECORD.curve("gap", "brier").zero_bounded(), saving=0.3).policy
    ),
    "the budget of few": lambda _: (
        lowest_epsilon(RECORD.take(np.arange(4)), saving=0.3, loss="zero_one").policy
    ),
    "a slice with few samples": lambda _: ss.calibrate_slices(
        replace(RECORD, slices=np.where(np.arange(N) < 2, "few", "many")), **PROMISE
    ),
    "dials in slices, one with few samples": lambda _: ss.calibrate_slices(
        replace(DIALS, slices=np.where(np.arange(N) < 2, "few", "many")), epsilon=0.05
    ),
    "the budget of groups": lambda _: lowest_epsilon(GROUPED, saving=0.3, loss="zero_one").policy,
    "the budget of groups by sample": lambda _: (
        lowest_epsilon(GROUPED, saving=0.3, loss="zero_one", **BY_SAMPLE).policy
    ),
    "the budget of thresholds": lambda _: lowest_epsilon(ONE_DIAL, saving=0.3).policy,
    "the budget of dials": lambda _: lowest_epsilon(DIALS, saving=0.3).policy,
    "growth": lambda _: growing(RECORD),
    "growth of nothing": lambda _: growing(RECORD, epsilon=1e-9),
    "growth of dials": lambda _: growing(DIALS, loss="x", epsilon=0.1),
    "growth of groups": lambda _: growing(GROUPED),
    "labels as the walk asks": labelled,
    "labels that stop it": lambda _: ss.calibrate(
        UNLABELLED.with_labels(UNLABELLED.needs_label(budget=50), np.zeros(50, int)),
        **PROMISE,
        missing="stop",
    ),
    "no labels": lambda _: ss.calibrate(UNLABELLED, **PROMISE, missing="stop"),
    "a score of several": lambda _: ss.calibrate_best(
        random_record(N, score=["top1", "entropy"]), correction="bonferroni", cost="exit", **PROMISE
    ),
    "a score by a pilot": lambda _: ss.calibrate_best(
        random_record(N, score=["top1", "entropy"]), split=0.3, **PROMISE
    ),
    "a learned path": lambda _: ss.calibrate(
        replace(RECORD, ids=np.arange(N) + 9999),
        **PROMISE,
        path=ss.Path.learned(random_record(300, seed=8)),
    ),
    "a split": lambda _: ss.calibrate(RECORD, **PROMISE, split=0.3),
    "a threshold": lambda _: ss.calibrate(ONE_DIAL, epsilon=0.05),
    "a threshold, nothing": lambda _: ss.calibrate(ONE_DIAL, epsilon=1e-9),
    "thresholds of groups": lambda _: ss.calibrate(
        replace(ONE_DIAL, groups=np.arange(N) // 3), epsilon=0.05, pool=999
    ),
    "dials": lambda _: ss.calibrate(DIALS, epsilon=0.05),
    "dials, nothing": lambda _: ss.calibrate(DIALS, epsilon=1e-9),
    "branches": lambda _: ss.calibrate(
        DIALS, epsilon=0.05, path=ss.Path.branching([[1], [2]], DIALS)
    ),
    "dials, a split": lambda _: ss.calibrate(DIALS, epsilon=0.05, split=0.3),
    "temperatures": lambda _: ss.calibrate(
        random_record(N, temperatures=[2, 1.5, 1, 1]), **PROMISE
    ),
    "a curve": lambda _: ss.calibrate(table_curve([0, 3, 9], n=N), epsilon=0.1),
    "a curve that is not relative": lambda _: ss.calibrate(
        table_curve([5, 8, 90], n=N, relative=False), epsilon=0.1
    ),
    "a curve of exits": lambda _: ss.calibrate(RECORD.curve("gap", "zero_one"), epsilon=0.3),
    "a curve of a tail": lambda _: ss.calibrate(
        RECORD.curve("gap", "brier").tail(0.1), epsilon=0.3
    ),
    "a curve of groups": lambda _: ss.calibrate(
        GROUPED.curve("gap", "zero_one", **BY_SAMPLE), epsilon=0.3
    ),
    "a dear setting": lambda _: ss.calibrate(
        ss.ThresholdRecord([1.0, 0.5], {"x": np.zeros((N, 2))}, costs={"usd": [3, 4]}), epsilon=0.1
    ),
}
KINDS = {
    **{k: lambda _, v=v: ss.calibrate(RECORD, **PROMISE | v) for k, v in EXITS.items()},
    **{k: lambda _, v=v: ss.calibrate(GROUPED, **PROMISE | v) for k, v in GROUPS.items()},
    **OTHERS,
}


@pytest.mark.filterwarnings("ignore:`delta`")
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_comes_back_from_its_file(kind, tmp_path):
    made = KINDS[kind](tmp_path)
    made.save(tmp_path / "policy.json")
    assert type(made).load(tmp_path / "policy.json") == made


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    """As a level of an edited file that these few samples cannot have certified."""
    made = ss.calibrate(RECORD, **PROMISE)
    promise = made.certificate.promises[0].model_copy(update={"epsilon": 1e-6})
    certificate = made.certificate.model_copy(update={"promises": (promise,)})
    edited = made.model_copy(update={"certificate": certificate})
    with pytest.raises(ValueError, match=r"could not be loaded again: .* Calibrate again"):
        edited.save(tmp_path / "policy.json")
    assert not list(tmp_path.iterdir())
