"""Files are written whole or not at all."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swiftsure._lib.files import atomic_write, write_text


def contents(folder):
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def test_write_text_makes_and_replaces(tmp_path):
    write_text(tmp_path / "a.txt", "λ ≤ ε")
    assert contents(tmp_path) == {"a.txt": "λ ≤ ε"}
    write_text(str(tmp_path / "a.txt"), "new")
    assert contents(tmp_path) == {"a.txt": "new"}


def test_nothing_is_seen_at_the_target_before_the_end(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with atomic_write(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
        assert temporary.parent == tmp_path  # so that the replacement stays on one file system
    assert target.read_text() == "new"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_keeps_the_old_file_and_leaves_no_other(tmp_path, error):
    target = tmp_path / "a.txt"
    target.write_text("old")

    def fail_halfway():
        with atomic_write(target) as temporary:
            temporary.write_text("ha")
            raise error("halfway")

    with pytest.raises(error, match="halfway"):
        fail_halfway()
    assert contents(tmp_path) == {"a.txt": "old"}


def test_failure_makes_no_new_file(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a.txt", "\ud800")
    assert contents(tmp_path) == {}


def test_a_folder_in_the_way_is_left_alone(tmp_path):
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(ValueError, match=r"`path` must be a file, but .*a\.txt is a folder"):
        write_text(tmp_path / "a.txt", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_the_folder_must_exist(tmp_path):
    with pytest.raises(ValueError, match=r"`path` must be in an existing folder, but .*missing"):
        write_text(tmp_path / "missing" / "a.txt", "text")
    assert contents(tmp_path) == {}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_permissions_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_text(tmp_path / "ours", "")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert modes["ours"] == modes["plain"]


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "real" / "a.txt")
    write_text(link, "new")
    assert link.is_symlink()
    assert contents(tmp_path / "real") == {"a.txt": "new"}


def test_a_dangling_link_makes_its_target(tmp_path):
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "new.txt")
    write_text(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "new.txt").read_text() == "new"


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through the pipe")
    reader.join(timeout=10)
    assert received == ["through the pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_to_and_stays():
    write_text("/dev/null", "gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_standard_output_is_not_replaced(tmp_path, path):
    program = f"from swiftsure._lib.files import write_text; print(1); write_text({path!r}, '2\\n'); print(3)"
    with (tmp_path / "out").open("w") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "1\n2\n3\n"
    piped = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert piped.stdout == "1\n2\n3\n"


def test_permissions_of_an_existing_file_are_kept(tmp_path):
    target = tmp_path / "secret"
    target.write_text("old")
    target.chmod(0o600)
    write_text(target, "new")
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_temporary_files_of_dead_processes_are_removed(tmp_path):
    stale, foreign = tmp_path / ".a.txt.x1y2.part", tmp_path / ".b.txt.x1y2.part"
    for path in (stale, foreign):
        path.write_text("half")
        os.utime(path, (0, 0))
    write_text(tmp_path / "a.txt", "new")
    assert contents(tmp_path) == {"a.txt": "new", foreign.name: "half"}


def test_temporary_files_of_living_processes_stay(tmp_path):
    with atomic_write(tmp_path / "a.txt") as temporary:
        temporary.write_text("slow")
        os.utime(temporary, (0, 0))
        write_text(tmp_path / "a.txt", "quick")
        assert temporary.exists()
    assert contents(tmp_path) == {"a.txt": "slow"}


def test_the_file_and_its_folder_reach_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.fstat(handle).st_mode))
    write_text(tmp_path / "a.txt", "text")
    assert [stat.S_ISREG(synced[0]), stat.S_ISDIR(synced[1])] == [True, True]
    write_text(tmp_path / "a.txt", "text", durable=False)
    assert len(synced) == 2


def test_a_full_disk_names_the_file(tmp_path):
    target = tmp_path / "a.txt"

    def fail():
        with atomic_write(target):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"a\.txt could not be written: No space left on device"):
        fail()
    assert contents(tmp_path) == {}
