"""One browser for all tests; none where it is not installed."""

import pytest

from tests.browser.driver import Browser, missing_program


@pytest.fixture(scope="session")
def browser():
    missing = missing_program()
    if missing is not None:
        pytest.skip(f"{missing} is not installed (Debian: apt install chromium chromium-driver)")
    with Browser() as window:
        yield window
