import json

import pytest

from swiftsure.cascade import Backoff, CollectionError, Endpoint
from swiftsure.reasoning import Reasoner, TraceRecord, collect_traces, collect_votes
from swiftsure.reasoning.families import FAMILIES, family_of
from swiftsure.reasoning.reading import read_answer
from tests.reasoning.servers import ASK, Server, need_of, right

QUICK = Backoff(first=0.001, longest=0.002, retries=3)


@pytest.fixture
def server():
    found = Server()
    yield found
    found.stop()


def reasoner(server, **options):
    return Reasoner(Endpoint(server.url, "qwen3-tiny", key=None), max_tokens=1000, **options)


def collect(server, n=6, client=None, **options):
    numbers = range(n)
    options = {"checkpoints": 40, "backoff": QUICK} | options
    return collect_traces(
        client or reasoner(server),
        [f"Is q{k} odd?" for k in numbers],
        [right(k) for k in numbers],
        **options,
    )


def probes_of(server):
    return [each for each in server.requests if not each.get("stream")]


def test_thinking_is_streamed_and_asked_at_checkpoints(server):
    record = collect(server)
    assert isinstance(record, TraceRecord)
    for number, trace in enumerate(record.traces):
        need = need_of(number)
        assert trace.tokens == 2 * need
        assert [probe.tokens for probe in trace.probes] == list(range(40, 2 * need + 1, 40))
        assert trace.answer.answer == trace.label == right(number)
        for probe in trace.probes:
            known = probe.tokens >= need
            assert probe.answer.answer == (right(number) if known else "unknown")
            assert probe.answer.logprobs[0] == pytest.approx(-0.02 if known else -0.916, abs=0.001)
            assert probe.spent > 2
    exits = record.exits(40)
    assert "carried" not in exits.settings
    assert set(exits.confidences) >= {"confidence", "agreement", "progress", "first_margin"}
    assert exits.fingerprint == reasoner(server).fingerprint


def test_a_finished_collection_asks_nothing_again(server, tmp_path):
    first = collect(server, folder=tmp_path)
    asked = len(server.requests)
    again = collect(server, folder=tmp_path)
    assert len(server.requests) == asked
    assert [t.to_json() for t in again.traces] == [t.to_json() for t in first.traces]


def test_a_broken_stream_goes_on_where_it_broke(server):
    server.faults = ["cut", None, None, "cut"]
    record = collect(server, n=1)
    assert record.traces[0].tokens == 2 * need_of(0)
    prompts = [each["prompt"] for each in server.requests if each.get("stream")]
    assert len(prompts) >= 2
    assert prompts[1].endswith("w0 w1")
    assert server.written.count(" w0") == 1
    assert [p.tokens for p in record.traces[0].probes] == [40]


def test_after_a_failure_the_same_call_resumes_in_the_middle_of_a_thought(server, tmp_path):
    server.faults = [None, None, 500]  # the second probe of the first question
    with pytest.raises(CollectionError, match=r"1 of 1 traces unfinished.*the same call resumes"):
        collect_traces(
            reasoner(server),
            ["q16?"],
            checkpoints=40,
            folder=tmp_path,
            backoff=Backoff(retries=0),
        )
    asked = {each["prompt"] for each in probes_of(server)[:1]}
    before = len(server.requests)
    record = collect_traces(reasoner(server), ["q16?"], checkpoints=40, folder=tmp_path)
    later = server.requests[before:]
    stream = next(each for each in later if each.get("stream"))
    assert "w39" in stream["prompt"]  # not from the beginning
    assert not asked & {each["prompt"] for each in later}  # no probe is paid for twice
    assert record.traces[0].tokens == 2 * need_of(16)
    assert record.traces[0].answer.answer == "even"


def test_what_was_written_before_a_failure_is_not_paid_twice(server, tmp_path):
    server.faults = ["cut"]
    options = {"checkpoints": 40, "folder": tmp_path}
    with pytest.raises(CollectionError, match="cut short"):
        collect_traces(reasoner(server), ["q16?"], backoff=Backoff(retries=0), **options)
    record = collect_traces(reasoner(server), ["q16?"], **options)
    assert [word for word in server.written if word in (" w0", " w1")] == [" w0", " w1"]
    assert record.traces[0].tokens == 2 * need_of(16)


def test_a_server_without_log_probabilities_is_named_or_told_so(server):
    server.logprobs = False
    with pytest.raises(CollectionError, match=r"no log-probabilities.*agreement"):
        collect(server, n=1)
    plain = Reasoner(Endpoint(server.url, "qwen3", key=None, logprobs=None), max_tokens=1000)
    exits = collect(server, n=2, client=plain).exits(40)
    assert list(exits.confidences) == ["agreement", "progress"]
    assert all("logprobs" not in each for each in server.requests[-3:])


def test_answers_that_cannot_be_read_are_kept_and_read_again(server, tmp_path):
    server.final = "It depends on %s things"
    with pytest.raises(CollectionError, match=r"3 of 3 answers cannot be read.*'3'.*`parse`") as e:
        collect(server, n=3, folder=tmp_path, ids=["3", "4", "5"])
    assert e.value.missing == 3
    asked = len(server.requests)
    client = reasoner(server, parse=lambda text: "odd" if "odd" in text else "even")
    record = collect(server, n=3, folder=tmp_path, client=client)
    assert len(server.requests) == asked
    assert [t.answer.answer for t in record.traces] == ["even", "odd", "even"]


def test_thinking_that_never_ends_is_asked_at_its_budget(server):
    client = Reasoner(Endpoint(server.url, "qwen3", key=None), max_tokens=80)
    record = collect_traces(client, ["q16?"], checkpoints=40, backoff=QUICK)
    trace = record.traces[0]
    assert trace.tokens == 80
    assert trace.answer.answer == "unknown"
    assert [probe.tokens for probe in trace.probes] == [40, 80]


@pytest.mark.parametrize("status", [404, 405])
def test_a_server_that_cannot_continue_texts_names_the_other_dials(server, status):
    server.faults = [status]
    with pytest.raises(CollectionError, match=r"votes \(collect_votes, Voter\) and budgets"):
        collect(server, n=1)


def test_an_api_that_hides_its_thinking_is_refused_before_it_is_paid():
    with pytest.raises(ValueError, match=r"hides its thinking.*votes.*budgets of tokens"):
        Reasoner(Endpoint("https://api.openai.com/v1", "o3"), family="qwen3")


def test_an_unknown_model_needs_a_family():
    with pytest.raises(ValueError, match=r"`family` must say how 'mystery'.*qwen3"):
        Reasoner(Endpoint("http://localhost/v1", "mystery", key=None))


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_found_by_name_and_ends_its_thinking(name):
    family = family_of(None, f"org/{name.upper()}-8B-Instruct")
    assert family is FAMILIES[name]
    prompt = family.prompt([{"role": "user", "content": "1?"}, {"role": "user", "content": "2?"}])
    assert prompt.index("1?") < prompt.index("2?") < len(prompt) - 2
    assert prompt.endswith(family.begin)
    assert family.mark in family.end


def test_options_have_probabilities(server):
    client = reasoner(server, options=["even", "odd"])
    record = collect(server, n=4, client=client)
    early, late = record.traces[3].probes[0].answer, record.traces[3].probes[-1].answer
    assert early.answer is None  # it said "unknown"
    assert early.probabilities.tolist() == [0.5, 0.5]
    assert late.answer == "odd"
    assert late.probabilities.tolist() == [0, 1]
    assert "top1" in record.exits(40).confidences


def test_lines_that_were_collected_can_be_stored(server, tmp_path):
    record = collect(server, n=3)
    record.save(tmp_path / "traces.jsonl")
    again = TraceRecord.load(tmp_path / "traces.jsonl")
    assert [t.to_json() for t in again.traces] == [t.to_json() for t in record.traces]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": ["even"]}, "`labels` must be one per question, 2"),
        ({"ids": ["a"]}, "`ids` must be one per question"),
        ({"questions": []}, "must not be empty"),
        ({"client": 3}, "must be a Reasoner"),
    ],
)
def test_bad_arguments(change, words):
    endpoint = Endpoint("http://localhost:1/v1", "qwen3", key=None)
    asked = {"client": endpoint, "questions": ["a", "b"]} | change
    with pytest.raises((TypeError, ValueError), match=words):
        collect_traces(**asked)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        (f"{ASK}7}} because", "7"),
        ("The answer is **12**.", "12"),
        ("No idea", None),
    ],
)
def test_answers_are_read(text, answer):
    assert read_answer(text, ASK) == answer


def test_votes_are_drawn_once_and_parsed(tmp_path):
    calls = []

    def model(question):
        calls.append(question)
        return f"answer: {len(calls) % 3}"

    read = lambda text: text[-1] if text[-1] != "0" else None  # noqa: E731
    options = {"samples": 6, "folder": tmp_path, "concurrency": 1, "parse": read}
    record = collect_votes(model, ["a", "b"], ["1", "2"], **options)
    assert record.answers == (("1", "2", None) * 2,) * 2
    collect_votes(model, ["a", "b"], ["1", "2"], **options)
    assert len(calls) == 12
    assert record.exits().settings["system"] == "voting"
    with pytest.raises(CollectionError, match=r"None of the 6 answers to 2 of 2.*'a'.*`parse`"):
        collect_votes(model, ["a", "b"], **(options | {"parse": lambda text: None}), ids="ab")
    assert len(calls) == 12


def test_votes_need_a_temperature():
    with pytest.raises(ValueError, match="temperature"):
        collect_votes(Endpoint("http://localhost:1/v1", "m", key=None), ["q"])


def test_the_log_holds_no_question(server, tmp_path):
    collect(server, n=1, folder=tmp_path)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert all(json.loads(line) for line in lines)
    assert not any("Is q0 odd" in line for line in lines)
