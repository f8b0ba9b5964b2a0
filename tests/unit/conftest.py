"""Settings shared by the unit tests."""

from hypothesis import settings

# The first call of a compiled function takes seconds, which says nothing about the example.
settings.register_profile("compiled", deadline=None)
settings.load_profile("compiled")
