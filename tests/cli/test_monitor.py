"""`swiftsure monitor`: alarms and faults end with 1, bad usage with 2, and no line counts twice."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.monitor import Watch

COMMAND = [sys.executable, "-c", "from swiftsure.cli import main; main()", "monitor"]
EPSILON = ("--epsilon", "0.05")


def stream(path, losses, **others):
    text = "".join(json.dumps({"loss": float(loss), **others}) + "\n" for loss in losses)
    path.write_text(text)
    return path


def drawn(n, risk, seed=0):
    return (np.random.default_rng(seed).random(n) < risk).astype(float)


def assert_refused(done, *words):
    assert done.status == 2
    assert done.out == ""
    assert re.fullmatch(r"swiftsure: [^\n]+\n", done.err), done.err
    for word in words:
        assert word in done.err


def piped(arguments, data):
    return subprocess.run(
        [*COMMAND, *arguments], input=data, capture_output=True, timeout=60, check=False
    )


# ---------------------------------------------------------------------------------- what it says


def test_no_alarm(run, folder):
    stream(folder / "fine.jsonl", drawn(2000, 0.03))
    done = run("monitor", "fine.jsonl", *EPSILON)
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith("No alarm: ")
    assert "over all 2,000)" in done.out


@pytest.mark.parametrize(
    ("average", "each"), [("group", "the mean loss of a group"), ("sample", "with M = 4")]
)
def test_a_policy_about_groups_is_not_watched_by_requests(run, folder, average, each):
    record = ss.load_record("users.parquet")
    largest = 4 if average == "sample" else None
    record = record.grouped(record.groups, average=average, max_size=largest)
    ss.calibrate(record, loss="zero_one", epsilon=0.05).save(folder / "grouped.json")
    stream(folder / "fine.jsonl", drawn(200, 0.03))
    done = run("monitor", "fine.jsonl", "--policy", "grouped.json")
    assert_refused(done, "calibrated by groups", each, "--epsilon 0.05 --low -1 --high 1")
    done = run("monitor", "fine.jsonl", "--epsilon", "0.05", "--low", "-1", "--high", "1")
    assert (done.status, done.err) == (0, "")


def test_an_alarm_is_exit_status_1(run, folder):
    stream(folder / "bad.jsonl", np.r_[drawn(2000, 0.03), drawn(2000, 0.2, 1)])
    done = run("monitor", "bad.jsonl", *EPSILON)
    assert (done.status, done.err) == (1, "")
    assert re.match(r"Alarm at loss 2,\d\d\d: the risk exceeds 0.05", done.out)
    assert "at most 1 % over all time" in done.out


def test_json(run, folder):
    losses = np.r_[drawn(2000, 0.03), drawn(2000, 0.2, 1)]
    stream(folder / "bad.jsonl", losses)
    done = run("monitor", "bad.jsonl", *EPSILON, "--alpha", "0.02", "--json")
    found = json.loads(done.out)
    assert done.status == 1
    twin = ss.Monitor(0.05, 0.02)
    twin.update_many(losses)
    assert found["alarm"] is True
    assert found["alarm_at"] == twin.alarm_at
    assert (found["epsilon"], found["alpha"], found["evidence_needed"]) == (0.05, 0.02, 50)
    assert found["fault"] is None


def test_what_a_policy_promises(run, folder):
    losses = np.r_[np.zeros(50), np.full(30, -1.0), np.ones(200)]
    stream(folder / "gaps.jsonl", losses)
    done = run("monitor", "gaps.jsonl", "--policy", "deployed.json")
    assert done.status == 1
    assert "the zero_one gap to the full model exceeds 0.05" in done.out


def test_warnings_say_that_they_carry_no_guarantee(run, folder):
    stream(folder / "slow.jsonl", np.zeros(800), exit=3, confidence=0.3)
    done = run("monitor", "slow.jsonl", "--policy", "deployed.json", "--record", "record.parquet")
    assert done.status == 0  # no promise is broken
    warnings = re.findall("Warning, without a guarantee: (.*)", done.out)
    assert len(warnings) == 3
    assert "save 0 % of exits" in warnings[0]
    found = json.loads(run("monitor", "slow.jsonl", "--policy", "deployed.json", "--json").out)
    assert len(found["warnings_without_guarantee"]) == 2


def test_late_losses(run, folder):
    text = '{"id": 1}\n{"id": 2, "loss": 0}\n{"id": 3}\n{"id": 1, "loss": 1}\n'
    (folder / "late.jsonl").write_text(text)
    done = run("monitor", "late.jsonl", *EPSILON)
    assert done.status == 0
    assert "over all 2)" in done.out
    assert "1 requests wait" in done.out
    patient = run("monitor", "late.jsonl", *EPSILON, "--patience", "1", "--json")
    assert json.loads(patient.out)["given_up"] == 1


def test_losses_that_come_too_late_are_told(run, folder):
    text = '{"id": 1}\n{"id": 2, "loss": 0}\n{"id": 3, "loss": 0}\n{"id": 1, "loss": 1}\n'
    (folder / "late.jsonl").write_text(text)
    options = (*EPSILON, "--patience", "1")
    assert "1 losses arrived too late" in run("monitor", "late.jsonl", *options).out
    assert json.loads(run("monitor", "late.jsonl", *options, "--json").out)["too_late"] == 1


@pytest.mark.parametrize("late", [2, 4, 1])
def test_other_late_losses_are_faults_though_a_request_was_given_up(run, folder, late):
    """A second loss of request 2, one of 4, which nothing announced, and a second one of 1."""
    text = (
        '{"id": 1}\n{"id": 2, "loss": 0}\n{"id": 3, "loss": 0}\n{"id": 5, "loss": 0}\n'
        f'{{"id": 1, "loss": 1}}\n{{"id": {late}, "loss": 1}}\n'
    )
    (folder / "late.jsonl").write_text(text)
    for _ in range(2):  # the second time from the state
        done = run(
            "monitor", "late.jsonl", *EPSILON, "--patience", "1", "--state", "state.json", "--json"
        )
        found = json.loads(done.out)
        assert done.status == 1
        assert found["fault"].startswith("line 6 of the stream: `request` must be above 5")
        assert (found["n"], found["given_up"], found["too_late"]) == (4, 1, 1)


def test_odd_exits_are_told_and_stop_nothing(run, folder):
    stream(folder / "odd.jsonl", np.zeros(10), exit=99)
    options = ("--policy", "deployed.json")
    done = run("monitor", "odd.jsonl", *options)
    assert done.status == 0
    assert "over all 10)" in done.out
    assert "10 lines had an impossible exit, cost or confidence" in done.out
    assert json.loads(run("monitor", "odd.jsonl", *options, "--json").out)["odd"] == 10


# ----------------------------------------------------------------------------------------- states


def test_lines_are_read_once(run, folder):
    losses, path = drawn(300, 0.05), folder / "stream.jsonl"
    for n in (100, 100, 250, 300):
        stream(path, losses[:n])
        done = run("monitor", path, *EPSILON, "--state", "state.json", "--json")
        assert json.loads(done.out)["n"] == n
    twin = ss.Monitor(0.05)
    twin.update_many(losses)
    assert ss.Monitor.load("state.json").state() == twin.state()


def test_the_state_says_what_to_watch(run, folder):
    stream(folder / "stream.jsonl", drawn(50, 0.05))
    options = ("--policy", "deployed.json", "--alpha", "0.02", "--state", "state.json")
    assert run("monitor", "stream.jsonl", *options).status == 0
    assert run("monitor", "stream.jsonl", "--state", "state.json").status == 0
    assert run("monitor", "stream.jsonl", *options[:2], *options[4:]).status == 0
    before = (folder / "state.json").read_bytes()
    other = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
    assert_refused(other, "watches another risk", "0.02")
    assert (folder / "state.json").read_bytes() == before


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--alpha", "0.03"), ["watches another risk", "0.03"]),
        (("--low", "-1"), ["watches another risk", "-1.0"]),
        (("--high", "2"), ["watches another risk", "2.0"]),
        (("--loss", "brier"), ["watches another risk"]),
        (("--patience", "9"), ["`patience` must be 5"]),
        (("--missing", "lowest"), ["`missing` must be 'skip'"]),
    ],
)
def test_what_disagrees_with_the_state_is_refused(run, folder, option, words):
    stream(folder / "stream.jsonl", drawn(50, 0.05))
    same = ("--alpha", "0.02", "--patience", "5", "--missing", "skip", "--state", "state.json")
    names = ("--risk", "gap", "--loss", "zero_one")
    assert run("monitor", "stream.jsonl", *EPSILON, *names, *same).status == 0
    assert run("monitor", "stream.jsonl", *same, "--low", "0", "--high", "1").status == 0
    before = (folder / "state.json").read_bytes()
    assert_refused(run("monitor", "stream.jsonl", *option, "--state", "state.json"), *words)
    assert (folder / "state.json").read_bytes() == before


def test_from_start_does_not_fold_lines_twice(run, folder):
    path = stream(folder / "stream.jsonl", drawn(50, 0.05))
    run("monitor", path, *EPSILON, "--state", "state.json")
    again = run("monitor", path, "--state", "state.json", "--from-start")
    assert_refused(again, "leave out --from-start")
    assert ss.Monitor.load("state.json").n == 50


def test_an_alarm_is_remembered(run, folder):
    stream(folder / "bad.jsonl", np.ones(50))
    first = run("monitor", "bad.jsonl", *EPSILON, "--state", "state.json")
    stream(folder / "bad.jsonl", np.ones(50).tolist() + [0.0] * 50)
    again = run("monitor", "bad.jsonl", *EPSILON, "--state", "state.json")
    assert (first.status, first.out) == (again.status, again.out)
    assert again.status == 1


def test_a_damaged_state_is_kept(run, folder):
    stream(folder / "stream.jsonl", drawn(50, 0.05))
    (folder / "state.json").write_text('{"format": "swiftsure-monitor", "ver')
    done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
    assert_refused(done, "damaged monitor state", "left as it is")
    assert (folder / "state.json").read_text() == '{"format": "swiftsure-monitor", "ver'


def test_a_rotated_file(run, folder):
    path = stream(folder / "stream.jsonl", drawn(50, 0.05))
    run("monitor", path, *EPSILON, "--state", "state.json")
    stream(path, drawn(20, 0.5, 1))
    assert_refused(run("monitor", path, "--state", "state.json"), "--from-start")
    done = run("monitor", path, "--state", "state.json", "--from-start", "--json")
    assert json.loads(done.out)["n"] == 70


# ----------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    "bad",
    [
        '{"loss": 1.5}',
        '{"loss": NaN}',
        '{"loss": -0.1}',
        "Infinity",
        "nan",
        "-inf",
        '{"losss": 1}',
        "[1]",
        '{"loss": 1} {"loss": 1}',
    ],
)
def test_a_fault_is_reported_and_never_dropped(run, folder, bad):
    text = '{"loss": 0}\n' * 5 + bad + '\n{"loss": 0}\n'
    (folder / "stream.jsonl").write_text(text)
    for _ in range(2):  # it does not go away by trying again
        done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
        assert done.status == 1
        assert re.fullmatch(r"swiftsure: line 6 of the stream: `loss` [^\n]+\n", done.err)
        assert "over all 5)" in done.out
    mended = text.replace(bad, '{"loss": 1}')
    (folder / "stream.jsonl").write_text(mended)
    done = run("monitor", "stream.jsonl", "--state", "state.json", "--json")
    assert (done.status, json.loads(done.out)["n"]) == (0, 7)


def test_faults_in_json(run, folder):
    (folder / "stream.jsonl").write_text("7\n")
    done = run("monitor", "stream.jsonl", *EPSILON, "--json")
    assert done.status == 1
    assert "line 1" in json.loads(done.out)["fault"]


def test_lines_cut_short_are_survived_and_told(run, folder):
    text = '{"loss": 0}\n{"loss": 0.\n{"loss": 1}\n{"lo'
    (folder / "stream.jsonl").write_text(text)
    done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
    assert done.status == 0
    assert "over all 2)" in done.out
    assert "1 lines could not be read" in done.out
    assert "The last line is cut short" in done.out
    (folder / "stream.jsonl").write_text(text + 'ss": 0}\n')
    done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json", "--json")
    assert json.loads(done.out)["n"] == 3


@pytest.mark.parametrize("text", ["", "\n\n", '{"exit": 1}\n', '{"lo'])
def test_a_stream_without_losses(run, folder, made, text):
    (folder / "stream.jsonl").write_text(text)
    done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
    assert_refused(done, "must hold at least one loss")
    assert made() == {"stream.jsonl"}


def test_a_stream_of_which_most_is_cut_short(run, folder):
    (folder / "stream.jsonl").write_text('{"loss": 0}\n' + '{"loss"\n' * 2)
    for _ in range(2):
        done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json", "--json")
        assert done.status == 1
        assert done.err.startswith("swiftsure: 2 of 3 lines could not be read")
        assert "2 of 3" in json.loads(done.out)["fault"]


def test_nothing_new_is_fine(run, folder):
    path = stream(folder / "stream.jsonl", drawn(50, 0.05))
    for _ in range(2):
        assert run("monitor", path, *EPSILON, "--state", "state.json").status == 0


# ------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("losses.jsonl",), ["`--policy` or `--epsilon`"]),
        (("losses.jsonl", "--state", "none.json"), ["`--policy` or `--epsilon`"]),
        (("losses.jsonl", "--policy", "deployed.json", *EPSILON), ["`--epsilon`"]),
        (("losses.jsonl", "--policy", "deployed.json", "--low", "0"), ["`--low`"]),
        (("losses.jsonl", *EPSILON, "--alpha", "1e-200"), ["`alpha` must be at least 1e-190"]),
        (("losses.jsonl", "--epsilon", "1.3"), ["`epsilon` must be in (0, 1), but got 1.3"]),
        (("losses.jsonl", *EPSILON, "--low", "2"), ["`loss_range`"]),
        (("losses.jsonl", *EPSILON, "--alpha", "0"), ["`alpha` must be in (0, 1), but got 0"]),
        (("losses.jsonl", *EPSILON, "--patience", "0"), ["`patience`"]),
        (("losses.jsonl", *EPSILON, "--missing", "skipp"), ["Did you mean 'skip'?"]),
        (("losses.jsonl", *EPSILON, "--cost", "flops"), ["need --policy"]),
        (("losses.jsonl", "--policy", "deployed.json", "--cost", "flop"), ["'flops'"]),
        (("losses.jsonl", "--policy", "deployed.json", "--risk", "gaps"), ["'gap'"]),
        (
            ("losses.jsonl", "--policy", "deployed.json", "--record", "thresholds.parquet"),
            ["`--record`"],
        ),
        (("losses.jsonl", "--policy", "losses.jsonl"), ["losses.jsonl"]),
        (("losses.jsonl", *EPSILON, "--state", "none/state.json"), ["none"]),
        (("none.jsonl", *EPSILON), ["none.jsonl"]),
    ],
)
def test_bad_usage(run, made, arguments, words):
    assert_refused(run("monitor", *arguments), *words)
    assert not made()


def test_a_policy_that_does_not_say_its_level(run, folder):
    content = json.loads((folder / "deployed.json").read_text())
    for missing in ("epsilon", "loss_range"):
        promise = {k: v for k, v in content["certificate"]["promises"][0].items() if k != missing}
        changed = {**content, "certificate": {**content["certificate"], "promises": [promise]}}
        (folder / "vague.json").write_text(json.dumps(changed))
        done = run("monitor", "losses.jsonl", "--policy", "vague.json")
        assert_refused(done, "damaged policy", missing)


# ------------------------------------------------------------------------------ pipes and following


def test_a_pipe(folder):
    done = piped(EPSILON, b"0\n" * 10 + b'{"loss": 1}')
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"over all 11)" in done.stdout
    assert piped(EPSILON, b"1\n" * 50).returncode == 1
    assert piped(EPSILON, b"").returncode == 2


def test_a_pipe_after_a_file_goes_on_with_the_state(run, folder):
    stream(folder / "stream.jsonl", drawn(50, 0.05))
    options = (*EPSILON, "--state", "state.json", "--json")
    run("monitor", "stream.jsonl", *options)
    for n in (60, 70):
        done = piped(("-", *options), b"0\n" * 10)
        assert json.loads(done.stdout)["n"] == n
    done = run("monitor", "stream.jsonl", *options)
    assert json.loads(done.out)["n"] == 70  # the file's lines are not read again


def waited_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def folded(state):
    return ss.Monitor.load(state).n if state.exists() else 0


@pytest.fixture
def interruptible():
    """Tests that run in the background ignore interrupts, and so does what they start."""
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, usual)


@pytest.fixture
def following(folder, interruptible):
    """Start to follow; whatever still runs at the end of the test is killed."""
    started = []

    def start(*options, follow=True):
        command = [*COMMAND, "stream.jsonl", *EPSILON, "--state", "state.json"]
        command += ["--follow"] * follow
        started.append(
            subprocess.Popen(
                [*command, *options], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_following_until_the_alarm_through_a_kill(folder, following):
    path, state = folder / "stream.jsonl", folder / "state.json"
    path.write_text('{"loss": 0}\n' * 20 + '{"lo')
    first = following()
    waited_for(lambda: folded(state) == 20)
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    second = following()
    with path.open("a") as file:
        file.write('ss": 0}\n')
    waited_for(lambda: folded(state) == 21)
    with path.open("a") as file:
        file.write('{"loss": 1}\n' * 30)
    out, err = second.communicate(timeout=30)
    assert (second.returncode, err) == (1, b"")
    assert out.startswith(b"Alarm at loss 2")


def test_following_ends_with_an_interrupt(folder, following):
    path = folder / "stream.jsonl"
    path.write_text('{"loss": 0}\n' * 20)
    process = following()
    waited_for(lambda: folded(folder / "state.json") == 20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, b"")
    assert b"No alarm" in out


def test_an_interrupt_waits_until_what_was_read_is_kept(run, folder, monkeypatch, interruptible):
    (folder / "stream.jsonl").write_text('{"loss": 0}\n' * 20)
    save, left = Watch.save, ["an interrupt"]

    def interrupted(watch, path):
        if left:
            left.pop()
            signal.raise_signal(signal.SIGINT)
        save(watch, path)

    monkeypatch.setattr(Watch, "save", interrupted)
    done = run("monitor", "stream.jsonl", *EPSILON, "--follow", "--state", "state.json")
    assert (done.status, "No alarm" in done.out, left) == (0, True, [])
    assert folded(folder / "state.json") == 20


def test_a_followed_file_that_shrinks(folder, following):
    path = folder / "stream.jsonl"
    path.write_text('{"loss": 0}\n' * 20)
    process = following()
    waited_for(lambda: folded(folder / "state.json") == 20)
    path.write_text("")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert b"became shorter" in err


# ------------------------------------------------------------------------- states and their disks


def test_an_alarm_is_shown_before_a_failure_to_save(run, folder, monkeypatch):
    from swiftsure.monitor import Watch

    def full(_watch, path):
        raise OSError(28, f"{path} could not be written: No space left on device")

    monkeypatch.setattr(Watch, "save", full)
    stream(folder / "stream.jsonl", [1.0] * 50)
    done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
    assert done.status == 1
    assert done.out.startswith("Alarm at loss ")
    assert "the state was not saved" in done.err
    assert "No space left on device" in done.err
    stream(folder / "stream.jsonl", [0.0] * 50)
    done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
    assert done.status == 2
    assert done.out.startswith("No alarm")


def test_a_state_in_use_is_refused(run, folder):
    from swiftsure._lib.files import locked

    stream(folder / "stream.jsonl", [0.0] * 50)
    with locked(folder / ".state.json.run"):
        done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
    assert_refused(done, "is locked by another process")
    assert run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json").status == 0


def test_what_came_through_a_pipe_survives_a_kill(folder, following):
    os.mkfifo(folder / "stream.jsonl")
    process = following()
    with (folder / "stream.jsonl").open("wb", buffering=0) as pipe:
        for _ in range(40):
            pipe.write(b'{"loss": 0}\n')
        pipe.write(b'{"lo')
        journal = folder / "state.json.journal"
        waited_for(lambda: journal.exists() and journal.read_bytes().endswith(b'{"lo'))
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    (folder / "stream.jsonl").unlink()
    stream(folder / "stream.jsonl", [0.0] * 10)
    done = following("--from-start", follow=False)
    _, err = done.communicate(timeout=30)
    assert (done.returncode, err) == (0, b"")
    assert folded(folder / "state.json") == 50
    assert not journal.exists()


def test_a_large_state_is_not_written_for_every_chunk(run, folder, monkeypatch):
    from swiftsure.cli import monitor as command
    from swiftsure.monitor import Watch

    monkeypatch.setattr(command, "CHUNK", 1 << 12)
    saves, save = [], Watch.save

    def slow(watch, path):
        saves.append(path)
        time.sleep(0.1)
        save(watch, path)

    monkeypatch.setattr(Watch, "save", slow)
    lines = [f'{{"id": {i}}}' for i in range(20_000)]  # 280 kB, 70 chunks
    (folder / "stream.jsonl").write_text("\n".join(lines) + "\n")
    done = run("monitor", "stream.jsonl", *EPSILON, "--state", "state.json")
    assert done.status == 0, done.err
    assert len(saves) <= 4


# ------------------------------------------------------------------------------------ several logs


def log(folder, name, losses, start=0.0):
    lines = [
        json.dumps({"id": f"{name}-{k}", "time": start + k, "loss": float(loss)}) + "\n"
        for k, loss in enumerate(losses)
    ]
    (folder / f"{name}.jsonl").write_text("".join(lines))


def test_several_logs_are_one_stream(run, tmp_path):
    (tmp_path / "logs").mkdir()
    log(tmp_path / "logs", "a", drawn(300, 0.03, 0))
    log(tmp_path / "logs", "b", drawn(300, 0.03, 1), start=0.5)
    options = (*EPSILON, "--state", "state.json", "--json")
    found = json.loads(run("monitor", "logs/a.jsonl", "logs/b.jsonl", *options).out)
    assert found["n"] == 600
    assert json.loads(run("monitor", "logs", *options).out) == found  # each line counts once
    log(tmp_path / "logs", "c", np.ones(400), start=1000)
    done = run("monitor", "logs", *options)
    assert done.status == 1
    assert json.loads(done.out)["alarm"] is True


def test_new_lines_wait_until_other_logs_have_theirs(run, tmp_path, monkeypatch):
    monkeypatch.setattr("swiftsure.cli.monitor.SETTLE", 3600.0)
    log(tmp_path, "a", drawn(50, 0.03))
    log(tmp_path, "b", drawn(50, 0.03), start=time.time() - 600)
    options = (*EPSILON, "--json")
    both = run("monitor", "a.jsonl", "b.jsonl", *options, "--state", "state.json")
    assert json.loads(both.out)["n"] == 50
    assert json.loads(run("monitor", "a.jsonl", "b.jsonl", *options).out)["n"] == 100


def test_pipes_and_rotation_are_for_a_single_stream(run, tmp_path):
    log(tmp_path, "a", drawn(50, 0.03))
    assert_refused(run("monitor", "a.jsonl", "-", *EPSILON), "`streams` must be files")
    assert_refused(run("monitor", ".", *EPSILON, "--from-start"), "`streams` must be files")
