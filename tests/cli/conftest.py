"""Runs commands in this process, in a folder of their own with records to try them on."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

import swiftsure as ss
from swiftsure.cascade.logs import read_logs, record_of_logs
from swiftsure.cli import main
from swiftsure.study.simulate import Population


@dataclass(frozen=True)
class Done:
    status: int
    out: str
    err: str


@pytest.fixture(scope="session")
def sample():
    return Population(n_exits=4, overconfidence=1.5).sample(800, 0)


@pytest.fixture(scope="session")
def record(sample):
    return ss.ExitRecord.from_logits(
        sample.logits, sample.labels, costs={"flops": [1e9, 2e9, 3e9, 5e9]}
    )


@pytest.fixture(scope="session")
def thresholds():
    """A record of thresholds; the last is too fast."""
    rng = np.random.default_rng(0)
    losses = np.clip(0.5 + 0.1 * rng.normal(size=(500, 5)) + np.linspace(0, 0.2, 5) ** 1.5, 0, 1)
    return ss.ThresholdRecord(
        np.linspace(1, 0.2, 5),
        losses={"rouge_l": losses},
        costs={"layers": np.linspace(24, 4, 5)},
    )


@pytest.fixture(scope="session")
def dials():
    """A record of two dials; which is best depends on the cost."""
    grid = ss.dial_grid(
        {"rollback": [1.0, 2.0], "fallback": [0.5, 0.2]}, {"rollback": 0.0, "fallback": 0.5}
    )
    risks, costs = np.array([0, 0.01, 0.02, 0.01, 0.02]), np.array([1, 0.8, 0.7, 0.5, 0.4])
    return ss.ThresholdRecord(
        dials=grid,
        inconsistencies={"bleu": (np.random.default_rng(0).random((600, 5)) < risks).astype(float)},
        costs={"passes": costs, "money": costs[[0, 3, 4, 1, 2]]},
    )


@pytest.fixture(scope="session")
def files(tmp_path_factory, sample, record, thresholds, dials):
    """Records in every format, written once."""
    folder = tmp_path_factory.mktemp("records")
    record.save(folder / "record.parquet")
    others = Population(n_exits=4, overconfidence=1.5).sample(800, 1)
    flops = {"flops": [1e9, 2e9, 3e9, 5e9]}
    pilot = ss.ExitRecord.from_logits(others.logits, others.labels, costs=flops)
    replace(pilot, ids=np.arange(800, 1600)).save(folder / "pilot.parquet")
    sizes = np.tile([4, 1, 3], 100)  # 300 users who sent 1, 3 or 4 of the 800 samples
    replace(record, groups=np.repeat(np.arange(300), sizes)).save(folder / "users.parquet")
    ss.ExitRecord.from_logits(sample.logits).save(folder / "pool.parquet")
    tenants = np.where(np.arange(800) < 300, "north", "south")
    replace(record, slices=tenants).save(folder / "tenants.parquet")
    for name, models in {"small": ["small"], "large": ["large"], "proxy": ["mini", "full"]}.items():
        lines = [
            {
                "id": n,
                "model": model,
                "answer": "yes",
                "confidence": 0.9,
                "cost": 1.0,
                "label": "yes",
            }
            for n in range(50)
            for model in models
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    entries, names = read_logs([folder / "proxy.jsonl"], ["mini", "full"])
    record_of_logs(entries, models=names).save(folder / "texts.parquet")
    right = np.random.default_rng(0).random(500) < 0.8
    for name in ("bf16", "int4"):  # logs of lm-evaluation-harness
        lines = [{"doc_id": k, "exact_match": float(each)} for k, each in enumerate(right)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    rows = [f"{k},{float(each)},{0.99 * each}" for k, each in enumerate(right)]
    (folder / "scores.csv").write_text("\n".join(["id,full,small", *rows]) + "\n")
    (folder / "done.csv").write_text(f"id,label\n7,{sample.labels[7]}\n300,\n")
    record.take(np.arange(20)).save(folder / "tiny.parquet")
    thresholds.save(folder / "thresholds.parquet")
    dials.save(folder / "dials.parquet")
    np.savez(folder / "logits.npz", logits=sample.logits, labels=sample.labels)
    np.savez(
        folder / "arrays.npz",
        **{
            "confidences": record.confidences["top1"],
            "losses.zero_one": record.losses["zero_one"],
            "inconsistencies.zero_one": record.inconsistencies["zero_one"],
            "costs.flops": record.costs["flops"],
        },
    )
    ss.calibrate(record, loss="zero_one", epsilon=0.05).save(folder / "deployed.json")
    (folder / "losses.jsonl").write_text('{"loss": 0, "exit": 0}\n' * 300 + '{"loss": 1}\n')
    return folder


@pytest.fixture
def folder(tmp_path, files, monkeypatch):
    """The current folder, with links to the records."""
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """Run `swiftsure` with some arguments."""

    def command(*arguments):
        monkeypatch.setattr("sys.argv", ["swiftsure", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return Done(ended.value.code or 0, shown.out, shown.err)

    return command


@pytest.fixture
def made(folder, files):
    """Name the files that a command left in the folder."""
    before = {path.name for path in files.iterdir()}

    def names():
        return {path.name for path in folder.iterdir()} - before

    return names
