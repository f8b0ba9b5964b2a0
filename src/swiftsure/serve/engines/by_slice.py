"""Batches whose samples are of several slices, each under the policy of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from swiftsure.certify.slices import SlicedPolicy
from swiftsure.serve.engine import Answer, AnyPolicy, InvalidRequestError

__all__ = ["answer_by_slice", "policies_of"]

Outcomes = list[Answer | InvalidRequestError]
R = TypeVar("R")


def policies_of(policy: AnyPolicy) -> dict[str | None, Any]:
    """Return the policy of each slice; one without slices is that of None.

    Examples
    --------
    >>> policies_of("a policy")
    {None: 'a policy'}
    """
    if isinstance(policy, SlicedPolicy):
        return {name: policy[name] for name in policy}
    return {None: policy}


def answer_by_slice(
    samples: Sequence[Any],
    slices: Sequence[str | None],
    runtimes: Mapping[str | None, R],
    run: Callable[[Sequence[Any], R | None], Outcomes],
) -> Outcomes:
    """Return one answer per sample, from the runtime of its slice.

    Parameters
    ----------
    slices : sequence
        Of the samples; empty if there are none, and the runtime is that of None.
    run : callable
        Answers samples with a runtime, or with the full model if it is None.
    """
    if not slices:
        return run(samples, runtimes.get(None))
    rows: dict[str | None, list[int]] = {}
    for row, name in enumerate(slices):
        rows.setdefault(name if name in runtimes else None, []).append(row)
    answers: dict[int, Answer | InvalidRequestError] = {}
    for name, part in rows.items():
        found = run([samples[row] for row in part], runtimes.get(name))
        answers.update(zip(part, found, strict=True))
    return [answers[row] for row in range(len(samples))]
