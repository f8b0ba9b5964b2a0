"""Promises on every kind of record: each composition keeps its failure probability.

The worlds are least favourable where that is possible: the samples of a group share their luck, and
unlucky groups are larger; losses are more frequent where weights are high; samples exit more rarely
there. The risk is ε + 1e-6, so at most a share δ of the calibrations may certify anything. At half
of ε, at least 30 % must; and a version with a known error must be noticed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import swiftsure as ss
from tests.guarantees.checkers import RefutedError, check_rate

TINY = 1e-6
DELTA = 0.1
EPSILON = 0.1

UNLUCKY, UNLUCKY_SIZE, LUCKY_SIZE = 0.2, 6, 2
"""The share of unlucky groups, and the sizes of unlucky and other groups."""

NIGHT = 0.5
WEIGHTS = {True: 1.6, False: 0.4}
"""Samples at night are half of those that calibrate, and 80 % in production."""


@dataclass(frozen=True)
class World:
    """Where calibration samples come from, and what exits cost there."""

    units: int = 150
    groups: str | None = None
    """What is averaged: "group" or "sample"; None for samples alone."""
    weights: bool = False
    exits: bool = False
    """Whether some samples reach the full model, at every setting."""
    slices: bool = False
    """Whether samples are of two slices, of which only one has losses."""
    cost: bool = False
    """Whether exits have no losses, and costs are at their limit instead."""

    def draw(self, rng: np.random.Generator, risk: float) -> Any:
        """Return a record whose promised risk, in production, is this."""
        unlucky = rng.random(self.units) < UNLUCKY
        sizes = np.ones(self.units, int)
        if self.groups:
            sizes = np.where(unlucky, UNLUCKY_SIZE, LUCKY_SIZE)
        unit = np.repeat(np.arange(self.units), sizes)
        bad = unlucky[unit]
        n = len(unit)
        # All samples of a group share one number, so that they lose together.
        luck = rng.random(self.units)[unit]
        slices = rng.random(n) < 0.5  # those that may lose something, if there are slices
        night = rng.random(n) < np.where(slices, *self._nights()) if self.slices else None
        night = rng.random(n) < NIGHT if night is None else night
        leaves = rng.random(n) < self._leaving(night)
        chance = risk * self._factor(bad, night) / self._mean_factor()
        if self.slices:
            chance = np.where(slices, chance, 0.0)
        assert chance.max() <= 1
        lost = luck < chance
        if self.cost:  # the limit is 1.5: half of the samples must exit
            leaves, lost = ~lost, np.zeros(n, bool)
        values = np.column_stack([lost, np.zeros(n)]).astype(float)
        record = ss.ExitRecord(
            np.where(leaves, 0.9, 0.1)[:, None],
            losses={"loss": values},
            loss_ranges={"loss": (0, 1)},
            costs={"flops": [1.0, 2.0]},
        )
        if self.groups:
            largest = UNLUCKY_SIZE if self.groups == "sample" else None
            record = record.grouped(unit, average=self.groups, max_size=largest)
        if self.slices:
            record = record.sliced(np.where(slices, "a", "b"))
        if self.weights:
            weights = np.where(night, WEIGHTS[True], WEIGHTS[False])
            record = record.weighted(weights, max_weight=WEIGHTS[True])
        return record

    def _nights(self) -> tuple[float, float]:
        """Shares of the night in the slice with losses, and in the other; half in both together."""
        return (0.2, 0.8) if self.weights else (0.5, 0.5)

    def _leaving(self, night: Any) -> Any:
        """The share of samples that exit: fewer where weights are high."""
        return np.where(night, 0.3, 0.9) if self.exits else np.ones(np.shape(night))

    def _factor(self, bad: Any, night: Any) -> Any:
        """How frequent losses are, up to a constant."""
        rare, by_day = (0.6, 0.6) if self.cost else (0.1, 0.4)
        return (np.where(bad, 1.0, rare) if self.groups else 1.0) * np.where(night, 1.0, by_day)

    def _mean_factor(self) -> float:
        """The mean factor over what the promise counts."""
        bad, night = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], bool).T
        share = np.where(bad, UNLUCKY, 1 - UNLUCKY)
        if self.groups == "sample":
            share = share * np.where(bad, UNLUCKY_SIZE, LUCKY_SIZE)
        nights = self._nights()[0] if self.slices else NIGHT
        share = share * np.where(night, nights, 1 - nights) * self._leaving(night)
        if self.weights:
            share = share * np.where(night, WEIGHTS[True], WEIGHTS[False])
        return float(share @ self._factor(bad, night) / share.sum())


Calibrate = Callable[[Any, ss.Calibration], bool]
"""(record, request) -> whether anything was certified."""


def at_once(record: Any, request: ss.Calibration) -> bool:
    policy = request.run(record)
    return not (policy["a"] if "each slice" in str(request) else policy).runs_full_model


def growing(record: Any, request: ss.Calibration) -> bool:
    """Read after each of three updates; what was certified once counts."""
    units = np.arange(record.n) if record.groups is None else np.asarray(record.groups)
    part = np.minimum(3 * units // (units.max() + 1), 2)
    calibration = request.start(horizon=len(np.unique(units)))
    found = False
    for k in range(3):
        calibration.update(record.take(np.flatnonzero(part == k)))
        found |= calibration.index is not None
    return found


# ---------------------------------------------------------------------------- known errors


def without(record: Any, request: ss.Calibration, fact: str) -> bool:
    """Broken: forgets something that the record says of its draw."""
    if fact == "groups":
        sampling = replace(record.sampling, average=None, max_size=None)
        record = replace(record, groups=None, sampling=sampling)
    else:
        record = replace(record, sampling=replace(record.sampling, weights=None, max_weight=None))
    return at_once(record, request)


def with_z_one(record: Any, request: ss.Calibration) -> bool:
    """Broken: a plain test of y at ε, as if z were 1: the weighted sums of units, divided."""
    (promise,) = request.risks
    curve = promise.curve(record, request.rule, request.path)
    high = curve.loss_range.high
    y = ss.RiskCurve.from_losses([0.5], curve.losses()[:, 1:], loss_range=(0, high), relative=False)
    return ss.control.ucb(y, promise.epsilon, DELTA, bound="star").index is not None


def stays_count(record: Any, request: ss.Calibration) -> bool:
    """Broken: samples that reach the full model count as exits without a loss."""
    promises = [replace(each, among="all") for each in request.risks]
    return at_once(record, replace(request, promises=promises))


def slice_at_ratio_one(record: Any, request: ss.Calibration) -> bool:
    """Broken: weighted losses within a slice, as if its mean weight were 1."""
    promises = [replace(each, within=None) for each in request.risks]
    part = record.take(np.flatnonzero(record.slices == "a"))
    return at_once(part, replace(request, promises=promises))


def mean_cost_seen(record: Any, request: ss.Calibration) -> bool:
    """Broken: the mean cost of the calibration samples."""
    flops = np.where(record.confidences["top1"][:, 0] > 0.5, 1.0, 2.0)
    counts = np.bincount(record.groups)
    means = np.bincount(record.groups, flops) / counts
    return bool(means.mean() <= request.limits["flops"])


def slices_pooled(record: Any, request: ss.Calibration) -> bool:
    """Broken: one promise about all slices together."""
    promises = [replace(each, within=None) for each in request.risks]
    return at_once(record, replace(request, promises=promises))


# -------------------------------------------------------------------------------- compositions


MEAN = ss.Promise(epsilon=EPSILON)
TAIL = ss.Promise(epsilon=EPSILON, above=0.5)
WORST = ss.Promise(epsilon=0.5, worst=0.2)
"""The worst fifth loses half if a tenth of all lose 1."""
EXITS = ss.Promise(epsilon=EPSILON, among="exits")
SLICES = ss.Promise(epsilon=EPSILON, within="slices")
EACH = ss.Promise(epsilon=EPSILON, within="each slice")
COST = (ss.Promise(epsilon=0.5), ss.CostPromise("flops", at_most=1.5))


@dataclass(frozen=True)
class Composition:
    """A promise in a world, and an error that must be noticed there."""

    name: str
    promises: Any
    world: World
    broken: Calibrate
    grows: bool = True
    delta: float = DELTA
    """What the share of certified may be: walks share δ."""
    risk: float = EPSILON
    """What in the world is at its limit."""

    @property
    def request(self) -> ss.Calibration:
        return ss.Calibration(self.promises, delta=DELTA, path=(0.5,))

    def found(self, calibrate: Calibrate, risk: float, draws: int) -> int:
        """Return how many of so many calibrations certify something."""
        rng = np.random.default_rng(0)
        return sum(calibrate(self.world.draw(rng, risk), self.request) for _ in range(draws))

    def __str__(self) -> str:
        return self.name


by_group, by_sample = (partial(World, groups=each) for each in ("group", "sample"))
no_groups, no_weights = (partial(without, fact=each) for each in ("groups", "weights"))

ALL = [
    Composition("weights, groups", MEAN, by_group(weights=True), with_z_one),
    Composition("weights, groups by sample", MEAN, by_sample(weights=True), with_z_one),
    Composition("groups by sample", MEAN, by_sample(), no_groups),
    Composition("tail, groups", TAIL, by_sample(250), no_groups),
    Composition("tail, weights", TAIL, World(200, weights=True), no_weights),
    Composition("tail, groups, weights", TAIL, by_sample(250, weights=True), no_weights),
    Composition("worst share, groups", WORST, by_sample(), no_groups),
    Composition("worst share, weights", WORST, World(200, weights=True), no_weights),
    Composition("exits, groups", EXITS, by_group(exits=True), stays_count),
    Composition("exits, groups by sample", EXITS, by_sample(200, exits=True), stays_count),
    Composition("exits, weights", EXITS, World(500, weights=True, exits=True), stays_count),
    Composition(
        "exits, groups, weights", EXITS, by_sample(500, weights=True, exits=True), stays_count
    ),
    Composition("slices, groups", SLICES, by_sample(250, slices=True), slices_pooled),
    Composition(
        "slices, weights", SLICES, World(350, weights=True, slices=True), slice_at_ratio_one
    ),
    Composition(
        "slices, groups, weights", SLICES, by_group(250, weights=True, slices=True), slices_pooled
    ),
    Composition(
        "each slice, weights",
        EACH,
        World(600, weights=True, slices=True),
        slice_at_ratio_one,
        False,
        DELTA / 2,
    ),
    Composition(
        "exits, slices, weights",
        replace(EXITS, within="slices"),
        World(600, weights=True, slices=True, exits=True),
        stays_count,
    ),
    Composition("cost, groups", COST, by_group(cost=True), mean_cost_seen, False, DELTA / 2, 0.5),
    Composition(
        "cost, weights", COST, World(weights=True, cost=True), no_weights, False, DELTA / 2, 0.5
    ),
]


@pytest.mark.parametrize("composition", ALL, ids=str)
def test_compositions_keep_their_failure_probability(composition):
    found = composition.found(at_once, composition.risk + TINY, 100)
    check_rate(found, 100, composition.delta)
    assert composition.found(at_once, composition.risk / 2, 40) > 0.3 * 40


@pytest.mark.parametrize("composition", ALL, ids=str)
def test_errors_in_compositions_are_noticed(composition):
    found = composition.found(composition.broken, composition.risk + TINY, 200)
    with pytest.raises(RefutedError):
        check_rate(found, 200, composition.delta)


@pytest.mark.slow
@pytest.mark.parametrize("composition", [each for each in ALL if each.grows], ids=str)
def test_compositions_that_grow_keep_their_failure_probability(composition):
    """A policy is read after each of three updates."""
    found = composition.found(growing, composition.risk + TINY, 200)
    check_rate(found, 200, composition.delta)
    assert composition.found(growing, composition.risk / 2, 40) > 0.3 * 40


# ---------------------------------------------------------------------- walks that share δ


LOSSES = ("a", "b", "c", "d")


def four_exits(rng: np.random.Generator, risk: float, n: int = 150) -> Any:
    """Four early exits, each taken at a setting of its own; at exit k only loss k occurs."""
    losses = {
        name: np.column_stack([*(np.eye(4)[k][:, None] * (rng.random(n) < risk)), np.zeros(n)])
        for k, name in enumerate(LOSSES)
    }
    ranges = dict.fromkeys(LOSSES, (0, 1))
    return ss.ExitRecord(np.full((n, 4), 0.9), losses=losses, loss_ranges=ranges)


# Setting k exits at exit k alone.
APART = ss.Path.family(np.where(np.eye(4, dtype=bool), 0.5, np.inf))
ONE_EACH = [
    *(ss.Promise(name, epsilon=EPSILON, among="exits") for name in LOSSES[:3]),
    ss.Promise("d", epsilon=EPSILON),
]


def walks_share(record: Any) -> bool:
    return ss.calibrate(record, ONE_EACH, path=APART).threshold is not None


def walks_do_not_share(record: Any) -> bool:
    """Broken: every walk, and every start of one, has all of δ."""
    curves = [each.curve(record, ss.ExitRule(), APART) for each in ONE_EACH]
    for k, curve in enumerate(curves):
        alone = ss.RiskCurve.from_losses(
            [0.5], curve.loss_at(k + 1)[:, None], loss_range=(0, 1), relative=False
        )
        if ss.control.ucb(alone, EPSILON, DELTA, bound="star").index is not None:
            return True
    return False


def test_exits_and_means_share_their_failure_probability():
    """At each setting another promise is broken; all the others hold there."""
    rng = np.random.default_rng(0)
    records = [four_exits(rng, EPSILON + TINY) for _ in range(150)]
    check_rate(sum(map(walks_share, records)), 150, DELTA)
    with pytest.raises(RefutedError):
        check_rate(sum(map(walks_do_not_share, records)), 150, DELTA)
    assert sum(walks_share(four_exits(rng, EPSILON / 4)) for _ in range(20)) > 0.3 * 20


@pytest.mark.slow
def test_exits_and_means_that_grow_share_their_failure_probability():
    rng = np.random.default_rng(0)
    request = ss.Calibration(ONE_EACH, path=APART)
    check_rate(
        sum(growing(four_exits(rng, EPSILON + TINY), request) for _ in range(150)), 150, DELTA
    )
    assert sum(growing(four_exits(rng, EPSILON / 4), request) for _ in range(20)) > 0.3 * 20


# ------------------------------------------------------------------------ labels, branches


def labels_for_exits(rng: np.random.Generator, risk: float, n: int = 150) -> Any:
    """A record without labels of two exits, which half of the samples take, and its labels."""
    leaves = rng.random(n) < 0.5
    labels = np.zeros(n, int)
    predictions = np.column_stack([(rng.random(n) < risk) & leaves, labels]).astype(int)
    apart = (predictions != predictions[:, -1:]).astype(float)
    losses = np.where(apart.any(axis=1)[:, None], np.nan, 0.0) * np.ones(2)
    record = ss.ExitRecord(
        np.where(leaves, 0.9, 0.1)[:, None],
        losses={"zero_one": losses},
        inconsistencies={"zero_one": apart},
        predictions=predictions,
        costs={"flops": [1.0, 2.0]},
    )
    return record, labels


def asked(record: Any, labels: Any, promises: Any) -> bool:
    ask = ss.Ask(lambda ids: labels[np.asarray(ids, int)], budget=100)
    return not ss.calibrate(record, promises, path=(0.5,), missing=ask).runs_full_model


@pytest.mark.parametrize("among", ["exits", "all"])
def test_labels_that_are_asked_for_keep_the_failure_probability(among):
    """Labels are bought where exits disagree, for those that exit; for all, costs hold too."""
    rng = np.random.default_rng(0)
    promises = [ss.Promise("zero_one", epsilon=EPSILON if among == "exits" else 0.05, among=among)]
    if among == "all":
        promises.append(ss.CostPromise("flops", at_most=1.7))
    found = sum(asked(*labels_for_exits(rng, EPSILON + TINY, 200), promises) for _ in range(150))
    check_rate(found, 150, DELTA)
    assert sum(asked(*labels_for_exits(rng, EPSILON / 4, 250), promises) for _ in range(20)) > 6
    if among == "exits":
        broken = [ss.Promise("zero_one", epsilon=EPSILON)]
    else:  # the limit of those that exit, for all samples
        broken = [ss.Promise("zero_one", epsilon=EPSILON), promises[1]]
    found = sum(asked(*labels_for_exits(rng, EPSILON + TINY, 200), broken) for _ in range(100))
    with pytest.raises(RefutedError):
        check_rate(found, 100, DELTA)


def two_branches(rng: np.random.Generator, risk: float, n: int = 150) -> Any:
    """Four branches of one setting; at each, one of two losses is at its limit."""
    lost = np.column_stack([np.zeros(n), rng.random((n, 4)) < risk]).astype(float)
    odd = np.array([False, True, False, True, False])
    return ss.ThresholdRecord(
        [None, 0.8, 0.6, 0.4, 0.2],
        losses={"a": np.where(odd, lost, 0.0), "b": np.where(odd, 0.0, lost)},
        loss_ranges={"a": (0, 1), "b": (0, 1)},
        costs={"flops": [5.0, 4.0, 3.0, 2.0, 1.0]},
    )


def on_branches(record: Any) -> bool:
    path = ss.Path.branching([[1], [2], [3], [4]], record)
    promises = [ss.Promise(name, epsilon=EPSILON) for name in "ab"]
    return not ss.calibrate(record, promises, path=path).runs_full_model


def each_branch_at_delta(record: Any) -> bool:
    """Broken: branches that do not share δ."""
    promises = [ss.Promise(name, epsilon=EPSILON) for name in "ab"]
    paths = [ss.Path.settings([k], record) for k in range(1, 5)]
    return any(not ss.calibrate(record, promises, path=path).runs_full_model for path in paths)


def test_several_promises_on_branches_keep_their_failure_probability():
    rng = np.random.default_rng(0)
    records = [two_branches(rng, EPSILON + TINY) for _ in range(200)]
    check_rate(sum(map(on_branches, records)), 200, DELTA)
    with pytest.raises(RefutedError):
        check_rate(sum(map(each_branch_at_delta, records)), 200, DELTA)
    assert sum(on_branches(two_branches(rng, EPSILON / 4)) for _ in range(20)) > 0.3 * 20


@pytest.mark.parametrize(
    "beside",
    [
        ss.CostPromise("flops", at_most=1.9),
        ss.Promise(epsilon=0.9, risk="consistency", among="exits"),
    ],
    ids=["cost", "exits"],
)
def test_each_of_two_walks_has_half_of_delta(beside):
    """Losses of 0 certify ε = .05 with 45 samples at δ = .1, and only with 59 at half of it."""

    def certified(n, *promises):
        record = ss.ExitRecord(
            np.full((n, 1), 0.9),
            inconsistencies={"zero_one": np.zeros((n, 2))},
            costs={"flops": [1.0, 2.0]},
        )
        return ss.calibrate(record, promises, path=[0.5]).threshold is not None

    mean = ss.Promise(epsilon=0.05, risk="consistency")
    assert certified(50, mean)
    assert not certified(50, mean, beside)
    assert certified(70, mean, beside)
