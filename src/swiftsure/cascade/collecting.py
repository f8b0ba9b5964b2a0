"""Collection: asks every model about every input, once, and keeps each answer as it arrives."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from swiftsure._lib import checks
from swiftsure._lib.progress import steps
from swiftsure.cascade.answer_log import AnswerKey, AnswerLog, input_digest
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.models import BatchModel, Model, identity_digest
from swiftsure.cascade.retrying import Backoff, described

__all__ = ["CollectionError", "ask_all", "input_keys", "model_key", "rows_of"]


class CollectionError(Exception):
    """Some inputs have no answer; those that arrived are kept, and the same call resumes.

    Attributes
    ----------
    missing : int
        How many answers are missing.
    """

    def __init__(self, message: str, missing: int) -> None:
        super().__init__(message)
        self.missing = missing


async def ask_all(
    models: Sequence[Model],
    inputs: Any,
    keys: Sequence[Sequence[AnswerKey]],
    *,
    folder: str | os.PathLike[str] | None,
    concurrency: int,
    backoff: Backoff,
    progress: bool | None,
    title: str = "collecting",
) -> list[list[tuple[Answer, float]]]:
    """Return the answer of every model to every input, (n_models, n), with its seconds.

    Answers that the folder holds are not asked for again. After the first error that retries do not
    cure, nothing new is asked, but answers under way are awaited and kept.
    """
    limit = asyncio.Semaphore(checks.count("concurrency", concurrency))
    with AnswerLog(folder) as log:
        due = [[i for i, key in enumerate(row) if key not in log.answers] for row in keys]
        total = sum(len(row) for row in keys)
        with steps(title, total, progress) as advance:
            for _ in range(total - sum(map(len, due))):
                advance()
            jobs = _Jobs(log, limit, backoff, advance)
            tasks = [
                asyncio.create_task(jobs.run(model, rows_of(inputs, part), [row[i] for i in part]))
                for model, row, missing in zip(models, keys, due, strict=True)
                for part in _parts(missing, model)
            ]
            await asyncio.gather(*tasks)
        if jobs.error is not None:
            missing = sum(key not in log.answers for row in keys for key in row)
            kept = f" The others are in {str(folder)!r}, so the same call resumes."
            raise CollectionError(
                f"Collecting stopped with {missing:,} of {total:,} answers missing:"
                f" {described(jobs.error)}{'' if folder is None else kept}",
                missing,
            ) from jobs.error
        return [[log.answers[key] for key in row] for row in keys]


class _Jobs:
    """Calls models, a limited number at once, until one of them fails for good."""

    def __init__(
        self,
        log: AnswerLog,
        limit: asyncio.Semaphore,
        backoff: Backoff,
        advance: Callable[[], None],
    ) -> None:
        self.log = log
        self.limit = limit
        self.backoff = backoff
        self.advance = advance
        self.error: Exception | None = None

    async def run(self, model: Model, inputs: Any, keys: list[AnswerKey]) -> None:
        """Ask one model about some inputs and keep its answers."""
        async with self.limit:
            if self.error is not None:
                return
            try:
                await self._ask(model, inputs, keys)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self.error is None:  # another call may have failed meanwhile
            self.error = error

    async def _ask(self, model: Model, inputs: Any, keys: list[AnswerKey]) -> None:
        async def ask() -> tuple[list[Answer], float]:
            start = time.perf_counter()  # without waits between tries
            if isinstance(model, BatchModel):
                found = await asyncio.to_thread(model.answers, inputs)
            else:
                found = [await model.answer(inputs[0])]
            return found, time.perf_counter() - start

        found, seconds = await self.backoff.call(ask)
        if len(found) != len(keys):
            raise ValueError(f"{model.name} gave {len(found)} answers to {len(keys)} inputs.")
        each = seconds / len(keys)
        self.log.append((key, answer, each) for key, answer in zip(keys, found, strict=True))
        for _ in keys:
            self.advance()


def _parts(rows: list[int], model: Model) -> Iterator[list[int]]:
    """Yield the inputs of each call."""
    size = model.batch_size if isinstance(model, BatchModel) else 1
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def rows_of(inputs: Any, rows: Sequence[int] | NDArray[Any]) -> Any:
    """Return some of the inputs: of a data frame, an array, or a list."""
    if hasattr(inputs, "iloc"):
        return inputs.iloc[list(rows)]
    if hasattr(inputs, "shape"):
        return inputs[list(rows)]
    return [inputs[row] for row in rows]


def input_keys(inputs: Any, ids: Sequence[Any] | None) -> list[tuple[str, int]]:
    """Return a digest of each input, and which of several equal inputs it is."""
    n = len(inputs)
    each = inputs if not hasattr(inputs, "iloc") else (inputs.iloc[i] for i in range(n))
    seen: Counter[str] = Counter()
    found = []
    for position, value in enumerate(each):
        try:
            digest = input_digest(value)
        except TypeError:
            if ids is None:
                raise
            digest = f"id {ids[position]}"
        found.append((digest, seen[digest]))
        seen[digest] += 1
    return found


def model_key(model: Model) -> str:
    """Return what an answer log knows a model by: its identity, or its name if it has none."""
    digest = identity_digest([model.identity()])
    return f"name {model.name}" if digest is None else f"{model.name} {digest[:23]}"
