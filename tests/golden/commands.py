"""What `swiftsure VERB --json` prints, for every verb that has it, on small files.

Like `cases`, this speaks the library's API and changes together with it; the names of the cases
stay.
"""

import json
import shlex
import shutil
import sys
from contextlib import chdir

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.golden import cases, runtimes

__all__ = ["COMMANDS", "printed", "write_files"]

VOLATILE = {
    *("metadata", "data", "model", "version", "checksum", "file", "folder", "address", "workers"),
    *("seconds", "images_per_second", "tokens_per_second", "times_faster"),
    "largest_difference",
}
"""Fields that change with the day, the version, the machine or the file's layout."""

NETWORK = """
import torch
from tests.torch.builders import inputs, labels, network
def build(): return network(n_exits=2)
def data(): return [(inputs(40, seed=1), labels(40)), (inputs(40, seed=2), labels(40))]
"""

COMMANDS = {
    "calibrate": [
        "calibrate record.parquet --loss zero_one --epsilon 0.05 -o policy.json",
    ],
    "calibrate_along_a_given_path": [
        "calibrate record.parquet --loss zero_one --epsilon 0.05 --path 0.95,0.9,0.8,0.7,0.6,0.5",
    ],
    "calibrate_several_risks": [
        "calibrate record.parquet --promise 'gap zero_one <= 0.05' "
        "--promise 'consistency brier <= 0.15' --promise 'cost flops <= 4.5'",
    ],
    "calibrate_a_tail": [
        "calibrate record.parquet --promise 'P(gap brier > 0.25) <= 0.1'",
    ],
    "calibrate_slices": [
        "calibrate slices.parquet --promise 'gap zero_one within each slice <= 0.1'",
    ],
    "calibrate_weights": [
        "convert slices.parquet -o weighted.parquet --weights north=1.5,south=0.5",
        "calibrate weighted.parquet --loss zero_one --epsilon 0.15",
    ],
    "calibrate_groups": [
        "convert groups.parquet -o counted.parquet --groups-average sample --max-group-size 4",
        "calibrate counted.parquet --loss zero_one --epsilon 0.15",
    ],
    "calibrate_dials": [
        "calibrate dials.parquet --risk consistency --loss exact_match --epsilon 0.05 "
        "--path learn:150",
    ],
    "calibrate_along_a_pilot": [
        "calibrate record.parquet --loss zero_one --epsilon 0.05 --path pilot.parquet",
    ],
    "calibrate_in_expectation": [
        "calibrate record.parquet --loss zero_one --control crc:method=ucb "
        "--epsilon 0.05 --rule top1:strict:min_exit=1",
    ],
    "calibrate_growing": [
        "calibrate pilot.parquet --loss zero_one --state growing.state --horizon 800 --epsilon 0.1",
        "calibrate other.parquet --loss zero_one --state growing.state --horizon 800 --epsilon 0.1",
    ],
    "calibrate_nothing": [
        "calibrate tiny.parquet --loss zero_one --epsilon 0.05",
    ],
    "evaluate": [
        "evaluate record.parquet --loss zero_one -n 200 --splits 4 --epsilons 0.05,0.1 "
        "--cost flops",
    ],
    "evaluate_labels": [
        "evaluate record.parquet --loss zero_one --controls ucb --labels 60 -n 300 "
        "--splits 4 --epsilons 0.1",
    ],
    "plan_a_promise": [
        "plan --epsilon 0.02 --disagreement 0.05",
    ],
    "plan_sizes": [
        "plan thresholds.parquet --loss rouge_l --epsilon 0.05 --cost layers",
    ],
    "plan_labels": [
        "plan record.parquet --labels 60 --epsilon 0.1",
    ],
    "plan_a_saving": [
        "plan record.parquet --loss zero_one --saving 0.4 --cost flops",
    ],
    "report": [
        "calibrate record.parquet --loss zero_one --epsilon 0.05 -o policy.json",
        "report record.parquet policy.json -o page.html",
    ],
    "monitor": [
        "monitor losses.jsonl --epsilon 0.05 --high 1 --low -1",
    ],
    "monitor_a_policy": [
        "calibrate record.parquet --loss zero_one --epsilon 0.05 -o policy.json",
        "monitor losses.jsonl --policy policy.json",
    ],
    "label_in_files": [
        "label unlabelled.parquet --budget 50 --write todo.csv",
        "label unlabelled.parquet --read done.csv -o labelled.parquet",
    ],
    "label_in_the_terminal": [
        "label unlabelled.parquet --epsilon 0.1 --budget 70 -o labelled.parquet",
    ],
    "record": [
        "record small.jsonl large.jsonl",
    ],
    "convert_a_record": [
        "convert arrays.npz -o converted.parquet",
    ],
    "simulate": [
        "simulate --n 300 --draws 6 --epsilon 0.05",
    ],
    "collect": [
        "collect --model golden_network:build --data golden_network:data --losses zero_one",
    ],
    "export": [
        "export made made/policy.json",
    ],
    "demo": [
        "demo --epsilon 0.02 --n 1000",
    ],
    "translate": [
        'translate "Ein Hund springt über einen Zaun."',
    ],
    "serve": [
        "serve --demo",
    ],
}
"""For each case, commands; of the last, what it prints is frozen."""


def write_files(folder):
    """Write the records, logs and modules that the commands read."""
    cases.exits().save(folder / "record.parquet", durable=False)
    cases.pilot().save(folder / "pilot.parquet", durable=False)
    cases.exits(300, 2, first_id=20_000).save(folder / "other.parquet", durable=False)
    cases.exits(30).save(folder / "tiny.parquet", durable=False)
    cases.grouped().save(folder / "groups.parquet", durable=False)
    cases.sliced().save(folder / "slices.parquet", durable=False)
    cases.generated().save(folder / "thresholds.parquet", durable=False)
    cases.dials().save(folder / "dials.parquet", durable=False)
    record, labels = cases.unlabelled()
    record.save(folder / "unlabelled.parquet", durable=False)
    wanted = record.needs_label("zero_one", budget=50).tolist()
    lines = ["id,label", *(f"{row},{labels[row]}" for row in wanted)]
    (folder / "done.csv").write_text("\n".join(lines) + "\n")
    whole = cases.exits()
    np.savez(
        folder / "arrays.npz",
        **{"confidences": whole.confidences["top1"], "losses.zero_one": whole.losses["zero_one"]},
    )
    losses = np.random.default_rng(0).random(800) < np.linspace(0, 0.4, 800)
    (folder / "losses.jsonl").write_text(
        "".join(
            json.dumps({"loss": int(loss), "exit": k % 4}) + "\n" for k, loss in enumerate(losses)
        )
    )
    for name, cost in {"small": 1.0, "large": 10.0}.items():
        wrong = name == "small"
        answers = [
            {
                "id": n,
                "answer": "no" if wrong and n % 10 == 0 else "yes",
                "confidence": 0.5 if wrong and n % 10 == 0 else 0.875,
                "cost": {"usd": cost},
                "label": "yes",
            }
            for n in range(100)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    (folder / "golden_network.py").write_text(NETWORK)


def printed(name, folder, monkeypatch):
    """Return the exit status of a case's last command, and what it printed as JSON."""
    from swiftsure.cli.app import app

    if name.startswith(("collect", "export", "demo", "translate")):
        pytest.importorskip("torch")
    if name == "export":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
        shutil.copytree(runtimes.exported()[0], folder / "made")
    if name == "translate":
        pytest.importorskip("transformers")
        pytest.importorskip("swiftsure_zoo")
    if name.startswith("serve"):
        pytest.importorskip("starlette")
        from swiftsure.serve import lifecycle

        monkeypatch.setattr(lifecycle, "run", lambda *_, **__: None)
    answers = None
    if name == "label_in_the_terminal":
        record, labels = cases.unlabelled()
        wanted = record.needs_label("zero_one")
        answers = "".join(f"{labels[row]}\n" for row in wanted)
    with chdir(folder), cases.drawing(name):
        for command in COMMANDS[name]:
            arguments = [*shlex.split(command), "--json"]
            done = CliRunner().invoke(app, arguments, input=answers, catch_exceptions=False)
    sys.modules.pop("golden_network", None)
    return {"status": done.exit_code, "printed": lasting(json.loads(done.stdout))}


def lasting(value):
    """Return what was printed, without the fields that are volatile or null."""
    if isinstance(value, dict):
        return {
            key: lasting(each)
            for key, each in value.items()
            if key not in VOLATILE and each is not None and each != {}
        }
    return [lasting(each) for each in value] if isinstance(value, list) else value
