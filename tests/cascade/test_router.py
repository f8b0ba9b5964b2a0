"""A router before the small model: what it learns, what a record, a run and a policy make of it."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cascade import Answer, Router
from swiftsure.exits import exit_indices

FAILS_ABOVE = 0.5


def small(x):
    """Unsure of everything, and wrong every second time above FAILS_ABOVE."""
    wrong = x[0] > FAILS_ABOVE and int(1e6 * abs(x[1])) % 2
    sure = 0.5 + int(1e6 * abs(x[0])) % 100 / 250
    return Answer(int(x[1] > 0) ^ int(wrong), confidence=sure, cost={"usd": 0.4})


def large(x):
    return Answer(int(x[1] > 0), cost={"usd": 1.0})


def embed(inputs):
    return np.column_stack([np.asarray(inputs)[:, :1], np.ones(len(inputs))])


MODELS = {"small": small, "large": large}
INPUTS = np.random.default_rng(0).normal(size=(1600, 2))


@pytest.fixture(scope="module")
def router():
    pilot = ss.Cascade(MODELS).collect(INPUTS[:400], ids=np.arange(400))
    return Router.fit(pilot, INPUTS[:400], embed, cost={"usd": 0.01})


@pytest.fixture(scope="module")
def cascade(router):
    return ss.Cascade({"router": router, **MODELS})


@pytest.fixture(scope="module")
def record(cascade):
    return cascade.collect(INPUTS[400:1200], ids=np.arange(400, 1200))


def test_it_learns_where_the_small_model_fails(router):
    level = router.hopeless(INPUTS[1200:])
    fails = INPUTS[1200:, 0] > FAILS_ABOVE
    assert level[fails].mean() > 0.35
    assert level[~fails].mean() < 0.1


def test_the_last_model_answers_where_it_fires(record):
    plain = ss.Cascade(MODELS).collect(INPUTS[400:1200])
    assert record.n_exits == 3
    assert (record.inconsistencies["zero_one"][:, 0] == 0).all()
    assert np.array_equal(
        record.inconsistencies["zero_one"][:, 1:], plain.inconsistencies["zero_one"]
    )
    assert record.costs["usd"][0].tolist() == pytest.approx([1.01, 0.41, 1.41])
    assert record.full_costs["usd"].tolist() == [1.0] * 800


def test_two_dials_save_more_than_one(cascade, record):
    promise = ss.Promise(risk="consistency", epsilon=0.02)
    policy = cascade.calibrate(record, promise)
    alone = ss.Cascade(MODELS)
    one = alone.calibrate(alone.collect(INPUTS[400:1200]), promise)
    full, cost = policy.certificate.costs.means["usd"]
    assert cost < 0.75 * full
    assert one.certificate.costs.means["usd"][1] > cost + 0.1
    assert "to which its router gives at least" in str(policy)
    assert "none of the 400 samples that the router was learned on" in str(policy)


def test_a_run_takes_the_exits_of_the_record(cascade, record):
    policy = cascade.calibrate(record, risk="consistency", epsilon=0.02)
    runner = cascade.run(policy)
    out = runner(INPUTS[400:1200])
    expected = exit_indices(record.confidences["confidence"], policy.thresholds)
    assert (expected == 0).any()
    # Where the router fires, the last model answers.
    assert np.array_equal(out.exits, np.where(expected == 0, 2, expected))
    rows = np.arange(record.n)
    assert out.cost["usd"] == pytest.approx(record.costs["usd"][rows, expected].sum())
    assert not out.failures
    assert policy.evaluate(record).risk <= 0.02


def test_batches_take_the_same_exits(router):
    pytest.importorskip("sklearn")
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier

    labels = ((INPUTS[:, 1] > 0) ^ (INPUTS[:, 0] > 1)).astype(int)
    models = [LogisticRegression().fit(INPUTS, labels), KNeighborsClassifier().fit(INPUTS, labels)]
    free = Router(embed, router.landmarks, router.weights, base=router.base, width=router.width)
    cascade = ss.Cascade([free, *models])
    record = cascade.collect(INPUTS[400:1200])
    policy = cascade.calibrate(record, risk="consistency", epsilon=0.05)
    runner = cascade.run(policy)
    expected = exit_indices(record.confidences["confidence"], policy.thresholds)
    out = runner(INPUTS[400:1200])
    assert np.array_equal(out.exits, np.where(expected == 0, 2, expected))


def test_pilot_samples_are_refused(cascade, record):
    with pytest.raises(ValueError, match="the router was learned on, but holds 50"):
        cascade.collect(INPUTS[:50], ids=np.arange(50))
    again = ss.ExitRecord.concatenate([record.take([0]), record.take([1])])
    assert again.settings["router"] == record.settings["router"]


def test_studies_leave_the_pilot_out(record):
    request = ss.Calibration(
        ss.Promise(risk="consistency", epsilon=0.05), path=ss.Path.learn(0.3), rule="confidence"
    )
    study = request.evaluate(record, n_calibration=300, splits=3, draws=3, progress=False)
    assert study is not None


def test_exits_through_the_router_are_no_exits_without_loss(record):
    promise = ss.Promise(risk="consistency", epsilon=0.05, among="exits")
    with pytest.raises(ValueError, match="router sends to the full model"):
        ss.calibrate(record, promise)


def test_a_router_that_fails_asks_the_last_model(cascade, record):
    policy = cascade.calibrate(record, risk="consistency", epsilon=0.02)

    def broken(inputs):
        raise ConnectionError("no embeddings")

    own = cascade.router
    other = Router(broken, own.landmarks, own.weights, base=own.base, width=own.width)
    out = ss.Cascade({"router": other, **MODELS}).run(policy)(INPUTS[:3])
    assert out.exits.tolist() == [2, 2, 2]
    assert "no embeddings" in out.failures[0][1]


def test_it_comes_back_from_a_file(router, tmp_path):
    router.save(tmp_path / "router.npz")
    again = Router.load(tmp_path / "router.npz", embed)
    assert np.array_equal(again.hopeless(INPUTS), router.hopeless(INPUTS))
    assert again.pilot.to_json() == router.pilot.to_json()
    assert again.cost == router.cost
    np.savez(tmp_path / "other.npz", landmarks=INPUTS)
    with pytest.raises(ValueError, match="not a router's file"):
        Router.load(tmp_path / "other.npz", embed)


def test_its_identity_needs_that_of_the_embedding(router):
    assert router.identity() is None

    def known(inputs):
        return embed(inputs)

    known.fingerprint = "columns"
    assert (
        Router(
            known, router.landmarks, router.weights, base=router.base, width=router.width
        ).identity()["embed"]
        == "columns"
    )


def test_it_must_come_first(router):
    with pytest.raises(ValueError, match="before all others"):
        ss.Cascade([small, router, large])
    with pytest.raises(ValueError, match="at least 2, but got 1"):
        ss.Cascade([router, large])
