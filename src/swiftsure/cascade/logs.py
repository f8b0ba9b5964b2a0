"""Logs as records: JSON lines of your own, of proxies in OpenAI's form, and of lm-eval.

Each line is one answer of one model to one input. Lines of different models belong together by
their id, or by their prompt where they have none.

| form | recognised by | read from it |
|---|---|---|
| own | `answer` | `id`, `prompt`, `model`, `confidence`, `logprobs`, `scores`, `cost`, `label` |
| OpenAI, LiteLLM | `response` with choices | `messages` or `request`, `model`, `response_cost` |
| OpenAI batch | `response.body` | `custom_id` |
| Helicone | `response_body` | `request_body`, `cost` |
| lm-eval | `resps` | `doc_id`, `target`, `acc`, `exact_match` |
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from swiftsure._lib import checks
from swiftsure._lib.files import shortened
from swiftsure.cascade.answer_log import input_digest
from swiftsure.cascade.answers import Answer
from swiftsure.cascade.cascade import record_of_answers
from swiftsure.cascade.endpoints import answer_of_response, usage_cost
from swiftsure.cascade.retrying import UpstreamError
from swiftsure.records import ExitRecord

__all__ = ["LogEntry", "answered_by_all", "read_log", "read_logs", "record_of_logs"]

OWN = ("confidence", "cost", "probabilities", "logprobs", "top_logprobs", "scores")
METRICS = ("acc", "exact_match", "acc_norm")
"""lm-eval's measures of one sample that are 0 or 1."""


@dataclass(frozen=True)
class LogEntry:
    """One line of a log: one answer of one model."""

    place: str
    key: str
    answer: Answer
    model: str | None = None
    label: Any = None
    seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    prompt: Any = None
    """A text or messages, if the line holds them."""


def read_log(
    path: str | os.PathLike[str], prices: Mapping[str, Sequence[float]] | None = None
) -> Iterator[LogEntry]:
    """Yield the entries of a file of JSON lines.

    Parameters
    ----------
    path : path
    prices : mapping, optional
        Prices of a million tokens, (input, output), by model, for lines that state no cost.

    Raises
    ------
    ValueError
        With the file and the number of the line that cannot be read.
    """
    source = Path(path)
    if not source.is_file():
        raise ValueError(f"`path` must be an existing file, but {path} is not one.")
    with source.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                content = json.loads(line)
                if not isinstance(content, dict):
                    raise ValueError("it is not an object")
                yield _entry(place, content, prices or {})
            except (UpstreamError, ValueError, TypeError, KeyError, RecursionError) as error:
                why = f"no {error}" if isinstance(error, KeyError) else shortened(error)
                raise ValueError(f"{place}: {why.removesuffix('.')}.") from None


def read_logs(
    paths: Sequence[Path],
    models: Sequence[str] | None = None,
    prices: Mapping[str, Sequence[float]] | None = None,
) -> tuple[list[LogEntry], list[str]]:
    """Return the entries of several logs, and the models, cheapest first.

    Without `models`, each file is of one model, and named for it.
    """
    if models is not None:
        return [entry for path in paths for entry in read_log(path, prices)], list(models)
    if len(paths) < 2:
        raise ValueError("`--models` must name the models, cheapest first, if there is one log.")
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        raise ValueError("The logs must have different names, which name their models.")
    entries = [
        replace(entry, model=name)
        for path, name in zip(paths, names, strict=True)
        for entry in read_log(path, prices)
    ]
    return entries, names


def record_of_logs(
    entries: Sequence[LogEntry],
    *,
    models: Sequence[str],
    labels: Mapping[str, Any] | None = None,
    losses: Any = None,
    scores: Sequence[str] = ("confidence",),
) -> ExitRecord:
    """Return the record of the inputs that every model answered.

    Parameters
    ----------
    entries : sequence of LogEntry
        Each with its model.
    models : sequence of str
        Cheapest first; others are left out.
    labels : mapping of keys to labels, optional
        In place of those in the log.
    losses, scores
        As in `Cascade`.
    """
    keys, rows = answered_by_all(entries, models)
    found = [_label(key, [row[i] for row in rows], labels) for i, key in enumerate(keys)]
    metrics = [
        name for name in METRICS if all(name in entry.metrics for row in rows for entry in row)
    ]
    graded = {
        name: (1 - np.asarray([[e.metrics[name] for e in row] for row in rows], np.float64).T, None)
        for name in metrics
    }
    timed = all(entry.seconds is not None for row in rows for entry in row)
    return record_of_answers(
        [[entry.answer for entry in row] for row in rows],
        found if any(each is not None for each in found) else None,
        seconds=np.asarray([[e.seconds for e in row] for row in rows]).T if timed else None,
        losses=losses if losses is not None or not metrics else [],
        scores=scores,
        names=models,
        graded={f"lm_eval_{name}": each for name, each in graded.items()} if losses is None else {},
        ids=keys,
        inputs=[entry.prompt for entry in rows[0]],
    )


def answered_by_all(
    entries: Sequence[LogEntry], models: Sequence[str]
) -> tuple[list[str], list[list[LogEntry]]]:
    """Return the keys of the inputs that every model answered, and their entries by model."""
    by_model: dict[str, dict[str, LogEntry]] = {name: {} for name in models}
    for entry in entries:
        own = by_model.get(entry.model or "")
        if own is None:
            continue
        if entry.key in own:
            raise ValueError(
                f"{entry.place}: {entry.model} answered this input already, in"
                f" {own[entry.key].place}. Keep one of the two, or give the lines ids."
            )
        own[entry.key] = entry
    for name, own in by_model.items():
        if not own:
            seen = sorted({str(entry.model) for entry in entries})
            raise ValueError(f"`models`: no line is of {name!r}; the log has: {', '.join(seen)}.")
    keys = [key for key in by_model[models[0]] if all(key in own for own in by_model.values())]
    if not keys:
        raise ValueError(
            "No input was answered by every model. Lines belong together by their id, or else by"
            " their prompt."
        )
    rows = [[by_model[name][key] for key in keys] for name in models]
    return keys, rows


def _label(key: str, entries: Sequence[LogEntry], labels: Mapping[str, Any] | None) -> Any:
    """Return the label of one input; raise if lines disagree about it."""
    if labels is not None:
        return labels.get(key)
    given = [entry for entry in entries if entry.label is not None]
    for entry in given[1:]:
        if entry.label != given[0].label:
            raise ValueError(f"{entry.place}: the label is not that of {given[0].place}.")
    return given[0].label if given else None


def _entry(
    place: str, content: Mapping[str, Any], prices: Mapping[str, Sequence[float]]
) -> LogEntry:
    """Return the entry of one line, whatever its form."""
    if "resps" in content:
        return _of_lm_eval(place, content)
    body = _response(content)
    if body is not None:
        return _of_response(place, content, body, prices)
    if "answer" not in content:
        raise ValueError(
            "its form is not known: it needs `answer`, a `response` with choices, `response_body`,"
            " or lm-eval's `resps`"
        )
    prompt = content.get("prompt", content.get("input", content.get("messages")))
    return LogEntry(
        place=place,
        key=_key(content, prompt),
        answer=Answer(content["answer"], **{k: content[k] for k in OWN if k in content}),
        model=content.get("model"),
        label=content.get("label"),
        seconds=_seconds(content),
        prompt=prompt,
    )


def _response(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the model's response in a log of a proxy; None if there is none."""
    body: Any = content.get("response_body", content.get("response"))
    if isinstance(body, str) and body.lstrip().startswith("{"):
        body = json.loads(body)
    if isinstance(body, Mapping) and isinstance(body.get("body"), Mapping):  # a batch of OpenAI's
        status = body.get("status_code", 200)
        if status != 200:
            raise ValueError(f"the request failed with status {status}")
        body = body["body"]
    if not isinstance(body, Mapping):
        return None
    if "choices" not in body:
        raise ValueError("its response has no `choices`: leave failed requests out")
    return body


def _of_response(
    place: str,
    content: Mapping[str, Any],
    body: Mapping[str, Any],
    prices: Mapping[str, Sequence[float]],
) -> LogEntry:
    request: Any = content.get("request_body", content.get("request", content))
    request = json.loads(request) if isinstance(request, str) else request
    asked = request if isinstance(request, Mapping) else {}
    model = content.get("model") or asked.get("model") or body.get("model")
    stated = content.get("response_cost", content.get("cost_usd", content.get("cost")))
    cost = usage_cost(body, prices.get(str(model)))
    if isinstance(stated, int | float) and not isinstance(stated, bool):
        cost = {"usd": float(stated), **cost}
    prompt = asked.get("messages", asked.get("prompt"))
    return LogEntry(
        place=place,
        key=_key(content, prompt),
        answer=answer_of_response(body, cost),
        model=None if model is None else str(model),
        label=content.get("label"),
        seconds=_seconds(content),
        prompt=prompt,
    )


def _of_lm_eval(place: str, content: Mapping[str, Any]) -> LogEntry:
    """Return an entry of lm-eval's log: log-likelihoods of the options, or a text."""
    replies = content["resps"]
    metrics = {k: checks.number(k, content[k]) for k in METRICS if k in content}
    target: Any = content.get("target")
    first = replies[0][0] if replies and replies[0] else None
    if isinstance(first, list | tuple) and len(replies) > 1:
        options = [checks.number("resps", float(reply[0][0])) for reply in replies]
        answer = Answer.of_distribution(np.asarray(options))
        target = int(target) if str(target).isdecimal() else target
    else:
        kept = content.get("filtered_resps") or [first]
        text = kept[0] if isinstance(kept, list) else kept
        answer = Answer(text if isinstance(text, str) else str(text))
    return LogEntry(
        place=place,
        key=f"doc {content['doc_id']}",
        answer=answer,
        model=content.get("model"),
        label=target,
        metrics=metrics,
    )


def _key(content: Mapping[str, Any], prompt: Any) -> str:
    """Return what an input is known by: its id, or a digest of its prompt.

    A proxy's own `id` is that of a request, which differs between models.
    """
    proxied = "response" in content or "response_body" in content
    for name in ("custom_id", "sample_id", "doc_id") if proxied else ("id", "custom_id", "doc_id"):
        if content.get(name) is not None:
            return str(content[name])
    if prompt is None:
        raise ValueError("it has neither an id (`id`, or `custom_id`) nor a prompt")
    return f"prompt {input_digest(prompt)}"


def _seconds(content: Mapping[str, Any]) -> float | None:
    """Return how long the answer took, if the line says so."""
    if isinstance(content.get("seconds"), int | float):
        return float(content["seconds"])
    start, end = content.get("startTime"), content.get("endTime")
    if isinstance(start, int | float) and isinstance(end, int | float) and end >= start:
        return float(end - start)
    latency = content.get("latency_ms", content.get("delay_ms"))
    return float(latency) / 1000 if isinstance(latency, int | float) else None
