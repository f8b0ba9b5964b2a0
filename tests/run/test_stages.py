"""The loop over stages and its stream, on plain arrays, against the exit rule."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftsure.exits import reaches
from swiftsure.run.stages import ExitLoop, StageExecutor
from swiftsure.run.streaming import StageStream, StreamError


class Table(StageExecutor):
    """Samples are rows of confidences; an exit's output is 100 times the exit, plus the sample."""

    def __init__(self, n_exits):
        self.n_exits, self.ran, self.failing = n_exits, [], None

    def size(self, batch):
        return len(batch[0])

    def begin(self, batch):
        return len(batch[0]), batch

    def advance(self, exit_index, state):
        if exit_index == self.failing:
            raise RuntimeError("no memory")
        self.ran.append((exit_index, len(state[0])))
        return state

    def answer(self, exit_index, state, n):
        numbers, scores = state
        assert len(numbers) == n
        last = exit_index == self.n_exits - 1
        return 100 * exit_index + numbers, None if last else scores[:, exit_index]

    def select(self, state, rows):
        return tuple(each[rows] for each in state)

    def rows(self, values, rows):
        return values[rows]

    def assembled(self, parts, n):
        whole = np.full(n, -1)
        for rows, values in parts:
            whole[rows] = values
        return whole

    def joined(self, states):
        return tuple(map(np.concatenate, zip(*states, strict=True)))


class Stream(StageStream):
    def _result(self, exited):
        return exited

    def _output(self, done):
        return done.exits, done.values(self._executor)


def taken(scores, thresholds, strict, min_exit):
    """The first exit whose confidence reaches its threshold, one comparison at a time."""
    for k, (score, level) in enumerate(zip(scores, thresholds, strict=True)):
        if k >= min_exit and reaches(score, level, strict=strict):
            return k
    return len(thresholds)


LEVELS = np.float32([0.0, 0.3, 0.5, 0.9, 1.0, np.inf])
SCORES = np.float32([0.0, 0.3, 0.4, 0.5, 0.9, 1.0, np.nan])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_exits_are_those_of_the_rule(data):
    n_exits = data.draw(st.integers(2, 5))
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    n = sum(sizes)
    scores = rng.choice(SCORES, (n, n_exits - 1))
    thresholds = rng.choice(LEVELS, n_exits - 1)
    rule = {"strict": data.draw(st.booleans()), "min_exit": data.draw(st.integers(0, n_exits - 1))}
    expected = np.asarray([taken(row, thresholds, **rule) for row in scores], np.int64)
    executor = Table(n_exits)
    loop = ExitLoop(executor, thresholds, **rule)
    done, confidences = loop.run((np.arange(n), scores))
    assert done.exits.tolist() == expected.tolist()
    assert done.values(executor).tolist() == (100 * expected + np.arange(n)).tolist()
    for row, exit_ in enumerate(expected):
        seen = [k for k in range(min(exit_ + 1, n_exits - 1)) if loop.can_exit(k)]
        unseen = [k for k in range(n_exits - 1) if k not in seen]
        assert np.array_equal(confidences[row, seen], scores[row, seen], equal_nan=True)
        assert np.isnan(confidences[row, unseen]).all()
        decided = confidences[row, exit_] if exit_ < n_exits - 1 else 0.0
        assert done.decided[row] == decided
    ends = np.cumsum([0, *sizes])
    batches = [(np.arange(a, b), scores[a:b]) for a, b in pairwise(ends)]
    stream = Stream(loop, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4)))
    for (exits, values), (numbers, _) in zip(stream.ordered(batches), batches, strict=True):
        assert exits.tolist() == expected[numbers].tolist()
        assert values.tolist() == (100 * expected[numbers] + numbers).tolist()
    assert stream.in_flight == 0


def test_stages_run_only_on_samples_that_stay():
    executor = Table(3)
    scores = np.float32([[0.9, 0.0], [0.1, 0.9], [0.1, 0.1], [0.9, 0.9]])
    ExitLoop(executor, [0.5, 0.5], strict=False, min_exit=0).run((np.arange(4), scores))
    assert executor.ran == [(0, 4), (1, 2), (2, 1)]
    executor.ran.clear()
    ExitLoop(executor, [0.0, 0.5], strict=False, min_exit=0).run((np.arange(4), scores))
    assert executor.ran == [(0, 4)]


def test_a_failure_keeps_what_exited():
    executor = Table(2)
    loop = ExitLoop(executor, [0.5], strict=False, min_exit=0)
    stream, executor.failing = Stream(loop, 2, 32), 1
    scores = np.float32([[0.9], [0.1], [0.1]])
    with pytest.raises(StreamError) as caught:
        stream.push((np.arange(3), scores))
    assert caught.value.samples.tolist() == [1, 2]
    assert [each.ids.tolist() for each in caught.value.results] == [[0]]
    assert stream.in_flight == 0
