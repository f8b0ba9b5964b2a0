"""`CascadeRunner`: runs a cascade under a policy; a model that fails hands over to the last one."""

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
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
from swiftsure.certify.slices import SlicedPolicy
from swiftsure.exits import exits_in_use, reaches

__all__ = ["CascadeOutput", "CascadeRunner", "Decision", "Routing", "run_coroutine"]

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


class Routing(NamedTuple):
    """What the models before the last said to one input.

    Attributes
    ----------
    answer : Answer, optional
        Of the model that is sure enough; None if the last one must answer.
    exit : int
        Number of the model that answers, from 0.
    asked : tuple of int
        Numbers of the models that were asked.
    confidences : tuple of float or None
        Of those; None for one that failed.
    cost : dict
        Of those that answered, by unit.
    error : Exception, optional
        Why the last of those failed.
    routed : bool
        Whether a router sent the input to the last model.
    """

    answer: Answer | None
    exit: int
    asked: tuple[int, ...] = ()
    confidences: tuple[float | None, ...] = ()
    cost: Mapping[str, float] = MappingProxyType({})
    error: Exception | None = None
    routed: bool = False


class _Levels(NamedTuple):
    """When inputs of one slice exit: the thresholds, and the exits that can be taken."""

    thresholds: tuple[float, ...] = ()
    used: frozenset[int] = frozenset()
    strict: bool = False

    @classmethod
    def of(cls, policy: Policy, n: int) -> "_Levels":
        given = policy.thresholds
        if given is None or len(given) != n:
            raise ValueError(f"`policy` must be for {n + 1} models.")
        used = exits_in_use(given, strict=policy.strict, min_exit=policy.min_exit)
        return cls(tuple(np.asarray(given, np.float32).tolist()), frozenset(used), policy.strict)

    def exits(self, exit_index: int, confidence: float) -> bool:
        if exit_index not in self.used:
            return False
        # Without arrays: this is on the proxy's hot path.
        given, level = float(np.float32(confidence)), self.thresholds[exit_index]
        return bool(reaches(given, level, strict=self.strict))


class CascadeRunner:
    """A cascade that runs under a policy; `Cascade.run` makes one.

    Call it with inputs, or await `answer` and `answers` in an event loop. A model that fails, or
    gives no confidence, hands its input over to the last model, which loses nothing against itself.
    So a promise about losses that are never negative, such as the inconsistency, is kept. A promise
    about a gap is kept if failures do not depend on the input: if the small model fails exactly
    where it beats the last one, its wins are gone and its errors remain. An error of the last model
    is raised.

    Parameters
    ----------
    models : sequence of Model
    policy : Policy or SlicedPolicy
        For these models; None always asks the last one. With a policy of slices, give the slice of
        each input; those of other slices go to the last model.
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
        policy: Policy | SlicedPolicy | None,
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
        n = len(self.models) - 1
        self._levels: dict[str | None, _Levels] = {}
        if isinstance(policy, SlicedPolicy):
            self._levels |= {name: _Levels.of(policy[name], n) for name in policy}
        elif policy is not None:
            self._levels[None] = _Levels.of(policy, n)

    def can_exit(self, exit_index: int, slice_name: str | None = None) -> bool:
        """Return whether a model's answer can ever be used; a model that cannot exit is skipped."""
        last = len(self.models) - 1
        return exit_index == last or exit_index in self._levels_of(slice_name).used

    def leaves(self, exit_index: int, confidence: float, slice_name: str | None = None) -> bool:
        """Return whether an input with this confidence keeps this model's answer."""
        return self._levels_of(slice_name).exits(exit_index, confidence)

    def _levels_of(self, slice_name: Any) -> _Levels:
        sliced = isinstance(self.policy, SlicedPolicy)
        return self._levels.get(slice_name if sliced else None, _Levels())

    async def route(self, value: Any, slice_name: str | None = None) -> Routing:
        """Ask the models before the last in turn, until one is sure enough or fails."""
        last, levels = len(self.models) - 1, self._levels_of(slice_name)
        asked: tuple[int, ...] = ()
        confidences: tuple[float | None, ...] = ()
        cost: Counter[str] = Counter()
        for k, model in enumerate(self.models[:-1]):
            if k not in levels.used:
                continue
            asked = (*asked, k)
            try:
                found = await self.early_backoff.call(partial(model.answer, value))
                cost.update(found.cost)
                sure = self._sure(model, found)
            except Exception as error:
                return Routing(None, last, asked, (*confidences, None), dict(cost), error)
            confidences = (*confidences, sure)
            if not levels.exits(k, sure):
                continue
            if model.is_router:
                return Routing(None, last, asked, confidences, dict(cost), routed=True)
            return Routing(found, k, asked, confidences, dict(cost))
        return Routing(None, last, asked, confidences, dict(cost))

    async def answer(self, value: Any, slice_name: str | None = None) -> Decision:
        """Return the answer to one input, under the policy of its slice if it has slices."""
        routed = await self.route(value, slice_name)
        if routed.answer is not None:
            return Decision(routed.answer, routed.exit, routed.confidences, dict(routed.cost))
        return await self._from_last(value, routed)

    async def ask_last(self, value: Any) -> Decision:
        """Return the last model's answer to an input that the policy does not cover."""
        return await self._from_last(value, Routing(None, len(self.models) - 1))

    async def _from_last(self, value: Any, routed: Routing) -> Decision:
        found = await self.backoff.call(partial(self.models[-1].answer, value))
        cost = Counter(routed.cost)
        cost.update(found.cost)
        failures = () if routed.error is None else (described(routed.error),)
        return Decision(found, routed.exit, routed.confidences, dict(cost), failures)

    async def answers(
        self, inputs: Any, slices: Sequence[str | None] | None = None
    ) -> CascadeOutput:
        """Return the answers to several inputs, in their order; see `__call__`."""
        names = [None] * len(inputs) if slices is None else list(slices)
        if len(names) != len(inputs):
            raise ValueError(
                f"`slices` must name the slice of each of {len(inputs)} inputs, but has"
                f" {len(names)}."
            )
        if all(isinstance(model, BatchModel) for model in self.models):
            return CascadeOutput(await asyncio.to_thread(self._batched, inputs, names))
        limit = asyncio.Semaphore(self.concurrency)

        async def one(position: int) -> Decision:
            async with limit:
                return await self.answer(rows_of(inputs, [position])[0], names[position])

        return CascadeOutput(list(await asyncio.gather(*map(one, range(len(inputs))))))

    def __call__(self, inputs: Any, slices: Sequence[str | None] | None = None) -> CascadeOutput:
        """Return the answers to several inputs; works inside a running event loop too.

        Parameters
        ----------
        inputs
        slices : sequence of str or None
            The slice of each input, under a policy of slices; unknown ones ask the last model.
        """
        return self.finish(self.answers(inputs, slices))

    def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that asks these models to its end, and close their connections."""

        async def run() -> T:
            try:
                return await work
            finally:
                await self.close()

        return run_coroutine(run())

    def _batched(self, inputs: Any, slices: Sequence[str | None]) -> list[Decision]:
        """Answer inputs with models that take batches."""
        last = len(self.models) - 1
        found: dict[int, Decision] = {}
        seen: dict[int, tuple[float | None, ...]] = dict.fromkeys(range(len(inputs)), ())
        bills: dict[int, Counter[str]] = {row: Counter() for row in seen}
        failed: dict[int, tuple[str, ...]] = {}
        sent_on: set[int] = set()  # to the last model
        for k, model in enumerate(self.models):
            rows = [
                row
                for row in seen
                if row not in found
                and (k == last or (row not in sent_on and self.can_exit(k, slices[row])))
            ]
            size = model.batch_size if isinstance(model, BatchModel) else 1
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                try:
                    answers = model.answers(rows_of(inputs, part))  # type: ignore[attr-defined]
                    sure = [None if k == last else self._sure(model, each) for each in answers]
                except Exception as error:
                    if k == last:
                        raise
                    failed |= dict.fromkeys(part, (described(error),))
                    sent_on.update(part)
                    seen |= {row: (*seen[row], None) for row in part}
                    continue
                for row, answer, level in zip(part, answers, sure, strict=True):
                    bills[row].update(answer.cost)
                    if level is not None:
                        seen[row] = (*seen[row], level)
                        if not self.leaves(k, level, slices[row]):
                            continue
                        if model.is_router:
                            sent_on.add(row)
                            continue
                    why = failed.get(row, ())
                    found[row] = Decision(answer, k, seen[row], dict(bills[row]), why)
        return [found[row] for row in seen]

    def _sure(self, model: Model, answer: Answer) -> float:
        """Return the confidence of an answer of a model before the last."""
        # A router has one confidence, whatever the score of the others.
        score = "confidence" if model.is_router else self.score
        sure = answer_confidence(answer, score)
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
