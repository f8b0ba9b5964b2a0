"""`Engine`: what a server needs from a model, in any framework."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from swiftsure.policy import Policy

__all__ = ["Answer", "Engine", "ExitCosts", "InvalidRequestError"]


class InvalidRequestError(ValueError):
    """A request cannot be answered, and that is its own fault; the message goes to the client."""


@dataclass(frozen=True)
class Answer:
    """The answer to one request.

    Attributes
    ----------
    content : dict
        What the client gets, ready for JSON.
    exit : int
        0-based.
    confidence : float, optional
        The confidence at that exit; None if there is none.
    output
        What the engine compares with the full model's output in an audit.
    full : bool
        Whether the full model was asked; the server fills this in.
    """

    content: dict[str, Any]
    exit: int
    confidence: float | None
    output: Any
    full: bool = False


@dataclass(frozen=True)
class ExitCosts:
    """Cost of one request in one unit.

    Attributes
    ----------
    exits : tuple of float
        Of an answer at each exit.
    full : float
        Of the full model alone.
    """

    exits: tuple[float, ...]
    full: float


class Engine(Protocol):
    """A model under a policy. All calls but `sample` come from one thread.

    Attributes
    ----------
    policy : Policy
    n_exits : int
    costs : dict from str to ExitCosts
        By unit, such as "flops" or "money"; the live page shows the first. Optional.
    """

    policy: Policy
    n_exits: int

    def sample(self, inputs: Any) -> Any:
        """Return a checked sample from parsed JSON, or from an array, without the batch axis.

        Raises
        ------
        InvalidRequestError
            If the inputs have another shape or dtype, or are not finite.
        """

    def answer(self, samples: Sequence[Any], *, full: bool) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample, under the policy or by the full model.

        A sample that has no valid answer gets an error, and the others get theirs.
        """

    def inconsistency(self, sample: Any, answer: Answer, loss: str) -> float:
        """Return the loss of an answer against the full model's, for an audit."""
