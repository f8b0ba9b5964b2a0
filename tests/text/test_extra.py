"""Whether what these tests need is there."""

import pytest

HOW = "generation is not tested: pip install 'swiftsure[text]'"


def test_the_text_extra_is_installed():
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=HOW)
    import swiftsure.text

    assert all(getattr(swiftsure.text, name).__doc__ for name in swiftsure.text.__all__)
