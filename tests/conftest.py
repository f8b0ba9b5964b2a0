"""Settings of all tests."""

from hypothesis import settings

# Properties look at the same examples in every run; the first call of a compiled function takes
# seconds, which says nothing about the example.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
