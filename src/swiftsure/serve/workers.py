"""`WorkerEngine`: an engine in a process of its own, which is replaced if it dies."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from swiftsure.serve.engine import (
    Answer,
    AnyPolicy,
    Comparison,
    Description,
    Engine,
    ExitCosts,
    Inputs,
    InvalidRequestError,
    Part,
    joins,
)
from swiftsure.serve.queueing import WorkerDiedError

__all__ = ["Spare", "WorkerEngine"]

GONE = (EOFError, OSError)

LOWEST = 19
"""Priority of a thread that only runs where the processor would be idle."""


class _Loaded(NamedTuple):
    """What the server must know of an engine in another process."""

    policy: AnyPolicy
    n_exits: int
    room: int
    costs: Mapping[str, ExitCosts]
    inputs: Inputs
    description: Description


class _Process:
    """A process that loads an engine, and a pipe to it.

    `aside` loads it with the lowest priority, so that it takes no time from those that answer.
    """

    def __init__(
        self, make: Callable[[], Engine], threads: int | None, *, aside: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(
            target=_work, args=(other, make, threads, aside), daemon=True
        )
        self.process.start()
        other.close()

    def loaded(self) -> "_Loaded":
        """Wait for the engine, and return what the server must know of it."""
        try:
            answered, found = self.pipe.recv()
        except GONE:
            self.process.join()
            raise RuntimeError(
                f"A worker ended before its model was loaded (exit code {self.process.exitcode})."
            ) from None
        if not answered:
            raise found
        engine: _Loaded = found
        return engine

    def has_loaded(self) -> bool:
        """Return whether `loaded` need not wait."""
        return self.process.is_alive() and self.pipe.poll()

    def close(self, wait: float = 0) -> None:
        """End the process, after at most so many seconds."""
        self.pipe.close()
        self.process.join(wait)
        self.process.kill()


class Spare:
    """A process that has loaded its model already, for whichever worker dies next.

    Parameters
    ----------
    make, threads
        As for `WorkerEngine`.
    """

    def __init__(self, make: Callable[[], Engine], threads: int | None = None) -> None:
        self._start = partial(_Process, make, threads)
        self._lock = threading.Lock()
        self._next = self._start(aside=True)

    def take(self) -> _Process:
        """Return the process, and start another one; if it still loads, return one in a hurry."""
        with self._lock:
            if self._next.has_loaded():
                taken, self._next = self._next, self._start(aside=True)
                return taken
            if not self._next.process.is_alive():
                self._next.close()
                self._next = self._start(aside=True)
        return self._start()

    def close(self) -> None:
        """End the process."""
        self._next.close()


class WorkerEngine:
    """Runs the engine that a function returns in another process.

    Parameters
    ----------
    make : callable
        Returns the engine; picklable, since the process is spawned.
    threads : int, optional
        Threads for the numerical libraries of the process; all cores by default.
    spare : Spare, optional
        Replaces the process at once if it dies; otherwise another one is started first. Several
        workers may have the same.

    Attributes
    ----------
    pid : int
        Of the process.
    """

    lanes = 1
    policy: AnyPolicy
    n_exits: int
    room: int
    costs: Mapping[str, ExitCosts]
    inputs: Inputs

    def __init__(
        self,
        make: Callable[[], Engine],
        threads: int | None = None,
        spare: Spare | None = None,
    ) -> None:
        self._start = partial(_Process, make, threads)
        self.spare = spare
        self._lock = threading.Lock()
        self._use(self._start())

    def describe(self) -> Description:
        """Return what goes in and out."""
        return self._description

    def measure(self) -> None:
        """Time the exits and the full model."""
        self.costs = self._ask("measure")

    def answer(
        self, samples: Sequence[Any], *, full: bool, slices: Sequence[str | None] = ()
    ) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample."""
        found: list[Answer | InvalidRequestError] = self._ask(
            "answer", samples, full=full, slices=slices
        )
        return found

    def join(
        self, key: int, sample: Any, *, full: bool, slice_name: str | None = None
    ) -> InvalidRequestError | None:
        """Add a request to those under way."""
        found: InvalidRequestError | None = self._ask(
            "join", key, sample, full=full, slice_name=slice_name
        )
        return found

    def step(self) -> Sequence[tuple[int, Part | Answer | InvalidRequestError]]:
        """Advance all requests under way."""
        found: Sequence[tuple[int, Part | Answer | InvalidRequestError]] = self._ask("step")
        return found

    def leave(self, key: int) -> None:
        """Give a request up."""
        self._ask("leave", key)

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Return how an answer compares with the full model's."""
        found: Comparison = self._ask("compare", sample, answer, loss)
        return found

    def check(self, policy: AnyPolicy) -> None:
        """Raise if a policy was made for another model."""
        self._ask("check", policy)

    def check_loss(self, loss: str) -> None:
        """Raise if `compare` cannot compute a loss."""
        self._ask("check_loss", loss)

    def install(self, policy: AnyPolicy) -> None:
        """Use another policy for all later calls."""
        self._ask("install", policy)
        self.policy = policy

    def close(self) -> None:
        """End the process, and the spare one."""
        self._worker.close(10)
        if self.spare is not None:
            self.spare.close()

    @property
    def pid(self) -> int:
        """The id of the process."""
        found = self._worker.process.pid
        return -1 if found is None else found

    def _use(self, worker: _Process) -> None:
        found = worker.loaded()
        self._worker = worker
        self.policy, self.n_exits, self.room, self.costs, self.inputs, self._description = found

    def _revive(self) -> None:
        with self._lock:
            worker = self._worker
            if worker.process.is_alive() and not worker.pipe.closed:
                return
            worker.process.kill()
            worker.process.join()
            self._use(self._start() if self.spare is None else self.spare.take())

    def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            try:
                self._worker.pipe.send((method, arguments, named))
                answered, found = self._worker.pipe.recv()
            except GONE:
                self._worker.process.join(1)
                self._worker.pipe.close()
                why = f"process {self.pid}, exit code {self._worker.process.exitcode}"
                raise WorkerDiedError(why, self._revive) from None
        if not answered:
            raise found
        return found


def _work(pipe: Connection, make: Callable[[], Engine], threads: int | None, aside: bool) -> None:
    """Answer calls until the server closes the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        engine = _made_aside(make) if aside else make()
        _limit_threads(threads)
        # The model and the imports stay for good: going through them stops answers for 250 ms.
        gc.collect()
        gc.freeze()
        room = engine.room if joins(engine) else 0
        pipe.send(
            (
                True,
                _Loaded(
                    engine.policy,
                    engine.n_exits,
                    room,
                    dict(engine.costs),
                    engine.inputs,
                    engine.describe(),
                ),
            )
        )
    except Exception as error:
        pipe.send((False, _plain(error)))
        return
    while True:
        try:
            method, arguments, named = pipe.recv()
        except EOFError:
            return
        try:
            found = getattr(engine, method)(*arguments, **named)
            reply = (True, dict(engine.costs) if method == "measure" else found)
        except Exception as error:
            reply = (False, _plain(error))
        try:
            pipe.send(reply)
        except OSError:  # the server died
            return


def _made_aside(make: Callable[[], Engine]) -> Engine:
    """Return an engine that was loaded in a thread of low priority; calls run in the main one."""
    with ThreadPoolExecutor(1, initializer=_step_back) as side:
        return side.submit(make).result()


def _step_back() -> None:
    if sys.platform == "linux":  # where threads have priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


def _limit_threads(threads: int | None) -> None:
    torch = sys.modules.get("torch")  # only if the engine has loaded it
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def _plain(error: Exception) -> Exception:
    """Return an error that any process can read."""
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(str(error) if kind is ValueError else f"{type(error).__name__}: {error}")
