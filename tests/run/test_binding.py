"""Policies are refused by systems that they were not made for, always in the same words."""

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.run import PolicyBinding, check_same


def policy_of(fingerprint=None, dial="threshold", **settings):
    record = ss.ThresholdRecord(
        [0.0, 0.5] if dial != "threshold" else [None, 0.5],
        inconsistencies={"mse": np.zeros((60, 2))},
        fingerprint=fingerprint,
        dial=dial,
        settings=settings,
    )
    return ss.calibrate(record, risk="consistency", loss="mse", epsilon=0.1)


def bound(policy):
    return PolicyBinding(policy, "tests", "a.test")


def exits_policy():
    record = ss.ExitRecord(np.full((60, 3), 0.9), losses={"zero_one": np.zeros((60, 4))})
    return ss.calibrate(record, loss="zero_one", epsilon=0.1)


def test_the_dial_of_a_whole_run():
    assert bound(policy_of()).dial("threshold") == 0.5
    assert bound(policy_of(dial="rollback")).dial("rollback") == 0.5
    full = policy_of().model_copy(update={"threshold": None})
    assert bound(full).dial("threshold") is None


def test_the_thresholds_of_exits():
    policy = exits_policy()
    assert bound(policy).exit_thresholds(4) == [np.float32(policy.threshold)] * 3
    with pytest.raises(ValueError, match="made for 4 exits, but the model has 5"):
        bound(policy).exit_thresholds(5)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: bound(policy_of(dial="rollback")).dial("threshold"),
        lambda: bound(exits_policy()).dial("threshold"),
        lambda: bound(policy_of()).exit_thresholds(4),
    ],
)
def test_another_kind_of_system(ask):
    with pytest.raises(ValueError, match=r"not made for tests: make its record with a\.test"):
        ask()


def test_what_is_not_a_policy():
    with pytest.raises(TypeError, match=r"must be a Policy, but got str; Policy\.load"):
        bound("policy.json")


def test_another_model():
    binding = bound(policy_of("sha256:one"))
    binding.check_model(lambda: "sha256:one")
    with pytest.raises(ValueError, match="made for another model"):
        binding.check_model(lambda: "sha256:two")
    bound(policy_of()).check_model(lambda: pytest.fail("a policy from arrays has no fingerprint"))


def test_fixed_settings():
    binding = bound(policy_of("sha256:one", score="model", n_exits=6, dtype="bfloat16"))
    binding.check_exits(6)
    binding.check_score("model")
    assert binding.dtype(None) == binding.dtype("bfloat16") == "bfloat16"
    with pytest.raises(ValueError, match="made for 6 exits, but the model has 5"):
        binding.check_exits(5)
    with pytest.raises(ValueError, match="made for score='model', but got 'top1'"):
        binding.check_score("top1")
    with pytest.raises(ValueError, match="made for dtype='bfloat16', but got 'float32'"):
        binding.dtype("float32")
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        binding.dtype("int8")
    with pytest.raises(ValueError, match="made for steps=5, but got None"):
        check_same({"name": "ddim", "steps": 5}, {"name": "ddim"})


def test_a_policy_from_arrays_is_bound_to_nothing():
    binding = bound(policy_of())
    binding.check_exits(9)
    binding.check_score("top1")
    assert binding.dtype("float16") == "float16"
