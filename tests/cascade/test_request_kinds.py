"""What requests are like, in the record and the policy of a cascade."""

import swiftsure as ss
from swiftsure.cascade.request_kinds import MOST_PROMPTS, features_of_inputs, unlike


def chat(*contents, system=None):
    roles = ["user", "assistant"] * len(contents)
    said = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return said if system is None else [{"role": "system", "content": system}, *said]


def test_lengths_between_calibrated_ones_are_like_them():
    known = features_of_inputs([chat("a"), chat(*"abcde")])
    assert unlike(chat(*"abc"), known) is None
    assert unlike(chat(*"abcdefg"), known) == "the calibration had no conversation of this length"
    assert unlike(chat(*"ab"), known) == "the calibration had no last message from assistant"


def test_system_prompts_are_known_or_vary():
    few = features_of_inputs([chat("a", system="one"), chat("a", system="two")])
    assert unlike(chat("b", system="two"), few) is None
    for other in (chat("b", system="three"), chat("b")):
        assert unlike(other, few) == "the calibration had no such system prompt"
    many = features_of_inputs([chat("a", system=f"user {k}") for k in range(MOST_PROMPTS + 1)])
    assert unlike(chat("b", system="three"), many) is None


def test_system_prompts_in_the_middle_are_another_form():
    known = features_of_inputs([chat("a", system="one")])
    late = [*chat("a"), {"role": "system", "content": "one"}]
    assert unlike(late, known) == "the calibration had no last message from system"


def test_odd_messages_are_unlike_and_no_error():
    known = features_of_inputs(["a"])
    odd = (None, [], {}, 3, [3], [{"role": 1}], [{"role": "user", "content": {}}])
    odd = (*odd, [{"role": "user", "content": [3, {"type": []}]}])
    assert all(unlike(each, known) for each in odd)


def test_inputs_that_are_no_requests_have_no_features():
    assert features_of_inputs([1, 2]) is None
    assert features_of_inputs(["a", 2]) is None


def test_records_keep_and_join_features(tmp_path):
    def sure(_):
        return ss.cascade.Answer("yes", confidence=0.9, cost=1.0)

    cascade = ss.Cascade({"small": sure, "large": sure})
    one = cascade.collect([f"a {k}" for k in range(30)], ids=range(30), progress=False)
    three = [chat(str(k), "b", "c") for k in range(30)]
    other = cascade.collect(three, ids=range(30, 60), progress=False)
    both = ss.ExitRecord.concatenate([one, other])
    assert unlike(chat("x", "y", "z"), one.settings["requests"])
    assert unlike(chat("x", "y", "z"), both.settings["requests"]) is None
    both.save(tmp_path / "both.parquet")
    again = ss.ExitRecord.load(tmp_path / "both.parquet")
    assert dict(again.settings) == dict(both.settings)
    policy = cascade.calibrate(again.take(range(0, 60, 2)), epsilon=0.3, risk="consistency")
    assert policy.settings["requests"] == both.settings["requests"]
    unknown = ss.ExitRecord.concatenate([one, ss.ExitRecord(**vars(other) | {"settings": {}})])
    assert "requests" not in unknown.settings
