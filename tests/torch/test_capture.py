"""Captured stages: the same exits and answers as the plain runtime, on a CPU and on a GPU."""

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftsure.exits import reaches
from swiftsure.run.graphs.recorder import CaptureBudget, Recorder
from swiftsure.run.graphs.row_compaction import Decision, copy_rows, decide, row_buffer
from swiftsure.torch import CaptureLimits, EarlyExit, Scored, Staged, Stream, StreamError, measure
from swiftsure.torch.captured_calls import captured_size
from swiftsure.torch.segments import SegmentPlan
from tests.torch.builders import (
    OwnConfidence,
    full_confidences,
    inputs,
    logits,
    middle_threshold,
    network,
    policy_of,
    refused,
    rules,
)

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


class Replayed(Staged):
    """Plays given logits, (n, n_exits, n_classes): the same to the last bit in any batch."""

    def __init__(self, n_exits):
        super().__init__()
        self.n_exits = n_exits
        self.eval()

    def begin(self, batch):
        return {"logits": batch, "unread": batch.sum(dim=(1, 2))}

    def advance(self, exit_index, state):
        return dict(state)

    def head(self, exit_index, state):
        return state["logits"][:, exit_index]


def pair(model, threshold, device="cpu", *, score="top1", **options):
    """The plain runtime, and the captured one."""
    model = model.to(device)
    policy = policy_of(threshold, model.n_exits, score)
    return EarlyExit(model, policy), EarlyExit(model, policy, capture=True, **options)


def assert_same(found, expected, confidences=True):
    assert torch.equal(found.exits, expected.exits)
    torch.testing.assert_close(found.outputs, expected.outputs, atol=1e-4, rtol=1e-4)
    if confidences:
        torch.testing.assert_close(
            found.confidences, expected.confidences, equal_nan=True, atol=1e-5, rtol=0
        )


def joined(outputs):
    outputs = list(outputs)
    exits = torch.cat([out.exits for out in outputs])
    return exits, torch.cat([out.outputs for out in outputs])


# ------------------------------------------------------------------------------ the same answers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 2, 7, 24])
def test_calls_give_what_the_plain_runtime_gives(device, n):
    model = network(width=32)
    plain, fast = pair(model, middle_threshold(network(width=32), inputs(96)), device)
    for part in inputs(96).to(device).split(n):
        assert_same(fast(part), plain(part))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 5, 16, 64])
@pytest.mark.parametrize("max_wait", [1, 3, 32])
def test_streams_give_what_the_plain_runtime_gives(device, size, max_wait):
    batch = logits(150)
    plain, fast = pair(Replayed(4), middle_threshold(Replayed(4), batch, share=0.4), device)
    batch = batch.to(device)
    expected = plain(batch)
    for n in (7, 16, 150):
        found = list(Stream(fast, size, max_wait).run(batch.split(n), ordered=True))
        assert [len(out.exits) for out in found] == [len(part) for part in batch.split(n)]
        exits, outputs = joined(found)
        assert torch.equal(exits, expected.exits)
        assert torch.equal(outputs, expected.outputs)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rule_any_sizes(data):
    n_exits = data.draw(st.integers(2, 4))
    sizes = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=6))
    batch = logits(sum(sizes) + 1, n_exits, 3, seed=data.draw(st.integers(0, 1000)))[1:]
    fields = data.draw(rules(full_confidences(Replayed(n_exits), batch) if len(batch) else
                             np.zeros((0, n_exits - 1))))  # fmt: skip
    policy = policy_of(n_exits=n_exits, **fields)
    expected = EarlyExit(Replayed(n_exits), policy)(batch)
    fast = EarlyExit(Replayed(n_exits), policy, capture=True)
    parts = batch.split(sizes)
    size, wait = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
    found = list(Stream(fast, size, wait).run(parts, ordered=True))
    exits, outputs = joined(found)
    assert torch.equal(exits, expected.exits)
    assert torch.equal(outputs, expected.outputs)
    assert_same(fast(batch), expected)


def test_unordered_results_of_a_stream():
    batch = logits(100)
    plain, fast = pair(Replayed(4), middle_threshold(Replayed(4), batch))
    results = list(Stream(fast, 8, max_wait=2).run(batch.split(9)))
    ids = torch.cat([result.ids for result in results])
    assert sorted(ids.tolist()) == list(range(100))
    for result in results:
        assert torch.equal(result.outputs, batch[result.ids, result.exit])
    exits = torch.cat([torch.full_like(result.ids, result.exit) for result in results])
    assert torch.equal(exits[ids.argsort()], plain(batch).exits)


def test_a_stream_can_be_used_after_a_flush():
    batch = logits(30)
    plain, fast = pair(Replayed(4), 0.7)
    stream = Stream(fast, 7)
    assert sum(len(r.ids) for r in [*stream.push(batch[:10]), *stream.flush()]) == 10
    assert stream.in_flight == 0
    (out,) = stream.run([batch], ordered=True)
    assert torch.equal(out.exits, plain(batch).exits)


@pytest.mark.parametrize("device", DEVICES)
def test_waiting_is_bounded(device):
    _, fast = pair(Replayed(3), None, device)
    stream = Stream(fast, batch_size=1000, max_wait=3)
    counts = [
        sum(len(r.ids) for r in stream.push(part)) for part in logits(12, 3).to(device).split(2)
    ]
    assert counts == [0, 0, 0, 8, 0, 0] or counts == [0, 0, 6, 0, 0, 6]


@pytest.mark.parametrize("device", DEVICES)
def test_the_full_model_when_asked(device):
    model = network(width=32)
    _, fast = pair(model, 0.5, device)
    batch = inputs(50).to(device)
    exits, outputs = joined(fast.way("full", 16)(batch.split(8)))
    assert set(exits.tolist()) == {3}
    torch.testing.assert_close(outputs, model(batch)[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_nested_outputs_and_own_confidences(device):
    given_ = torch.rand(40, 3, generator=torch.Generator().manual_seed(0)).to(device)

    class Own(OwnConfidence):
        def begin(self, batch):
            return {"logits": batch}

        def advance(self, exit_index, state):
            return state

        def head(self, exit_index, state):
            return Scored({"exit": state["logits"]}, state["logits"][:, exit_index])

    plain, fast = pair(Own(3), 0.6, device, score="model")
    expected = plain(given_)
    for found in (fast(given_), next(iter(fast.run([given_])))):
        assert torch.equal(found.exits, expected.exits)
        assert torch.equal(found.outputs["exit"], expected.outputs["exit"])


def test_nan_is_refused_by_name():
    batch = logits(20, scale=0.1)
    batch[13, :, 2] = torch.nan
    _, fast = pair(Replayed(4), 0.9)
    with pytest.raises(ValueError, match=r"output of exit 4 is NaN or infinite for sample 13"):
        _ = fast(batch).outputs
    results = list(fast.run(batch.split(5)))
    with pytest.raises(ValueError, match=r"output of exit 4 is NaN or infinite for sample 3"):
        _ = results[2].outputs


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_ones_own(device):
    batch = inputs(16).to(device)
    model = network()
    _, fast = pair(model, middle_threshold(network(), inputs(16)), device)
    first = fast(batch)
    kept = first.outputs.clone()
    fast(batch.flip(0))
    assert torch.equal(first.outputs, kept)
    (streamed,) = fast.run([batch])
    kept = streamed.outputs.clone()
    list(fast.run([batch.flip(0)] * 3))
    assert torch.equal(streamed.outputs, kept)
    (streamed.outputs * torch.ones(1, device=device, requires_grad=True)).sum().backward()


# --------------------------------------------------------------------------------------- failures


class Faulty(Replayed):
    """Fails in a stage that runs a sample whose logits are huge."""

    def __init__(self, n_exits, stage):
        super().__init__(n_exits)
        self.stage = stage

    def advance(self, exit_index, state):
        if exit_index == self.stage and (state["logits"].abs() > 1e3).any():
            raise RuntimeError("out of memory")
        return dict(state)


def faulty(stage, broken, n):
    """The runtime, a batch with broken samples, and the answers without them."""
    batch = logits(n)
    policy = policy_of(0.7, 4)
    expected = EarlyExit(Replayed(4), policy)(batch)
    batch[broken, 3, 0] = 1e4  # the exit before the last is not sure of them yet
    batch[broken, :3] = 0.0
    return EarlyExit(Faulty(4, stage), policy, capture=True), batch, expected


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_failing_stage_loses_only_its_own_samples(stage):
    fast, batch, expected = faulty(stage, [33, 250], 400)
    stream = Stream(fast, batch_size=16)
    got, lost, messages = [], [], []
    for run in [*(lambda part=part: stream.push(part) for part in batch.split(20)), stream.flush]:
        try:
            got += run()
        except StreamError as error:
            messages.append(str(error))
            got += error.results
            lost += error.samples.tolist()
    assert messages
    assert all(f"Stage {stage + 1} failed on samples" in each for each in messages)
    ids = torch.cat([result.ids for result in got])
    exits = torch.cat([torch.full_like(result.ids, result.exit) for result in got])
    assert sorted([*ids.tolist(), *lost]) == list(range(400))
    assert {33, 250} <= set(lost)
    assert len(lost) <= 32
    assert torch.equal(exits, expected.exits[ids])
    outputs = torch.cat([result.outputs for result in got])
    assert torch.equal(outputs, expected.outputs[ids])


def test_samples_that_failed_do_not_fail_again():
    fast, batch, _ = faulty(0, [3], 35)
    stream = Stream(fast, batch_size=16)
    with pytest.raises(StreamError) as caught:
        stream.push(batch[:32])
    got = [*caught.value.results, *stream.push(batch[32:]), *stream.flush()]  # in the same slot
    assert sum(len(result.ids) for result in got) == 35 - len(caught.value.samples)


@pytest.mark.parametrize("size", [16, 5])
def test_an_ordered_run_delivers_what_is_ready_before_it_fails(size):
    fast, batch, expected = faulty(1, [80, 81, 90], 112)
    stream = Stream(fast, batch_size=size, max_wait=2)
    got = []
    with pytest.raises(StreamError, match="Stage 2 failed") as caught:
        got.extend(stream.run(batch.split(8), ordered=True))
    error = caught.value
    exits = torch.cat([output.exits for output in got])
    assert len(exits) >= 8
    assert torch.equal(exits, expected.exits[: len(exits)])
    ids = torch.cat([result.ids for result in error.results])
    assert sorted([*range(len(exits)), *ids.tolist(), *error.samples.tolist()]) == list(
        range(stream.pushed)
    )
    for result in error.results:
        assert torch.equal(result.outputs, batch[result.ids, result.exit])
    assert stream.in_flight == 0
    (after,) = stream.run([batch[:8]], ordered=True)  # the stream can be used again
    assert torch.equal(after.exits, expected.exits[:8])


def test_a_failure_while_capturing_names_the_samples():
    fast, batch, expected = faulty(2, [0], 24)
    stream = Stream(fast, batch_size=8)
    with pytest.raises(StreamError, match="Capturing the stages failed on samples 0, 1") as caught:
        stream.push(batch[:8])
    assert caught.value.samples.tolist() == list(range(8))
    got = [*stream.push(batch[8:]), *stream.flush()]
    ids = torch.cat([result.ids for result in got])
    exits = torch.cat([torch.full_like(result.ids, result.exit) for result in got])
    assert sorted(ids.tolist()) == list(range(8, 24))
    assert torch.equal(exits, expected.exits[ids])


# ---------------------------------------------------------------------------- threads and weights


@pytest.mark.parametrize("device", DEVICES)
def test_threads_share_a_runtime(device):
    model = network(width=32)
    batch = inputs(240).to(device)
    plain, fast = pair(model, middle_threshold(network(width=32), inputs(240)), device)
    expected = plain(batch)

    def run(size):
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            calls = joined([fast(part) for part in batch.split(size)])
            streamed = joined(fast.run(batch.split(size)))
            if stream is not None:
                stream.synchronize()
        return calls, streamed

    sizes = [8, 24, 24, 40]
    with ThreadPoolExecutor(4) as pool:
        for results in pool.map(run, sizes):
            for exits, outputs in results:
                assert torch.equal(exits, expected.exits)
                torch.testing.assert_close(outputs, expected.outputs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("replace", ["parameter", "module", "in place"])
def test_replaced_weights_are_used(device, replace):
    model = network(width=32)
    plain, fast = pair(model, middle_threshold(network(width=32), inputs(64)), device)
    batch = inputs(64).to(device)
    fast(batch), list(fast.run([batch]))
    budget = fast.captures.budget
    other = network(width=32, seed=1).to(device)
    if replace == "parameter":
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.data = theirs.data
    elif replace == "module":
        model.stages[0], model.heads[1] = other.stages[0], other.heads[1]
    else:
        model.load_state_dict(other.state_dict())
    expected = plain(batch)
    assert_same(fast(batch), expected)
    (found,) = fast.run([batch])
    assert_same(found, expected, confidences=False)
    kept = fast.captures.budget is budget
    assert kept == (replace == "in place")


def test_training_mode_is_refused():
    model = network()
    _, fast = pair(model, 0.5)
    fast(inputs(4))
    model.train()
    with refused("model"):
        fast(inputs(4))


# --------------------------------------------------------------------------------------- limits


def test_too_many_graphs():
    _, fast = pair(network(), 0.5)
    fast.captures._limits = CaptureLimits(graphs=6)
    fast.captures._forget()
    with pytest.raises(RuntimeError, match="All 6 CUDA graphs are captured"):
        list(fast.run(inputs(32).split(8)))


@pytest.mark.parametrize(("name", "value"), [("graphs", 0), ("memory", 0.0), ("memory", 1.5)])
def test_limits_that_are_none(name, value):
    with refused(name):
        CaptureLimits(**{name: value})


@GPU
def test_old_graphs_are_not_freed_during_a_capture():
    x = torch.zeros(3, device="cuda")
    old = Recorder(torch.device("cuda")).record(lambda: x + 1)
    old.itself = old  # only the garbage collector frees it
    del old
    before = gc.get_threshold()

    def allocating():
        gc.set_threshold(1)
        return [[x + k] for k in range(100)]

    try:
        recorded = Recorder(torch.device("cuda")).record(allocating, warm_up=0)
    finally:
        gc.set_threshold(*before)
    recorded.replay()
    assert recorded.result[7][0].tolist() == [7.0] * 3
    assert gc.isenabled()


@GPU
def test_too_much_memory():
    model = network().cuda()
    limits = CaptureLimits(memory=1e-9)
    fast = EarlyExit(model, policy_of(0.5, 4), capture=limits)
    with pytest.raises(RuntimeError, match="more than the limit"):
        fast(inputs(4).cuda())


def test_captured_sizes_are_few_and_near():
    sizes = {captured_size(n) for n in range(1, 257)}
    assert len(sizes) <= 4 * 8
    assert all(n <= captured_size(n) <= max(n * 1.25, 8) for n in range(1, 257))
    assert all(captured_size(n) == n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256))


# ------------------------------------------------------------------------------------- the parts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.long, torch.bool])
def test_rows_are_copied_to_their_places(device, dtype):
    source = (torch.randn(9, 5, 3, 2, device=device) > 0).to(dtype)
    for given_ in (source, source[:, 1:], source.to(memory_format=torch.channels_last)):
        target = row_buffer(given_, 12)
        places = torch.tensor([3, 12, 0, 12, 12, 11, 5, 12, 1], device=device)
        copy_rows(given_, target, places)
        for i, place in enumerate(places.tolist()):
            if place < 12:
                assert torch.equal(target[place], given_[i])
        for place in set(range(12)) - set(places.tolist()):
            assert not target[place].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("live", [0, 5, 7])
def test_decisions(device, strict, live):
    scores = torch.tensor([0.1, 0.5, 0.9, float("nan"), 0.2, 0.3, 0.7], device=device)
    it = Decision(
        live=torch.tensor(live, device=device),
        ids=torch.arange(20, 27, device=device),
        answers=torch.full((7,), -1, device=device),
        exits=torch.full((11,), -1, device=device),
        decided=torch.zeros(11, device=device),
        fill=torch.tensor(10, device=device),
        next_ids=torch.full((13,), -1, device=device),
        flags=torch.zeros(7, dtype=torch.int8, device=device),
        places=torch.full((7,), -1, device=device),
    )
    decide(scores, 0.5, strict, 2, it)
    stays = [i < live and not reaches(s, 0.5, strict=strict) for i, s in enumerate(scores.tolist())]
    assert it.flags.tolist() == [int(stay) for stay in stays]
    place, left = 10, []
    for i, stay in enumerate(stays):
        assert it.places[i] == (place % 12 if stay else 12)
        if stay:
            assert it.next_ids[place % 12] == 20 + i
            place += 1
        elif i < live:
            left.append(i)
        assert it.answers[i] == ((20 + i) % 10 if i in left else 10)
    assert it.fill == place % 12
    for i in left:
        assert it.exits[(20 + i) % 10] == 2
        torch.testing.assert_close(it.decided[(20 + i) % 10], scores[i], equal_nan=True)
    decide(None, 0.0, strict, 3, it._replace(fill=None, next_ids=None, flags=None, places=None))
    assert (it.exits[:10] == 3).sum() == live


def test_only_what_is_read_is_kept():
    batch = logits(6)
    plan = SegmentPlan(EarlyExit(Replayed(4), policy_of(0.5, 4)), batch)
    assert [len(form.kept) for form in plan.forms] == [1, 1, 1, 1]


def test_exits_that_cannot_fire_join_their_stages():
    fast = EarlyExit(network(), policy_of((None, 0.5, None), 4))
    assert SegmentPlan(fast, inputs(2)).exits == [1, 3]
    assert SegmentPlan(fast, inputs(2), full=True).exits == [3]


def test_stages_that_overwrite_their_input():
    class InPlace(Staged):
        n_exits = 3

        def begin(self, batch):
            return batch

        def advance(self, exit_index, state):
            return state.add_(1.0)

        def head(self, exit_index, state):
            return torch.stack([state[:, 0], -state[:, 0]], dim=1)

    batch = torch.randn(60, 2, generator=torch.Generator().manual_seed(0)) - 1
    plain, fast = pair(InPlace().eval(), 0.9)
    expected = plain(batch.clone())
    assert_same(fast(batch.clone()), expected)
    exits, outputs = joined(fast.run(batch.clone().split(7)))
    assert torch.equal(exits, expected.exits)
    torch.testing.assert_close(outputs, expected.outputs)


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_functions(device):
    x = torch.zeros(3, device=device)
    budget = CaptureBudget()
    recorded = Recorder(torch.device(device), None, budget).record(lambda: {"y": x + 1})
    with torch.inference_mode():
        x.fill_(4.0)
        recorded.replay()
    assert recorded.result["y"].tolist() == [5.0] * 3
    assert budget.graphs == 1
    assert budget.seconds > 0


# -------------------------------------------------------------------------------------- measure


def test_measure_chooses_for_run():
    model = network()
    _, fast = pair(model, 0.5)
    found = measure(fast, inputs(64).split(8), repeats=1)
    assert set(found.seconds) == {"full", "single", "stream"}
    assert fast.fastest == {8: found.fastest}
    assert "Batches of 8" in str(found)
    fast.fastest[8] = "full"
    exits, _ = joined(fast.run(inputs(64).split(8)))
    assert set(exits.tolist()) == {3}


def test_run_uses_the_full_model_where_early_exits_are_slower():
    class Slow(Replayed):
        def head(self, exit_index, state):
            if exit_index < self.n_exits - 1:
                time.sleep(0.003)
            return super().head(exit_index, state)

    batch = logits(24)
    _, fast = pair(Slow(4), 0.99)
    found = measure(fast, batch.split(8), repeats=1)
    assert found.fastest == "full"
    assert found.speed_up == 1.0
    assert "do not pay" in str(found)
    exits, outputs = joined(fast.run(batch.split(8)))
    assert set(exits.tolist()) == {3}
    assert torch.equal(outputs, batch[:, 3])


def test_graphs_of_slower_streams_are_dropped():
    _, fast = pair(network(), 0.5)
    parts = inputs(64).split(8)
    found = measure(fast, parts, repeats=1)
    graphs = {
        way: sum(lane.n_graphs for lane in lanes)
        for (*_, full), lanes in fast.captures._lanes.items()
        for way in ["full" if full else "stream"]
    }
    assert set(graphs) == {found.fastest} - {"single"}
    n_calls = sum(
        node.graph is not None
        for calls in fast.captures._calls.values()
        for node in calls._nodes.values()
    )
    assert fast.captures.budget.graphs == found.graphs == n_calls + sum(graphs.values())
    assert len(joined(fast.way("full", 8)(parts))[0]) == 64  # captured again


def test_the_full_model_is_compiled_too(monkeypatch):
    compiled = []

    def pretended(function, **_):
        compiled.append(function.__code__.co_name)
        return function

    monkeypatch.setattr("torch.compile", pretended)
    model = network()
    fast = EarlyExit(model, policy_of(0.5, 4), capture=True, compile=True)
    compiled.clear()
    list(fast.way("full", 8)(inputs(16).split(8)))
    assert compiled == ["segment_1"]  # all stages
    compiled.clear()
    list(fast.way("stream", 8)(inputs(16).split(8)))
    assert compiled == [f"segment_{k}" for k in range(1, 5)]


def test_without_capture_the_full_model_is_only_timed():
    plain, _ = pair(network(), 0.5)
    found = measure(plain, inputs(16).split(8), repeats=1)
    assert found.fastest != "full"
    with refused("full"):
        plain.way("full", 8)
    with pytest.raises(ValueError, match="batches"):
        measure(plain, [])


# ---------------------------------------------------------------------------------------- a GPU


@GPU
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler uses deprecated parts of PyTorch
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_convolutional_network(dtype, compiled):
    from swiftsure_zoo import MSDNet

    torch.manual_seed(0)
    model = MSDNet(10, n_blocks=4, base=2, step=1, n_channels=8).eval().cuda()
    images = torch.randn(128, 3, 32, 32, device="cuda") * torch.rand(128, 1, 1, 1).cuda() * 3
    level = 0.11
    policy = policy_of(level, 4, **({} if dtype is None else {"dtype": dtype}))
    plain = EarlyExit(model, policy)
    fast = EarlyExit(model, policy, capture=True, compile=compiled)
    expected = plain(images)
    for found in (
        joined([fast(part) for part in images.split(32)]),
        joined(fast.run(images.split(32))),
    ):
        same = (found[0] == expected.exits).float().mean()
        assert same >= (0.99 if dtype is None and not compiled else 0.9)
