"""Readers for the published files of CNN/DailyMail, SQuAD and IWSLT."""

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
"""Maximum characters in a CSV field: articles exceed Python's default."""


@dataclass(frozen=True)
class TextSample:
    """A text and its reference answers.

    Attributes
    ----------
    id : str
    text : str
        The model's input.
    references : tuple of str
        Correct answers; a single empty one if there is no answer (SQuAD v2).
    group : str
        The same for samples that are not independent, such as SQuAD's questions on one article.
    """

    id: str
    text: str
    references: tuple[str, ...]
    group: str


def cnn_dailymail(
    path: str | os.PathLike[str], *, prefix: str = "summarize: "
) -> Iterator[TextSample]:
    """Read CNN/DailyMail articles and their highlights; the few empty articles are left out.

    Parameters
    ----------
    path : file or folder
        A file of JSON lines (`.jsonl`, `.json`) or CSV with `article`, `highlights` and `id`, as
        Hugging Face and Kaggle publish them; one `.story` file; or a folder of those, the original
        format.
    prefix : str
        T5's task prefix.

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
            raise ValueError(f"`path`: {source} has no .story files.")
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
    """Read the questions of SQuAD v1.1 or v2 as "question: … context: …".

    Questions on one article form a group: they are not independent. A v2 question without an answer
    has one empty reference.

    Parameters
    ----------
    path : file
        `dev-v1.1.json`, `dev-v2.0.json` or another file in their format.
    """
    source = _existing(path)
    try:
        articles = json.loads(source.read_text(encoding="utf-8"))["data"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{source} is not a SQuAD file: expected JSON with `data`.") from None
    for number, article in enumerate(articles):
        group = str(article.get("title") or number)
        for paragraph in article["paragraphs"]:
            for question in paragraph["qas"]:
                yield _question(question, paragraph["context"], group)


def _question(question: dict[str, Any], context: str, group: str) -> TextSample:
    answers = [] if question.get("is_impossible") else question.get("answers", [])
    references = tuple(dict.fromkeys(answer["text"] for answer in answers)) or ("",)
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
                    f"{path}, line {number + 1}, is not a JSON object; expected one per line."
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
    """Read a story: the article's paragraphs, then highlights, each after a line "@highlight"."""
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
    """Read sentences and their translations from the talks of IWSLT 2017.

    Sentences of one talk form a group: they are not independent. Pairs with an empty side are left
    out.

    Parameters
    ----------
    source, target : files
        In the two languages: `IWSLT17.TED.dev2010.de-en.de.xml` and `….en.xml`;
        `train.tags.de-en.de` and `….en`; or plain text, one sentence per line, each its own group.
    prefix : str
        T5's task prefix.

    Raises
    ------
    ValueError
        If the files do not have the same talks and sentences.

    Examples
    --------
    >>> _ = Path("dev.de").write_text("Es regnet."), Path("dev.en").write_text("It rains.")
    >>> next(iwslt("dev.de", "dev.en"))  # doctest: +NORMALIZE_WHITESPACE
    TextSample(id='1', text='translate German to English: Es regnet.',
    references=('It rains.',), group='1')
    """
    paths = _existing(source), _existing(target)
    sentences, translations = (list(_sentences(path)) for path in paths)
    if len(sentences) != len(translations):
        raise ValueError(
            f"`source` and `target` must hold the same sentences, but {paths[0]} has"
            f" {len(sentences)} and {paths[1]} has {len(translations)}."
        )
    for (name, group, text), (other, _, translation) in zip(sentences, translations, strict=True):
        if name != other:
            raise ValueError(
                f"`source` and `target` must hold the same sentences, but {paths[0]} has {name}"
                f" where {paths[1]} has {other}."
            )
        if text and translation:
            yield TextSample(name, prefix + text, (translation,), group)


_TALK_TAG = re.compile(
    r"</?(doc|url|keywords|speaker|talkid|title|description|reviewer|translator|transcript)\b.*?>"
)
"""Tags that start the lines of a training file that are not sentences."""


def _sentences(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, talk and text of every sentence of one language."""
    with path.open(encoding="utf-8", newline="\n") as file:  # other separators belong to the text
        lines = list(file)
    if path.suffix == ".xml":
        return _xml_sentences(lines)
    if path.name.startswith("train.tags"):
        return _tagged_sentences(lines)
    return ((str(k), str(k), _one_line(line)) for k, line in enumerate(lines, 1))


def _xml_sentences(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Read a development or test set, one segment per line; some of the files are not valid XML."""
    talk = ""
    for line in lines:
        found = re.search(r'<doc[^>]*docid="([^"]*)"', line)
        talk = found[1] if found else talk
        segment = re.search(r'<seg id="(\d+)">(.*)</seg>', line)
        if segment:
            yield f"{talk}-{segment[1]}", talk, _one_line(html.unescape(segment[2]))


def _tagged_sentences(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """Read a training set: each talk's description in tags, then its sentences."""
    talk, place = "", 0
    for line in lines:
        tag = _TALK_TAG.match(line.strip())
        if tag is None:
            place += 1
            yield f"{talk}-{place}", talk, _one_line(line)
        elif tag[1] == "talkid":
            talk, place = _one_line(re.sub(r"<[^>]*>", "", line)), 0
