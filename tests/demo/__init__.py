"""The small network that comes with the library."""
