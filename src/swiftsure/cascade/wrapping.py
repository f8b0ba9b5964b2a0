"""Wrappers that give a model a confidence: self-consistency, a verifier, a learned score."""

import asyncio
import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

from swiftsure._lib import checks
from swiftsure.cascade.answer_features import feature_values, question_text
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.confidences import answer_confidence
from swiftsure.cascade.judging import Judge
from swiftsure.cascade.models import Model, model_of
from swiftsure.cascade.recalibrating import Recalibration
from swiftsure.curves.pilots import Learned, PilotSamples, with_pilot
from swiftsure.losses.text import normalised
from swiftsure.scores import LearnedScore

__all__ = [
    "LearnedConfidence",
    "Recalibrated",
    "SelfConsistency",
    "Verified",
    "Wrapper",
    "innermost",
]

PROMPT = """How sure are you that the answer to the question is right? Reply with one number and
nothing else, from {low:g}, surely wrong, to {high:g}, surely right.

Question: {input}
Answer: {answer}
Number:"""


class Wrapper(Model):
    """A model around another one, which it asks."""

    def __init__(self, model: Any, name: str | None = None) -> None:
        self.model = model_of(model)
        self.name = name or self.model.name

    def _identity(self, **own: Any) -> dict[str, Any] | None:
        inner = self.model.identity()
        return None if inner is None else {type(self).__name__: {**own, "model": inner}}

    @property
    def pilots(self) -> dict[Learned, PilotSamples]:
        """Those of the model."""
        return self.model.pilots

    def around(self, model: Model) -> Self:
        """Return the same wrappers around another innermost model."""
        found = copy.copy(self)
        inner = self.model
        found.model = inner.around(model) if isinstance(inner, Wrapper) else model
        return found

    async def close(self) -> None:
        """Release connections of the model."""
        await self.model.close()


def innermost(model: Model) -> Model:
    """Return the model within all wrappers."""
    while isinstance(model, Wrapper):
        model = model.model
    return model


class SelfConsistency(Wrapper):
    """Ask a model several times; the confidence is the share of samples that give its answer.

    The answer is the most frequent one, and the first of them where several are. The cost is that
    of all samples. The model must sample: an endpoint needs a temperature above 0.

    Parameters
    ----------
    model
        As in `Cascade`.
    k : int
        Number of samples.
    key : callable, optional
        What must be equal for answers to agree; by default texts after normalisation.
    """

    def __init__(
        self,
        model: Any,
        k: int = 5,
        *,
        key: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(model, name)
        self.k = checks.count("k", k, 2)
        self.key = key

    async def answer(self, value: Any) -> Answer:
        """Return the most frequent answer."""
        found = await asyncio.gather(*(self.model.answer(value) for _ in range(self.k)))
        keys = [self._key(each.answer) for each in found]
        best, count = Counter(keys).most_common(1)[0]
        cost: Counter[str] = Counter()
        for each in found:
            cost.update(each.cost)
        share = count / self.k
        first = found[keys.index(best)]
        scores = {**first.scores, "agreement": share}
        return replace(first, confidence=share, cost=dict(cost), scores=scores)

    def _key(self, answer: Any) -> Any:
        if self.key is not None:
            return self.key(answer)
        return normalised(answer) if isinstance(answer, str) else repr(answer)

    def identity(self) -> dict[str, Any] | None:
        """Return the model's identity and k; None with a key of your own."""
        return None if self.key is not None else self._identity(k=self.k)


class Verified(Wrapper):
    """A model whose confidence is what a verifier says about its answer.

    Parameters
    ----------
    model
        As in `Cascade`.
    verifier : callable, or Endpoint, or Judge
        (input, answer) -> confidence in [0, 1]; plain or async. It may return an `Answer` whose
        confidence counts and whose cost is added. A language model is asked how sure it is that the
        answer is right, from 0 to 100; a `Judge` says with which prompt and grades.
    """

    def __init__(self, model: Any, verifier: Any, *, name: str | None = None) -> None:
        super().__init__(model, name)
        if isinstance(verifier, Model):
            verifier = Judge(verifier, 0, 100, PROMPT, "verifier")
        self.verifier = verifier

    async def answer(self, value: Any) -> Answer:
        """Return the model's answer with the verifier's confidence."""
        found = await self.model.answer(value)
        if isinstance(self.verifier, Judge):
            said: Any = await self._judged(self.verifier, value, found)
        elif inspect.iscoroutinefunction(self.verifier):
            said = await self.verifier(value, found.answer)
        else:
            said = await asyncio.to_thread(self.verifier, value, found.answer)
        verdict = said if isinstance(said, Answer) else Answer(None, confidence=said)
        if verdict.confidence is None:
            raise ValueError("`verifier` must give a confidence.")
        cost = Counter(found.cost)
        cost.update(verdict.cost)
        scores = {**found.scores, "verifier": verdict.confidence}
        return replace(found, confidence=verdict.confidence, cost=dict(cost), scores=scores)

    async def _judged(self, judge: Judge, value: Any, found: Answer) -> Answer:
        """Return a judge's grade as a confidence; none if the reply holds no grade."""
        asked = judge.question(question_text(value) or value, found.answer, None)
        reply = await judge.grader().answer(asked)
        loss = judge.loss(reply)
        return Answer(None, None if math.isnan(loss) else 1.0 - loss, reply.cost)

    async def close(self) -> None:
        """Release connections of the model and of the verifier."""
        await super().close()
        if isinstance(self.verifier, Judge):
            await self.verifier.grader().close()

    def identity(self) -> dict[str, Any] | None:
        """Return the identities of the model and the verifier; None if it has no fingerprint."""
        if isinstance(self.verifier, Judge):
            judge, inner = self.verifier, self.verifier.grader().identity()
            said = {"prompt": judge.prompt, "grades": [judge.low, judge.high], "model": inner}
            return None if inner is None else self._identity(verifier=said)
        own = getattr(self.verifier, "fingerprint", None)
        return None if own is None else self._identity(verifier=str(own))


class LearnedConfidence(Wrapper):
    """A model whose confidence was learned, without labels, from features of question and answer.

    `Cascade.learn` fits it to how often the model's answers agree with the last model's.

    Parameters
    ----------
    model
        As in `Cascade`; within `SelfConsistency` or `Verified`, their findings are features.
    score : LearnedScore
        With features among `swiftsure.cascade.ANSWER_FEATURES`.
    """

    def __init__(self, model: Any, score: LearnedScore, *, name: str | None = None) -> None:
        super().__init__(model, name)
        self.score = score

    @property
    def pilots(self) -> dict[Learned, PilotSamples]:
        """The samples that the score, or the model within, was learned on."""
        return with_pilot(self.model.pilots, "score", self.score.pilot)

    async def answer(self, value: Any) -> Answer:
        """Return the model's answer with its learned confidence."""
        found = await self.model.answer(value)
        values = feature_values(self.score.features, value, found)
        sure = float(self.score.of_features([values], 0)[0])
        return replace(found, confidence=sure, scores={**found.scores, "learned": sure})

    def identity(self) -> dict[str, Any] | None:
        """Return the identities of the model and of the score."""
        return self._identity(score=self.score.name)


class Recalibrated(Wrapper):
    """A model whose confidence is mapped to a probability of being right, fitted on a pilot.

    One threshold then means the same for every model of a cascade. The pilot must not calibrate.

    Parameters
    ----------
    model
        As in `Cascade`.
    recalibration : Recalibration
    score : str
        The confidence that it was fitted to.
    """

    def __init__(
        self,
        model: Any,
        recalibration: Recalibration,
        *,
        score: str = "confidence",
        name: str | None = None,
    ) -> None:
        super().__init__(model, name)
        self.recalibration = recalibration
        self.score = score

    @property
    def pilots(self) -> dict[Learned, PilotSamples]:
        """The samples that the map, or the model within, was fitted on."""
        return with_pilot(self.model.pilots, "score", self.recalibration.pilot)

    async def answer(self, value: Any) -> Answer:
        """Return the model's answer with its mapped confidence."""
        found = await self.model.answer(value)
        sure = answer_confidence(found, self.score)
        if sure is None:
            raise ValueError(f"{self.model.name} gave no confidence {self.score!r}.")
        return replace(found, confidence=float(self.recalibration([sure])[0]))

    def identity(self) -> dict[str, Any] | None:
        """Return the identities of the model and of the map."""
        return self._identity(map=self.recalibration.map_json(), score=self.score)
