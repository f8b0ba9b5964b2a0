"""The command line: `swiftsure VERB`, one file a verb."""

from swiftsure.cli.app import main

__all__ = ["main"]
