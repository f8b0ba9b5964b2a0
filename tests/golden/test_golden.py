"""What the library did when it was frozen, it still does: policies, studies, commands, exits."""

import shutil

import pytest

from golden import cases, commands
from golden.frozen import Frozen


@pytest.mark.parametrize("name", cases.POLICIES)
def test_policies(name, golden):
    golden("policies", name, cases.describe(cases.policy_of(name)))


@pytest.mark.parametrize("name", cases.STUDIES)
def test_studies(name, golden):
    golden("studies", name, cases.STUDIES[name]())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    commands.write_files(folder)
    return folder


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_commands(name, golden, files, tmp_path, monkeypatch):
    for path in files.iterdir():
        shutil.copy(path, tmp_path)
    golden("commands", name, commands.printed(name, tmp_path, monkeypatch))
