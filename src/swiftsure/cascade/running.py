"""`CascadeRunner`: runs a cascade under a policy; a model that fails hands over to the last one."""

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.collecting import rows_of
from swiftsure.cascade.confidences import answer_confidence
from swiftsure.cascade.models import BatchModel, Model
from swiftsure.cascade.retrying import Backoff, described
from swiftsure.certify.policy import Policy
from swiftsure.exits import exits_in_use, reaches

__all__ = ["CascadeOutput", "CascadeRunner", "Decision", "run_coroutine"]

T = TypeVar("T")


class Decision(NamedTuple):
    """What a cascade did with one input.

    Attributes
    ----------
    answer : Answer
        Of the model that answered.
    exit : int
        Number of that model, from 0.
    confidences : tuple of float or None
        Confidence of each model that was asked before; None for one that failed.
    cost : dict
        Cost of all models that answered, by unit.
    failures : tuple of str
        What went wrong with smaller models, if anything did.
    """

    answer: Answer
    exit: int
    confidences: tuple[float | None, ...]
    cost: dict[str, float]
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class CascadeOutput:
    """What a cascade did with several inputs, in their order.

    Attributes
    ----------
    answers : list
    exits : (n,)
        Number of the model that answered, from 0.
    decisions : list of Decision
    """

    decisions: list[Decision] = field(repr=False)

    @property
    def answers(self) -> list[Any]:
        """The answers."""
        return [each.answer.answer for each in self.decisions]

    @property
    def exits(self) -> NDArray[np.int64]:
        """Number of the model that answered, from 0."""
        return np.asarray([each.exit for each in self.decisions], np.int64)

    @property
    def cost(self) -> dict[str, float]:
        """The bill: the sum of all costs, by unit."""
        total: Counter[str] = Counter()
        for each in self.decisions:
            total.update(each.cost)
        return dict(total)

    @property
    def failures(self) -> list[tuple[int, str]]:
        """Failures of smaller models: the input's number, and what went wrong."""
        return [(i, text) for i, each in enumerate(self.decisions) for text in each.failures]


class CascadeRunner:
    """A cascade that runs under a policy; `Cascade.run` makes one.

    Call it with inputs, or await `answer` and `answers` in an event loop. A model that fails, or
    gives no confidence, hands its input over to the last model, which loses nothing against itself.
    So a promise about losses that are never negative, such as the inconsistency, is kept; one about
    a gap is kept if failures do not depend on the input, since a small model that fails only where
    it is better than the last one no longer makes up for its errors. An error of the last model is
    raised.

    Parameters
    ----------
    models : sequence of Model
    policy : Policy
        For these models; None always asks the last one.
    score : str
        Name of the confidence.
    concurrency : int
        How many inputs are answered at once.
    backoff : Backoff
        Retries of the last model.
    early_backoff : Backoff
        Retries of the others; by default none, because the last model can answer.
    """

    def __init__(
        self,
        models: Sequence[Model],
        policy: Policy | None,
        score: str,
        *,
        concurrency: int = 8,
        backoff: Backoff | None = None,
        early_backoff: Backoff | None = None,
    ) -> None:
        self.models = list(models)
        self.policy = policy
        self.score = score
        self.concurrency = checks.count("concurrency", concurrency)
        self.backoff = backoff or Backoff()
        self.early_backoff = early_backoff or Backoff(retries=0)
        never = np.full(len(models) - 1, np.inf, np.float32)
        levels = never if policy is None else policy.thresholds
        if levels is None or len(levels) != len(never):
            raise ValueError(f"`policy` must be for {len(models)} models.")
        self.thresholds = levels
        self._levels: list[float] = np.asarray(levels, np.float32).tolist()
        self._strict = policy is not None and policy.strict
        first = 0 if policy is None else policy.min_exit
        self._used = set(exits_in_use(levels, strict=self._strict, min_exit=first))

    def asked(self, exit_index: int) -> bool:
        """Return whether a model's answer can ever be used; a model that cannot exit is skipped."""
        if exit_index == len(self.models) - 1:
            return True
        return exit_index in self._used

    def leaves(self, exit_index: int, confidence: float) -> bool:
        """Return whether an input with this confidence keeps this model's answer."""
        # Without arrays: this is on the proxy's hot path.
        given, level = float(np.float32(confidence)), self._levels[exit_index]
        return bool(reaches(given, level, strict=self._strict))

    async def answer(self, value: Any) -> Decision:
        """Return the answer to one input."""
        last = len(self.models) - 1
        confidences: list[float | None] = []
        cost: Counter[str] = Counter()
        failures: tuple[str, ...] = ()
        for k, model in enumerate(self.models[:-1]):
            if not self.asked(k):
                continue
            try:
                found = await self.early_backoff.call(partial(model.answer, value))
                cost.update(found.cost)
                sure = self._sure(model, found)
            except Exception as error:
                failures = (*failures, described(error))
                confidences.append(None)
                break
            confidences.append(sure)
            if self.leaves(k, sure):
                return Decision(found, k, tuple(confidences), dict(cost))
        found = await self.backoff.call(partial(self.models[last].answer, value))
        cost.update(found.cost)
        return Decision(found, last, tuple(confidences), dict(cost), failures)

    async def answers(self, inputs: Any) -> CascadeOutput:
        """Return the answers to several inputs, in their order."""
        if all(isinstance(model, BatchModel) for model in self.models):
            return CascadeOutput(await asyncio.to_thread(self._batched, inputs))
        limit = asyncio.Semaphore(self.concurrency)

        async def one(position: int) -> Decision:
            async with limit:
                return await self.answer(rows_of(inputs, [position])[0])

        return CascadeOutput(list(await asyncio.gather(*map(one, range(len(inputs))))))

    def __call__(self, inputs: Any) -> CascadeOutput:
        """Return the answers to several inputs; works inside a running event loop too."""

        async def run() -> CascadeOutput:
            try:
                return await self.answers(inputs)
            finally:
                await self.close()

        return run_coroutine(run())

    def _batched(self, inputs: Any) -> list[Decision]:
        """Answer inputs with models that take batches."""
        last = len(self.models) - 1
        found: dict[int, Decision] = {}
        seen: dict[int, tuple[float | None, ...]] = dict.fromkeys(range(len(inputs)), ())
        bills: dict[int, Counter[str]] = {row: Counter() for row in seen}
        failed: dict[int, tuple[str, ...]] = {}
        for k, model in enumerate(self.models):
            rows = [row for row in seen if row not in found and (k == last or row not in failed)]
            size = model.batch_size if isinstance(model, BatchModel) else 1
            for start in range(0, len(rows) if self.asked(k) else 0, size):
                part = rows[start : start + size]
                try:
                    answers = model.answers(rows_of(inputs, part))  # type: ignore[attr-defined]
                    sure = [None if k == last else self._sure(model, each) for each in answers]
                except Exception as error:
                    if k == last:
                        raise
                    failed |= dict.fromkeys(part, (described(error),))
                    seen |= {row: (*seen[row], None) for row in part}
                    continue
                for row, answer, level in zip(part, answers, sure, strict=True):
                    bills[row].update(answer.cost)
                    if level is not None:
                        seen[row] = (*seen[row], level)
                        if not self.leaves(k, level):
                            continue
                    why = failed.get(row, ())
                    found[row] = Decision(answer, k, seen[row], dict(bills[row]), why)
        return [found[row] for row in seen]

    def _sure(self, model: Model, answer: Answer) -> float:
        """Return the confidence of an answer of a model before the last."""
        sure = answer_confidence(answer, self.score)
        if sure is None or np.isnan(sure):
            raise ValueError(f"{model.name} gave no confidence {self.score!r}.")
        return sure

    async def close(self) -> None:
        """Close connections of the running event loop."""
        for model in self.models:
            await model.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()


def run_coroutine(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in a thread of its own if an event loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(work))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
