"""Policies: their file, their sentence, their thresholds."""

import json

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.certify.policy import percent
from swiftsure.exits import exit_indices
from tests.builders import random_record, request_of, table_curve

RECORD = random_record(n=600)


def exit_policy(**changes):
    return request_of(**{"loss": "brier", "epsilon": 0.1, **changes}).run(RECORD)


def run_policy(**changes):
    losses = np.zeros((300, 3))
    losses[:100, 2] = 0.9
    arguments = {
        "losses": {"bleu": losses},
        "costs": {"layers": [8, 4, 2]},
        "dial": "rollback",
        "settings": {"fallback": 0.4, "draft": "small"},
    }
    return ss.calibrate(ss.ThresholdRecord([0, 2, 4], **arguments), **{"epsilon": 0.1, **changes})


POLICIES = {
    "exits": exit_policy,
    "strict": lambda: exit_policy(rule=ss.ExitRule(strict=True, min_exit=1), path="breakpoints"),
    "crc": lambda: exit_policy(control="crc"),
    "crc by tests": lambda: exit_policy(control=ss.Control("crc", method="ucb", delta_prime=0.001)),
    "empirical": lambda: exit_policy(control="empirical"),
    "bonferroni": lambda: exit_policy(
        control=ss.Control("ltt", "hoeffding", correction="bonferroni"), epsilon=0.6
    ),
    "several risks": lambda: ss.calibrate(
        RECORD,
        [
            ss.Promise("zero_one", epsilon=0.1),
            ss.Promise("brier", risk="consistency", epsilon=0.2),
        ],
    ),
    "full model": lambda: exit_policy(epsilon=1e-4),
    "a run": run_policy,
    "a run, full model": lambda: run_policy(epsilon=1e-4),
    "a curve": lambda: ss.calibrate(table_curve([0, 1]), epsilon=0.1),
    "a pool": lambda: ss.calibrate(RECORD.drawn_from(1000), loss="brier", epsilon=0.1),
}
FULL = [name for name in POLICIES if "full model" in name]


@pytest.fixture(params=list(POLICIES))
def policy(request):
    return POLICIES[request.param]()


def test_json_brings_everything_back(policy, tmp_path):
    policy.save(tmp_path / "policy.json")
    loaded = ss.Policy.load(str(tmp_path / "policy.json"))
    assert loaded == policy
    assert str(loaded) == str(policy)
    assert loaded.threshold == policy.threshold  # to the last bit
    assert [p.name for p in tmp_path.iterdir()] == ["policy.json"]


def test_json_brings_a_family_back(tmp_path):
    policy = exit_policy(path=[[0.9, 0.9, 0.9], [0.9, 0.8, 0.7]])
    policy.save(tmp_path / "policy.json")
    assert ss.Policy.load(tmp_path / "policy.json") == policy


def test_the_file_is_plain_json_with_null_for_never(tmp_path):
    POLICIES["full model"]().save(tmp_path / "policy.json")
    content = json.loads((tmp_path / "policy.json").read_text())
    assert (content["format"], content["version"]) == ("swiftsure-policy", 1)
    assert content["threshold"] is None
    assert content["settings"] == {"threshold": None}


def test_policies_cannot_be_changed(policy):
    with pytest.raises(ValueError, match="frozen"):
        policy.threshold = 0.1
    with pytest.raises(ValueError, match="frozen"):
        policy.certificate.n = 1


# Files that are no policies


def expect(path, message):
    with pytest.raises(ValueError, match=message) as caught:
        ss.Policy.load(path)
    assert str(path) in str(caught.value)


@pytest.fixture
def saved(tmp_path):
    """A saved policy and its content, to be spoiled."""
    path = tmp_path / "policy.json"
    exit_policy().save(path)
    return path, json.loads(path.read_text())


def test_a_newer_version_is_refused(saved):
    path, content = saved
    path.write_text(json.dumps({**content, "version": 2, "new": "field"}))
    expect(path, r"newer Swiftsure \(policy version 2; this one reads up to 1\): upgrade swiftsure")


@pytest.mark.parametrize("foreign", [[], {}, 3, None, {"format": "other"}, {"threshold": 0.5}])
def test_foreign_json_is_refused(saved, foreign):
    saved[0].write_text(json.dumps(foreign))
    expect(saved[0], "is JSON, but not a Swiftsure policy")


@pytest.mark.parametrize(
    ("place", "value", "where"),
    [
        ("threshold", "high", "threshold"),
        ("n_exits", 2.5, "n_exits"),
        ("strict", "perhaps", "strict"),
        ("version", "one", "version"),
        ("extra", 1, "extra"),
        ("certificate.n", "many", r"certificate\.n"),
        ("certificate.guarantee", "certain", r"certificate\.guarantee"),
        ("certificate.promises", [], r"certificate\.promises"),
        ("certificate.promises.0.epsilon", None, r"certificate\.promises\.0\.epsilon"),
    ],
)
def test_a_damaged_field_is_named(saved, place, value, where):
    path, content = saved
    *parents, last = [int(p) if p.isdigit() else p for p in place.split(".")]
    inner = content
    for parent in parents:
        inner = inner[parent]
    inner[last] = value
    path.write_text(json.dumps(content))
    expect(path, f"is a damaged policy: {where}")


@pytest.mark.parametrize("field", ["threshold", "score", "settings", "certificate"])
def test_a_missing_field_is_named(saved, field):
    path, content = saved
    del content[field]
    path.write_text(json.dumps(content))
    expect(path, f"is a damaged policy: {field}: Field required")


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(saved, share):
    path = saved[0]
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    expect(path, "is not a JSON file")


def test_a_file_that_is_no_text_is_refused(saved):
    saved[0].write_bytes(b"\xff\xfe\x00policy")
    expect(saved[0], "is not a JSON file")


@pytest.mark.parametrize("name", ["missing.json", ""])
def test_a_path_that_is_no_file_is_refused(tmp_path, name):
    expect(tmp_path / name, "`path` must be an existing file")


def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(saved, monkeypatch):
    path, _ = saved
    before = path.read_text()

    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(type(path), "write_text", fail)
    with pytest.raises(OSError, match="disk full"):
        exit_policy(epsilon=0.3).save(path)
    monkeypatch.undo()
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


# The sentence


def test_a_policy_is_one_sentence(policy):
    text = str(policy)
    assert "\n" not in text
    assert text[0].isupper()
    assert text.endswith(".")
    assert ". " not in text
    for promise in policy.certificate.promises:
        assert promise.loss in text
        assert f"{promise.epsilon:g}" in text


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in FULL])
def test_the_sentence_says_what_is_promised(name):
    policy = POLICIES[name]()
    text, certificate = str(policy), policy.certificate
    if certificate.guarantee == "none":
        assert "no guarantee is made" in text
        assert "provided" not in text
        return
    assert f"the {certificate.n:,} calibration samples" in text
    for promise in certificate.promises:
        kind = "gap to" if "gap" in promise.risk else "inconsistency with"
        assert (
            f"the expected {promise.loss} {kind} the full model is at most {promise.epsilon:g}"
            in text
        )
    for assumption in certificate.assumptions:
        assert assumption in text
    said = {
        "probability": "with probability at least 90 %",
        "expectation": "on average over the draw",
    }
    assert [key for key, words in said.items() if words in text] == [certificate.guarantee]


def test_the_sentence_says_what_the_policy_does():
    policy = exit_policy()
    assert str(policy).startswith(
        f"Exits at the first of 4 exits whose top1 confidence is at least {policy.threshold:.6g}"
    )
    assert "confidence is above" in str(POLICIES["strict"]())
    assert str(run_policy()).startswith(
        "Runs at rollback = 2, fallback = 0.4, draft = small, saving "
    )
    saved = 1 - policy.certificate.costs["exit"][1] / 4
    assert f", saving {percent(saved)} of exits on the calibration samples: " in str(policy)
    assert ", saving 50 % of layers on the calibration samples: " in str(run_policy())
    assert "not bound to a particular model" in str(policy)
    assert "not bound to a particular model" in str(POLICIES["empirical"]())
    assert "from a pool of 1,000, on that pool" in str(POLICIES["a pool"]())


@pytest.mark.parametrize("name", FULL)
def test_the_full_model_always_runs_where_nothing_is_certified(name):
    policy = POLICIES[name]()
    assert policy.threshold is None
    assert policy.runs_full_model
    assert policy.certificate.index is None
    assert str(policy).lower().startswith("always runs the full model")
    assert "with probability at least 90 %" in str(policy)


def test_the_sentence_says_how_many_samples_are_needed():
    few = RECORD.take(np.arange(100))
    policy = ss.calibrate(few, risk="consistency", loss="zero_one", epsilon=0.01)
    need = "(even if every loss were 0, the tests here would need at least 230)"
    assert f"on 100 calibration samples {need}" in str(policy)
    several = ss.calibrate(
        few,
        [ss.Promise(loss, risk="consistency", epsilon=0.01) for loss in ("zero_one", "brier")],
    )
    assert "at least 460)" in str(several)  # the Brier loss reaches up to 2
    gap = ss.calibrate(few, loss="zero_one", epsilon=0.001)
    assert "even if every loss" not in str(gap)  # losses that can be negative may need fewer
    enough = ss.calibrate(table_curve([0, 90]), epsilon=0.1)
    assert "even if every loss" not in str(enough)


def test_the_samples_needed_from_a_pool_are_not_those_of_independent_draws():
    losses = np.zeros((140, 2))
    none = ss.ThresholdRecord([None, 0.0], inconsistencies={"zero_one": losses})
    losses = losses.copy()
    losses[:2, 1] = 1.0
    two = ss.ThresholdRecord([None, 0.0], inconsistencies={"zero_one": losses})
    asked = {"risk": "consistency", "epsilon": 0.01, "bound": "binomial"}
    assert ss.calibrate(none.drawn_from(150), **asked).threshold == 0
    policy = ss.calibrate(two.drawn_from(150), **asked)
    assert policy.runs_full_model
    assert "even if every loss" not in str(policy)


@pytest.mark.parametrize("delta", [1e-4, 4e-4])
def test_the_sentence_never_promises_certainty(delta):
    assert "100 %" not in str(ss.calibrate(table_curve([0, 0]), epsilon=0.5, delta=delta))


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.9, "90 %"), (0.333, "33.3 %"), (0, "0 %"), (1, "100 %"), (0.125, "12.5 %")],
)
def test_percent(share, text):
    assert percent(share) == text


# Thresholds and exits


@pytest.mark.parametrize("name", ["exits", "strict", "crc", "full model", "several risks"])
def test_exits_are_those_of_the_exit_rule(name):
    policy = POLICIES[name]()
    confidences = RECORD.confidences["top1"]
    expected = exit_indices(
        confidences, policy.threshold, strict=policy.strict, min_exit=policy.min_exit
    )
    assert np.array_equal(policy.exits(confidences), expected)
    shares = np.bincount(expected, minlength=4) / 600
    np.testing.assert_allclose(policy.certificate.exit_shares, shares)
    if name == "strict":  # its threshold is some sample's confidence, which does not exceed itself
        assert (confidences[:, 1:] == np.float32(policy.threshold)).any()
    assert (expected == 3).all() == (name == "full model")


def test_thresholds_are_one_an_exit():
    policy = exit_policy()
    assert policy.thresholds.dtype == np.float32
    assert policy.thresholds.tolist() == [policy.threshold] * 3
    assert POLICIES["full model"]().thresholds.tolist() == [np.inf] * 3
    assert run_policy().thresholds is None
    family = exit_policy(path=[[0.99, 0.9, 0.9], [0.95, 0.8, 0.7]], epsilon=0.5)
    assert family.thresholds.tolist() == np.float32([0.95, 0.8, 0.7]).tolist()
    assert family.threshold == tuple(np.float32([0.95, 0.8, 0.7]).tolist())
    assert "(0.95, 0.8, 0.7)" in str(family)


def test_a_family_may_close_some_exits(tmp_path):
    policy = exit_policy(path=[[0.99, None, 0.9]], epsilon=0.5)
    assert policy.threshold[1] is None
    assert policy.thresholds.tolist() == np.float32([0.99, np.inf, 0.9]).tolist()
    assert (policy.exits(RECORD.confidences["top1"]) != 1).all()


def test_changing_the_thresholds_does_not_change_the_policy():
    policy = exit_policy()
    policy.thresholds[:] = 0
    assert policy.thresholds[0] == np.float32(policy.threshold)


def test_a_policy_of_runs_has_no_exits():
    with pytest.raises(ValueError, match="not of exits"):
        run_policy().exits([[0.5]])


def test_confidences_of_another_network_are_refused():
    with pytest.raises(
        ValueError, match=r"\(n, 3\), one column per exit except the last, .* \(1, 2"
    ):
        exit_policy().exits([[0.5, 0.5]])


@pytest.mark.parametrize("value", [95.0, -0.1, float("nan")])
def test_what_is_no_confidence_does_not_leave(value):
    with pytest.raises(ValueError, match="`confidences` must"):
        exit_policy().exits([[0.5, value, 0.5]])


def test_settings_with_details_are_told_in_short():
    record = ss.ThresholdRecord(
        [None, 0.5],
        losses={"mine": np.zeros((400, 2))},
        loss_ranges={"mine": (0, 1)},
        costs={"layers": [4, 2]},
        settings={
            "sampler": {"name": "ddim", "n_steps": 50},
            "generation": {"max_new_tokens": 8, "top": 0.5},
        },
    )
    text = str(ss.calibrate(record, loss="mine", epsilon=0.1))
    assert "sampler = ddim, generation = (max_new_tokens = 8, top = 0.5), saving" in text


@pytest.mark.parametrize("path", [[0.9, 0.5], [[1.0, 0.9, 0.9], [0.5, 0.4, 0.4]]])
def test_the_sentence_says_which_exits_may_be_taken(path):
    given = {"loss": "zero_one", "epsilon": 0.9, "path": path}
    later = request_of(**given, rule=ss.ExitRule(min_exit=1))
    assert ", from exit 2 on, whose top1" in str(later.run(random_record(400)))
    assert "from exit" not in str(ss.calibrate(random_record(400), **given))


def test_the_sentence_says_what_costs_more():
    losses = np.zeros((200, 2))
    for costs, words in [
        (
            {"layers": [8, 4], "flops": [10, 12]},
            "saving 50 % of layers but needing 20 % more flops",
        ),
        ({"flops": [10, 12]}, "full model: the setting that was certified costs more than"),
    ]:
        record = ss.ThresholdRecord([1.0, 0.5], {"x": losses}, costs=costs)
        assert words in str(ss.calibrate(record, loss="x", epsilon=0.1))


def test_a_level_is_never_rounded_down():
    losses = np.zeros((2000, 2))
    curve = ss.RiskCurve.from_losses([None, 0.5], losses, loss_range=(0, 1), relative=True)
    for epsilon in (0.0111105490019, 0.05, 0.033333333, 0.0999999999):
        text = str(ss.calibrate(curve, epsilon=epsilon))
        assert float(text.partition("is at most ")[2].partition(",")[0]) >= epsilon
