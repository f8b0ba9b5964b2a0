"""`Thinker` and `Voter`: a model that stops thinking, or drawing answers, under a policy."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from swiftsure.cascade.answers import Answer
from swiftsure.cascade.models import identity_digest
from swiftsure.cascade.retrying import Backoff, described
from swiftsure.cascade.running import run_coroutine
from swiftsure.certify.policy import Policy
from swiftsure.exits import reaches, threshold_array
from swiftsure.reasoning.clients import Question, Thinking, client_of
from swiftsure.reasoning.collecting import reader_of, voting_model
from swiftsure.reasoning.probe_scores import probe_scores
from swiftsure.reasoning.traces import THINKING
from swiftsure.reasoning.two_dials import HOPELESS, PATIENCE, SURE, gives_up
from swiftsure.reasoning.votes import VOTING, majority, vote_scores
from swiftsure.reasoning.walking import Written, due_every, walk
from swiftsure.run.binding import PolicyBinding

__all__ = ["Thinker", "Thought", "Vote", "Voter"]


@dataclass(frozen=True)
class Thought:
    """The answer to a question, and what it took.

    Attributes
    ----------
    answer : object
        None if the model's last words cannot be read; `text` has them.
    exit : int
        Number of the checkpoint at which thinking stopped, from 0; the last is the natural end.
    text : str
        What a person is shown: the answer on the way, or what the model wrote at the end.
    thinking : str
    tokens, probe_tokens, ahead : float
        Tokens of thinking, those that asking took, and those that the model had written further
        when it was stopped.
    confidence : float, optional
        At the last checkpoint.
    stopped : bool
        Whether it was stopped before its natural end.
    gave_up : bool
        Whether it was stopped because its confidence stayed low.
    probes : tuple of Answer
    failures : tuple of str
        What went wrong with asking on the way; such a question is thought to its end.
    """

    answer: Any
    exit: int
    text: str
    thinking: str = field(repr=False)
    tokens: float
    probe_tokens: float = 0.0
    ahead: float = 0.0
    confidence: float | None = None
    stopped: bool = False
    gave_up: bool = False
    probes: tuple[Answer, ...] = field(default=(), repr=False)
    failures: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """All tokens: of thinking, of asking, and those written in vain."""
        return self.tokens + self.probe_tokens + self.ahead


class _Stops:
    """When a policy of checkpoints or votes stops, from the confidences so far."""

    def __init__(self, policy: Policy | None, system: str, record_from: str, fingerprint: Any):
        self.policy, self.n_exits, self.levels = policy, 1, np.empty(0, np.float32)
        self.hopeless, self.patience, self.strict = 0.0, 0, False
        self.score: Any = None
        if policy is None:
            return
        binding = PolicyBinding(policy, system, record_from)
        binding.check_model(fingerprint)
        settings = policy.settings
        if settings.get("carried"):
            raise ValueError(
                "`policy` was made from traces that had no answer at some checkpoints, where an"
                " earlier one was carried forward: collect traces with answers at every checkpoint."
            )
        if settings.get("uneven"):
            raise ValueError(
                "`policy` was made from votes of which some ended with fewer answers than a full"
                " vote has: give `exits` a number of `samples` that every question has."
            )
        if SURE in settings:
            full = policy.runs_full_model
            places = len(settings["checkpoints"]) if system == THINKING else settings["places"]
            sure = None if full else settings[SURE]
            self.levels = np.full(places, threshold_array(np.inf if sure is None else sure))
            self.hopeless = 0.0 if full else float(settings[HOPELESS])
            self.patience, self.score = int(settings[PATIENCE]), settings["score"]
        else:
            if policy.thresholds is None:
                raise binding.refusal()
            self.levels = np.asarray(policy.thresholds, np.float32).copy()
            self.levels[: policy.min_exit] = np.inf
            self.score, self.strict = policy.rule.score, policy.strict
        self.n_exits = len(self.levels) + 1

    @property
    def never(self) -> bool:
        """Whether it never stops."""
        return not np.isfinite(self.levels).any() and not self.hopeless

    def at(self, exit_index: int, scores: Mapping[str, float]) -> tuple[float, bool, bool]:
        """Return the confidence at an exit, whether to stop there, and whether hopeless."""
        score = self.score
        if isinstance(score, str):
            if score not in scores:
                raise ValueError(
                    f"The answer has no score {score!r}, by which the policy decides, but only"
                    f" {', '.join(scores)}."
                )
            sure = np.float32(scores[score])
        else:
            plain = {name: np.float64(np.float32(value)) for name, value in scores.items()}
            sure = np.float32(score.at(np, exit_index, plain))
        stops = bool(reaches(sure, self.levels[exit_index], strict=self.strict))
        low = exit_index >= self.patience and bool(gives_up(sure, self.hopeless))
        return float(sure), stops or low, low and not stops


class Thinker:
    """A reasoning model that stops thinking when its answer is safe.

    Parameters
    ----------
    client : Reasoner, LocalReasoner or Endpoint
        The model that the policy's traces were collected from.
    policy : Policy, optional
        From `TraceRecord.exits`; None always thinks to the end.
    backoff : Backoff, optional
        After errors; a stream that breaks is continued where it broke.

    Attributes
    ----------
    spent : Counter
        "questions", and tokens of "thinking", of "probes" and written "ahead" in vain.
    usual : float or None
        Tokens that the questions of the calibration took to the end, on average.

    Examples
    --------
    >>> thinker = Thinker(Reasoner(endpoint), policy)  # doctest: +SKIP
    >>> thinker.answer("How many primes are below 100?").answer  # doctest: +SKIP
    '25'
    """

    def __init__(
        self, client: Any, policy: Policy | None = None, *, backoff: Backoff | None = None
    ) -> None:
        self.client = client_of(client)
        self.policy = policy
        self.backoff = backoff or Backoff()
        self.stops = _Stops(
            policy, THINKING, "swiftsure.reasoning.collect_traces", lambda: self.client.fingerprint
        )
        self.checkpoints: list[int] = [] if policy is None else policy.settings["checkpoints"]
        self.usual = None
        if policy is not None:
            self.usual = policy.certificate.costs.means.get("tokens", (None,))[0]
        can_stop = np.flatnonzero(np.isfinite(self.stops.levels) | bool(self.stops.hopeless))
        # After the last checkpoint that can stop it, asking would be in vain.
        self._due = due_every(self.checkpoints[: can_stop[-1] + 1] if len(can_stop) else [])
        self.spent: Counter[str] = Counter()

    def answer(self, question: Question, *, seed: int = 0) -> Thought:
        """Return the answer to a question; works inside a running event loop too."""

        async def run() -> Thought:
            try:
                return await self.aanswer(question, seed=seed)
            finally:
                await self.client.close()

        return run_coroutine(run())

    def answers(self, questions: Sequence[Question], *, concurrency: int = 8) -> list[Thought]:
        """Return the answers to several questions, in their order."""
        limit = asyncio.Semaphore(concurrency)

        async def one(question: Question) -> Thought:
            async with limit:
                return await self.aanswer(question)

        async def run() -> list[Thought]:
            try:
                return list(await asyncio.gather(*map(one, questions)))
            finally:
                await self.client.close()

        return run_coroutine(run())

    async def aanswer(self, question: Question, *, seed: int = 0) -> Thought:
        """Await the answer to a question."""
        async for each in self.stream(question, seed=seed):
            if isinstance(each, Thought):
                return each
        raise RuntimeError("unreachable")

    async def stream(self, question: Question, *, seed: int = 0) -> AsyncIterator[str | Thought]:
        """Yield the parts of what the model writes, and at last the Thought.

        The model's stream is cancelled as soon as its answer is safe, or nobody listens any more.
        """
        written = Written(self.client.family.mark)
        breaks: list[str] = []
        for attempt in range(self.backoff.retries + 1):
            try:
                async for each in self._once(question, written, seed, breaks):
                    yield each
                return
            except Exception as error:
                wait = self.backoff.wait(attempt, error)
                if wait is None:
                    raise
                breaks.append(described(error))
            await asyncio.sleep(wait)

    async def _once(
        self, question: Question, written: Written, seed: int, breaks: list[str]
    ) -> AsyncIterator[str | Thought]:
        failures: list[str] = []  # of probes: a stream that broke is asked on the way again
        parts = walk(self.client, question, written, self._due, seed=seed, failures=failures)
        try:
            async for what, each in parts:
                if what == "text" and each.text:
                    yield each.text
                if what == "probe" and (found := self._stopped(written, each)) is not None:
                    yield found
                    return
        finally:
            await parts.aclose()  # type: ignore[attr-defined]
        yield self._ended(written, (*breaks, *failures))

    def _stopped(self, written: Written, thinking: Thinking) -> Thought | None:
        """Return the answer of the last probe if the policy takes it."""
        answers = [self.client.read_probe(raw) for _, raw in written.probes]
        exit_index = len(answers) - 1
        scores = probe_scores(answers, written.probes[-1][0])
        sure, stops, gave_up = self.stops.at(exit_index, scores)
        if not stops:
            return None
        said = answers[-1].answer
        return self._counted(
            Thought(
                said,
                exit_index,
                self.client.shown(said),
                written.thought,
                tokens=written.tokens,
                probe_tokens=_spent(written),
                ahead=thinking.ahead,
                confidence=sure,
                stopped=True,
                gave_up=gave_up,
                probes=tuple(answers),
            )
        )

    def _ended(self, written: Written, failures: tuple[str, ...]) -> Thought:
        """Return the answer after all of the thinking."""
        if written.last is None:
            said, text = self.client.read(written.said), written.said.strip()
        else:
            said = self.client.read_probe(written.last).answer
            text = self.client.shown(said)
        return self._counted(
            Thought(
                said,
                self.stops.n_exits - 1,
                text,
                written.thought,
                tokens=written.tokens,
                probe_tokens=_spent(written),
                probes=tuple(self.client.read_probe(raw) for _, raw in written.probes),
                failures=failures,
            )
        )

    def _counted(self, thought: Thought) -> Thought:
        self.spent.update(
            {
                "questions": 1,
                "thinking": thought.tokens,
                "probes": thought.probe_tokens,
                "ahead": thought.ahead,
            }
        )
        return thought

    @property
    def saved(self) -> float | None:
        """Tokens saved so far, against what the questions of the calibration took on average."""
        if self.usual is None:
            return None
        spent = sum(self.spent[name] for name in ("thinking", "probes", "ahead"))
        return float(self.usual * self.spent["questions"] - spent)


def _spent(written: Written) -> float:
    return float(sum(raw.cost.get("tokens", 0.0) for _, raw in written.probes))


@dataclass(frozen=True)
class Vote:
    """The most frequent answer to a question, and the answers that were drawn.

    Attributes
    ----------
    answer : object
        None if no answer could be read.
    samples : int
    drawn : tuple
    confidence : float, optional
        When it stopped.
    gave_up : bool
        Whether it stopped because its confidence stayed low.
    cost : dict
        Of all answers, by unit.
    """

    answer: Any
    samples: int
    drawn: tuple[Any, ...]
    confidence: float | None
    gave_up: bool
    cost: Mapping[str, float]


class Voter:
    """A model that is asked again and again until the vote is safe.

    Parameters
    ----------
    client : Endpoint, Model or callable
        The model that the policy's votes were collected from.
    policy : Policy
        From `VoteRecord.exits`.
    parse : callable, optional
        As in `collect_votes`.
    backoff : Backoff, optional
        Retries.

    Examples
    --------
    >>> import swiftsure as ss
    >>> record = ss.VoteRecord([["A"] * 5] * 200, labels=["A"] * 200)
    >>> policy = ss.calibrate(record.exits(), loss="zero_one", epsilon=0.05, score="lead")
    >>> Voter(lambda question: "A", policy).answer("Which?").samples
    1
    """

    def __init__(
        self,
        client: Any,
        policy: Policy,
        *,
        parse: Callable[[str], Any] | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.model = voting_model(client)
        self.backoff = backoff or Backoff()
        self.stops = _Stops(
            policy,
            VOTING,
            "swiftsure.reasoning.collect_votes",
            lambda: identity_digest([self.model.identity()]),
        )
        self.samples = self.stops.n_exits
        self.read = reader_of(self.model, parse)

    def answer(self, question: Any) -> Vote:
        """Return the vote on a question; works inside a running event loop too."""

        async def run() -> Vote:
            try:
                return await self.aanswer(question)
            finally:
                await self.model.close()

        return run_coroutine(run())

    async def aanswer(self, question: Any) -> Vote:
        """Await the vote on a question."""
        drawn: list[Any] = []
        cost: Counter[str] = Counter()
        sure: float | None = None
        gave_up = False
        while len(drawn) < self.samples:
            found = await self.backoff.call(partial(self.model.answer, question))
            cost.update(found.cost)
            drawn.append(self.read(found.answer))
            if len(drawn) < self.samples:
                scores = vote_scores(drawn, self.samples)
                sure, stops, gave_up = self.stops.at(len(drawn) - 1, scores)
                if stops:
                    break
        return Vote(majority(drawn), len(drawn), tuple(drawn), sure, gave_up, dict(cost))
