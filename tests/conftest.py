"""Settings of all tests."""

import os

# Several workers share the cores: threads of their own would only wait for each other. Before
# anything that reads it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import random

import pytest
from hypothesis import settings

from swiftsure.curves import sample_order

# Properties look at the same examples in every run; the first call of a compiled function takes
# seconds, which says nothing about the example.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def _outside_of_tests(bits: int) -> int:
    """Return the seed of every record that is made outside of a test, by a module or a fixture."""
    return 1


# Records draw the seed of their samples' order from the operating system. Tests draw the same seeds
# in every run.
sample_order.randbits = _outside_of_tests


@pytest.fixture(autouse=True)
def _same_seeds():
    sample_order.randbits = random.Random(0).getrandbits
    yield
    sample_order.randbits = _outside_of_tests
