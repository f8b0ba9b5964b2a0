"""`AnswerSheet`: the questions and answers behind a record, for those who label it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from swiftsure.cascade.answer_log import FILE, AnswerKey, AnswerLog
from swiftsure.cascade.answer_losses import answer_tables
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.collecting import input_keys
from swiftsure.cascade.confidences import answer_confidence
from swiftsure.cascade.logs import answered_by_all, read_logs
from swiftsure.losses import LOSSES
from swiftsure.records import ExitRecord

__all__ = ["AnswerSheet"]


@dataclass(frozen=True)
class AnswerSheet:
    """What was asked, and what each model answered, for every sample of a record.

    Parameters
    ----------
    models : sequence of str
        Cheapest first.
    questions : (n,)
        Texts, messages or other inputs; None where they are not known.
    answers : (n, n_models)
    """

    models: Sequence[str]
    questions: Sequence[Any]
    answers: Sequence[Sequence[Answer]]

    @classmethod
    def of_logs(
        cls, record: ExitRecord, paths: Sequence[Path], models: Sequence[str] | None
    ) -> Self:
        """Read the logs that `swiftsure record` made the record from."""
        entries, names = read_logs(paths, models)
        keys, rows = answered_by_all(entries, names)
        place = {key: i for i, key in enumerate(keys)}
        order = [_found(place, str(each), "`--answers`") for each in record.ids.tolist()]
        questions = [rows[0][i].prompt for i in order]
        return cls(names, questions, [[row[i].answer for row in rows] for i in order])

    @classmethod
    def of_folder(
        cls, record: ExitRecord, folder: Path, questions: Path, models: Sequence[str]
    ) -> Self:
        """Read the folder of `Cascade.collect`, whose answers are known by their inputs."""
        if not (folder / FILE).is_file():
            raise ValueError(f"`--answers`: {folder} must hold {FILE}, as from `collect`.")
        ids, values = _inputs(questions)
        place = {each: i for i, each in enumerate(ids)}
        order = [_found(place, each, "`--questions`") for each in record.ids.tolist()]
        with AnswerLog(folder) as log:
            own = [_model_key(log, name) for name in models]
            inputs = input_keys(values, ids)
            wanted = [[AnswerKey(model, *inputs[i]) for model in own] for i in order]
            lacking = [
                i for i, row in zip(order, wanted, strict=True) if set(row) - log.answers.keys()
            ]
            if lacking:
                raise ValueError(
                    f"`--questions`: {folder} has no answers to line {lacking[0] + 1} of"
                    f" {questions}. It must hold the inputs of `collect`, in their order."
                )
            answers = [[log.answers[key][0] for key in row] for row in wanted]
        return cls(list(models), [values[i] for i in order], answers)

    def check(self, record: ExitRecord, loss: str) -> None:
        """Raise if the record was made from other answers."""
        _, aside = answer_tables(LOSSES[loss], list(zip(*self.answers, strict=True)), None)
        same = _equal(aside, record.inconsistencies[loss])
        for score, values in record.confidences.items():
            own = [[answer_confidence(each, score) for each in row[:-1]] for row in self.answers]
            known = all(each is not None for row in own for each in row)
            same = same and (not known or _equal(np.asarray(own, np.float32), values))
        if not same:
            raise ValueError(
                "`--answers` must be those that the record was made from, by the same models,"
                " cheapest first: these differ from it."
            )

    def losses(self, loss: str, rows: Sequence[int], labels: Sequence[Any]) -> NDArray[np.float64]:
        """Return the losses of some samples against their labels, (m, n_models)."""
        answers = list(zip(*(self.answers[row] for row in rows), strict=True))
        against, _ = answer_tables(LOSSES[loss], answers, labels)
        return np.asarray(against)

    def label(self, row: int, text: str) -> Any:
        """Return a label that was typed: a class number if the answers are such, or the text."""
        return int(text) if isinstance(self.answers[row][-1].answer, int) else text

    def cells(self, row: int) -> list[str]:
        """Return a question and its answers, for a line of a table."""
        return [_readable(each) for each in (self.questions[row], *self._said(row))]

    def _said(self, row: int) -> list[Any]:
        return [answer.answer for answer in self.answers[row]]

    def shown(self, row: int) -> str:
        """Return a question and its answers in lines."""
        lines = [f"  question: {_readable(self.questions[row])}"]
        said = zip(self.models, self._said(row), strict=True)
        lines += [f"  {name}: {_readable(answer)}" for name, answer in said]
        return "\n".join(lines)


def _found(place: dict[Any, int], name: Any, where: str) -> int:
    if name not in place:
        raise ValueError(f"{where} must hold every sample of the record, but {name!r} is missing.")
    return place[name]


def _equal(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and np.allclose(one, other, atol=1e-6)


def _inputs(path: Path) -> tuple[list[Any], list[Any]]:
    """Return the ids and inputs of a file: a text per line, or JSON if its name ends in .jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix.lower() != ".jsonl":
        return list(range(len(lines))), list(lines)
    try:
        values = [json.loads(line) for line in lines if line.strip()]
    except ValueError as error:
        raise ValueError(
            f"`--questions`: {path} holds a line that is not JSON ({error})."
        ) from None
    named = [isinstance(each, dict) and {"id", "input"} == each.keys() for each in values]
    if all(named):
        return [each["id"] for each in values], [each["input"] for each in values]
    return list(range(len(values))), values


def _model_key(log: AnswerLog, name: str) -> str:
    """Return what the log knows a model by."""
    known = sorted({key.model for key in log.answers})
    found = [each for each in known if each == f"name {name}" or each.rpartition(" ")[0] == name]
    if len(found) != 1:
        names = ", ".join(each.removeprefix("name ") for each in known)
        raise ValueError(f"`--models`: {name!r} must be one of the models asked: {names}.")
    return found[0]


def _readable(value: Any) -> str:
    """Return a text for a terminal, without control characters that a model may have sent."""
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        value = "\n".join(f"{each.get('role')}: {each.get('content')}" for each in value)
    text = "(not in the logs)" if value is None else str(value)
    shown = "".join(each if each.isprintable() or each == "\n" else "\ufffd" for each in text)
    return shown.replace("\n", "\n    ")
