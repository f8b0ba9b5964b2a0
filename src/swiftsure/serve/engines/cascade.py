"""`CascadeEngine`: functions, estimators or networks in a row, as an engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from swiftsure.cascade import Cascade, CascadeRunner
from swiftsure.cascade.answer_losses import answer_tables
from swiftsure.cascade.models import BatchModel
from swiftsure.losses import LOSSES
from swiftsure.serve.engine import (
    Answer,
    AnyPolicy,
    Comparison,
    Description,
    ExitCosts,
    InvalidRequestError,
    UnansweredError,
)
from swiftsure.serve.inputs import AnyInputs, InputForm

__all__ = ["CascadeEngine"]

CALLS = 8
"""How many batches are under way at once, where models may wait for other servers."""


class CascadeEngine:
    """Answers requests with a `Cascade` under a policy. The inputs are any JSON, or arrays.

    Parameters
    ----------
    cascade : Cascade
    policy : Policy or SlicedPolicy
    example : array, optional
        One input: requests must have its shape and dtype.
    """

    policy: AnyPolicy

    def __init__(
        self, cascade: Cascade, policy: AnyPolicy, example: Any = None, *, name: str = "cascade"
    ) -> None:
        self.cascade, self.name, self.n_exits = cascade, name, len(cascade.models)
        self.lanes = 1 if all(isinstance(each, BatchModel) for each in cascade.models) else CALLS
        self.inputs: AnyInputs | InputForm = AnyInputs()
        if example is not None:
            array = np.asarray(example)
            self.inputs = InputForm((array.shape, array.dtype))
        self.costs: dict[str, ExitCosts] = {}
        self._full = cascade.run(None)
        self.install(policy)

    def describe(self) -> Description:
        """Return what goes in and out."""
        outputs = {"answer": {}, "model": {"type": "string"}}
        return Description(self.name, self.inputs.schema(), outputs)

    def measure(self) -> None:
        """Do nothing: what an answer costs is what its models say."""

    def check(self, policy: AnyPolicy) -> None:
        """Raise if a policy was made for other models."""
        self.cascade.run(policy)

    def check_loss(self, loss: str) -> None:
        """Raise if a loss is not known."""
        LOSSES.choose(loss)

    def install(self, policy: AnyPolicy) -> None:
        """Use another policy."""
        self._runner, self.policy = self.cascade.run(policy), policy

    def answer(
        self, samples: Sequence[Any], *, full: bool, slices: Sequence[str | None] = ()
    ) -> list[Answer | InvalidRequestError]:
        """Return one answer per sample, each under the policy of its slice."""
        runner = self._full if full else self._runner
        return [
            Answer(
                {"answer": each.answer.answer, "model": self.cascade.names[each.exit]},
                each.exit,
                next((c for c in reversed(each.confidences) if c is not None), None),
                each.answer,
            )
            for each in _run(runner, samples, slices or None).decisions
        ]

    def compare(self, sample: Any, answer: Answer, loss: str) -> Comparison:
        """Return how an answer compares with the last model's."""
        if answer.exit == self.n_exits - 1:
            return Comparison(0.0)
        try:
            full = _run(self._full, [sample], None).decisions[0].answer
        except Exception as error:
            raise UnansweredError(f"the last model did not answer: {error}") from None
        _, against_last = answer_tables(LOSSES.choose(loss), [[answer.output], [full]], None)
        lost = float(np.asarray(against_last)[0, 0])
        both = [each.probabilities for each in (answer.output, full)]
        if any(each is None for each in both):
            return Comparison(lost)
        return Comparison(lost, *(each.tolist() for each in both))


def _run(runner: CascadeRunner, samples: Sequence[Any], slices: Any) -> Any:
    arrays = all(isinstance(each, np.ndarray) for each in samples)
    alike = arrays and len({each.shape for each in samples}) == 1
    return runner(np.stack(samples) if alike else list(samples), slices)
