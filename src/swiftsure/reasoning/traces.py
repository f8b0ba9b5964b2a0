"""`TraceRecord`: what a model thought, and what it answered when it was asked on the way."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftsure._lib import checks
from swiftsure._lib.files import shortened, write_text
from swiftsure.cascade.answers import Answer, plain
from swiftsure.reasoning.outcomes import Outcomes
from swiftsure.reasoning.probe_scores import probe_scores
from swiftsure.records import ExitRecord

__all__ = ["OTHER", "THINKING", "Probe", "Trace", "TraceRecord", "checkpoint_list"]

THINKING = "thinking"
"""The system that policies made from traces are for."""

OTHER = "(none of the answers)"
"""The label of a question that no answer of its trace is right for, where only this is known."""

ANSWER_FIELDS = ("confidence", "probabilities", "logprobs", "top_logprobs", "scores")


class Probe(NamedTuple):
    """An answer that was asked for before the model had finished thinking.

    Attributes
    ----------
    tokens : int
        Tokens of thinking before it.
    answer : Answer
        With its confidence, probabilities of options, or log-probabilities; its `cost` may hold
        the "tokens" that the probe itself took, read and written.
    """

    tokens: int
    answer: Answer

    @property
    def spent(self) -> float:
        """Tokens that the probe took."""
        return self.answer.cost.get("tokens", 0.0)


@dataclass(frozen=True)
class Trace:
    """One run of a reasoning model: its probes, and its natural end.

    Parameters
    ----------
    question : text or int
        Traces of one question depend on each other, so they are a group.
    probes : sequence of Probe
        In order of their tokens.
    tokens : int
        Tokens of thinking at its end.
    answer : Answer
        The answer after all of the thinking.
    label : object, optional
        The right answer; None if it is not known.
    seed : int
        Tells several traces of one question apart.
    """

    question: str | int
    probes: tuple[Probe, ...]
    tokens: int
    answer: Answer
    label: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the order of the probes."""
        checks.count("tokens", self.tokens, 0)
        object.__setattr__(self, "probes", tuple(self.probes))
        at = [checks.count("tokens", probe.tokens, 0) for probe in self.probes]
        if at != sorted(set(at)) or (at and at[-1] > self.tokens):
            raise ValueError(
                f"`probes` must have rising `tokens` of at most {self.tokens}, the end of the"
                f" trace, but those of question {self.question!r} are at {at}."
            )

    @property
    def id(self) -> str:
        """Name of the trace in records: its question and its seed."""
        return f"{self.question}/{self.seed}"

    def to_json(self) -> dict[str, Any]:
        """Return the trace as a line of a JSONL file holds it."""
        return {
            "question": self.question,
            "seed": self.seed,
            "tokens": self.tokens,
            "label": self.label,
            **self.answer.to_json(),
            "probes": [
                {"tokens": probe.tokens, "spent": probe.spent, **_without_cost(probe.answer)}
                for probe in self.probes
            ],
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Trace":
        """Return the trace that a line of a JSONL file holds."""
        probes = [
            Probe(each["tokens"], _answer(each, {"tokens": each.get("spent", 0)}))
            for each in content["probes"]
        ]
        return cls(
            content["question"],
            tuple(probes),
            content["tokens"],
            _answer(content, content.get("cost")),
            content.get("label"),
            content.get("seed", 0),
        )


def _answer(content: Mapping[str, Any], cost: Any) -> Answer:
    return Answer(
        content["answer"],
        cost=cost or {},
        **{name: content[name] for name in ANSWER_FIELDS if content.get(name) is not None},
    )


def _without_cost(answer: Answer) -> dict[str, Any]:
    return {name: value for name, value in answer.to_json().items() if name != "cost"}


@dataclass(frozen=True, eq=False)
class TraceRecord:
    """Traces of a reasoning model, from which records of any grid of checkpoints are made.

    Parameters
    ----------
    traces : sequence of Trace
        Each question and seed once.
    fingerprint : str, optional
        Of the model and of how it was asked; policies are bound to it.
    settings : mapping
        How it was asked, which policies keep.

    Examples
    --------
    >>> from swiftsure.cascade import Answer
    >>> probes = [Probe(256, Answer("A", 0.4)), Probe(512, Answer("B", 0.9))]
    >>> record = TraceRecord([Trace("q1", probes, 700, Answer("B"), label="B")])
    >>> exits = record.exits([256, 512])
    >>> exits.losses["zero_one"], exits.costs["tokens"]
    (array([[1., 0., 0.]]), array([[256., 512., 700.]]))
    """

    traces: Sequence[Trace]
    fingerprint: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that no trace is there twice."""
        object.__setattr__(self, "traces", tuple(self.traces))
        if not self.traces:
            raise ValueError("`traces` must not be empty.")
        seen: set[str] = set()
        for trace in self.traces:
            if trace.id in seen:
                raise ValueError(
                    f"`traces` must hold each question and seed once, but question"
                    f" {trace.question!r}, seed {trace.seed} is there twice: give several traces of"
                    " a question different seeds."
                )
            seen.add(trace.id)

    def __len__(self) -> int:
        return len(self.traces)

    def __repr__(self) -> str:
        """Return a one-line summary."""
        questions = len({trace.question for trace in self.traces})
        tokens = np.mean([trace.tokens for trace in self.traces])
        return (
            f"TraceRecord({len(self):,} traces of {questions:,} questions, {tokens:,.0f} tokens on"
            " average)"
        )

    @classmethod
    def from_arrays(
        cls,
        tokens: ArrayLike,
        *,
        probabilities: ArrayLike | None = None,
        answers: ArrayLike | None = None,
        confidences: ArrayLike | None = None,
        labels: Sequence[Any] | NDArray[Any] | None = None,
        correct: ArrayLike | None = None,
        questions: ArrayLike | None = None,
        seeds: ArrayLike | None = None,
        spent: ArrayLike = 0,
    ) -> "TraceRecord":
        """Make a record of traces that were probed equally often, the last time at their end.

        Parameters
        ----------
        tokens : (n, m)
            Tokens of thinking before each answer; the last column is the natural end. An answer
            whose tokens are not above those before it is left out.
        probabilities : (n, m, options), optional
            Of each option; the answer is the most probable one. They are scaled to sum to 1; where
            all are 0, they count as equal, and the answer, unless it is `correct`, as one that
            cannot be read.
        answers, confidences : (n, m), optional
            Instead of probabilities.
        labels : (n,), optional
        correct : (n, m), optional
            Whether each answer is right, where the labels themselves are not known. All right
            answers of a trace must be equal, and no wrong one equal to them.
        questions, seeds : (n,), optional
        spent : number or (n, m - 1)
            Tokens that each probe took.
        """
        at = checks.numbers("tokens", tokens)
        n, m = at.shape
        if (probabilities is None) == (answers is None):
            raise ValueError("`probabilities` or `answers` must be given, and not both.")
        p = None
        if probabilities is not None:
            p = checks.of_shape(
                "probabilities",
                checks.numbers("probabilities", probabilities, np.float64),
                {"n": n, "m": m, "options": None},
            )
            total = p.sum(axis=2, keepdims=True)
            unread = total[..., 0] <= 0
            if correct is not None:  # it may say that the first option was right there
                unread &= ~checks.numbers("correct", correct).astype(bool)
            answers = np.where(unread, None, p.argmax(axis=2))
            p = np.where(total > 0, p / np.where(total > 0, total, 1.0), 1.0 / p.shape[2])
        said = np.asarray(answers)
        sure = None if confidences is None else checks.numbers("confidences", confidences)
        cost = np.broadcast_to(np.asarray(spent, np.float64), (n, m - 1))
        known = list(labels) if labels is not None else labels_of(said, correct)
        asked = np.arange(n) if questions is None else np.asarray(questions)
        numbers = np.zeros(n, np.int64) if seeds is None else np.asarray(seeds)

        def answer(i: int, j: int) -> Answer:
            return Answer(
                said[i, j],
                None if sure is None else sure[i, j],
                {} if j == m - 1 else {"tokens": cost[i, j]},
                None if p is None else p[i, j],
            )

        traces = []
        for i in range(n):
            kept = [j for j in range(m - 1) if j == 0 or at[i, j] > at[i, j - 1]]
            probes = [Probe(int(at[i, j]), answer(i, j)) for j in kept]
            traces.append(
                Trace(
                    plain(asked[i]),
                    tuple(probes),
                    int(at[i, -1]),
                    answer(i, m - 1),
                    known[i],
                    int(numbers[i]),
                )
            )
        return cls(traces)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "TraceRecord":
        """Read traces from JSON lines.

        Each line is one trace. `spent`, `label`, `seed` and everything about confidence may be
        left out; a probe may also hold `probabilities` of the options, `logprobs` of the answer's
        tokens, or `scores` of one's own in [0, 1]:

            {"question": "q1", "seed": 0, "tokens": 700, "answer": "B", "label": "B",
             "probes": [{"tokens": 256, "answer": "A", "confidence": 0.4, "spent": 12}]}

        Raises
        ------
        ValueError
            With the file and the number of the line that cannot be read.
        """
        return cls(list(read_lines(path, Trace.from_json)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the traces as JSON lines."""
        lines = (json.dumps(trace.to_json(), ensure_ascii=False) for trace in self.traces)
        write_text(path, "".join(f"{line}\n" for line in lines))

    def exits(self, checkpoints: int | Iterable[int] = 256, *, losses: Any = None) -> ExitRecord:
        """Return the record of a model that may stop at checkpoints, to calibrate on.

        An exit is a checkpoint, its output the answer that was given at the last probe up to there,
        and its cost the tokens of thinking and of all probes up to there. The last exit is the
        natural end. Where a trace has ended already, every later exit has its full answer, its cost
        and confidences of 1.

        Parameters
        ----------
        checkpoints : int or ints
            Tokens at which thinking may stop; one number is the distance between them. They must be
            chosen without looking at the losses of these traces.
        losses : str or several
            As in `Cascade.collect`; by default "zero_one", whether the answer is another one.

        Returns
        -------
        record : ExitRecord
            With the confidences of the probes and those of `swiftsure.reasoning.probe_scores`.
            Traces of one question are a group. Savings are measured against thinking to the end
            without probes.
        """
        grid = checkpoint_list(checkpoints, max(trace.tokens for trace in self.traces))
        walked = [_walk(trace, grid) for trace in self.traces]
        carried = any(
            probe.tokens < at
            for trace, walk in zip(self.traces, walked, strict=True)
            for probe, at in zip(walk, grid, strict=False)
        )
        settings = {**self.settings, "system": THINKING, "checkpoints": grid}
        return Outcomes(
            answers=[
                [probe.answer for probe in walk] + [trace.answer] * (len(grid) + 1 - len(walk))
                for trace, walk in zip(self.traces, walked, strict=True)
            ],
            scores=[_scores(walk, grid) for walk in walked],
            costs=np.asarray(
                [_costs(t, walk, grid) for t, walk in zip(self.traces, walked, strict=True)]
            ),
            full_costs=np.asarray([float(trace.tokens) for trace in self.traces]),
            unit="tokens",
            labels=[trace.label for trace in self.traces],
            ids=[trace.id for trace in self.traces],
            groups=[str(trace.question) for trace in self.traces],
            settings=settings | ({"carried": True} if carried else {}),
            fingerprint=self.fingerprint,
        ).record(losses)


def checkpoint_list(checkpoints: int | Iterable[int], longest: int) -> list[int]:
    """Return checkpoints as rising token counts; one number is the distance between them.

    Examples
    --------
    >>> checkpoint_list(256, 700)
    [256, 512]
    """
    if isinstance(checkpoints, int | np.integer):
        step = checks.count("checkpoints", checkpoints)
        return list(range(step, max(longest, step + 1), step))
    grid = [checks.count("checkpoints", int(each), 0) for each in checkpoints]
    if not grid or grid != sorted(set(grid)):
        raise ValueError(f"`checkpoints` must rise and not be empty, but got {grid}.")
    return grid


def read_lines(path: str | os.PathLike[str], read: Any) -> Iterator[Any]:
    """Yield what `read` makes of each line of a JSONL file."""
    source = Path(path)
    if not source.is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield read(json.loads(line))
                except (ValueError, TypeError, KeyError, RecursionError) as error:
                    why = f"no {error}" if isinstance(error, KeyError) else shortened(error)
                    raise ValueError(f"{path}, line {number}: {why.removesuffix('.')}.") from None


def labels_of(answers: NDArray[Any], correct: ArrayLike | None) -> list[Any]:
    """Return the answers that are right, `OTHER` where none is."""
    if correct is None:
        return [None] * len(answers)
    right = checks.numbers("correct", correct).astype(bool)
    checks.of_shape("correct", right, {"n": answers.shape[0], "m": answers.shape[1]})
    found = []
    for said, good in zip(answers.tolist(), right, strict=True):
        label = plain(said[good.argmax()]) if good.any() else OTHER
        if [each == label for each in said] != good.tolist():
            raise ValueError(
                f"`correct` must be true for equal answers alone, but {said!r} are"
                f" {good.tolist()}: write all answers that are right in the same way."
            )
        found.append(label)
    return found


def _walk(trace: Trace, grid: Sequence[int]) -> list[Probe]:
    """Return the probe that counts at each checkpoint up to the trace's end."""
    found, latest = [], -1
    for at in grid:
        if at > trace.tokens:
            break
        while latest + 1 < len(trace.probes) and trace.probes[latest + 1].tokens <= at:
            latest += 1
        if latest < 0:
            first = f"its first is at {trace.probes[0].tokens}" if trace.probes else "it has none"
            raise ValueError(
                f"`checkpoints` must not be before the first probe, but at {at} tokens question"
                f" {trace.question!r} had none ({first}): take later checkpoints."
            )
        found.append(trace.probes[latest])
    return found


def _scores(walk: Sequence[Probe], grid: Sequence[int]) -> list[dict[str, float]]:
    answers = [probe.answer for probe in walk]
    return [probe_scores(answers[: k + 1], grid[k]) for k in range(len(walk))]


def _costs(trace: Trace, walk: Sequence[Probe], grid: Sequence[int]) -> list[float]:
    """Return the tokens of thinking and of probes up to each checkpoint and the end."""
    spent = np.cumsum([0.0] + [probe.spent for probe in walk]).tolist()
    here = [at + probes for at, probes in zip(grid, spent[1:], strict=False)]
    return here + [trace.tokens + spent[-1]] * (len(grid) + 1 - len(walk))
