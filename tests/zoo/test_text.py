"""Published files of CNN/DailyMail and SQuAD, small ones of their layout."""

import csv
import json

import pytest

from swiftsure_zoo import TextSample, cnn_dailymail, squad

ROWS = [
    {"id": "f1", "article": "(CNN) It rained.\nA lot.", "highlights": "Rain .\nMuch of it ."},
    {"id": "f2", "article": "x" * 200_000, "highlights": "Long, it was."},
]


def test_json_lines(tmp_path):
    path = tmp_path / "test.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    first, second = cnn_dailymail(path)
    assert first == TextSample(
        "f1", "summarize: (CNN) It rained.\nA lot.", ("Rain .\nMuch of it .",), "f1"
    )
    assert len(second.text) == 200_011


def test_csv(tmp_path):
    path = tmp_path / "test.csv"
    limit = csv.field_size_limit()
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["id", "article", "highlights"])
        writer.writeheader()
        writer.writerows(ROWS)
    assert [sample.id for sample in cnn_dailymail(path, prefix="")] == ["f1", "f2"]
    assert next(cnn_dailymail(path, prefix="")).text == ROWS[0]["article"]
    assert csv.field_size_limit() == limit


def test_stories(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.story").write_text(
            f"(CNN) -- Story {name}.\n\nGoes on.\n\n@highlight\n\nOne thing\n\n@highlight\n\nMore\n"
        )
    first, second = cnn_dailymail(tmp_path)
    assert (first.id, second.id) == ("a", "b")
    assert first.text == "summarize: (CNN) -- Story a. Goes on."
    assert first.references == ("One thing\nMore",)
    assert next(cnn_dailymail(tmp_path / "b.story")) == second


def squad_file(path, *questions):
    paragraphs = [{"context": "Paris is in France. ", "qas": list(questions)}]
    content = {"version": "1.1", "data": [{"title": "Paris", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(content))
    return path


def test_squad(tmp_path):
    answers = [{"text": each, "answer_start": 12} for each in ("France", "in France", "France")]
    path = squad_file(
        tmp_path / "dev-v1.1.json", {"id": "q1", "question": " Where is it?", "answers": answers}
    )
    (sample,) = squad(path)
    assert sample == TextSample(
        "q1",
        "question: Where is it? context: Paris is in France.",
        ("France", "in France"),
        "Paris",
    )


def test_questions_without_an_answer(tmp_path):
    plausible = [{"text": "France", "answer_start": 12}]
    path = squad_file(
        tmp_path / "dev-v2.0.json",
        {
            "id": "q2",
            "question": "Who?",
            "answers": [],
            "is_impossible": True,
            "plausible_answers": plausible,
        },
    )
    assert next(squad(path)).references == ("",)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"article": "x"}', "number 0, lacks highlights"),
        ("a.jsonl", "nothing", "line 1, is not JSON"),
        ("a.json", '[{"article": "x", "highlights": "y"}]', "line 1, is not a JSON object"),
        ("a.txt", "", "must be a .jsonl"),
    ],
)
def test_files_that_are_none(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        list(cnn_dailymail(path))


def test_articles_without_text(tmp_path):
    (tmp_path / "a.story").write_text("\n\n@highlight\n\nNothing happened.\n")
    (tmp_path / "b.story").write_text("It rained.\n\n@highlight\n\nRain.\n")
    assert [sample.id for sample in cnn_dailymail(tmp_path)] == ["b"]


def test_other_paths(tmp_path):
    with pytest.raises(ValueError, match="existing"):
        list(cnn_dailymail(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"no \.story files"):
        list(cnn_dailymail(tmp_path))
    path = tmp_path / "dev.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match="not a SQuAD file"):
        list(squad(path))
