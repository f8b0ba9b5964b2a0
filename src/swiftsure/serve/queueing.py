"""What a lane of a batcher gets and returns: requests, outcomes, and a worker that died."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from swiftsure.serve.audits import Mode
from swiftsure.serve.engine import Answer, Part

__all__ = [
    "MOST_DEATHS",
    "BusyError",
    "Outcome",
    "Request",
    "Served",
    "Submission",
    "WorkerDiedError",
]

MOST_DEATHS = 3
"""A request fails if this many workers died while they ran it."""


class BusyError(RuntimeError):
    """The queue is full, or the server is shutting down: try again later."""


class WorkerDiedError(RuntimeError):
    """The process of an engine ended during a call; `revive` starts another one."""

    def __init__(self, message: str, revive: Callable[[], None]) -> None:
        super().__init__(message)
        self.revive = revive


class Served(NamedTuple):
    """An answer, and the mode that it was given in."""

    answer: Answer
    mode: Mode


class Submission(NamedTuple):
    """A sample to be answered.

    Attributes
    ----------
    request : str
        Its id.
    sample
        As `engine.inputs.sample` returned it.
    slice_name : str, optional
    done : Future
        Of `concurrent.futures` or asyncio; cancel it to withdraw the request.
    parts : object, optional
        What parts of the answer are delivered to; a client that does not stream has none.
    """

    request: str
    sample: Any
    slice_name: str | None
    done: Any
    parts: Any = None


@dataclass(slots=True, eq=False)
class Request:
    """A submission that was accepted.

    Attributes
    ----------
    covered : bool
        Whether the policy says anything about it; otherwise the full system answers.
    audit : int, optional
        Its ticket among the audited requests.
    since : float
        When it was accepted.
    deaths : int
        How many workers died while they ran it.
    """

    submission: Submission
    covered: bool
    audit: int | None
    since: float
    deaths: int = 0


Outcome = tuple[Any, Served | Part | Exception]
"""A future and its result or error, or a submission's `parts` and one of them."""
