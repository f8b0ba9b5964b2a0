"""Agreement with the published big-little decoder: every call, distance and token."""

from itertools import pairwise

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from swiftsure.text import BigLittle, Rollback
from tests.torch.reference import Reference

REFERENCE = Reference("bild")
pytestmark = REFERENCE.needed

EVENTS = {
    "accept": "accept",
    "fallback": "fallback",
    "rollback": "rollback",
    "above_threshold_but_same_token": "same token",
}


@pytest.fixture(scope="module")
def reference():
    hyperparameters, weights, tensors = REFERENCE.parity()
    pair = []
    for name in ("large", "small"):
        config = T5Config(**hyperparameters[name])
        config.tie_word_embeddings = False  # which T5Config itself does not believe
        model = T5ForConditionalGeneration(config).eval()
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in weights.items()
            if key.startswith(f"{name}.")
        }
        model.load_state_dict(own)
        pair.append(model)
    return *pair, tensors


def scenario(number):
    return REFERENCE.facts("parity_small.json")["scenarios"][number]


def run(reference, expected, **options):
    large, small, tensors = reference
    rule = Rollback(
        expected["rollback_threshold"],
        fallback=expected["fallback_threshold"],
        max_draft=expected["num_small_iters"],
        **options,
    )
    pair = BigLittle(large, small, rule)
    return pair.generate(tensors["in.input_ids"], max_new_tokens=expected["max_length"] - 1)


@pytest.mark.parametrize("number", range(3))
def test_every_call_as_published(reference, number):
    expected = scenario(number)
    output = run(reference, expected, published=True)
    assert output.sequences[0].tolist() == expected["ids"]
    assert torch.equal(output.sequences, reference[2][f"out.bild{number}.ids"])
    calls = output.runs[0].calls
    for call, wanted in zip(calls, expected["calls"], strict=True):
        assert call.model == wanted["model"]
        assert call.start == wanted["past_len"]
        assert list(call.fed) == wanted["input_ids"]
        assert call.event == EVENTS[wanted["event"]]
        assert call.distances == pytest.approx(wanted.get("token_losses", []), abs=2e-5)
        if call.event == "rollback":
            assert call.token == wanted["large_argmax"][wanted["first_bad"]]
        else:
            assert call.token == wanted["argmax"]
        if call.model == "small":
            assert call.confidence == pytest.approx(wanted["top_prob"], abs=2e-6)


@pytest.mark.parametrize("number", range(3))
def test_corrected_runs_decide_by_the_same_numbers(reference, number):
    """Confidences and distances that both log, in the same place after the same tokens, agree."""
    expected = scenario(number)
    calls = run(reference, expected).runs[0].calls
    threshold = expected["rollback_threshold"]
    logged = {
        (call["past_len"], *call["input_ids"]): call
        for call in expected["calls"]
        if call["model"] == "large"
    }
    common = 0
    for call in calls:
        if call.model == "small":
            sure = call.confidence >= expected["fallback_threshold"]
            assert call.event == ("accept" if sure else "fallback")
            continue
        assert (call.event == "rollback") == any(each > threshold for each in call.distances)
        wanted = logged.get((call.start, *call.fed))
        if wanted is not None:
            assert call.event == EVENTS[wanted["event"]]
            common += 1
    assert common >= 3


def test_the_safe_end_is_the_large_model(reference):
    large, small, tensors = reference
    for rule in (Rollback(0.0, fallback=0.0, max_draft=3), Rollback(0.6), Rollback(None)):
        output = BigLittle(large, small, rule).generate(tensors["in.input_ids"], max_new_tokens=15)
        assert torch.equal(output.sequences, tensors["out.large_greedy_ids"])


def test_corrected_runs_never_read_again(reference):
    """After a rollback the published large model reads what it has read; the corrected does not."""
    for number in range(3):
        for published in (True, False):
            calls = run(reference, scenario(number), published=published).runs[0].calls
            large = [call for call in calls if call.model == "large"]
            new = [later.fed[0] == call.token for call, later in pairwise(large)]
            assert all(new) != published
