import numpy as np
import pytest

pytest.importorskip("transformers")
import torch

import swiftsure as ss
from swiftsure.reasoning import LocalReasoner, Thinker, ThinkingFamily, collect_traces
from tests.reasoning.builders import tiny_reasoner

FAMILY = ThinkingFamily("{content}", " <think>", " </think> ")
OPTIONS = {"family": FAMILY, "answer_prompt": "", "answer_tokens": 1, "max_tokens": 16}


@pytest.fixture(scope="module")
def parts():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_reasoner()
    torch.set_num_threads(threads)


def reasoner(parts, **options):
    return LocalReasoner(*parts, options="0123456789", **(OPTIONS | options))


def test_a_probe_leaves_the_thinking_as_it_was(parts):
    plain = Thinker(reasoner(parts)).answer("1 2 3")
    record = collect_traces(reasoner(parts), ["1 2 3"], checkpoints=3)
    (trace,) = record.traces
    assert trace.tokens == plain.tokens
    assert len(trace.probes) == trace.tokens // 3
    asked = Thinker(reasoner(parts)).answer("1 2 3")
    assert asked.thinking == plain.thinking


def test_a_probe_is_what_reading_everything_again_would_say(parts):
    model, tokenizer = parts
    record = collect_traces(reasoner(parts), ["4 5 6 7"], checkpoints=4)
    words = Thinker(reasoner(parts)).answer("4 5 6 7").thinking.split()
    for probe in record.traces[0].probes:
        text = " ".join(["4 5 6 7 <think>", *words[: probe.tokens], "</think>"])
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, -1]
        digits = [tokenizer.convert_tokens_to_ids(str(d)) for d in range(10)]
        listed = logits.topk(10).indices.tolist()
        shares = logits.softmax(-1)[digits].numpy() * np.isin(digits, listed)
        assert probe.answer.probabilities == pytest.approx(shares / shares.sum(), abs=1e-5)
        assert probe.spent in (1, 2)  # the mark, and the digit if it gives one


def test_probes_prefill_nothing_again(parts):
    model, _ = parts
    lengths = []
    hook = model.register_forward_pre_hook(
        lambda _m, _a, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        record = collect_traces(reasoner(parts), ["1 2 3 4 5"], checkpoints=4)
    finally:
        hook.remove()
    (trace,) = record.traces
    assert lengths[0] == 6  # the question and <think>
    assert max(lengths[1:]) == 2  # the last token and the mark
    assert lengths.count(2) == len(trace.probes) == 2


def test_it_stops_as_the_record_says(parts):
    questions = [f"{k % 10} {k // 10 % 10} {k // 100}" for k in range(30)]
    record = collect_traces(reasoner(parts), questions, checkpoints=[4, 8, 12])
    exits = record.exits([4, 8, 12])
    policy = ss.calibrate(
        exits, risk="consistency", loss="zero_one", epsilon=0.9, score="agreement"
    )
    assert policy.threshold is not None
    thinker = Thinker(reasoner(parts), policy)
    expected = policy.rule.exits(exits.confidences["agreement"])
    thoughts = thinker.answers(questions[:5])
    assert any(each.stopped for each in thoughts)
    for k, thought in enumerate(thoughts):
        if thought.stopped:
            assert thought.exit == expected[k]
            assert thought.answer == record.traces[k].probes[thought.exit].answer.answer
            assert thought.total == pytest.approx(exits.costs["tokens"][k, thought.exit])


def test_samples_differ_by_seed_and_repeat(parts):
    client = reasoner(parts, temperature=2.0)
    record = collect_traces(client, ["1 2 3"], checkpoints=5, seeds=4)
    assert len({str(trace.to_json()["probes"]) + str(trace.tokens) for trace in record.traces}) > 1
    again = collect_traces(client, ["1 2 3"], checkpoints=5, seeds=4)
    assert [t.to_json() for t in again.traces] == [t.to_json() for t in record.traces]
    assert record.exits(5, losses="zero_one").n_units == 1


def test_a_model_in_training_is_refused(parts):
    model, tokenizer = parts
    model.train()
    try:
        with pytest.raises(ValueError, match="eval"):
            LocalReasoner(model, tokenizer, **OPTIONS)
    finally:
        model.eval()
