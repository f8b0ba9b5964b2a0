import asyncio
import threading
import time

import pytest

import swiftsure as ss
from swiftsure.cascade import Answer, Backoff, Endpoint
from swiftsure.reasoning import (
    Probe,
    Reasoner,
    Thinker,
    Thought,
    Trace,
    TraceRecord,
    Voter,
    VoteRecord,
    collect_traces,
    giving_up,
)
from tests.reasoning.servers import ASK, Server, need_of, right

QUICK = Backoff(first=0.001, longest=0.002, retries=3)
GRID = range(40, 401, 40)


@pytest.fixture
def server():
    found = Server()
    yield found
    found.stop()


def reasoner(server, **options):
    endpoint = Endpoint(server.url, "qwen3-tiny", key=None, **options)
    return Reasoner(endpoint, max_tokens=1000)


def traces(fingerprint=None):
    """What the server would answer on the way to 170 questions."""
    found = []
    for k in range(170):
        need = need_of(k)
        probes = [
            Probe(
                at,
                Answer(right(k) if at >= need else "unknown", 0.98 if at >= need else 0.4),
            )
            for at in range(40, 2 * need + 1, 40)
        ]
        found.append(Trace(k, probes, 2 * need, Answer(right(k)), right(k)))
    return TraceRecord(found, fingerprint)


@pytest.fixture(scope="module")
def policy():
    exits = traces().exits(GRID)
    found = ss.calibrate(exits, loss="zero_one", epsilon=0.05, score="confidence")
    assert 0.4 < found.threshold < 0.98
    return found


def test_it_stops_where_the_record_says(server, policy):
    thinker = Thinker(reasoner(server), policy, backoff=QUICK)
    exits = traces().exits(GRID)
    for k in (0, 7, 16):
        expected = int(policy.rule.exits(exits.confidences["confidence"][k : k + 1])[0])
        thought = thinker.answer(f"q{k}")
        assert thought.answer == right(k)
        assert thought.text == f"{ASK}{right(k)}}}"
        assert thought.exit == expected
        assert thought.stopped
        assert thought.tokens >= GRID[expected] >= need_of(k)
        assert len(thought.probes) == expected + 1
        assert thought.confidence == pytest.approx(0.98, abs=1e-4)
        assert thought.probe_tokens > 0
    assert thinker.spent["questions"] == 3
    assert thinker.usual == pytest.approx(exits.full_costs["tokens"].mean())
    assert thinker.saved == pytest.approx(
        3 * thinker.usual - sum(v for name, v in thinker.spent.items() if name != "questions")
    )


def test_the_stream_is_cancelled_when_it_stops(server, policy):
    server.gate = threading.Event()  # the server waits after 130 words
    thought = Thinker(reasoner(server), policy, backoff=QUICK).answer("q9")
    assert thought.stopped
    assert thought.tokens + thought.ahead <= 131
    server.gate.set()
    until = time.monotonic() + 5
    while "cancelled" not in server.written and time.monotonic() < until:
        pass
    assert "cancelled" in server.written
    assert len(server.written) < 2 * need_of(9)


def test_without_a_policy_it_thinks_to_the_end_and_asks_nothing(server):
    thought = Thinker(reasoner(server), backoff=QUICK).answer("q2")
    assert thought.tokens == 2 * need_of(2)
    assert not thought.stopped
    assert thought.answer == "even"
    assert thought.text == "The answer is \\boxed{even}."
    assert [each.get("stream") for each in server.requests] == [True]


def test_text_is_streamed_and_the_thought_comes_last(server, policy):
    async def run():
        thinker = Thinker(reasoner(server), policy, backoff=QUICK)
        parts = [each async for each in thinker.stream("q1")]
        await thinker.client.close()
        return parts

    *texts, last = asyncio.run(run())
    assert isinstance(last, Thought)
    assert "".join(texts) == last.thinking


def test_a_stream_that_breaks_is_continued(server, policy):
    server.faults = ["cut"]
    thought = Thinker(reasoner(server), policy, backoff=QUICK).answer("q4")
    assert thought.answer == "even"
    assert server.written.count(" w0") == 1
    assert thought.stopped  # it is asked on the way after the break too


def test_probes_that_fail_never_stop_the_thinking(server, policy):
    server.faults = [None, 500]
    thought = Thinker(reasoner(server), policy, backoff=QUICK).answer("q3")
    assert not thought.stopped
    assert thought.answer == "odd"
    assert thought.tokens == 2 * need_of(3)
    assert "500" in thought.failures[0]
    assert sum(not each.get("stream") for each in server.requests) == 1


def test_several_questions_at_once(server, policy):
    found = Thinker(reasoner(server), policy, backoff=QUICK).answers([f"q{k}" for k in range(5)])
    assert [each.answer for each in found] == [right(k) for k in range(5)]


def test_a_learned_score_decides_as_in_the_record(server):
    record = traces()
    pilot = TraceRecord(record.traces[:60]).exits(GRID)
    exits = TraceRecord(record.traces[60:]).exits(GRID)
    learned = ss.LearnedScore.fit(pilot, ("confidence", "agreement", "progress"), shared=True)
    found = ss.calibrate(exits, loss="zero_one", epsilon=0.1, score=learned)
    assert found.threshold is not None
    thinker = Thinker(reasoner(server), found, backoff=QUICK)
    for k in (3, 16):
        confidences = learned.confidences(record.exits(GRID).confidences)
        expected = int(found.rule.exits(confidences[k : k + 1])[0])
        assert thinker.answer(f"q{k}").exit == expected


def test_it_gives_up_where_the_two_dials_say(server):
    both = giving_up(
        traces().exits(GRID), sure=[0.9], hopeless=[0, 0.5], patience=2, score="confidence"
    )
    found = ss.calibrate(both, loss="zero_one", epsilon=0.9)
    assert found.settings["hopeless"] == 0.5
    thought = Thinker(reasoner(server), found, backoff=QUICK).answer("q16")
    assert thought.gave_up
    assert thought.answer == "unknown"
    assert thought.exit == 2


def test_other_models_and_carried_answers_are_refused(server, policy):
    record = traces("sha256:" + "0" * 64).exits(GRID)
    other = ss.calibrate(record, loss="zero_one", epsilon=0.05, score="confidence")
    with pytest.raises(ValueError, match="another model"):
        Thinker(reasoner(server), other)
    carried = ss.calibrate(traces().exits(60), loss="zero_one", epsilon=0.05, score="confidence")
    with pytest.raises(ValueError, match="carried forward"):
        Thinker(reasoner(server), carried)
    with pytest.raises(ValueError, match="not made for voting"):
        Voter(lambda q: "A", policy)


def test_a_policy_from_the_same_client_fits(server):
    record = collect_traces(
        reasoner(server), [f"q{k}" for k in range(3)], list("abc"), checkpoints=40
    )
    assert record.fingerprint == reasoner(server).fingerprint
    assert record.fingerprint != reasoner(server, parameters={"temperature": 1}).fingerprint


def test_voting_stops_when_the_vote_is_safe():
    sure = [["A"] * 8 for _ in range(150)]
    split = [["B", "A", "A", "B", "A", "A", "A", "A"] for _ in range(50)]
    record = VoteRecord(sure + split, labels=["A"] * 200)
    found = ss.calibrate(record.exits(), loss="zero_one", epsilon=0.05, score="stays")
    drawn = iter(["B", "A", "A", None, "A", "A", "A", "A"])
    vote = Voter(lambda question: (next(drawn), 1.0, 2.0), found).answer("q")
    assert vote.answer == "A"
    assert vote.samples == len(vote.drawn) <= 8
    assert vote.cost == {"cost": 2.0 * vote.samples}
    alone = Voter(lambda question: "A", found).answer("q")
    assert alone.samples < 8


def test_a_policy_that_stops_never_asks_nothing(server):
    exits = TraceRecord(traces().traces[:5]).exits(GRID)
    never = ss.calibrate(exits, loss="zero_one", epsilon=0.01, score="confidence")
    assert never.threshold is None
    thought = Thinker(reasoner(server), never, backoff=QUICK).answer("q0")
    assert thought.probes == ()
    assert not thought.stopped
