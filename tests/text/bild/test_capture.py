"""Captured drafting: several texts at a time, with the tokens and calls of one at a time."""

import pytest
import torch

from swiftsure.text import FAMILIES, BigLittle, Rollback, Speculative
from swiftsure.text.bild import capture
from tests.text.bild.drafting import OTHERS, PAIRS
from tests.text.builders import EOS, batch
from tests.text.recording import PretendingRecorder

RULES = {
    "rollback": Rollback(2.0, fallback=0.3, max_draft=4),
    "exact": Rollback(0.0, fallback=0.1),
    "published": Rollback(2.0, fallback=0.3, published=True),
    "large alone": Rollback(None),
    "speculative": Speculative(0.1, max_draft=3),
}
OPTIONS = {"max_new_tokens": 14, "eos_token_id": [EOS, 5, 17, 30]}
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["called", "pretended", pytest.param("cuda", marks=GPU)])
def device(request, monkeypatch):
    """Functions are called, as on a CPU; called as if they were captured; or captured."""
    if request.param == "pretended":
        monkeypatch.setattr(capture, "Recorder", PretendingRecorder)
    return "cuda" if request.param == "cuda" else "cpu"


def check_same(large, small, rule, inputs):
    one_at_a_time = BigLittle(large, small, rule).generate(**inputs, **OPTIONS)
    together = BigLittle(large, small, rule, capture=True).generate(**inputs, **OPTIONS)
    assert torch.equal(together.sequences, one_at_a_time.sequences)
    for found, wanted in zip(together.runs, one_at_a_time.runs, strict=True):
        assert list(map(told, found.calls)) == list(map(told, wanted.calls))
        assert found.flops == pytest.approx(wanted.flops)
    return together


def told(call):
    """What a call says without rounding."""
    return call.model, call.start, call.fed, call.event, call.token


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_every_rule(name, rule, device):
    large, small = (model.to(device) for model in PAIRS[name]())
    inputs = {name: value.to(device) for name, value in batch(5, large).items()}
    together = check_same(large, small, rule, inputs)
    if rule.level is not None:  # rows of their own lengths
        assert len({len(run.calls) for run in together.runs}) > 1


@pytest.mark.parametrize("name", [*PAIRS, *(name for name in OTHERS if "no table" not in name)])
def test_every_pair(name):
    large, small = PAIRS[name]() if name in PAIRS else OTHERS[name]()
    check_same(large.double(), small.double(), RULES["rollback"], batch(3, large))


def test_a_pair_runs_again_with_other_texts(device):
    large, small = (model.to(device) for model in PAIRS["T5"]())
    pair = BigLittle(large, small, RULES["rollback"], capture=True)
    alone = BigLittle(large, small, RULES["rollback"])
    for seed in range(3):
        inputs = {name: value.to(device) for name, value in batch(4, large, seed).items()}
        found = pair.generate(**inputs, **OPTIONS).sequences
        assert torch.equal(found, alone.generate(**inputs, **OPTIONS).sequences)


def test_long_prompts_and_drafts_take_several_passes(device, monkeypatch):
    monkeypatch.setattr(capture, "PROMPT_WIDTHS", (2, 3))
    monkeypatch.setattr(capture, "DRAFTED", 2)
    large, small = (model.to(device) for model in PAIRS["Llama"]())
    inputs = {name: value.to(device) for name, value in batch(4, large).items()}
    found = check_same(large, small, Rollback(3.0, fallback=0.0), inputs)
    longest = max(len(call.fed) for run in found.runs for call in run.calls if call.start > 0)
    assert longest > 3  # drafts of more than one pass


def test_an_unknown_family_cannot_be_captured(monkeypatch):
    monkeypatch.delitem(FAMILIES, "opt", raising=False)  # an example of the documentation adds it
    large, small = OTHERS["OPT, in no table"]()
    with pytest.raises(ValueError, match="'opt', but only these families are known"):
        BigLittle(large, small, 2.0, capture=True)
