"""`Engine`: what a server needs from a system under a policy, in any framework.

To serve another kind of system, write a class with the members of `Engine`, in a module of
`serve.engines`, and a class method `load(folder: Path, options: EngineOptions)` that returns one;
then add the file that marks its folders to `ENGINES` of `serve.loading`. A request meets it so:

| when | method | where it runs |
|---|---|---|
| a server starts | `load`, `measure`, `describe` | the main thread |
| a body was parsed | `inputs.sample` checks one sample | the server's event loop |
| a batch is ready | `answer` answers several samples | a thread, or a process, of the batcher |
| the request is audited | `compare` asks the full system too | the same, when no request waits |
| a policy is to be installed | `check` refuses one of another model | any thread |
| its answers are to be audited | `check_loss` refuses a loss that it cannot compute | any thread |
| a policy was installed | `install` replaces the policy | that of `answer`, between batches |

All else is done once for all engines: batches, queues and time-outs, audits, the monitor and its
alarm, policies that are installed while requests run, worker processes, Ray Serve, metrics, the
live page, `/docs`.

**Streams.** An engine whose requests join and leave a running batch, such as text between two
tokens, is a `StreamEngine`: it has `join`, `step` and `leave` beside the methods above, and its
lane calls them in a loop instead of `answer`. A request that joined is answered under the policy of
that moment: while another policy waits to be installed, nobody joins, and `install` is called once
all have left.

**Slices.** Under a `SlicedPolicy`, the slice of each sample comes with the batch, and one batch may
mix slices. A slice of None, or one that the policy does not know, gets the full system.

**OpenAI's API.** If `describe().completions` is True, the server also answers
`/v1/chat/completions` and `/v1/completions`. Their samples come to `inputs.sample` as a dict with
`prompt` (a text) or `messages` (a list of objects with `role` and `content`), and those of
`max_tokens`, `temperature`, `top_p`, `seed` and `stop` that were given; it refuses what the engine
cannot do. The content of an answer must have `text`, `finish_reason` ("stop" or "length"),
`prompt_tokens` and `completion_tokens`. Each `Part` of a stream is the text that was added.

Samples, parts and answers must be picklable, so that an engine can run in a worker process. An
engine whose `lanes` is above 1 is called from that many threads at once: one that waits for other
servers can have many batches under way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeGuard

from numpy.typing import NDArray

from swiftsure.certify.slices import AnyPolicy

__all__ = [
    "Answer",
    "AnyPolicy",
    "Comparison",
    "Description",
    "Engine",
    "EngineOptions",
    "ExitCosts",
    "Inputs",
    "InvalidRequestError",
    "Part",
    "StreamEngine",
    "UnansweredError",
    "answer_by_steps",
    "joins",
]


class UnansweredError(RuntimeError):
    """The full model, which is another server, did not answer, so no loss is known."""


class InvalidRequestError(ValueError):
    """The request is invalid (HTTP 422); the message is sent to the client."""


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
    costs : mapping, optional
        What this answer cost and what the full system's would have, by unit; by default what
        `Engine.costs` says of the exit.
    """

    content: dict[str, Any]
    exit: int
    confidence: float | None
    output: Any = None
    costs: "Mapping[str, tuple[float, float]] | None" = None


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer that is not complete yet, such as the text of the last tokens.

    Attributes
    ----------
    content : str or dict
        Ready for JSON; a client that streams gets it at once.
    """

    content: Any


@dataclass(frozen=True)
class Comparison:
    """An answer and the full model's answer to the same sample.

    Attributes
    ----------
    inconsistency : float
        The loss of the answer against the full model's.
    served, full : list of float, or str, optional
        Class probabilities or texts of both, if there are any: a gap can be computed from them once
        the label is known.
    """

    inconsistency: float
    served: Sequence[float] | str | None = None
    full: Sequence[float] | str | None = None


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


@dataclass(frozen=True)
class Description:
    """What an engine serves, for `/docs` and the names of models.

    Attributes
    ----------
    name : str
        Of the model, such as "MSDNet" or the folder's name.
    inputs, outputs : mapping
        JSON Schemas of one sample and of an answer's content.
    example
        One sample, as JSON; None if there is none.
    arrays : bool
        Whether a sample may also come as .npy or Arrow.
    completions : bool
        Whether the engine answers OpenAI's requests; see the module.
    """

    name: str
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)
    example: Any = None
    arrays: bool = True
    completions: bool = False


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is loaded; an engine refuses what it cannot use (`refuse_unused`).

    Attributes
    ----------
    network : callable, optional
        Returns the network to load weights into, if the folder does not say which it is.
    device : str, optional
        Such as "cuda"; where the system is by default.
    compile, capture : bool
        `torch.compile`, and CUDA graphs.
    providers : tuple of str
        Of ONNX Runtime, in the order of preference; those of the folder by default.
    threads : int, optional
        Threads for the model; all cores by default.
    room : int
        How many requests are under way at once in an engine that they join and leave.
    measure : bool
        Time the exits and the full model at start, for what is saved in seconds.
    """

    network: Callable[[], Any] | None = None
    device: str | None = None
    compile: bool = False
    capture: bool = False
    providers: tuple[str, ...] = ()
    threads: int | None = None
    room: int = 8
    measure: bool = True

    def refuse_unused(self, what: str, *used: str) -> None:
        """Raise if an option is set that an engine does not use, named by its fields.

        Examples
        --------
        >>> EngineOptions(device="cuda").refuse_unused("exported stages", "threads")
        Traceback (most recent call last):
        ValueError: `device` must not be given for exported stages.
        """
        plain = EngineOptions()
        for name in ("network", "device", "compile", "capture", "providers"):
            if name not in used and getattr(self, name) != getattr(plain, name):
                raise ValueError(f"`{name}` must not be given for {what}.")


class Inputs(Protocol):
    """Checks the inputs of requests; picklable, so that the server can check before a worker."""

    def sample(self, inputs: Any) -> Any:
        """Return a checked sample from parsed JSON, or from an array, without the batch axis.

        Raises
        ------
        InvalidRequestError
            If the inputs have another shape or dtype, or are not finite.
        """

    def covers(self, sample: Any, policy: "AnyPolicy") -> bool:
        """Return whether a policy says anything about a checked sample, and its options.

        If not, the full system answers it, and it is not audited.
        """

    def samples(self, inputs: Any) -> Sequence[Any] | NDArray[Any] | None:
        """Return the samples, not yet checked, in an array with a batch axis; None if it is one.

        An array is returned as it is: its rows are counted before they are taken apart.
        """


class Engine(Protocol):
    """A system under a policy; see the module for when its methods are called.

    Attributes
    ----------
    n_exits : int
        How many answers at different costs there may be; the last is the full system's.
    lanes : int
        How many calls of `answer` may run at once.
    """

    n_exits: int
    lanes: int

    @property
    def policy(self) -> AnyPolicy:
        """The policy in use; `install` replaces it."""

    @property
    def inputs(self) -> Inputs:
        """What checks samples."""

    @property
    def costs(self) -> Mapping[str, ExitCosts]:
        """What a request costs, by unit such as "flops"; the live page shows the first.

        With "seconds" once `measure` was called. May be empty.
        """

    def describe(self) -> Description:
        """Return what goes in and out."""

    def measure(self) -> None:
        """Time the exits and the full system with one request at a time, for `costs`."""

    def answer(
        self, samples: Sequence[Any], *, full: bool, slices: Sequence[str | None] = ()
    ) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample, under the policy or by the full system.

        A sample that has no valid answer gets an error, and the others get theirs. Any error that
        is raised instead makes the server run each sample alone.

        Parameters
        ----------
        slices : sequence of str or None
            One per sample under a policy of slices; empty otherwise.
        """

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Run the full system, and return how an answer compares with it, for an audit."""

    def check(self, policy: AnyPolicy) -> None:
        """Raise `ValueError` if a policy was made for another model, score or number of exits."""

    def check_loss(self, loss: str) -> None:
        """Raise `ValueError` if `compare` cannot compute a loss for this model."""

    def install(self, policy: AnyPolicy) -> None:
        """Use another policy, which was checked, for all later calls."""


class StreamEngine(Engine, Protocol):
    """An engine whose requests join and leave a running batch; `lanes` is 1.

    The lane of such an engine calls `join` for requests that wait while there is room, then `step`,
    and so on until nobody is left; audits run only then. `answer` is still needed: with
    `full=True`, for the audit of a request that has no answer. (`answer_by_steps` writes it.)

    Attributes
    ----------
    room : int
        How many requests may be under way at once.
    """

    room: int

    def join(
        self, key: int, sample: Any, *, full: bool, slice_name: str | None = None
    ) -> InvalidRequestError | None:
        """Add a request to those under way, or return why it cannot be answered.

        Requests of the policy and of the full system may be under way together.

        Parameters
        ----------
        key : int
            Names the request; no other one has it before this one left.
        """

    def step(self) -> Sequence[tuple[int, Part | Answer | InvalidRequestError]]:
        """Advance all requests under way once, such as by a token; return what became of them.

        A request has left once it got an answer or an error. One without anything new is left out.
        Any error that is raised removes all requests that are under way, which then fail.
        """

    def leave(self, key: int) -> None:
        """Give a request up, because its client went away or the time is over."""


def joins(engine: Engine) -> TypeGuard[StreamEngine]:
    """Return whether an engine's requests join a running batch."""
    return getattr(engine, "room", 0) > 0


def answer_by_steps(
    engine: StreamEngine, samples: Sequence[Any], *, full: bool, slices: Sequence[str | None] = ()
) -> list[Answer | InvalidRequestError]:
    """Return the answers to samples by `join` and `step`, while nothing else is under way."""
    done: dict[int, Answer | InvalidRequestError] = {}
    waiting = list(range(len(samples)))
    while len(done) < len(samples):
        while waiting and len(samples) - len(waiting) - len(done) < engine.room:
            key = waiting.pop(0)
            slice_name = slices[key] if slices else None
            refused = engine.join(key, samples[key], full=full, slice_name=slice_name)
            if refused is not None:
                done[key] = refused
        done.update((key, each) for key, each in engine.step() if not isinstance(each, Part))
    return [done[key] for key in range(len(samples))]
