"""`Engine`: what a server needs from a model, in any framework.

A request goes through an engine in this order:

| step | method | where it runs |
|---|---|---|
| a body was parsed | `inputs.sample` checks one sample | the server's event loop |
| a batch is ready | `answer` answers several samples | a thread, or a process, of the batcher |
| the request is audited | `compare` asks the full model too | the same, when it is idle |
| a policy is to be installed | `check` refuses one of another model | any thread |
| its answers are to be audited | `check_loss` refuses a loss that it cannot compute | any thread |
| a policy was installed | `install` replaces the policy | that of `answer`, between batches |

A sample and an answer must be picklable, so that an engine can run in a worker process. An engine
whose `lanes` is above 1 is called from that many threads at once: one that waits for other servers
can have many batches under way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from swiftsure.certify.policy import Policy

__all__ = [
    "Answer",
    "Comparison",
    "Engine",
    "ExitCosts",
    "Inputs",
    "InvalidRequestError",
    "UnansweredError",
]


class UnansweredError(RuntimeError):
    """The full model, which is another server, did not answer, so no loss is known."""


class InvalidRequestError(ValueError):
    """A request cannot be answered, and that is its own fault; the message goes to the client."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one sample.

    Attributes
    ----------
    content : dict
        What the client gets, ready for JSON.
    exit : int
        0-based.
    confidence : float, optional
        The confidence at that exit; None if there is none.
    output
        What `compare` compares with the full model's output, if the sample is audited.
    """

    content: dict[str, Any]
    exit: int
    confidence: float | None
    output: Any = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """An answer and the full model's answer to the same sample.

    Attributes
    ----------
    inconsistency : float
        The loss of the answer against the full model's.
    served, full : list of float, optional
        Class probabilities of both, if there are any: a gap can be computed from them once the
        label is known.
    """

    inconsistency: float
    served: Sequence[float] | None = None
    full: Sequence[float] | None = None


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


class Inputs(Protocol):
    """Checks the inputs of requests."""

    def sample(self, inputs: Any) -> Any:
        """Return a checked sample from parsed JSON, or from an array, without the batch axis.

        Raises
        ------
        InvalidRequestError
            If the inputs have another shape or dtype, or are not finite.
        """

    def samples(self, inputs: Any) -> Sequence[Any] | NDArray[Any] | None:
        """Return the samples, not yet checked, in an array with a batch axis; None if it is one.

        An array is returned as it is: its rows are counted before they are taken apart.
        """


class Engine(Protocol):
    """A model under a policy; see the module for when its methods are called.

    Attributes
    ----------
    policy : Policy
        The one in use; `install` replaces it.
    n_exits : int
    costs : mapping from str to ExitCosts
        By unit, such as "flops" or "money"; the live page shows the first. May be empty.
    lanes : int
        How many calls of `answer` may run at once.
    inputs : Inputs
        Checks samples; picklable, so that the server can check them before a worker gets them.
    """

    n_exits: int
    lanes: int

    @property
    def policy(self) -> Policy:
        """The policy in use."""

    @property
    def costs(self) -> Mapping[str, ExitCosts]:
        """What a request costs, by unit."""

    @property
    def inputs(self) -> Inputs:
        """What checks samples."""

    def answer(self, samples: Sequence[Any], *, full: bool) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample, under the policy or by the full model.

        A sample that has no valid answer gets an error, and the others get theirs.
        """

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Return how an answer compares with the full model's, for an audit."""

    def check(self, policy: Policy) -> None:
        """Raise `ValueError` if a policy was made for another model, score or number of exits."""

    def check_loss(self, loss: str) -> None:
        """Raise `ValueError` if `compare` cannot compute a loss for this model."""

    def install(self, policy: Policy) -> None:
        """Use another policy, which was checked, for all later calls."""
