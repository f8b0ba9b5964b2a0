"""`AnswerLog`: a file of answers, each on disk before it counts, so that none is paid twice.

Each line is a JSON object with a checksum. The last line may be torn by a killed process; it is
then cut off. Inputs are stored as digests only.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from swiftsure._lib.files import locked, sync
from swiftsure.cascade.answers import Answer, plain

__all__ = ["AnswerKey", "AnswerLog", "input_digest"]

FILE = "answers.jsonl"
HEAD = {"format": "swiftsure-answers", "version": 1}


class AnswerKey(NamedTuple):
    """What an answer belongs to: a model, an input, and which of several equal inputs."""

    model: str
    input: str
    repeat: int = 0


class AnswerLog:
    """The answers that models gave so far, in memory and, with a folder, on disk.

    Use it as a context manager: it locks the folder, so that two runs never pay for the same input.
    Several cascades may use one folder: models that they share are asked once.

    Parameters
    ----------
    folder : path, optional
        Without one, answers are kept in memory only.

    Attributes
    ----------
    answers : dict of AnswerKey to (Answer, seconds)
    """

    def __init__(self, folder: str | os.PathLike[str] | None) -> None:
        self.folder = None if folder is None else Path(folder)
        self.answers: dict[AnswerKey, tuple[Answer, float]] = {}
        self._stack = ExitStack()
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._stack.enter_context(locked(self.folder))
            try:
                self._open(self.folder / FILE)
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._file = None
        self._stack.close()

    def append(self, found: Iterable[tuple[AnswerKey, Answer, float]]) -> None:
        """Add answers with the seconds that each took, and wait until they are on the disk."""
        new = list(found)
        if self._file is not None:
            lines = [_line(_entry(*each)) for each in new]
            self._file.write(b"".join(lines))
            self._file.flush()
            os.fsync(self._file.fileno())
        # Without whole responses, which would fill the memory.
        self.answers |= {key: (replace(a, response=None), seconds) for key, a, seconds in new}

    def _open(self, path: Path) -> None:
        """Read the answers of earlier runs, cut off a torn last line, and open for appending."""
        if not path.exists():
            path.write_bytes(_line(HEAD))
            sync(path)
            sync(path.parent)
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        lines = content[:whole].splitlines()
        head = _parsed(lines[0]) if lines else None
        if head is None or head.get("format") != HEAD["format"]:
            raise ValueError(f"{path} is not a file of Swiftsure answers: choose another folder.")
        if head.get("version") != HEAD["version"]:
            raise ValueError(
                f"{path} was written by a newer Swiftsure (version {head.get('version')}): upgrade"
                " swiftsure to read it."
            )
        damaged = [n for n, line in enumerate(lines[1:], start=2) if not self._read(line)]
        if damaged:
            warnings.warn(
                f"{path} has {len(damaged)} damaged line(s), the first of them line {damaged[0]}:"
                " these answers are asked for again.",
                UserWarning,
                stacklevel=4,
            )
        self._file = self._stack.enter_context(path.open("r+b"))
        self._file.truncate(whole)
        self._file.seek(whole)

    def _read(self, line: bytes) -> bool:
        """Store the answer of a line; return False if it is damaged."""
        content = _parsed(line)
        try:
            if content is None:
                return False
            key = AnswerKey(content["model"], content["input"], content["repeat"])
            self.answers[key] = Answer.of(content["content"]), float(content["seconds"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return False
        return True


def _entry(key: AnswerKey, answer: Answer, seconds: float) -> dict[str, Any]:
    return {**key._asdict(), "seconds": seconds, "content": answer.to_json()}


def _line(content: Mapping[str, Any]) -> bytes:
    """Return a line of JSON that ends with the checksum of what is before it."""
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`answer` must be something that JSON can hold, to be kept in a folder: {error}."
        ) from None
    body = text.encode("utf-8", "surrogatepass")[:-1]
    return body + b', "sum": "' + _sum(body).encode() + b'"}\n'


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the content of a line; None if it is damaged."""
    body, mark, rest = line.rpartition(b', "sum": "')
    if not mark or rest != _sum(body).encode() + b'"}':
        return None
    try:
        content = json.loads(body.decode("utf-8", "surrogatepass") + "}")
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _sum(body: bytes) -> str:
    return hashlib.blake2b(body, digest_size=8).hexdigest()


def input_digest(value: Any) -> str:
    """Return a digest of an input: text, numbers, arrays, and lists and mappings of them.

    Raises
    ------
    TypeError
        For anything else; give such inputs ids.
    """
    digest = hashlib.sha256()
    _update(digest, value)
    return digest.hexdigest()[:32]


def _update(digest: Any, value: Any) -> None:
    if hasattr(value, "to_dict") and hasattr(value, "index"):  # a row of a data frame
        value = {str(k): plain(v) for k, v in value.to_dict().items()}
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"array {value.dtype.str} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, bytes):
        digest.update(b"bytes " + value)
    else:
        try:
            text = json.dumps(value, sort_keys=True, default=plain)
        except (TypeError, ValueError) as error:
            raise TypeError(
                "`inputs` must be texts, numbers, arrays, or lists and mappings of them to be"
                f" recognised when a run resumes; pass `ids` for other objects ({error})."
            ) from None
        digest.update(b"json " + text.encode("utf-8", "surrogatepass"))
