"""Stream: the same answers as EarlyExit, however the samples come and are regrouped."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftsure.torch import EarlyExit, Scored, Staged, Stream, StreamError
from tests.torch.builders import (
    OwnConfidence,
    Played,
    full_confidences,
    inputs,
    logits,
    middle_threshold,
    network,
    policy_of,
    refused,
    rules,
    split,
)


def collected(results):
    """Exits, outputs and numbers of streamed results, sorted by number."""
    ids = torch.cat([result.ids for result in results])
    exits = torch.cat([torch.full_like(result.ids, result.exit) for result in results])
    outputs = torch.cat([result.outputs for result in results])
    order = ids.argsort()
    return ids[order], exits[order], outputs[order]


@st.composite
def streamed_cases(draw):
    """Batches of any sizes, a policy, and a stream to put them through."""
    n_exits = draw(st.integers(2, 4))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    batch = logits(sum(sizes), n_exits, 3, seed=draw(st.integers(0, 10_000)))
    policy = policy_of(n_exits=n_exits, **draw(rules(full_confidences(Played(n_exits), batch))))
    stream = {"batch_size": draw(st.integers(1, 20)), "max_wait": draw(st.integers(1, 6))}
    return batch, sizes, policy, stream


# ------------------------------------------------------------------------------ the same answers


@settings(max_examples=200)
@given(streamed_cases())
def test_unordered_results(case):
    batch, sizes, policy, options = case
    expected = EarlyExit(Played(policy.n_exits), policy)(batch)
    stream = Stream(EarlyExit(Played(policy.n_exits), policy), **options)
    ids, exits, outputs = collected(list(stream.run(batch.split(sizes))))
    assert ids.tolist() == list(range(len(batch)))
    assert torch.equal(exits, expected.exits)
    assert torch.equal(outputs, expected.outputs)
    assert stream.in_flight == 0


@settings(max_examples=200)
@given(streamed_cases())
def test_ordered_results(case):
    batch, sizes, policy, options = case
    expected = EarlyExit(Played(policy.n_exits), policy)(batch)
    stream = Stream(EarlyExit(Played(policy.n_exits), policy), **options)
    results = list(stream.run(batch.split(sizes), ordered=True))
    assert [len(result.exits) for result in results] == sizes
    assert torch.equal(torch.cat([result.exits for result in results]), expected.exits)
    assert torch.equal(torch.cat([result.outputs for result in results]), expected.outputs)
    assert all(result.confidences is None for result in results)


@settings(max_examples=200)
@given(streamed_cases())
def test_memory_and_waiting_are_bounded(case):
    batch, sizes, policy, options = case
    size, max_wait = options["batch_size"], options["max_wait"]
    waiting = []

    class Watched(Played):
        def advance(self, exit_index, state):
            waiting.extend(sum(len(group.ids) for group in line) for line in stream._queues[1:])
            return super().advance(exit_index, state)

    model = Watched(policy.n_exits)
    stream = Stream(EarlyExit(model, policy), **options)
    pushed_at, left_at = {}, Counter()
    for tick, part in enumerate(batch.split(sizes)):
        pushed_at |= dict.fromkeys(range(stream.pushed, stream.pushed + len(part)), tick)
        results = stream.push(part)
        assert stream.in_flight <= (policy.n_exits - 1) * (size - 1)
        for result in results:
            for number in result.ids.tolist():
                left_at[number] += 1
                assert tick - pushed_at[number] <= max_wait
        overdue = [i for i, at in pushed_at.items() if tick - at >= max_wait and i not in left_at]
        assert not overdue
    assert max(waiting) <= 2 * size
    assert max(len(who) for _, who in model.stages) <= size
    for result in stream.flush():
        left_at.update(result.ids.tolist())
    assert left_at == dict.fromkeys(range(len(batch)), 1)


@pytest.mark.parametrize("ordered", [False, True])
def test_networks(ordered):
    model, batch = network(width=32), inputs(300)
    full = full_confidences(model, batch)
    threshold = float(np.quantile(full, 0.6))
    fast = EarlyExit(model, policy_of(threshold, 4))
    expected = fast(batch)
    near = torch.as_tensor((np.abs(full - threshold) < 1e-5).any(axis=1))
    results = list(Stream(fast, batch_size=32, max_wait=4).run(batch.split(25), ordered=ordered))
    if ordered:
        exits = torch.cat([result.exits for result in results])
        outputs = torch.cat([result.outputs for result in results])
    else:
        _, exits, outputs = collected(results)
    same = exits == expected.exits
    assert (same | near).all()
    assert len(exits.unique()) == 4
    torch.testing.assert_close(outputs[same], expected.outputs[same], atol=1e-5, rtol=1e-4)


class Tree(Staged):
    """A state and outputs that are nested."""

    n_exits = 3

    def begin(self, batch):
        return {"logits": batch["logits"], "more": (batch["logits"][:, 0], [batch["number"], "a"])}

    def advance(self, exit_index, state):
        return {**state, "logits": state["logits"] + 0.0}

    def head(self, exit_index, state):
        values = state["logits"][:, exit_index]
        number = state["more"][1][0]
        return Scored({"values": values, "number": (number,)}, values.softmax(dim=1).amax(dim=1))


def test_nested_states_and_outputs():
    batch = logits(60, 3)
    numbers = torch.arange(60)
    fast = EarlyExit(Tree().eval(), policy_of(0.7, 3, "model"))
    expected = fast({"logits": batch, "number": numbers})
    parts = [
        {"logits": part, "number": number}
        for part, number in zip(batch.split(7), numbers.split(7), strict=True)
    ]
    results = list(Stream(fast, batch_size=16, max_wait=3).run(parts, ordered=True))
    assert torch.equal(torch.cat([result.exits for result in results]), expected.exits)
    values = torch.cat([result.outputs["values"] for result in results])
    assert torch.equal(values, expected.outputs["values"])
    assert torch.equal(torch.cat([result.outputs["number"][0] for result in results]), numbers)


def test_threads_share_a_model_and_have_streams_of_their_own():
    model = network(width=32)
    batch = inputs(240)
    fast = EarlyExit(model, policy_of(middle_threshold(model, batch), 4))

    def run(size):
        return list(Stream(fast, batch_size=16, max_wait=3).run(batch.split(size), ordered=True))

    sizes = [7, 24, 30, 40]
    alone = [run(size) for size in sizes]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, sizes))
    for one, two in zip(together, alone, strict=True):
        for a, b in zip(one, two, strict=True):
            assert torch.equal(a.exits, b.exits)
            assert torch.equal(a.outputs, b.outputs)


# -------------------------------------------------------------------------------- the regrouping


def test_late_stages_run_full_batches():
    batch = logits(400)
    model = Played(4)
    policy = policy_of(middle_threshold(Played(4), batch, share=0.4), 4)
    stream = Stream(EarlyExit(model, policy), batch_size=16, max_wait=10_000)
    results = [result for part in batch.split(16) for result in stream.push(part)]
    sizes = Counter((k, len(who)) for k, who in model.stages if k > 0)
    assert {size for _, size in sizes} == {16}
    assert {k for k, _ in sizes} == {1, 2, 3}
    waiting = stream.in_flight
    assert waiting == 400 - sum(len(result.ids) for result in results)
    assert sum(len(result.ids) for result in stream.flush()) == waiting


def test_whoever_waits_too_long_is_run():
    stream = Stream(EarlyExit(Played(2), policy_of(None, 2)), batch_size=1000, max_wait=3)
    given_back = [stream.push(part) for part in logits(12, 2).split(2)]
    ids = [[i for result in results for i in result.ids.tolist()] for results in given_back]
    # the overdue take along whoever waits with them, since the stage has room
    assert ids == [[], [], [], [0, 1, 2, 3, 4, 5, 6, 7], [], []]
    assert stream.in_flight == 4


def test_waiting_counts_from_the_push_not_from_the_last_stage():
    model = Played(4)
    stream = Stream(EarlyExit(model, policy_of(None, 4)), batch_size=100, max_wait=2)
    left = [sum(len(r.ids) for r in stream.push(part)) for part in logits(10).split(1)]
    assert left == [0, 0, 3, 0, 0, 3, 0, 0, 3, 0]


def test_batches_larger_than_the_streams():
    batch = logits(100)
    model = Played(4)
    policy = policy_of(0.7, 4)
    stream = Stream(EarlyExit(model, policy), batch_size=8)
    results = stream.push(batch)
    assert max(len(who) for _, who in model.stages) == 8
    assert stream.in_flight <= 3 * 7
    ids, exits, outputs = collected([*results, *stream.flush()])
    expected = EarlyExit(Played(4), policy)(batch)
    assert ids.tolist() == list(range(100))
    assert torch.equal(exits, expected.exits)
    assert torch.equal(outputs, expected.outputs)


@pytest.mark.parametrize("threshold", [0.0, 0.5, None])
def test_what_is_given_is_ones_own(threshold):
    """A head may hand out the batch itself, which the next one may be written over."""
    batch = logits(24)
    kept = batch.clone()
    stream = Stream(EarlyExit(Played(4), policy_of(threshold, 4)), batch_size=6)
    results = [result for part in batch.split(6) for result in stream.push(part)] + stream.flush()
    batch.zero_()
    assert sum(len(result.ids) for result in results) == 24
    for result in results:
        assert torch.equal(result.outputs, kept[result.ids, result.exit])


def test_all_leave_at_the_first_exit():
    model = Played(4)
    stream = Stream(EarlyExit(model, policy_of(0.0, 4)), batch_size=8)
    results = [stream.push(part) for part in logits(20).split(5)]
    assert [[result.ids.tolist() for result in each] for each in results] == [
        [list(range(start, start + 5))] for start in range(0, 20, 5)
    ]
    assert stream.in_flight == 0
    assert stream.flush() == []
    assert {k for k, _ in model.stages} == {0}


def test_none_leaves_early():
    model = Played(4)
    stream = Stream(EarlyExit(model, policy_of(None, 4)), batch_size=8)
    results = list(stream.run(logits(24).split(6)))
    assert {result.exit for result in results} == {3}
    assert {k for k, _ in model.heads} == {3}
    assert [len(result.ids) for result in results] == [8, 8, 8]


def test_use_after_a_flush():
    batch = logits(30)
    fast = EarlyExit(Played(4), policy_of(0.7, 4))
    expected = fast(batch)
    stream = Stream(fast, batch_size=7)
    first = [*stream.push(batch[:10]), *stream.flush()]
    assert stream.in_flight == 0
    assert collected(first)[0].tolist() == list(range(10))
    second = [*stream.push(batch[10:15]), *stream.push(batch[15:]), *stream.flush()]
    ids, exits, outputs = collected(second)
    assert ids.tolist() == list(range(10, 30))
    assert torch.equal(exits, expected.exits[10:])
    assert torch.equal(outputs, expected.outputs[10:])
    assert stream.pushed == 30
    (third,) = stream.run([batch], ordered=True)
    assert torch.equal(third.exits, expected.exits)


def test_ordered_batches_come_as_soon_as_they_are_whole():
    fast = EarlyExit(Played(2), policy_of(0.9, 2))
    sure, unsure = torch.tensor([[[9.0, 0.0]] * 2] * 3), torch.zeros(3, 2, 2)
    pushed = []

    def batches():
        for part in (sure, unsure, sure, sure, unsure):
            pushed.append(len(part))
            yield part

    results = Stream(fast, batch_size=6, max_wait=100).run(batches(), ordered=True)
    next(results)
    assert len(pushed) == 1
    next(results)  # the unsure wait for others like them, and the sure behind them wait their turn
    assert len(pushed) == 5
    assert len(list(results)) == 3


def test_flush_of_nothing():
    stream = Stream(EarlyExit(Played(2), policy_of(0.5, 2)), batch_size=4)
    assert stream.flush() == []
    assert list(stream.run([])) == []
    assert list(stream.run([], ordered=True)) == []


@pytest.mark.parametrize("threshold", [0.0, 0.7, None])
def test_empty_batches(threshold):
    batch = logits(9)
    fast = EarlyExit(Played(4), policy_of(threshold, 4))
    stream = Stream(fast, batch_size=4)
    parts = [batch[:0], batch[:4], batch[:0], batch[4:], batch[:0]]
    ids, exits, _ = collected(list(stream.run(parts)))
    assert ids.tolist() == list(range(9))
    assert torch.equal(exits, fast(batch).exits)


def test_empty_batches_in_order():
    batch = logits(9)
    fast = EarlyExit(Played(4), policy_of(0.7, 4))
    parts = [batch[:0], batch[:4], batch[:0], batch[4:], batch[:0]]
    results = list(Stream(fast, batch_size=4).run(parts, ordered=True))
    assert [len(result.exits) for result in results] == [0, 4, 0, 5, 0]
    outputs = torch.cat([result.outputs for result in results])  # as EarlyExit gives them
    assert torch.equal(outputs, fast(batch).outputs)


# ------------------------------------------------------------------------------------- refusals


def test_nan_is_refused_by_name():
    """Without order by the sample's number in the stream, in order by its place in the batch."""
    batch = logits(20, scale=0.1)
    batch[13, :, 2] = torch.nan
    fast = EarlyExit(Played(4), policy_of(0.9, 4))
    words = "output of exit 4 is NaN or infinite for sample"
    with pytest.raises(ValueError, match=rf"{words} 13\b"):
        collected(list(Stream(fast, batch_size=6).run(batch.split(4))))
    results = Stream(fast, batch_size=6).run(batch.split(4), ordered=True)
    for _ in range(3):
        assert not next(results).outputs.isnan().any()
    with pytest.raises(ValueError, match=rf"{words} 1\b"):
        _ = next(results).outputs


def test_a_confidence_that_is_no_number_never_exits():
    batch = torch.full((20, 3), 0.1)
    batch[13, 1] = torch.nan
    stream = Stream(EarlyExit(OwnConfidence(3), policy_of((0.9, 0.05), 3, "model")), batch_size=6)
    full = [result.ids.tolist() for result in stream.run(batch.split(4)) if result.exit == 2]
    assert full == [[13]]


def test_training_mode_is_refused():
    model = network()
    stream = Stream(EarlyExit(model, policy_of(0.5, 4)), batch_size=4)
    stream.push(inputs(4))
    model.train()
    with refused("model"):
        stream.push(inputs(4))


@pytest.mark.parametrize("name", ["batch_size", "max_wait"])
@pytest.mark.parametrize("value", [0, -1, 2.5])
def test_sizes_that_are_none(name, value):
    options = {"batch_size": 4, "max_wait": 4} | {name: value}
    with refused(name):
        Stream(EarlyExit(network(), policy_of(0.5, 4)), **options)


def test_samples_of_an_earlier_push_are_not_lost():
    """An ordered run has no batch to put them into: it must say so before it takes more."""
    batch = logits(10)
    stream = Stream(EarlyExit(Played(4), policy_of(None, 4)), batch_size=100)
    stream.push(batch)
    assert stream.in_flight == 10
    with pytest.raises(ValueError, match="flush"):
        list(stream.run([batch], ordered=True))
    assert stream.in_flight == 10


def test_outputs_without_a_row_a_sample():
    class Mean(Played):
        def head(self, exit_index, state):
            return super().head(exit_index, state).mean(dim=0, keepdim=True)

    stream = Stream(EarlyExit(Mean(2), policy_of(None, 2)), batch_size=4)
    with pytest.raises(ValueError, match="output"):
        collected(list(stream.run(split(logits(8, 2), 4))))


# --------------------------------------------------------------------------------------- failures


class Faulty(Played):
    """Fails in a stage that runs one of some samples."""

    def __init__(self, n_exits, stage, samples):
        super().__init__(n_exits)
        self.stage, self.samples = stage, samples

    def advance(self, exit_index, state):
        if exit_index == self.stage and set(self.samples) & set(state["numbers"].tolist()):
            raise RuntimeError("out of memory")
        return super().advance(exit_index, state)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_failing_stage_loses_only_its_own_samples(stage):
    batch = logits(400)
    policy = policy_of(0.7, 4)
    expected = EarlyExit(Played(4), policy)(batch)
    stream = Stream(EarlyExit(Faulty(4, stage, {33, 250}), policy), batch_size=16)
    got, lost, messages, pending = [], [], [], list(batch.split(20))
    while pending:
        try:
            got += stream.push(pending.pop(0))
        except StreamError as error:
            messages.append(str(error))
            got += error.results
            lost += error.samples.tolist()
    while stream.in_flight:
        try:
            got += stream.flush()
        except StreamError as error:
            got += error.results
            lost += error.samples.tolist()
    assert all(f"Stage {stage + 1} failed on samples" in each for each in messages)
    ids, exits, outputs = collected(got)
    assert sorted([*ids.tolist(), *lost]) == list(range(400))
    reached = [i for i in (33, 250) if expected.exits[i] >= stage]
    assert set(reached) <= set(lost)
    assert len(lost) <= 16 * len(reached)
    assert torch.equal(exits, expected.exits[ids])
    assert torch.equal(outputs, expected.outputs[ids])


def test_batches_of_other_shapes_run_apart():
    class Pixels(Played):
        def head(self, exit_index, state):
            return state["logits"].flatten(1)[:, :5] * (exit_index + 1)

    batches = [torch.randn(6, 4, side) for side in (5, 8, 5, 8)]
    policy = policy_of(0.7, 4)
    expected = [EarlyExit(Pixels(4), policy)(batch) for batch in batches]
    found = list(Stream(EarlyExit(Pixels(4), policy), 8).run(batches, ordered=True))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.outputs, other.outputs)


def test_an_ordered_run_keeps_what_is_ready_of_open_batches():
    batch, policy = logits(112), policy_of(0.7, 4)
    stream = Stream(EarlyExit(Faulty(4, 1, {40, 41, 42, 43, 44}), policy), batch_size=16)
    got, caught = 0, None
    try:
        for output in stream.run(batch.split(8), ordered=True):
            got += len(output.exits)
    except StreamError as error:
        caught = error
    assert caught is not None
    ready = sum(len(result.ids) for result in caught.results)
    assert got + ready + len(caught.samples) + stream.in_flight == stream.pushed


def test_a_run_delivers_what_is_ready_before_it_fails():
    batch, policy = logits(100), policy_of(0.7, 4)
    stream = Stream(EarlyExit(Faulty(4, 0, {70}), policy), batch_size=16)
    got = []
    with pytest.raises(StreamError) as caught:
        got.extend(stream.run(batch.split(10)))
    ids = torch.cat([result.ids for result in got]).tolist()
    assert not set(ids) & set(caught.value.samples.tolist())
    assert stream.in_flight + len(ids) + len(caught.value.samples) == stream.pushed
