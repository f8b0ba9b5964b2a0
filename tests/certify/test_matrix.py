"""Everything goes with everything: every promise, on every record, in every way.

A cell is "yes", or a refusal that `NOTES` explains. The table in docs/concepts/promises.md is made
here: `python -m tests.certify.test_matrix` writes it.
"""

import importlib
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import swiftsure as ss

DOCS = Path(__file__).parents[2] / "docs" / "concepts" / "promises.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"

PATH = (0.95, 0.8, 0.6, 0.4, 0.2)
N, DELTA = 240, 0.2

MEAN = ss.Promise("zero_one", epsilon=0.2)
EXITS = ss.Promise("zero_one", epsilon=0.3, among="exits")
COST = ss.CostPromise("flops", at_most=2.9)

PROMISES: dict[str, list[Any]] = {
    "mean gap": [MEAN],
    "consistency": [ss.Promise("brier", risk="consistency", epsilon=0.2)],
    "zero-bounded": [ss.Promise("zero_one", risk="zero-bounded gap", epsilon=0.2)],
    "tail": [ss.Promise("zero_one", above=0.5, epsilon=0.2)],
    "worst share": [ss.Promise("zero_one", worst=0.5, epsilon=0.6)],
    "among exits": [EXITS],
    "within slices": [replace(MEAN, within="slices")],
    "within each slice": [replace(MEAN, within="each slice")],
    "mean + cost": [MEAN, COST],
    "mean + tail": [MEAN, ss.Promise("zero_one", above=0.5, epsilon=0.2)],
    "exits + mean": [EXITS, MEAN],
}
"""Promises by the name of their row."""


@cache
def _outcome(seed: int) -> tuple[Any, Any]:
    """Logits of three exits that are nearly always right, and labels."""
    rng = np.random.default_rng([seed, 7])
    labels = rng.integers(5, size=N)
    signal = np.eye(5)[labels][:, None] * np.array([4.5, 5.5, 6.0])[:, None]
    return signal + rng.normal(size=(N, 3, 5)), labels


@cache
def _plain(seed: int = 0) -> Any:
    logits, labels = _outcome(seed)
    record = ss.ExitRecord.from_logits(logits, labels, costs={"flops": [1.0, 2.0, 3.0]})
    slices = np.where(np.arange(N) % 2, "night", "day")
    # Numbers of samples are their ids, so that a labeller finds them.
    return replace(record, order=seed, has_ids=True, ids=np.arange(N) + seed * N).sliced(slices)


def _grouped(record: Any, average: str) -> Any:
    largest = 2 if average == "sample" else None
    groups = np.arange(record.n) // 2 + int(record.ids[0])
    # The slices of a group differ, as those of one user's requests do.
    return record.grouped(groups, average=average, max_size=largest)


def _weighted(record: Any) -> Any:
    return record.weighted({"night": 1.4, "day": 0.6}, max_weight=1.4)


def _few_labels(record: Any) -> Any:
    """Labels of most samples, and of all on which the exits agree."""
    known = np.arange(record.n) % 20 != 19
    agree = (record.predictions == record.predictions[:, -1:]).all(axis=1)
    losses = np.where((known | agree)[:, None], record.losses["zero_one"], np.nan)
    return replace(record, losses={"zero_one": losses})


RECORDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda record: record,
    "groups": lambda record: _grouped(record, "group"),
    "groups, by sample": lambda record: _grouped(record, "sample"),
    "weights": _weighted,
    "weights, groups": lambda record: _weighted(_grouped(record, "sample")),
    "finite population": lambda record: record.drawn_from(5000),
    'labels: "stop"': _few_labels,
    'labels: "worst"': _few_labels,
    "labels: Ask": _few_labels,
}
"""What a record says of its draw, by the name of the column. All have slices."""


def labeller(ids: Any) -> list[int]:
    return [int(_outcome(int(each) // N)[1][int(each) % N]) for each in ids]


@dataclass(frozen=True)
class Case:
    """One promise on one record."""

    promise: str
    record: str

    def made(self, seed: int = 0) -> Any:
        """The record, or another sample of its kind."""
        return RECORDS[self.record](_plain(seed))

    @property
    def request(self) -> ss.Calibration:
        missing: Any = "raise"
        if self.record.startswith("labels"):
            word = self.record.removeprefix("labels: ").strip('"')
            missing = ss.Ask(labeller) if word == "Ask" else word
        return ss.Calibration(PROMISES[self.promise], delta=DELTA, path=PATH, missing=missing)

    @property
    def policy(self) -> Any:
        return _policy(self)


@cache
def _policy(case: Case) -> Any:
    return case.request.run(case.made())


def calibrates(case: Case) -> None:
    assert not case.policy.runs_full_model, "the test should certify something"


def saves(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.json"
        case.policy.save(file)
        assert type(case.policy).load(file) == case.policy
        record = case.made()
        record.save(Path(folder) / "record.parquet")
        again = case.request.run(ss.ExitRecord.load(Path(folder) / "record.parquet"))
        assert again == case.policy


def runs_again(case: Case) -> None:
    first = next(iter(case.policy.policies.values())) if _sliced(case) else case.policy
    assert first.calibration == case.request
    assert first.calibration.run(case.made()) == case.policy


def evaluates_policy(case: Case) -> None:
    other = RECORDS[case.record](_plain(1))
    if case.record.startswith("labels"):
        other = _plain(1)
    found = case.policy.evaluate(other)
    for each in found.values() if _sliced(case) else [found]:
        assert len(each.risks) == len(case.request.risks)
        assert np.isfinite(each.risks).all()
        assert 0 <= each.savings["flops"] < 1


def evaluates_request(case: Case) -> None:
    study = case.request.evaluate(case.made(), n_calibration=0.7, splits=2, draws=2, progress=False)
    assert np.isfinite(study.test_risk).all()


def plans(case: Case) -> None:
    case.request.plan(case.made(), sizes=[60], draws=2, progress=False)


def grows(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "growth.jsonl"
        growing = case.request.start(horizon=2 * N, state=state)
        for seed in (0, 1):
            growing.update(case.made(seed))
        policy = growing.policy()
        again = case.request.start(horizon=2 * N, state=state)
        assert again.policy() == policy
        assert not policy.runs_full_model


def reports(case: Case) -> None:
    found = importlib.import_module("swiftsure.report")
    for one in case.policy.policies.values() if _sliced(case) else [case.policy]:
        found.policy_page(case.made(), one)


def monitors(case: Case) -> None:
    one = case.policy
    if _sliced(case):
        one = next(iter(case.policy.policies.values()))
    for number, promise in enumerate(one.certificate.promises):
        monitor = ss.Monitor.from_policy(one, number=number)
        assert monitor.epsilon == promise.epsilon


def reads_text(case: Case) -> None:
    """The command line takes each promise as a text, and the rest from the record's file."""
    found = importlib.import_module("swiftsure.cli.promises")
    for promise in case.request.promises:
        assert found.parse_promise(found.promise_text(promise)) == promise


def _sliced(case: Case) -> bool:
    return "each slice" in case.promise


WAYS: dict[str, Callable[[Case], None]] = {
    "calibrate": calibrates,
    "file": saves,
    "again": runs_again,
    "policy.evaluate": evaluates_policy,
    "evaluate": evaluates_request,
    "plan": plans,
    "grow": grows,
    "report": reports,
    "monitor": monitors,
    "command line": reads_text,
}


@dataclass(frozen=True)
class Note:
    """Why some cells are refused: words of the error, and a sentence for the docs."""

    ways: tuple[str, ...]
    error: str
    sentence: str


NOTES = (
    Note(
        ("calibrate",),
        "no test here of a weighted or restricted mean",
        "There is no test of a restricted mean, a worst share or a cost for samples drawn without"
        " replacement from a finite population.",
    ),
    Note(
        ("grow",),
        "bets without replacement need their number",
        "It cannot grow: bets without replacement need the number of samples beforehand.",
    ),
    Note(
        ("grow",),
        "which labels are missing must not stop its bets",
        'It cannot grow: a bet must see every sample. Use `missing="worst"`, or ask beforehand.',
    ),
    Note(
        ("evaluate", "plan"),
        "would ask again in each split|cannot be planned",
        "It cannot be evaluated or planned on repeated samples, for which nobody would answer: use"
        ' `missing="stop"` with the labels that are known.',
    ),
    Note(
        ("monitor",),
        "A worst share cannot be watched",
        "It cannot be monitored: the mean of t + (loss − t)⁺ / share is above it for nearly"
        " every t, so its alarm would show nothing. Watch a tail.",
    ),
    Note(
        ("grow",),
        "A CostPromise has no test here that is valid at every moment",
        "It cannot grow: costs are tested from the fast end, whose bets were not kept.",
    ),
    Note(
        ("grow",),
        "needs a calibration of its own in each slice",
        "It grows slice by slice: start a calibration for each of G slices, with δ / G.",
    ),
)


def refusals(case: Case, missing: tuple[str, ...] = ()) -> list[int]:
    """Return the numbers of the notes that explain what a cell refuses; raise for anything else."""
    found = []
    for way, attempt in WAYS.items():
        if way in missing:
            continue
        said = refusal(case, attempt)
        if said is None:
            continue
        known = [k for k, each in enumerate(NOTES) if re.search(each.error, said)]
        if not known or way not in NOTES[known[0]].ways:
            raise AssertionError(f"{case.promise} x {case.record}, {way}: {said}")
        found += known
        if way == "calibrate":
            break
    return sorted(set(found))


def refusal(case: Case, attempt: Callable[[Case], None]) -> str | None:
    """Return what an attempt refuses with; None if it does not."""
    try:
        attempt(case)
    except ValueError as error:
        return str(error)
    return None


def unbuilt() -> tuple[str, ...]:
    """Return the ways whose modules cannot be imported."""
    missing = []
    for way, module in {
        "report": "swiftsure.report",
        "command line": "swiftsure.cli.promises",
    }.items():
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(way)
    return tuple(missing)


@cache
def row(promise: str) -> tuple[tuple[int, ...], ...]:
    missing = unbuilt()
    return tuple(tuple(refusals(Case(promise, record), missing)) for record in RECORDS)


def table() -> str:
    """Return the table of the docs, and the notes under it, as Markdown."""
    digits = str.maketrans("123456789", "¹²³⁴⁵⁶⁷⁸⁹")
    lines = [
        "| | " + " | ".join(RECORDS) + " |",
        "|---|" + "---|" * len(RECORDS),
    ]
    for promise in PROMISES:
        cells = [
            ("no" if 0 in found else "yes") + " ".join(str(k + 1).translate(digits) for k in found)
            for found in row(promise)
        ]
        lines.append(f"| **{promise}** | " + " | ".join(cells) + " |")
    notes = [f"{k + 1}. {each.sentence}" for k, each in enumerate(NOTES)]
    return "\n".join([*lines, "", *notes])


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_goes_with_every_record(promise):
    """Whatever is refused is explained, by one of the theorems that are missing."""
    found = row(promise)
    assert len(found) == len(RECORDS)
    assert not any(
        0 in each for name, each in zip(RECORDS, found, strict=True) if "finite" not in name
    )


def test_the_docs_show_what_goes_with_what():
    text = DOCS.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == table()


if __name__ == "__main__":
    before, rest = DOCS.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    DOCS.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")
