"""`VoteRecord`: several sampled answers to each question, in the order in which they were drawn."""

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc
from scipy.stats import betabinom

from swiftsure._lib import checks
from swiftsure._lib.files import write_text
from swiftsure.cascade.answers import Answer, plain
from swiftsure.reasoning.outcomes import Outcomes
from swiftsure.reasoning.traces import labels_of, read_lines
from swiftsure.records import ExitRecord

__all__ = ["VOTING", "VoteRecord", "majority", "vote_scores"]

VOTING = "voting"
"""The system that policies made from votes are for."""


def majority(answers: Sequence[Any]) -> Any:
    """Return the most frequent answer; the one drawn first, if several are.

    None is an answer that could not be read. It has no vote.

    Examples
    --------
    >>> majority(["B", "A", None, "A"]), majority(["B", "A"]), majority([None])
    ('A', 'B', None)
    """
    counts = _counts(answers)
    return counts[0][0] if counts else None


def vote_scores(answers: Sequence[Any], samples: int) -> dict[str, float]:
    """Return confidences of the majority of the first of `samples` answers, by name.

    | name | what it is |
    |---|---|
    | `lead` | P(p > ½) for p ~ Beta(1 + leader's votes, 1 + second's votes): whether the leader's \
answer is drawn more often than the second's |
    | `stays` | how likely it leads when all samples are drawn, those left being its own or the \
second's with such a p |
    | `drawn` | the share of the samples that are drawn |

    Examples
    --------
    >>> vote_scores(["A", "A", "B"], samples=4)
    {'lead': 0.6875, 'stays': 0.8, 'drawn': 0.75}
    """
    first, second = ([count for _, count in _counts(answers)] + [0, 0])[:2]
    return {
        "lead": float(betainc(1 + second, 1 + first, 0.5)),
        "stays": _stays(first, second, samples - len(answers)),
        "drawn": len(answers) / samples,
    }


@cache
def _stays(first: int, second: int, left: int) -> float:
    more = np.arange(left + 1)
    chance = betabinom.pmf(more, left, 1 + first, 1 + second)
    ahead = first + more - (second + left - more)
    return float(min(1.0, chance[ahead > 0].sum() + 0.5 * chance[ahead == 0].sum()))


def _counts(answers: Sequence[Any]) -> list[tuple[Any, int]]:
    """Return answers with their votes, the most frequent first; equal ones in order."""
    return Counter(each for each in answers if each is not None).most_common()


@dataclass(frozen=True, eq=False)
class VoteRecord:
    """Answers to each question in the order in which they were drawn; the full answer is a vote.

    Parameters
    ----------
    answers : sequence of sequences
        Of texts or numbers that are equal where the answers are; None for one that could not be
        read. A question may have fewer answers than others.
    labels : (n,), optional
        The right answers; None for one that is missing.
    correct : nested sequences like `answers`, optional
        Whether each answer is right, where the labels themselves are not known. All right answers
        of a question must be equal, and no wrong one equal to them.
    questions : (n,), optional
        Names of the questions; rows of the same question are a group.
    settings : mapping
        How the model was asked, which policies keep.
    fingerprint : str, optional
        Of the model and of how it was asked; policies are bound to it.

    Examples
    --------
    >>> record = VoteRecord([["A", "A", "A"], ["B", "A", "A"]], labels=["A", "A"])
    >>> exits = record.exits()
    >>> exits.losses["zero_one"]
    array([[0., 0., 0.],
           [1., 1., 0.]])
    """

    answers: Sequence[Sequence[Any]]
    labels: Sequence[Any] | NDArray[Any] | None = None
    correct: ArrayLike | None = None
    questions: Sequence[Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str | None = None

    def __post_init__(self) -> None:
        """Check the lengths."""
        rows = tuple(tuple(plain(each) for each in row) for row in self.answers)
        if not rows or any(not row for row in rows):
            raise ValueError("`answers` must hold at least one answer to at least one question.")
        object.__setattr__(self, "answers", rows)
        n = len(rows)
        if self.labels is not None and self.correct is not None:
            raise ValueError("`labels` or `correct` must be given, not both.")
        if self.correct is not None:
            known = labels_of(np.asarray(rows, object), self.correct)
        else:
            known = [None] * n if self.labels is None else [plain(y) for y in self.labels]
        named = list(range(n)) if self.questions is None else [plain(q) for q in self.questions]
        for name, values in (("labels", known), ("questions", named)):
            if len(values) != n:
                raise ValueError(f"`{name}` must be one per question, {n}, but got {len(values)}.")
        object.__setattr__(self, "labels", tuple(known))
        object.__setattr__(self, "correct", None)
        object.__setattr__(self, "questions", tuple(named))

    def __len__(self) -> int:
        return len(self.answers)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "VoteRecord":
        """Read votes from JSON lines, one question each; `question` and `label` are optional.

        {"question": "q1", "answers": ["A", "B", "A"], "label": "A"}
        """
        lines = list(read_lines(path, lambda each: (each["answers"], each)))
        if not lines:
            raise ValueError(f"`path` must hold at least one line, but {path} is empty.")
        return cls(
            [answers for answers, _ in lines],
            [each.get("label") for _, each in lines],
            questions=[each.get("question", k) for k, (_, each) in enumerate(lines)],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the votes as JSON lines."""
        rows = zip(self.questions or (), self.answers, self.labels or (), strict=True)
        lines = (
            json.dumps({"question": q, "answers": list(row), "label": label}, ensure_ascii=False)
            for q, row, label in rows
        )
        write_text(path, "".join(f"{line}\n" for line in lines))

    def exits(self, samples: int | None = None, *, losses: Any = None) -> ExitRecord:
        """Return the record of a vote that may stop after any answer, to calibrate on.

        Exit k is the majority of the first k answers, at the cost of k samples; the last exit is
        that of all. Where a question has fewer answers than `samples`, its vote ends with them, as
        no `Voter` ends: it refuses policies made from such votes.

        Parameters
        ----------
        samples : int, optional
            How many answers a full vote has; by default the most that a question has.
        losses : str or several
            As in `Cascade.collect`; by default "zero_one".

        Examples
        --------
        >>> VoteRecord([["A", "A", "B"]]).exits().costs["samples"]
        array([[1., 2., 3.]])
        """
        most = samples or max(map(len, self.answers))
        if checks.count("samples", most) < 2:
            raise ValueError("`samples` must be at least 2: there is nothing to stop.")
        rows = [row[:most] for row in self.answers]
        ends = np.asarray([float(len(row)) for row in rows])
        ids = [str(q) for q in self.questions or ()]
        seen: Counter[str] = Counter()
        unique = []
        for each in ids:
            unique.append(f"{each}/{seen[each]}")
            seen[each] += 1
        return Outcomes(
            answers=[[Answer(majority(row[:k])) for k in range(1, most + 1)] for row in rows],
            scores=[
                [vote_scores(row[:k], most) for k in range(1, min(len(row) + 1, most))]
                for row in rows
            ],
            costs=np.minimum(np.arange(1.0, most + 1), ends[:, None]),
            full_costs=ends,
            unit="samples",
            labels=list(self.labels or ()),
            ids=unique,
            groups=ids,
            settings={
                **self.settings,
                "system": VOTING,
                "places": most - 1,
                **({"uneven": True} if ends.min() < most else {}),
            },
            fingerprint=self.fingerprint,
        ).record(losses)
