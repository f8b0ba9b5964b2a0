"""`Stream`: gathers samples that remain from several batches, so that late stages run full."""

from swiftsure.onnx.results import ExitOutput, StreamResult
from swiftsure.onnx.runtime import EarlyExit
from swiftsure.run.stages import Assembly, Exited
from swiftsure.run.streaming import StageStream

__all__ = ["Stream"]


class Stream(StageStream[StreamResult, ExitOutput]):
    """Runs late stages on full batches, as `swiftsure.torch.Stream` does.

    Parameters
    ----------
    fast : EarlyExit
    batch_size : int
        How many samples a stage runs at once.
    max_wait : int
        After how many further pushes a stage runs a batch that is not full.

    Notes
    -----
    A stream is not thread-safe. Threads may share the `EarlyExit`, each with its own stream.
    """

    def __init__(self, fast: EarlyExit, batch_size: int, max_wait: int = 32) -> None:
        if not isinstance(fast, EarlyExit):
            raise TypeError(f"`fast` must be an EarlyExit, but got {type(fast).__name__}.")
        super().__init__(fast.loop, batch_size, max_wait)
        self.fast = fast

    def _result(self, exited: Exited) -> StreamResult:
        return self.fast.executor.result(exited)

    def _output(self, done: Assembly) -> ExitOutput:
        return self.fast.executor.output(done, None)
