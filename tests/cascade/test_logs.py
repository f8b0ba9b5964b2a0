"""Logs as records: own lines, proxies, lm-eval."""

import json
import math

import numpy as np
import pytest

from swiftsure.cascade.logs import read_log, record_of_logs


def write(path, lines):
    path.write_text("\n".join(json.dumps(each) for each in lines) + "\n")
    return path


def response(text, p):
    token = {"token": text, "logprob": math.log(p), "top_logprobs": []}
    return {
        "model": "m-2026",
        "choices": [{"message": {"content": text}, "logprobs": {"content": [token]}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10},
    }


ASKED = {"messages": [{"role": "user", "content": "2 + 2?"}]}
BODY = response("4", 0.5)


@pytest.mark.parametrize(
    "line",
    [
        {
            "model": "m",
            "prompt": "2 + 2?",
            "answer": "4",
            "logprobs": [math.log(0.5)],
            "cost": {"usd": 0.25},
            "seconds": 2.0,
        },
        {
            "model": "m",
            **ASKED,
            "response": BODY,
            "response_cost": 0.25,
            "startTime": 1.0,
            "endTime": 3.0,
            "id": "chatcmpl-1",
        },
        {"request": {"model": "m", **ASKED}, "response": BODY, "cost": 0.25, "latency_ms": 2000},
        {
            "request_body": {"model": "m", **ASKED},
            "response_body": json.dumps(BODY),
            "cost_usd": 0.25,
            "delay_ms": 2000,
            "request_id": "1",
        },
        {
            "model": "m",
            "custom_id": "q",
            "response": {"status_code": 200, "body": BODY},
            "cost": 0.25,
            "seconds": 2,
        },
    ],
    ids=["own", "litellm", "request and response", "helicone", "batch"],
)
def test_forms_of_lines(tmp_path, line):
    (entry,) = read_log(write(tmp_path / "log.jsonl", [line]))
    assert (entry.model, entry.answer.answer, entry.seconds) == ("m", "4", 2.0)
    assert entry.answer.cost["usd"] == 0.25
    assert entry.answer.logprobs == (pytest.approx(math.log(0.5)),)


def test_a_record_of_a_proxys_log(tmp_path):
    lines = []
    for n in range(60):
        asked = {"messages": [{"role": "user", "content": f"{n} + 1?"}]}
        lines.append(
            {"model": "large", **asked, "response": response(str(n + 1), 0.9), "label": str(n + 1)}
        )
        lines.append(
            {
                "model": "small",
                **asked,
                "response": response(str(n + (n % 5 > 0)), 0.9 if n % 5 else 0.4),
            }
        )
    path = write(tmp_path / "log.jsonl", [*lines, {"model": "other", **ASKED, "response": BODY}])
    entries = list(read_log(path, {"small": (1.0, 2.0), "large": (10.0, 20.0)}))
    record = record_of_logs([e for e in entries if e.model != "other"], models=["small", "large"])
    assert record.n == 60
    assert record.losses["exact_match"].mean(axis=0).tolist() == [pytest.approx(0.2), 0.0]
    np.testing.assert_allclose(record.costs["usd"][0], [120e-6, 1320e-6])
    np.testing.assert_allclose(record.full_costs["usd"], 1200e-6)


def test_lm_eval_samples(tmp_path):
    def choice(doc, values, target):
        return {
            "doc_id": doc,
            "target": target,
            "resps": [[[str(v), "False"]] for v in values],
            "filtered_resps": [[str(v), "False"] for v in values],
            "acc": float(np.argmax(values) == target),
        }

    small = write(tmp_path / "s.jsonl", [choice(0, [-1.0, -2.0], 0), choice(1, [-1.0, -1.5], 1)])
    large = write(tmp_path / "l.jsonl", [choice(1, [-3.0, -1.0], 1), choice(0, [-1.0, -9.0], 0)])
    entries = [
        entry.__class__(**{**vars(entry), "model": name})
        for name, path in (("s", small), ("l", large))
        for entry in read_log(path)
    ]
    record = record_of_logs(entries, models=["s", "l"])
    assert record.losses["lm_eval_acc"].tolist() == [[0, 0], [1, 0]]
    assert record.confidences["confidence"][0, 0] == pytest.approx(1 / (1 + math.exp(-1)), abs=1e-6)
    again = record_of_logs(entries, models=["s", "l"], losses="zero_one")
    assert again.losses["zero_one"].tolist() == [[0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "log.jsonl, line 2: Expecting property name"),
        ("[1]", "line 2: it is not an object"),
        ('{"prompt": "a"}', "line 2: its form is not known"),
        ('{"answer": "a"}', "line 2: it has neither an id"),
        (
            '{"id": "a", "answer": "a", "confidence": 3}',
            r"line 2: `confidence` must be in \[0, 1\]",
        ),
        ('{"id": "a", "response": {"error": 1}}', "line 2: its response has no `choices`"),
        (
            '{"custom_id": "a", "response": {"choices": []}}',
            "line 2: The response is not an answer",
        ),
        ('{"resps": [["a"]]}', "line 2: no 'doc_id'"),
        (
            '{"custom_id": "a", "response": {"status_code": 500, "body": {}}}',
            "failed with status 500",
        ),
    ],
)
def test_errors_name_the_line(tmp_path, line, message):
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"id": "q", "answer": "a", "confidence": 1}) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        list(read_log(path))


def test_lines_that_do_not_fit_together(tmp_path):
    path = write(tmp_path / "log.jsonl", [{"id": "q", "model": "s", "answer": "a"}] * 2)
    with pytest.raises(ValueError, match=r"line 2: s answered this input already, in .* line 1"):
        record_of_logs(list(read_log(path)), models=["s", "l"])
    path = write(
        tmp_path / "log.jsonl",
        [{"id": "q", "model": m, "answer": "a", "confidence": 1, "label": m} for m in "sl"],
    )
    entries = list(read_log(path))
    with pytest.raises(ValueError, match="line 2: the label is not that of"):
        record_of_logs(entries, models=["s", "l"])
    with pytest.raises(ValueError, match="no line is of 'x'; the log has: l, s"):
        record_of_logs(entries, models=["s", "x"])
