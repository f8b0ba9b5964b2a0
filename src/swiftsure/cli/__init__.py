"""The command line: `swiftsure COMMAND`, one file per command."""

from swiftsure.cli.app import main

__all__ = ["main"]
