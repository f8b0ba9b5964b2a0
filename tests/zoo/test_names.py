"""The names of the zoo, and what importing it loads."""

import subprocess
import sys

import pytest

import swiftsure_zoo as zoo


@pytest.mark.parametrize("name", zoo.__all__)
def test_every_public_name_resolves(name):
    assert getattr(zoo, name).__doc__
    assert name in dir(zoo)


def test_other_names_do_not():
    with pytest.raises(AttributeError, match="module 'swiftsure_zoo' has no attribute 'nonsense'"):
        _ = zoo.nonsense


def test_records_need_no_torch():
    code = "import sys; from swiftsure_zoo import records; records.calibration_record()"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)
