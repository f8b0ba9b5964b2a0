"""Continuous batching: the tokens of each sequence alone, whenever it joins and leaves."""

import numpy as np
import pytest
import torch

from swiftsure.text import CalmModel, CalmRule, ContinuousBatch
from swiftsure.text.calm import capture
from tests.text.builders import MODELS, batch, new_tokens, single
from tests.text.calm.slow import OPTIONS, RULES, TOKENS, fast_model
from tests.text.recording import PretendingRecorder

DEVICES = [
    "called",
    "pretended",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
ROOM = {"rows": 3, "positions": 40, "source": 16}


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    """Functions are called, as on a CPU; called as if they were captured; or captured."""
    if request.param == "pretended":
        monkeypatch.setattr(capture, "Recorder", PretendingRecorder)
    return "cuda" if request.param == "cuda" else "cpu"


def alone(fast, inputs, row, **options):
    one = single(inputs, row)
    output = fast.generate(**one, **options)
    return new_tokens(fast.model, output.sequences, one)[0].tolist(), output


def on(device, fast, n=7):
    fast.model.to(device)
    if fast.classifier is not None:
        fast.classifier.to(device)
    return {name: value.to(device) for name, value in batch(n, fast.model).items()}


def check_same(fast, generation, inputs, row, **options):
    wanted, output = alone(fast, inputs, row, **options)
    assert generation.ended
    assert generation.tokens == wanted
    assert np.array_equal(generation.result.exit_layers, output.exit_layers)
    np.testing.assert_allclose(generation.result.confidences, output.depths.confidences, atol=1e-4)
    np.testing.assert_allclose(generation.result.flops, output.flops)
    return output


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_every_rule(name, rule, device):
    """Sequences join at different times, and take the rows of those that ended."""
    fast = fast_model(MODELS[name](), rule)
    inputs = on(device, fast)
    together = ContinuousBatch(fast, **ROOM)
    running = []
    for row in range(7):
        running.append(together.submit(single(inputs, row)["input_ids"], **OPTIONS))
        for _ in range(row):
            together.step()
    assert len({len(list(each)) for each in running}) > 1
    depths = set()
    for row, each in enumerate(running):
        depths |= set(check_same(fast, each, inputs, row, **OPTIONS).exit_layers.flat)
    assert len(depths - {0}) > 1
    assert len(together) == 0


@pytest.mark.parametrize("name", ["T5", "Llama"])
def test_options_of_each_sequence(name, device):
    fast = fast_model(MODELS[name](), RULES["softmax"])
    inputs = on(device, fast)
    given = [
        OPTIONS,
        OPTIONS | {"do_sample": True, "top_k": 5, "seed": 3},
        OPTIONS | {"min_new_tokens": 6},
        OPTIONS | {"min_length": 5, "repetition_penalty": 1.5},
        OPTIONS | {"max_new_tokens": 3},
        OPTIONS | {"thresholds": [None]},
        OPTIONS | {"do_sample": True, "temperature": 2.0, "seed": 4, "sequence_ids": [7]},
    ]
    together = ContinuousBatch(fast, **ROOM)
    running = [
        together.submit(single(inputs, row)["input_ids"], **options)
        for row, options in enumerate(given)
    ]
    while together.step():
        pass
    for row, (each, options) in enumerate(zip(running, given, strict=True)):
        check_same(fast, each, inputs, row, **options)


@pytest.mark.parametrize("score", ["softmax", "saturation"])
def test_a_cancelled_sequence_frees_its_row(score, device):
    fast = fast_model(MODELS["T5"](), RULES[score])
    inputs = on(device, fast)
    options = {"max_new_tokens": TOKENS, "eos_token_id": None}
    together = ContinuousBatch(fast, rows=1, positions=40, source=16)
    first, second, third = (
        together.submit(single(inputs, row)["input_ids"], **options) for row in range(3)
    )
    next(iter(first))
    first.cancel()
    second.cancel()
    assert first.ended
    assert second.ended
    assert first.result.exit_layers.shape[1] == len(first.tokens)
    assert (second.tokens, second.result) == ([], None)
    list(third)
    check_same(fast, third, inputs, 2, **options)
    assert first.tokens == alone(fast, inputs, 0, **options)[0][: len(first.tokens)]


def test_what_does_not_fit_is_refused():
    fast = CalmModel(MODELS["Llama"](), CalmRule(0.5))
    together = ContinuousBatch(fast, rows=1, positions=16)
    prompt = torch.full((1, 9), 3)
    with pytest.raises(ValueError, match="too long for this batch: give it more `positions`"):
        together.submit(prompt, max_new_tokens=50)
    with pytest.raises(ValueError, match="must hold one sequence, but got 2"):
        together.submit(prompt.expand(2, -1), max_new_tokens=2)
    list(together.submit(prompt, max_new_tokens=2))
    with pytest.raises(ValueError, match="`eos_token_id` and `pad_token_id` must be the same"):
        together.submit(prompt, max_new_tokens=2, eos_token_id=[1, 2, 3])
    assert list(together.submit(prompt, max_new_tokens=TOKENS, eos_token_id=1))


def test_policies_of_running_sequences_may_differ():
    """The full model, and another threshold, beside sequences under the first one."""
    fast = fast_model(MODELS["T5"](), RULES["softmax"])
    inputs = batch(3, fast.model)
    sources = [single(inputs, row)["input_ids"] for row in range(3)]
    together = ContinuousBatch(fast, **ROOM)
    early = CalmModel(fast.model, -1.0)
    running = [
        together.submit(sources[0], **OPTIONS),
        together.submit(sources[1], full=True, **OPTIONS),
        together.submit(sources[2], under=early, **OPTIONS),
    ]
    while together.step():
        pass
    for row, system in enumerate([fast, CalmModel(fast.model, None), early]):
        check_same(system, running[row], inputs, row, **OPTIONS)
    other = CalmModel(fast.model, 0.5, score="saturation")
    with pytest.raises(ValueError, match="must differ from the batch's system by its dial only"):
        together.submit(sources[0], under=other)
