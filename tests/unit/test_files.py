"""Files are written whole or not at all."""

import os
import stat

import pytest

from swiftsure.files import atomic_write, write_text


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
