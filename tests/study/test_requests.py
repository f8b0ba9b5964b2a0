"""Whole requests on repeated samples: every promise on every record, and how often they fail."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binomtest

import swiftsure as ss
from swiftsure.certify.bounds.betting import BettingBound
from swiftsure.certify.bounds.counting import level_totals

N, DELTA = 1200, 0.1
MEAN = ss.Promise("zero_one", epsilon=0.1)
PROMISES = {
    "mean": MEAN,
    "consistency": replace(MEAN, risk="consistency", epsilon=0.2),
    "tail": replace(MEAN, above=0.5),
    "worst share": replace(MEAN, worst=0.5, epsilon=0.3),
    "exits": replace(MEAN, among="exits", epsilon=0.2),
    "slices": replace(MEAN, within="slices", epsilon=0.2),
    "each slice": replace(MEAN, within="each slice", epsilon=0.2),
    "cost": (MEAN, ss.CostPromise("layers", at_most=2)),
}


def half(n):
    return np.where(np.arange(n) % 2, "b", "a")


FACTS = {
    "plain": lambda r: r,
    "groups": lambda r: r.grouped(np.arange(r.n) // 2),
    "samples of groups": lambda r: r.grouped(np.arange(r.n) // 2, average="sample", max_size=3),
    "weights": lambda r: r.weighted({"a": 1.4, "b": 0.6}, max_weight=1.4),
    "weighted groups": lambda r: r.weighted({"a": 1.4, "b": 0.6}, max_weight=1.4).grouped(
        np.arange(r.n) // 2, average="sample", max_size=2
    ),
    "population": lambda r: r.drawn_from(5000),
}
"""Facts about the draw, of a record in two slices."""


@pytest.fixture(scope="module")
def record():
    """Exits that are wrong in 15 % and better in 3 % of the samples, at every confidence."""
    rng = np.random.default_rng(0)
    worse, better = rng.random(N) < 0.15, rng.random(N) < 0.03
    losses = np.column_stack([worse & ~better, better & ~worse]).astype(float)
    return ss.ExitRecord(
        rng.random((N, 1)),
        losses={"zero_one": losses},
        inconsistencies={"zero_one": np.column_stack([worse | better, np.zeros(N)])},
        costs={"layers": [1, 3]},
    ).sliced(half(N))


def request_of(promises, **options):
    return ss.Calibration(promises, delta=DELTA, **{"path": [0.7, 0.5], **options})


UNPROVEN = {
    (promise, "population") for promise in ("worst share", "exits", "slices", "each slice", "cost")
}
"""What calibration refuses, because no theorem here allows it."""


@pytest.mark.parametrize(
    ("promise", "fact"),
    [pair for pair in itertools.product(PROMISES, FACTS) if pair not in UNPROVEN],
)
def test_every_promise_on_every_record(record, promise, fact):
    known, request = FACTS[fact](record), request_of(PROMISES[promise])
    study = request.evaluate(known, n_calibration=200, splits=2, draws=2, seed=1)
    k = len(request.promises)
    assert study.test_risk.shape == study.pool_risk.shape == (2, k)
    assert study.unit == ("groups" if "groups" in fact else "samples")
    assert np.isfinite(study.test_risk).all()
    assert [row["promise"] for row in study.summary()] == [str(each) for each in request.promises]
    assert "splits of" in str(study)
    plan = request.plan(known, sizes=(50, 300), draws=2)
    assert plan.cost == "layers"
    assert (plan.certified <= 1).all()


@pytest.mark.parametrize("pair", sorted(UNPROVEN))
def test_what_is_not_proven_says_so(record, pair):
    promise, fact = pair
    with pytest.raises(ValueError, match="without replacement"):
        request_of(PROMISES[promise]).evaluate(FACTS[fact](record), n_calibration=200, splits=1)


@pytest.mark.parametrize("fact", ["plain", "weights"])
def test_splits_are_those_of_calibrating_and_testing_by_hand(record, fact):
    known = FACTS[fact](record)
    request = request_of([MEAN, ss.CostPromise("layers", at_most=2.5)])
    study = request.evaluate(known, n_calibration=300, splits=3, draws=0, seed=4)
    rng = np.random.default_rng(4)
    for split in range(3):
        order = rng.permutation(N)
        policy = request.run(known.take(order[:300]))
        result = policy.evaluate(known.take(order[300:]))
        assert study.certified[split] == (not policy.runs_full_model)
        if study.certified[split]:
            cost = 3 * (1 - result.savings["layers"])
            assert study.test_risk[split] == pytest.approx([result.risk, cost])
        assert study.savings["layers"][split] == pytest.approx(result.savings["layers"])


def test_a_path_is_learned_in_each_calibration_set(record):
    request = request_of(MEAN, path=ss.Path.learn(0.3))
    study = request.evaluate(record, n_calibration=400, splits=2, draws=2)
    assert study.pool_risk.shape == (2, 1)
    assert request.plan(record, sizes=(300,), draws=2).sizes.tolist() == [300]
    with pytest.raises(ValueError, match="must be a share"):
        request_of(MEAN, path=ss.Path.learn(100)).plan(record, sizes=(300,), draws=2)


def test_more_samples_certify_more_often(record):
    plan = request_of(MEAN).plan(record, sizes=(10, 400), draws=20)
    assert plan.certified[0] < 0.5 < plan.certified[1] == 1
    assert int(plan.__index__()) == 400
    assert "400 samples: certified 100 %" in str(plan)
    nothing = request_of(replace(MEAN, epsilon=0.01)).plan(record, sizes=(20,), draws=2)
    with pytest.raises(ValueError, match="No size up to 20"):
        nothing.__index__()


@pytest.mark.parametrize("how", ["evaluate", "plan"])
def test_what_cannot_be_repeated_is_refused(record, how):
    asking = request_of(MEAN, missing=ss.Ask(lambda ids: ids))
    with pytest.raises(ValueError, match="would ask again"):
        getattr(asking, how)(record)
    with pytest.raises(TypeError, match="takes a RiskCurve"):
        getattr(request_of(MEAN), how)(record.curve())


def test_a_request_takes_a_bound_alone():
    assert ss.Calibration(MEAN, bound="wsr").control == ss.Control("ucb", "wsr")
    with pytest.raises(ValueError, match="the Control's own"):
        ss.Calibration(MEAN, control=ss.Control("ucb", "star"), bound="wsr")


# ------------------------------------------------------------------------------- how often it fails

DRAWS = 60


def just_broken(record, promises):
    """Return the request at limits just below the true values at the one setting of its path."""
    request = request_of(promises, path=[0.5], bound="star")
    policy = request_of(
        [replace(e, epsilon=0.9) if isinstance(e, ss.Promise) else e for e in request.risks],
        path=[0.5],
        control="ucb",
    ).run(replace(record, sampling=replace(record.sampling, population=None)))
    if isinstance(policy, ss.SlicedPolicy):
        true = [max(each.risk for each in policy.evaluate(record).values())]
    else:
        true = policy.evaluate(record).risks
    # Populations of 5,000 draws vary around the pool.
    shift = 1e-9 if record.sampling.population is None else 0.005
    if len(request.promises) == 2:  # the cost alone is just too high
        cost = replace(request.promises[1], at_most=record_cost(record) - 1e-9)
        return replace(request, promises=(replace(request.risks[0], epsilon=0.9), cost))
    return replace(request, promises=replace(request.risks[0], epsilon=true[0] - shift))


def record_cost(record):
    exits = record.confidences["top1"][:, 0] >= 0.5
    return float(np.where(exits, 1.0, 3.0).mean())


def plug_in(self, curve, rows, epsilon, delta, pool=0):
    """Trust the mean of the sample."""
    sums, _ = level_totals(curve, rows)(epsilon, slice(None))
    return sums / len(rows) <= epsilon


def select_plug_in(self, curve, rows, epsilons, delta, start, pool):
    found = [int(plug_in(self, curve, rows, e, delta)[start:].all()) for e in epsilons]
    return start - 1 + np.asarray(found)


VIOLATIONS = [
    ("mean", "plain"),
    ("exits", "plain"),
    ("cost", "plain"),
    ("slices", "weights"),
    ("mean", "population"),
    ("mean", "weighted groups"),
    ("mean", "groups"),
    ("consistency", "samples of groups"),
    ("tail", "weights"),
    ("worst share", "groups"),
    ("exits", "weighted groups"),
    ("slices", "groups"),
    pytest.param("each slice", "plain", marks=pytest.mark.slow),
    pytest.param("each slice", "weights", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("promise", "fact"), VIOLATIONS)
def test_violations_are_rare_and_those_of_a_plug_in_test_are_seen(
    record, promise, fact, monkeypatch
):
    known = FACTS[fact](record)
    request = just_broken(known, PROMISES[promise])
    options = {"n_calibration": 150, "splits": 1, "draws": DRAWS, "seed": 2}
    kept = int(request.evaluate(known, **options).violated.any(axis=1).sum())
    assert binomtest(kept, DRAWS, DELTA, alternative="greater").pvalue > 1e-6
    monkeypatch.setattr(BettingBound, "passes", plug_in)
    monkeypatch.setattr(BettingBound, "select", select_plug_in)
    broken = int(request.evaluate(known, **options).violated.any(axis=1).sum())
    assert binomtest(broken, DRAWS, DELTA, alternative="greater").pvalue < 1e-6


@pytest.mark.parametrize("within", ["slices", "each slice"])
@pytest.mark.parametrize("fact", ["weights", "weighted groups"])
def test_slices_are_evaluated_with_weights_as_they_were_certified(record, within, fact):
    known = FACTS[fact](record)
    policy = request_of(replace(MEAN, epsilon=0.3, within=within)).run(known)
    if within == "slices":
        curves = [
            replace(MEAN, within="slices").curve(known, ss.ExitRule(), [0.7, 0.5], rows=rows)
            for rows in (np.arange(0, N, 2), np.arange(1, N, 2))
        ]
        expected = max(curve.risk_at(policy.certificate.index) for curve in curves)
        assert policy.evaluate(known).risk == pytest.approx(expected)
    else:
        for name, result in policy.evaluate(known).items():
            (promise,) = policy[name].certificate.promises
            assert result.risk == pytest.approx(promise.calibration_risk)
