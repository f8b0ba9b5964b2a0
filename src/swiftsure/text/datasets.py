"""CNN/DailyMail, SQuAD and IWSLT, from the files that they are published in."""

import csv
import html
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["TextSample", "cnn_dailymail", "iwslt", "squad"]

LARGE_FIELD = 2**24
"""Most characters of a field of a CSV file: articles are longer than Python expects."""


@dataclass(frozen=True)
class TextSample:
    """One text and what is expected of it.

    Attributes
    ----------
    id : str
    text : str
        What the model is given.
    references : tuple of str
        Any of which is right; a single empty one where there is no answer (SQuAD v2).
    group : str
        What samples share that are not independent: SQuAD's questions on one article.
    """

    id: str
    text: str
    references: tuple[str, ...]
    group: str


def cnn_dailymail(
    path: str | os.PathLike[str], *, prefix: str = "summarize: "
) -> Iterator[TextSample]:
    """Read articles and their highlights; empty articles, of which there are some, are left out.

    Parameters
    ----------
    path : file or folder
        A file of JSON lines (`.jsonl`, `.json`) or CSV with `article`, `highlights` and `id`, as
        Hugging Face and Kaggle publish them; one `.story` file; or a folder of those, as they were
        first published.
    prefix : str
        What T5 is told before the article.

    Examples
    --------
    >>> line = '{"id": "1", "article": "It rained.", "highlights": "Rain."}'
    >>> _ = Path("test.jsonl").write_text(line)
    >>> next(cnn_dailymail("test.jsonl")).text
    'summarize: It rained.'
    """
    source = _existing(path)
    if source.is_dir():
        stories = sorted(source.glob("*.story"))
        if not stories:
            raise ValueError(f"`path`: {source} holds no .story files.")
        rows: Iterator[dict[str, str]] = map(_story, stories)
    elif source.suffix == ".story":
        rows = iter([_story(source)])
    elif source.suffix == ".csv":
        rows = _csv_rows(source)
    elif source.suffix in (".jsonl", ".json"):
        rows = _json_rows(source)
    else:
        raise ValueError(
            "`path` must be a .jsonl, .csv or .story file, or a folder of stories, but got"
            f" {source}."
        )
    for place, row in enumerate(rows):
        if row.get("article") == "":
            continue
        missing = [name for name in ("article", "highlights") if not row.get(name)]
        if missing:
            raise ValueError(f"{source}, number {place}, lacks {' and '.join(missing)}.")
        name = str(row.get("id") or place)
        yield TextSample(name, prefix + row["article"], (row["highlights"],), name)


def squad(path: str | os.PathLike[str]) -> Iterator[TextSample]:
    """Read questions on paragraphs, of SQuAD v1.1 or v2: "question: … context: …".

    Questions on one article are a group: they are not independent. A question of v2 that has no
    answer has one empty reference.

    Parameters
    ----------
    path : file
        `dev-v1.1.json`, `dev-v2.0.json` or of their layout.
    """
    source = _existing(path)
    try:
        articles = json.loads(source.read_text(encoding="utf-8"))["data"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{source} is no SQuAD file: JSON with `data` is expected.") from None
    for number, article in enumerate(articles):
        group = str(article.get("title") or number)
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield _question(question, paragraph["context"], group)


def _question(question: dict[str, Any], context: str, group: str) -> TextSample:
    said = [answer["text"] for answer in question.get("answers", [])]
    if question.get("is_impossible"):
        said = []
    references = tuple(dict.fromkeys(said)) or ("",)
    text = f"question: {question['question'].strip()} context: {context.strip()}"
    return TextSample(str(question["id"]), text, references, group)


def _existing(path: str | os.PathLike[str]) -> Path:
    source = Path(path)
    if not source.exists():
        raise ValueError(f"`path` must be an existing file or folder, but {source} is not one.")
    return source


def _json_rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number + 1}, is not JSON ({error}).") from None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{path}, line {number + 1}, is no JSON object: one sample a line is expected."
                )
            yield row


def _csv_rows(path: Path) -> Iterator[dict[str, str]]:
    before = csv.field_size_limit(LARGE_FIELD)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    finally:
        csv.field_size_limit(before)
    yield from rows


def _story(path: Path) -> dict[str, str]:
    """Read a story: paragraphs of the article, then highlights, each after a line "@highlight"."""
    article, *highlights = path.read_text(encoding="utf-8").split("@highlight")
    return {
        "id": path.stem,
        "article": _one_line(article),
        "highlights": "\n".join(_one_line(each) for each in highlights),
    }


def _one_line(text: str) -> str:
    return " ".join(text.split())


def iwslt(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    prefix: str = "translate German to English: ",
) -> Iterator[TextSample]:
    """Read sentences of talks and their translations, of IWSLT 2017.

    Sentences of one talk are a group: they are not independent. Pairs of which one side is empty
    are left out.

    Parameters
    ----------
    source, target : files
        Of the two languages: `IWSLT17.TED.dev2010.de-en.de.xml` and `….en.xml`;
        `train.tags.de-en.de` and `….en`; or plain text, a sentence a line, each its own group.
    prefix : str
        What T5 is told before the sentence.

    Raises
    ------
    ValueError
        If the files do not hold the same talks and sentences.

    Examples
    --------
    >>> _ = Path("dev.de").write_text("Es regnet."), Path("dev.en").write_text("It rains.")
    >>> next(iwslt("dev.de", "dev.en"))  # doctest: +NORMALIZE_WHITESPACE
    TextSample(id='1', text='translate German to English: Es regnet.',
    references=('It rains.',), group='1')
    """
    paths = _existing(source), _existing(target)
    said, expected = (list(_sentences(path)) for path in paths)
    if len(said) != len(expected):
        raise ValueError(
            f"`source` and `target` must hold the same sentences, but {paths[0]} has {len(said)}"
            f" and {paths[1]} has {len(expected)}."
        )
    for (name, group, text), (other, _, translation) in zip(said, expected, strict=True):
        if name != other:
            raise ValueError(
                f"`source` and `target` must hold the same sentences, but {paths[0]} has {name}"
                f" where {paths[1]} has {other}."
            )
        if text and translation:
            yield TextSample(name, prefix + text, (translation,), group)


_TAG = re.compile(r"<(/?)(\w+)(.*?)>")
_TALK_TAGS = frozenset(
    [
        "doc",
        "url",
        "keywords",
        "speaker",
        "talkid",
        "title",
        "description",
        "reviewer",
        "translator",
        "transcript",
    ]
)
"""What begins a line of a training file that is no sentence."""


def _sentences(path: Path) -> Iterator[tuple[str, str, str]]:
    """Give name, talk and text of every sentence of one language."""
    with path.open(encoding="utf-8", newline="\n") as file:  # other separators are part of a text
        lines = list(file)
    if path.suffix == ".xml":
        return _xml_sentences(lines)
    if path.name.startswith("train.tags"):
        return _tagged_sentences(lines)
    return ((str(k), str(k), _one_line(line)) for k, line in enumerate(lines, 1))


def _xml_sentences(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Read a development or test set, a segment a line; not all of these files are valid XML."""
    talk = ""
    for line in lines:
        found = re.search(r'<doc[^>]*docid="([^"]*)"', line)
        talk = found[1] if found else talk
        segment = re.search(r'<seg id="(\d+)">(.*)</seg>', line)
        if segment:
            yield f"{talk}-{segment[1]}", talk, _one_line(html.unescape(segment[2]))


def _tagged_sentences(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Read a training set: a talk's description in tags, then its sentences."""
    talk, place = "", 0
    for line in lines:
        tag = _TAG.match(line.strip())
        if tag is None or tag[2] not in _TALK_TAGS:
            place += 1
            yield f"{talk}-{place}", talk, _one_line(line)
        elif tag[2] == "talkid":
            talk, place = _one_line(re.sub(r"<[^>]*>", "", line)), 0
