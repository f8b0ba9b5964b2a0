"""Logs of several workers: folded in order of time, each line once, whenever they are read."""

import json
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftsure.monitor import Monitor, StreamFaultError, Watch, request_ids

N = 60


def entries(workers=3, n=N, seed=0):
    """Return (worker, line) for losses in [0, 1] at random times, in order of time."""
    rng = np.random.default_rng(seed)
    ids = request_ids(n)
    return [
        (
            int(rng.integers(workers)),
            json.dumps({"id": ids[k], "time": 1000.0 + k // 2, "loss": float(rng.random())}) + "\n",
        )
        for k in range(n)
    ]


def logs_of(folder, workers=3):
    return [folder / f"worker {k}.jsonl" for k in range(workers)]


def append(folder, lines):
    for worker, line in lines:
        with logs_of(folder)[worker].open("a") as file:
            file.write(line)


def watch_of(state):
    return Watch.load(state) if state.exists() else Watch(Monitor(0.5, 1e-9))


def expected(lines):
    """The monitor after all lines, ordered by time and then by worker."""
    monitor = Monitor(0.5, 1e-9)
    whole = [(json.loads(line), worker) for worker, line in lines]
    for content, _ in sorted(whole, key=lambda each: (each[0]["time"], each[1])):
        monitor.update(content["loss"])
    return monitor.state()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, N), max_size=4), st.integers(0, 3))
def test_the_order_does_not_depend_on_when_logs_are_read(tmp_path_factory, stops, seed):
    folder = tmp_path_factory.mktemp("logs")
    lines, state, done = entries(seed=seed), folder / "state.json", 0
    append(folder, [(worker, "") for worker in range(3)])
    for stop in sorted(stops):
        append(folder, lines[done : max(done, stop)])
        done = max(done, stop)
        watch = watch_of(state)
        latest = 1000.0 + (done - 1) // 2
        watch.read_logs(logs_of(folder), until=latest - 1)  # settled
        watch.save(state)
    append(folder, lines[done:])
    watch = watch_of(state)
    watch.read_logs(reversed(logs_of(folder)))
    assert watch.monitor.state() == expected(lines)
    assert not watch.read_logs(logs_of(folder))
    assert watch.requests == N


def test_a_line_counts_once_whatever_the_log_is_called(tmp_path):
    lines, state = entries(), tmp_path / "state.json"
    append(tmp_path, lines)
    single = Watch(Monitor(0.5, 1e-9))
    with logs_of(tmp_path)[0].open("rb") as file:  # read alone at first
        single.resume(file)
        single.feed(file.read())
    single.save(state)
    watch = watch_of(state)
    watch.read_logs(logs_of(tmp_path))
    assert watch.monitor.n == N
    watch.save(state)
    logs_of(tmp_path)[1].rename(tmp_path / "renamed.jsonl")
    link = tmp_path / "link.jsonl"
    link.symlink_to(logs_of(tmp_path)[0])
    watch = watch_of(state)
    assert not watch.read_logs([tmp_path / "renamed.jsonl", link, logs_of(tmp_path)[2]])
    logs_of(tmp_path)[0].write_text('{"loss": 0}\n')
    with pytest.raises(ValueError, match="is not the log that was read before"):
        watch_of(state).read_logs([logs_of(tmp_path)[0]])


def test_logs_of_before_with_numbers_are_read_one_after_the_other(tmp_path):
    one, two = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    one.write_text('{"id": 0}\n{"id": 1, "loss": 1}\n{"id": 0, "loss": 0}\n{"id": 4')
    two.write_text('{"id": "x", "loss": 0.5, "time": 5}\n{"id": "y", "loss": 0.5}\n')
    watch = Watch(Monitor(0.5))
    watch.read_logs([two, one])
    assert (watch.monitor.n, watch.order.waiting) == (4, 0)
    two.write_text(two.read_text() + '{"id": "x", "loss": 0}\n')
    for _ in range(2):
        with pytest.raises(StreamFaultError, match=r"line 3 of .*b\.jsonl.*each has one loss"):
            watch.read_logs([one, two])


@pytest.mark.parametrize("restart", [False, True])
def test_a_time_that_is_still_to_come_holds_nothing_up(tmp_path, restart):
    one, two, state = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "state.json"
    now = time.time()

    def line(at, loss=1):
        return f'{{"time": {now + at}, "loss": {loss}}}\n'

    one.write_text(line(-90) * 10 + line(86_400) + line(-60) * 20)
    two.write_text(line(-80) * 5 + line(-1))
    watch = Watch(Monitor(0.5, 1e-9))
    watch.read_logs([one, two], now - 2)
    assert watch.monitor.n == 36  # the last line of the other log may have earlier ones
    if restart:
        watch.save(state)
        watch = Watch.load(state)
    with one.open("a") as file:
        file.write(line(-3) * 7 + line(-1))
    watch.read_logs([one, two], now - 2)
    assert watch.monitor.n == 43


def test_an_alarm_stops_the_reading_in_its_place(tmp_path):
    log, state = tmp_path / "a.jsonl", tmp_path / "state.json"
    log.write_text('{"loss": 1}\n' * 500 + '{"loss": 0.25}\n')
    watch = Watch(Monitor(0.05))
    watch.read_logs([log])
    assert watch.monitor.alarm
    assert watch.monitor.n == watch.monitor.alarm_at < 500
    watch.save(state)
    assert Watch.load(state).logs.places[str(log)].place.lines == watch.monitor.n


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_kills_of_the_monitor_lose_and_double_nothing(tmp_path, kills):
    lines, state = entries(n=400, seed=1), tmp_path / "state.json"
    append(tmp_path, lines)

    def work():
        watch = watch_of(state)
        for k in range(0, 401, 10):
            watch.read_logs(logs_of(tmp_path), until=1000.0 + k / 2)
            watch.save(state)
            time.sleep(0.001)

    rng, context = np.random.default_rng(0), multiprocessing.get_context("fork")
    for _ in range(kills):
        process = context.Process(target=work)
        process.start()
        time.sleep(float(rng.uniform(0, 0.06)))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    work()
    assert Watch.load(state).monitor.state() == expected(lines)
