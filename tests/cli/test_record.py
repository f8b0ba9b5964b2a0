"""`swiftsure record`."""

import json

import swiftsure as ss


def write(path, lines):
    path.write_text("\n".join(json.dumps(each) for each in lines) + "\n")


def lines(wrong, cost):
    return [
        {
            "id": n,
            "answer": "no" if wrong and n % 10 == 0 else "yes",
            "confidence": 0.4 if wrong and n % 10 == 0 else 0.9,
            "cost": {"usd": cost},
            "label": "yes",
        }
        for n in range(200)
    ]


def test_logs_become_a_record(run, tmp_path):
    write(tmp_path / "cheap.jsonl", lines(True, 1.0))
    write(tmp_path / "dear.jsonl", lines(False, 9.0)[1:])
    done = run("record", "cheap.jsonl", "dear.jsonl", "-o", "pair.parquet", "--json")
    assert (done.status, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["samples"], found["left_out"]) == (199, 1)
    assert found["models"][1] == {"model": "dear", "mean exact_match": 0.0, "usd alone": 9.0}
    record = ss.ExitRecord.load(tmp_path / "pair.parquet")
    assert record.full_costs["usd"].tolist() == [9.0] * 199
    done = run("calibrate", "pair.parquet", "--epsilon", "0.05")
    assert done.status == 0
    assert "of the usd" in done.out


def test_one_log_of_several_models_and_labels_in_a_file(run, tmp_path):
    all_lines = [{**each, "model": "s", "label": None} for each in lines(True, 1.0)]
    all_lines += [{**each, "model": "l", "label": None} for each in lines(False, 9.0)]
    write(tmp_path / "log.jsonl", all_lines)
    write(tmp_path / "labels.jsonl", [{"id": n, "label": "yes"} for n in range(200)])
    done = run(
        "record", "log.jsonl", "--models", "s,l", "--labels", "labels.jsonl", "-o", "p.parquet"
    )
    assert done.status == 0
    assert "mean exact_match" in done.out
    done = run("record", "log.jsonl", "-o", "p.parquet")
    assert done.status == 2
    assert "--models" in done.err


def test_errors_name_the_line(run, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    write(tmp_path / "b.jsonl", lines(False, 1.0))
    done = run("record", "a.jsonl", "b.jsonl", "-o", "p.parquet")
    assert done.status == 2
    assert "a.jsonl, line 1: its form is not known" in done.err
    assert run("record", "b.jsonl", "c.jsonl", "-o", "p.parquet").status == 2
    done = run("record", "b.jsonl", "--models", "a,b", "--prices", "x", "-o", "p.parquet")
    assert "MODEL=INPUT,OUTPUT" in done.err
