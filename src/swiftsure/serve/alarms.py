"""Tells people of an alarm: runs a command, or sends a request to an address."""

import json
import logging
import os
import shlex
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from urllib.parse import urlsplit

__all__ = ["alarm_hook"]

log = logging.getLogger("swiftsure.serve")

SECONDS = 30.0
"""How long the command or the address may take."""
TRIES = 3


def alarm_hook(target: str | None) -> Callable[[str, str], None] | None:
    """Return a function that tells a command or an address of an alarm, in a thread.

    A command gets JSON on its standard input, and the reason in SWIFTSURE_ALARM. An address gets
    the same JSON as a POST request. Failures are tried again and logged; they never stop the
    server.

    Parameters
    ----------
    target : str, optional
        A command as a shell would split it, or an http or https address; None for no hook.

    Raises
    ------
    ValueError
        If it is neither.
    """
    if target is None:
        return None
    if "://" in target and urlsplit(target).scheme not in ("http", "https"):
        raise ValueError(f"`on_alarm` must be an http or https address, but got {target!r}.")
    command = [] if "://" in target else shlex.split(target)
    if "://" not in target and not command:
        raise ValueError("`on_alarm` must be a command or an address, but is empty.")

    def tell(reason: str, state: str) -> None:
        content = {"alarm": reason, "answers": state, "time": time.time()}
        body = json.dumps(content).encode()
        work = threading.Thread(
            target=_try, args=(target, command, body, reason), name="on-alarm", daemon=True
        )
        work.start()

    return tell


def _try(target: str, command: list[str], body: bytes, reason: str) -> None:
    for attempt in range(TRIES):
        try:
            if command:
                more = {**os.environ, "SWIFTSURE_ALARM": reason}
                subprocess.run(command, input=body, env=more, timeout=SECONDS, check=True)
            else:
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(target, body, headers)
                urllib.request.urlopen(request, timeout=SECONDS).close()
        except Exception as error:
            log.error("on_alarm failed (%s)", type(error).__name__)  # an address may hold a key
            time.sleep(attempt + 1.0)
        else:
            return
