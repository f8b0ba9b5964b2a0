"""`collect_traces` and `collect_votes`: what a model answers on the way, each paid for once."""

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.progress import steps
from swiftsure.cascade.answer_log import AnswerKey, AnswerLog, input_digest
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.collecting import CollectionError, ask_all, input_keys, model_key
from swiftsure.cascade.endpoints import Endpoint
from swiftsure.cascade.models import Model, identity_digest, model_of
from swiftsure.cascade.request_kinds import REQUESTS, features_of_inputs
from swiftsure.cascade.retrying import Backoff, described
from swiftsure.cascade.running import run_coroutine
from swiftsure.reasoning.clients import Piece, Question, ThinkingClient, client_of
from swiftsure.reasoning.reading import read_answer
from swiftsure.reasoning.traces import Probe, Trace, TraceRecord
from swiftsure.reasoning.votes import VoteRecord
from swiftsure.reasoning.walking import Written, due_every, walk

__all__ = ["collect_traces", "collect_votes"]

Labels = Sequence[Any] | NDArray[Any] | None


def collect_traces(
    client: Any,
    questions: Sequence[Question],
    labels: Labels = None,
    *,
    checkpoints: int | Iterable[int] = 256,
    seeds: int = 1,
    ids: Sequence[Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    concurrency: int = 8,
    backoff: Backoff | None = None,
    progress: bool | None = None,
) -> TraceRecord:
    """Let a model think about questions, and ask it at checkpoints what it would answer.

    Parameters
    ----------
    client : Reasoner, LocalReasoner or Endpoint
        An endpoint becomes a `Reasoner`.
    questions : sequence
        Texts, or lists of chat messages.
    labels : (n,), optional
        The right answers; None for one that is missing.
    checkpoints : int or ints
        Tokens of thinking at which it is asked; one number is the distance between them.
    seeds : int
        Traces per question; they are a group. The endpoint's parameters must make them differ.
    ids : (n,), optional
        Names of the questions in the record; by default their numbers.
    folder : path, optional
        Where each answer is kept as it arrives, those on the way too; the same call resumes from
        there, in the middle of a thought if need be, and pays for nothing twice.
    concurrency : int
        How many questions are thought about at once.
    backoff : Backoff, optional
        Retries after rate limits, broken streams and errors of the server.
    progress : bool, optional
        Show a progress bar; by default if standard error is a terminal.

    Returns
    -------
    record : TraceRecord
        Use `record.exits(checkpoints)` to calibrate.

    Raises
    ------
    CollectionError
        If the model fails even after retries, or some answers cannot be read; all that arrived is
        kept.
    """
    return run_coroutine(
        _traces(
            client_of(client),
            _same_number("labels", labels, questions),
            checkpoints=checkpoints if isinstance(checkpoints, int) else list(checkpoints),
            seeds=checks.count("seeds", seeds),
            names=_names(ids, questions),
            questions=list(questions),
            folder=folder,
            concurrency=checks.count("concurrency", concurrency),
            backoff=backoff or Backoff(),
            progress=progress,
        )
    )


async def _traces(
    client: ThinkingClient,
    labels: list[Any],
    *,
    checkpoints: int | list[int],
    seeds: int,
    names: list[Any],
    questions: list[Question],
    folder: Any,
    concurrency: int,
    backoff: Backoff,
    progress: bool | None,
) -> TraceRecord:
    jobs = [(row, seed) for row in range(len(questions)) for seed in range(seeds)]
    who = f"{_key_of(client)} {checkpoints}"
    limit, errors = asyncio.Semaphore(concurrency), list[Exception]()
    with AnswerLog(folder) as log, steps("thinking", len(jobs), progress) as advance:

        async def run(row: int, seed: int) -> Written:
            kept = _Kept(log, who, questions[row], seed, client.family.mark)
            async with limit:
                if not errors:
                    try:
                        due = due_every(checkpoints)
                        await backoff.call(partial(kept.think, client, questions[row], due, seed))
                        advance()
                    except BaseException as error:
                        kept.keep()
                        if not isinstance(error, Exception):
                            raise
                        errors.append(error)
            return kept.written

        try:
            found = await asyncio.gather(*(run(*job) for job in jobs))
        finally:
            await client.close()
    missing = sum(not each.finished for each in found)
    if errors:
        raise _stopped(errors[0], missing, len(jobs), folder)
    record = [
        _trace(client, written, names[row], labels[row], seed)
        for (row, seed), written in zip(jobs, found, strict=True)
    ]
    unread = [
        (names[row], written)
        for (row, _), written, trace in zip(jobs, found, record, strict=True)
        if trace.answer.answer is None
    ]
    if unread:
        name, written = unread[0]
        raise CollectionError(
            f"{len(unread):,} of {len(jobs):,} answers cannot be read, the first of them that to"
            f" question {name!r}, which ends with {_end_of(written)!r}. Give `parse` to the client,"
            " a function from what the model wrote to its answer"
            f"{_resumes(folder, 'reads it again and pays for nothing')}",
            len(unread),
        )
    settings = {"model": client.name, REQUESTS: features_of_inputs(questions)}
    return TraceRecord(record, client.fingerprint, settings)


class _Kept:
    """What was written about one question, on disk after each probe and at the end."""

    def __init__(self, log: AnswerLog, who: str, question: Question, seed: int, mark: str) -> None:
        self.log, self.digest, self.who, self.seed = log, input_digest(question), who, seed
        self.written, self.parts, self.stored = Written(mark), 0, 0
        while (found := log.answers.get(self._key())) is not None:
            self._restore(found[0].answer)
            self.parts += 1

    def _key(self) -> AnswerKey:
        return AnswerKey(self.who, f"{self.digest} part {self.parts}", self.seed)

    def _restore(self, part: dict[str, Any]) -> None:
        written = self.written
        finish = "stop" if part["finished"] else None
        written.add(Piece(part["text"], 0, finish))
        written.tokens = part["tokens"]
        self.stored = len(written.text)
        written.probes += [(at, Answer.of(each)) for at, each in part["probes"]]
        if part["last"] is not None:
            written.last = Answer.of(part["last"])

    def store(self, new: Sequence[tuple[int, Answer]]) -> None:
        """Keep the text since the last time, and new probes."""
        written = self.written
        part = {
            "text": written.text[self.stored :],
            "tokens": written.tokens,
            "finished": written.finished,
            "probes": [[at, each.to_json()] for at, each in new],
            "last": None if written.last is None else written.last.to_json(),
        }
        spent = sum(each.cost.get("tokens", 0.0) for _, each in new)
        self.log.append([(self._key(), Answer(part, cost={"tokens": spent}), 0.0)])
        self.stored = len(written.text)
        self.parts += 1

    def keep(self) -> None:
        """Keep what was written since the last time, before it is given up."""
        if len(self.written.text) > self.stored:
            self.store([])

    async def think(self, client: ThinkingClient, question: Question, due: Any, seed: int) -> None:
        """Think to the end, from where it was left."""
        async for what, _ in walk(client, question, self.written, due, seed=seed):
            if what == "probe":
                self.store(self.written.probes[-1:])
            elif what == "end":
                self.store([])


def _trace(client: ThinkingClient, written: Written, name: Any, label: Any, seed: int) -> Trace:
    probes = tuple(Probe(at, client.read_probe(raw)) for at, raw in written.probes)
    if written.last is not None:
        answer = replace(client.read_probe(written.last), cost={})
    else:
        answer = Answer(client.read(written.said))
    return Trace(name, probes, written.tokens, answer, label, seed)


def collect_votes(
    client: Any,
    questions: Sequence[Any],
    labels: Labels = None,
    *,
    samples: int = 20,
    parse: Callable[[str], Any] | None = None,
    ids: Sequence[Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    concurrency: int = 8,
    backoff: Backoff | None = None,
    progress: bool | None = None,
) -> VoteRecord:
    r"""Draw several answers to each question, from any API or function.

    Parameters
    ----------
    client : Endpoint, Model or callable
        An endpoint must have a temperature above 0.
    samples : int
        Answers to each question.
    parse : callable, optional
        From a text to its answer, or None for one that has no vote; by default the last `\boxed{}`
        or what comes after "answer", and the whole text of a function.
    labels, ids, folder, concurrency, backoff, progress
        As in `collect_traces`.

    Raises
    ------
    CollectionError
        If the model fails even after retries, or all answers to a question cannot be read; those
        that arrived are kept.
    """
    model = voting_model(client)
    values = list(questions)
    known = _same_number("labels", labels, values)
    names = _names(ids, values)
    checks.count("samples", samples, 2)
    inputs = [value for value in values for _ in range(samples)]
    keys = [[AnswerKey(model_key(model), *each) for each in input_keys(inputs, None)]]

    async def collect() -> list[list[tuple[Answer, float]]]:
        try:
            return await ask_all(
                [model],
                inputs,
                keys,
                folder=folder,
                concurrency=concurrency,
                backoff=backoff or Backoff(),
                progress=progress,
                title="voting",
            )
        finally:
            await model.close()

    read = reader_of(model, parse)
    said = [read(answer.answer) for answer, _ in run_coroutine(collect())[0]]
    rows = [said[k : k + samples] for k in range(0, len(said), samples)]
    unread = [name for name, row in zip(names, rows, strict=True) if not any(_read(row))]
    if unread:
        raise CollectionError(
            f"None of the {samples} answers to {len(unread):,} of {len(rows):,} questions can be"
            f" read, the first of them {unread[0]!r}. Give `parse`, a function from a text to its"
            f" answer{_resumes(folder, 'reads them again and pays for nothing')}",
            len(unread) * samples,
        )
    return VoteRecord(
        rows,
        known,
        questions=names,
        settings={"model": model.name},
        fingerprint=identity_digest([model.identity()]),
    )


def voting_model(client: Any) -> Model:
    """Return the model that draws answers; refuse one whose answers would all be the same."""
    model = model_of(client)
    if isinstance(model, Endpoint) and not model.parameters.get("temperature", 1):
        raise ValueError(
            "`client` must draw answers that differ: give the endpoint parameters with a"
            " temperature above 0."
        )
    return model


def reader_of(model: Model, parse: Callable[[str], Any] | None) -> Callable[[Any], Any]:
    """Return what reads the answer in what a model said."""
    if parse is not None:
        return parse
    return read_answer if isinstance(model, Endpoint) else lambda said: said


def _read(row: Sequence[Any]) -> list[bool]:
    return [each is not None for each in row]


def _key_of(client: ThinkingClient) -> str:
    digest = client.fingerprint
    return f"name {client.name}" if digest is None else f"{client.name} {digest[:23]}"


def _names(ids: Sequence[Any] | None, questions: Sequence[Any]) -> list[Any]:
    return list(range(len(questions))) if ids is None else _same_number("ids", ids, questions)


def _same_number(name: str, values: Any, questions: Sequence[Any]) -> list[Any]:
    if len(questions) == 0:
        raise ValueError("`questions` must not be empty.")
    listed = [None] * len(questions) if values is None else list(values)
    if len(listed) != len(questions):
        raise ValueError(
            f"`{name}` must be one per question, {len(questions):,}, but got {len(listed):,}."
        )
    return listed


def _stopped(error: Exception, missing: int, total: int, folder: Any) -> CollectionError:
    text = f"Collecting stopped with {missing:,} of {total:,} traces unfinished: {described(error)}"
    found = CollectionError(f"{text}{_resumes(folder, 'resumes', '')}", missing)
    found.__cause__ = error
    return found


def _resumes(folder: Any, does: str, dot: str = ".") -> str:
    if folder is None:
        return dot
    return f"{dot} What arrived is in {str(folder)!r}, so the same call {does}."


def _end_of(written: Written) -> str:
    return (written.said if written.last is None else str(written.last.answer))[-80:]
