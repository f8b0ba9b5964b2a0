"""Settings of all tests."""

import os

# Several workers share the cores: threads of their own would only wait for each other. Before
# anything that reads it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# Properties look at the same examples in every run; the first call of a compiled function takes
# seconds, which says nothing about the example.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
