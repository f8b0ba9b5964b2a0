"""The second distribution: published networks, trained ones, and dataset readers."""
