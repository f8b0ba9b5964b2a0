"""`Stream`: gathers samples that remain from several batches, so that late stages run full."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from swiftsure.run.stages import Assembly, Exited
from swiftsure.run.streaming import StageStream, StreamError
from swiftsure.torch.captured_stream import CapturedStream
from swiftsure.torch.results import ExitOutput, StreamResult
from swiftsure.torch.runtime import EarlyExit

__all__ = ["Stream", "StreamError"]


class Stream(StageStream[StreamResult, ExitOutput]):
    """Runs late stages on full batches, for offline throughput and for serving.

    Samples that do not exit wait before the next stage until there are `batch_size` of them. At
    most `2 · batch_size` samples wait before any stage, so memory is bounded. No sample waits for
    more than `max_wait` further pushes, so waiting is bounded too.

    Parameters
    ----------
    fast : EarlyExit
    batch_size : int
        How many samples a stage runs at once.
    max_wait : int
        After how many further pushes a stage runs a batch that is not full.
    full : bool
        Run the full model as one captured graph, whatever the policy says; needs an `EarlyExit`
        with `capture`.

    Notes
    -----
    A stream is not thread-safe. Threads may share the `EarlyExit`, each with its own stream. If the
    `EarlyExit` captures, samples also wait before the first stage until there are `batch_size` of
    them, and results come a few stages later: the host learns who left while later stages run.

    Examples
    --------
    >>> stream = Stream(fast, batch_size=256)  # doctest: +SKIP
    >>> for output in stream.run(batches, ordered=True):
    ...     ...  # doctest: +SKIP
    """

    def __init__(
        self, fast: EarlyExit, batch_size: int, max_wait: int = 32, *, full: bool = False
    ) -> None:
        if not isinstance(fast, EarlyExit):
            raise TypeError(f"`fast` must be an EarlyExit, but got {type(fast).__name__}.")
        super().__init__(fast.loop, batch_size, max_wait)
        self.fast = fast
        self._captured: CapturedStream | None = None
        if fast.captures is not None:
            self._captured = CapturedStream(fast, fast.captures, batch_size, max_wait, full)
        elif full:
            raise ValueError("`full` needs EarlyExit(..., capture=True).")

    def push(self, batch: Any) -> list[StreamResult]:
        """Add a batch and return the samples that exited, from this batch or earlier ones.

        Raises
        ------
        StreamError
            If a stage fails. The samples that it ran are lost; the error names them. Those that
            exited are in the error's `results`. All others stay, and the stream can go on.
        """
        return self._checked(super().push if self._captured is None else self._captured.push, batch)

    def flush(self) -> list[StreamResult]:
        """Run all waiting samples and return their results; see `push` for errors."""
        return self._checked(super().flush if self._captured is None else self._captured.flush)

    def _checked(self, run: Callable[..., list[StreamResult]], *given: Any) -> list[StreamResult]:
        """Return the results of a call; the first ones must not be probabilities."""
        found = run(*given)
        for each in found[:1]:
            self.fast.check_first_outputs(each.raw)
        return found

    @property
    def pushed(self) -> int:
        """Number of samples that were ever added."""
        return super().pushed if self._captured is None else self._captured.pushed

    @property
    def in_flight(self) -> int:
        """Number of samples that have not exited yet."""
        return super().in_flight if self._captured is None else self._captured.in_flight

    def _run_ordered(self, batches: Iterable[Any]) -> Iterator[ExitOutput]:
        run = super()._run_ordered if self._captured is None else self._captured.run
        for out in run(batches):
            self.fast.check_first_outputs(out.raw)
            yield out

    def _result(self, exited: Exited) -> StreamResult:
        return self.fast.executor.result(exited, self.fast.on_invalid)

    def _output(self, done: Assembly) -> ExitOutput:
        return self.fast.executor.output(done, None, self.fast.on_invalid)
