"""Freezes the golden files again, with `pytest tests/golden --freeze=all`."""

import pytest

from tests.golden.frozen import Frozen

CHANGED = []


def pytest_addoption(parser):
    parser.addoption(
        "--freeze",
        choices=["numbers", "words", "all"],
        help="write the golden files of tests/golden anew, and show what changed",
    )


def pytest_configure(config):
    if config.getoption("--freeze", None) and config.getoption("numprocesses", None):
        raise pytest.UsageError("--freeze writes files, so it goes without -n.")


@pytest.fixture
def freeze(request):
    """What to freeze, or None."""
    return request.config.getoption("--freeze", None)


@pytest.fixture
def golden(freeze):
    """Compare a case with what is frozen, or freeze it."""

    def compare(group, name, found):
        frozen = Frozen(group)
        if freeze is None:
            different = [line for each in frozen.differences(name, found).values() for line in each]
            assert not different, "\n".join(
                [
                    f"{name} differs from what is frozen:",
                    *different,
                    "If that is meant: pytest tests/golden --freeze=all (or numbers, or words)",
                ]
            )
        else:
            CHANGED.extend(frozen.freeze(name, found, freeze))

    return compare


def pytest_terminal_summary(terminalreporter):
    if terminalreporter.config.getoption("--freeze", None) is not None:
        terminalreporter.section("golden files")
        for line in CHANGED or ["nothing changed"]:
            terminalreporter.write_line(line)
