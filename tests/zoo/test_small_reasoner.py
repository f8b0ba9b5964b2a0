import pytest

pytest.importorskip("transformers")
import torch

from swiftsure.reasoning import collect_traces
from swiftsure_zoo.programs import FOLDER, example, run, small_reasoner, tokenizer, unique_examples


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_programs_are_worked_out():
    worked, answer = run([("=", 3), ("*", 4), ("+", 9), ("-", 5), ("=", 7)])
    assert " ".join(worked) == "L1 = 3 3 L2 * 4 2 L3 + 9 1 L4 - 5 6 L5 = 7 7"
    assert answer == "7"


def test_one_word_is_one_token():
    words = tokenizer()
    for each in unique_examples(0, 20):
        text = " ".join([*each.program, *each.thinking])
        assert words.decode(words(text)["input_ids"]) == text


def test_lengths_vary():
    import random

    source = random.Random(0)
    lines = [len(example(source).program) // 3 for _ in range(500)]
    assert min(lines) == 2
    assert max(lines) > 35


@pytest.mark.skipif(not FOLDER.is_dir(), reason="the weights are not here")
def test_the_reasoner_thinks_and_answers_on_the_way():
    problems = list(unique_examples(3, 8))
    record = collect_traces(
        small_reasoner(), [each.question for each in problems], checkpoints=16, concurrency=1
    )
    right = [
        trace.answer.answer == each.answer
        for trace, each in zip(record.traces, problems, strict=True)
    ]
    assert sum(right) >= 7
    late = [trace.probes[-1].answer for trace in record.traces if trace.probes]
    assert sum(each.probabilities.max() > 0.8 for each in late) >= len(late) - 1
