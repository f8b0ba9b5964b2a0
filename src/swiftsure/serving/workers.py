"""`WorkerEngine`: an engine in a process of its own, which is started again if it dies."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from swiftsure.policy import Policy
from swiftsure.serving.batching import WorkerDiedError
from swiftsure.serving.engine import (
    Answer,
    Comparison,
    Engine,
    ExitCosts,
    Inputs,
    InvalidRequestError,
)

__all__ = ["WorkerEngine"]

GONE = (EOFError, OSError)


class WorkerEngine:
    """Runs the engine that a function returns in another process.

    Parameters
    ----------
    make : callable
        Returns the engine; picklable, since the process is spawned.
    threads : int, optional
        Threads for the numerical libraries of the process; all cores by default.

    Attributes
    ----------
    pid : int
        Of the process.
    """

    lanes = 1
    policy: Policy
    n_exits: int
    costs: Mapping[str, ExitCosts]
    inputs: Inputs

    def __init__(self, make: Callable[[], Engine], threads: int | None = None) -> None:
        self._make, self._threads = make, threads
        self._lock = threading.Lock()
        self._start()

    def answer(self, samples: Sequence[Any], *, full: bool) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample."""
        found: list[Answer | InvalidRequestError] = self._ask("answer", samples, full=full)
        return found

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Return how an answer compares with the full model's."""
        found: Comparison = self._ask("compare", sample, answer, loss)
        return found

    def check(self, policy: Policy) -> None:
        """Raise if a policy was made for another model."""
        self._ask("check", policy)

    def check_loss(self, loss: str) -> None:
        """Raise if `compare` cannot compute a loss."""
        self._ask("check_loss", loss)

    def install(self, policy: Policy) -> None:
        """Use another policy for all later calls."""
        self._ask("install", policy)
        self.policy = policy

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(10)
        self._process.kill()

    @property
    def pid(self) -> int:
        """The id of the process."""
        found = self._process.pid
        return -1 if found is None else found

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_work, args=(other, self._make, self._threads), daemon=True
        )
        self._process.start()
        other.close()
        try:
            answered, found = self._pipe.recv()
        except GONE:
            self._process.join()
            raise RuntimeError(
                f"A worker ended before its model was loaded (exit code {self._process.exitcode})."
            ) from None
        if not answered:
            raise found
        self.policy, self.n_exits, self.costs, self.inputs = found

    def _revive(self) -> None:
        with self._lock:
            if self._process.is_alive() and not self._pipe.closed:
                return
            self._process.kill()
            self._process.join()
            self._start()

    def _ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send((method, arguments, named))
                answered, found = self._pipe.recv()
            except GONE:
                self._process.join(1)
                self._pipe.close()
                why = f"process {self.pid}, exit code {self._process.exitcode}"
                raise WorkerDiedError(why, self._revive) from None
        if not answered:
            raise found
        return found


def _work(pipe: Connection, make: Callable[[], Engine], threads: int | None) -> None:
    """Answer calls until the server closes the pipe, or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to end
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        engine = make()
        _limit_threads(threads)
        pipe.send((True, (engine.policy, engine.n_exits, dict(engine.costs), engine.inputs)))
    except Exception as error:
        pipe.send((False, _plain(error)))
        return
    while True:
        try:
            method, arguments, named = pipe.recv()
        except EOFError:
            return
        try:
            reply = (True, getattr(engine, method)(*arguments, **named))
        except Exception as error:
            reply = (False, _plain(error))
        try:
            pipe.send(reply)
        except OSError:  # the server died
            return


def _limit_threads(threads: int | None) -> None:
    torch = sys.modules.get("torch")  # only if the engine has loaded it
    if torch is not None and threads is not None:
        torch.set_num_threads(threads)


def _plain(error: Exception) -> Exception:
    """Return an error that any process can read."""
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(str(error) if kind is ValueError else f"{type(error).__name__}: {error}")
