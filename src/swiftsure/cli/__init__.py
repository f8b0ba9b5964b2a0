"""The command line: `swiftsure VERB`, one file per verb."""

from swiftsure.cli.app import main

__all__ = ["main"]
