"""What users do with records and policies: split, evaluate, edit, show, look up one request."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.bounds import BOUNDS
from swiftsure.certify.control import Control
from swiftsure.curves.risks import RISKS
from swiftsure.curves.sampling import Sampling
from swiftsure.curves.transforms import tail, worst_mean
from swiftsure.exits import exit_indices
from tests.builders import random_record, request_of

RECORD = random_record(n=900)
CALIBRATION, REST = RECORD.split(400, seed=3)
FAMILY = [[0.9, 0.8, 0.7], [0.6, 0.5, 0.4]]


def policy(**changes):
    metadata = changes.pop("metadata", None)
    request = request_of(**{"loss": "zero_one", "epsilon": 0.3, **changes})
    return request.run(CALIBRATION, metadata=metadata)


def test_a_split_is_random_and_complete():
    assert (len(CALIBRATION), len(REST)) == (400, 500)
    assert sorted([*CALIBRATION.ids, *REST.ids]) == RECORD.ids.tolist()
    again = RECORD.split(400, seed=3)[0]
    np.testing.assert_array_equal(again.ids, CALIBRATION.ids)
    assert set(RECORD.split(400, seed=4)[0].ids) != set(CALIBRATION.ids)
    with pytest.raises(ValueError, match="`n` must be below the number of samples, 900"):
        RECORD.split(900)


def test_groups_are_split_whole():
    record = random_record(n=60, groups=np.arange(60) // 4)
    first, rest = record.split(5)
    assert (len(first), len(rest)) == (20, 40)
    assert not set(first.groups) & set(rest.groups)


def test_threshold_records_are_split_and_joined():
    losses = np.random.default_rng(0).random((30, 3))
    record = ss.ThresholdRecord([1.0, 0.5, 0.2], {"x": losses}, costs={"layers": [3, 2, 1]})
    first, rest = record.split(10)
    joined = ss.ThresholdRecord.concatenate([first, rest])
    order = np.argsort(joined.ids)
    np.testing.assert_array_equal(joined.losses["x"][order], losses)
    other = ss.ThresholdRecord([1.0, 0.4, 0.2], {"x": losses}, ids=np.arange(30) + 99)
    with pytest.raises(ValueError, match="`records` must agree in `thresholds`"):
        ss.ThresholdRecord.concatenate([record, other])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rule": ss.ExitRule(strict=True, min_exit=1)},
        {"path": FAMILY},
        {"loss": "brier"},
        {"risk": "consistency"},
        {"risk": "zero-bounded gap"},
        {"epsilon": 1e-9},
    ],
)
def test_a_policy_is_evaluated_with_its_own_rule(changes):
    """Against exits, losses and costs looked up by hand."""
    made = policy(**changes)
    found = made.evaluate(REST)
    exits = made.exits(REST.confidences["top1"])
    loss, risk = changes.get("loss", "zero_one"), changes.get("risk", "gap")
    table = REST.losses[loss] if risk.endswith("gap") else REST.inconsistencies[loss]
    losses = table[np.arange(500), exits]
    if risk.endswith("gap"):
        losses = losses - table[:, -1]
    if risk.startswith("zero-bounded"):
        losses = np.maximum(losses, 0)
    assert found.risk == pytest.approx(losses.mean())
    assert found.n == 500
    shares = np.bincount(exits, minlength=4) / 500
    np.testing.assert_allclose(found.exit_shares, shares)
    assert found.savings["exit"] == pytest.approx(1 - (exits + 1).mean() / 4)
    assert found.saving in found.savings.values()


def test_several_risks_are_all_evaluated():
    promises = [
        ss.Promise("zero_one", epsilon=0.3),
        ss.Promise("brier", risk="consistency", epsilon=0.9),
    ]
    found = ss.calibrate(CALIBRATION, promises).evaluate(REST)
    assert len(found.risks) == 2
    assert found.risk == found.risks[0]


def test_a_policy_is_evaluated_on_records_it_fits():
    with pytest.raises(ValueError, match="number of exits, 4, but has 2"):
        policy().evaluate(ss.ExitRecord([[0.5]], losses={"zero_one": [[0, 0]]}))
    losses = np.zeros((300, 3))
    made = ss.calibrate(ss.ThresholdRecord([1.0, 0.5, 0.2], {"x": losses}), epsilon=0.1)
    assert made.evaluate(ss.ThresholdRecord([1.0, 0.2], {"x": losses[:9, :2]})).risk == 0
    with pytest.raises(ValueError, match=r"must hold the policy's setting, 0\.2"):
        made.evaluate(ss.ThresholdRecord([1.0, 0.5], {"x": losses[:, :2]}))


@pytest.mark.parametrize(
    "changes", [{}, {"rule": ss.ExitRule(strict=True, min_exit=1)}, {"path": FAMILY}]
)
def test_one_request_leaves_where_the_exit_rule_says(changes):
    made = policy(**changes)
    for row in REST.confidences["top1"][:60]:
        leaves = [made.leaves(k, c) for k, c in enumerate(row)]
        first = leaves.index(True) if True in leaves else 3
        expected = exit_indices(
            row[None], made.thresholds, strict=made.strict, min_exit=made.min_exit
        )
        assert first == expected[0]
    assert made.leaves(3, 0.0)


@pytest.mark.parametrize("place", ["threshold", "epsilon", "metadata"])
def test_an_edited_policy_is_refused(tmp_path, place):
    path = tmp_path / "policy.json"
    policy(metadata={"name": "router", "author": "A", "notes": "n"}).save(path)
    content = json.loads(path.read_text())
    assert content["metadata"]["name"] == "router"
    assert content["metadata"]["swiftsure"] == ss.__version__
    if place == "threshold":
        content["threshold"] = 0.0
    elif place == "epsilon":
        content["certificate"]["promises"][0]["epsilon"] = 0.9
    else:
        content["metadata"]["author"] = "B"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was changed after it was written"):
        ss.Policy.load(path)
    edited = ss.Policy.load(path, accept_edited=True)
    edited.save(path)
    assert ss.Policy.load(path) == edited


def test_a_setting_that_costs_more_than_the_full_model_is_not_chosen():
    """A cascade: two models cost more than the large one alone unless most exit early."""
    confidences = np.full((400, 1), 0.9)
    confidences[:300] = 0.1
    losses = {"zero_one": np.zeros((400, 2))}
    costs = {"usd": [1.0, 4.0]}
    record = ss.ExitRecord(confidences, losses=losses, costs=costs, full_costs={"usd": 3.0})
    made = ss.calibrate(record, epsilon=0.1, path=[0.5])
    assert made.runs_full_model  # the exit's number is saved, but that is not a price
    assert made.certificate.costs.means["usd"] == (3.0, 3.0)
    assert made.certificate.costs.dearer == {"usd": pytest.approx(3.25)}
    assert "(3.25 usd instead of 3, 8.3 % more, on the calibration samples)" in str(made)
    kept = request_of(epsilon=0.1, path=[0.5], cost="exit").run(record)
    assert kept.certificate.costs.means["usd"] == (3.0, pytest.approx(3.25))
    assert kept.evaluate(record).saving == pytest.approx(-0.25 / 3)
    table = ss.ThresholdRecord([1.0, 0.5], losses, costs={"usd": [3.0, 3.25]})
    made = ss.calibrate(table, epsilon=0.1)
    assert made.runs_full_model
    assert "costs more than the full model" in str(made)
    free = ss.ThresholdRecord([1.0, 0.5], losses, costs={"cache": [0.0, 2.0]})
    assert "(2 cache instead of 0, on the calibration" in str(ss.calibrate(free, epsilon=0.1))
    asked = request_of(epsilon=0.1, cost="usd")
    study = ss.evaluate(table, risk=asked, controls=["ucb"], n_calibration=200)
    assert (study.gain["ucb"] == 0).all()


def test_a_setting_is_not_given_up_for_a_full_model_that_was_not_recorded():
    """A first setting that is not the full model says nothing about its cost, nor its losses."""
    for relative in (None, False):
        curve = ss.RiskCurve.from_losses(
            [0.9, 0.5], np.zeros((400, 2)), [3.0, 3.25], (0, 1), relative=relative
        )
        made = ss.calibrate(curve, epsilon=0.1)
        assert made.threshold == 0.5
        assert not made.certificate.costs.not_worth


def test_gains_are_against_the_full_model_alone(tmp_path):
    losses = {"zero_one": np.zeros((400, 2))}
    record = ss.ExitRecord(
        np.ones((400, 1)), losses=losses, costs={"usd": [1.0, 4.0]}, full_costs={"usd": 3.0}
    )
    record.save(tmp_path / "record.parquet")
    record = ss.ExitRecord.load(tmp_path / "record.parquet")
    assert record.full_costs == {"usd": 3.0}
    asked = request_of(epsilon=0.1, cost="usd")
    study = ss.evaluate(record, risk=asked, controls=["ucb"], n_calibration=200)
    np.testing.assert_allclose(study.gain["ucb"], 100 * (1 - 1 / 3))
    np.testing.assert_allclose(study.mean_cost["ucb"], 1.0)
    assert ss.calibrate(record, epsilon=0.1).evaluate(record).savings["usd"] == pytest.approx(2 / 3)


def test_reports_and_plans_are_against_the_full_model_alone():
    """As in a network whose early heads, which the full model does not run, cost much."""
    losses = {"zero_one": np.zeros((400, 2))}
    costs = {"usd": [1.0, 4.0]}
    record = ss.ExitRecord(np.ones((400, 1)), losses=losses, costs=costs, full_costs={"usd": 2.5})
    curve = record.curve("gap", "zero_one")
    assert curve.saving("usd")[[0, -1]].tolist() == [0.0, 0.6]
    policy = ss.calibrate(record, epsilon=0.1)
    page = ss.report.policy_page(record, policy, cost="usd")
    assert re.search(r"saved, of usd</dt><dd[^>]*>60\s%", page)
    asked, budget = request_of(epsilon=0.1, cost="usd"), ss.planning.Budget
    plan = ss.planning.gain_by_samples(record, asked, sizes=(200,), draws=2)
    assert plan.gain.tolist() == [60.0]
    with pytest.raises(ValueError, match=r"`saving` must be at most 0\.6"):
        ss.planning.lowest_epsilon(record, budget(saving=0.7, cost="usd"))
    found = ss.planning.lowest_epsilon(record, budget(saving=0.4, cost="usd"))
    assert found.full_cost == 2.5


def test_records_from_probabilities():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 3, 4)) * 3
    p = ss.scores.probabilities(logits)
    labels = rng.integers(0, 4, 50)
    names = np.asarray(["a", "b", "c", "d"])
    direct = ss.ExitRecord.from_logits(logits, labels)
    for made in (
        ss.ExitRecord.from_probabilities(p, labels),
        ss.ExitRecord.from_probabilities(p, names[labels], classes=names),
    ):
        np.testing.assert_array_equal(made.losses["zero_one"], direct.losses["zero_one"])
        np.testing.assert_allclose(made.confidences["top1"], direct.confidences["top1"], atol=1e-7)
    certain = ss.ExitRecord.from_probabilities([[[1.0, 0.0], [0.0, 1.0]]], ["y"], ["x", "y"])
    assert certain.confidences["top1"].tolist() == [[1.0]]
    assert certain.losses["brier"].tolist() == [[2.0, 0.0]]
    missing = ss.ExitRecord.from_probabilities(p[:2], ["a", None], names)
    assert np.isnan(missing.losses["zero_one"][1]).all()
    with pytest.raises(ValueError, match="sum to 1"):
        ss.ExitRecord.from_probabilities(logits, labels)
    with pytest.raises(ValueError, match="`labels` must be among `classes`, but got 'e'"):
        ss.ExitRecord.from_probabilities(p[:1], ["e"], names)
    with pytest.raises(ValueError, match="`classes` must be given"):
        ss.ExitRecord.from_probabilities(p[:1], ["a"])


def test_everything_shows_itself_in_a_notebook():
    made = policy(metadata={"name": "<b>"})
    study = ss.evaluate(RECORD, loss="zero_one", controls=["ucb"], epsilons=[0.2], splits=3)
    for shown in (made, RECORD, study, ss.Monitor(epsilon=0.1)):
        text = shown._repr_html_()
        assert text.startswith("<div>")
        assert "<b>" not in text
        assert len(repr(shown)) < 500
    assert made.plot(CALIBRATION).axes
    assert study.plot().axes


# -------------------------------------------------------------------------- ranges and signatures


def resaved(path, change):
    """Edit a policy file and give it the checksum of its new content."""
    from swiftsure._lib.files import json_checksum

    content = json.loads(path.read_text())
    proofs = {name: content.pop(name) for name in ("checksum", "signature") if name in content}
    change(content)
    path.write_text(json.dumps(content | proofs | {"checksum": json_checksum(content)}))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c: c.update(n_exits=2_147_483_648), "n_exits"),
        (lambda c: c.update(n_exits=0), "n_exits"),
        (lambda c: c.update(min_exit=-1), "min_exit"),
        (lambda c: c.update(min_exit=50), "min_exit"),
        (lambda c: c.update(threshold=[0.5] * 50), "threshold"),
        (lambda c: c.update(temperatures=[1.0]), "temperatures"),
        (lambda c: c["certificate"].update(delta=-1), "delta"),
        (lambda c: c["certificate"].update(delta=1.5), "delta"),
        (lambda c: c["certificate"].update(delta=None), "delta"),
        (lambda c: c["certificate"]["samples"].update(n=0), "certificate.samples.n"),
        (lambda c: c["certificate"]["samples"].update(n=10**9), "n must not exceed n_samples"),
        (lambda c: c["certificate"].update(index=None), "no setting was certified"),
        (lambda c: c["certificate"].update(index=10**6), "index"),
        (lambda c: c["certificate"]["costs"].update(exit_shares=[2.0, -1.0]), "exit_shares"),
        (lambda c: c["certificate"]["costs"].update(means={"flops": [-1, 1]}), "costs"),
        (lambda c: c["certificate"]["samples"].update(population=1), "population"),
        (lambda c: c["certificate"]["promises"][0].update(epsilon=7), "epsilon"),
        (lambda c: c["certificate"]["promises"][0].update(loss_range=[1, 0]), "loss_range"),
        (lambda c: c["certificate"]["promises"][0].update(calibration_risk=3), "calibration_risk"),
        (lambda c: c["certificate"]["promises"][0].update(upper_bound=-9), "upper_bound"),
        (lambda c: c["certificate"].update(path="x" * 10**6), "path"),
        *(
            (lambda c, change=change: c["calibration"].update(change), "calibration")
            for change in (
                {"promises": 3},
                {"promises": []},
                {"promises": ["zero_one"]},
                {"promises": [{"loss": "zero_one"}]},
                {"promises": [{"loss": 5, "epsilon": 0.3}]},
                {"promises": [{"loss": "zero_one", "epsilon": 0.3}, {"cost": 5, "at_most": 1}]},
                {"promises": [{"loss": "zero_one", "epsilon": 0.3, "new": 1}]},
                {"delta": "small"},
                {"delta": 10**400},
                {"control": "ucb"},
                {"control": {"name": "ucb", "new": 1}},
                {"path": {"kind": "given grid"}},
                {"path": {"share": 0.1}},
                {"path": 5 * [None]},
                {"rule": {"score": 5}},
                {"rule": []},
                {"rule": {"threshold": 0.5}},
                {"missing": {}},
                {"missing": ["ask"]},
                {"missing": {"ask": -1}},
                {"cost": 5},
                {"new": 1},
            )
        ),
        (lambda c: c.update(calibration=3), "calibration"),
        (lambda c: c.update(calibration={}), "calibration"),
        (lambda c: c.update(threshold=-5), "threshold"),
        (lambda c: c.update(threshold=1e300), "threshold"),
        (lambda c: c.update(threshold="0.5"), "threshold"),
        (lambda c: c.update(threshold=True), "threshold"),
        (lambda c: c.update(threshold=10**400), "threshold"),
        (lambda c: c.update(threshold=[0.5, 0.5, -5.0]), "threshold"),
        (lambda c: c.update(strict="yes"), "strict"),
        (lambda c: c.update(strict=1), "strict"),
        (lambda c: c.update(version=True), "version"),
        (lambda c: c.update(score=None), "score"),
        (lambda c: c.update(score=""), "score"),
        (lambda c: c.update(dtype="int3"), "dtype"),
        (lambda c: c.update(min_exit=10**400), "min_exit"),
        (lambda c: c.update(temperatures=[1e-320] * 4), "temperatures"),
        (lambda c: c["certificate"]["samples"].update(n=True), "certificate.samples.n"),
        (lambda c: c["certificate"]["samples"].update(n=10**400), "certificate.samples.n"),
        (lambda c: c["certificate"]["samples"].update(n=2), "n is too small"),
        (lambda c: c["certificate"].update(delta=1e-300), "n is too small"),
        (lambda c: c["certificate"].update(index=0), "index"),
        (lambda c: c["certificate"].update(control="magic"), "control"),
        (lambda c: c["certificate"].update(control="budget"), "epsilon must be upper_bound"),
        (lambda c: c["certificate"]["samples"].update(unit="groups"), "max_group_size"),
        (lambda c: c["certificate"]["samples"].update(average="group"), "average"),
        (lambda c: c["certificate"]["samples"].update(max_group_size=3), "max_group_size"),
        (lambda c: c["certificate"]["costs"].update(dearer={"exit": 9.0}), "index must be null"),
        (
            lambda c: (
                c["certificate"].update(index=None)
                or c["certificate"]["costs"].update(dearer={"exit": 9.0})
            ),
            "threshold",
        ),
        (lambda c: c["certificate"]["promises"][0].update(epsilon=10**400), "epsilon"),
        (lambda c: c["certificate"]["promises"][0].update(epsilon=-0.1), "epsilon"),
        (lambda c: c["certificate"]["promises"][0].update(risk="luck"), "risk"),
        (lambda c: c["certificate"]["promises"][0].update(upper_bound=0.5), "upper_bound"),
        (lambda c: c["certificate"]["promises"][0].update(upper_bound=0.0), "upper_bound"),
        (lambda c: c["certificate"]["promises"][0].update(bound="bindomial"), "bound"),
        (lambda c: c["certificate"]["samples"].update(n_samples=10**6), "n must be n_samples"),
        (
            lambda c: c["certificate"]["costs"].update(exit_shares=[0.12345, 0.87655, 0, 0]),
            "exit_shares",
        ),
        (lambda c: c["certificate"]["provenance"].update(seed_drawn=True), "seed_drawn"),
        (lambda c: c["certificate"]["costs"].update(deciding="dollars"), "deciding must be"),
        (lambda c: c["certificate"]["provenance"].update(data="sha256:12"), "data must be SHA-256"),
        (lambda c: c["certificate"].update(conditions=[]), "conditions must be given"),
        (lambda c: c["certificate"]["conditions"].append({"key": "", "facts": {}}), "conditions"),
        (lambda c: c.update(score="\x1b[31m"), "score"),
        (lambda c: c.update(min_exit=3), "min_exit"),
        (
            lambda c: c["certificate"]["promises"][0].update(calibration_risk=0.5),
            "calibration_risk",
        ),
    ],
)
def test_impossible_values_are_refused_even_with_a_checksum(tmp_path, change, field):
    path = tmp_path / "policy.json"
    policy(bound="hoeffding").save(path)
    resaved(path, change)
    for accept in (False, True):
        with pytest.raises(ValueError, match=f"damaged policy: .*{field}") as caught:
            ss.Policy.load(path, accept_edited=accept)
        assert len(str(caught.value)) < 1_000
        assert "\n" not in str(caught.value)


def test_a_signed_policy_is_refused_when_it_was_edited(tmp_path, monkeypatch):
    path = tmp_path / "policy.json"
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY", "secret")
    made = policy()
    made.save(path)
    assert ss.Policy.load(path) == made
    resaved(path, lambda content: content.update(threshold=0.0))
    for accept in (False, True):
        with pytest.raises(ValueError, match="does not fit its signature"):
            ss.Policy.load(path, accept_edited=accept)
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY", "another")
    made.save(path)
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY", "secret")
    with pytest.raises(ValueError, match="does not fit its signature"):
        ss.Policy.load(path)


def test_an_unsigned_policy_is_refused_where_there_is_a_key(tmp_path, monkeypatch):
    path, key = tmp_path / "policy.json", tmp_path / "key"
    policy().save(path)
    key.write_text("secret\n")
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY_FILE", str(key))
    with pytest.raises(ValueError, match="is not signed, but SWIFTSURE_POLICY_KEY asks for one"):
        ss.Policy.load(path)
    policy().save(path)
    ss.Policy.load(path)
    monkeypatch.delenv("SWIFTSURE_POLICY_KEY_FILE")
    ss.Policy.load(path)  # without a key the signature is not checked
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY", "secret")
    ss.Policy.load(path)  # the same key, from the other variable
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="not both"):
        ss.Policy.load(path)


def test_the_threshold_is_also_in_the_settings(tmp_path):
    """A fitting checksum does not help a threshold that only one of both places holds."""
    path = tmp_path / "policy.json"
    policy().save(path)
    for change in (
        lambda c: c.update(threshold=0.0),
        lambda c: c.update(threshold=None),
        lambda c: c["settings"].update(threshold=0.0),
        lambda c: c["settings"].clear(),
    ):
        policy().save(path)
        resaved(path, change)
        with pytest.raises(ValueError, match="damaged policy: settings must hold the threshold"):
            ss.Policy.load(path)


def test_an_edited_threshold_leaves_other_settings(tmp_path):
    """Such as what a cascade's requests were like."""
    path = tmp_path / "policy.json"
    made = policy()
    made.model_copy(update={"settings": made.settings | {"requests": ["chat"]}}).save(path)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"threshold": 0.5}))
    edited = ss.Policy.load(path, accept_edited=True)
    assert (edited.threshold, edited.settings) == (0.5, {"threshold": 0.5, "requests": ["chat"]})


@pytest.mark.parametrize("name", ["SWIFTSURE_POLICY_KEY", "SWIFTSURE_POLICY_KEY_FILE"])
def test_a_key_that_is_set_must_not_be_empty(tmp_path, monkeypatch, name):
    path = tmp_path / "policy.json"
    policy().save(path)
    (tmp_path / "empty").write_text(" \n")
    values = ["", " "] if name.endswith("KEY") else ["", str(tmp_path / "empty")]
    for value in values:
        monkeypatch.setenv(name, value)
        for use in (ss.Policy.load, policy().save):
            with pytest.raises(ValueError, match=name):
                use(path)


def test_a_key_may_be_any_bytes(tmp_path, monkeypatch):
    path, key = tmp_path / "policy.json", tmp_path / "key"
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY", " \udcff\udc80secret\n")  # bytes, not UTF-8
    policy().save(path)
    ss.Policy.load(path)
    monkeypatch.delenv("SWIFTSURE_POLICY_KEY")
    key.write_bytes(b"\xff\x80secret\n")
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY_FILE", str(key))
    ss.Policy.load(path)  # the same key


@pytest.mark.parametrize("signature", ["hmac-é", None, 3, ["x"], {"x": 1}])
def test_odd_signatures_are_refused(tmp_path, monkeypatch, signature):
    path = tmp_path / "policy.json"
    monkeypatch.setenv("SWIFTSURE_POLICY_KEY", "secret")
    policy().save(path)
    content = json.loads(path.read_text()) | {"signature": signature}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"signature|signed"):
        ss.Policy.load(path)


def own_curves():
    """Yield curves of every kind: of 0-1, ternary and real losses, alone and in groups."""
    for n, seed in itertools.product((60, 400), range(3)):
        record = random_record(n=n, seed=seed)
        for risk, loss in itertools.product(RISKS, ("zero_one", "brier")):
            yield record.curve(risk, loss)
            yield record.curve(risk, loss, path=[0.9, 0.5, -1.0, 7.0])
            for average in ({}, {"average": "sample", "max_size": 4}):
                yield record.grouped(np.arange(n) // 3, **average).curve(risk, loss)


def own_controls():
    for name, zero_bounded in itertools.product(("ucb", "ltt"), (False, True)):
        for bound in ("auto", *BOUNDS):
            yield Control(name, bound, zero_bounded=zero_bounded)
    yield Control("ltt", "hoeffding", correction="bonferroni")
    yield Control("empirical")
    yield from (Control("crc"), Control("crc", method="ucb"), Control("crc", selection="paper"))


@pytest.mark.filterwarnings("ignore:`delta`")
def test_every_policy_of_the_library_is_read_again(tmp_path):
    path, read, certified = tmp_path / "policy.json", 0, 0
    rng = np.random.default_rng(0)
    for curve in own_curves():
        for control in own_controls():
            for epsilon, delta in [(0.02, 0.1), (0.2, 0.1), (0.3, 0.6), (0.6, 1e-3)]:
                if rng.random() < 0.95:
                    continue
                try:
                    made = ss.calibrate(curve, epsilon=epsilon, delta=delta, control=control)
                except ValueError:
                    continue  # a bound that does not fit these losses
                made.save(path)
                assert ss.Policy.load(path) == made
                read += 1
                certified += not made.runs_full_model
    assert read > 200
    assert certified > 50


@pytest.mark.parametrize("risk", list(RISKS))
@pytest.mark.parametrize("bound", ["auto", "star", "hoeffding"])
@pytest.mark.parametrize("saving", [1e-9, 0.1, 0.4])
def test_every_policy_of_a_budget_is_read_again(tmp_path, risk, bound, saving):
    path = tmp_path / "policy.json"
    for n in (40, 400):
        record = random_record(n=n)
        for goal in ({"saving": saving}, {"budget": 4.0}, {"budget": 1e9}):
            try:
                made = ss.planning.lowest_epsilon(
                    record, risk=risk, loss="brier", bound=bound, **goal
                ).policy
            except ValueError as error:
                assert "saving" in str(error) or "bound" in str(error)  # noqa: PT017
                continue
            made.save(path)
            assert ss.Policy.load(path) == made


# ------------------------------------------------------------------------- the cost that is meant


@pytest.mark.parametrize(
    ("costs", "full_costs", "expected"),
    [
        ({"layers": [3, 6, 9, 12], "flops": [1, 5, 7, 8]}, {}, "flops"),
        ({"tokens": [9, 9, 9, 10], "usd": [1, 2, 3, 4]}, {"seconds": 1, "usd": 3.5}, "usd"),
        ({"seconds": [1, 2, 3, 4], "layers": [3, 6, 9, 12]}, {}, "layers"),
        ({"seconds": [1, 2, 3, 4]}, {}, "seconds"),
        ({}, {}, "exit"),
    ],
)
def test_one_rule_chooses_the_cost_everywhere(costs, full_costs, expected):
    """A policy's evaluation, a study, a report, plans, paths and `calibrate_best`: one saving."""
    full_costs = {k: v for k, v in full_costs.items() if k in costs}
    record = replace(RECORD, costs=costs, full_costs=full_costs)
    asked = {"loss": "zero_one", "epsilon": 0.3}
    made = ss.calibrate(record, **asked)
    found = made.evaluate(record)
    assert found.saving == found.savings[expected]
    study = ss.evaluate(record, loss="zero_one", controls=["ucb"], epsilons=[0.3], splits=2)
    assert study.cost == expected
    assert ss.report.findings.findings(record, made).cost == expected
    assert made.plot(record).axes[1].get_ylabel() == f"saved, % of {expected}"
    sizes = {"sizes": (200,), "draws": 5}
    plans = [
        ss.planning.gain_by_samples(record, request_of(**asked, cost=cost), **sizes)
        for cost in (None, expected)
    ]
    assert plans[0].gain == plans[1].gain
    pools = [
        ss.planning.unlabelled_pool(50, request_of(**asked, cost=cost), record, **sizes)
        for cost in (None, expected)
    ]
    assert pools[0].gain == pools[1].gain
    budgets = [
        ss.planning.lowest_epsilon(
            record, ss.planning.Budget(saving=0.2, cost=cost), loss="zero_one"
        )
        for cost in (None, expected)
    ]
    assert budgets[0].cost == budgets[1].cost
    best = ss.calibrate_best(record, request_of(**asked), correction="bonferroni")
    assert best.certificate.selection.cost == expected


# ------------------------------------------------------------------------- what was promised


def gaps_at(made, record):
    """The 0-1 gap of each sample at the exit that a policy takes."""
    exits = made.exits(record.confidences["top1"])
    losses = record.losses["zero_one"]
    return losses[np.arange(record.n), exits] - losses[:, -1]


def test_a_promise_about_weighted_samples_is_evaluated_with_weights():
    slices = np.where(RECORD.predictions[:, 0] > 2, "night", "day")
    record = replace(RECORD, slices=slices, costs={"flops": [1, 2, 3, 5]})
    share = float((slices == "night").mean())
    by_name = {"night": 0.5 / share, "day": 0.5 / (1 - share)}
    weights = np.asarray([by_name[name] for name in slices])
    weighted = record.weighted(by_name, max_weight=max(by_name.values()))
    made = ss.calibrate(weighted, loss="zero_one", epsilon=0.3)
    found = made.evaluate(weighted)
    assert found.risk == pytest.approx((weights * gaps_at(made, record)).mean())
    assert found.risk == pytest.approx(made.certificate.promises[0].calibration_risk)
    spent = record.costs["flops"][made.exits(record.confidences["top1"])]
    assert found.saving == pytest.approx(1 - (weights * spent).mean() / weights.mean() / 5)
    full, here = made.certificate.costs.means["flops"]
    assert (full, 1 - here / full) == (pytest.approx(5), pytest.approx(found.saving))
    with pytest.raises(ValueError, match=r"must have weights.* of 1 if it was drawn in production"):
        made.evaluate(record)
    in_production = made.evaluate(record.weighted(np.ones(900), max_weight=1))
    assert in_production.risk == pytest.approx(gaps_at(made, record).mean())
    with pytest.raises(ValueError, match="the promise is not about weighted samples"):
        policy().evaluate(weighted)


def test_a_promise_about_slices_is_evaluated_on_them():
    slices = np.where(np.arange(900) % 3 == 0, "night", "day")
    record = RECORD.sliced(slices)
    asked = {"loss": "zero_one", "epsilon": 0.3}
    own = request_of(**asked, within="each slice").run(record)["night"]
    found = own.evaluate(record)
    gaps = gaps_at(own, record)
    assert (found.n, found.risk) == (300, pytest.approx(gaps[::3].mean()))
    shared = request_of(**asked, within="slices").run(record)
    gaps = gaps_at(shared, record)
    worst = max(gaps[slices == name].mean() for name in ("night", "day"))
    found = shared.evaluate(record)
    assert (found.n, found.risk) == (900, pytest.approx(worst))
    with pytest.raises(ValueError, match=r"must hold the slice of each sample, .* slice night"):
        own.evaluate(RECORD)
    with pytest.raises(ValueError, match="must hold samples of slice night"):
        own.evaluate(record.take(np.flatnonzero(slices == "day")))
    assert own.plot(record).axes[0].lines[0].get_ydata()[-1] == pytest.approx(
        record.take(np.arange(0, 900, 3)).curve("gap", "zero_one").risk()[-1]
    )
    with pytest.raises(ValueError, match="`plot` shows the risk of one slice"):
        shared.plot(record)


def test_a_promise_is_evaluated_with_its_own_averages():
    groups = np.repeat(np.arange(90), [1, 19] * 45)
    grouped = replace(RECORD, groups=groups)
    made = ss.calibrate(RECORD, loss="zero_one", epsilon=0.3)
    found = made.evaluate(grouped)
    assert (found.n, found.risk) == (900, pytest.approx(gaps_at(made, RECORD).mean()))
    drawn = made.plot(grouped).axes[0].lines[0].get_ydata()
    np.testing.assert_allclose(drawn, RECORD.curve("gap", "zero_one").risk())
    by_sample = RECORD.grouped(groups, average="sample", max_size=20)
    of_groups = ss.calibrate(by_sample, loss="zero_one", epsilon=0.5)
    for same in (grouped, by_sample):  # averaged as was promised, whatever the record says
        assert of_groups.evaluate(same).risk == pytest.approx(gaps_at(of_groups, RECORD).mean())
        drawn = of_groups.plot(same).axes[0].lines[0].get_ydata()
        np.testing.assert_allclose(drawn, by_sample.curve("gap", "zero_one").risk())
    averages = ss.calibrate(grouped, loss="zero_one", epsilon=0.5)
    with pytest.raises(ValueError, match="`record` must have groups"):
        averages.evaluate(RECORD)


def test_a_policy_is_evaluated_on_its_own_system_only():
    losses = {"x": np.zeros((300, 3))}
    one, other = (
        ss.ThresholdRecord([1.0, 0.5, 0.2], losses, settings={"score": score, "steps": [1, 2]})
        for score in ("softmax", "saturation")
    )
    made = ss.calibrate(one, epsilon=0.1)
    assert made.evaluate(one).risk == 0
    for use in (made.evaluate, made.plot):
        with pytest.raises(ValueError, match="score = softmax, but it was recorded with score = s"):
            use(other)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (lambda curve: tail(curve, 0.1), "brier gap > 0.1"),
        (lambda curve: worst_mean(curve, 0.1), "brier gap, worst 10 %"),
        (
            lambda curve: Sampling(weights=WEIGHTS, max_weight=1.5).applied(curve),
            "brier gap (weighted)",
        ),
    ],
)
def test_a_study_says_what_its_risk_is(changed, words):
    curve = changed(RECORD.curve("gap", "brier"))
    study = ss.evaluate(curve, controls=["ucb"], epsilons=[0.4], splits=2, n_calibration=200)
    assert str(study.about) == words
    assert words in str(study)


WEIGHTS = np.where(np.arange(900) % 2, 1.5, 0.5)


def test_a_study_of_weighted_samples_has_weighted_gains():
    """Half of the samples exit at once, and they weigh three times as much as the others."""
    confidences = np.where(WEIGHTS > 1, 0.9, 0.1)[:, None]
    record = ss.ExitRecord(
        confidences,
        losses={"zero_one": np.zeros((900, 2))},
        costs={"usd": [1.0, 5.0]},
        full_costs={"usd": 4.0},
    )
    curve = record.weighted(WEIGHTS, max_weight=1.5).curve(path=[0.5])
    study = ss.evaluate(curve, controls=["ucb"], epsilons=[0.2], splits=40, n_calibration=400)
    assert study.gain["ucb"].mean() == pytest.approx(100 * (1 - (0.75 * 1 + 0.25 * 5) / 4), abs=1)


# ------------------------------------------------------------------------- errors and sentences


def test_an_exit_that_is_better_than_the_last_is_said_to_be():
    losses = np.zeros((300, 2))
    losses[:140, 1] = losses[:20, 0] = 1
    record = ss.ExitRecord(np.full((300, 1), 0.5), losses={"zero_one": losses})
    made = ss.calibrate(record, epsilon=0.05, path=[0.0])
    assert (
        "It always takes exit 1 of 2, which is better than the last (its mean zero_one is lower by"
        " 0.4 on the calibration samples), and runs 50 % of the stages"
    ) in made.sentence
    even = replace(record, losses={"zero_one": np.zeros((300, 2))})
    even = ss.calibrate(even, epsilon=0.05, path=[0.0])
    assert "It always takes exit 1 of 2, and runs 50 %" in even.sentence


def test_the_file_of_a_sliced_policy_says_what_reads_it(tmp_path):
    record = replace(RECORD, slices=np.where(np.arange(900) % 3 == 0, "night", "day"))
    asked = request_of(loss="zero_one", epsilon=0.3, within="each slice")
    asked.run(record).save(tmp_path / "policy.json")
    with pytest.raises(
        ValueError, match=r"a policy for each slice: `swiftsure\.SlicedPolicy\.load"
    ):
        ss.Policy.load(tmp_path / "policy.json")
    policy().save(tmp_path / "policy.json")
    with pytest.raises(ValueError, match=r"one policy: `swiftsure\.Policy\.load` reads it"):
        ss.SlicedPolicy.load(tmp_path / "policy.json")


def test_studies_and_plans_of_few_labels_say_what_they_take():
    record = ss.ExitRecord.from_logits(np.random.default_rng(0).normal(size=(300, 3, 4)))
    some = record.with_labels(record.ids[:50], np.zeros(50, int))
    promise = ss.Promise("zero_one", epsilon=0.05)
    uses = (
        lambda: ss.evaluate(some, risk=promise),
        lambda: ss.planning.gain_by_samples(some, promise),
        lambda: ss.planning.lowest_epsilon(some, saving=0.1, loss="zero_one"),
    )
    for use in uses:
        with pytest.raises(ValueError, match=r"pass `record\.curve\(\.\.\., missing=\"worst\"\)`"):
            use()
    curve = some.curve(loss="zero_one", missing="worst")
    assert ss.evaluate(curve, controls=["ucb"], splits=2, n_calibration=50).n_pool == 300


def test_a_saving_below_zero_is_explained():
    losses = {"zero_one": np.zeros((400, 2))}
    costs = {"usd": [1.0, 4.0]}
    confidences = np.linspace(0, 1, 400)[:, None]
    record = ss.ExitRecord(confidences, losses=losses, costs=costs, full_costs={"usd": 3.0})
    made = ss.calibrate(record, epsilon=0.1)
    assert "Below 0, so few samples exit early" in ss.report.policy_page(record, made)
    assert made.plot(record).axes[1].get_title().startswith("below 0, the early exits cost more")
    free = replace(record, full_costs={"usd": 4.0})
    made = ss.calibrate(free, epsilon=0.1)
    assert "Below 0, so few" not in ss.report.policy_page(free, made)
    assert not made.plot(free).axes[1].get_title()
