"""What the library did when it was frozen, it still does: policies, studies, commands, exits."""

import json
import shutil
from importlib.util import find_spec

import pytest

from tests.golden import cases, commands, runtimes
from tests.golden.frozen import FOLDER, Frozen, differences, in_short, parted, plain, written

GROUPS = {
    "policies": cases.POLICIES,
    "studies": cases.STUDIES,
    "commands": commands.COMMANDS,
    "exits": runtimes.EXITS,
}
LARGEST = 300_000
"""Bytes of all golden files."""


def has_gpu():
    if find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.mark.parametrize("name", cases.POLICIES)
def test_policies(name, golden):
    golden("policies", name, cases.describe(cases.policy_of(name)))


@pytest.mark.parametrize("name", cases.STUDIES)
def test_studies(name, golden):
    golden("studies", name, cases.study_of(name))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    commands.write_files(folder)
    return folder


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_commands(name, golden, files, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    golden("commands", name, commands.printed(name, tmp_path, monkeypatch))


@pytest.mark.parametrize("name", runtimes.EXITS)
def test_exits(name, golden):
    golden("exits", name, runtimes.EXITS[name]())


@pytest.mark.skipif(not has_gpu(), reason="needs a GPU")
@pytest.mark.parametrize("name", sorted(runtimes.ON_GPU))
def test_exits_on_a_gpu(name, golden, freeze):
    """They are those of a CPU."""
    if freeze is not None:
        pytest.skip("what is frozen is a CPU's")
    with runtimes.exact():
        golden("exits", name, runtimes.EXITS[name]("cuda"))


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_else_is_frozen(group, freeze):
    frozen = Frozen(group)
    if freeze is not None:
        frozen.keep_only(GROUPS[group])
    assert frozen.names() == set(GROUPS[group])


def test_golden_files_are_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < LARGEST


# ------------------------------------------------------------------------------- what is noticed


NAME = "mean_gap_of_brier_losses"


def leaves(value, where=()):
    """Every number in a value, with its place."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, (*where, key))
    elif isinstance(value, float):
        yield where, value


def changed(value, where, number):
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = number
    return copy


def test_a_changed_number_is_noticed():
    found = plain(cases.describe(cases.policy_of(NAME)))
    frozen = Frozen("policies")
    assert frozen.differences(NAME, found) == {}
    places = list(leaves(found))
    assert len(places) > 12
    for where, number in places:
        other = number * (1 + 1e-8) if number else 1e-8
        noticed = frozen.differences(NAME, changed(found, where, other))
        assert list(noticed) == ["numbers"]
        assert len(noticed["numbers"]) == 1
        assert str(where[-1]) in noticed["numbers"][0]
        assert frozen.differences(NAME, changed(found, where, number * (1 + 1e-11))) == {}


def test_another_level_is_noticed():
    other = cases.calibrated(loss="brier", epsilon=0.0501)
    noticed = Frozen("policies").differences(NAME, cases.describe(other))
    assert any(".epsilon: 0.05 -> 0.0501" in line for line in noticed["numbers"])
    assert any(".sentence: " in line for line in noticed["words"])


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": 1, "b": [0.5, 2]}, "case: 1 -> "),
        ({"a": 2}, "case.b: gone"),
        ({"a": 1, "b": [0.5], "c": None}, "case.c: new"),
        ({"a": True, "b": [0.5]}, "case.a: 1 -> true"),
        ({"a": 1, "b": [0.25]}, "case.b[0]: 0.5 -> 0.25"),
        ({"a": 1, "b": []}, "case.b: [0.5] -> []"),
    ],
)
def test_other_values_are_noticed(value, where):
    before = 1 if where.startswith("case: ") else {"a": 1, "b": [0.5]}
    assert any(line.startswith(where) for line in differences(before, value, "case"))
    assert list(differences(value, value)) == []


def test_numbers_and_words_are_told_apart():
    value = {"n": 3, "loss": "brier", "text": "is at most 1", "rows": [{"a": None}, "two words"]}
    numbers, words = parted(value)
    assert numbers == {"n": 3, "loss": "brier", "rows": [{"a": None}, None]}
    assert words == {"text": "is at most 1", "rows": [None, "two words"]}
    assert parted("one text") == (None, "one text")
    assert json.loads(written(value)) == value


def test_long_lists_are_told_apart_by_every_entry():
    values = [k % 7 / 7 for k in range(500)]
    for k in (0, 250, 499):
        other = [*values[:k], values[k] + 1e-4, *values[k + 1 :]]
        assert list(differences(in_short(values), in_short(other)))
    assert list(differences(in_short(values), in_short([values[1], values[0], *values[2:]])))
    assert plain(values) == in_short(values)


def test_freezing_shows_what_changed(tmp_path):
    frozen = Frozen("some", tmp_path)
    assert frozen.freeze("a", {"n": 1, "text": "in words"}, "all")
    assert frozen.freeze("b", {"n": 1.5}, "all")
    assert frozen.freeze("a", {"n": 1, "text": "in words"}, "all") == []
    assert frozen.freeze("a", {"n": 2, "text": "in other words"}, "words") == [
        'a.text: "in words" -> "in other words"'
    ]
    assert frozen.load("numbers") == {"a": {"n": 1}, "b": {"n": 1.5}}
    assert list(frozen.differences("a", {"n": 2, "text": "in other words"})) == ["numbers"]
    frozen.keep_only(["b"])
    assert frozen.names() == {"b"}
    assert {path.name for path in tmp_path.iterdir()} == {"some.json"}
