"""What policies say: to a manager, to a lawyer, and in their files."""

import json
from dataclasses import fields, replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure._lib.files import json_checksum
from swiftsure.certify import wording
from swiftsure.certify.certificate import Certificate, Costs, PromiseResult, Provenance, Samples
from swiftsure.curves.conditions import Condition, dropped, replaced
from swiftsure.study.simulate import Population

FLOPS = np.array([1, 2, 3, 4, 5]) * 1e9


@pytest.fixture(scope="module")
def record():
    sample = Population().sample(1000, seed=0)
    made = ss.ExitRecord.from_logits(sample.logits, sample.labels)
    return replace(made, costs=dict(made.costs) | {"flops": FLOPS})


def sliced(record):
    return record.sliced(np.where(np.arange(record.n) % 2, "day", "night"))


def weighted(record):
    return record.weighted(np.where(np.arange(record.n) % 2, 1.5, 0.5), max_weight=2)


def users(record, **facts):
    return record.grouped(np.arange(record.n) // 4, **facts)


def same(record):
    return record


PER_100 = "more wrong answers per 100 than the full model, on average"
LIKE = "for inputs like the 1,000 it was calibrated on; 90 % sure."

SENTENCES = {
    "gap": (same, ss.Promise("zero_one", epsilon=0.05), f"It gives at most 5 {PER_100}, {LIKE}"),
    "one in a hundred": (
        same,
        ss.Promise("zero_one", epsilon=0.01),
        f"It gives at most 1 {PER_100}, {LIKE}".replace("answers", "answer"),
    ),
    "measured": (
        same,
        ss.Promise("brier", epsilon=0.1),
        f"Its mean Brier score is at most 0.1 higher than the full model's, {LIKE}",
    ),
    "consistency": (
        same,
        ss.Promise("zero_one", risk="consistency", epsilon=0.05),
        f"At most 5 of its answers per 100 differ from the full model's, on average, {LIKE}",
    ),
    "zero-bounded": (
        same,
        ss.Promise("zero_one", risk="zero-bounded gap", epsilon=0.05),
        "It gives at most 5 wrong answers per 100 where the full model gives none, on average,"
        f" {LIKE}",
    ),
    "tail": (
        same,
        ss.Promise("brier", above=0.1, epsilon=0.1),
        "At most 10 of 100 inputs have a Brier score more than 0.1 higher than the full model's,"
        f" {LIKE}",
    ),
    "worst": (
        same,
        ss.Promise("brier", worst=0.1, epsilon=0.9),
        "Over the 10 % of inputs where it does worst, its mean Brier score is at most 0.9 higher"
        f" than the full model's, {LIKE}",
    ),
    "exits": (
        same,
        ss.Promise("zero_one", among="exits", epsilon=0.1),
        f"Among the inputs that exit early, it gives at most 10 {PER_100}, {LIKE}",
    ),
    "slices": (
        sliced,
        ss.Promise("zero_one", within="slices", epsilon=0.08),
        f"It gives at most 8 {PER_100}, for inputs in each of the slices day and night like the"
        " 1,000 it was calibrated on; 90 % sure.",
    ),
    "groups": (
        users,
        ss.Promise("zero_one", epsilon=0.08),
        f"It gives at most 8 {PER_100}, for groups of inputs like the 250 it was calibrated on,"
        " where every group counts the same, whatever its size; 90 % sure.",
    ),
    "samples of groups": (
        lambda record: users(record, average="sample", max_size=6),
        ss.Promise("zero_one", epsilon=0.12),
        f"It gives at most 12 {PER_100}, for inputs in groups like the 250 it was calibrated on,"
        " where every input counts the same; 90 % sure.",
    ),
    "weights": (
        weighted,
        ss.Promise("zero_one", epsilon=0.1),
        f"It gives at most 10 {PER_100}, for inputs of the distribution that the weights describe"
        " (it was calibrated on 1,000 samples of another); 90 % sure.",
    ),
    "population": (
        lambda record: record.drawn_from(20_000),
        ss.Promise("zero_one", epsilon=0.05),
        f"It gives at most 5 {PER_100}, over the finite population of 20,000 samples that the"
        " 1,000 it was calibrated on were drawn from; 90 % sure.",
    ),
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_the_first_sentence_is_for_a_manager(record, kind):
    facts, promise, sentence = SENTENCES[kind]
    policy = ss.calibrate(facts(record), [promise])
    assert str(policy).startswith(sentence + " It exits at the first of 5 exits with a top-1")
    assert policy.sentence == str(policy).splitlines()[0]
    assert "of the FLOPs" in policy.sentence
    assert "of exits" not in policy.sentence
    lines = str(policy).splitlines()
    voids, rest, exact = (
        lines.index(each) for each in ("What voids this:", "Not promised:", "In exact terms:")
    )
    assert voids < rest < exact
    assert all(line.startswith("- ") for line in lines[voids + 1 : rest])
    for text in policy.certificate.assumptions:
        assert any(text in line for line in lines[voids:rest])
    assert "any single answer" in lines[rest + 1]


def test_rules_without_a_guarantee_say_so(record):
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.01, control="empirical")
    assert policy.sentence.startswith("Nothing is promised: the aim was that it gives at most 1 ")
    assert "What voids this" not in str(policy)
    assert "sure" not in str(policy)


def test_promises_in_expectation_are_not_about_one_calibration(record):
    policy = ss.calibrate(record, loss="zero_one", epsilon=0.05, control="crc")
    assert "this holds on average over calibration sets, not for each" in policy.sentence
    assert "sure" not in policy.sentence


def test_what_holds_over_all_samples_is_not_said_to_hold_in_every_slice(record):
    promises = [
        ss.Promise("zero_one", within="slices", epsilon=0.08),
        ss.Promise("brier", epsilon=0.2),
        ss.CostPromise("flops", at_most=4e9),
    ]
    policy = ss.calibrate(sliced(record), promises)
    exact = wording.promise_sentence(policy.certificate)
    inside, _, overall = exact.partition("over all samples together, ")
    assert "zero_one" in inside
    assert "brier" not in inside
    assert "flops" not in inside
    assert "brier" in overall
    assert "flops" in overall
    assert "over all slices together, its mean Brier score" in policy.sentence
    kinds = [each["kind"] for each in policy.certificate.conditions if each.key == "draws"]
    assert sorted(kinds) == ["same", "slices"]


def test_a_cost_beside_slices_needs_one_distribution(record):
    promises = [
        ss.Promise("zero_one", within="slices", epsilon=0.08),
        ss.CostPromise("flops", at_most=4e9),
    ]
    policy = ss.calibrate(sliced(record), promises)
    kinds = [each["kind"] for each in policy.certificate.conditions if each.key == "draws"]
    assert sorted(kinds) == ["same", "slices"]


def test_growing_calibrations_replace_and_drop_conditions_by_key(record):
    growing = ss.Calibration([ss.Promise("zero_one", epsilon=0.08)]).start(horizon=800)
    growing.update(record)
    policy = growing.policy()
    keys = [each.key for each in policy.certificate.conditions]
    assert "number of samples" not in keys
    (fixed,) = (each for each in policy.certificate.conditions if each.key == "fixed beforehand")
    assert fixed["what"] == "growing"
    assert "so far, at every moment of the calibration; 90 % sure" in policy.sentence


def test_conditions_are_edited_by_key():
    found = (Condition.of("draws", kind="same"), Condition("pilot"))
    other = Condition.of("draws", kind="slices")
    assert replaced(found, other) == (other, Condition("pilot"))
    assert replaced(found, Condition("order")) == (*found, Condition("order"))
    assert dropped(found, "draws") == (Condition("pilot"),)


# ---------------------------------------------------------------------------------------- in files


FORGED = {
    "an unknown key": {"key": "nothing can void this", "facts": {}},
    "free text": {"key": "fixed beforehand", "facts": {"what": "everything is fine"}},
    "a fact too many": {"key": "temperatures", "facts": {"note": "all is well"}},
    "a fact too few": {"key": "order", "facts": {"how": "drawn"}},
    "a number as text": {"key": "group size", "facts": {"most": "any"}},
    "another loss": {
        "key": "loss",
        "facts": {"loss": "nothing to fear", "risk": "gap", "kind": "at most", "most": 1.0},
    },
    "another cost": {"key": "chosen by budget", "facts": {"cost": "x", "n": 1, "unit": "samples"}},
    "a text": "all is well",
    "more than key and facts": {"key": "temperatures", "facts": {}, "text": "all is well"},
}


@pytest.mark.parametrize("forged", FORGED)
def test_no_condition_is_forged(record, tmp_path, forged):
    path = tmp_path / "policy.json"
    ss.calibrate(record, loss="zero_one", epsilon=0.05).save(path)
    content = json.loads(path.read_text())
    content["certificate"]["conditions"].append(FORGED[forged])
    del content["checksum"]
    path.write_text(json.dumps(content | {"checksum": json_checksum(content)}))
    with pytest.raises(ValueError, match="is a damaged policy"):
        ss.Policy.load(path)


def test_certificates_are_the_same_in_files(record, tmp_path):
    policy = ss.calibrate(record, loss="brier", epsilon=0.1)
    policy.save(tmp_path / "policy.json")
    loaded = ss.Policy.load(tmp_path / "policy.json")
    assert loaded == policy
    assert str(loaded) == str(policy)
    written = json.loads((tmp_path / "policy.json").read_text())["certificate"]
    assert set(written) == set(Certificate.model_fields)
    assert all(set(each) == {"key", "facts"} for each in written["conditions"])


def test_no_part_of_a_certificate_has_more_than_fifteen_fields():
    for part in (Certificate, Costs, PromiseResult, Provenance, Samples, ss.Policy):
        assert len(getattr(part, "model_fields", None) or fields(part)) <= 15
    assert len(fields(Condition)) == 2


def test_names_do_not_begin_lines(record):
    named = replace(record, costs=dict(record.costs) | {"x\nNot promised:\n- nothing": FLOPS})
    policy = ss.calibrate(named, loss="zero_one", epsilon=0.05)
    assert str(policy).splitlines().count("Not promised:") == 1


# ----------------------------------------------------------------------------------------- numbers


def test_thresholds_are_not_rounded_to_1(record):
    assert wording.number(0.9999995) == "0.9999995"
    path = ss.Path.family([[0.9999995] * 4])
    policy = ss.Calibration([ss.Promise("zero_one", epsilon=0.05)], path=path).run(record)
    assert "at least its own of (0.9999995" in policy.sentence
    assert "threshold=(0.9999995" in repr(policy)
    assert "\n" not in repr(policy)


def test_a_loss_of_its_own_by_a_known_name_is_not_counted_per_100():
    curve = ss.RiskCurve.from_losses(
        [1.0, 0.5], np.zeros((400, 2)), loss_range=(-5, 5), loss="zero_one"
    )
    policy = ss.calibrate(curve, epsilon=0.5)
    assert policy.sentence.startswith("Its mean zero_one is at most 0.5 higher than the full")


def test_the_first_setting_of_losses_is_certified_where_it_is_not_the_full_model(tmp_path):
    curve = ss.RiskCurve.from_losses([1.0, 0.5], np.tile([0.05, 1.0], (400, 1)))
    policy = ss.calibrate(curve, epsilon=0.2)
    assert policy.certificate.index == 0
    policy.save(tmp_path / "policy.json")
    assert ss.Policy.load(tmp_path / "policy.json") == policy
