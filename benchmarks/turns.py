"""Benchmarks that prepare side by side, such as by compiling, and then are timed one at a time."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run_in_turns", "wait_for_turn"]


def run_in_turns(
    commands: Sequence[Sequence[str]], folder: Path, n_at_once: int, prepare_seconds: float
) -> None:
    """Run commands that call `wait_for_turn` with the paths given as their `--turn`.

    Those that are not ready after `prepare_seconds` are stopped.
    """
    for first in range(0, len(commands), n_at_once):
        running = []
        for k, command in enumerate(commands[first : first + n_at_once], start=first):
            turn = folder / f"turn_{k}"
            process = subprocess.Popen([sys.executable, *command, "--turn", str(turn)])
            running.append((command, turn, process))
        end = time.monotonic() + prepare_seconds
        while time.monotonic() < end and not all(
            turn.with_suffix(".ready").exists() or process.poll() is not None
            for _, turn, process in running
        ):
            time.sleep(0.2)
        for command, turn, process in running:
            if process.poll() is None and not turn.with_suffix(".ready").exists():
                process.kill()
                print(f"not ready after {prepare_seconds:.0f} s: {' '.join(command)}", flush=True)
                process.wait()
        for _, turn, process in running:
            turn.with_suffix(".go").touch()
            process.wait()


def wait_for_turn(turn: Path) -> None:
    """Say that this process is ready, and wait until it may use the device alone."""
    turn.with_suffix(".ready").touch()
    while not turn.with_suffix(".go").exists():
        time.sleep(0.05)
